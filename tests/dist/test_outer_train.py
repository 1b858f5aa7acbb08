"""One model on several clusters: real ranks, a real hub."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from isles.config.sections.outer import DiLoCoConfig
from isles.dist.world import join_world, leave_world
from isles.errors import ExitCode
from isles.outer.cluster import Cluster
from isles.outer.codec import parse_codec
from isles.outer.diloco import OuterSettings
from isles.outer.hub.journal import Journal
from isles.outer.hub.samples import Samples
from isles.outer.layout import make_layout
from isles.outer.trainer.step import Exchange
from isles.run.checkpoints import list_checkpoints
from isles.run.env import RankEnv
from isles.run.paths import RunDir
from isles.run.records import read_record, read_rows, write_record
from isles.train.progress import Progress
from isles.train.record import Recorder
from tests.dist.test_same_mathematics import weights_of
from tests.outer_member import serve
from tests.outer_trainer import Numbers
from tests.outer_world import overlaps
from tests.ranks import Gang, start_ranks, start_training

DEADLINE_S = 240.0
LAST_TURN = 5
PLAIN = "lr: 1.0, momentum: 0.0, codec: none"


@pytest.fixture
def made_up(run_file: Path) -> Path:
    """The run file with samples that are made up, so that no tokenizer is trained."""
    content = yaml.safe_load(run_file.read_text())
    content["data"] = {"sources": [{"type": "fake"}], "seq_length": 32, "validation_fraction": 0}
    del content["tokenizer"]
    run_file.write_text(yaml.safe_dump(content))
    return run_file


def until(condition: Callable[[], object], what: str, *gangs: Gang) -> None:
    """Look again and again, for as long as a deadline; a process that ends too early is told."""
    end = time.monotonic() + DEADLINE_S
    while not condition():
        texts = [gang.log.read_text(errors="replace")[-3000:] for gang in gangs]
        ended = any(gang.wait_or_timeout(0.02) for gang in gangs)
        assert not ended or condition(), (what, *texts)
        assert time.monotonic() < end, (what, *texts)


@contextmanager
def hub(folder: Path, **rules: Any) -> Iterator[Path]:
    """A hub over loopback; its state directory."""
    state = folder / "state"
    write_record(folder / "rules.json", rules)
    gang = start_ranks(serve, 1, state, folder / "rules.json")
    try:
        until((state / "join").exists, "the hub", gang)
        yield state
    finally:
        gang.kill()


@contextmanager
def all_killed(gangs: list[Gang]) -> Iterator[None]:
    """One that was stopped would stay for ever where a test fails."""
    try:
        yield
    finally:
        for gang in gangs:
            gang.kill()


def rank_of_a_cluster(env: RankEnv, run: Path, attempt: int, resume_from: Path | None) -> int:
    """A rank; rank 0 has been given the join line, as `isles join` does."""
    from tests.ranks import _rank

    if env.rank == 0:
        line = run / "join"
        line.touch(mode=0o600)
        line.write_text((run.parents[1] / "state" / "join").read_text())
    return _rank(env, run, attempt, resume_from)


def start_cluster(
    run_file: Path,
    name: str,
    ranks: int,
    outer: str,
    *more: str,
    resume: str = "auto",
    rank: Callable[..., int] = rank_of_a_cluster,
) -> Any:
    """Start the ranks of a cluster, or go on with what it has saved."""
    own = (f"name={name}", f"clusters=[{{name: {name}}}]", f"outer={{kind: diloco, {outer}}}")
    return start_training(run_file, ranks, *own, *more, resume=resume, rank=rank)


def turns_of(run_dir: RunDir) -> dict[int, dict[str, Any]]:
    """What the run has recorded of its turns."""
    return {row["outer_step"]: row for row in read_rows(run_dir.metrics) if row["kind"] == "outer"}


def model_of(run_dir: RunDir, step: int | None = None) -> dict[str, torch.Tensor]:
    """The weights of a checkpoint, or of the last one."""
    found = weights_of(run_dir, step)
    return {name: found[name] for name in sorted(found) if name.startswith("model.")}


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest over all weights."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def spans_of(rows: dict[int, dict[str, Any]]) -> list[int]:
    """Every sample that some turn has, as often as it has it."""
    return sorted(n for row in rows.values() for a, b in row["samples"] for n in range(a, b))


def test_one_cluster_with_rate_one_is_plain_training(made_up: Path) -> None:
    outer = f"outer={{kind: diloco, sync_every: 8, fragments: 2, {PLAIN}}}"
    started = [
        start_training(made_up, 1, "training.max_steps=12", *more)
        for more in (["name=plain"], ["name=alone", outer])
    ]
    (plain, alone), gangs = [each[0] for each in started], [each[2] for each in started]
    assert [gang.wait(DEADLINE_S) for gang in gangs] == [[0], [0]]
    assert difference(model_of(plain), model_of(alone)) < 1e-6
    rows = turns_of(alone)
    # The last one brings the fragment up to date whose turn the end has come before.
    assert [row["step"] for row in rows.values()] == [4, 8, 12, 12]
    assert [row["mode"] for row in rows.values()] == ["on_time"] * 4
    assert spans_of(rows) == list(range(12 * 12))
    assert (
        "outer" not in read_record(plain.status)
        and read_record(alone.status)["outer"]["outer_step"]
    )


@pytest.fixture
def on_disk(made_up: Path) -> Path:
    """The same, with a model that has weights."""
    content = yaml.safe_load(made_up.read_text())
    content["model"]["init"] = "pretrained"
    made_up.write_text(yaml.safe_dump(content))
    folder = Path(content["model"]["name_or_path"])
    torch.manual_seed(0)
    shape = json.loads((folder / "config.json").read_text())
    LlamaForCausalLM(LlamaConfig(**shape)).save_pretrained(folder)
    return made_up


def test_unequal_clusters_keep_the_same_weights_through_a_kill(
    made_up: Path, tmp_path: Path
) -> None:
    """Two ranks under fsdp, one under ddp; int8, two fragments, two steps late; ranks killed."""
    outer = "sync_every: 6, fragments: 2, delay: 2, codec: int8, deadline: 120s, warmup_rounds: 1"
    options = ("training.max_steps=24", "checkpoint.every_steps=4")
    fsdp = ("strategy={kind: fsdp}", "training.global_batch_size=6")
    with hub(tmp_path, min_clusters=2, dead_after_s=4.0) as state:
        a, _, a_gang = start_cluster(made_up, "a", 2, outer, *options, *fsdp)
        b, _, b_gang = start_cluster(made_up, "b", 1, outer, *options)
        until(lambda: len(turns_of(b)) >= 3 and list_checkpoints(b), "three turns", a_gang, b_gang)
        b_gang.kill()
        again, _, b_gang = start_cluster(made_up, "b", 1, outer, *options)
        assert again.path == b.path
        assert a_gang.wait(DEADLINE_S) == [0, 0]
        assert b_gang.wait(DEADLINE_S) == [0]
        journal = Journal(state / "hub.sqlite")
        assert overlaps(journal) == []
        counts = Samples(journal).counts()
    rows = turns_of(a)
    digests = {outer_step: row["digest"] for outer_step, row in turns_of(b).items()}
    assert len(rows) >= 8 and len(digests) >= 8
    assert digests == {outer_step: rows[outer_step]["digest"] for outer_step in digests}
    one, other = model_of(a), model_of(b)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert counts["averaged"] >= 24 * 6 + 6 * 12
    assert (
        {"overlap"}
        < {row["mode"] for row in rows.values()}
        <= {"overlap", "on_time", "late", "idle"}
    )
    last = read_record(a.status)["outer"]
    assert last["outer_step"] == len(rows) and last["sent_bytes"] > 0 < last["received_bytes"]
    line = (state / "join").read_text().strip()
    secret = line.rpartition("#")[2].partition(".")[0]
    for file in (path for path in a.path.rglob("*") if path.is_file() and path.name != "join"):
        assert secret.encode() not in file.read_bytes(), file
    assert a.join_line.stat().st_mode & 0o777 == 0o600


@pytest.mark.long
def test_other_clusters_go_on_than_those_that_were_stopped(made_up: Path, tmp_path: Path) -> None:
    """Two are stopped and the hub ends; one of them goes on, with two that are new."""
    outer = "sync_every: 10, fragments: 2, delay: 2, codec: int8, deadline: 200s"
    options = ("training.max_steps=60",)
    rules = {"min_clusters": 2, "dead_after_s": 20.0}
    with hub(tmp_path, **rules):
        started = [start_cluster(made_up, name, 1, outer, *options) for name in "ab"]
        gangs = [gang for _, _, gang in started]
        until(lambda: len(turns_of(started[1][0])) >= 2, "two turns", *gangs)
        for gang in gangs:
            gang.signal(signal.SIGTERM)
        for gang in gangs:
            assert gang.wait(DEADLINE_S) == [int(ExitCode.REQUEUE)]
    before = turns_of(started[0][0])
    fsdp = ("strategy={kind: fsdp}", "training.global_batch_size=6")
    with hub(tmp_path, **rules) as state:
        a, _, a_gang = start_cluster(made_up, "a", 1, outer, *options)
        others = [
            start_cluster(made_up, "c", 1, outer, *options),
            start_cluster(made_up, "d", 2, outer, *options, *fsdp),
        ]
        assert a_gang.wait(DEADLINE_S) == [0]
        assert [set(gang.wait(DEADLINE_S)) for _, _, gang in others] == [{0}, {0}]
        assert overlaps(Journal(state / "hub.sqlite")) == []
    rows = turns_of(a)
    assert before.items() <= rows.items(), "what was averaged stays so"
    assert {"a", "c", "d"} == set().union(*(row["weights"] for row in rows.values())) - {"b"}
    last = max(rows)
    for run_dir, _, _ in others:
        assert turns_of(run_dir)[last]["digest"] == rows[last]["digest"]
        own, weights = model_of(a), model_of(run_dir)
        assert all(torch.equal(own[name], weights[name]) for name in own)


@pytest.mark.long
def test_all_are_killed_long_after_their_checkpoints(made_up: Path, tmp_path: Path) -> None:
    """No cluster is left whose state the others could take, nor has the hub all averages:
    each cluster has kept those that its own checkpoints lack."""
    outer = "sync_every: 4, fragments: 2, codec: int8, deadline: 120s"
    options = ("training.max_steps=60", "checkpoint.every_steps=15")
    rules = {"min_clusters": 2, "dead_after_s": 4.0, "keep_averages": 2}
    with hub(tmp_path, **rules):
        started = [start_cluster(made_up, name, 1, outer, *options) for name in "ab"]
        gangs = [gang for _, _, gang in started]
        until(lambda: all(len(turns_of(r)) >= 13 for r, _, _ in started), "13 turns", *gangs)
        for gang in gangs:
            gang.kill()
    before = turns_of(started[0][0])
    saved = [list_checkpoints(run_dir)[-1].step for run_dir, _, _ in started]
    assert all(step // 2 + 2 < len(before) for step in saved), (saved, len(before))
    with hub(tmp_path, **rules) as state:
        gangs = [start_cluster(made_up, name, 1, outer, *options)[2] for name in "ab"]
        for gang in gangs:
            assert gang.wait(DEADLINE_S) == [0]
        assert overlaps(Journal(state / "hub.sqlite")) == []
    rows = turns_of(started[0][0])
    assert {t: r["digest"] for t, r in before.items()}.items() <= {
        t: r["digest"] for t, r in rows.items()
    }.items()
    one, other = (model_of(run_dir) for run_dir, _, _ in started)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not list(tmp_path.glob("runs/*/outer/spool/average-*")), "they are of no use any more"


@pytest.mark.long
def test_a_stop_while_the_others_are_waited_for_at_the_end_loses_no_average(
    made_up: Path, tmp_path: Path
) -> None:
    """It is no end: who goes on from the checkpoint averages, and saves that in its place."""
    outer = "sync_every: 40, deadline: 200s"
    options = ("training.max_steps=80",)
    with hub(tmp_path, min_clusters=2, dead_after_s=200.0):
        a, _, a_gang = start_cluster(made_up, "a", 1, outer, *options)
        b, _, b_gang = start_cluster(made_up, "b", 1, outer, *options)
        until(lambda: turns_of(b), "a turn", a_gang, b_gang)
        b_gang.signal(signal.SIGSTOP)
        until(lambda: _phase(a) == "waiting for clusters outer step 1", "the last wait", a_gang)
        a_gang.signal(signal.SIGTERM)
        assert a_gang.wait(DEADLINE_S) == [int(ExitCode.REQUEUE)]
        assert [info.step for info in list_checkpoints(a)][-1] == 80
        own = model_of(a)
        assert not read_record(a.status)["outer"]["is_averaged"]
        again, _, a_gang = start_cluster(made_up, "a", 1, outer, *options)
        assert again.path == a.path
        b_gang.signal(signal.SIGCONT)
        for gang in (a_gang, b_gang):
            assert gang.wait(DEADLINE_S) == [0]
    assert read_record(a.status)["outer"]["is_averaged"]
    one, other = model_of(a), model_of(b)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert difference(own, one) > 1e-6


def halts_at_the_end(env: RankEnv, run: Path, attempt: int, resume_from: Path | None) -> int:
    """A rank that is stopped when it is about to contribute to the last turn, or to one more."""
    contribute = Exchange.contribute

    def halt(turns: Exchange, outer_step: int) -> None:
        if outer_step >= LAST_TURN:
            Exchange.contribute = contribute  # type: ignore[method-assign]
            os.kill(os.getpid(), signal.SIGSTOP)
        contribute(turns, outer_step)

    Exchange.contribute = halt  # type: ignore[method-assign]
    return rank_of_a_cluster(env, run, attempt, resume_from)


@pytest.mark.parametrize("late", ["start", "contribution"])
def test_all_end_with_the_same_weights_where_one_is_late(
    made_up: Path, tmp_path: Path, late: str
) -> None:
    """One comes when the other has one more turn to make, of which it will have no part; or its
    contribution comes when the last turn is decided, and goes into another one."""
    outer = "sync_every: 4, fragments: 2, delay: 1, codec: int4, deadline: 200s"
    options = ("training.max_steps=10",)
    rules: dict[str, Any] = {"dead_after_s": 200.0}
    if late == "contribution":
        rules |= {"wait": "time_boxed", "time_box_s": 3.0, "gather": 2, "gather_s": 200.0}
    gangs: list[Gang] = []
    with hub(tmp_path, **rules), all_killed(gangs):
        halts, _, gang = start_cluster(made_up, "b", 1, outer, *options, rank=halts_at_the_end)
        gangs.append(gang)
        if late == "start":
            until(lambda: _is_stopped(gang), "the last turn", gang)
        waits, _, other = start_cluster(made_up, "a", 1, outer, *options)
        gangs.append(other)
        until(lambda: _phase(waits) == "waiting for clusters to end together", "the end", other)
        until(lambda: _is_stopped(gang), "the last turn", gang)
        gang.signal(signal.SIGCONT)
        assert (gang.wait(DEADLINE_S), other.wait(DEADLINE_S)) == ([0], [0])
    digests = [{t: row["digest"] for t, row in turns_of(run).items()} for run in (halts, waits)]
    assert digests[0] == digests[1] and max(digests[0]) >= LAST_TURN
    assert turns_of(waits)[max(digests[0])]["mode"] == "idle"
    one, other_model = model_of(halts), model_of(waits)
    assert all(torch.equal(one[name], other_model[name]) for name in one)


def _is_stopped(gang: Gang) -> bool:
    return psutil.Process(gang.processes[0].pid).status() == psutil.STATUS_STOPPED


def _phase(run_dir: RunDir) -> str:
    status = read_record(run_dir.status) or {}
    return f"{status.get('phase')} {status.get('detail')}"


@pytest.mark.long
def test_of_an_adapter_only_its_matrices_travel(on_disk: Path, tmp_path: Path) -> None:
    """Also where a run that was over is made longer, on another number of ranks."""
    lora = ("adapter={type: lora, r: 2, alpha: 4}", "training.max_steps=6")
    outer = "sync_every: 2, codec: bf16"
    with hub(tmp_path):
        run_dir, _, gang = start_cluster(on_disk, "a", 1, outer, *lora, "training.max_steps=4")
        assert gang.wait(DEADLINE_S) == [0]
        shorter = turns_of(run_dir)
        again = str(run_dir.path)
        run_dir, _, gang = start_cluster(on_disk, "a", 2, outer, *lora, resume=again)
        assert gang.wait(DEADLINE_S) == [0, 0]
    rows = turns_of(run_dir)
    trained = sum(
        w.numel() for n, w in weights_of(run_dir).items() if n.startswith("outer.outer_param")
    )
    assert len(shorter) == 2 and len(rows) == 3
    assert spans_of(rows) == list(range(6 * 12))
    for row in rows.values():
        assert row["average_bytes"] == 2 * trained
        assert 2 * trained <= row["sent_bytes"] < 2 * trained + 20_000


@pytest.mark.long
def test_a_cluster_without_its_hub_says_whom_it_misses(made_up: Path, tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    line = "isles://127.0.0.1:9/test#" + "A" * 43 + "." + "A" * 43
    (tmp_path / "state" / "join").write_text(line)
    _, attempt, gang = start_cluster(made_up, "a", 1, "sync_every: 2, deadline: 2s")
    assert gang.wait(DEADLINE_S) == [5]
    error = read_record(attempt.rank_error(0))
    assert error is not None
    assert "hub has not answered within 2s" in error["what"] and "deadline" in error["fix"]


def manifests(env: RankEnv, folder: Path) -> list[str]:
    """What a checkpoint says before and after a contribution, and what one says that comes then."""
    os.chdir(folder)  # a contribution without a line is written there
    world = join_world(env, device="cpu", timeout_s=DEADLINE_S)
    weights = Numbers(0, {"a": (8,), "b": (8,)})
    layout = make_layout(weights.trained_shapes(), parse_codec("none"), num_fragments=2)
    cluster = Cluster(weights, world, layout, OuterSettings())
    cluster.begin()
    progress = Progress.fresh()
    recorder = Recorder(RunDir(folder), is_main=False, world_size=1)
    config = DiLoCoConfig(sync_every=8, fragments=2, delay=1)
    exchange = Exchange(config, "a", "ab" * 16, cluster, layout, recorder)
    exchange.begin(progress).add([(0, 100)])
    progress.advance(samples=4, tokens=40, target_tokens=40)
    exchange.steps += 1
    manifest = exchange.manifest()
    before = json.dumps(manifest)
    exchange.contribute(0)
    exchange.encoded(0)
    exchange.close()
    leave_world()
    return [before, json.dumps(manifest), json.dumps(exchange.manifest())]


@pytest.mark.long
def test_a_manifest_stays_as_it_was_while_steps_go_on(tmp_path: Path) -> None:
    """A checkpoint is written in the background: what it says must not follow the run."""
    ((before, later, then),) = start_ranks(manifests, 1, tmp_path).wait(DEADLINE_S)
    assert before == later != then
