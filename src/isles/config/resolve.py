"""What follows from a run file and the machine; and the resolved file that the ranks read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from isles import __version__
from isles.config.emit import dump_yaml, is_leaf
from isles.config.layout import Layout, make_layout
from isles.config.load import Loaded
from isles.config.run import RunConfig, nearest_multiples
from isles.config.yaml import parse_yaml
from isles.errors import ConfigError

Derived = dict[str, int | float | str]


@dataclass(frozen=True, slots=True)
class Resolved:
    """A run, settled for this machine.

    Args:
        config: the run file's values and the defaults, unchanged.
        world_size: ranks.
        device: what a rank computes on.
        rows_per_rank: sequences that a data-parallel rank takes in one inner step, at most, where
            all take equally many.
        origins: dotted path of every leaf of the config -> `run.yaml:9`, `command line` or
            `default`; and `derived.NAME` -> `derived: how`.
        derived: everything that follows, by name: strategy, device, world_size, rows_per_rank,
            and grad_accum_steps where micro_batch_size is a number.
    """

    config: RunConfig
    world_size: int
    device: Literal["cuda", "cpu"]
    rows_per_rank: int
    origins: dict[str, str]
    derived: Derived


def resolve(loaded: Loaded, *, num_gpus: int, world_size: int | None = None) -> Resolved:
    """Settle what a run file leaves open.

    Args:
        loaded: the run file.
        num_gpus: GPUs visible on this machine; 0: the ranks compute on the CPU.
        world_size: ranks that exist already, where torchrun was typed by hand; it wins over the
            run file's gpus_per_node.

    Raises:
        ConfigError: more ranks than GPUs, or rows that do not divide among the ranks.
    """
    config = loaded.config
    how: dict[str, str] = {}
    ranks, how["world_size"] = _world_size(loaded, num_gpus, world_size)
    device: Literal["cuda", "cpu"] = "cuda" if num_gpus > 0 else "cpu"
    how["device"] = f"{num_gpus} visible GPU{'s' if num_gpus > 1 else ''}" if num_gpus else "no GPU"
    try:
        layout = make_layout(config.strategy, ranks, local_world_size=ranks)
    except ConfigError as error:
        raise ConfigError(error.what, where=loaded.where(error.where), fix=error.fix) from None
    _check_rows(loaded, layout)
    rows = -(-config.training.global_batch_size // layout.dp_size)
    split = "world_size" if layout.dp_size == ranks else "data-parallel ranks"
    how["rows_per_rank"] = f"global_batch_size / {split}"
    how["strategy"] = "strategy.kind"
    derived: Derived = {
        "strategy": config.strategy.kind,
        "device": device,
        "world_size": ranks,
        "rows_per_rank": rows,
    }
    micro = config.training.micro_batch_size
    if micro != "auto":
        derived["grad_accum_steps"] = -(-rows // micro)
        how["grad_accum_steps"] = "rows_per_rank / micro_batch_size"
    origins = {key: _origin(loaded.origins, key) for key, _ in leaves(config)}
    origins.update({f"derived.{name}": f"derived: {how[name]}" for name in derived})
    return Resolved(config, ranks, device, rows, origins, derived)


def dump_resolved(resolved: Resolved) -> str:
    """The text of resolved.yaml; `load_resolved` gives back the same, bit for bit."""
    data = {
        "version": __version__,
        "config": resolved.config.model_dump(),
        "derived": resolved.derived,
        "origins": resolved.origins,
    }
    head = "# What the ranks of this run read; written by isles, times in seconds.\n"
    return head + dump_yaml(data)


def load_resolved(text: str) -> Resolved:
    """What `dump_resolved` wrote.

    Raises:
        ConfigError, ConfigErrors: the text is not such a file, or one of an isles whose run files
            differ.
    """
    data = parse_yaml(text, "resolved.yaml").value
    assert isinstance(data, dict)
    try:
        config = RunConfig.model_validate(data["config"])
        derived: Derived = dict(data["derived"])
        device: Literal["cuda", "cpu"] = "cuda" if derived["device"] == "cuda" else "cpu"
        world_size, rows = int(derived["world_size"]), int(derived["rows_per_rank"])
        return Resolved(config, world_size, device, rows, dict(data["origins"]), derived)
    except (KeyError, TypeError, ValueError) as error:
        version = data.get("version", "an unknown version")
        raise ConfigError(
            f"this is no resolved file of isles {__version__}: {type(error).__name__}",
            where="resolved.yaml:1",
            fix=f"it was written by isles {version}; go on with that version, or start a new run",
        ) from None


def digest(config: RunConfig) -> str:
    """SHA-256 of every value, in hexadecimal: equal where two configs are."""
    text = json.dumps(config.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def leaves(config: RunConfig) -> Iterator[tuple[str, object]]:
    """Every value with its dotted key; a list of words counts as one value."""
    yield from _leaves(config.model_dump(), "")


def _leaves(value: object, key: str) -> Iterator[tuple[str, object]]:
    if is_leaf(value):
        yield key, value
    elif isinstance(value, Mapping):
        for name, child in value.items():
            yield from _leaves(child, f"{key}.{name}" if key else name)
    elif isinstance(value, list | tuple):
        for index, child in enumerate(value):
            yield from _leaves(child, f"{key}.{index}")


def _origin(given: Mapping[str, str], key: str) -> str:
    inside = [origin for path, origin in given.items() if path.startswith(f"{key}.")]
    return "command line" if "command line" in inside else given.get(key, "default")


def _world_size(loaded: Loaded, num_gpus: int, given: int | None) -> tuple[int, str]:
    """Ranks, and why so many."""
    if given is not None:
        return given, "WORLD_SIZE, set by torchrun"
    key = "clusters.0.gpus_per_node"
    per_node = loaded.config.clusters[0].gpus_per_node
    if per_node == "auto":
        return max(num_gpus, 1), f"{num_gpus} visible GPUs" if num_gpus else "no GPU: one process"
    if per_node > num_gpus > 0:
        raise ConfigError(
            f"gpus_per_node {per_node} is more than the {num_gpus} visible"
            f" GPU{'s' if num_gpus > 1 else ''}",
            where=loaded.where(key),
            fix=f"use {num_gpus} or auto; CUDA_VISIBLE_DEVICES may hide others",
        )
    return per_node, "gpus_per_node"


def _check_rows(loaded: Loaded, layout: Layout) -> None:
    training, ranks = loaded.config.training, layout.dp_size
    rows, micro = training.global_batch_size, training.micro_batch_size
    words = "rank" if ranks == 1 else "ranks"
    if layout.dp_size < layout.world_size:
        words = f"data-parallel {words}"
    keys = ("training.global_batch_size", "clusters.0.gpus_per_node", "training.micro_batch_size")
    if rows < ranks:
        raise ConfigError(
            f"global_batch_size {rows} is less than one sequence for each of {ranks} {words}",
            where=loaded.where(*keys),
            fix=f"use {ranks} or more",
        )
    if micro == "auto" or loaded.config.balance != "even" or rows % (micro * ranks) == 0:
        return
    unit = micro * ranks
    raise ConfigError(
        f"global_batch_size {rows} is not a multiple of micro_batch_size {micro} x {ranks} {words}"
        f" = {unit}",
        where=loaded.where(*keys),
        fix=f"use {nearest_multiples(rows, unit)}, or balance: auto",
    )
