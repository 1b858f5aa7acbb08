"""How runs stand, how they are stopped and why they failed, by records and real processes."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from isles.errors import ExitCode, UserError
from isles.monitor.outcome import failure_lines
from isles.monitor.status import collect
from isles.monitor.stop import stop_run
from isles.run.begin import new_attempt, write_launch
from isles.run.paths import RunDir
from isles.run.process import ProcessId
from isles.run.records import read_record, write_record
from isles.run.state import FRESH_S, attempt_state
from isles.run.stop import kill_now, read_stop_request, send_signal
from tests.deadline import DEADLINE_S, until
from tests.run_records import FAR, GONE, rank_error, recorded_run, two_hosts
from tests.runs import bare_run, running_agent


def stop(run_dir: RunDir, *, now: bool = False) -> str:
    said: list[str] = []
    code = stop_run(run_dir, now=now, timeout_s=DEADLINE_S, print_line=said.append)
    assert code == ExitCode.OK
    return "\n".join(said)


def test_a_job_stands_as_its_queue_says(tmp_path: Path) -> None:
    for number, (job, outcome, state, is_alive) in enumerate(
        (
            ("pending", None, "queued", True),
            ("requeued", {"state": "stopped", "exit_code": 85}, "queued", True),
            ("running", None, "running", True),
            ("running", {"state": "finished"}, "finished", True),
            ("ended", {"state": "finished"}, "finished", False),
            ("ended", None, "killed", False),
            ("unknown", None, "unknown", False),
            (None, {"state": "failed", "exit_code": 3}, "failed", False),
        )
    ):
        run_dir, attempt = recorded_run(tmp_path / f"a-{number}", {"launcher": "slurm"}, outcome)
        if job:
            write_record(attempt.job, {"at": time.time(), "state": job, "reason": "why"})
        found, reason = attempt_state(run_dir, attempt), "why" if job else ""
        assert (found.state, found.is_alive, found.reason) == (state, is_alive, reason), number


def test_an_outcome_is_newer_than_the_word_of_a_queue_that_went_silent(tmp_path: Path) -> None:
    outcome = {"state": "stopped", "at": time.time(), "exit_code": 85}
    run_dir, attempt = recorded_run(tmp_path / "a-1", {"launcher": "slurm"}, outcome)
    write_record(attempt.job, {"at": time.time() - 60.0, "state": "pending", "reason": "why"})
    found = attempt_state(run_dir, attempt)
    assert (found.state, found.is_alive) == ("stopped", False)


def test_a_sign_of_life_is_newer_than_the_queues_word(tmp_path: Path) -> None:
    before = {"state": "stopped", "at": time.time() - 60}
    launch, status = {"launcher": "slurm"}, {"step": 1}
    run_dir, attempt = recorded_run(tmp_path / "a-1", launch, before, status=status)
    write_record(attempt.job, {"at": time.time() - 1.0, "state": "pending"})
    assert attempt_state(run_dir, attempt).state == "running"
    later = attempt_state(run_dir, attempt, lambda: time.time() + FRESH_S + 1)
    assert later.state == "queued"


def test_a_copy_of_a_run_that_has_ended_has_ended(tmp_path: Path) -> None:
    """`cp -r` gives each file the time of now."""
    for state in ("finished", "stopped", "failed"):
        ended = {"state": state, "at": time.time() - 600}
        status = {"step": 1, "updated_at": time.time() - 601}
        for launcher in ("slurm", "pbs", "ray", "local"):
            path = tmp_path / f"{state}-{launcher}-1"
            run_dir, attempt = recorded_run(
                path, {"launcher": launcher}, ended, status=status, began_s_ago=900
            )
            if launcher != "local":
                write_record(attempt.job, {"at": time.time(), "state": "ended", "reason": "why"})
            assert attempt_state(run_dir, attempt).state == state
    # The same job was queued again, and runs: its ranks write newer times.
    write_record(run_dir.status, {"step": 1, "updated_at": time.time()})
    write_record(attempt.launch, {"launcher": "slurm"})
    assert attempt_state(run_dir, attempt).state == "running"


def test_a_run_stands_as_it_says_and_a_stop_that_is_not_heard_ends(tmp_path: Path) -> None:
    run_dir = bare_run(tmp_path / "a-1")
    # What an earlier attempt has left.
    write_record(run_dir.status, {"phase": "training", "step": 99, "updated_at": time.time() - 9})
    with running_agent(run_dir, world_size=2) as agent:
        report = collect(run_dir)
        assert (report.state, report.phase, report.step) == ("running", "starting", None)
        agent.order("status", phase="saving", detail="step 7", step=30)
        report = collect(run_dir)
        assert (report.state, report.phase, report.step) == ("running", "saving", 30)
        assert (report.pid, report.attempt, report.world_size) == (agent.process.pid, 1, 2)
        later = collect(run_dir, lambda: time.time() + 400)
        assert "reported nothing for 6m 40s" in later.hint
        agent.order("deaf")
        said: list[str] = []
        with pytest.raises(UserError, match="has not ended within"):
            stop_run(run_dir, now=False, timeout_s=0.2, print_line=said.append)
        assert said[-1] == "  waiting: saving, step 7" and agent.process.is_alive()
        assert "was ended without saving" in stop(run_dir, now=True)
        assert not agent.process.is_alive()
    assert collect(run_dir).state == "killed"


def test_stop_lets_the_run_save(tmp_path: Path) -> None:
    run_dir = bare_run(tmp_path / "a-1")
    with running_agent(run_dir) as agent:
        assert "has ended: stopped at step 7 (SIGTERM)" in stop(run_dir)
        assert not agent.process.is_alive()
    assert collect(run_dir).state == "stopped"


def test_a_silent_run_on_another_host_is_unknown(tmp_path: Path) -> None:
    run_dir, attempt = recorded_run(tmp_path / "a-1", FAR, began_s_ago=0.0)
    assert collect(run_dir).state == "running"
    report = collect(run_dir, lambda: time.time() + 600)
    assert (report.state, report.host) == ("unknown", "far")
    assert "last seen 10m" in report.hint
    write_record(attempt.launch, {**FAR, "begun_at": time.time() - FRESH_S + 1.0})
    for _ in ("falls silent while it is waited for", "is silent"):
        with pytest.raises(UserError, match="has sent no heartbeat for") as caught:
            stop(run_dir)
        assert "if far is up" in caught.value.fix
    assert attempt.stop_request.exists(), "it is heard when the host is back"


def test_a_clock_that_is_ahead_keeps_no_run_alive(tmp_path: Path) -> None:
    run_dir, attempt = recorded_run(tmp_path / "a-1", FAR, began_s_ago=-3600.0)
    write_record(run_dir.status, {"updated_at": time.time() + 3600.0})
    now = time.time()
    state = attempt_state(run_dir, attempt, lambda: now)
    assert state.state == "running"
    assert state.last_seen_at is not None and abs(state.last_seen_at - now) < 5
    assert attempt_state(run_dir, attempt, lambda: now + FRESH_S + 5).state == "unknown"


def test_a_run_that_is_seen_by_its_files_only_is_stopped_by_them(tmp_path: Path) -> None:
    run_dir, attempt = recorded_run(tmp_path / "a-1", FAR, status={"phase": "training"})

    def rank_0() -> None:
        until(attempt.stop_request.exists)
        write_record(attempt.outcome, {"state": "stopped", "exit_code": 85, "step": 5})

    thread = threading.Thread(target=rank_0)
    thread.start()
    said = stop(run_dir)
    thread.join()
    assert read_stop_request(attempt).kind == "save"
    assert "far" in said and "has ended: stopped at step 5" in said


def test_a_reused_pid_is_never_signaled(tmp_path: Path) -> None:
    with running_agent(bare_run(tmp_path / "innocent-1")) as innocent:
        run_dir = bare_run(tmp_path / "a-1")
        attempt = new_attempt(run_dir)
        process = innocent.process
        reused = ProcessId(process.host, process.pid, process.started - 3600)
        write_launch(attempt, reused, world_size=1, device="cpu", command=())
        assert collect(run_dir).state == "killed"
        for now in (False, True):
            assert "is not running" in stop(run_dir, now=now)
        assert not kill_now(reused)
        assert not send_signal(ProcessId("elsewhere", process.pid, process.started), 15)  # type: ignore[arg-type]
        innocent.order("log", rank=0, text="still here\n")
        assert process.is_alive()


def test_the_rank_that_failed_by_itself_is_shown_first(tmp_path: Path) -> None:
    end = {"state": "failed", "exit_code": 5, "error": {"rank": 0, "what": "time-out"}}
    _, attempt = recorded_run(tmp_path / "a-1", {**GONE, "world_size": 3}, end)
    rank_error(attempt, 0, "time-out", at=10.0, is_communication=True)
    rank_error(attempt, 2, "later", at=12.0)
    fields = {"where": "batch 5", "fix": "lower the rate"}
    trace = "".join(f"line {number}\n" for number in range(40))
    rank_error(attempt, 1, "loss is nan at step 7", at=11.0, traceback=trace, **fields)
    attempt.rank_log(1).write_text("x")
    assert failure_lines(attempt) == [
        "error: loss is nan at step 7",
        "  where: rank 1 on far, batch 5",
        "  fix: lower the rate",
        f"  log: {attempt.rank_log(1)}",
        "  2 other ranks stopped because of it",
    ]
    rank_error(attempt, 1, "ValueError: x", at=11.0, traceback=trace)
    text = "\n".join(failure_lines(attempt))
    assert "line 39" in text and "line 10" not in text, "of what nobody has foreseen"


def test_a_run_that_found_no_room_for_its_end_says_so(tmp_path, monkeypatch) -> None:
    _, attempt = recorded_run(tmp_path / "a-1", GONE)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=4096))
    full = f"the disk of {attempt.path} is full, 4.0 KiB are left"
    assert f"no word: {full}\n  fix: free" in "\n".join(failure_lines(attempt))
    # Nor had a rank room for its error: an agent's memory is all there is.
    culprit = {"rank": 0, "what": "rank 0 ended with exit code 5"}
    write_record(attempt.outcome, {"state": "failed", "exit_code": 5, "error": culprit})
    lines = failure_lines(attempt)
    assert lines[0] == f"error: {full}; rank 0 ended with exit code 5"
    assert "  fix: free some of it first" in lines


def test_a_record_that_another_host_replaces_is_read_again(tmp_path, monkeypatch) -> None:
    """On NFS what was opened is gone then: ESTALE."""
    path = tmp_path / "status.json"
    write_record(path, {"step": 1})
    opened, faults = os.open, [OSError(errno.ESTALE, "Stale file handle")]

    def stale(*given: Any, **more: Any) -> int:
        if faults:
            raise faults.pop()
        return opened(*given, **more)

    monkeypatch.setattr(os, "open", stale)
    assert read_record(path) == {"step": 1} and not faults


def test_commands_that_nobody_has_typed_yet_were_not_killed(tmp_path: Path) -> None:
    run_dir = bare_run(tmp_path / "a-1")
    attempt = new_attempt(run_dir)
    two_hosts(attempt, "manual")
    write_record(attempt.launch, {**(read_record(attempt.launch) or {}), **GONE})
    assert attempt_state(run_dir, run_dir.attempt(1)).state == "new"
    assert "when its commands are typed" in collect(run_dir).hint
