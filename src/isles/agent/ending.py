"""How a run has ended, as whoever leads it knows it: on record, or in mind where the disk is full.

A disk that is full, or gone, must not end the process that holds the others together: it says so
once, ends the run in good order, and leaves nothing running.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from isles.errors import ExitCode
from isles.run.outcome import end, end_failed, end_stopped
from isles.run.paths import Attempt, RunDir
from isles.run.records import read_record, write_bytes_atomic
from isles.run.restarts import newest_step, noted_step

_RESERVE_BYTES = 32 * 1024
"""Enough for the records of an end, given back when the disk is full."""

HOPELESS_S = 20.0
"""How long a disk may fail before the run is given up."""


class Ending:
    """The outcome of one start of a run.

    Args:
        attempt: this start of it.
        say: takes a line for the log of whoever leads the run.
    """

    def __init__(self, attempt: Attempt, say: Callable[[str], object]) -> None:
        self._attempt = attempt
        self._say = say
        self._reserve = attempt.path / ".reserve"
        self._kept: dict[str, Any] | None = None
        self._told = ""
        self._failing_since: float | None = None
        with suppress(OSError):  # a disk that is full already
            write_bytes_atomic(self._reserve, bytes(_RESERVE_BYTES), durable=False)

    def close(self) -> None:
        """Nothing more is to be put on record."""
        with suppress(OSError):
            self._reserve.unlink(missing_ok=True)

    def read(self) -> dict[str, Any]:
        """The outcome; that of an end without a word where there is none."""
        with suppress(OSError):
            if (record := read_record(self._attempt.outcome)) is not None:
                return record
        return self._kept or {"state": "failed", "exit_code": int(ExitCode.TRAINING)}

    def word(self) -> dict[str, Any]:
        """The end as the nodes are told it."""
        outcome = self.read()
        error = outcome.get("error") or {}
        words = str(error.get("what") or outcome.get("reason") or "")
        return {"exit_code": int(outcome["exit_code"]), "reason": words}

    def fail(self, culprit: dict[str, Any], reached: int | None) -> None:
        """The run has failed because of this, unless it has ended otherwise before.

        Args:
            culprit: an error record.
            reached: the last step that was done.
        """
        attempt, what = self._attempt, str(culprit["what"])
        if self._kept is None and not self._is_on_record():
            self._say(what)
            write = lambda: end_failed(attempt, culprit, step=reached)  # noqa: E731
            self._put(write, "failed", int(culprit["exit_code"]), what)

    def stop(self, code: ExitCode, why: str, run_dir: RunDir) -> None:
        """The run is stopped while no rank can save."""
        attempt = self._attempt
        self._put(
            lambda: end_stopped(attempt, code, newest_step(run_dir)), "stopped", int(code), why
        )

    def keep(self, state: str, code: ExitCode, reason: str) -> None:
        """How this process ends, where the run has no outcome because it goes on later."""
        outcome = {"state": state, "exit_code": int(code), "step": None, "reason": reason}
        self._kept = {**outcome, "at": time.time(), "error": None}

    def finish(self) -> None:
        """All ranks have ended well; those of a user's own script leave no outcome."""
        attempt, code, word = self._attempt, ExitCode.OK, "finished"
        self._put(
            lambda: end(attempt, "finished", code, word, step=noted_step(attempt)), word, code, word
        )

    def _is_on_record(self) -> bool:
        with suppress(OSError):
            return self._attempt.outcome.exists()
        return False

    def _put(self, write: Callable[[], object], state: str, code: int, what: str) -> None:
        """Put the end on record; where that cannot be, keep it in mind."""
        if self.tries(write) or self.tries(write):  # the second with the reserve given back
            return
        outcome = {
            "state": state,
            "exit_code": int(code),
            "step": None,
            "reason": what,
            "error": None,
        }
        self._kept = {**outcome, "at": time.time()}
        self._say(f"the run has ended with {code}, and this could not be put on record: {what}")

    def tries(self, write: Callable[[], object]) -> bool:
        """Write something that the run can go on without; whether that was possible."""
        try:
            write()
        except OSError as error:
            self._tell(error)
            self.close()
            return False
        return True

    def is_hopeless(self, error: OSError, now_s: float) -> bool:
        """Whether the disk of the run directory has failed for so long that the run must end."""
        self._tell(error)
        self.close()
        self._failing_since = self._failing_since or now_s
        return now_s - self._failing_since > HOPELESS_S

    def is_well(self) -> None:
        """The disk has answered."""
        self._failing_since = None

    def words(self, error: OSError) -> str:
        """What is wrong with the disk, and where."""
        return f"{error.filename or self._attempt.path} cannot be used: {error.strerror}"

    def _tell(self, error: OSError) -> None:
        text = f"the run directory {self._attempt.path} cannot be written: {error.strerror}"
        if text != self._told:
            self._told = text
            self._say(text)
