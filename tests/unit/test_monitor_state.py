"""How runs stand and how they are stopped, by records and real processes."""

from __future__ import annotations

import errno
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from isles.errors import ExitCode, UserError
from isles.monitor.outcome import failure_lines, root_cause
from isles.monitor.status import collect
from isles.monitor.stop import stop_run
from isles.monitor.table import report_lines
from isles.run.begin import new_attempt, write_launch
from isles.run.paths import Attempt, RunDir
from isles.run.process import ProcessId
from isles.run.records import read_record, write_record
from isles.run.state import FRESH_S
from isles.run.stop import kill_now, send_signal
from tests.deadline import DEADLINE_S
from tests.each import each
from tests.runs import bare_run, running_agent


def ended_run(path: Path, outcome: dict[str, Any] | None, world_size: int = 1) -> Attempt:
    """A run whose process is gone; None: it left no outcome."""
    run_dir = bare_run(path)
    with running_agent(run_dir, world_size) as agent:
        attempt = agent.attempt
    if outcome is not None:
        write_record(attempt.outcome, {"at": time.time(), "step": 7, **outcome})
    return attempt


def stop(run_dir: RunDir, *, now: bool = False, timeout_s: float = DEADLINE_S) -> tuple[int, str]:
    said: list[str] = []
    code = stop_run(run_dir, now=now, timeout_s=timeout_s, print_line=said.append)
    return code, "\n".join(said)


def test_a_running_run_shows_its_status(tmp_path: Path) -> None:
    run_dir = bare_run(tmp_path / "a-1")
    # What an earlier attempt left does not count.
    write_record(run_dir.status, {"phase": "training", "step": 99, "updated_at": time.time() - 9})
    with running_agent(run_dir, world_size=2) as agent:
        report = collect(run_dir)
        assert (report.state, report.phase, report.step) == ("running", "starting", None)
        agent.order("status", phase="training", step=30, total_steps=60, loss=4.5, eta_s=65.0)
        report = collect(run_dir)
        assert (report.state, report.phase, report.step) == ("running", "training", 30)
        assert (report.pid, report.attempt, report.world_size) == (agent.process.pid, 1, 2)
        text = "\n".join(report_lines(report))
        assert "30/60" in text
        assert "1m 05s" in text
        later = collect(run_dir, lambda: time.time() + 400)
        assert "reported nothing for 6m 40s" in later.hint
        assert json.loads(json.dumps(report.model_dump()))["state"] == "running"


@each(
    ("outcome", "state", "hint"),
    [
        ({"state": "finished", "exit_code": 0}, "finished", "isles generate "),
        ({"state": "stopped", "exit_code": 85, "reason": "SIGTERM"}, "stopped", "isles train"),
        ({"state": "failed", "exit_code": 4, "reason": "no memory"}, "failed", "isles train"),
        (None, "killed", "isles train"),
    ],
)
def test_an_ended_run(
    tmp_path: Path, outcome: dict[str, Any] | None, state: str, hint: str
) -> None:
    ended_run(tmp_path / "a-1", outcome)
    report = collect(RunDir(tmp_path / "a-1"))
    assert report.state == state
    assert hint in report.hint
    assert report.exit_code == (outcome["exit_code"] if outcome else None)
    code, said = stop(RunDir(tmp_path / "a-1"))
    assert code == ExitCode.OK
    assert "is not running" in said
    assert state in said


def test_a_silent_run_on_another_host_is_unknown(tmp_path: Path) -> None:
    run_dir = bare_run(tmp_path / "a-1")
    attempt = new_attempt(run_dir)
    far = ProcessId("elsewhere", 1, 1.0)
    write_launch(attempt, far, world_size=4, device="cuda", command=())
    assert collect(run_dir).state == "running"
    report = collect(run_dir, lambda: time.time() + 120)
    assert (report.state, report.host) == ("unknown", "elsewhere")
    with pytest.raises(UserError, match="has not ended within 1s") as caught:
        stop(run_dir, timeout_s=1.0)
    assert "elsewhere" in str(caught.value)
    # It falls silent while it is waited for.
    began_at = time.time() - FRESH_S + 1.0
    write_record(attempt.launch, {**far.record(), "world_size": 4, "begun_at": began_at})
    with pytest.raises(UserError, match="has not been heard of for") as caught:
        stop(run_dir)
    assert "if elsewhere is up" in caught.value.fix


def test_stop_lets_the_run_save(tmp_path: Path) -> None:
    run_dir = bare_run(tmp_path / "a-1")
    with running_agent(run_dir) as agent:
        code, said = stop(run_dir)
        assert code == ExitCode.OK
        assert not agent.process.is_alive()
        assert "has ended: stopped at step 7 (SIGTERM)" in said
        assert "--now" in said


def test_stop_now_kills(tmp_path: Path) -> None:
    run_dir = bare_run(tmp_path / "a-1")
    with running_agent(run_dir) as agent:
        code, said = stop(run_dir, now=True)
        assert code == ExitCode.OK
        assert not agent.process.is_alive()
        assert "without saving" in said
    assert collect(run_dir).state == "killed"


def test_stop_has_a_deadline_and_says_what_it_waits_for(tmp_path: Path) -> None:
    run_dir = bare_run(tmp_path / "a-1")
    with running_agent(run_dir) as agent:
        agent.order("deaf")
        agent.order("status", phase="saving", detail="step 7")
        said: list[str] = []
        with pytest.raises(UserError, match="has not ended within"):
            stop_run(run_dir, now=False, timeout_s=0.2, print_line=said.append)
        assert said[-1] == "  waiting: saving, step 7"
        assert agent.process.is_alive()


def test_a_reused_pid_is_never_signalled(tmp_path: Path) -> None:
    with running_agent(bare_run(tmp_path / "innocent-1")) as innocent:
        run_dir = bare_run(tmp_path / "a-1")
        attempt = new_attempt(run_dir)
        process = innocent.process
        reused = ProcessId(process.host, process.pid, process.started - 3600)
        write_launch(attempt, reused, world_size=1, device="cpu", command=())
        assert collect(run_dir).state == "killed"
        for now in (False, True):
            assert "is not running" in stop(run_dir, now=now)[1]
        assert not kill_now(reused)
        assert not send_signal(ProcessId("elsewhere", process.pid, process.started), 15)  # type: ignore[arg-type]
        innocent.order("log", rank=0, text="still here\n")
        assert process.is_alive()


def rank_error(attempt: Attempt, rank: int, at: float, **fields: Any) -> None:
    record = {"rank": rank, "host": "h", "at": at, "exit_code": 3, "is_communication": False}
    write_record(attempt.rank_error(rank), {**record, **fields})


def test_the_rank_that_failed_by_itself_is_shown_first(tmp_path: Path) -> None:
    outcome = {"state": "failed", "exit_code": 5, "error": {"rank": 0, "what": "time-out"}}
    attempt = ended_run(tmp_path / "a-1", outcome, world_size=3)
    rank_error(attempt, 0, 10.0, kind="DistBackendError", what="time-out", is_communication=True)
    rank_error(attempt, 2, 12.0, kind="ValueError", what="later")
    fields = {"where": "batch 5", "fix": "lower the rate"}
    rank_error(attempt, 1, 11.0, kind="TrainingError", what="loss is nan at step 7", **fields)
    attempt.rank_log(1).write_text("x")
    lines = failure_lines(attempt)
    assert lines == [
        "error: loss is nan at step 7",
        "  where: rank 1 on h, batch 5",
        "  fix: lower the rate",
        f"  log: {attempt.rank_log(1)}",
        "  2 other ranks stopped because of it",
    ]


def test_a_rank_that_died_without_a_word_comes_before_those_that_missed_it(tmp_path: Path) -> None:
    decision = {"rank": 1, "host": "h", "what": "rank 1 was killed by SIGKILL", "fix": "dmesg"}
    outcome = {"state": "failed", "exit_code": 3, "error": decision}
    attempt = ended_run(tmp_path / "a-1", outcome, world_size=2)
    rank_error(attempt, 0, 10.0, kind="RuntimeError", what="lost", is_communication=True)
    assert root_cause(attempt) == decision
    assert failure_lines(attempt)[0] == "error: rank 1 was killed by SIGKILL"
    assert failure_lines(attempt)[-1] == "  1 other rank stopped because of it"


def test_only_an_unforeseen_error_shows_its_traceback(tmp_path: Path) -> None:
    attempt = ended_run(tmp_path / "a-1", {"state": "failed", "exit_code": 3, "error": None})
    trace = "".join(f"line {number}\n" for number in range(40))
    rank_error(attempt, 0, 1.0, kind="ValueError", what="ValueError: x", traceback=trace)
    text = "\n".join(failure_lines(attempt))
    assert "line 39" in text
    assert "line 10" not in text
    rank_error(attempt, 0, 1.0, kind="X", what="no memory", traceback=trace, fix="a smaller batch")
    assert "line 39" not in "\n".join(failure_lines(attempt))


def test_a_killed_run_shows_the_end_of_the_agents_log(tmp_path: Path) -> None:
    attempt = ended_run(tmp_path / "a-1", None)
    lines = failure_lines(attempt)
    assert lines[0].endswith("have left no word: killed, perhaps")
    assert lines[-1].strip() == "agent is ready"


def test_a_run_that_found_no_room_for_its_end_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = ended_run(tmp_path / "a-1", None)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=4096))
    text = "\n".join(failure_lines(attempt))
    assert f"no word: the disk of {attempt.path} is full, 4.0 KiB are left\n  fix: free" in text
    # Nor had a rank room for its error: an agent's memory is all there is.
    culprit = {"rank": 0, "what": "rank 0 ended with exit code 5"}
    write_record(attempt.outcome, {"state": "failed", "exit_code": 5, "error": culprit})
    lines = failure_lines(attempt)
    assert lines[0] == (
        f"error: the disk of {attempt.path} is full, 4.0 KiB are left; rank 0 ended with exit code "
        "5"
    )
    assert "  fix: free some of it first" in lines


def test_a_record_that_another_host_replaces_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On NFS what was opened is gone then: ESTALE."""
    path = tmp_path / "status.json"
    write_record(path, {"step": 1})
    read, faults = Path.read_text, [OSError(errno.ESTALE, "Stale file handle")]

    def stale(self: Path, encoding: str | None = None) -> str:
        if faults:
            raise faults.pop()
        return read(self, encoding=encoding)

    monkeypatch.setattr(Path, "read_text", stale)
    assert read_record(path) == {"step": 1} and not faults
