"""Documentation that does not lie: links, commands, run files, and the generated reference."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from isles.cli import app
from isles.config.load import load_run_file
from tests.each import each

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
IDS = [page.name for page in PAGES]


def blocks(page: Path, *languages: str) -> list[str]:
    """The fenced blocks of a page in these languages."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
    return [text for language, text in found if language in languages]


@each("page", PAGES, ids=IDS)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), target


@each("page", PAGES, ids=IDS)
def test_commands_exist(page: Path) -> None:
    verbs = {name for name in app if not name.startswith("-")}
    for text in blocks(page, "sh", "console", "text"):
        for verb in re.findall(r"^(?:\$ )?isles ([\w-]+)", text, re.M):
            assert verb in verbs, verb


@each("page", PAGES, ids=IDS)
def test_run_files_load(page: Path, tmp_path: Path) -> None:
    for text in blocks(page, "yaml"):
        if re.search(r"^model:", text, re.M) and re.search(r"^training:", text, re.M):
            file = tmp_path / "run.yaml"
            file.write_text(text, encoding="utf-8")
            assert load_run_file(file).config.model.name_or_path in text


def test_the_reference_is_what_the_schema_says() -> None:
    script = ROOT / "docs" / "make_run_file.py"
    result = subprocess.run(
        [sys.executable, str(script), "--check"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_paths_named_in_the_architecture_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    for name in re.findall(r"`((?:tests|src)/[\w/.]+\.py)`", text):
        assert (ROOT / name).exists(), name
    for name in re.findall(
        r"`((?:config|run|launch|monitor|train|data|models|checkpoint|strategies|track)/\w+\.py)",
        text,
    ):
        assert (ROOT / "src" / "isles" / name).exists(), name
