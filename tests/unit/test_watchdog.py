"""Who holds up a step: told from where the ranks stand, and where a rank stands from its stack."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from isles.monitor.status import hang_texts
from isles.run.hang import Position, find_hang
from isles.run.paths import Attempt
from isles.run.records import write_record
from isles.train.hang import Place, StepClock, place_now
from tests.deadline import DEADLINE_S

HOSTS = ["a", "a", "b", "b"]
WAITS = Position(7, "forward and backward", "at x.py:1 f()", "the backward pass")


def test_a_rank_that_is_not_heard_of_comes_first() -> None:
    behind = Position(7, "data loading")
    stall = find_hang({0: WAITS, 1: behind, 3: WAITS}, HOSTS, silent_s=9.6)
    assert stall.root_causes == (2,)
    assert stall.text.startswith("rank 2 on b has not been heard of for 10 s: it is frozen, or")


def test_the_rank_at_the_earliest_place_is_behind() -> None:
    late = Position(7, "data loading", "at my.py:88 read()")
    stall = find_hang({0: WAITS, 1: WAITS, 2: WAITS, 3: late}, HOSTS)
    assert stall.root_causes == (3,)
    assert stall.text == "rank 3 on b is behind: in data loading, at my.py:88 read()"
    # On GPUs the others may be a step ahead, and wait there.
    ahead = Position(8, "agreeing", "at loop.py:1 train()", "self._work.wait()")
    assert find_hang({0: ahead, 1: WAITS, 2: ahead, 3: ahead}, HOSTS).root_causes == (1,)


def test_among_equals_the_one_that_does_not_wait_is_behind() -> None:
    busy = Position(7, "forward and backward", "at my.py:3 spin()")
    stall = find_hang({0: WAITS, 1: WAITS, 2: busy, 3: WAITS}, HOSTS)
    assert stall.root_causes == (2,)
    assert "spin()" in stall.text


def test_nobody_is_blamed_without_a_sign() -> None:
    stall = find_hang(dict.fromkeys(range(4), WAITS), HOSTS)
    assert stall.root_causes == ()
    assert "all ranks wait for one another, in the backward pass" in stall.text
    busy = Position(7, "forward and backward", "at my.py:3 spin()")
    assert find_hang(dict.fromkeys(range(4), busy), HOSTS).root_causes == ()
    assert find_hang({0: busy}, ["a"]).root_causes == (0,)


def test_many_culprits_are_cut_short() -> None:
    stall = find_hang({5: WAITS}, ["h"] * 6, silent_s=5.0)
    assert stall.root_causes == (0, 1, 2, 3, 4)
    assert stall.text.endswith("; and 2 more")


def reads(pipe: int) -> bytes:
    return os.read(pipe, 1)


def reads_ahead(pipe: int) -> bytes:
    with ThreadPoolExecutor(1, "data") as executor:
        return executor.submit(reads, pipe).result()


@pytest.mark.parametrize("work", [reads, reads_ahead])
def test_the_place_of_a_thread_is_where_its_work_stands(work: Callable[[int], bytes]) -> None:
    """Also where it waits for a thread that reads ahead."""
    reader, writer = os.pipe()
    thread = threading.Thread(target=work, args=(reader,), name="rank")
    thread.start()
    try:
        place = until(lambda: _place_in(thread, "reads()"))
        assert re.fullmatch(r"at unit/test_watchdog\.py:\d+ reads\(\)", place.at)
        assert place.waits_in == ""
        assert "return os.read(pipe, 1)" in place.stacks
        assert place.stacks.startswith("thread rank:\n")
    finally:
        os.write(writer, b"x")
        thread.join(DEADLINE_S)
        os.close(reader)
        os.close(writer)


def _place_in(thread: threading.Thread, function: str) -> Place | None:
    place = place_now(thread.ident or 0, is_gpu=False)
    return place if place.at.endswith(function) else None


def until(look: Callable[[], Place | None]) -> Place:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        if (found := look()) is not None:
            return found
    raise AssertionError(f"not within {DEADLINE_S} s")


def test_the_clock_keeps_steps_and_evaluations_apart() -> None:
    clock = StepClock()
    clock.step(1)
    clock.at("optimizer step")
    assert (clock.moment.step, clock.moment.stage) == (1, "optimizer step")
    since = clock.moment.since
    clock.step(2)
    assert clock.steps[0] == clock.moment.since - since
    clock.begin("evaluating")
    assert (clock.moment.phase, clock.moment.step) == ("evaluating", 2)
    clock.end()
    assert len(clock.steps) == 2
    assert clock.longest_evaluation_s > 0
    assert clock.moment.phase == ""
    clock.step(3)
    assert len(clock.steps) == 2  # the time between two steps is not a step


def test_a_stall_says_what_the_user_sees(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path, 1)
    assert hang_texts(attempt) == ()
    attempt.hangs.mkdir()
    for step in range(1, 6):
        record = {"step": step, "text": f"step {step} has taken 61 s: rank 1 on b is behind"}
        record |= {"went_on_after_s": 62.0 if step < 5 else None}
        write_record(attempt.hangs / f"step-{step}.json", record)
        (attempt.hangs / f"step-{step}-rank-1.txt").write_text("stack")
    assert hang_texts(attempt) == (
        "step 3 has taken 61 s: rank 1 on b is behind; it went on after 1m 02s",
        "step 4 has taken 61 s: rank 1 on b is behind; it went on after 1m 02s",
        f"step 5 has taken 61 s: rank 1 on b is behind; stacks of the ranks: {attempt.hangs}",
    )
