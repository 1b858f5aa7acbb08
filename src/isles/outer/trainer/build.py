"""Makes the outer steps of a cluster: from the run file, its engine and its run directory."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import secrets
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from isles.config.sections.outer import DiLoCoConfig, HivemindConfig
from isles.config.sections.run import RunConfig
from isles.dist.nodes import raise_first
from isles.dist.world import World
from isles.errors import ConfigError, MissingDependencyError, TrainingError, UserError
from isles.outer.client.client import Alone, Line, Link, member_of
from isles.outer.client.events import HivemindSettings, LinkSettings
from isles.outer.cluster import Cluster, Weights
from isles.outer.codec import parse_codec
from isles.outer.diloco import OuterSettings
from isles.outer.layout import Layout, make_layout
from isles.outer.messages import SAMPLE_TOKENS
from isles.outer.samples import OwnSamples
from isles.outer.trainer.outer import Outer
from isles.outer.trainer.step import Turns
from isles.outer.trainer.sync import Meter, OuterCoordinator, Progress, Recorder
from isles.run.manifest import CheckpointInfo
from isles.run.paths import RunDir
from isles.run.records import read_record, write_record

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Between:
    """What of the outer steps is there before the other clusters are joined.

    Args:
        config: the section of the run file.
        name: of the cluster.
        member_id: of the cluster, for the whole run.
        cluster: outer parameters and outer optimizer.
        layout: of the run.
        manifest: what the checkpoint says of outer steps; None: nothing, or there is none.
    """

    config: DiLoCoConfig
    name: str
    member_id: str
    cluster: Cluster
    layout: Layout
    manifest: dict[str, Any] | None
    turns: Turns | None = None

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint that has outer state is loaded into: it is taken over then."""
        return {} if self.manifest is None else self.cluster.state_dict()

    def begin(self, progress: Progress, recorder: Recorder) -> OwnSamples:
        """The turns as the checkpoint has them, or before the first one. All ranks must call this.

        Returns:
            Which samples this cluster reads.
        """
        samples = OwnSamples(self.member_id)
        self.turns = Turns(
            self.config, self.name, self.cluster, self.layout, samples, progress, recorder
        )
        if self.manifest is not None:
            self.turns.restore(self.manifest)
        else:
            samples.begin_at(progress.samples)
            self.cluster.begin()
        return samples


def make_between(
    config: RunConfig,
    engine: Weights,
    world: World,
    run_dir: RunDir,
    resume_from: CheckpointInfo | None,
) -> Between | None:
    """Room for the outer state; None where there are no outer steps. All ranks must call this.

    Raises:
        UserError: the strategy, or the checkpoint, does not go together with them.
    """
    outer = config.diloco
    if outer is None:
        return None
    layout = make_layout(
        engine.trained_shapes(), parse_codec(outer.codec_text), num_fragments=outer.fragments
    )
    settings = OuterSettings(outer.lr, outer.momentum, outer.max_norm)
    cluster = Cluster(engine, world, layout, settings)
    manifest = None if resume_from is None else resume_from.manifest.get("outer")
    if manifest is not None:
        if manifest["layout"] != layout.digest:
            raise TrainingError(
                "the checkpoint's outer state is of other weights, fragments or codec",
                where="outer",
                fix="go on with the section outer and the adapter that the run began with",
            )
        turns = [int(sent["turn"]) for sent in manifest["sent"]]
        cluster.expect([turn % outer.fragments for turn in turns])
    member_id = world.main_first(lambda: _member_id(run_dir))
    return Between(outer, config.clusters[0].name, member_id, cluster, layout, manifest)


def join_clusters(
    between: Between,
    config: RunConfig,
    world: World,
    run_dir: RunDir,
    *,
    recorder: Recorder,
    meter: Meter,
    forget_ahead: Callable[[], None],
    requested: Callable[[], int],
    total_steps: int | None,
    data_content: str,
    base: dict[str, str] | None,
) -> Outer:
    """Join the other clusters, with rank 0's line to them. All ranks must call this.

    Args:
        between: after `begin`.
        config: the run file.
        world: the ranks.
        run_dir: of the run.
        recorder, meter: of the run.
        forget_ahead: drops samples that were read in advance.
        requested: what this rank wants at the end of a step: an exit code, or 0.
        total_steps: of the run, if it is known.
        data_content: digest of the samples.
        base: fingerprint of frozen weights, if there are any.

    Raises:
        UserError: this cluster is not let in, or does not reach the rendezvous.
    """
    turns = between.turns
    assert turns is not None
    outer_params = turns.outer_params()
    coordinator = None
    fault: UserError | None = None
    if world.is_main:
        try:
            identity = _identity(config, total_steps, data_content, base)
            run = config.name.removesuffix(f"-{between.name}")
            turns.line = _start_line(between, turns, run_dir, outer_params, identity, run)
            coordinator = OuterCoordinator(
                between.config,
                turns.line,
                num_fragments=turns.num_fragments,
                batch=config.training.global_batch_size,
                total_steps=total_steps,
                recorder=recorder,
            )
        except UserError as error:
            fault = error
    raise_first(world.gather(fault))
    outer = Outer(
        turns,
        coordinator,
        world=world,
        batch=config.training.global_batch_size,
        forget_ahead=forget_ahead,
        meter=meter,
        recorder=recorder,
        total_steps=total_steps,
        requested=requested,
    )
    outer.begin(is_new=between.manifest is None)
    return outer


def _member_id(run_dir: RunDir) -> str:
    path = run_dir.outer / "member.json"
    record = read_record(path)
    if record is None:
        run_dir.outer.mkdir(mode=0o700, exist_ok=True)
        record = {"id": secrets.token_hex(16)}
        write_record(path, record)
    return str(record["id"])


def _start_line(
    between: Between,
    turns: Turns,
    run_dir: RunDir,
    outer_params: list[str],
    identity: dict[str, str],
    run: str,
) -> Line:
    spool = run_dir.outer / "spool"
    is_hivemind = between.config.engine == "hivemind"
    if is_hivemind and importlib.util.find_spec("hivemind") is None:
        raise MissingDependencyError(
            "engine hivemind needs the package hivemind, which is not installed",
            where=f"outer.engine, {sys.executable}",
            fix="pip install 'isles[hivemind]'",
        )
    if not is_hivemind and not run_dir.join_line.exists():
        if between.config.rendezvous is not None or between.config.min_clusters > 1:
            raise ConfigError(
                "this cluster does not know how to reach the others: it has no join line",
                where=str(run_dir.join_line),
                fix="`isles rendezvous` writes the line, and `isles join` puts it here",
            )
        log.warning("outer: there is no %s: this cluster averages alone", run_dir.join_line)
        return Alone(
            between.layout,
            between.name,
            spool,
            version=turns.version,
            next_sample=turns.samples.frontier,
        )
    return Link(
        member_of(
            between.layout, name=between.name, member_id=between.member_id, identity=identity
        ),
        LinkSettings(
            max_bytes_per_s=between.config.max_bytes_per_s,
            hivemind=_hivemind(between.config, run) if is_hivemind else None,
        ),
        join_file=run_dir.join_line,
        spool=spool,
        version=turns.version,
        outer_params=outer_params,
        holding=turns.holding,
    )


def _hivemind(outer: DiLoCoConfig, run: str) -> HivemindSettings:
    found = outer.hivemind or HivemindConfig()
    return HivemindSettings(run=run, rules=outer.rendezvous_settings, **found.model_dump())


def _identity(
    config: RunConfig, total_steps: int | None, data_content: str, base: dict[str, str] | None
) -> dict[str, str]:
    outer = config.diloco
    assert outer is not None
    training, seq_length = config.training, config.data.seq_length
    found = {
        "adapter.type": config.adapter.type,
        "data": data_content[:16],
        "data.seq_length": str(seq_length),
        "seed": str(config.seed),
        "steps of the run": str(total_steps),
        "training.method": training.method,
        "outer.sync_every": str(outer.sync_every),
        "outer.fragments": str(outer.fragments),
        "outer.lr": repr(outer.lr),
        "outer.momentum": repr(outer.momentum),
        "outer.max_norm": repr(outer.max_norm),
        "outer.delay": str(outer.delay),
        "outer.alpha": repr(outer.alpha),
        "outer.engine": outer.engine,
        # A pair of dpo has two answers.
        SAMPLE_TOKENS: str(seq_length * (2 if training.method == "dpo" else 1)),
    }
    if outer.warmup_rounds:
        found["outer.warmup_rounds"] = str(outer.warmup_rounds)
        found["outer.warmup_sync_every"] = str(outer.warmup_sync_every)
    if base is not None:
        text = json.dumps(base, sort_keys=True)
        found["the frozen weights"] = hashlib.sha256(text.encode()).hexdigest()[:16]
    return found
