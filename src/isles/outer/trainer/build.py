"""Construction of a cluster's outer steps, from the run file, its engine and its run directory."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import logging
import secrets
import sys
from collections.abc import Callable

from isles.config.sections.outer import DiLoCoConfig, HivemindConfig
from isles.config.sections.run import RunConfig
from isles.dist.world import World
from isles.errors import ConfigError, MissingDependencyError, TrainingError, not_installed
from isles.outer.bucket import BucketSettings
from isles.outer.bucket.api import BucketMeeting
from isles.outer.client.api import HubMeeting
from isles.outer.client.client import HubClient, OuterLink, SingleCluster
from isles.outer.client.meeting import Meeting
from isles.outer.client.spool import Spool
from isles.outer.cluster import Cluster, Weights
from isles.outer.codec import parse_codec
from isles.outer.diloco import OuterSettings
from isles.outer.hivemind import HivemindSettings
from isles.outer.layout import make_layout
from isles.outer.messages import Join
from isles.outer.trainer.outer import Meter, Outer
from isles.outer.trainer.step import OuterStep, Recorder
from isles.outer.trainer.sync import OuterScheduler
from isles.run.checkpoints import CheckpointInfo
from isles.run.paths import RunDir
from isles.run.records import read_record, write_record
from isles.run.relay import pack

log = logging.getLogger(__name__)


def make_exchange(
    config: RunConfig,
    engine: Weights,
    world: World,
    run_dir: RunDir,
    recorder: Recorder,
    resume_from: CheckpointInfo | None,
) -> OuterStep:
    """Allocate the outer state. All ranks must call this.

    Raises:
        UserError: the strategy, or the checkpoint, is incompatible with outer steps.
    """
    outer = config.diloco
    assert outer is not None
    layout = make_layout(
        engine.trained_shapes(), parse_codec(outer.codec_text), num_fragments=outer.fragments
    )
    cluster = Cluster(
        engine, world, layout, OuterSettings(outer.lr, outer.momentum, outer.max_norm)
    )
    manifest = None if resume_from is None else resume_from.manifest.get("outer")
    if resume_from is not None and manifest is not None:
        with resume_from.reading("outer"):
            found = manifest["layout"]
            sent = [int(one["outer_step"]) % outer.fragments for one in manifest["sent"]]
        if found != layout.digest:
            raise TrainingError(
                "the checkpoint's outer state has other weights, fragments or another codec",
                where="outer",
                fix="resume with the section outer and the adapter that the run started with",
            )
        cluster.expect(sent)

    def member_id() -> str:
        # The cluster's id for the whole run; created at its first start.
        path = run_dir.outer / "member.json"
        record = read_record(path)
        if record is None:
            run_dir.outer.mkdir(mode=0o700, exist_ok=True)
            record = {"id": secrets.token_hex(16)}
            write_record(path, record)
        return str(record["id"])

    name, own_id = config.clusters[0].name, world.main_first(member_id)
    return OuterStep(outer, name, own_id, cluster, layout, recorder, manifest)


def join_clusters(
    exchange: OuterStep,
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
    """Join the other clusters. All ranks must call this.

    Args:
        exchange: after `begin`.
        forget_ahead, requested: see `Outer`.
        data_content: digest of the samples.
        base: fingerprint of frozen weights, if there are any.

    Raises:
        UserError: this cluster is refused, or cannot reach the hub.
    """
    outer_params = exchange.outer_params()
    batch = config.training.global_batch_size
    scheduler = None

    def coordinate() -> None:
        nonlocal scheduler
        identity = _identity(config, exchange.config, total_steps, data_content, base)
        exchange.hub = _open_hub(exchange, config, run_dir, outer_params, identity, recorder)
        scheduler = OuterScheduler(
            exchange, exchange.hub, batch=batch, total_steps=total_steps, recorder=recorder
        )

    world.main_first(coordinate)
    outer = Outer(
        exchange,
        scheduler,
        world=world,
        batch=batch,
        forget_ahead=forget_ahead,
        meter=meter,
        recorder=recorder,
        total_steps=total_steps,
        requested=requested,
    )
    outer.begin(is_new=exchange.loaded is None)
    return outer


def _open_hub(
    exchange: OuterStep,
    config: RunConfig,
    run_dir: RunDir,
    outer_params: list[str],
    identity: dict[str, str],
    recorder: Recorder,
) -> OuterLink:
    outer, layout, spool = exchange.config, exchange.layout, run_dir.outer / "spool"
    pieces = [layout.piece_counts(fragment) for fragment in range(exchange.num_fragments)]
    run = config.name.removesuffix(f"-{exchange.name}")
    meeting: Meeting
    if outer.engine == "hivemind":
        if importlib.util.find_spec("hivemind") is None:
            raise MissingDependencyError(
                "engine hivemind needs the package hivemind, which is not installed",
                where=f"outer.engine, {sys.executable}",
                fix="run pip install 'isles[hivemind]'",
            )
        given = (outer.hivemind or HivemindConfig()).model_dump()
        from isles.outer.hivemind.host import HivemindMeeting

        meeting = HivemindMeeting(HivemindSettings(run=run, rules=outer.hub_settings, **given))
    elif outer.engine == "bucket":
        assert outer.url is not None
        if outer.url.startswith("s3") and (
            error := not_installed(
                "s3fs", f"engine bucket at {outer.url}", f"outer.engine, {sys.executable}", "bucket"
            )
        ):
            raise error
        url = f"{outer.url.rstrip('/')}/{run}"
        meeting = BucketMeeting(BucketSettings(url=url, rules=outer.hub_settings))
        # Each cluster applies the rules by itself, so the rules must be equal.
        identity |= {f"outer: {key}": str(value) for key, value in outer.hub_settings.items()}
    elif not run_dir.join_line.exists():
        if outer.hub is not None or outer.min_clusters > 1:
            raise ConfigError(
                "this cluster cannot reach the others, because it has no join line",
                where=str(run_dir.join_line),
                fix="create the line with `isles hub`, and pass it to `isles join`",
            )
        log.warning("outer: %s not found, so this cluster averages alone", run_dir.join_line)
        files = Spool.of(spool, pieces, exchange.version, kept=0)
        return SingleCluster(layout, exchange.name, files, next_sample=exchange.samples.frontier)
    else:
        meeting = HubMeeting(run_dir.join_line)
    join = Join(
        id=exchange.member_id,
        name=exchange.name,
        identity={"layout": layout.digest, **identity},
        codec=layout.codec.text,
        pieces=pieces,
        version=exchange.version,
        outer_params=outer_params,
        holding=exchange.holding,
    )
    return HubClient(
        join,
        meeting=meeting,
        spool=spool,
        note=recorder.note,
        max_bytes_per_s=outer.max_bytes_per_s,
        shows=functools.partial(pack, run_dir),
    )


def _identity(
    config: RunConfig,
    outer: DiLoCoConfig,
    total_steps: int | None,
    data_content: str,
    base: dict[str, str] | None,
) -> dict[str, str]:
    # Values that must be equal on all clusters, by the names that users know.
    training, seq_length = config.training, config.data.seq_length
    of_outer = ["sync_every", "fragments", "lr", "momentum", "max_norm", "delay", "alpha", "engine"]
    if outer.warmup_rounds:
        of_outer += ["warmup_rounds", "warmup_sync_every"]
    found = {
        "adapter.type": config.adapter.type,
        "data": data_content[:16],
        "data.seq_length": str(seq_length),
        "seed": str(config.seed),
        "steps of the run": str(total_steps),
        "training.method": training.method,
    }
    found |= {f"outer.{name}": str(getattr(outer, name)) for name in of_outer}
    if base is not None:
        text = json.dumps(base, sort_keys=True)
        found["the frozen weights"] = hashlib.sha256(text.encode()).hexdigest()[:16]
    return found
