"""Those who wait for tokens: they learn what became of the one who prepares them."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from isles.data.tokens.prepare import prepare, wait_for_prepared
from isles.data.tokens.progress import Reporter, Watch
from isles.data.tokens.store import TokenStore
from isles.errors import CommunicationError, DataError
from isles.run.records import read_record, write_record
from tests.unit.test_data_prepare import (
    DEADLINE_S,
    Told,
    leftovers,
    letters,
    preparing,
    quiet,
)


class Waiting:
    """A thread that waits for `Told`, and what came of it."""

    def __init__(self, cache: Path, no_progress_s: float = DEADLINE_S) -> None:
        self.outcome: Any = None
        self._thread = threading.Thread(target=self._wait, args=(cache, no_progress_s))
        self._thread.start()

    def _wait(self, cache: Path, no_progress_s: float) -> None:
        try:
            self.outcome = wait_for_prepared(Told(), letters(), cache, no_progress_s=no_progress_s)
        except Exception as error:
            self.outcome = error

    def result(self) -> Any:
        self._thread.join(DEADLINE_S)
        return self.outcome


def test_waiting_ends_with_the_folder(tmp_path: Path):
    waiting = Waiting(tmp_path)
    with preparing(tmp_path) as process:
        process.communicate(timeout=DEADLINE_S)
        assert TokenStore.open(waiting.result()).name == "told"


def test_waiting_ends_with_the_other_ones_error(tmp_path: Path):
    waiting = Waiting(tmp_path)
    with preparing(tmp_path) as process:
        _, errors = process.communicate("fail\n", timeout=DEADLINE_S)
        assert "told to fail" in errors
        error = waiting.result()
        assert isinstance(error, DataError) and error.what == "told to fail"
        assert f"process {process.pid}" in error.where and "told:1" in error.where
    assert leftovers(tmp_path) == []
    # The same record is old for whoever comes later: it gives the next one time to begin.
    later = Waiting(tmp_path)
    with preparing(tmp_path) as process:
        process.communicate(timeout=DEADLINE_S)
        assert TokenStore.open(later.result()).name == "told"


def test_waiting_ends_when_the_other_dies(tmp_path: Path):
    waiting = Waiting(tmp_path)
    with preparing(tmp_path) as process:
        process.kill()
        error = waiting.result()
        assert isinstance(error, CommunicationError)
        assert f"process {process.pid} on" in str(error) and "died" in str(error)


def test_waiting_ends_without_a_sign_of_life(tmp_path: Path):
    with preparing(tmp_path) as process:
        process.send_signal(signal.SIGSTOP)
        error = Waiting(tmp_path, no_progress_s=0.3).result()
        assert isinstance(error, CommunicationError)
        assert f"process {process.pid} on" in str(error) and "without a sign" in str(error)
        # Who would prepare the same waits for it as well, and no longer.
        with pytest.raises(CommunicationError, match=f"process {process.pid}"):
            prepare(Told(), letters(), tmp_path, progress=quiet, no_progress_s=0.3)
        process.send_signal(signal.SIGCONT)


def test_patience_counts_from_the_last_change(tmp_path: Path):
    now = 0.0
    record = {"host": "elsewhere", "pid": 7, "started": 1.0, "state": "running", "message": "m"}
    watch = Watch(tmp_path / "record.json", 10.0, clock=lambda: now)
    for beat in range(5):
        write_record(tmp_path / "record.json", {**record, "at": beat})
        assert watch.find_fault(failure_counts=True) is None
        now += 9.0
    assert watch.find_fault(failure_counts=True) is None
    now += 2.0
    fault = watch.find_fault(failure_counts=True)
    assert isinstance(fault, CommunicationError)
    assert "process 7 on elsewhere (m) does not" in fault.what and "11 s" in fault.what


def test_progress_is_told_every_two_seconds(tmp_path: Path):
    now = 0.0
    told: list[str] = []
    record = tmp_path / "record.json"
    reporter = Reporter(record, "python-stdlib", told.append, clock=lambda: now)
    for step in range(100):
        now = step / 10
        reporter.tick(step, step * 100_000)
    assert told == [f"python-stdlib: {n} documents, {n / 10}M tokens" for n in (20, 40, 60, 80)]
    assert "80 documents" in (read_record(record) or {})["message"]
    reporter.done(312, 4_100_000)
    assert told[-1] == "python-stdlib: 312 documents, 4.1M tokens" and not record.exists()
