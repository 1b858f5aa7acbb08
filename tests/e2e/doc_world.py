"""What the pages take as given, small: a terminal, run files, data, and trained runs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from tests.documents import ROOT
from tests.e2e.typed import Command
from tests.lab.home import write_inputs

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
    """A shell in a folder.

    Args:
        folder: where it begins; it need not be there yet.
        home: of the user, with `bin` first on its PATH.
        name: another for each terminal of a home.
    """

    def __init__(self, folder: Path, home: Path, name: str) -> None:
        self.folder = folder
        self._state = home / "state" / name
        self._state.mkdir(parents=True, exist_ok=True)
        (self._state / "cwd").write_text(str(folder))
        environ = {
            "HOME": home,
            "PATH": f"{home / 'bin'}:{BINS}:{os.environ['PATH']}",
            "STATE": self._state,
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
        self.folder.mkdir(parents=True, exist_ok=True)
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
    """A home folder of its own, and runs that are made when a page first needs them.

    Args:
        home: an empty folder.
    """

    def __init__(self, home: Path) -> None:
        self.home = home
        self.terminal = Terminal(home / "work", home, "work")
        self._write_data()

    def _write_data(self) -> None:
        write_inputs(self.home)
        config = self.home / "tiny" / "config.json"
        config.write_text(config.read_text().replace("128", "256"))  # longer texts are generated
        with (self.home / "chats.jsonl").open("w") as stream:
            for n in range(40):
                turn = (("user", f"What follows {n}?"), ("assistant", f"{n + 1} follows."))
                messages = [{"role": role, "content": text} for role, text in turn]
                stream.write(f"{json.dumps({'messages': messages})}\n")
        bins = self.home / "bin"
        bins.mkdir()
        (bins / "pip").write_text(f"#!{BINS / 'python'}\n{PIP}")
        (bins / "pip").chmod(0o755)

    def clone(self, folder: Path) -> None:
        """A folder with what of a clone the pages look at, and a run file."""
        folder.mkdir(parents=True)
        unlike_git = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "examples", folder / "examples", symlinks=True, ignore=unlike_git)
        shutil.copy(ROOT / "pyproject.toml", folder)
        (folder / ".venv").symlink_to(BINS.parent)
        self.run_file(folder / "run.yaml")

    def run_file(self, path: Path, **sections: dict[str, Any]) -> None:
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
        for name, section in sections.items():
            content[name] = {**content[name], **section} if section else {}
        path.write_text(yaml.safe_dump(content, sort_keys=False))

    def shrink(self, path: Path) -> None:
        """A run file of `isles init`, with a model, data and a length for two cores."""
        content = yaml.safe_load(path.read_text())
        is_tuned = content["model"]["init"] == "pretrained"
        model = self.finished() / "model" if is_tuned else self.home / "tiny"
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

    def finished(self) -> Path:
        """A finished run, with its model."""
        found = self.terminal.folder / "runs" / "first-1"
        if not (found / "model").is_dir():
            self._begin()
            self.terminal.must("isles train run.yaml")
        return found

    def stopped(self) -> Path:
        """A run that was stopped, and saved."""
        if not self._stopped():
            self._begin()
            self.run_file(self.terminal.folder / "run.yaml", training={"max_steps": 100_000})
            for line in ("train run.yaml --resume no --detach", "logs -f", "stop"):
                self.terminal.must(f"isles {line}")
        return self._stopped()[0]

    def _stopped(self) -> list[Path]:
        outcomes = self.terminal.folder.glob("runs/first-*/attempts/001/outcome.json")
        found = {path.parents[2]: json.loads(path.read_text()) for path in outcomes}
        return [run for run, end in found.items() if end["state"] == "stopped" and end["step"]]

    def _begin(self) -> None:
        if not self.terminal.folder.joinpath("run.yaml").exists():
            self.clone(self.terminal.folder)
