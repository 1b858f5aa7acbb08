"""Write the tables of docs/coming-from-*.md from the names of other tools that isles knows.

Run it after a change of src/isles/config/aliases.yaml; tests/unit/test_docs.py compares.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from isles import __version__
from isles.config import keys
from isles.config.issues import Alias, alias_keys

DOCS = Path(__file__).parent
BEGIN, END = "<!-- written by docs/make_coming_from.py -->", "<!-- end -->"
TOOLS = {
    "accelerate": ("Accelerate", "HF Trainer"),
    "axolotl": ("axolotl",),
    "opendiloco": ("OpenDiLoCo",),
    "skypilot": ("SkyPilot",),
    "ray": ("Ray",),
    "oumi": ("Oumi",),
}
"""A page, and the tools whose names are in its table."""
MOST_NAMES = 2
"""Names that a reason shows."""


def main() -> int:
    """Write the pages; with --check only compare. Returns the exit code."""
    parts = {name: key_list(tools) for name, tools in TOOLS.items()}
    different = 0
    for name, text in parts.items():
        page = DOCS / f"coming-from-{name}.md"
        old = page.read_text(encoding="utf-8")
        head, begin, rest = old.partition(BEGIN)
        _, end, tail = rest.partition(END)
        if not begin or not end:
            raise ValueError(f"{page} has no place for its table")
        new = f"{head}{BEGIN}\n{text}\n{END}{tail}"
        if "--check" not in sys.argv[1:]:
            page.write_text(new, encoding="utf-8")
        elif old != new:
            sys.stderr.write(f"{page} is not what {__file__} writes\n")
            different += 1
    return int(different > 0)


def key_list(tools: Iterable[str]) -> str:
    """Keys with another name in isles, keys that only move, and keys that isles does not have."""
    renamed: dict[tuple[str, str], list[str]] = {}
    moved: dict[str, list[Alias]] = {}
    missing: dict[str, list[str]] = {}
    for alias in alias_keys().values():
        # docs/hivemind.md has the flags of OpenDiLoCo that begin with `hv`.
        if not set(tools) & set(alias.tools) or alias.name.startswith("hv"):
            continue
        if alias.target is None:
            missing.setdefault(alias.note, []).append(alias.name)
        elif _only_moves(alias):
            moved.setdefault(alias.target or "", []).append(alias)
        else:
            renamed.setdefault((alias.target, alias.note), []).append(alias.name)
    if len(moved) == 1:  # a list of one key would need more words than a row
        for alias in moved.popitem()[1]:
            renamed.setdefault((alias.target or "", ""), []).append(alias.name)
    return "\n".join((*_renamed(renamed), *_moved(moved), *_missing(missing))).strip()


def _only_moves(alias: Alias) -> bool:
    """Whether the isles name is the end of the name, such as `adapter.r` for `lora_r`."""
    last = (alias.target or "").rpartition(".")[2]
    return re.search(rf"(^|[._]){last}$", alias.name) is not None


def _renamed(found: dict[tuple[str, str], list[str]]) -> Iterator[str]:
    yield from ("| key | isles |", "|---|---|")
    for (target, note), names in found.items():
        shown = f" ({note})" if _says_more(note, target) else ""
        yield f"| {_names(names)} | `{target}`{shown} |"


def _says_more(note: str, target: str) -> bool:
    """Whether a note does not only list values of its key, as docs/run-file.md does."""
    node = keys.schema_at(tuple(int(part) if part == "0" else part for part in target.split(".")))
    assert node is not None, target
    values = {*keys.literals(node), *keys.literals(keys.items(node) or {})}
    words = set(re.findall(r"[\w-]+", note)) - {"a", "and", "list", "of", "one", "or"}
    return len(words) == 1 or not words <= values


def _moved(targets: Iterable[str]) -> Iterator[str]:
    if names := _names(targets):
        yield "\nOther keys differ only in their section or prefix. Their names in isles are:"
        yield f"{names}."


def _missing(found: dict[str, list[str]]) -> Iterator[str]:
    unsupported = f"isles {__version__} does not support this"
    reasons = {note: names for note, names in found.items() if not note.startswith(unsupported)}
    if reasons:
        yield "\nisles needs no key for these names:\n"
    for note, names in reasons.items():
        every = _names(names).split(", ")
        rest = f" and {len(every) - MOST_NAMES} more" if len(every) > MOST_NAMES + 1 else ""
        yield f"- {', '.join(every[:MOST_NAMES] if rest else every)}{rest}: {note}"
    if missing := {note: names for note, names in found.items() if note not in reasons}:
        texts = (
            _names(names)
            + note.removeprefix(unsupported).replace(": ", " (", 1)
            + ")" * (": " in note)
            for note, names in missing.items()
        )
        yield f"\nisles {__version__} does not support {', '.join(texts)}."


def _names(names: Iterable[str]) -> str:
    """Names between backticks, without names that end in another of them."""
    every = tuple(names)
    return ", ".join(
        f"`{name}`"
        for name in every
        if not any(re.search(rf"[._]{other}$", name) for other in every)
    )


if __name__ == "__main__":
    sys.exit(main())
