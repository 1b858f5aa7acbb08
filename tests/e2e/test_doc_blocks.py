"""The command blocks of the pages, typed line by line: each must do what its page says.

A block is typed here unless a comment before it says where it is seen to work (`<!-- seen: … -->`,
which tests/unit/test_docs.py looks into), or what it needs that is not here (`<!-- needs: …
-->`). What a page takes as given (a run file, a finished run) is small, and stands in doc_world.py.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from itertools import groupby, takewhile
from pathlib import Path

import pytest

from tests.documents import ALL_PAGES, ROOT, Block, blocks, typed_lines
from tests.e2e.doc_world import BINS, Terminal, World
from tests.runs import nothing_left

FIRST = "docs/commands.md"
"""The page whose runs others use."""


def pages() -> list[str]:
    """Pages with a block that is typed here."""
    found = [
        str(page.relative_to(ROOT))
        for page in ALL_PAGES
        if not page.is_symlink() and any(is_typed(block) for block in blocks(page))
    ]
    return sorted(found, key=lambda name: name != FIRST)


def is_typed(block: Block) -> bool:
    """Whether its lines are typed here."""
    return block.is_shell and not block.kind


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    home = tmp_path_factory.mktemp("home")
    with nothing_left(home):  # where a page failed, what it would have stopped further down
        yield World(home)


@pytest.mark.long
@pytest.mark.parametrize("name", pages())
def test_the_blocks_of_a_page(world: World, name: str) -> None:
    page = ROOT / name
    terminal = world.terminal if name == FIRST else terminal_of(world, page)
    GIVEN.get(name, lambda *_: None)(world, terminal.folder)
    for block in blocks(page):
        if is_typed(block):
            for line in typed_lines(block):
                before(world, terminal, line)
                code, text = terminal.type(line)
                fault = fault_of(code, text, expected_of(block, line))
                assert not fault, f"{name}:{block.line}\n$ {line}\n{text}\n{fault}"
                after(world, terminal, line)
        elif block.language == "yaml" and block.kind != "not isles":
            write_run_file(page, block, terminal.folder)


def terminal_of(world: World, page: Path) -> Terminal:
    """A terminal in a clone of its own; for an example's page in its folder, as the page says."""
    name = f"{page.parent.name}-{page.stem}"
    world.clone(world.home / name)
    is_inside = page.parent.parent.name == "examples" and "cd examples/" not in page.read_text()
    folder = page.parent.relative_to(ROOT) if is_inside else Path()
    return Terminal(world.home / name / folder, world.home, name)


def write_run_file(page: Path, block: Block, folder: Path) -> None:
    """A whole run file of a page, under its name, where the page has commands with that name."""
    match = re.match(r"name: (\w+)\n", block.text)
    if match and f" {match[1]}.yaml" in page.read_text(encoding="utf-8"):
        (folder / f"{match[1]}.yaml").write_text(block.text)


def copy_run(run: Path, folder: Path, name: str) -> None:
    """A run as if it had been trained in this folder, under this name."""
    shutil.copytree(run, folder / "runs" / name, symlinks=True)


def before(world: World, terminal: Terminal, line: str) -> None:
    """What a line takes as given that comes about on another page, or by the reader's own hand."""
    if line.startswith("isles train run.yaml --detach"):
        # It is stopped further down: it must not end by itself before.
        world.run_file(terminal.folder / "run.yaml", training={"max_steps": 100_000})
    if line.startswith("isles init"):
        (terminal.folder / "run.yaml").unlink()
    if line.startswith("isles generate my-chat"):
        copy_run(world.finished(), terminal.folder, "my-chat-1")


def after(world: World, terminal: Terminal, line: str) -> None:
    """`isles init` writes a run file for a real model, which is made small."""
    if line.startswith("isles init"):
        world.shrink(terminal.folder / "run.yaml")


def expected_of(block: Block, line: str) -> list[str]:
    """What a console block shows behind a line."""
    if block.language != "console":
        return []
    _, _, behind = block.text.partition(f"$ {line}\n")
    return list(takewhile(lambda shown: not shown.startswith("$ "), behind.splitlines()))


def fault_of(code: int, text: str, expected: list[str]) -> str:
    """What is not as the page says; empty: all of it is."""
    errors = [line for line in expected if line.startswith("error:")]
    if bool(code) != bool(errors):
        return f"exit code {code}"
    printed = text.splitlines()
    if errors:
        pattern = re.escape(errors[0]).replace("…", ".*")
        is_there = any(re.fullmatch(pattern, line) for line in printed)
        return "" if is_there else f"the page shows {errors[0]!r}"
    rest = iter(printed)
    for start, _ in groupby(map(first_words, expected)):
        if start.strip() and not any(line.startswith(start) for line in rest):
            return f"the page shows {start!r}"
    return ""


def first_words(line: str) -> str:
    """The words of a line before the first that has a figure in it, or stands for others."""
    found = []
    for word in re.findall(r"\s*\S+", line):
        if re.search(r"[\d…]", word):
            break
        found.append(word)
    return "".join(found)


@pytest.mark.long
def test_make_format(tmp_path: Path) -> None:
    """`make format`, in a clone where a file has the wrong form."""
    for name in ("src", "tests", "benchmarks", "examples", "docs", ".venv/bin"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    # An environment that has ruff alone, and is not installed anew: that would be ours.
    (tmp_path / ".venv" / "bin" / "ruff").symlink_to(BINS / "ruff")
    for stamp in (".train", ".installed"):
        (tmp_path / ".venv" / stamp).touch()
    file = tmp_path / "src" / "wrong.py"
    file.write_text("import sys\nimport os\nPATHS=( os.sep,sys.path )\n")
    Terminal(tmp_path, tmp_path, "format").must("make format")
    assert file.read_text() == "import os\nimport sys\n\nPATHS = (os.sep, sys.path)\n"


def given_first(world: World, folder: Path) -> None:
    if not folder.exists():
        world.clone(folder)


def given_clusters(world: World, folder: Path) -> None:
    """The page's two clusters, both on this machine."""
    model = {"name_or_path": str(world.finished() / "model"), "init": "pretrained"}
    world.run_file(folder / "run.yaml", model=model, tokenizer={}, training={"max_steps": 4})
    text = (folder / "run.yaml").read_text()
    here = "launcher: {kind: local}, device: cpu"
    clusters = f"[{{name: attic, {here}}}, {{name: campus, {here}}}]"
    outer = "{kind: diloco, sync_every: 2, min_clusters: 2}"
    text = text.replace("name: first", "name: home")
    (folder / "run.yaml").write_text(f"{text}outer: {outer}\nclusters: {clusters}\n")


def given_home_lab(world: World, folder: Path) -> None:
    """What the page's training has left in the project's folder, where the terminal stands."""
    logs = world.home / "Development/Projects/ai-ml-pipeline/ai-cluster/logs/runs"
    for root in (logs, folder / "logs" / "runs"):
        shutil.copytree(world.finished(), root / "home-lab-1", symlinks=True)


def given_quickstart(world: World, folder: Path) -> None:
    """The quickstart's run, and one that was stopped."""
    copy_run(world.finished(), folder, "quickstart-1")
    copy_run(world.stopped(), folder, "first-2")


def given_finished(*names: str) -> Callable[[World, Path], None]:
    """Finished runs of these names."""

    def give(world: World, folder: Path) -> None:
        for name in names:
            copy_run(world.finished(), folder, name)

    return give


GIVEN: dict[str, Callable[[World, Path], None]] = {
    FIRST: given_first,
    "docs/clusters.md": given_clusters,
    "docs/home-lab.md": given_home_lab,
    "docs/quickstart.md": given_quickstart,
    "docs/troubleshooting.md": given_finished("RUN-1"),
    "docs/watching.md": given_finished("far-1", "far-2"),
}
