"""A run for the pretend hosts, and what tests ask of them."""

from __future__ import annotations

import json
import os
import random
import select
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.deadline import DEADLINE_S
from tests.lab.hosts import Lab

ISLES = str(Path(sys.executable).with_name("isles"))
HOSTS = ("a1", "a2", "a3")


def write_run(lab: Lab, name: str, *, hosts: Sequence[Any] = HOSTS, **more: Any) -> Path:
    """A run file /shared/NAME.yaml that trains a tiny model; its path as this machine sees it.

    Args:
        lab: the hosts.
        name: of the run.
        hosts: of the ssh launcher.
        more: keys of the cluster; `training` and `output_dir` are the run's.
    """
    model = lab.shared / "tiny"
    if not model.exists():
        write_inputs(lab.shared)
    training = {
        "max_steps": 20,
        "global_batch_size": 12,
        "learning_rate": 0.001,
        "precision": "32-true",
        "logging_steps": 1,
        "eval_steps": None,
        **more.pop("training", {}),
    }
    content = {
        "name": name,
        "output_dir": more.pop("output_dir", "/shared/runs"),
        "model": {"name_or_path": "./tiny", "init": "scratch"},
        "tokenizer": {"train_vocab_size": 300},
        "data": {"sources": [{"path": "words.jsonl"}], "seq_length": 32, "packing": False},
        "training": training,
        "strategy": {"kind": "ddp"},
        "balance": "even",
        "checkpoint": {"every_steps": None, "every_minutes": None, "export_on_finish": False},
        "track": ["jsonl"],
        "clusters": [
            {"workdir": "/shared", "launcher": {"kind": "ssh", "hosts": list(hosts)}, **more}
        ],
    }
    path = lab.shared / f"{name}.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def isles(lab: Lab, *arguments: str, host: str = "ctl") -> tuple[int, str, float]:
    """Run one isles command in /shared of a host: its exit code, all it printed, seconds."""
    begun = time.monotonic()
    done = lab.run(
        host,
        ["bash", "-c", 'cd /shared && exec "$@"', "-", ISLES, *arguments],
        timeout_s=DEADLINE_S,
    )
    return done.returncode, done.stdout + done.stderr, time.monotonic() - begun


def sh(lab: Lab, host: str, text: str) -> str:
    """Run a line of bash on a host; it must succeed."""
    done = lab.run(host, ["bash", "-ec", text])
    assert done.returncode == 0, (text, done.stdout, done.stderr)
    return done.stdout


def until(
    condition: Callable[[], Any], what: str | Callable[[], str], deadline_s: float = DEADLINE_S
) -> Any:
    """Wait for something that a record or a process will show; else say what has not come."""
    now = time.monotonic()
    end = now + deadline_s
    while now < end:
        if found := condition():
            return found
        # As long as the look took: it must not take from others the time that they need.
        select.select([], [], [], min(1.0, max(0.05, time.monotonic() - now)))
        now = time.monotonic()
    text = what if isinstance(what, str) else what()
    raise AssertionError(f"not within {deadline_s:.0f} s: {text}")


def left(lab: Lab, hosts: Sequence[str] = HOSTS) -> list[str]:
    """Processes of isles on the hosts."""
    found = []
    for host in hosts:
        # The lab's own daemons name their files, in a folder whose name begins with isles as well.
        text = lab.run(host, ["ps", "-eo", "pid=,args="]).stdout.replace(str(lab.state), "")
        lines = [line for line in text.splitlines() if "isles" in line and " ps " not in line]
        found += [f"{host}: {line}" for line in lines]
    return found


def assert_nothing_left(lab: Lab, deadline_s: float = DEADLINE_S) -> None:
    """No process of isles stays on any host."""
    until(lambda: not left(lab), lambda: f"no process left, and there is {left(lab)}", deadline_s)


def write_inputs(folder: Path) -> None:
    """A tiny model, as a config.json, and a text."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "max_position_embeddings": 128,
        "attention_dropout": 0.0,
    }
    rng = random.Random(0)
    vocabulary = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 7))) for _ in range(200)]
    rows = [{"text": " ".join(rng.choices(vocabulary, k=rng.randint(1, 60)))} for _ in range(300)]
    (folder / "words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    staged = folder / f".tiny-{os.getpid()}"
    staged.mkdir()
    (staged / "config.json").write_text(json.dumps(config))
    staged.rename(folder / "tiny")
