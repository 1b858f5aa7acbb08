"""Settings of a simulation from the run file, and CPU costs of an outer step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from isles.config.files import find_shape
from isles.config.load import Loaded
from isles.config.memory import architecture, checkpoint_sizes
from isles.config.sections.outer import CodecConfig, CodecName, DiLoCoConfig
from isles.errors import ConfigError
from isles.plan.simulate.sizes import (
    average_bytes,
    contribution_bytes,
    equal_fragments,
    fragment_numbers,
    llama_sizes,
)
from isles.run.env import huggingface_cache

# Constants of `isles.outer`, by the file that has them.
OPEN_STEPS = 8  # trainer/sync.py: limit of outer steps ahead with contributions
KEPT_AVERAGES = 8  # hub/rules.py: averages that the hub keeps for late clusters
AHEAD = 4  # client/session.py: averages fetched that are not applied
ON_THE_WIRE = 1.05  # client/session.py: TLS, HTTP and TCP
CHUNK_BYTES = 2**20  # messages.py
CHUNKS_AT_ONCE = 4  # client/http.py
HEARTBEAT_S = 2.0  # client/client.py; a quarter of `dead_after` at most
NUMBER_THREADS = 2  # hub/work.py: threads that measure and average
LAST_WAIT_S = 600.0  # trainer/outer.py: wait for the averages at the end
RECONNECT_S = 2.0  # client/client.py: longest pause between attempts to reconnect
LEAST_SYNC, MOST_SYNC = 10, 1000  # trainer/sync.py: sync_every: auto

HUB_TAKES, HUB_GIVES = 200e6, 200e6
"""Bytes/s that the network thread of a hub receives and sends (TLS, HTTP), whatever its link is.
Measured: 792 MB in 3.9 CPU seconds of that thread under `python benchmarks/hub.py`."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Speed of one CPU core at the work of outer steps.

    The defaults are measured by `python benchmarks/codec.py`, and `measure` is the speed of
    `isles.outer.average.inspect`; see docs/benchmarks.md. `cpu` of a fleet scales them.
    """

    encode: float
    """Numbers/s that a cluster encodes."""
    measure: float
    """Numbers/s of contributions that the hub checks: decoding, and squares summed in fp64."""
    average: float
    """Numbers/s that the hub averages, over all contributions together."""
    apply: float
    """Numbers/s of an average that a cluster decodes and applies."""
    hash: float = 0.7e9
    """Bytes/s of SHA-256 while TLS runs, for files in transfer and outer parameters."""
    copy: float = 1.0e9
    """Numbers/s of weights that are copied between the engine and outer parameters."""
    fsync_s: float = 0.02
    """Seconds until a file or the journal is on the disk."""

    def scaled(self, cpu: float) -> Costs:
        """The costs on a core that is `cpu` times as fast."""
        names = ("encode", "measure", "average", "apply", "hash", "copy")
        return replace(self, **{name: getattr(self, name) * cpu for name in names})


_GB = 0.25e9
"""Numbers in a GB of fp32."""
CODEC_COSTS: dict[CodecName, Costs] = {
    "none": Costs(2.56 * _GB, 0.090e9, 1.04 * _GB, 5.30 * _GB),
    "bf16": Costs(2.34 * _GB, 0.110e9, 1.40 * _GB, 6.14 * _GB),
    "int8": Costs(1.67 * _GB, 0.139e9, 1.27 * _GB, 4.18 * _GB),
    "int4": Costs(1.32 * _GB, 0.115e9, 1.20 * _GB, 4.08 * _GB),
    "topk": Costs(0.13 * _GB, 0.031e9, 22.2 * _GB, 0.33 * _GB),
}
"""Costs by codec. An average of topk consists of its parts, and each part is decoded."""


@dataclass(frozen=True, slots=True)
class SimulationSettings:
    """Settings of a run that its outer steps depend on.

    Args:
        fragments: trained numbers in each fragment.
        max_steps: inner steps of each cluster. None: the run ends by time.
        save_every_steps, save_every_s: interval of checkpoints. None: not set.
        tokens_per_step: tokens of one inner step of a cluster.
    """

    name: str
    fragments: tuple[int, ...]
    tokens_per_step: int
    sync_every: int
    codec: CodecConfig
    delay: int = 0
    max_steps: int | None = None
    warmup_rounds: int = 0
    warmup_sync_every: int = 0
    wait: str = "all"
    time_box_s: float = 0.0
    quorum: int = 2
    grace_s: float = 0.0
    min_clusters: int = 1
    dead_after_s: float = 10.0
    deadline_s: float = 60.0
    max_rate: float = math.inf
    has_momentum: bool = True
    save_every_steps: int | None = None
    save_every_s: float | None = 600.0
    costs: Costs = field(default=CODEC_COSTS["int8"])
    flops_per_token: float = 0.0
    max_sync_overhead: float = 0.02

    @property
    def num_fragments(self) -> int:
        return len(self.fragments)

    @property
    def parameters(self) -> int:
        """Total of trained numbers."""
        return sum(self.fragments)

    def contribution_bytes(self, fragment: int) -> int:
        return contribution_bytes(self.codec, self.fragments[fragment])

    def average_bytes(self, fragment: int, num_parts: int) -> int:
        return average_bytes(self.codec, self.fragments[fragment], num_parts)

    # The schedule of `isles.outer.trainer.sync.Schedule` and `OuterScheduler`.

    def sync_every_at(self, outer_step: int) -> int:
        is_warmup = outer_step // self.num_fragments < self.warmup_rounds
        return self.warmup_sync_every if is_warmup else self.sync_every

    def interval(self, outer_step: int) -> int:
        """Inner steps between the previous outer step and this one."""
        return max(1, self.sync_every_at(outer_step) // self.num_fragments)

    def step_of(self, outer_step: int) -> int:
        """The inner step after which an outer step is due."""
        rounds = outer_step // self.num_fragments
        short = min(rounds, self.warmup_rounds)
        before = short * self.warmup_sync_every + (rounds - short) * self.sync_every
        place = outer_step % self.num_fragments + 1
        return before + place * self.sync_every_at(outer_step) // self.num_fragments


def setting_of(loaded: Loaded, *, parameters: int | None = None) -> SimulationSettings:
    """Settings of a run file.

    Args:
        parameters: trained numbers, if the fleet file has them.

    Raises:
        UserError: the run has no outer steps, or the size of its model is unknown.
    """
    config, outer = loaded.config, loaded.config.diloco
    if outer is None or config.training.script is not None:
        raise ConfigError(
            "the run has no outer steps to simulate",
            where=loaded.where("outer.kind", "outer"),
            fix="add outer: {kind: diloco}, so that several clusters train one model",
        )
    fragments = _fragments(loaded, outer.fragments, parameters)
    if not all(fragments):
        raise ConfigError(
            f"{outer.fragments} fragments are more than the blocks of this model",
            where=loaded.where("outer.fragments", "outer"),
            fix="use fewer fragments than the model has blocks",
        )
    training, every = config.training, outer.sync_every
    return SimulationSettings(
        name=config.name,
        fragments=tuple(fragments),
        tokens_per_step=training.global_batch_size * config.data.seq_length,
        sync_every=every if isinstance(every, int) else 0,
        codec=outer.codec_config,
        delay=0 if outer.delay == "auto" else outer.delay,
        max_steps=training.max_steps,
        warmup_rounds=outer.warmup_rounds,
        warmup_sync_every=outer.warmup_sync_every or (every if isinstance(every, int) else 0),
        dead_after_s=outer.dead_after,
        deadline_s=outer.deadline,
        min_clusters=outer.min_clusters,
        max_rate=outer.max_bytes_per_s or math.inf,
        has_momentum=outer.momentum > 0,
        save_every_steps=config.checkpoint.every_steps,
        save_every_s=config.checkpoint.save_every_s,
        costs=CODEC_COSTS[outer.codec_config.kind],
        flops_per_token=6.0 * sum(fragments),
        max_sync_overhead=outer.max_sync_overhead,
        **_wait(outer),
    )


def _wait(outer: DiLoCoConfig) -> dict[str, Any]:
    rules = outer.hub_settings
    names = {"wait", "time_box_s", "quorum", "grace_s"}
    return {name: value for name, value in rules.items() if name in names}


def _fragments(loaded: Loaded, num: int, parameters: int | None) -> list[int]:
    # Trained numbers of each fragment. A Llama is split as isles does it; other models are split
    # evenly.
    config = loaded.config
    if parameters is None:
        shape = find_shape(config.model, huggingface_cache())
        if shape is None:
            raise ConfigError(
                f"the size of {config.model.name_or_path} is unknown: it is not a shape of isles, "
                "and this machine has no config.json for it",
                where=loaded.where("model.name_or_path"),
                fix="set the number of trained parameters in the fleet file, such as "
                "parameters: 7B",
            )
        if vocab_size := config.tokenizer.train_vocab_size:
            shape = shape | {"vocab_size": vocab_size}
        if shape.get("model_type") == "llama" and config.adapter.type == "none":
            return fragment_numbers(llama_sizes(shape), num)
        parameters = checkpoint_sizes(architecture(config, shape), config).trained
    return equal_fragments(parameters, num)


def auto_sync_every(wait_s: Sequence[float], step_s: Sequence[float], max_overhead: float) -> int:
    """Inner steps per round under `sync_every: auto`: the largest value that a cluster needs.

    Args:
        wait_s: for each cluster, seconds that its link needs to send and fetch all fragments.
        step_s: for each cluster, seconds of an inner step.

    Source: `isles.outer.trainer.sync.auto_sync_every`.
    """
    wanted = [
        math.ceil(wait / (max_overhead * step)) for wait, step in zip(wait_s, step_s, strict=True)
    ]
    return max(LEAST_SYNC, min(MOST_SYNC, max(wanted)))
