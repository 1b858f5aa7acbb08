"""What the pages take as given, small: run files, data, and runs that have been trained."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import yaml

from tests.documents import ROOT
from tests.e2e.doc_terminal import BINS, Terminal

ONE_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
# Stands where pip would be. All that the pages install is here, which is what it looks at: there is
# no index, and nothing may change the environment that the tests run in.
PIP = """\
import re, sys
from importlib.metadata import requires, version
from packaging.requirements import Requirement

verb, *words = sys.argv[1:]
names = [word for word in words if word != "-e"]
match = re.fullmatch(r"(?:isles|\\.)(?:\\[(.+)\\])?", names[0])
if verb != "install" or len(names) != 1 or match is None:
    sys.exit(f"not a line of the pages: {sys.argv[1:]}")
if "-e" in words and not open("pyproject.toml").read().count('name = "isles"'):
    sys.exit("this is no clone of isles")
for extra in ["", *(match[1] or "").split(",")]:
    for needed in map(Requirement, requires("isles")):
        if needed.marker is None or needed.marker.evaluate({"extra": extra}):
            if not needed.specifier.contains(version(needed.name), prereleases=True):
                sys.exit(f"{needed} is not here, but {version(needed.name)}")
"""


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
        model = self.home / "tiny"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(ONE_MODEL))
        rng = random.Random(0)
        vocabulary = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 7))) for _ in range(200)]

        def text() -> str:
            return " ".join(rng.choices(vocabulary, k=12))

        def turns() -> list[dict[str, str]]:
            return [{"role": role, "content": text()} for role in ("user", "assistant")]

        rows = [{"messages": turns()} for _ in range(40)]
        lines = "".join(f"{json.dumps(row)}\n" for row in rows)
        (self.home / "chats.jsonl").write_text(lines)
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
