"""The flags of train_fsdp.py: names, values, defaults and help, and the reading of them."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

_ABOUT = """
Train a language model under torchrun. --nproc_per_node (GPUs of this machine), --nnodes (machines)
and --rdzv_endpoint are flags of torchrun itself and stand before train_fsdp.py:

  torchrun --standalone --nproc_per_node=2 train_fsdp.py --path-model FOLDER --fake-data …

Dashes and underscores mean the same. Behind each flag stands the key of isles' run file that it
sets; what they make together is kept as RUN/run.yaml.
"""


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag.

    Args:
        name: with dashes.
        kind: a number, text, a switch (bool), several words (list), or one of these choices.
        default: None: the help says what happens without it.
        key: of the run file, where it goes to one.
        help: one or two sentences.
    """

    name: str
    kind: type | tuple[str, ...]
    default: Any
    key: str
    help: str


_TRAINING = (
    Flag(
        "path-model",
        str,
        "PrimeIntellect/llama-150m-fresh",
        "model.name_or_path",
        "A folder with config.json and *.safetensors, or a Hugging Face id.",
    ),
    Flag(
        "attn-implementation",
        ("sdpa", "eager", "flash_attention_2", "flex_attention"),
        "sdpa",
        "model.attn_implementation",
        "How attention is computed.",
    ),
    Flag(
        "per-device-train-batch-size",
        int,
        32,
        "training.micro_batch_size",
        "Sequences per GPU in one forward pass.",
    ),
    Flag(
        "total-batch-size",
        int,
        512,
        "training.global_batch_size",
        "Sequences per step over all GPUs of this torchrun; accumulation follows from it.",
    ),
    Flag("lr", float, 4e-4, "training.learning_rate", "Peak learning rate."),
    Flag(
        "warmup-steps",
        int,
        None,
        "training.warmup_steps",
        "Steps until the learning rate is at its peak. Default: 1000, or a tenth of the run where "
        "that is less.",
    ),
    Flag(
        "total-steps",
        int,
        88_000,
        "training.max_steps",
        "Steps of the run, and of the cosine of its learning rate.",
    ),
    Flag(
        "max-steps",
        int,
        None,
        "training.max_steps",
        "End after so many steps instead; the cosine ends there, too. Default: --total-steps.",
    ),
    Flag(
        "precision",
        ("fp16-mixed", "bf16-mixed", "32-true"),
        None,
        "training.precision",
        "Type of the matrix products; the weights are fp32. Default: fp16-mixed; on a machine "
        "without a GPU, where that would take minutes a step, 32-true.",
    ),
    Flag(
        "sharding-strategy",
        ("NO_SHARD", "SHARD_GRAD_OP", "FULL_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"),
        "NO_SHARD",
        "strategy.sharding_strategy",
        "How the GPUs of this torchrun share the model. All of them go together with --hv.",
    ),
    Flag("torch-compile", bool, True, "training.torch_compile", "Compile the model."),
)
_DATA = (
    Flag("seq-length", int, 1024, "data.seq_length", "Tokens in one sequence."),
    Flag(
        "fake-data",
        bool,
        False,
        "data.sources.0.type",
        "Random tokens: needs neither data nor a tokenizer.",
    ),
    Flag(
        "dataset-name-or-path",
        str,
        "allenai/c4",
        "data.sources.0.path",
        "A Hugging Face id, a file, a glob or a folder. A Hugging Face dataset is read while "
        "training; with --hv, all of it is prepared first.",
    ),
    Flag(
        "c4-tiny",
        bool,
        False,
        "data.sources.0.path",
        "PrimeIntellect/c4-tiny, a small part of C4.",
    ),
    Flag("num-workers", int, 4, "", "Does nothing: each rank reads ahead in a thread of its own."),
)
_RECORDS = (
    Flag(
        "metric-logger-type",
        ("wandb", "dummy"),
        "wandb",
        "track",
        "wandb, which follows WANDB_MODE, or dummy: RUN/metrics.jsonl alone, which every run "
        "writes.",
    ),
    Flag(
        "project",
        str,
        None,
        "track.0.project",
        "Project at wandb. Default: $WANDB_PROJECT, else isles.",
    ),
    Flag("log-activations-steps", int, None, "", "Does nothing: no norms of activations are kept."),
    Flag(
        "ckpt.path",
        str,
        "runs",
        "output_dir",
        "Folder of the run directories; each holds its checkpoints.",
    ),
    Flag(
        "ckpt.interval",
        int,
        None,
        "checkpoint.every_steps",
        "Save every so many steps. Default: every 10 minutes, on a stop, and at the end.",
    ),
    Flag("ckpt.topk", int, 3, "checkpoint.keep", "Newest checkpoints that are kept."),
    Flag(
        "ckpt.resume",
        str,
        "false",
        "",
        "true: go on with the newest run, if it is not finished and its values are the same. Or "
        "the path of a run directory, or of a checkpoint in one, also with new values.",
    ),
)
_HIVEMIND = (
    Flag(
        "hv.initial-peers",
        list,
        [],
        "outer.hivemind.initial_peers",
        "First contact: what hivemind-dht prints behind --initial_peers. Without it this worker "
        "is the first one.",
    ),
    Flag(
        "hv.galaxy-size",
        int,
        1,
        "outer.min_clusters",
        "Workers over all machines. So many are waited for, and average; more may come.",
    ),
    Flag(
        "hv.world-rank",
        int,
        None,
        "clusters.0.name",
        "Unique number of this worker, from 0. Default: $WORLD_RANK; without that, its host's "
        "name.",
    ),
    Flag(
        "hv.local-steps", int, 500, "outer.sync_every", "Steps of each worker before they average."
    ),
    Flag(
        "hv.outer-lr",
        float,
        0.7,
        "outer.lr",
        "Learning rate of the outer optimizer, SGD with Nesterov momentum 0.9.",
    ),
    Flag(
        "hv.host-maddrs",
        list,
        None,
        "outer.hivemind.host_maddrs",
        "Where this worker listens. Default: the loopback where all initial peers are on it, else "
        "/ip4/0.0.0.0/tcp/0.",
    ),
    Flag(
        "hv.announce-maddrs",
        list,
        [],
        "outer.hivemind.announce_maddrs",
        "What the others are told instead, where a router passes a port on.",
    ),
    Flag(
        "hv.all-reduce-strategy",
        ("WAIT_FOR_ALL", "NO_WAIT"),
        "WAIT_FOR_ALL",
        "outer.wait",
        "NO_WAIT: --hv.matchmaking-time after the first worker, the others give what they have.",
    ),
    Flag(
        "hv.matchmaking-time",
        float,
        15.0,
        "outer.wait",
        "Seconds, for NO_WAIT; does nothing to WAIT_FOR_ALL.",
    ),
    Flag(
        "hv.timeout-waiting-for-peers",
        float,
        600.0,
        "outer.deadline",
        "Seconds that a worker waits for the others; then it trains on.",
    ),
    Flag(
        "hv.averaging-timeout",
        float,
        0.0,
        "outer.deadline",
        "Seconds that it waits longer, for the averaging itself.",
    ),
    Flag(
        "hv.hivemind-compression",
        ("fp16", "scaled-fp16", "uniform8bit", "quantile8bit", "blockwise8bit"),
        None,
        "outer.codec",
        "How updates travel: bf16 in place of the first two, int8 of the others. Default: fp32.",
    ),
    Flag(
        "hv.skip-load-from-peers",
        bool,
        False,
        "",
        "Does nothing: a worker whose weights are not the run's takes them from another.",
    ),
    Flag(
        "hv.fail-rank-drop",
        bool,
        False,
        "",
        "Does nothing: a worker that is lost may come back. Until then the others train on, and "
        "average nothing while they are fewer than --hv.galaxy-size.",
    ),
)
_ANYTHING = (
    Flag(
        "set",
        list,
        [],
        "",
        "KEY=VALUE of the run file: all else that isles has. Wins over the other flags.",
    ),
)
GROUPS = {
    "training": _TRAINING,
    "data": _DATA,
    "records and checkpoints": _RECORDS,
    "several workers over Hivemind, each a torchrun of its own; any --hv flag asks for it": (
        _HIVEMIND
    ),
    "anything else": _ANYTHING,
}
FLAGS = {flag.name: flag for group in GROUPS.values() for flag in group}


@dataclass(frozen=True, slots=True)
class Given:
    """The flags of a command line: `given["lr"]` is the value, or the default."""

    values: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.values.get(name, FLAGS[name].default)

    def __contains__(self, name: str) -> bool:
        """Whether it was given."""
        return name in self.values

    @property
    def has_hivemind(self) -> bool:
        """Whether any of the Hivemind flags was given."""
        return any(name.startswith("hv.") for name in self.values)


class _Parser(argparse.ArgumentParser):
    """Prints a failure once, not once for each rank."""

    def error(self, message: str) -> NoReturn:
        text = f"error: {message}\n  fix: `python {self.prog} --help` lists every flag\n"
        self.exit(1, text if os.environ.get("RANK", "0") == "0" else None)


def read_flags(words: Sequence[str]) -> Given:
    """What a command line says; ends the process where it cannot be."""
    parser = _Parser(
        prog="train_fsdp.py",
        usage="torchrun [flags of torchrun] %(prog)s [flags]",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    for title, flags in GROUPS.items():
        group = parser.add_argument_group(title)
        for flag in flags:
            # isles' own messages speak of --resume.
            names = [f"--{flag.name}", *(["--resume"] if flag.name == "ckpt.resume" else [])]
            group.add_argument(*names, dest=flag.name, help=_help(flag), **_how(flag))
    return Given(vars(parser.parse_args([_dashed(word) for word in words])))


def _how(flag: Flag) -> dict[str, Any]:
    """How argparse reads a flag's value."""
    if isinstance(flag.kind, tuple):
        return {"choices": flag.kind}
    if flag.kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if flag.kind is list:
        return {"nargs": "+", "action": "extend", "metavar": "WORD"}
    if flag.name == "ckpt.resume":
        return {"nargs": "?", "const": "true", "metavar": "true|PATH"}
    return {"type": flag.kind, "metavar": flag.kind.__name__.upper()}


def _help(flag: Flag) -> str:
    default = flag.default
    if isinstance(default, bool):
        default = "yes" if default else "no"
    shown = "" if default is None or default == [] else f" Default: {default}."
    return f"{flag.help}{shown}{f' [{flag.key}]' if flag.key else ''}".replace("%", "%%")


def _dashed(word: str) -> str:
    """--hv.local_steps=2 as --hv.local-steps=2, and --hv.no-x as --no-hv.x."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    section, dot, rest = name.replace("_", "-").partition(".")
    if dot and rest.startswith("no-"):
        section, rest = f"--no-{section[2:]}", rest.removeprefix("no-")
    return section + dot + rest + equals + value
