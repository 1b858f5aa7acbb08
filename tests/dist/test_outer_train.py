"""One model on several clusters: real ranks, a real hub."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from isles.config.sections.outer import DiLoCoConfig
from isles.dist.world import join_world, leave_world
from isles.errors import ExitCode
from isles.outer.average import combine
from isles.outer.cluster import Cluster
from isles.outer.codec import parse_codec
from isles.outer.diloco import OuterSettings
from isles.outer.hub.journal import Journal
from isles.outer.hub.samples import SampleLeases
from isles.outer.layout import make_layout
from isles.outer.messages import Apply
from isles.outer.trainer.step import OuterStep
from isles.run.checkpoints import list_checkpoints
from isles.run.env import RankEnv
from isles.run.paths import RunDir
from isles.run.records import read_record, read_rows, write_record
from isles.train.progress import Progress
from isles.train.record import Recorder
from tests.dist.test_outer import difference
from tests.dist.test_same_mathematics import FAKE, weights_of
from tests.outer_trainer import Numbers, serve
from tests.outer_world import overlaps
from tests.ranks import Gang, one_rank, run_ranks, start_ranks, start_training, until

LAST_TURN = 5
FSDP = ("strategy={kind: fsdp}", "training.global_batch_size=6")


def rank_of_a_cluster(env: RankEnv, run: Path, attempt: int, resume_from: Path | None) -> int:
    """A rank; rank 0 has been given the join line, as `isles join` does."""
    if env.rank == 0:
        line = run / "join"
        line.touch(mode=0o600)
        line.write_text((run.parents[1] / "state" / "join").read_text())
    return one_rank(env, run, attempt, resume_from)


class Site:
    """Clusters of one run file, and their hub."""

    def __init__(self, run_file: Path) -> None:
        self.run_file, self.folder = run_file, run_file.parent
        self.state = self.folder / "state"
        self.gangs: list[Gang] = []

    @contextmanager
    def hub(self, **rules: Any) -> Iterator[None]:
        """A hub over loopback, which must not lease a sample twice."""
        settings = self.folder / "rules.json"
        write_record(settings, rules)
        gang = start_ranks(serve, 1, self.state, settings)
        self.gangs.append(gang)
        until((self.state / "join").exists, "the hub", gang)
        yield
        assert overlaps(Journal(self.state / "hub.sqlite")) == []
        gang.kill()

    def start(
        self, name: str, ranks: int, outer: str, *more: str, **how: Any
    ) -> tuple[RunDir, Gang]:
        """Start the ranks of a cluster, or go on with what it has saved."""
        own = (f"name={name}", f"clusters=[{{name: {name}}}]", f"outer={{kind: diloco, {outer}}}")
        how = {"rank": rank_of_a_cluster, **how}
        run_dir, _, gang = start_training(self.run_file, ranks, *FAKE, *own, *more, **how)
        self.gangs.append(gang)
        return run_dir, gang


@pytest.fixture
def site(run_file: Path) -> Iterator[Site]:
    site = Site(run_file)
    yield site
    for gang in site.gangs:  # one that was stopped would stay for ever where a test fails
        gang.kill()


def turns_of(run_dir: RunDir) -> dict[int, dict[str, Any]]:
    """What the run has recorded of its turns."""
    return {row["outer_step"]: row for row in read_rows(run_dir.metrics) if row["kind"] == "outer"}


def digests_of(run_dir: RunDir) -> dict[int, str]:
    return {outer_step: row["digest"] for outer_step, row in turns_of(run_dir).items()}


def model_of(run_dir: RunDir) -> dict[str, torch.Tensor]:
    """The weights of the last checkpoint."""
    found = weights_of(run_dir)
    return {name: value for name, value in found.items() if name.startswith("model.")}


def have_the_same_weights(one: RunDir, other: RunDir) -> bool:
    return difference(model_of(one), model_of(other)) == 0.0


def spans_of(rows: dict[int, dict[str, Any]]) -> list[int]:
    """Every sample that some turn has, as often as it has it."""
    return sorted(n for row in rows.values() for a, b in row["samples"] for n in range(a, b))


def test_one_cluster_with_rate_one_is_plain_training(site: Site) -> None:
    outer = "{kind: diloco, sync_every: 8, fragments: 2, lr: 1.0, momentum: 0.0, codec: none}"
    started = [
        start_training(site.run_file, 1, *FAKE, "training.max_steps=12", *more)
        for more in (["name=plain"], ["name=alone", f"outer={outer}"])
    ]
    (plain, alone), gangs = [each[0] for each in started], [each[2] for each in started]
    assert [gang.wait() for gang in gangs] == [[0], [0]]
    assert difference(model_of(plain), model_of(alone)) < 1e-6
    rows = turns_of(alone)
    # The last one brings the fragment up to date whose turn the end has come before.
    assert [row["step"] for row in rows.values()] == [4, 8, 12, 12]
    assert [row["mode"] for row in rows.values()] == ["on_time"] * 4
    assert spans_of(rows) == list(range(12 * 12))
    assert "outer" not in read_record(plain.status)
    assert read_record(alone.status)["outer"]["outer_step"]


def test_unequal_clusters_keep_the_same_weights_through_a_kill(site: Site) -> None:
    """Two ranks under fsdp, one under ddp; int8, two fragments, two steps late; ranks killed."""
    outer = "sync_every: 6, fragments: 2, delay: 2, codec: int8, deadline: 120s, warmup_rounds: 1"
    options = ("training.max_steps=24", "checkpoint.every_steps=4")
    with site.hub(min_clusters=2, dead_after_s=4.0):
        a, a_gang = site.start("a", 2, outer, *options, *FSDP)
        b, b_gang = site.start("b", 1, outer, *options)
        until(lambda: len(turns_of(b)) >= 3 and list_checkpoints(b), "three turns", a_gang, b_gang)
        b_gang.kill()
        again, b_gang = site.start("b", 1, outer, *options)
        assert again.path == b.path
        assert a_gang.wait() == [0, 0] and b_gang.wait() == [0]
        assert (
            SampleLeases(Journal(site.state / "hub.sqlite")).counts()["averaged"] >= 24 * 6 + 6 * 12
        )
    rows, digests = turns_of(a), digests_of(b)
    assert len(rows) >= 8 and len(digests) >= 8
    assert digests.items() <= digests_of(a).items()
    assert have_the_same_weights(a, b)
    modes = {row["mode"] for row in rows.values()}
    assert {"overlap"} < modes <= {"overlap", "on_time", "late", "idle"}
    last = read_record(a.status)["outer"]
    assert last["outer_step"] == len(rows) and last["sent_bytes"] > 0 < last["received_bytes"]
    token = (site.state / "token").read_text().strip()
    for file in (path for path in a.path.rglob("*") if path.is_file() and path.name != "join"):
        assert token.encode() not in file.read_bytes(), file
    assert a.join_line.stat().st_mode & 0o777 == 0o600


@pytest.mark.long
def test_a_measured_delay_hides_averages_and_stays_after_a_resume(site: Site) -> None:
    """The transfers of a tiny model take longer than its steps. Each cluster decides by itself."""
    outer = "sync_every: 8, fragments: 2, delay: auto, codec: int8, deadline: 200s"
    resume, kept = dict.fromkeys("ab", "auto"), []
    with site.hub(min_clusters=2):
        for max_steps in (24, 40):
            more = f"training.max_steps={max_steps}"
            started = {
                name: site.start(name, ranks, outer, *strategy, more, resume=resume[name])
                for name, ranks, strategy in (("a", 2, FSDP), ("b", 1, ()))
            }
            for name, (run_dir, gang) in started.items():
                assert gang.wait() == [0] * (2 if name == "a" else 1)
                resume[name] = str(run_dir.path)
            manifests = [list_checkpoints(run)[-1].manifest for run, _ in started.values()]
            kept.append([int(manifest.get("outer")["delay"]) for manifest in manifests])
    assert kept[0] == kept[1] and all(1 <= delay <= 2 for delay in kept[0])
    a, b = (run_dir for run_dir, _ in started.values())
    modes = [row["mode"] for row in turns_of(a).values()]
    assert "overlap" not in modes[:4] and "overlap" in modes[4:]
    assert digests_of(a) == digests_of(b)
    assert have_the_same_weights(a, b)


@pytest.mark.long
def test_zero3_and_hsdp_keep_the_same_weights_through_a_resume(site: Site) -> None:
    """Two fragments, a step late; then the run is made longer, on other numbers of ranks."""
    outer = "sync_every: 4, fragments: 2, delay: 1, codec: int4, deadline: 200s"
    strategies = {
        "a": "strategy={kind: deepspeed, zero_stage: 3}",
        "b": "strategy={kind: fsdp, sharding_strategy: HYBRID_SHARD, shard_size: 2}",
    }
    resume = dict.fromkeys("ab", "auto")
    with site.hub(min_clusters=2):
        for max_steps, ranks in ((6, {"a": 2, "b": 2}), (10, {"a": 1, "b": 4})):
            more = f"training.max_steps={max_steps}"
            started = {
                name: site.start(name, ranks[name], outer, strategy, more, resume=resume[name])
                for name, strategy in strategies.items()
            }
            for name, (run_dir, gang) in started.items():
                assert gang.wait() == [0] * ranks[name]
                resume[name] = str(run_dir.path)
    a, b = (run_dir for run_dir, _ in started.values())
    digests = digests_of(a)
    assert digests == digests_of(b) and len(digests) >= 5
    assert len(set(digests.values())) == len(digests), "nothing was learned"
    assert have_the_same_weights(a, b)


@pytest.mark.long
def test_other_clusters_go_on_than_those_that_were_stopped(site: Site) -> None:
    """Two are stopped and the hub ends; one of them goes on, with two that are new."""
    outer = "sync_every: 10, fragments: 2, delay: 2, codec: int8, deadline: 200s"
    more = "training.max_steps=60"
    rules = {"min_clusters": 2, "dead_after_s": 20.0}
    with site.hub(**rules):
        a, a_gang = site.start("a", 1, outer, more)
        b, b_gang = site.start("b", 1, outer, more)
        until(lambda: len(turns_of(b)) >= 2, "two turns", a_gang, b_gang)
        a_gang.signal(signal.SIGTERM), b_gang.signal(signal.SIGTERM)
        assert a_gang.wait() == b_gang.wait() == [int(ExitCode.REQUEUE)]
    before = turns_of(a)
    with site.hub(**rules):
        _, a_gang = site.start("a", 1, outer, more)
        c, c_gang = site.start("c", 1, outer, more)
        d, d_gang = site.start("d", 2, outer, more, *FSDP)
        assert a_gang.wait() == c_gang.wait() == [0] and d_gang.wait() == [0, 0]
    rows = turns_of(a)
    assert before.items() <= rows.items(), "what was averaged stays so"
    assert {"a", "c", "d"} == set().union(*(row["weights"] for row in rows.values())) - {"b"}
    last = max(rows)
    for run_dir in (c, d):
        assert digests_of(run_dir)[last] == rows[last]["digest"]
        assert have_the_same_weights(a, run_dir)


@pytest.mark.long
def test_all_are_killed_long_after_their_checkpoints(site: Site) -> None:
    """No cluster is left whose state the others could take, nor has the hub all averages:
    each cluster has kept those that its own checkpoints lack."""
    outer = "sync_every: 4, fragments: 2, codec: int8, deadline: 120s"
    options = ("training.max_steps=60", "checkpoint.every_steps=15")
    rules = {"min_clusters": 2, "dead_after_s": 4.0, "keep_averages": 2}
    with site.hub(**rules):
        (a, a_gang), (b, b_gang) = (site.start(name, 1, outer, *options) for name in "ab")
        until(lambda: all(len(turns_of(r)) >= 13 for r in (a, b)), "13 turns", a_gang, b_gang)
        a_gang.kill(), b_gang.kill()
    before = digests_of(a)
    saved = [list_checkpoints(run_dir)[-1].step for run_dir in (a, b)]
    assert all(step // 2 + 2 < len(before) for step in saved), (saved, len(before))
    with site.hub(**rules):
        gangs = [site.start(name, 1, outer, *options)[1] for name in "ab"]
        assert [gang.wait() for gang in gangs] == [[0], [0]]
    assert before.items() <= digests_of(a).items()
    assert have_the_same_weights(a, b)
    spools = site.folder.glob("runs/*/outer/spool/average-*")
    assert not list(spools), "they are of no use any more"


@pytest.mark.long
def test_a_stop_while_the_others_are_waited_for_at_the_end_loses_no_average(site: Site) -> None:
    """It is no end: who goes on from the checkpoint averages, and saves that in its place."""
    outer, more = "sync_every: 40, deadline: 200s", "training.max_steps=80"
    with site.hub(min_clusters=2, dead_after_s=200.0):
        a, a_gang = site.start("a", 1, outer, more)
        b, b_gang = site.start("b", 1, outer, more)
        until(lambda: turns_of(b), "a turn", a_gang, b_gang)
        b_gang.signal(signal.SIGSTOP)
        until(lambda: phase_of(a) == "waiting for clusters outer step 1", "the last wait", a_gang)
        a_gang.signal(signal.SIGTERM)
        assert a_gang.wait() == [int(ExitCode.REQUEUE)]
        assert [info.step for info in list_checkpoints(a)][-1] == 80
        own = model_of(a)
        assert not read_record(a.status)["outer"]["is_averaged"]
        again, a_gang = site.start("a", 1, outer, more)
        assert again.path == a.path
        b_gang.signal(signal.SIGCONT)
        assert a_gang.wait() == b_gang.wait() == [0]
    assert read_record(a.status)["outer"]["is_averaged"]
    assert have_the_same_weights(a, b) and difference(own, model_of(a)) > 1e-6


def phase_of(run_dir: RunDir) -> str:
    status = read_record(run_dir.status) or {}
    return f"{status.get('phase')} {status.get('detail')}"


def halts_at_the_end(env: RankEnv, run: Path, attempt: int, resume_from: Path | None) -> int:
    """A rank that is stopped when it is about to contribute to the last turn, or to one more."""
    contribute = OuterStep.contribute

    def halt(turns: OuterStep, outer_step: int) -> None:
        if outer_step >= LAST_TURN:
            OuterStep.contribute = contribute  # type: ignore[method-assign]
            os.kill(os.getpid(), signal.SIGSTOP)
        contribute(turns, outer_step)

    OuterStep.contribute = halt  # type: ignore[method-assign]
    return rank_of_a_cluster(env, run, attempt, resume_from)


@pytest.mark.brief("contribution")
@pytest.mark.parametrize("late", ["start", "contribution"])
def test_all_end_with_the_same_weights_where_one_is_late(site: Site, late: str) -> None:
    """One comes when the other has one more turn to make, of which it will have no part; or its
    contribution comes when the last turn is decided, and goes into another one."""
    outer = "sync_every: 4, fragments: 2, delay: 1, codec: int4, deadline: 200s"
    more = "training.max_steps=10"
    rules: dict[str, Any] = {"dead_after_s": 200.0}
    if late == "contribution":
        rules |= {"wait": "time_boxed", "time_box_s": 3.0, "gather": 2, "gather_s": 200.0}
    with site.hub(**rules):
        halts, gang = site.start("b", 1, outer, more, rank=halts_at_the_end)
        process = psutil.Process(gang.processes[0].pid)

        def is_stopped() -> bool:
            return process.status() == psutil.STATUS_STOPPED

        if late == "start":
            until(is_stopped, "the last turn", gang)
        waits, other = site.start("a", 1, outer, more)
        until(lambda: phase_of(waits) == "waiting for clusters to end together", "the end", other)
        until(is_stopped, "the last turn", gang)
        gang.signal(signal.SIGCONT)
        assert gang.wait() == other.wait() == [0]
    digests = digests_of(halts)
    assert digests == digests_of(waits) and max(digests) >= LAST_TURN
    assert turns_of(waits)[max(digests)]["mode"] == "idle"
    assert have_the_same_weights(halts, waits)


def manifests(env: RankEnv, folder: Path) -> list[str]:
    """What a checkpoint says before and after a contribution, and what one says that comes then."""
    os.chdir(folder)  # a contribution without a line is written there
    world = join_world(env, device="cpu", timeout_s=100.0)
    weights = Numbers(0, {"a": (8,), "b": (8,)})
    layout = make_layout(weights.trained_shapes(), parse_codec("none"), num_fragments=2)
    cluster = Cluster(weights, world, layout, OuterSettings())
    progress, config = Progress.fresh(), DiLoCoConfig(sync_every=8, fragments=2, delay=1)
    recorder = Recorder(RunDir(folder), is_main=False, world_size=1)
    exchange = OuterStep(config, "a", "ab" * 16, cluster, layout, recorder)
    exchange.begin(progress).add([(0, 100)])
    progress.advance(samples=4, tokens=40, target_tokens=40)
    manifest = exchange.manifest()
    before = json.dumps(manifest)
    exchange.contribute(0)
    exchange.encoded(0)
    progress.advance(samples=8, tokens=40, target_tokens=40)
    progress.rewind_to(1)  # it was not finite
    assert exchange.steps == manifest["steps"] == 1
    exchange.close()
    leave_world()
    return [before, json.dumps(manifest), json.dumps(exchange.manifest())]


@pytest.mark.long
def test_a_manifest_stays_as_it_was_while_steps_go_on(tmp_path: Path) -> None:
    """A checkpoint is written in the background: what it says must not follow the run."""
    ((before, later, then),) = run_ranks(manifests, 1, tmp_path)
    assert before == later != then


def measured_costs(env: RankEnv, folder: Path) -> list[int]:
    """How many outer steps count as measured, after each: two of others, one of its own, one of
    others."""
    os.chdir(folder)  # a contribution without a line is written there
    world = join_world(env, device="cpu", timeout_s=100.0)
    weights = Numbers(0, {"a": (8,)})
    layout = make_layout(weights.trained_shapes(), parse_codec("none"))
    cluster = Cluster(weights, world, layout, OuterSettings())
    progress, config = Progress.fresh(), DiLoCoConfig(sync_every=8, delay="auto")
    recorder = Recorder(RunDir(folder), is_main=False, world_size=1)
    exchange = OuterStep(config, "a", "ab" * 16, cluster, layout, recorder)
    exchange.begin(progress).add([(0, 100)])
    average, counts = folder / "average", []
    average.write_bytes(combine("none", 8, [(bytes(4 * 8), 1.0)]))
    for outer_step, name in enumerate("bbab"):
        if name == "a":
            progress.advance(samples=4, tokens=40, target_tokens=40)
            exchange.contribute(outer_step)
        known: dict[str, Any] = {"path": average, "refused": {}, "size_bytes": 32}
        exchange.apply(Apply(outer_step=outer_step, weights={name: 1}, **known))
        counts.append(len(exchange.costs))
    exchange.close()
    leave_world()
    return counts


@pytest.mark.long
def test_a_measured_delay_counts_no_average_without_a_contribution(tmp_path: Path) -> None:
    """A cluster that joins late, or resumes, applies averages that it neither encoded nor sent."""
    assert run_ranks(measured_costs, 1, tmp_path) == [[0, 0, 1, 1]]
