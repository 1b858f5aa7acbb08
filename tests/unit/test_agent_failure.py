"""Which error caused the others, and what follows from a death."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from isles.agent.failure import decide, failure_report, find_root_cause, oom_kills
from isles.errors import ExitCode
from isles.run.paths import Attempt, RunDir
from isles.run.records import read_record, write_record
from tests.agent_table import error_of
from tests.runs import bare_run


def test_the_earliest_error_of_its_own_is_the_cause() -> None:
    lost = error_of(0, 1.0, is_communication=True)
    first, second = error_of(2, 2.0), error_of(1, 3.0)
    found = find_root_cause([lost, second, first], {0: 5, 1: 1, 2: 1}, range(3))
    assert found is first


def test_who_died_without_a_word_is_the_cause_of_lost_connections() -> None:
    lost = [error_of(rank, 1.0, is_communication=True) for rank in (0, 2)]
    found = find_root_cause(lost, {0: 5, 1: -9, 2: 5}, range(3))
    assert found is not None
    assert found["rank"] == 1 and "SIGKILL" in found["what"]


def test_ranks_that_have_lost_one_of_another_node_are_no_cause() -> None:
    lost = [error_of(rank, 1.0, is_communication=True) for rank in (0, 1)]
    assert find_root_cause(lost, {0: 5, 1: 5}, range(2), are_all=False) is None
    assert find_root_cause(lost, {0: 5, 1: 5}, range(2)) is lost[0]


@pytest.fixture
def run(tmp_path: Path) -> tuple[RunDir, Attempt]:
    run_dir = bare_run(tmp_path / "r-1")
    attempt = run_dir.attempt(1)
    attempt.path.mkdir(parents=True)
    return run_dir, attempt


def test_progress_earns_a_restart_until_they_are_used_up(run: tuple[RunDir, Attempt]) -> None:
    decisions = []
    for restart, step in enumerate((10, 20, 30)):
        run[1].last_step.write_text(f"{restart} {step}")
        decisions.append(decide(*run, restart, error_of(1, 1.0), max_restarts=2).decision)
    assert decisions == ["restart", "restart", "fail"]
    outcome = read_record(run[1].outcome) or {}
    assert (outcome["state"], outcome["exit_code"], outcome["step"]) == ("failed", 3, 30)
    assert outcome["error"]["note"] == "all 2 restarts of this start are used up"


def test_a_second_death_at_the_same_step_ends_the_run(run: tuple[RunDir, Attempt]) -> None:
    root_cause = error_of(1, 1.0, is_script=True)  # a script that reports its steps is no exception
    run[1].last_step.write_text("0 10")
    assert decide(*run, 0, root_cause, max_restarts=9).decision == "restart"
    run[1].last_step.write_text("1 10")
    found = decide(*run, 1, root_cause, max_restarts=9)
    assert found.decision == "fail"
    assert "without progress: at step 10 before, at step 10 now" in (found.root_cause or {})["note"]


def test_a_script_that_reports_no_step_is_started_again(run: tuple[RunDir, Attempt]) -> None:
    for restart in range(3):
        found = decide(*run, restart, error_of(1, 1.0, is_script=True), max_restarts=3)
        assert found.decision == "restart"


def test_what_would_come_again_ends_the_run_at_once(run: tuple[RunDir, Attempt]) -> None:
    run[1].last_step.write_text("0 10")
    found = decide(*run, 0, error_of(1, 1.0, will_recur=True), max_restarts=9)
    assert found.decision == "fail"


def test_a_script_elsewhere_that_has_reported_steps_is_started_again(
    run: tuple[RunDir, Attempt],
) -> None:
    # As a host without the first host's records sees it.
    root_cause = error_of(1, 1.0, kind="ScriptFailed", is_script=True, will_recur=True)
    run[1].last_step.write_text("0 7")
    assert decide(*run, 0, root_cause, max_restarts=3).decision == "restart"
    assert read_record(run[1].outcome) is None
    run[1].last_step.unlink()
    assert decide(*run, 1, root_cause, max_restarts=3).decision == "fail"
    assert (read_record(run[1].outcome) or {})["exit_code"] == ExitCode.TRAINING


def test_a_death_after_a_stop_was_asked_for_is_that_stop(run: tuple[RunDir, Attempt]) -> None:
    run[1].last_step.write_text("0 10")
    write_record(run[1].rank_record(0), {"rank": 0})
    found = decide(*run, 0, error_of(1, 1.0), max_restarts=9, stop=ExitCode.INTERRUPTED)
    assert found.decision == "stop"
    outcome = read_record(run[1].outcome) or {}
    assert (outcome["state"], outcome["exit_code"]) == ("stopped", int(ExitCode.INTERRUPTED))
    assert "before it could save" in outcome["reason"]


def test_a_rank_that_the_kernel_killed_for_its_memory_is_named_so(
    run: tuple[RunDir, Attempt],
) -> None:
    def killed(*, has_no_memory: bool) -> dict[str, Any]:
        report = failure_report(run[1], 0, [0, 1], 2, {1: -9}, has_no_memory=has_no_memory)
        found: dict[str, Any] = report["root_cause"]
        return found

    assert killed(has_no_memory=False)["exit_code"] == ExitCode.TRAINING
    found = killed(has_no_memory=True)
    assert found["exit_code"] == ExitCode.OUT_OF_MEMORY and found["will_recur"]
    assert "rank 1 was killed by SIGKILL" in found["what"]
    assert "memory_per_node" in found["fix"]


def test_kills_for_memory_are_counted_in_both_kinds_of_cgroup(tmp_path: Path) -> None:
    own = tmp_path / "own"
    for line, name, text in (
        ("0::/job_7/step_0", "job_7/step_0/memory.events", "low 0\noom 3\noom_kill 2\n"),
        ("9:cpu,memory:/job_7", "memory/job_7/memory.oom_control", "under_oom 0\noom_kill 2\n"),
    ):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
        own.write_text(f"7:pids:/x\n{line}\n")
        assert oom_kills(tmp_path, own) == 2
    assert oom_kills(tmp_path / "nowhere", own) == 0
