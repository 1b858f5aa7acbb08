"""Measurements of an earlier run on the same GPUs, which replace guesses.

A run directory has all values. resolved.yaml has the settings, live.json of the last attempt the
hosts, devices and micro-batches of the ranks, and metrics.jsonl the seconds, tokens and memory.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from isles.config.sections.run import RunConfig
from isles.errors import UserError
from isles.plan.machines import Device
from isles.plan.outcome import Outcome, RankPlan
from isles.plan.step import Job
from isles.run.find import list_runs
from isles.run.owner import owner_of
from isles.run.paths import RunDir
from isles.run.records import MAX_SHOWN_BYTES, read_metrics, read_own
from isles.run.resolved import read_resolved

_LOOKED_AT = 50
"""Number of runs to read, the newest first."""

_READ_BYTES = 64 << 20
"""Limit of the read at the end of a run's metrics."""

_WARM = 2
"""First recorded steps to skip: they choose kernels and read files for the first time."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Steps of an earlier run with the same model, strategy, sequence length and GPUs.

    Args:
        at: end of the last of these steps, in seconds since the epoch.
        step_s, tokens_per_s: medians over the recorded steps; tokens without padding.
        memory_bytes: most memory on a GPU in any step. On a CPU, memory of a whole process.
        rows: sequences per step. If the plan has another number, seconds are in proportion.
    """

    run: str
    at: float
    first_step: int
    last_step: int
    step_s: float
    tokens_per_s: float
    memory_bytes: int | None
    rows: int

    def of_rows(self, rows: int) -> float:
        """Seconds of a step of `rows` sequences."""
        return self.step_s * rows / self.rows


def find_measured(job: Job, own: Outcome) -> Measured | None:
    """The newest run of this user in output_dir with the same settings on the same GPUs.

    Runs of other users are ignored.
    """
    if own.refused:
        return None
    runs = reversed(list_runs(Path(job.config.output_dir).expanduser()))
    ours = islice((run for run in runs if not run.owner), _LOOKED_AT)
    return next(filter(None, (_measured(run, job, own) for run in ours)), None)


def _measured(run: RunDir, job: Job, own: Outcome) -> Measured | None:
    try:
        return _read(run, job, own)
    except (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError):
        return None  # damaged, or written by another version of isles: ignore it


def _read(run: RunDir, job: Job, own: Outcome) -> Measured | None:
    attempt = run.last_attempt()
    if attempt is None or owner_of(run.metrics):
        return None
    if not _is_alike(read_own(attempt.live, MAX_SHOWN_BYTES) or {}, own):
        return None
    try:
        config = read_resolved(run).config
    except (OSError, UserError):  # written by another version of isles
        return None
    if _settings(config) != _settings(job.config):
        return None
    every = (row for row in read_metrics(run.metrics, _READ_BYTES) if row["kind"] == "train")
    rows = [row for row in every if row.get("step_time_s")][_WARM:]
    if not rows:
        return None
    memory = [row["memory_bytes"] for row in rows if row.get("memory_bytes")]
    return Measured(
        run=run.name,
        at=float(rows[-1]["at"]),
        first_step=int(rows[0]["step"]),
        last_step=int(rows[-1]["step"]),
        step_s=statistics.median(row["step_time_s"] for row in rows),
        tokens_per_s=statistics.median(row["tokens_per_second"] for row in rows),
        memory_bytes=max(memory, default=None),
        rows=config.training.global_batch_size,
    )


def _is_alike(live: dict[str, Any], own: Outcome) -> bool:
    # The same GPUs on the same number of hosts, each with the same micro-batch size.
    nodes = [node for _, node in sorted(live.get("nodes", {}).items(), key=lambda n: int(n[0]))]
    counts = [len(list(ranks)) for _, ranks in groupby(own.ranks, lambda rank: rank.host)]
    if [len(node["ranks"]) for node in nodes] != counts:
        return False
    planned = iter(own.ranks)
    for node in nodes:
        for _, ran in sorted(node["ranks"].items(), key=lambda rank: int(rank[0])):
            rank = next(planned)
            is_same = _is_same(ran.get("device", ""), node["name"], rank)
            if not is_same or ran.get("micro_batch") != rank.micro_batch:
                return False
    return True


def _is_same(name: str, host: str, rank: RankPlan) -> bool:
    # A GPU is identified by its name, on any host. A CPU is identified by its host.
    device = rank.device
    if not device.is_cuda:
        return name == "CPU" and host == rank.host
    other = Device.reported(name, None, None)
    return other.gpu == device.gpu if device.gpu is not None else other.name == device.name


_TRAINING = (
    *("precision", "optimizer", "method", "gradient_checkpointing", "torch_compile"),
    *("tf32", "stochastic_rounding", "micro_batch_size"),
)


def _settings(config: RunConfig) -> dict[str, object]:
    # Every setting that changes the seconds of a step, except the number of its rows.
    training, data = config.training.model_dump(), config.data
    return {
        "model": (config.model.name_or_path, config.model.attn_implementation),
        "vocabulary": config.tokenizer.train_vocab_size,
        "adapter": config.adapter,
        "data": (data.seq_length, data.packing, data.isolate_documents),
        "training": {name: training[name] for name in _TRAINING},
        "strategy": config.strategy,
        "balance": config.balance,
    }
