"""The whole plan: all of its sections, for the screen and for JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from isles.config.clusters import keys_of_cluster, of_cluster
from isles.config.length import Data, data_of, guessed_issues
from isles.config.load import Loaded
from isles.config.memory import checkpoint_sizes
from isles.config.roofline import ASSUMPTIONS
from isles.config.sections.run import RunConfig
from isles.errors import ConfigError, UserError
from isles.facts.memory.result import PhaseMemory
from isles.plan.links import OuterPlan, outer_plan
from isles.plan.machines import Link, Machines, summary
from isles.plan.measured import Measured, find_measured
from isles.plan.model import ModelFacts
from isles.plan.outcome import Outcome, RankPlan
from isles.plan.step import Job, alone, is_compiled, outcome, with_values
from isles.plan.ways import Candidate, Rung, climb, compare, name_of

PROCESS_BYTES = 2.5 * 2**30
"""Memory of a rank's process with Python, torch and its libraries, next to a GPU. A guess."""

CPU_HOST_BYTES, CPU_RANK_BYTES = 0.4 * 2**30, 0.1 * 2**30
"""Memory of the processes of a host without GPUs: once for the command, the agent and the modules
that the ranks share, and for each rank. Measured by benchmarks/qlora_large.py."""

"""Bytes of English text per token, for tokenizers of 32 thousand tokens and more. A guess."""


@dataclass(frozen=True, slots=True)
class Item:
    """Bytes for one purpose."""

    name: str
    size_bytes: float
    is_guess: bool = False


@dataclass(frozen=True, slots=True)
class HostStorage:
    """Main memory or disk of one host. `has_bytes` is None if it is unknown."""

    host: str
    what: str
    items: tuple[Item, ...]
    has_bytes: float | None

    @property
    def needed_bytes(self) -> float:
        return sum(item.size_bytes for item in self.items)


@dataclass(frozen=True, slots=True)
class Price:
    """Price of a kWh, or of an hour of one GPU. 0: not given."""

    per_kwh: float = 0.0
    per_hour: float = 0.0


@dataclass(frozen=True, slots=True)
class Speed:
    """Training speed of one cluster: as measured in an earlier run, or a guess.

    Args:
        step_s: seconds per step.
        measured: the earlier run. None: all values are guesses.
        mfu: model FLOPs over the FLOPs of the GPU table. None: a GPU is not in the table.
        left_s: seconds to the end, with averaging. None: the number of steps is unknown.
        even_s, alone_s: seconds per step with even rows, and on the fastest GPU alone. None:
            unknown, or the run does not fit.
        gains: speedup of a setting by its name: seconds per step now over seconds with it.
        watts: power limit of all GPUs together.
    """

    step_s: float
    measured: Measured | None
    tokens_per_s: float
    mfu: float | None
    left_s: float | None
    even_s: float | None
    alone_s: float | None
    fastest: str
    gains: dict[str, float]
    watts: float | None


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """The plan of one cluster."""

    job: Job
    own: Outcome
    ladder: tuple[Rung, ...]
    strategies: tuple[Candidate, ...]
    stores: tuple[HostStorage, ...]
    speed: Speed | None

    @property
    def first_fit(self) -> Rung | None:
        """The first memory-saving option that fits."""
        return next((rung for rung in self.ladder if rung.is_first), None)


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of a run file.

    Args:
        issue: why the plan has only the machines. None: the plan is complete.
    """

    loaded: Loaded
    machines: tuple[Machines, ...]
    model: ModelFacts | None
    issue: UserError | None
    data: Data
    clusters: tuple[ClusterPlan, ...]
    outer: OuterPlan | None
    price: Price

    @property
    def config(self) -> RunConfig:
        return self.loaded.config

    @property
    def tokens_per_step(self) -> int:
        """Maximum of tokens in an inner step of one cluster."""
        training = self.config.training
        rows = training.global_batch_size * (2 if training.method == "dpo" else 1)
        return rows * self.config.data.seq_length

    def refusal(self, cluster: ClusterPlan) -> ConfigError:
        """Error for a cluster that isles refuses, with the place in the run file."""
        assert cluster.own.issue is not None
        index = self.clusters.index(cluster)
        (error,) = of_cluster(self.loaded, index).errors([cluster.own.issue])
        error.where = keys_of_cluster(error.where, index)
        return error

    @property
    def fits(self) -> bool | None:
        """True if every cluster fits. None: unknown."""
        answers = [cluster.own.fits for cluster in self.clusters]
        return False if False in answers else None if None in answers or not answers else True


def make_plan(
    loaded: Loaded,
    machines: Sequence[Machines],
    model: ModelFacts | UserError,
    shape: dict[str, object],
    hub: Link,
    price: Price,
) -> Plan:
    """The plan of a run file on machines. Without a model, the plan has only the machines."""
    config, data = loaded.config, data_of(loaded.config)
    if isinstance(model, UserError):
        return Plan(loaded, tuple(machines), None, model, data, (), None, price)
    jobs = [
        Job(config.of_cluster(index), model.architecture, shape, own)
        for index, own in enumerate(machines)
    ]
    owns = [outcome(job) for job in jobs]
    seen = [find_measured(job, own) for job, own in zip(jobs, owns, strict=True)]
    owns = [_as_seen(*each) for each in zip(owns, seen, strict=True)]
    steps = [_step_s(*each) for each in zip(jobs, owns, seen, strict=True)]
    outer = None
    if config.diloco is not None:
        outer = outer_plan(config.diloco, model.trained, machines, hub, steps)
    clusters = tuple(
        ClusterPlan(
            job=job,
            own=own,
            ladder=tuple(climb(job, own)) if not own.refused else (),
            strategies=tuple(compare(job, own)) if not own.refused else (),
            stores=tuple(_stores(job, own, model, data)),
            speed=_speed(job, own, model, data, outer, measured),
        )
        for job, own, measured in zip(jobs, owns, seen, strict=True)
    )
    return Plan(loaded, tuple(machines), model, None, data, clusters, outer, price)


def _as_seen(own: Outcome, measured: Measured | None) -> Outcome:
    # On a CPU, the measured memory is of the whole process.
    if measured is None or not own.tightest.device.is_cuda:
        return own
    return replace(own, seen_bytes=measured.memory_bytes)


def _step_s(job: Job, own: Outcome, measured: Measured | None) -> float | None:
    if measured is not None:
        return measured.of_rows(job.config.training.global_batch_size)
    return _seconds(own)


def _speed(
    job: Job,
    own: Outcome,
    model: ModelFacts,
    data: Data,
    outer: OuterPlan | None,
    measured: Measured | None,
) -> Speed | None:
    step_s, guess_s = _step_s(job, own, measured), _seconds(own)
    if step_s is None:
        return None
    config, devices = job.config, job.machines.devices
    rows = config.training.global_batch_size * (2 if job.is_dpo else 1)
    tokens_per_s = rows * config.data.seq_length / step_s
    if measured is not None:
        tokens_per_s = measured.tokens_per_s
    table = [device.gpu.bf16_flops if device.gpu else 0.0 for device in devices]
    mfu = tokens_per_s * model.flops_per_token / sum(table) if all(table) else None
    left_s = None if data.steps is None else data.steps * step_s
    if data.steps is not None and outer is not None and outer.overhead is not None:
        assert outer.step_s is not None
        each_s = max(step_s, outer.step_s) if outer.waits else step_s
        left_s = data.steps * (each_s + outer.overhead * outer.step_s)
    even = _seconds(outcome(job, with_values(config, {"balance": "even"})))
    fastest = max(range(len(devices)), key=lambda rank: devices[rank].flops)
    single = outcome(alone(job, fastest)) if len(devices) > 1 else None
    watts = [device.gpu.watts if device.gpu else 0.0 for device in devices]
    return Speed(
        step_s=step_s,
        measured=measured,
        tokens_per_s=tokens_per_s,
        mfu=mfu,
        left_s=left_s,
        even_s=even if len(devices) > 1 else None,
        alone_s=_seconds(single) if single is not None and single.fits else None,
        fastest=devices[fastest].name,
        gains=dict(_gains(job, own, guess_s)) if guess_s else {},
        watts=sum(watts) if all(watts) else None,
    )


def _gains(job: Job, own: Outcome, step_s: float) -> list[tuple[str, float]]:
    # Under the strategy of the plan, because auto may choose another one for other values.
    found = []
    job = replace(job, config=with_values(job.config, {"strategy": own.strategy}))
    training = job.config.training
    changes: dict[str, dict[str, object]] = {}
    is_cuda = all(device.is_cuda for device in job.machines.devices)
    if training.precision == "32-true" and is_cuda:
        changes["bf16-mixed"] = {"training.precision": "bf16-mixed"}
        if not training.tf32:
            changes["tf32"] = {"training.tf32": True}
    if not is_compiled(job, job.config):
        changes["torch_compile"] = {"training.torch_compile": True}
    for name, values in changes.items():
        other = _seconds(outcome(job, with_values(job.config, values)))
        if other:
            found.append((name, step_s / other))
    if training.precision != "32-true" and is_cuda:
        # Speedup of the present 16 bits over 32 bits.
        exact = {"precision": "32-true", "stochastic_rounding": False, "tf32": False}
        wide = with_values(job.config, {f"training.{key}": value for key, value in exact.items()})
        other = _seconds(outcome(job, wide))
        if other:
            found.append((f"{training.precision} over 32-true", other / step_s))
    return found


def _seconds(found: Outcome) -> float | None:
    return found.time.total_s if found.time else None


def _stores(job: Job, own: Outcome, model: ModelFacts, data: Data) -> list[HostStorage]:
    """Main memory of each host, and the disk of the first, which has the run directory."""
    found = []
    rank = 0
    for host in job.machines.hosts:
        count = len(host.devices)
        items = tuple(_in_memory(job, own, model, rank, count))
        found.append(HostStorage(host.name, "main memory", items, host.memory_bytes))
        rank += count
    first = job.machines.hosts[0]
    items = tuple(_on_disk(job, model, data))
    return [*found, HostStorage(first.name, "disk", items, first.disk_free_bytes)]


def _in_memory(job: Job, own: Outcome, model: ModelFacts, rank: int, count: int) -> Iterator[Item]:
    ranks = own.ranks[rank : rank + count]
    processes = count * PROCESS_BYTES
    if not any(device.is_cuda for device in job.machines.devices):
        processes = CPU_HOST_BYTES + count * CPU_RANK_BYTES
    yield Item("processes", processes, is_guess=True)
    if steps := sum(each.peak_bytes for each in ranks if not each.device.is_cuda):
        yield Item("steps of the ranks", steps)
    offloaded = sum(each.memory.host for each in ranks)
    if offloaded:
        yield Item("offloaded", offloaded)
    if own.ranks:
        saved = sum(each.memory.saved for each in ranks)
        yield Item("a checkpoint being written", saved)
    diloco = job.config.diloco
    if diloco is not None:
        # Outer parameters, momentum and encoding errors, in fp32, sharded over the ranks.
        width = 4 + 4 * bool(diloco.momentum)
        width += 4 * (diloco.codec_config.kind in ("int8", "int4", "topk"))
        share = count / len(job.machines.devices)
        yield Item(f"outer parameters ({width} bytes each)", model.trained * width * share)


def _on_disk(job: Job, model: ModelFacts, data: Data) -> Iterator[Item]:
    config = job.config
    sizes = checkpoint_sizes(job.model, config)
    kept, number = config.checkpoint.keep, config.checkpoint.keep + 1
    yield Item(f"{number} checkpoints ({kept} kept, one being written)", sizes.checkpoints)
    if sizes.export:
        yield Item("export", sizes.export)
    if data.tokens is not None and not config.data.streaming:
        wide = 2 if job.model.vocab <= 1 << 16 else 4
        yield Item("prepared tokens", data.tokens * wide, is_guess=True)
    if config.model.init == "pretrained" and model.is_on_huggingface:
        yield Item("weights to download (16 bits)", model.params * 2, is_guess=True)


def record(plan: Plan) -> dict[str, Any]:
    """The plan for JSON: bytes, seconds, and the source of each figure."""
    found: dict[str, Any] = {
        "run_file": str(plan.loaded.path),
        "name": plan.config.name,
        "fits": plan.fits,
        "tokens_per_step": plan.tokens_per_step,
        "steps": plan.data.steps,
        "data_tokens": plan.data.tokens,
        "length_notes": [issue.what for issue in guessed_issues(plan.config, plan.data)],
        "machines": [_machines(own) for own in plan.machines],
        "assumptions": list(ASSUMPTIONS),
    }
    if plan.issue is not None:
        issue = plan.issue
        found["issue"] = {
            "id": issue.id,
            "what": issue.what,
            "where": issue.where,
            "fix": issue.fix,
        }
    if plan.model is not None:
        own = {name: getattr(plan.model, name) for name in _MODEL}
        found["model"] = own
    found["clusters"] = [_cluster(plan, cluster) for cluster in plan.clusters]
    found["outer"] = asdict(plan.outer) if plan.outer is not None else None
    return found


_MODEL = (
    *("name", "kind", "origin", "params", "trained", "active", "layers", "flops_per_token"),
    *("files_params", "is_guess", "is_on_huggingface"),
)


def _machines(machines: Machines) -> dict[str, Any]:
    return {
        "cluster": machines.name,
        "text": summary(machines),
        "hosts": [
            {
                "name": host.name,
                "devices": [
                    {
                        "name": device.name,
                        "memory_bytes": device.memory_bytes,
                        "free_bytes": device.free_bytes,
                        "confidence": device.confidence,
                    }
                    for device in host.devices
                ],
            }
            for host in machines.hosts
        ],
        "network": asdict(machines.network),
        "line": asdict(machines.line),
        "notes": list(machines.notes),
    }


def _cluster(plan: Plan, cluster: ClusterPlan) -> dict[str, Any]:
    own = cluster.own
    found: dict[str, Any] = {
        "name": cluster.job.machines.name,
        "strategy": name_of(own.strategy),
        "fits": own.fits,
        "refused": own.refused,
        **_refusal(plan, cluster),
        "ranks": [_rank(number, rank) for number, rank in enumerate(own.ranks)],
        "stores": [
            {
                "host": store.host,
                "what": store.what,
                "needed_bytes": store.needed_bytes,
                "has_bytes": store.has_bytes,
                "items": [asdict(item) for item in store.items],
            }
            for store in cluster.stores
        ],
        "ladder": [_rung(rung) for rung in cluster.ladder],
        "strategies": [_candidate(each) for each in cluster.strategies],
        "time": _time(own),
        "speed": asdict(cluster.speed) if cluster.speed is not None else None,
        "cost": cost(plan, cluster),
    }
    return found


def _refusal(plan: Plan, cluster: ClusterPlan) -> dict[str, Any]:
    if cluster.own.issue is None:
        return {}
    error = plan.refusal(cluster)
    return {"where": error.where, "fix": error.fix}


def _rank(number: int, rank: RankPlan) -> dict[str, Any]:
    return {
        "rank": number,
        "host": rank.host,
        "device": rank.device.name,
        "confidence": rank.device.confidence,
        "rows": rank.rows,
        "micro_batch": rank.micro_batch,
        "total_bytes": rank.device.memory_bytes,
        "free_bytes": rank.device.free_bytes,
        "context_bytes": rank.context_bytes,
        "peak_bytes": rank.peak_bytes,
        "peak_moment": rank.memory.peak.name,
        "limit_bytes": rank.limit_bytes,
        "fits": rank.fits,
        "moments": [_moment(moment) for moment in rank.memory.moments],
        "busy_s": rank.busy_s,
        "layers": rank.layers,
    }


def _moment(moment: PhaseMemory) -> dict[str, Any]:
    return {"name": moment.name, "total": moment.total, **moment.by_cause()}


def _time(own: Outcome) -> dict[str, Any] | None:
    return None if own.time is None else {**asdict(own.time), "total_s": own.time.total_s}


def _brief(found: Outcome) -> dict[str, Any]:
    if found.refused:
        return {"refused": found.refused, "fits": False}
    tightest = found.tightest
    return {
        "fits": found.fits,
        "peak_bytes": tightest.least.peak.total,
        "limit_bytes": tightest.limit_bytes,
        "step_s": _seconds(found),
        "sent_bytes": found.time.sent_bytes if found.time else None,
    }


def _rung(rung: Rung) -> dict[str, Any]:
    brief = _brief(rung.outcome)
    own = {"name": rung.name, "price": rung.price, "slower": rung.slower}
    return {**own, "is_first": rung.is_first, **brief}


def _candidate(each: Candidate) -> dict[str, Any]:
    own = {"name": each.name, "is_chosen": each.is_chosen, "note": each.note}
    return {**own, **_brief(each.outcome)}


def cost(plan: Plan, cluster: ClusterPlan) -> dict[str, float] | None:
    """Energy of all GPUs to the end, at their power limit. With a price, also the cost."""
    speed = cluster.speed
    devices = cluster.job.machines.devices
    if speed is None or speed.left_s is None or not all(d.is_cuda for d in devices):
        return None
    hours = speed.left_s / 3600
    found = {"gpu_hours": hours * len(devices)}
    if speed.watts is not None:
        found["kwh"] = speed.watts * hours / 1000
    money = found["gpu_hours"] * plan.price.per_hour
    money += found.get("kwh", 0.0) * plan.price.per_kwh
    return {**found, "money": money} if money else found
