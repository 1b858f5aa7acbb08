"""The trainer of the multi-cluster instructions: maps its flags onto a run file of isles.

Each process is a rank of isles, as under `torchrun -m isles.train run.yaml`; how several clusters
average is engine hivemind of isles. `python train_fsdp.py --help` lists the flags.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from multicluster_flags import FLAGS, Given, read_flags

from isles.config.load import Loaded, load_run_file
from isles.errors import ConfigError, ConfigErrors
from isles.run.env import read_rank_env

_NAME = "multicluster"
_C4 = "allenai/c4"
_C4_TINY = "PrimeIntellect/c4-tiny"
_EVERYWHERE, _HERE = "/ip4/0.0.0.0/tcp/0", "/ip4/127.0.0.1/tcp/0"
_LOOPBACK = ("/ip4/127.", "/ip6/::1/")
_WARMUP_STEPS = 1000
_SHORT_RUN_STEPS = 100


def main() -> int:
    """Train as the rank that torchrun's variables name; returns the exit code."""
    given = read_flags(sys.argv[1:])
    env = read_rank_env()
    if env.rank == 0:
        for note in notes(given):
            sys.stderr.write(f"note: {note}\n")
    from isles.train.__main__ import train_by_hand

    return train_by_hand(lambda: load(given), resume_of(given), env)


def resume_of(given: Given) -> str:
    """`auto`, `no`, or the path of a run directory or of a checkpoint in one."""
    asked = str(given["ckpt.resume"])
    return {"true": "auto", "false": "no"}.get(asked.lower(), asked)


def load(given: Given) -> Loaded:
    """The run file that the flags make; of each value, the flag that it came from.

    Raises:
        ConfigError, ConfigErrors: every issue, with the flag.
    """
    name = given["path-model"]
    is_missing = name.startswith((".", "/", "~")) and not Path(name).expanduser().is_dir()
    # Where only other hosts lack it, isles names them, once all ranks have met.
    if is_missing and read_rank_env().rank == 0:
        raise ConfigError(
            f"there is no folder {name}",
            where="--path-model",
            fix="`python make_llama_2m.py` makes ../tests/models/llama-2m-fresh; else give a "
            "folder with config.json and *.safetensors, or a Hugging Face id",
        )
    import torch

    content = run_file(given, has_gpu=torch.cuda.is_available())
    text = "# Written by train_fsdp.py from its flags.\n" + yaml.safe_dump(content, sort_keys=False)
    try:
        loaded = load_run_file(Path(_NAME), given["set"], text=text)
    except ConfigErrors as errors:
        raise ConfigErrors([_naming_flag(error, given) for error in errors.issues]) from None
    except ConfigError as error:
        raise _naming_flag(error, given) from None
    origins = {
        key: _flag_of(key, given) if origin.startswith(f"{_NAME}:") else origin
        for key, origin in loaded.origins.items()
    }
    return replace(loaded, origins=origins)


def _naming_flag(error: ConfigError, given: Given) -> ConfigError:
    """The flag in place of a line of a file that nobody has written."""
    if not error.where.startswith(f"{_NAME}:"):
        return error
    key = error.where.rpartition(" ")[2]
    return ConfigError(error.what, where=f"{_flag_of(key, given)} {key}", fix=error.fix)


def _flag_of(key: str, given: Given) -> str:
    """The flag that sets a key, or what holds it; one that was given before one that was not."""
    found = [
        flag.name for flag in FLAGS.values() if flag.key and f"{key}.".startswith(f"{flag.key}.")
    ]
    found.sort(key=lambda name: name not in given)
    return f"--{found[0]}" if found else "train_fsdp.py"


def run_file(given: Given, *, has_gpu: bool) -> dict[str, Any]:
    """The run file, as far as it differs from isles' defaults."""
    steps = given["total-steps"] if given["max-steps"] is None else given["max-steps"]
    warmup = given["warmup-steps"]
    interval = {} if "ckpt.interval" not in given else {"every_steps": given["ckpt.interval"]}
    content = {
        "name": _NAME,
        "output_dir": given["ckpt.path"],
        "model": {
            "name_or_path": given["path-model"],
            "attn_implementation": given["attn-implementation"],
        },
        "data": data_section(given),
        "training": {
            "max_steps": steps,
            "global_batch_size": given["total-batch-size"],
            "micro_batch_size": given["per-device-train-batch-size"],
            "learning_rate": given["lr"],
            "warmup_steps": min(_WARMUP_STEPS, max(steps, 0) // 10) if warmup is None else warmup,
            "precision": given["precision"] or ("fp16-mixed" if has_gpu else "32-true"),
            "torch_compile": given["torch-compile"],
            "logging_steps": 1 if steps <= _SHORT_RUN_STEPS else 10,
        },
        "strategy": {
            "kind": "fsdp",
            "sharding_strategy": given["sharding-strategy"].removeprefix("_"),
        },
        "balance": "even",
        "checkpoint": {"every_steps": None, **interval, "keep": given["ckpt.topk"]},
        "track": track_section(given),
    }
    if given.has_hivemind:
        worker = worker_name(given)
        content |= {"name": f"{_NAME}-{worker}", "outer": outer_section(given)}
        content["clusters"] = [{"name": worker}]
    return content


def data_section(given: Given) -> dict[str, Any]:
    """What the model reads."""
    section: dict[str, Any] = {"seq_length": given["seq-length"], "validation_fraction": 0}
    if given["fake-data"]:
        return {"sources": [{"type": "fake"}], **section}
    name = _C4_TINY if given["c4-tiny"] else given["dataset-name-or-path"]
    source = {"path": name, **({"subset": "en"} if name in (_C4, _C4_TINY) else {})}
    streams = is_on_huggingface(name) and name != _C4_TINY and not given.has_hivemind
    return {"sources": [source], "streaming": streams, **section}


def is_on_huggingface(name: str) -> bool:
    """Whether a data set's name is a Hugging Face id, and no path or pattern of this machine."""
    is_pattern = any(sign in name for sign in "*?[")
    return name.count("/") == 1 and not is_pattern and not Path(name).expanduser().exists()


def track_section(given: Given) -> list[Any]:
    """Where curves go besides metrics.jsonl."""
    if given["metric-logger-type"] == "dummy":
        return ["jsonl"]
    return [{"kind": "wandb", **({"project": given["project"]} if "project" in given else {})}]


def worker_name(given: Given) -> str:
    """What this worker is called among the others."""
    rank = given["hv.world-rank"]
    if rank is not None:
        return f"worker-{rank}"
    number = os.environ.get("WORLD_RANK", "")
    return f"worker-{number or socket.gethostname().partition('.')[0][:40]}"


def outer_section(given: Given) -> dict[str, Any]:
    """How the workers average."""
    peers = given["hv.initial-peers"]
    compression = given["hv.hivemind-compression"]
    codec = "none" if compression is None else "bf16" if "fp16" in compression else "int8"
    is_here = bool(peers) and all(peer.startswith(_LOOPBACK) for peer in peers)
    listens = given["hv.host-maddrs"] or [_HERE if is_here else _EVERYWHERE]
    deadline_s = given["hv.timeout-waiting-for-peers"] + given["hv.averaging-timeout"]
    waits = given["hv.all-reduce-strategy"] == "WAIT_FOR_ALL"
    return {
        "kind": "diloco",
        "engine": "hivemind",
        "sync_every": given["hv.local-steps"],
        "lr": given["hv.outer-lr"],
        "codec": codec,
        "min_clusters": given["hv.galaxy-size"],
        "wait": "all" if waits else {"time_boxed": f"{given['hv.matchmaking-time']:g}s"},
        "deadline": f"{deadline_s:g}s",
        "hivemind": {
            "initial_peers": peers,
            "host_maddrs": listens,
            "announce_maddrs": given["hv.announce-maddrs"],
        },
    }


def notes(given: Given) -> Iterator[str]:
    """What the user must hear: flags that change nothing, and what another trainer would do."""
    for name in ("num-workers", "log-activations-steps"):
        if name in given:
            yield f"--{name} {given[name]}: {FLAGS[name].help}"
    for name in ("hv.skip-load-from-peers", "hv.fail-rank-drop"):
        if given[name]:
            yield f"--{name}: {FLAGS[name].help}"
    if "project" in given and given["metric-logger-type"] == "dummy":
        yield f"--project {given['project']} does nothing without --metric-logger-type wandb"
    if given["fake-data"]:
        for name in ("dataset-name-or-path", "c4-tiny"):
            if name in given:
                yield f"--{name} does nothing beside --fake-data"
    elif given["c4-tiny"] and "dataset-name-or-path" in given:
        yield f"--dataset-name-or-path does nothing beside --c4-tiny, which is {_C4_TINY}"
    if "total-steps" in given and given["max-steps"]:
        yield (
            f"--total-steps {given['total-steps']} does nothing beside --max-steps "
            f"{given['max-steps']}: the learning rate's cosine ends with the run"
        )
    if given.has_hivemind:
        yield from _notes_of_hivemind(given)


def _notes_of_hivemind(given: Given) -> Iterator[str]:
    compression = given["hv.hivemind-compression"]
    outer = outer_section(given)
    if compression is not None:
        yield f"--hv.hivemind-compression {compression}: updates travel as {outer['codec']}"
    if "hv.matchmaking-time" in given and outer["wait"] == "all":
        yield "--hv.matchmaking-time does nothing without --hv.all-reduce-strategy NO_WAIT"
    source = data_section(given)["sources"][0]
    if source.get("path") == _C4:
        yield f"all of {_C4}, some 300 GB, is fetched and prepared first; --c4-tiny is a part of it"
    is_open = not all(a.startswith(_LOOPBACK) for a in outer["hivemind"]["host_maddrs"])
    if is_open and not any("secret_file" in pair for pair in given["set"]):
        yield (
            "whoever reaches this worker may take part; against unknown connections give all "
            "workers the same long random line: --set outer.hivemind.secret_file=FILE"
        )


if __name__ == "__main__":
    code = main()
    from isles.train.__main__ import leave

    leave(code)
