"""Which error caused the others, and what follows from a death."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from isles.agent.failure import decide, failure_report, find_root_cause, oom_kills
from isles.errors import ExitCode
from isles.run import limits
from isles.run.paths import Attempt, RunDir
from isles.run.records import read_record, write_record
from isles.run.restarts import Restart
from tests.agent_table import error_of
from tests.runs import bare_run


def test_the_earliest_error_that_is_no_loss_of_another_rank_is_the_cause() -> None:
    lost = [error_of(rank, 1.0, is_communication=True) for rank in (0, 1)]
    first, second = error_of(2, 2.0), error_of(1, 3.0)
    assert find_root_cause([lost[0], second, first], {0: 5, 1: 1, 2: 1}, range(3)) is first
    assert find_root_cause(lost, {0: 5, 1: 5}, range(2)) is lost[0]
    assert find_root_cause(lost, {0: 5, 1: 5}, range(2), are_all=False) is None, "it is elsewhere"


Run = tuple[RunDir, Attempt]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run_dir = bare_run(tmp_path / "r-1")
    attempt = run_dir.attempt(1)
    attempt.path.mkdir(parents=True)
    return run_dir, attempt


def loss(
    run: Run,
    restart: int = 0,
    step: int | None = None,
    max_restarts: int = 9,
    stop: ExitCode | None = None,
    **error: Any,
) -> Restart:
    """What follows from the loss of rank 1, at this step."""
    if step is not None:
        run[1].last_step.write_text(f"{restart} {step}")
    cause = error_of(1, 1.0, **error)
    return decide(*run, restart, cause, max_restarts=max_restarts, stop=stop)


def test_progress_earns_a_restart_until_they_are_used_up(run: Run) -> None:
    steps = enumerate((10, 20, 30))
    decisions = [loss(run, number, step, max_restarts=2).decision for number, step in steps]
    assert decisions == ["restart", "restart", "fail"]
    outcome = read_record(run[1].outcome) or {}
    assert (outcome["state"], outcome["exit_code"], outcome["step"]) == ("failed", 3, 30)
    assert outcome["error"]["note"] == "all 2 restarts of this attempt are used up"


def test_a_second_death_at_the_same_step_ends_the_run(run: Run) -> None:
    for restart in range(3):
        assert loss(run, restart, is_script=True).decision == "restart", "it reports no step"
    # A script that reports its steps is no exception.
    assert loss(run, 3, 10, is_script=True).decision == "restart"
    found = loss(run, 4, 10, is_script=True)
    assert found.decision == "fail"
    assert (
        "without progress (at step 10 before, at step 10 now)" in (found.root_cause or {})["note"]
    )


def test_a_script_elsewhere_that_has_reported_steps_is_started_again(run: Run) -> None:
    # As a host without the first host's records sees it.
    elsewhere = {"kind": "ScriptFailed", "is_script": True, "will_recur": True}
    assert loss(run, 0, 7, **elsewhere).decision == "restart"
    assert read_record(run[1].outcome) is None
    run[1].last_step.unlink()
    assert loss(run, 1, **elsewhere).decision == "fail"
    assert (read_record(run[1].outcome) or {})["exit_code"] == ExitCode.TRAINING


def test_a_death_after_a_stop_was_asked_for_is_that_stop(run: Run) -> None:
    write_record(run[1].rank_record(0), {"rank": 0})
    assert loss(run, 0, 10, stop=ExitCode.INTERRUPTED).decision == "stop"
    outcome = read_record(run[1].outcome) or {}
    assert (outcome["state"], outcome["exit_code"]) == ("stopped", int(ExitCode.INTERRUPTED))
    assert "before it could save" in outcome["reason"]


def test_a_rank_that_the_kernel_killed_for_its_memory_is_named_so(run: Run) -> None:
    def killed(*, has_no_memory: bool) -> Any:
        found = failure_report(run[1], 0, [0, 1], 2, {1: -9}, has_no_memory=has_no_memory)
        return found["root_cause"]

    assert killed(has_no_memory=False)["exit_code"] == ExitCode.TRAINING
    found = killed(has_no_memory=True)
    assert found["exit_code"] == ExitCode.OUT_OF_MEMORY and found["will_recur"]
    assert "rank 1 was killed by SIGKILL" in found["what"]
    assert "memory_per_node" in found["fix"]


def test_kills_for_memory_are_counted_in_both_kinds_of_cgroup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own"
    monkeypatch.setattr(limits, "OWN", own)
    monkeypatch.setattr(limits, "CGROUPS", tmp_path)
    for line, name, text in (
        ("0::/job_7/step_0", "job_7/step_0/memory.events", "low 0\noom 3\noom_kill 2\n"),
        ("9:cpu,memory:/job_7", "memory/job_7/memory.oom_control", "under_oom 0\noom_kill 2\n"),
    ):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
        own.write_text(f"7:pids:/x\n{line}\n")
        assert oom_kills() == 2
    monkeypatch.setattr(limits, "CGROUPS", tmp_path / "nowhere")
    assert oom_kills() == 0
