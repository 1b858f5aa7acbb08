"""The command blocks of the pages, typed line by line: each must do what its page says.

A block is typed here unless a comment before it says where it is seen to work (`<!-- seen: … -->`,
which tests/unit/test_docs.py looks into), or what it needs that is not here (`<!-- needs: …
-->`). What a page takes as given (a run file, a finished run) is small, and stands in `World`.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from itertools import groupby, takewhile
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.data import chat_rows, write_rows
from tests.documents import ALL_PAGES, ROOT, Block, blocks, typed_lines
from tests.e2e.typed import Command
from tests.lab.home import write_inputs
from tests.runs import nothing_left

BINS = Path(sys.executable).absolute().parent
# Commands that go on until Ctrl+C, and the text after which a reader has seen enough.
FOLLOWED = {"isles logs -f": "phase=training", "tail -f": "\n", "tensorboard ": "Press CTRL+C"}
# The folder and the variables outlive the line that sets them, as in a shell.
SHELL = """\
exec 2>&1
cd "$(cat "$STATE/cwd")" && [ ! -f "$STATE/env" ] || . "$STATE/env"
eval "$1"
code=$?
pwd > "$STATE/cwd"; export -p > "$STATE/env"
exit $code
"""
# In the place of pip: nothing is installed, as all that the pages install is here; there is no
# index, and nothing may change the environment that the tests run in.
PIP = """\
import re, sys
from importlib.metadata import metadata

match = re.fullmatch(r"install (?:-e )?(?:isles|\\.)(?:\\[(.+)\\])?", " ".join(sys.argv[1:]))
known = metadata("isles").get_all("Provides-Extra")
if match is None or (match[1] and set(match[1].split(",")) - set(known)):
    sys.exit(f"not a line of the pages: {sys.argv[1:]}")
"""


class Terminal:
    """A shell that begins in a folder; `bin` of the user's home is first on its PATH."""

    def __init__(self, folder: Path, home: Path) -> None:
        self.folder = folder
        state = Path(tempfile.mkdtemp(dir=home))
        (state / "cwd").write_text(str(folder))
        environ = {
            "HOME": home,
            "PATH": f"{home / 'bin'}:{BINS}:{os.environ['PATH']}",
            "STATE": state,
            "USER": "user",
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            # Whatever a page says: the environment of the tests stays as it is.
            "PIP_NO_INDEX": "1",
            "PYTHONUNBUFFERED": "1",
        }
        # Where the tests run in the background, Ctrl+C would be ignored.
        program = ("env", "-i", "--default-signal=INT", *(f"{k}={v}" for k, v in environ.items()))
        self._program = (*program, "bash", "-c", SHELL, "bash")

    def type(self, line: str) -> tuple[int, str]:
        """Type a line and wait for its end, or end it by Ctrl+C where it only shows something.

        Returns its exit code, and what it has printed.
        """
        seen = next((text for start, text in FOLLOWED.items() if line.startswith(start)), None)
        command = Command(line, cwd=self.folder, program=self._program)
        try:
            if seen is None:
                return command.end(), command.out
            command.until(lambda: seen in command.out)
            with suppress(ProcessLookupError):
                os.killpg(command.process.pid, signal.SIGINT)
            code = command.end()
            return 0 if code in (130, -signal.SIGINT) else code, command.out
        finally:
            command.kill()

    def must(self, line: str) -> None:
        """Type a line that must end well."""
        code, text = self.type(line)
        assert code == 0, f"$ {line}\n{text}\nexit code {code}"


class World:
    """A user's home folder, with a clone in which two runs have been made."""

    def __init__(self, home: Path) -> None:
        self.home = home
        write_inputs(self.home)
        config = self.home / "tiny" / "config.json"
        config.write_text(config.read_text().replace("128", "256"))  # longer texts are generated
        said = {f"What follows {n}?": f"{n + 1} follows." for n in range(40)}
        write_rows(self.home / "chats.jsonl", chat_rows(said))
        pip = self.home / "bin" / "pip"
        pip.parent.mkdir()
        pip.write_text(f"#!{BINS / 'python'}\n{PIP}")
        pip.chmod(0o755)
        clone = self.clone("work")
        terminal = Terminal(clone, home)
        terminal.must("isles train run.yaml")
        self.run_file(clone / "run.yaml", training={"max_steps": 100_000})
        for line in ("train run.yaml --resume no --detach", "logs -f", "stop"):
            terminal.must(f"isles {line}")
        self.finished, self.stopped = (clone / "runs" / name for name in ("first-1", "first-2"))

    def clone(self, name: str) -> Path:
        """A folder with what of a clone the pages look at, and a run file."""
        folder = self.home / name
        folder.mkdir()
        unlike_git = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "examples", folder / "examples", symlinks=True, ignore=unlike_git)
        shutil.copy(ROOT / "pyproject.toml", folder)
        (folder / ".venv").symlink_to(BINS.parent)
        self.run_file(folder / "run.yaml")
        return folder

    def run_file(self, path: Path, **sections: Any) -> None:
        """A run file that trains a model of 30 thousand parameters for some steps."""
        content: dict[str, Any] = {
            "name": "first",
            "model": {"name_or_path": str(self.home / "tiny"), "init": "scratch"},
            "tokenizer": {"train_vocab_size": 300, "chat_template": "chatml"},
            "data": {"sources": [{"path": "python-docs"}], "seq_length": 32},
            "training": {
                "max_steps": 20,
                "global_batch_size": 2,
                "learning_rate": 0.003,
                "precision": "32-true",
                "logging_steps": 5,
                "eval_steps": None,
            },
            "checkpoint": {"every_steps": None, "every_minutes": None},
            "track": ["jsonl"],
        }
        for name, value in sections.items():
            content[name] = {**content[name], **value} if name == "training" else value
        path.write_text(yaml.safe_dump(content, sort_keys=False))

    def shrink(self, path: Path) -> None:
        """A run file of `isles init`, with a model, data and a length for two cores."""
        content = yaml.safe_load(path.read_text())
        is_tuned = content["model"]["init"] == "pretrained"
        model = self.finished / "model" if is_tuned else self.home / "tiny"
        content["model"]["name_or_path"] = str(model)
        for source in content["data"]["sources"]:
            is_chat = source.get("type") == "chat"
            source["path"] = str(self.home / "chats.jsonl") if is_chat else "python-docs"
        content["data"]["seq_length"] = 64
        for key in ("num_train_epochs", "warmup_steps", "eval_steps"):
            content["training"].pop(key, None)
        content["training"] |= {"max_steps": 5, "global_batch_size": 2, "precision": "32-true"}
        content["track"] = ["jsonl"]
        path.write_text(yaml.safe_dump(content, sort_keys=False))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    home = tmp_path_factory.mktemp("home")
    with nothing_left(home):  # where a page failed, what it would have stopped further down
        yield World(home)


def is_typed(block: Block) -> bool:
    """Whether its lines are typed here."""
    return block.is_shell and not block.kind


TYPED = [
    str(page.relative_to(ROOT))
    for page in ALL_PAGES
    if not page.is_symlink() and any(map(is_typed, blocks(page)))
]
GIVEN = {
    "docs/quickstart.md": ["runs/quickstart-1"],
    "docs/stop-and-resume.md": ["runs/first-2"],
    "docs/troubleshooting.md": ["runs/RUN-1"],
    "docs/watching.md": ["runs/far-1", "runs/far-2"],
    "examples/home_lab/README.md": [
        "logs/runs/home-lab-1",
        "../../../Development/Projects/ai-ml-pipeline/ai-cluster/logs/runs/home-lab-1",
    ],
}
"""Where a page takes runs as given: all are finished, but for first-2, which was stopped."""


@pytest.mark.long
@pytest.mark.parametrize("name", TYPED)
def test_the_blocks_of_a_page(world: World, name: str) -> None:
    page = ROOT / name
    text = page.read_text(encoding="utf-8")
    folder = world.clone(f"{page.parent.name}-{page.stem}")
    if page.parent.parent.name == "examples" and "cd examples/" not in text:
        folder /= page.parent.relative_to(ROOT)  # where the page has it typed
    for place in GIVEN.get(name, ()):
        run = world.stopped if place.endswith("first-2") else world.finished
        shutil.copytree(run, folder / place, symlinks=True)
    if name == "docs/clusters.md":
        write_clusters(world, folder / "run.yaml")
    terminal = Terminal(folder, world.home)
    for block in blocks(page):
        if is_typed(block):
            for line in typed_lines(block):
                before(world, folder, line)
                code, said = terminal.type(line)
                fault = fault_of(code, said, expected_of(block, line))
                assert not fault, f"{name}:{block.line}\n$ {line}\n{said}\n{fault}"
                if line.startswith("isles init"):  # it has written a run file for a real model
                    world.shrink(folder / "run.yaml")
        elif block.language == "yaml" and block.kind != "not isles":
            # A whole run file, where the page has commands with its name.
            match = re.match(r"name: (\w+)\n", block.text)
            if match and f" {match[1]}.yaml" in text:
                (folder / f"{match[1]}.yaml").write_text(block.text)


def before(world: World, folder: Path, line: str) -> None:
    """What a line takes as given that comes about on another page, or by the reader's own hand."""
    if line.startswith("isles train run.yaml --detach"):
        # It is stopped further down, not to end by itself before, and its checkpoints are pushed.
        remote = {"every_steps": None, "every_minutes": None, "remote": str(folder / "remote")}
        world.run_file(folder / "run.yaml", training={"max_steps": 100_000}, checkpoint=remote)
    if line.startswith("isles init"):
        (folder / "run.yaml").unlink()
    if line.startswith("isles generate my-chat"):
        shutil.copytree(world.finished, folder / "runs" / "my-chat-1", symlinks=True)


def write_clusters(world: World, path: Path) -> None:
    """The run file of the page's two clusters, both on this machine."""
    here = {"launcher": {"kind": "local"}, "device": "cpu"}
    world.run_file(
        path,
        name="home",
        model={"name_or_path": str(world.finished / "model"), "init": "pretrained"},
        tokenizer={},
        training={"max_steps": 4},
        outer={"kind": "diloco", "sync_every": 2, "min_clusters": 2},
        clusters=[{"name": name, **here} for name in ("attic", "campus")],
    )


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
