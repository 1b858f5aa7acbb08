"""What `isles top` and the page show, from records made by hand."""

from __future__ import annotations

import base64
import json
import os
import random
import time
import zlib
from collections.abc import Mapping
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from isles.monitor.live.cells import plain_lines
from isles.monitor.live.history import POINTS, MetricsReader, goodput, spans_of
from isles.monitor.live.model import RankRow, Snapshot
from isles.monitor.live.multi_cluster import HubAnswer, MultiClusterView
from isles.monitor.live.readers import MultiClusterReader
from isles.monitor.live.snapshot import RunReader
from isles.monitor.live.source import Watch, snapshot
from isles.monitor.live.waits import Stage, Step, Waits, late
from isles.monitor.status import collect
from isles.monitor.table import report_lines
from isles.run.paths import Attempt, RunDir
from isles.run.process import ProcessId
from isles.run.records import write_record
from isles.run.relay import LONGEST, pack, unpack
from isles.run.remote import ClusterRun, MultiClusterRun, RemoteRun
from isles.run.restarts import record_restart
from tests import live_records
from tests.deadline import DEADLINE_S, until
from tests.live_records import gpu_record, metrics_row, node_record, rank_record, write_live
from tests.programs import write_program
from tests.run_records import GONE, recorded_run, two_hosts

STATUS = {"phase": "training", "step": 40, "total_steps": 100, "loss": 0.2, "world_size": 4}
OUTER = {"outer_step": 6, "is_connected": True, "sent_bytes": 6000, "received_bytes": 5000}
OUTER |= {"bytes_per_s": 1e6, "exposed_s": 1.0, "hidden_s": 3.0, "hidden_share": 0.75}
OUTER["last_outer_step"] = {"step": 30, "weights": {"a": 300, "b": 100}}


def running(path: Path, **status: Any) -> tuple[RunDir, Attempt]:
    """A run whose agent is this process."""
    me = ProcessId.of(os.getpid()).record()
    launch = {**me, "launcher": "ssh", "world_size": 4, "device": "cuda"}
    return recorded_run(path, launch, status={**STATUS, **status})


def two_nodes(**of_rank: Any) -> list[dict[str, Any]]:
    """Nodes h0 and h1 with two ranks each; `of_rank`: rK: fields of rank K."""
    ranks = [rank_record(gpu=n % 2, **of_rank.get(f"r{n}", {})) for n in range(4)]
    gpus = [gpu_record(0), gpu_record(1)]
    return [node_record("h0", 0, ranks[:2], gpus), node_record("h1", 2, ranks[2:], gpus)]


def marks(shown: Snapshot) -> dict[int, str]:
    return {row.rank: row.mark for row in shown.ranks}


def assert_fits(shown: Snapshot) -> None:
    assert all(len(line) <= 80 and line.isprintable() for line in plain_lines(shown))


def test_all_that_is_well_is_shown_and_nothing_is_marked(tmp_path: Path) -> None:
    run_dir, attempt = running(tmp_path / "far-1", eta_s=30.0, tokens_per_second=3000.0)
    write_live(attempt, *two_nodes())
    live_records.write_metrics(run_dir, *map(metrics_row, range(10, 50, 10)))
    pairs = {"h0": {"h1": {"bytes_per_s": 1e9, "rtt_s": 2e-4}}, "other": {"h0": None}}
    write_record(tmp_path / ".links.json", {"at": 1.0, "pairs": pairs})
    shown = snapshot(run_dir)
    assert shown.notes == () and set(marks(shown).values()) == {""}
    head = shown.run
    assert (head.name, head.state, head.step, head.total_steps) == ("far-1", "running", 40, 100)
    assert (head.mfu, head.tokens, head.left_s) == (0.41, 60000, 30.0)
    assert head.goodput == pytest.approx(20.0 / 60.0, rel=0.1)  # forty steps in a minute
    assert [point.step for point in shown.curve] == [10, 20, 30, 40]
    first = shown.ranks[0]
    assert (first.host, first.rows, first.micro_batch, first.use) == ("h0", 4, 2, 0.97)
    assert (first.temperature_c, first.power_w) == (61.0, 640.0)
    assert first.parts is not None and first.parts.compute_s == pytest.approx(0.29)
    assert first.heard_s is not None and first.heard_s < 5.0
    link, back = shown.links
    assert (link.source, link.target, link.measured, link.used) == ("h0", "h1", 1e9, 2e6)
    assert (back.source, back.measured_by, back.state) == ("h1", "interface", "ok")
    assert shown.clusters == () and shown.hub is None
    assert_fits(shown)
    assert Snapshot.model_validate_json(shown.model_dump_json()) == shown


def test_each_fault_is_named_and_the_worst_first(tmp_path: Path) -> None:
    run_dir, attempt = running(tmp_path / "far-1")
    hot = gpu_record(0, throttle="heat", temperature_c=92.0, clock_mhz=1100.0)
    busy = gpu_record(1, throttle="its power limit")
    slow = {**busy, "index": 2, "clock_mhz": 900.0}
    ranks = [rank_record(gpu=n) for n in range(3)]
    held, dead = rank_record(communication_s=0.02), rank_record(alive=False, exit=-9)
    write_live(
        attempt,
        node_record("h0", 0, ranks, [hot, busy, slow]),
        node_record("h1", 3, [held, dead], [gpu_record(0), gpu_record(1)]),
        node_record("h2", 5, ranks[:2], heard_s_ago=9.0),
    )
    shown = snapshot(run_dir)
    found = ["throttled", "", "throttled", "straggler", "dead", "silent", "silent"]
    assert marks(shown) == dict(enumerate(found)), "at its power limit any busy card is"
    assert shown.notes[:3] == (
        "rank 4 on h1: its process was ended by signal 9 (SIGKILL)",
        "no heartbeat from h2 for 9s: its machine or its link is down",
        "rank 3 on h1: the others wait for it: 0.18 s of each 0.50 s step",
    )
    hot_note, slow_note = shown.notes[3:]
    assert hot_note.startswith("rank 0 on h0: its GPU is throttled by heat: 92 °C, 640 W, 1100")
    assert slow_note.startswith("rank 2 on h0: its GPU is throttled by its power limit: 61 °C")
    assert shown.links[2].state == "down: no heartbeat from h2 for 9s"
    waits = [row.parts.waiting_s for row in shown.ranks if row.parts is not None]
    assert waits[3] == 0.0 and waits[0] == pytest.approx(0.18)
    assert_fits(shown)


def test_who_says_nothing_and_who_was_killed_is_named_until_he_is_back(tmp_path: Path) -> None:
    run_dir, attempt = running(tmp_path / "far-1")
    write_live(attempt, *two_nodes(r1={"at": time.time() - 12}))
    shown = snapshot(run_dir)
    assert marks(shown) == {0: "", 1: "silent", 2: "", 3: ""}
    assert "rank 1 on h0: its process exists, but sends no heartbeat for" in shown.notes[0]
    write_live(attempt, *two_nodes(), ago_s=30.0)
    shown = snapshot(run_dir)
    assert set(marks(shown).values()) == {"silent"}
    (note,) = shown.notes
    assert note.startswith("h0: nothing is recorded for 30s")
    frozen = {"at": time.time() - 60}  # the agent lives, and a driver or a disk does not answer
    nodes = two_nodes(r0=frozen, r1=frozen)
    write_live(attempt, {**nodes[0], **frozen}, nodes[1])
    shown = snapshot(run_dir)
    assert marks(shown) == {0: "silent", 1: "silent", 2: "", 3: ""}
    assert shown.ranks[0].heard_s is not None and shown.ranks[0].heard_s > 55
    assert shown.notes[0].startswith("the values of h0 are 1m 00s old")
    # One has made all start again.
    cause = {"rank": 2, "host": "h1", "what": "rank 2 on h1 was killed by SIGKILL"}
    record_restart(
        run_dir, attempt, 1, cause["what"], max_restarts=3, root_cause=cause, is_counted=True
    )
    write_live(attempt, *two_nodes())  # of before: the new ones have not begun
    shown = snapshot(run_dir)
    assert marks(shown) == {0: "", 1: "", 2: "dead", 3: ""}
    assert shown.notes[0] == "rank 2 on h1 was killed by SIGKILL"
    write_live(attempt, *two_nodes(r2={"restart": 1}), restart=1)
    shown = snapshot(run_dir)
    assert set(marks(shown).values()) == {""} and shown.run.restarts == 1
    assert "ago: rank 2 on h1 was killed by SIGKILL. Resuming from the beginning" in shown.notes[0]


def test_a_run_that_is_over_has_no_marks_but_of_who_ended_it(tmp_path: Path) -> None:
    ended = {"alive": False, "exit": 0}
    for state, code, marked in (("finished", 0, {""}), ("failed", 3, {"", "dead"})):
        outcome = {"state": state, "exit_code": code, "reason": "rank 1 was killed"}
        outcome["error"] = {"rank": 1, "what": "rank 1 was killed"} if code else None
        run_dir, attempt = recorded_run(tmp_path / state, GONE, outcome, status=STATUS)
        write_live(attempt, *two_nodes(**{f"r{n}": ended for n in range(4)}), ago_s=900.0)
        shown = snapshot(run_dir)
        assert set(marks(shown).values()) == marked, state
        assert shown.ranks[1].mark == ("dead" if code else "")
        assert all(row.heard_s is None for row in shown.hosts)
    assert shown.notes[0] == "the run is failed: rank 1 was killed"


def noisy(rng: random.Random, slow: Mapping[int, float], noise: float) -> dict[int, Step]:
    """The last step of eight ranks; `slow`: how many seconds more some compute."""
    computes = {n: 0.5 + slow.get(n, 0.0) + rng.gauss(0, noise) for n in range(8)}
    longest = max(computes.values())
    return {n: Step(longest - own + 0.05, longest + 0.05) for n, own in computes.items()}


def test_equal_ranks_are_never_marked_and_slow_ones_soon_and_steadily() -> None:
    rng, waits = random.Random(0), Waits()

    def looks(num: int, slow: Mapping[int, float], noise: float) -> list[set[int]]:
        return [set(waits.look(noisy(rng, slow, noise))) for _ in range(num)]

    assert not any(looks(500, {}, 0.02))
    assert looks(4, {3: 0.5}, 0.02)[1:] == [{3}] * 3, "at the second look"
    assert looks(200, {3: 0.5}, 0.05) == [{3}] * 200
    assert not any(looks(20, {}, 0.02)[6:])
    rng, waits = random.Random(1), Waits()
    assert looks(20, {5: 0.1}, 0.01)[10:] == [{5}] * 10, "a little slower"
    waits = Waits()
    assert looks(20, {4: 0.4, 5: 0.4}, 0.02)[2:] == [{4, 5}] * 18, "both of a slow host"


def test_a_rank_that_stands_in_a_step_while_the_others_wait_is_late() -> None:
    ahead = Stage(7, "forward and backward", 12.0)
    behind = Stage(7, "data loading", 12.0)
    assert late({0: ahead, 1: behind, 2: ahead}, 0.5) == {1: behind}
    assert late({0: ahead, 1: behind, 2: ahead}, 20.0) == {}, "steps are as long as that"
    assert late({0: ahead, 1: ahead}, 0.5) == {}, "nobody is behind"
    assert late({0: ahead, 1: Stage(7, "saving", 12.0)}, 0.5) == {}


def test_records_of_an_earlier_version_and_broken_ones_are_shown_as_unknown(tmp_path) -> None:
    """Also what json reads and arithmetic does not bear: NaN, infinity, words, lists, deep ones."""
    run_dir, attempt = running(tmp_path / "far-1")
    two_hosts(attempt, "ssh")
    shown = snapshot(run_dir)
    assert [(row.rank, row.host) for row in shown.ranks] == [(0, "h0"), (1, "h0"), (2, "h1")]
    assert [row.host for row in shown.hosts] == ["h0", "h1"]
    assert shown.run.goodput is None and shown.curve == ()
    assert_fits(shown)
    odd = ("NaN", "Infinity", str(10**400), '"7"', "[1]", "null", "[" * 30_000)
    keys = ("step", "loss", "tokens", "elapsed_s", "step_time_s")
    rows = [f'{{"kind": "train", "step": 6, "{key}": {value}}}' for key in keys for value in odd]
    rows += ['{"kind": "train", "step": ', "\xff", '{"kind": "train"}']
    rows += ['{"kind": "train", "step": 7, "loss": 1.5}', "["]
    run_dir.metrics.write_text("\n".join(rows), encoding="latin-1")
    (tmp_path / ".links.json").write_text('{"pairs": {"h0": 3}}')
    node = {"host": [], "gpus": 3, "ranks": {"0": 7}, "name": "h\x1b[2J", "first_rank": 0}
    node |= {"num_ranks": 10**9, "at": "x", "heard_at": None}
    whole = '{"at": ODD, "nodes": {"²": {}, "0": ODD, "1": NODE}}'.replace("NODE", json.dumps(node))
    lives = [*product(odd[:-1], [whole]), *product(["0"], ("", "{", "[]", '{"nodes": 3}'))]
    for value, live in lives:
        status = json.dumps({**STATUS, "eta_s": 0, "outer": OUTER | {"exposed_s": 0}})
        status = status.replace('"eta_s": 0', f'"eta_s": {value}').replace("300", value)
        run_dir.status.write_text(status.replace('"exposed_s": 0', f'"exposed_s": {value}'))
        attempt.live.write_text(live.replace("ODD", value))
        shown = snapshot(run_dir)
        assert shown.curve[-1].step == 7 and shown.curve[-1].loss == 1.5
        assert len(shown.ranks) <= 1024
        Snapshot.model_validate_json(shown.model_dump_json())
        assert_fits(shown)


def test_a_long_curve_is_thinned_and_read_as_it_grows(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    history = MetricsReader(run_dir.metrics, parsed_bytes=2**20)
    history.read()
    assert history.curve() == ()
    with run_dir.metrics.open("w") as stream:
        for step in range(1, 12_001):
            stream.write(json.dumps(metrics_row(step)) + "\n")
            if step % 200 == 0:
                stream.write(json.dumps({"kind": "eval", "step": step, "loss": 2.0}) + "\n")
    history.read()
    curve = history.curve()
    assert 150 < len(curve) <= POINTS
    assert curve[-1].step == 12_000 and curve[-1].eval_loss == 2.0
    assert 20 < sum(point.eval_loss is not None for point in curve) < 100
    assert [point.step for point in curve] == sorted({point.step for point in curve})
    assert history.step_s == pytest.approx(6000.0, rel=1e-3)
    with run_dir.metrics.open("a") as stream:
        stream.write(json.dumps(metrics_row(12_001))[:-5])  # torn
        stream.flush()
        history.read()
        assert history.newest["step"] == 12_000
        stream.write(json.dumps(metrics_row(12_001))[-5:] + "\n")
    history.read()
    assert history.newest["step"] == 12_001 and history.curve()[-1].step == 12_001
    # The run goes on from step 10: rows of what is lost are taken out, by a new file.
    other = tmp_path / "other"
    other.write_text("".join(json.dumps(metrics_row(step)) + "\n" for step in (5, 10)))
    other.rename(run_dir.metrics)
    history.read()
    assert [point.step for point in history.curve()] == [5, 10] and history.step_s == 5.0


def test_goodput_counts_each_step_once_and_no_time_between_attempts(tmp_path: Path) -> None:
    now = time.time()
    launches = [{"launcher": "local", "begun_at": now - ago} for ago in (1000, 100)]
    run_dir, first = recorded_run(tmp_path / "x-1", launches[0], {"at": now - 900})
    run_dir.attempt(2).path.mkdir()
    write_record(run_dir.attempt(2).launch, launches[1])
    assert goodput(150.0, spans_of(run_dir, now, is_alive=True)) == pytest.approx(150 / 200)
    first.outcome.unlink()  # it was killed: its last sign of life counts
    first.last_step.write_text("0 1\n")
    os.utime(first.last_step, (now - 950, now - 950))
    assert goodput(90.0, spans_of(run_dir, now, is_alive=True)) == pytest.approx(90 / 150)


def test_goodput_counts_the_time_in_a_queue(tmp_path: Path) -> None:
    """A job that is queued again stays one attempt, whose ranks began a moment ago."""
    now = time.time()
    launch = {"launcher": "slurm", "begun_at": now - 268}
    run_dir, attempt = recorded_run(tmp_path / "x-1", launch)
    record = {"rank": 0, "host": "n1", "pid": 9, "started": now - 30}
    write_record(attempt.rank_record(0), record)
    assert goodput(205.0, spans_of(run_dir, now, is_alive=True)) == pytest.approx(205 / 268)


def cluster_snapshot(path: Path, **changes: Any) -> tuple[RunDir, Attempt, Snapshot]:
    """One of several clusters."""
    run_dir, attempt = running(path, **{"outer": OUTER, "tokens_per_second": 900.0, **changes})
    write_live(attempt, *two_nodes())
    return run_dir, attempt, RunReader(run_dir).look()


def member(name: str, **changes: Any) -> dict[str, Any]:
    """A cluster as the hub knows it."""
    own = {"name": name, "state": "living", "since": 7, "weight": 0.5, "heard_s": 1.0}
    return {**own, "phase": "training", "is_behind": False, "refused": "", **changes}


def test_clusters_hub_and_links_between_them(tmp_path: Path) -> None:
    _, _, a = cluster_snapshot(tmp_path / "t-a-1")
    _, _, b = cluster_snapshot(tmp_path / "t-b-1", outer={**OUTER, "outer_step": 5})
    waiting = {"round": 7, "waits_for": ["b"], "contributed": ["a"], "due_in_s": 12.0}
    waiting["missing"] = {"b": "training: 7 inner steps since its last round"}
    members = [member("a"), member("b", heard_s=9.0)]
    status = {"round": 7, "members": members, "open": [waiting]}
    view = MultiClusterView("t-1", "/runs/t-1", {"a": "local", "b": "ssh", "c": "slurm"})
    shown = view.snapshot({"a": a, "b": b}, {}, HubAnswer("hub:29400", status))
    rows = {row.name: row for row in shown.clusters}
    assert list(rows) == ["a", "b", "c"] and rows["c"].state == "never started"
    assert (rows["a"].mark, rows["a"].lag, rows["a"].inner_steps) == ("", 1, 7)
    assert (rows["a"].weight, rows["a"].hidden_share, rows["a"].sync_s) == (0.5, 0.75, 4.0)
    assert (rows["b"].mark, rows["b"].lag, rows["b"].launcher) == ("silent", 2, "ssh")
    assert shown.notes[0] == "b: the hub gets no heartbeat from it for 9s"
    assert shown.notes[-1].startswith("round 7 waits for b (training: 7 inner steps")
    assert [(row.cluster, row.rank) for row in shown.ranks] == [*product("ab", range(4))]
    links = {(row.source, row.target): row for row in shown.links}
    assert links["b", "hub"].state.startswith("down: ") and links["a", "hub"].state == "ok"
    assert links["hub", "a"].measured == 1e6
    assert shown.hub is not None and shown.hub.waits_for == ("b",) and shown.hub.due_s == 12.0
    assert (shown.run.tokens_per_second, shown.run.state) == (1800.0, "running")
    assert_fits(shown)
    # Its machine does not answer; the hub is gone.
    lost = HubAnswer("hub:29400", error="no hub listens at this address")
    shown = view.snapshot({"a": a}, {"b": "far cannot be asked"}, lost)
    assert shown.notes[0] == "the hub does not answer: no hub listens at this address"
    assert shown.notes[1] == "b: far cannot be asked"


def test_a_cluster_that_only_the_hub_reaches_is_shown_by_what_it_sends(tmp_path: Path) -> None:
    run_dir, attempt, _ = cluster_snapshot(tmp_path / "t-far-1")
    write_live(attempt, *two_nodes(r3={"alive": False, "exit": 1}))
    text = pack(run_dir)
    assert set(unpack(text)) == {"status", "live"} and len(text) < 4000
    view = MultiClusterView("t-hub-1", "/runs/t-hub-1", {})
    bad = base64.b64encode(zlib.compress(b"[" * 10_000)).decode()
    bomb = base64.b64encode(zlib.compress(bytes(2**26))).decode()
    names = ("far", "bad", "bomb", "none")
    status = {"round": 7, "members": [*map(member, names)]}
    sent = {"far": (2.0, text), "bad": (0.0, bad), "bomb": (0.0, bomb)}
    shown = view.snapshot({}, {}, HubAnswer("h:1", status, shown=sent))
    states = {row.name: row.state for row in shown.clusters}
    assert states == dict.fromkeys(names, "running")
    assert [row.host for row in shown.hosts if row.cluster == "far"] == ["h0", "h1"]
    assert shown.notes[0] == "far: rank 3 on h1: its process has ended with exit code 1"
    assert_fits(shown)
    attempt.live.write_text(json.dumps({"noise": os.urandom(LONGEST).hex()}))
    assert set(unpack(pack(run_dir))) == {"status"}, "it would be too large"
    attempt.live.write_text(json.dumps({"noise": [{}] * 2**19}))
    assert set(unpack(pack(run_dir))) == {"status"}, "it would be unpacked to too much"
    cards = [gpu_record(index) for index in range(8)]
    large = [node_record(f"h{n}", 8 * n, [rank_record()] * 8, cards) for n in range(96)]
    write_live(attempt, *large)
    text = pack(run_dir)
    assert set(unpack(text)) == {"status", "live"} and unpack(text) is unpack(text)
    many = b'{"status": {"a": [%s{}]}}' % (b"{}," * (5 * 2**20))
    assert unpack(base64.b64encode(zlib.compress(many)).decode()) == {}
    assert pack(RunDir(tmp_path / "nowhere")) == ""


def test_a_cluster_that_was_dropped_stays_wrong(tmp_path: Path) -> None:
    run_dir, attempt, _ = cluster_snapshot(tmp_path / "t-far-1")
    write_live(attempt, *two_nodes())
    view = MultiClusterView("t-hub-1", "/runs/t-hub-1", {})
    for heard_s in (25.0, 4000.0):
        status = {"round": 7, "members": [member("a"), member("far", heard_s=heard_s)]}
        status["members"][1]["state"] = "dropped"
        shown = view.snapshot(
            {}, {}, HubAnswer("h:1", status, shown={"far": (heard_s, pack(run_dir))})
        )
        (row,) = (row for row in shown.clusters if row.name == "far")
        assert (row.state, row.mark) == ("dropped", "silent")
        age = {25.0: "25s", 4000.0: "1h 06m"}[heard_s]
        assert shown.notes[0] == f"far: dropped by the hub, no heartbeat for {age}"
        assert all(rank.mark == "silent" for rank in shown.ranks if rank.cluster == "far")
        assert shown.run.tokens_per_second is None or shown.run.tokens_per_second < 900.0
        assert all(link.state != "ok" for link in shown.links if link.cluster == "far")


def test_what_is_known_of_a_bucket_ages(tmp_path: Path) -> None:
    now = time.time()
    members = [member("a", heard_s=1.0, slow=""), member("b", heard_s=10.0, slow="")]
    outer = {**OUTER, "meeting": {"round": 7, "members": members, "at": now - 25.0}}
    run_dir, _ = running(tmp_path / "t-a-1", outer=outer)
    report = collect(run_dir, lambda: now)
    text = "\n".join(report_lines(report))
    assert "the bucket was last read 25s ago" in text
    assert "last heartbeat 26s ago" in text and "last heartbeat 35s ago" in text
    odd = {**OUTER, "meeting": {"age_s": "x", "members": []}}  # another user wrote the record
    other, _ = running(tmp_path / "t-b-1", outer=odd)
    assert "the bucket" not in "\n".join(report_lines(collect(other, lambda: now)))


def test_the_clusters_of_this_machine_are_read_from_their_directories(tmp_path: Path) -> None:
    clusters = [ClusterRun("c", "ssh")]
    for name in "ab":
        run_dir, _, _ = cluster_snapshot(tmp_path / f"t-{name}-1")
        clusters.append(ClusterRun(name, "local", str(run_dir.path), "", 1))
    (tmp_path / "t-1").mkdir()
    run = MultiClusterRun(tmp_path / "t-1", tuple(clusters), 1.0, time.time(), {})
    run.write()
    with closing(MultiClusterReader(run, 2.0)) as reader:
        shown = reader.look()
    assert shown is not None and shown.hub is not None and shown.hub.error == "it does not run"
    states = {row.name: row.state for row in shown.clusters}
    assert states == {"c": "never started", "a": "running", "b": "running"}
    assert len(shown.ranks) == 8


def test_a_watch_gives_one_snapshot_after_the_other_logs_and_stacks(tmp_path: Path) -> None:
    run_dir, attempt = running(tmp_path / "far-1")
    write_live(attempt, *two_nodes())
    with Watch(run_dir, tmp_path, 0.2) as watch:
        first = second = watch.wait(0.0, DEADLINE_S)
        write_live(attempt, *two_nodes(r1={"alive": False, "exit": -9}))
        while marks(second)[1] != "dead":
            second = watch.wait(second.at, DEADLINE_S)
        assert second.at > first.at
        assert watch.error == "" and watch.typed == str(run_dir.path)
        attempt.rank_log(1).write_text("one\ntwo\nthree\n")
        assert watch.log_lines(RankRow(rank=1), 2) == ["two", "three"]
        answer = {"host": "h0", "step": 5, "stage": "data loading", "at": "at x.py:3"}
        ranks = {"1": {**answer, "waits_in": "", "stacks": "thread MainThread:\n  x.py"}}
        write_record(attempt.stacks, {"asked_at": time.time() + 60, "ranks": ranks})
        text = watch.stack(RankRow(rank=1))
        assert text.startswith("rank 1 on h0: step 5, data loading, at x.py:3\n\nthread MainThread")
        assert attempt.stacks_request.exists()
        run_dir.path.rename(tmp_path / "elsewhere")
        until(lambda: "was deleted or moved away" in watch.error)
        assert watch.latest is not None and len(watch.latest.ranks) == 4


def test_a_snapshot_with_an_odd_time_is_not_taken(tmp_path: Path, monkeypatch) -> None:
    """NaN equals no time: a page that waited for a newer snapshot sent this one without end."""
    times = ("5.0", "NaN", "Infinity", "-Infinity", "1e308", "-1e308", "1e999", '"x"', "null", "[]")
    (tmp_path / "said").write_text("".join(f'{{"at": {at}}}\n' for at in times))
    write_program(tmp_path / "ssh", f"cat {tmp_path}/said; exit 3")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    far = RemoteRun("x-1", "me@h", "/x-1", (), "python3", "ssh", ("me@h",), 1.0)
    with Watch(far, tmp_path, 0.2) as watch:
        until(lambda: "exit status 3" in watch.error)  # all lines are read
        shown = watch.wait(0.0, DEADLINE_S)
        assert shown is not None and shown.at == 5.0
        assert watch.wait(shown.at, 0.0) is None
        assert_fits(shown)


def test_sixty_four_nodes_of_eight_cards_are_a_small_snapshot(tmp_path: Path) -> None:
    run_dir, attempt = running(tmp_path / "big-1", world_size=512)
    gpus, names = [gpu_record(n) for n in range(8)], [f"node{k:02d}" for k in range(64)]
    nodes = [
        node_record(name, 8 * k, [rank_record(gpu=n) for n in range(8)], gpus)
        for k, name in enumerate(names)
    ]
    write_live(attempt, *nodes)
    pairs = {a: {b: {"bytes_per_s": 1e9, "rtt_s": 1e-4} for b in names} for a in names}
    write_record(tmp_path / ".links.json", {"at": 1.0, "pairs": pairs})
    shown = snapshot(run_dir)
    assert len(shown.ranks) == 512 and len(shown.links) == 64
    text = shown.model_dump_json()
    assert len(text) < 400_000 and len(zlib.compress(text.encode())) < 40_000
    assert len(pack(run_dir)) < LONGEST // 2
