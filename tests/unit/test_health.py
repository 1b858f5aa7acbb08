"""`isles status --check`: five lines, of made snapshots; and the command on made records."""

from __future__ import annotations

import json
import math
import random
import time
from itertools import count
from typing import Any

from isles.cli import main
from isles.errors import ExitCode
from isles.monitor.live.health import CheckLine, check_lines, text_lines, wait_until_healthy
from isles.monitor.live.model import ClusterRow, Head, HostRow, Point, RankRow, Snapshot
from isles.run.records import write_record
from tests.live_records import metrics_row, node_record, rank_record, write_live, write_metrics
from tests.run_records import FAR, recorded_run, two_hosts

GIB = 2**30
HEAD = Head(name="run-1", state="running", phase="training", step=40, recorded_age_s=2.0)
HOSTS = (HostRow(host="a", ranks=(0, 1), heard_s=1.0), HostRow(host="b", node=1, ranks=(2, 2)))


def rank(number: int, **more: Any) -> RankRow:
    """A rank that trains on a GPU."""
    host = "b" if number == 2 else "a"
    own = {"memory_bytes": (10 + number) * GIB, "limit_bytes": 16 * GIB, "step": 40, "heard_s": 1.0}
    return RankRow(**{"rank": number, "host": host, "pid": 100 + number, **own, **more})


def snapshot(*ranks: RankRow, **more: Any) -> Snapshot:
    """A run that is well."""
    curve = tuple(Point(step=n, loss=9 - n / 10, elapsed_s=float(n)) for n in range(1, 41))
    found = ranks or tuple(rank(n) for n in range(3))
    return Snapshot(**{"run": HEAD, "hosts": HOSTS, "ranks": found, "curve": curve, **more})


def losses(*values: float) -> tuple[Point, ...]:
    return tuple(Point(step=10 * n, loss=loss) for n, loss in enumerate(values, 1))


def line_of(line_id: str, shown: Snapshot) -> CheckLine:
    return next(line for line in check_lines(shown) if line.id == line_id)


def test_a_run_that_is_well() -> None:
    shown = snapshot()
    lines = check_lines(shown)
    assert [line.state for line in lines] == ["ok"] * 5
    assert text_lines(shown, lines) == [
        "run-1 at step 40",
        "  ok      processes  3 processes on 2 hosts, one on each GPU",
        "  ok      memory     10.0 GiB to 12.0 GiB of 16.0 GiB in use by each rank",
        "  ok      loss       falling: 7.2 around step 18, 5.4 around step 36",
        "  ok      ranks      all 3 at step 40, last heartbeat 1s ago at most",
        "  ok      records    step 40 was recorded 2s ago",
    ]
    assert all(line.state == "ok" for line in check_lines(shown, is_script=True))
    on_processors = snapshot(*(rank(n, limit_bytes=None) for n in range(3)))
    assert line_of("processes", on_processors).text.endswith("one for each rank")
    apart = snapshot(rank(0, step=41), rank(1), rank(2))
    assert line_of("ranks", apart).text.startswith("all 3 at steps 40 to 41")


def three(**of_rank: dict[str, Any]) -> Snapshot:
    """A run that is well but for what its ranks r0, r1 and r2 have."""
    return snapshot(*(rank(n, **of_rank.get(f"r{n}", {})) for n in range(3)))


def test_what_is_not_well() -> None:
    """Each is named with its host and rank, and has the line to type next."""
    dead, behind = {"mark": "dead", "note": "by signal 9"}, {"mark": "straggler", "note": "slow"}
    unheard = {"heard_s": 20.0, "stage": "forward and backward"}
    first = snapshot(rank(0, pid=None, step=None), run=Head(name="run-1", state="running"))
    ended = snapshot(curve=(*losses(*range(30, 10, -1)), Point(step=990, loss=None)))
    apart = (rank(0, cluster="x", step=40), rank(0, cluster="y", step=90))
    clusters = (ClusterRow(name="x"), ClusterRow(name="y", mark="silent"))
    silent = (HostRow(host="b", heard_s=40.0, mark="silent"),)
    late = HEAD.model_copy(update={"recorded_age_s": 70.0})
    evaluating = late.model_copy(update={"phase": "evaluating"})
    # The line, the run, and of what it says: the state; where; some words; what to type.
    cases = (
        ("processes", three(r1=dead), "wrong; rank 1 on a; is gone: by signal 9; --rank 1"),
        ("processes", snapshot(rank(0), rank(1)), "wrong; rank 2 on b; rank 2 on b not; logs"),
        ("processes", first, "not yet; rank 1 on a, rank 2 on b, rank 0 on a; not started; logs"),
        (
            "memory",
            three(r0={"memory_bytes": None}),
            "not yet; rank 0 on a; is in use yet by; logs",
        ),
        ("memory", three(r2={"memory_bytes": 0}), "wrong; rank 2 on b; by rank 2 on b; --rank 2"),
        ("loss", snapshot(curve=losses(9.0, 8.0)), "not yet; ; 70 steps are missing; logs"),
        ("loss", snapshot(curve=()), "not yet; ; 9 recorded steps are missing; logs"),
        ("loss", snapshot(curve=losses(9.0, math.nan)), "wrong; ; since step 20; loss.finite"),
        ("loss", ended, "wrong; ; not finite since step 990; isles explain loss.finite"),
        ("loss", snapshot(curve=losses(*range(1, 30))), "wrong; ; rising; isles stop run-1"),
        ("loss", snapshot(curve=losses(*[2.0] * 30)), "not yet; ; noise; logs"),
        ("ranks", three(r0=behind, r1=unheard), "wrong; rank 1 on a; 20s, then in forward; "),
        ("ranks", three(r0=behind, r1={"mark": "silent"}), "wrong; rank 1 on a; ; --rank 1"),
        ("ranks", three(r2=behind), "wrong; rank 2 on b; rank 2 on b is behind: slow; --rank 2"),
        ("ranks", three(r1={"step": 38}), "wrong; rank 1 on a; behind; --rank 1"),
        ("ranks", three(r0={"step": None}), "not yet; rank 0 on a; no step; logs"),
        ("ranks", snapshot(*apart, clusters=clusters, hosts=()), "wrong; y; y is silent; status"),
        ("records", snapshot(hosts=silent), "wrong; b; from b, last heartbeat 40s ago; status"),
        ("records", snapshot(run=late), "wrong; ; recorded 1m 10s ago, and nothing since; logs"),
        ("records", snapshot(run=evaluating), "not yet; ; and now it is evaluating; logs"),
    )
    wrong = []
    for line_id, shown, said in cases:
        line, (state, where, words, typed) = line_of(line_id, shown), said.split("; ")
        is_named = where == line.where and words in line.text and typed in line.next
        if line.state != state or not is_named:
            wrong.append((line_id, said, line))
    assert wrong == []


def test_noise_is_neither_a_fall_nor_a_rise() -> None:
    """Of 200 curves of each kind, with noise much larger than a step's fall."""

    def states(fall: float, points: int) -> list[str]:
        found = []
        for seed in range(200):
            noise = random.Random(seed)
            values = [5 - fall * n + noise.gauss(0, 0.2) for n in range(points)]
            found.append(line_of("loss", snapshot(curve=losses(*values))).state)
        return found

    assert states(0.02, 100).count("ok") == 200
    assert states(-0.02, 100).count("wrong") >= 198
    assert states(0.0, 20).count("wrong") <= 6, "a curve without a trend"
    late = [6 - 3 * (1 - math.exp(-n / 60)) for n in range(2000)]
    noise = random.Random(0)
    curve = losses(*(value + noise.gauss(0, 0.05) for value in late))
    assert line_of("loss", snapshot(curve=curve)).state == "ok", "level, far below its beginning"


def test_ranks_of_two_clusters_are_in_step_with_their_own() -> None:
    clusters = (ClusterRow(name="x"), ClusterRow(name="y"))
    ranks = [rank(n, cluster=name, step=s) for name, s in (("x", 40), ("y", 90)) for n in (0, 1)]
    line = line_of("ranks", snapshot(*ranks, clusters=clusters, hosts=()))
    assert line.state == "ok" and "steps 40 to 90, each cluster in step" in line.text
    ranks[3] = rank(1, cluster="y", step=80)
    line = line_of("ranks", snapshot(*ranks, clusters=clusters, hosts=()))
    assert (line.where, line.next) == ("y rank 1 on a", "isles logs run-1 --cluster y --rank 1")


def test_waiting_says_for_what_and_ends_when_all_is_well_or_over() -> None:
    early = snapshot(curve=losses(9.0))
    said: list[str] = []
    clock = count(0.0, 4.0)

    def wait(*shown: Snapshot, wait_s: float = 60.0) -> tuple[Snapshot, list[CheckLine]]:
        looks = iter(shown)
        return wait_until_healthy(
            lambda: next(looks), check_lines, wait_s, said.append, clock=lambda: next(clock)
        )

    _, lines = wait(early, early, snapshot())
    assert all(line.state == "ok" for line in lines)
    assert said and "for loss: 8 recorded steps are missing" in said[0]
    _, lines = wait(*[early] * 9, wait_s=10.0)
    assert [line.id for line in lines if line.state != "ok"] == ["loss"], "the time is up"
    ended = early.model_copy(update={"run": HEAD.model_copy(update={"state": "failed"})})
    assert wait(early, ended)[0] is ended


def test_the_command(tmp_path, monkeypatch, capsys) -> None:
    """Two hosts by their records; then one of its three ranks is silent; then the run is over."""
    monkeypatch.chdir(tmp_path)
    status = {"step": 40, "phase": "training", "progress_at": time.time()}
    launch = {**FAR, "launcher": "ssh", "world_size": 3}
    run_dir, attempt = recorded_run(tmp_path / "runs" / "run-1", launch, status=status)
    two_hosts(attempt, "ssh")
    write_metrics(run_dir, *map(metrics_row, range(1, 41)))
    first = node_record("h0", 0, [rank_record(), rank_record()])
    write_live(attempt, first, node_record("h1", 2, [rank_record()]))
    assert main(["status", "run", "--check", "--wait"]) == ExitCode.OK
    assert "  ok      ranks      all 3 at step 40" in capsys.readouterr().out
    write_live(attempt, first, node_record("h1", 2, [rank_record(at=time.time() - 30.0)]))
    assert main(["status", "--check", "--json"]) == ExitCode.PREFLIGHT
    found = json.loads(capsys.readouterr().out)
    bad = [line for line in found["lines"] if line["state"] != "ok"]
    assert [(line["id"], line["where"]) for line in bad] == [("ranks", "rank 2 on h1")]
    assert bad[0]["next"] == "isles logs run-1 --rank 2" and not found["is_well"]
    for state, code in (("finished", ExitCode.OK), ("failed", ExitCode.PREFLIGHT)):
        write_record(attempt.outcome, {"at": time.time(), "exit_code": 0, "state": state})
        assert main(["status", "run", "--check", "--wait", "1s"]) == code
        assert state in capsys.readouterr().out
    # A run without the model of its last step is not well, until it is exported again.
    write_record(attempt.outcome, {"at": time.time(), "exit_code": 0, "state": "finished"})
    write_record(run_dir.summary, {"steps": 40, "export_error": "the disk is full"})
    assert main(["status", "run", "--check"]) == ExitCode.PREFLIGHT
    assert "the disk is full" in capsys.readouterr().out
    run_dir.model.mkdir()
    (run_dir.model / "README.md").write_text("| steps | 40 |\n")
    assert main(["status", "run", "--check"]) == ExitCode.OK
    assert main(["status", "--check", "--wait", "run"]) == ExitCode.USER
    assert "isles status RUN --check --wait 5m" in capsys.readouterr().err
