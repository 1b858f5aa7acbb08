"""Write the tables of docs/coming-from.md from the names of other tools that isles knows.

Run it after a change of src/isles/config/aliases.yaml; tests/unit/test_docs.py compares.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path

from isles.config.issues import alias_keys, aliases

PAGE = Path(__file__).with_name("coming-from.md")
PARTS = {
    "accelerate": ("Accelerate", "HF Trainer"),
    "axolotl": ("axolotl",),
    "torchrun": ("torchrun",),
    "opendiloco": ("OpenDiLoCo",),
    "skypilot": ("SkyPilot",),
    "ray": ("Ray",),
    "oumi": ("Oumi",),
}
"""A part of the page, and the tools whose names stand in its tables."""


def main() -> int:
    """Write the page; with --check only compare. Returns the exit code."""
    old = PAGE.read_text(encoding="utf-8")
    new = with_tables(old)
    if "--check" in sys.argv[1:]:
        if old != new:
            sys.stderr.write(f"{PAGE} is not what {__file__} writes\n")
        return int(old != new)
    PAGE.write_text(new, encoding="utf-8")
    return 0


def with_tables(page: str) -> str:
    """A page with what stands between its marks written anew."""
    tables = {name: key_tables(tools) for name, tools in PARTS.items()}
    tables["values"] = value_table()
    for name, text in tables.items():
        begin, end = (
            f"<!-- {name}: written by docs/make_coming_from.py -->",
            f"<!-- {name}: end -->",
        )
        page, num = re.subn(
            rf"{re.escape(begin)}.*?{re.escape(end)}",
            lambda _, text=text, begin=begin, end=end: f"{begin}\n{text}\n{end}",  # type: ignore[misc]
            page,
            flags=re.S,
        )
        if num != 1:
            raise ValueError(f"the page has {num} places for {name}")
    return page


def key_tables(tools: Iterable[str]) -> str:
    """Keys that have a name here, then those that have none and why."""
    here: dict[tuple[str, str], list[str]] = {}
    nowhere: dict[str, list[str]] = {}
    for alias in alias_keys().values():
        if not set(tools) & set(alias.tools):
            continue
        if alias.target is None:
            nowhere.setdefault(alias.note, []).append(alias.name)
        else:
            here.setdefault((alias.target, alias.note), []).append(alias.name)
    lines = ["| there | here | to mind |", "|---|---|---|"]
    lines += [
        f"| {_names(names)} | `{target}` | {_cell(note)} |"
        for (target, note), names in here.items()
    ]
    lines += ["", "| there | no key here |", "|---|---|"]
    lines += [f"| {_names(names)} | {_cell(note)} |" for note, names in nowhere.items()]
    return "\n".join(lines)


def value_table() -> str:
    """Words for a value that mean another word here."""
    lines = ["| key | there | here |", "|---|---|---|"]
    for key, meanings in aliases()["values"].items():
        for meaning, words in meanings.items():
            lines.append(f"| `{key}` | {_names(words.split())} | `{meaning}` |")
    return "\n".join(lines)


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
