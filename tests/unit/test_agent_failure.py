"""Which error caused the others, and what follows from a death."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from isles.agent.failure import decide, find_root_cause
from isles.errors import ExitCode
from isles.run.paths import Attempt, RunDir
from isles.run.records import read_record, write_record
from tests.runs import bare_run


def error(rank: int, at: float, *, is_communication: bool = False, **more: Any) -> dict[str, Any]:
    return {
        "rank": rank,
        "at": at,
        "is_communication": is_communication,
        "what": f"fault of {rank}",
        "host": "here",
        "exit_code": int(ExitCode.TRAINING),
        "fix": "mend it",
        **more,
    }


def test_the_earliest_error_of_its_own_is_the_cause() -> None:
    lost = error(0, 1.0, is_communication=True)
    first, second = error(2, 2.0), error(1, 3.0)
    found = find_root_cause([lost, second, first], {0: 5, 1: 1, 2: 1}, range(3))
    assert found is first


def test_who_died_without_a_word_is_the_cause_of_lost_connections() -> None:
    lost = [error(rank, 1.0, is_communication=True) for rank in (0, 2)]
    found = find_root_cause(lost, {0: 5, 1: -9, 2: 5}, range(3))
    assert found is not None
    assert found["rank"] == 1
    assert "SIGKILL" in found["what"]


def test_ranks_that_have_lost_one_of_another_node_are_no_cause() -> None:
    lost = [error(rank, 1.0, is_communication=True) for rank in (0, 1)]
    assert find_root_cause(lost, {0: 5, 1: 5}, range(2), are_all=False) is None
    assert find_root_cause(lost, {0: 5, 1: 5}, range(2)) is lost[0]


@pytest.fixture
def run(tmp_path: Path) -> tuple[RunDir, Attempt]:
    run_dir = bare_run(tmp_path / "r-1")
    attempt = run_dir.attempt(1)
    attempt.path.mkdir(parents=True)
    return run_dir, attempt


def died_at(attempt: Attempt, restart: int, step: int | None) -> None:
    text = f"{restart}" if step is None else f"{restart} {step}"
    attempt.last_step.write_text(text)


def test_progress_earns_a_restart_until_they_are_used_up(run: tuple[RunDir, Attempt]) -> None:
    decisions = []
    for restart, step in enumerate((10, 20, 30)):
        died_at(run[1], restart, step)
        decisions.append(decide(*run, restart, error(1, 1.0), max_restarts=2).decision)
    assert decisions == ["restart", "restart", "fail"]
    outcome = read_record(run[1].outcome) or {}
    assert (outcome["state"], outcome["exit_code"], outcome["step"]) == ("failed", 3, 30)
    assert outcome["error"]["note"] == "all 2 restarts of this start are used up"


def test_a_second_death_at_the_same_step_ends_the_run(run: tuple[RunDir, Attempt]) -> None:
    died_at(run[1], 0, 10)
    assert decide(*run, 0, error(1, 1.0), max_restarts=9).decision == "restart"
    died_at(run[1], 1, 10)
    found = decide(*run, 1, error(1, 1.0), max_restarts=9)
    assert found.decision == "fail"
    assert "without progress: at step 10 before, at step 10 now" in (found.root_cause or {})["note"]


def test_what_would_come_again_ends_the_run_at_once(run: tuple[RunDir, Attempt]) -> None:
    died_at(run[1], 0, 10)
    found = decide(*run, 0, error(1, 1.0, will_recur=True), max_restarts=9)
    assert found.decision == "fail"


def test_a_death_after_a_stop_was_asked_for_is_that_stop(run: tuple[RunDir, Attempt]) -> None:
    died_at(run[1], 0, 10)
    write_record(run[1].rank_record(0), {"rank": 0})
    found = decide(*run, 0, error(1, 1.0), max_restarts=9, stop=ExitCode.INTERRUPTED)
    assert found.decision == "stop"
    outcome = read_record(run[1].outcome) or {}
    assert (outcome["state"], outcome["exit_code"]) == ("stopped", int(ExitCode.INTERRUPTED))
    assert "before it could save" in outcome["reason"]


def test_a_script_elsewhere_that_has_reported_steps_is_started_again(
    run: tuple[RunDir, Attempt],
) -> None:
    died_at(run[1], 0, 7)
    # As a host without the first host's records sees it.
    root_cause = error(1, 1.0, kind="ScriptFailed", is_script=True, will_recur=True)
    found = decide(*run, 0, root_cause, max_restarts=3)
    assert found.decision == "restart" and read_record(run[1].outcome) is None
    run[1].last_step.unlink()
    found = decide(*run, 1, root_cause, max_restarts=3)
    assert found.decision == "fail"
    assert (read_record(run[1].outcome) or {})["exit_code"] == ExitCode.TRAINING
