"""Derives values from a run file and the machine, and writes the resolved file for the ranks."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from isles import __version__
from isles.config.clusters import of_cluster
from isles.config.issues import nearest_multiples
from isles.config.layout import Layout, make_layout
from isles.config.load import COMMAND_LINE, Loaded
from isles.config.sections.run import RunConfig
from isles.config.yaml import MAX_NODES, dump_yaml, is_leaf, parse_yaml
from isles.errors import ConfigError

Derived = dict[str, int | float | str]

_SURELY_READ = 50_000
"""A shorter text is always within the limits of YAML, so isles does not check it."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """A run, resolved for this machine.

    Args:
        rows_per_rank: largest number of sequences of a data-parallel rank per inner step, with
            equal shares.
        origins: dotted path of every leaf of the config -> `run.yaml:9`, `command line` or
            `default`; and `derived.NAME` -> `derived: how`.
        derived: derived values by name: strategy, device, world_size, rows_per_rank, and
            grad_accum_steps if micro_batch_size is a number.
        owner: the user who wrote the file, if it was another user, or empty. isles then keeps only
            values that describe the run (see `isles.run.resolved`).
    """

    config: RunConfig
    world_size: int
    device: Literal["cuda", "cpu"]
    rows_per_rank: int
    origins: dict[str, str]
    derived: Derived
    owner: str = ""


def resolve(
    loaded: Loaded,
    *,
    num_gpus: int = 0,
    world_size: int | None = None,
    nproc: Sequence[int] | None = None,
    device: Literal["cuda", "cpu"] | None = None,
) -> Resolved:
    """Resolve the open values of a run file.

    Args:
        num_gpus: GPUs visible on this machine. With 0 the ranks compute on the CPU.
        world_size: number of ranks under a manual torchrun. It overrides gpus_per_node of the run
            file.
        nproc: ranks on each node, if the launcher of other machines has resolved them. It overrides
            num_gpus and gpus_per_node.
        device: device of these ranks, required with nproc.

    Raises:
        ConfigError: several clusters, more ranks than GPUs, rows that do not divide among the
            ranks, shares of missing ranks, or too many values for resolved.yaml.
    """
    if len(loaded.config.clusters) > 1:
        raise ConfigError(
            f"this command starts one cluster, and the run file has {len(loaded.config.clusters)}",
            where=loaded.where("clusters"),
            fix="start all clusters with `isles train`, or keep one cluster in the run file",
        )
    loaded = of_cluster(loaded, 0)  # its own strategy and balance are the run's
    config = loaded.config
    how: dict[str, str] = {}
    if nproc is not None:
        assert device is not None, "nproc needs a device"
        ranks, how["world_size"] = sum(nproc), _nproc_text(nproc, device)
        how["device"] = "cluster.device" if config.clusters[0].device != "auto" else "the nodes"
    else:
        device, how["device"] = _device(loaded, num_gpus)
        num_gpus = num_gpus if device == "cuda" else 0
        ranks, how["world_size"] = _world_size(loaded, num_gpus, world_size)
    if config.training.script is not None:
        facts: Derived = {"device": device, "world_size": ranks}
        found = Resolved(config, ranks, device, 0, _origins(loaded, facts, how), facts)
        return _checked(found, loaded)
    try:
        layout = _layout(config, ranks, nproc, is_planned=world_size is None)
    except ConfigError as error:
        raise ConfigError(
            error.what, where=loaded.where(error.where), fix=error.fix, id=error.id
        ) from None
    _check_rows(loaded, layout)
    _check_shares(loaded, ranks)
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
    if isinstance(micro, int):
        derived["grad_accum_steps"] = -(-rows // micro)
        how["grad_accum_steps"] = "rows_per_rank / micro_batch_size"
    found = Resolved(config, ranks, device, rows, _origins(loaded, derived, how), derived)
    return _checked(found, loaded)


def _checked(resolved: Resolved, loaded: Loaded) -> Resolved:
    # resolved.yaml has all values of each source and their origins: it is longer than the run file.
    text = dump_resolved(resolved)
    if len(text) < _SURELY_READ:
        return resolved
    try:
        load_resolved(text)
    except ConfigError:
        raise ConfigError(
            "with defaults and origins, this run has more values than isles reads from one file "
            f"({MAX_NODES} values, or 1 MiB of text)",
            where=loaded.where("data.sources"),
            fix="put several files into one source, such as path: 'data/*.jsonl', or shorten the "
            "longest list or text of the run file",
        ) from None
    return resolved


def dump_resolved(resolved: Resolved) -> str:
    """The text of resolved.yaml. `load_resolved` returns the same values, bit for bit."""
    data = {
        "version": __version__,
        "config": resolved.config.values(),
        "derived": resolved.derived,
        "origins": resolved.origins,
    }
    head = "# Input of the ranks of this run, written by isles. Times are in seconds.\n"
    return head + dump_yaml(data)


def load_resolved(text: str) -> Resolved:
    """Read the text of `dump_resolved`. ConfigError: the text has another format or version."""
    data = parse_yaml(text, "resolved.yaml").value
    try:
        config = RunConfig.model_validate(data["config"])
        derived: Derived = dict(data["derived"])
        device: Literal["cuda", "cpu"] = "cuda" if derived["device"] == "cuda" else "cpu"
        world_size, rows = int(derived["world_size"]), int(derived.get("rows_per_rank", 0))
        return Resolved(config, world_size, device, rows, dict(data["origins"]), derived)
    except (KeyError, TypeError, ValueError) as error:
        version = data.get("version", "an unknown version")
        raise ConfigError(
            f"this is not a resolved file of isles {__version__}: {type(error).__name__}",
            where="resolved.yaml:1",
            fix=f"resume with isles {version}, which wrote the file, or start a new run",
        ) from None


def digest(config: RunConfig) -> str:
    """SHA-256 of every value, in hexadecimal. Equal configs have equal digests."""
    text = json.dumps(config.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def leaves(config: RunConfig) -> Iterator[tuple[str, object]]:
    """Every value with its dotted key. A list of words counts as one value."""

    def walk(value: Any, key: str) -> Iterator[tuple[str, object]]:
        if is_leaf(value):
            yield key, value
            return
        for name, child in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from walk(child, f"{key}.{name}" if key else str(name))

    yield from walk(config.values(), "")


def _origins(loaded: Loaded, derived: Derived, how: Mapping[str, str]) -> dict[str, str]:
    given = loaded.origins
    # A list counts as one value, from the command line if one of its items is.
    overridden = [path for path, origin in given.items() if origin == COMMAND_LINE]
    origins = {}
    for key, _ in leaves(loaded.config):
        is_inside = any(path.startswith(f"{key}.") for path in overridden)
        origins[key] = COMMAND_LINE if is_inside else given.get(key, "default")
    return origins | {f"derived.{name}": f"derived: {how[name]}" for name in derived}


def _device(loaded: Loaded, num_gpus: int) -> tuple[Literal["cuda", "cpu"], str]:
    asked = loaded.config.clusters[0].device
    if asked == "cuda" and num_gpus == 0:
        raise ConfigError(
            "device is cuda, and no GPU is visible on this machine",
            where=loaded.where("clusters.0.device"),
            fix="check nvidia-smi and CUDA_VISIBLE_DEVICES, or use device: auto",
            id="gpu.visible",
        )
    if asked == "cpu":
        return "cpu", "cluster.device"
    if not num_gpus:
        return "cpu", "no GPU"
    return "cuda", f"{num_gpus} visible GPU{'s' if num_gpus > 1 else ''}"


def _nproc_text(nproc: Sequence[int], device: str) -> str:
    kind = "GPUs" if device == "cuda" else "CPU processes"
    if len(set(nproc)) == 1:
        return f"{nproc[0]} {kind} x {len(nproc)} nodes"
    return f"{kind} of {len(nproc)} nodes: {' + '.join(str(ranks) for ranks in nproc)}"


def _world_size(loaded: Loaded, num_gpus: int, given: int | None) -> tuple[int, str]:
    if given is not None:
        return given, "WORLD_SIZE, set by torchrun"
    key = "clusters.0.gpus_per_node"
    cluster = loaded.config.clusters[0]
    per_node, nodes = cluster.gpus_per_node, cluster.max_nodes
    times = "" if nodes == 1 else f" x {nodes} nodes"
    if nodes > num_gpus > 0:
        raise ConfigError(
            f"{nodes} nodes on this machine need a GPU each, and only {num_gpus} are visible",
            where=loaded.where("clusters.0.nodes"),
            fix=f"use at most {num_gpus} nodes, or train on the CPU: clusters.0.device=cpu",
            id="gpu.count",
        )
    if per_node == "auto":
        how = f"{num_gpus} visible GPUs" if num_gpus else "no GPU: one process" + times
        return max(num_gpus // nodes, 1) * nodes, how
    if per_node * nodes > num_gpus > 0:
        raise ConfigError(
            f"gpus_per_node {per_node}{times} is more than the {num_gpus} visible"
            f" GPU{'s' if num_gpus > 1 else ''}",
            where=loaded.where(key),
            fix=f"use {num_gpus // nodes} or auto, or check whether CUDA_VISIBLE_DEVICES hides "
            "GPUs",
            id="gpu.count",
        )
    return per_node * nodes, "gpus_per_node" + (" x nodes" if nodes > 1 else "")


def _check_shares(loaded: Loaded, ranks: int) -> None:
    # Other ranks have a share of 1. The ranks check the names of hosts.
    shares = loaded.config.balance
    if isinstance(shares, str):
        return
    by_rank = {int(name): share for name, share in shares.items() if name.isdecimal()}
    for rank in sorted(by_rank):
        # This counts the most nodes. With fewer nodes, the share of a missing node waits.
        if rank >= ranks:
            raise ConfigError(
                f"balance has a share for rank {rank}, and the {ranks} ranks have numbers from 0",
                where=loaded.where(f"balance.{rank}", "balance"),
                fix="delete it, or start more ranks: clusters, gpus_per_node",
            )
    if len(by_rank) == ranks and not any(by_rank.values()):
        raise ConfigError(
            f"all {ranks} ranks have a share of 0",
            where=loaded.where("balance"),
            fix="give a rank a share above 0, or use balance: even",
            id="config.batch",
        )


def _layout(
    config: RunConfig, ranks: int, nproc: Sequence[int] | None, *, is_planned: bool
) -> Layout:
    # The grid of all ranks. The run must also be able to continue with fewer nodes.
    cluster = config.clusters[0]
    if not is_planned:
        return make_layout(config.strategy, ranks, local_world_size=ranks)
    if nproc is None:
        nproc = (ranks // cluster.max_nodes,) * cluster.max_nodes
    local = math.gcd(*nproc)
    for size in sorted(_sums(nproc, cluster.min_nodes) - {ranks}):
        make_layout(config.strategy, size, local_world_size=local)
    return make_layout(config.strategy, ranks, local_world_size=local)


def _sums(nproc: Sequence[int], least: int) -> set[int]:
    # The number of ranks for every choice of at least `least` nodes.
    sums: list[set[int]] = [{0}, *(set() for _ in nproc)]
    if least == len(nproc):
        return {sum(nproc)}
    for ranks in nproc:
        for count in range(len(nproc), 0, -1):
            sums[count] |= {ranks + rest for rest in sums[count - 1]}
    return set().union(*sums[least:])


def _check_rows(loaded: Loaded, layout: Layout) -> None:
    training, ranks = loaded.config.training, layout.dp_size
    rows, micro = training.global_batch_size, training.micro_batch_size
    words = "data-parallel " if layout.dp_size < layout.world_size else ""
    words += "rank" if ranks == 1 else "ranks"
    keys = ("training.global_batch_size", "clusters.0.gpus_per_node", "training.micro_batch_size")
    if rows < ranks:
        raise ConfigError(
            f"global_batch_size {rows} is less than one sequence per rank for {ranks} {words}",
            where=loaded.where(*keys),
            fix=f"use {ranks} or more",
            id="config.batch",
        )
    is_even = loaded.config.balance == "even"
    if not isinstance(micro, int) or not is_even or rows % (micro * ranks) == 0:
        return
    unit = micro * ranks
    raise ConfigError(
        f"global_batch_size {rows} is not a multiple of micro_batch_size {micro} x {ranks} {words}"
        f" = {unit}",
        where=loaded.where(*keys),
        fix=f"use {nearest_multiples(rows, unit)}, or balance: auto",
        id="config.batch",
    )
