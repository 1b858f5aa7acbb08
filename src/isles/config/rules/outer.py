"""The rules of the section `outer`, and of several clusters in one run file."""

from __future__ import annotations

from collections.abc import Iterator

from isles.config.issues import Issue
from isles.config.rules.idle import idle_keys
from isles.config.sections.outer import DiLoCoConfig, WaitConfig
from isles.config.sections.run import RunConfig
from isles.config.sections.strategy import MeshSection

_DELETE = "delete it"
_MOST_TOPK_MOMENTUM = 0.7


def outer_rules(config: RunConfig) -> Iterator[Issue]:
    """Every rule about several clusters, and about their averaging, that is broken."""
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
                f"clusters.{names.index(name)} is called {name}, too",
                "give each cluster a name of its own",
            )
        for key in ("strategy", "balance"):
            if config.training.script is not None and getattr(config.clusters[index], key):
                yield Issue(
                    (f"clusters.{index}.{key}",),
                    f"{key} means nothing beside training.script, which reads no run file",
                    _DELETE,
                )
    if len(config.clusters) > 1 and config.training.script is not None:
        yield Issue(
            ("clusters", "training.script"),
            f"a script runs on one cluster, and there are {len(config.clusters)}",
            "keep one cluster, or several nodes in one",
        )
    elif len(config.clusters) > 1 and config.diloco is None:
        yield Issue(
            ("outer.kind", "outer", "clusters"),
            f"{len(config.clusters)} clusters, and nothing that makes them one run",
            "add outer: {kind: diloco}; machines on one fast network belong into one cluster",
        )


def _outer_steps(config: RunConfig, outer: DiLoCoConfig) -> Iterator[Issue]:
    if outer.engine == "bucket" and outer.url is None:
        yield Issue(
            ("outer.engine", "outer"),
            "clusters of engine bucket meet in object storage, and outer.url does not say where",
            "set outer.url: s3://BUCKET/PREFIX, the same on all sites",
        )
    place = (outer.url or "").partition("://")[2]
    if "@" in place.partition("/")[0] or "?" in place:
        yield Issue(
            ("outer.url",),
            "credentials do not belong into a run file",
            "write s3://BUCKET/PREFIX only: they are found as by your provider's own tools "
            "(AWS_PROFILE, ~/.aws, gcloud)",
        )
    every, steps = outer.sync_every, config.training.max_steps
    if not isinstance(every, int):
        if isinstance(outer.wait, WaitConfig):
            yield Issue(
                ("outer.wait", "outer.sync_every"),
                "a cluster that contributes early takes the step's number from the schedule, which "
                "sync_every auto leaves open",
                "use wait: all, or a number for sync_every",
            )
        return
    if steps is not None and every > steps:
        yield Issue(
            ("outer.sync_every", "training.max_steps", "outer"),
            f"sync_every {every} is more than max_steps {steps}: the clusters would average once, "
            "at the end",
            f"use at most {max(1, steps // 2)}",
        )
    yield from _outer_steps_fit(outer, "sync_every", every)


def _outer_steps_fit(outer: DiLoCoConfig, key: str, every: int) -> Iterator[Issue]:
    if outer.fragments > every:
        yield Issue(
            ("outer.fragments", f"outer.{key}"),
            f"{outer.fragments} fragments cannot have a round each in {key} {every} steps",
            f"use at most {every} fragments",
        )
    elif outer.delay >= every / outer.fragments:
        apart = every / outer.fragments
        yield Issue(
            ("outer.delay", f"outer.{key}"),
            f"delay {outer.delay} lasts until the next round, {apart:g} steps later",
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
            f"warmup_sync_every {short} is more than sync_every {every}: the first rounds are the "
            "ones that should be short",
            f"use at most {every}",
        )
    elif short is not None:
        yield from _outer_steps_fit(outer, "warmup_sync_every", short)
    if steps is not None and (ends := outer.warmup_rounds * (short or every)) >= steps:
        yield Issue(
            ("outer.warmup_rounds", "training.max_steps", "outer"),
            f"warmup_rounds {outer.warmup_rounds} last until step {ends}, and max_steps is "
            f"{steps}: the outer optimizer would never be used",
            "use fewer; for averages only, write lr: 1 and momentum: 0 instead",
        )


def _waits(outer: DiLoCoConfig) -> Iterator[Issue]:
    wait = outer.wait
    if not isinstance(wait, WaitConfig):
        return
    if (wait.time_boxed is None) == (wait.quorum is None):
        both = "both time_boxed and quorum say" if wait.quorum else "neither time_boxed nor quorum"
        says = both if wait.quorum else f"{both} says"
        yield Issue(
            ("outer.wait.quorum", "outer.wait"),
            f"{says} when a round is closed",
            "write wait: all, or {time_boxed: 60s}, or {quorum: 2, grace: 30s}",
        )
    if wait.quorum is not None and wait.quorum < outer.min_clusters:
        yield Issue(
            ("outer.wait.quorum", "outer.min_clusters"),
            f"quorum {wait.quorum} is less than min_clusters {outer.min_clusters}",
            "raise the one or lower the other",
        )


def _odd_values(outer: DiLoCoConfig) -> Iterator[Issue]:
    # Keys with a value that changes nothing, or badly.
    if outer.codec_config.kind == "topk" and outer.momentum > _MOST_TOPK_MOMENTUM:
        # SparseLoCo (arXiv:2508.15706) has the kept errors in place of a momentum; with some, but
        # less than usual, short runs learn better (`benchmarks/diloco_quality.py`).
        yield Issue(
            ("outer.momentum", "outer.codec"),
            f"momentum {outer.momentum:g} goes badly with codec topk, which sends a number only "
            "once it has grown: it would be stepped along again and again until it is sent anew",
            "write momentum: 0.7 and lr: 0.9 beside codec: topk",
        )
    if outer.public is not None and outer.hub is not None:
        yield Issue(
            ("outer.public",),
            f"public {outer.public} is of a hub that is started with the run, and there is "
            f"one already: {outer.hub}",
            _DELETE,
        )


def _not_together(config: RunConfig) -> Iterator[Issue]:
    # What several clusters cannot do together.
    strategies = [("strategy", config.strategy)] + [
        (f"clusters.{index}.strategy", cluster.strategy)
        for index, cluster in enumerate(config.clusters)
        if cluster.strategy is not None
    ]
    for key, strategy in strategies:
        if isinstance(strategy, MeshSection) and strategy.pp_size > 1:
            yield Issue(
                (f"{key}.pp_size", key),
                f"pp_size {strategy.pp_size} does not go together with outer steps, for which "
                "every rank of a cluster must reach every weight",
                "use fsdp, which needs no pipeline to hold a large model, or tp_size",
            )
    if config.data.streaming:
        yield Issue(
            ("data.streaming",),
            "a stream is read forwards only, and the samples of a cluster that has gone are dealt "
            "again to others, which are past them",
            "use data.streaming: false: the data is prepared once on each cluster",
        )
    if config.training.num_train_epochs is not None:
        yield Issue(
            ("training.num_train_epochs",),
            "the clusters share the samples, and how many steps of each make an epoch depends on "
            "which of them are there",
            "use training.max_steps: the steps of each cluster",
        )
