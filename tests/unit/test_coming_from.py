"""docs/coming-from.md says what isles says: its tables, its commands, its keys."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from isles.cli import app, main
from isles.config import keys
from isles.config.issues import alias_keys, find_alias
from isles.errors import ExitCode

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "coming-from.md").read_text(encoding="utf-8")
WRITTEN = re.compile(r"<!-- (\w+): written by .*?-->\n(.*?)<!-- \1: end -->", re.S)
TOOLS = ("Accelerate", "HF Trainer", "axolotl", "torchrun", "OpenDiLoCo")


def test_the_tables_are_those_that_isles_reads() -> None:
    script = DOCS / "make_coming_from.py"
    result = subprocess.run(
        [sys.executable, str(script), "--check"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr + f"run {script}"


def test_every_key_of_these_tools_has_a_row_that_says_the_same() -> None:
    """By the page alone: what stands in a row is what the error about that key says."""
    rows: dict[str, str] = {}
    for _, table in WRITTEN.findall(PAGE):
        for line in table.splitlines():
            cells = [cell.strip() for cell in line.strip("|").split(" | ")]
            if "`" in cells[0]:
                rows |= dict.fromkeys(re.findall(r"`([^`]+)`", cells[0]), " ".join(cells[1:]))
    wanted = {f.name: f for f in alias_keys().values() if set(TOOLS) & set(f.tools)}
    assert set(wanted) <= set(rows)
    for name, alias in wanted.items():
        found = find_alias(name.split("."))
        assert found == alias
        assert (alias.target or alias.note.replace("|", "\\|")) in rows[name], name


def test_the_commands_and_keys_of_the_page_exist() -> None:
    by_hand = WRITTEN.sub("", PAGE)
    verbs = {name for name in app if not name.startswith("-")}
    named = set(re.findall(r"`isles ([\w-]+)", by_hand))
    assert named <= verbs and len(named) >= 10
    known = {".".join(map(str, path)) for path in keys.all_paths()}
    sections = {key.split(".")[0] for key in known if "." in key} | {"launcher"}
    found = set()
    for key in re.findall(r"`([a-z_]+(?:\.\w+)+)\b", by_hand):
        first = key.split(".")[0]
        if first in sections and not key.endswith((".md", ".py", ".yaml", ".json")):
            found.add(f"clusters.0.{key}" if first == "launcher" else key)
    assert len(found) >= 25
    assert found <= known | {"clusters.0"}, found - known


def test_the_example_of_an_error_is_what_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (shown,) = re.findall(
        r"^```console\n\$ isles config show run\.yaml\n(.*?)^```", PAGE, re.M | re.S
    )
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: {name_or_path: llama-2m, init: scratch}\n"
        "sequence_len: 512\n"
        "data: {sources: [{path: python-docs}]}\n"
        "training: {max_steps: 5, gradient_accumulation_steps: 4, precision: bf16}\n"
    )
    assert main(["config", "show", str(path)]) == ExitCode.USER
    said = capsys.readouterr().err
    assert said.replace(f"{path}", "run.yaml") == shown
