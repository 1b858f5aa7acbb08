"""The rules of the section `outer`, and of several clusters in one run file."""

from __future__ import annotations

from collections.abc import Iterator

from isles.config.issues import Issue
from isles.config.rules.idle import idle_keys
from isles.config.sections.outer import DiLoCoConfig, WaitConfig
from isles.config.sections.run import RunConfig

_DELETE = "delete it"
_MOST_TOPK_MOMENTUM = 0.7


def outer_rules(config: RunConfig) -> Iterator[Issue]:
    """Every broken rule about several clusters and their averages."""
    yield from _clusters(config)
    if config.diloco is not None and config.training.script is None:
        yield from _outer_steps(config, config.diloco)
        yield from _warmup(config, config.diloco)
        yield from _waits(config.diloco)
        yield from idle_keys(config, "outer")
        yield from _odd_values(config.diloco)
        yield from _not_together(config)


def _clusters(config: RunConfig) -> Iterator[Issue]:
    names = [cluster.name for cluster in config.clusters]
    for index, name in enumerate(names):
        if names.index(name) < index:
            yield Issue(
                (f"clusters.{index}.name", f"clusters.{index}", "clusters"),
                f"clusters.{names.index(name)} also has the name {name}",
                "give each cluster a different name",
            )
        for key in ("strategy", "balance"):
            if config.training.script is not None and getattr(config.clusters[index], key):
                yield Issue(
                    (f"clusters.{index}.{key}",),
                    f"{key} has no effect with training.script, which does not read the run file",
                    _DELETE,
                )
    if len(config.clusters) > 1 and config.training.script is not None:
        yield Issue(
            ("clusters", "training.script"),
            f"a script runs on one cluster, and the run file has {len(config.clusters)}",
            "keep one cluster, which may have several nodes",
        )
    elif len(config.clusters) > 1 and config.diloco is None:
        yield Issue(
            ("outer.kind", "outer", "clusters"),
            f"{len(config.clusters)} clusters need outer.kind diloco to train one model",
            "add outer: {kind: diloco}, or put hosts on one fast network into one cluster",
        )


def _outer_steps(config: RunConfig, outer: DiLoCoConfig) -> Iterator[Issue]:
    if outer.engine == "bucket" and outer.url is None:
        yield Issue(
            ("outer.engine", "outer"),
            "the engine bucket needs outer.url, a place in object storage",
            "set outer.url: s3://BUCKET/PREFIX, the same for all clusters",
        )
    place = (outer.url or "").partition("://")[2]
    if "@" in place.partition("/")[0] or "?" in place:
        yield Issue(
            ("outer.url",),
            "the address contains credentials, which do not belong in a run file",
            "write only s3://BUCKET/PREFIX. isles finds credentials like your provider's own "
            "tools (AWS_PROFILE, ~/.aws, gcloud)",
        )
    every, steps = outer.sync_every, config.training.max_steps
    if not isinstance(every, int):
        if isinstance(outer.wait, WaitConfig):
            yield Issue(
                ("outer.wait", "outer.sync_every"),
                "sync_every auto works only with wait: all, as early contributions need a fixed "
                "schedule",
                "use wait: all, or a number for sync_every",
            )
        return
    if steps is not None and every > steps:
        yield Issue(
            ("outer.sync_every", "training.max_steps", "outer"),
            f"sync_every {every} is more than max_steps {steps}, so the clusters would average "
            "only once, at the end",
            f"use at most {max(1, steps // 2)}",
        )
    yield from _outer_steps_fit(outer, "sync_every", every)


def _outer_steps_fit(outer: DiLoCoConfig, key: str, every: int) -> Iterator[Issue]:
    if outer.fragments > every:
        yield Issue(
            ("outer.fragments", f"outer.{key}"),
            f"{outer.fragments} fragments do not fit {key} {every}: each fragment needs its own "
            "step",
            f"use at most {every} fragments",
        )
    elif outer.delay != "auto" and outer.delay >= every / outer.fragments:
        apart = every / outer.fragments
        yield Issue(
            ("outer.delay", f"outer.{key}"),
            f"delay {outer.delay} lasts until the next round, which begins {apart:g} steps later",
            f"use less than {apart:g}, or a longer {key}",
        )


def _warmup(config: RunConfig, outer: DiLoCoConfig) -> Iterator[Issue]:
    # Rounds that only average, at first.
    short, every, steps = outer.warmup_sync_every, outer.sync_every, config.training.max_steps
    if not outer.warmup_rounds or not isinstance(every, int):
        return
    if short is not None and short > every:
        yield Issue(
            ("outer.warmup_sync_every", "outer.sync_every"),
            f"warmup_sync_every {short} is more than sync_every {every}, but the first rounds "
            "should be shorter",
            f"use at most {every}",
        )
    elif short is not None:
        yield from _outer_steps_fit(outer, "warmup_sync_every", short)
    if steps is not None and (ends := outer.warmup_rounds * (short or every)) >= steps:
        yield Issue(
            ("outer.warmup_rounds", "training.max_steps", "outer"),
            f"warmup_rounds {outer.warmup_rounds} last until step {ends}, and max_steps is "
            f"{steps}, so the run would never use the outer optimizer",
            "use fewer warmup_rounds. For averages only, set outer.lr: 1 and outer.momentum: 0 "
            "instead",
        )


def _waits(outer: DiLoCoConfig) -> Iterator[Issue]:
    wait = outer.wait
    if not isinstance(wait, WaitConfig):
        return
    if (wait.time_boxed is None) == (wait.quorum is None):
        both = "both time_boxed and quorum give" if wait.quorum else "neither time_boxed nor quorum"
        says = both if wait.quorum else f"{both} gives"
        yield Issue(
            ("outer.wait.quorum", "outer.wait"),
            f"{says} the end of a round",
            "write wait: all, or {time_boxed: 60s}, or {quorum: 2, grace: 30s}",
        )
    if wait.quorum is not None and wait.quorum < outer.min_clusters:
        yield Issue(
            ("outer.wait.quorum", "outer.min_clusters"),
            f"quorum {wait.quorum} is less than min_clusters {outer.min_clusters}",
            "raise quorum, or lower min_clusters",
        )


def _odd_values(outer: DiLoCoConfig) -> Iterator[Issue]:
    # Keys with a useless or harmful value.
    if outer.codec_config.kind == "topk" and outer.momentum > _MOST_TOPK_MOMENTUM:
        # SparseLoCo (arXiv:2508.15706) has the kept errors in place of a momentum; with some, but
        # less than usual, short runs learn better (`benchmarks/diloco_quality.py`).
        yield Issue(
            ("outer.momentum", "outer.codec"),
            f"momentum {outer.momentum:g} is too large for codec topk: topk sends a number "
            "rarely, and in the meantime momentum would repeat its last step",
            "set momentum: 0.7 and lr: 0.9 with codec: topk",
        )
    if outer.public is not None and outer.hub is not None:
        yield Issue(
            ("outer.public",),
            f"public {outer.public} is for a hub that isles starts, and this run uses the hub "
            f"{outer.hub}",
            _DELETE,
        )


def _not_together(config: RunConfig) -> Iterator[Issue]:
    # Settings that do not work with several clusters.
    if config.data.streaming:
        yield Issue(
            ("data.streaming",),
            "streaming does not work with several clusters: if a cluster is lost, other clusters "
            "must read its samples, and a stream cannot go back",
            "set data.streaming: false. Each cluster then prepares the data once",
        )
    if config.training.num_train_epochs is not None:
        yield Issue(
            ("training.num_train_epochs",),
            "num_train_epochs has no fixed length with several clusters: the steps of an epoch "
            "depend on the number of connected clusters",
            "use training.max_steps, the number of steps of each cluster",
        )
