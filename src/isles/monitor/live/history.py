"""Values from metrics.jsonl: the curve of the loss, the newest step, goodput."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from isles.monitor.live.model import Point
from isles.run.owner import open_shown
from isles.run.paths import Attempt, RunDir
from isles.run.records import MAX_LINE_BYTES, read_record
from isles.run.state import number_of

POINTS = 300
"""Largest number of points of a curve."""

_BLOCK_BYTES = 4 * 2**20
_MOST_BYTES = 512 * 2**20
"""Limit of one read. If the file has grown by more, only its end is read."""
_EVAL = b'"kind": "eval"'
_TRAIN = b'"kind": "train"'
_EVALS = POINTS // 3
_MOST_ATTEMPTS = 1000
"""The newest attempts count for goodput."""


class MetricsReader:
    """Reads new rows of metrics.jsonl. A resumed run replaces the file.

    Args:
        parsed_bytes: largest number of new bytes to parse in one read. From more, every n-th row.
    """

    def __init__(self, path: Path, parsed_bytes: int = 16 * 2**20) -> None:
        self._path, self._parsed_bytes = path, parsed_bytes
        self._file: tuple[int, int] | None = None
        self._clear()

    def _clear(self) -> None:
        self._offset, self._rest, self._lines, self._skipped = 0, b"", 0, b""
        self._train, self._eval = _Thinned(POINTS - _EVALS), _Thinned(_EVALS)
        self.newest: dict[str, Any] = {}
        """The newest row of a step, or empty."""
        self.step_s = 0.0
        """Seconds of all steps that are in the model."""

    def age_s(self, now_s: float) -> float | None:
        """Age of the newest row in seconds, or None without a row."""
        try:
            return max(0.0, now_s - self._path.stat().st_mtime) if self.newest else None
        except OSError:
            return None

    def read(self) -> None:
        """Read the new rows."""
        try:
            stream = open_shown(self._path)
        except OSError:
            return
        with stream:
            info = os.fstat(stream.fileno())
            if self._file != (info.st_dev, info.st_ino) or info.st_size < self._offset:
                self._clear()
                self._file = info.st_dev, info.st_ino
            if info.st_size - self._offset > _MOST_BYTES:
                self._offset, self._rest = info.st_size - _MOST_BYTES, b""
            every = max(1, (info.st_size - self._offset) // self._parsed_bytes)
            while self._offset < info.st_size:  # leave newer rows to the next look
                block = os.pread(stream.fileno(), _BLOCK_BYTES, self._offset)
                if not block:
                    break
                self._offset += len(block)
                *lines, rest = (self._rest + block).split(b"\n")
                self._rest = rest[:MAX_LINE_BYTES]
                for line in lines:
                    self._take(line, every)
            if self._skipped:  # the newest row counts, whichever it is
                self._take(self._skipped, 1)

    def _take(self, line: bytes, every: int) -> None:
        is_eval = _EVAL in line[:40]
        if not is_eval:
            if _TRAIN not in line[:40]:
                return
            self._lines += 1
            if self._lines % every:
                self._skipped = line
                return
        self._skipped = b""
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            return  # torn by a full disk or a kill
        given = number_of(row, "step") if isinstance(row, dict) else None
        if given is None:
            return
        step = int(given)
        if is_eval:
            self._eval.add(Point(step=step, loss=None, eval_loss=number_of(row, "loss")))
            return
        took_s, before = number_of(row, "step_time_s"), self.newest.get("step", 0)
        self.step_s += (took_s or 0.0) * max(0, step - before)
        self.newest = {**row, "step": step}
        self._train.add(
            Point(
                step=step,
                loss=number_of(row, "loss"),
                tokens=int(number_of(row, "tokens") or 0),
                elapsed_s=number_of(row, "elapsed_s") or 0.0,
            )
        )

    def curve(self) -> tuple[Point, ...]:
        """At most `POINTS` points by step. The point of a kept step has its evaluation."""
        found = {point.step: point for point in self._train.points()}
        times = sorted(found)
        for point in self._eval.points():
            near = found.get(point.step)
            if near is None:  # where it stands in time: as the step before it
                before = [found[step] for step in times if step < point.step]
                beside = before[-1] if before else Point(step=0, loss=None)
                changes = {"tokens": beside.tokens, "elapsed_s": beside.elapsed_s}
                found[point.step] = point.model_copy(update=changes)
            else:
                found[point.step] = near.model_copy(update={"eval_loss": point.eval_loss})
        return tuple(found[step] for step in sorted(found))


class _Thinned:
    """Thins a curve evenly to a largest number of points. The newest point stays."""

    def __init__(self, most: int) -> None:
        self._most, self._every, self._count = most, 1, 0
        self._kept: list[Point] = []
        self._last: Point | None = None

    def add(self, point: Point) -> None:
        if self._count % self._every == 0:
            self._kept.append(point)
            if len(self._kept) >= self._most:
                self._kept = self._kept[::2]
                self._every *= 2
        self._last = point
        self._count += 1

    def points(self) -> list[Point]:
        last = self._last
        more = [last] if last is not None and (not self._kept or self._kept[-1] != last) else []
        return [*self._kept, *more]


def goodput(step_s: float, spans: Sequence[tuple[float, float]]) -> float | None:
    """Share of the time that went into steps which are in the model.

    Seconds of the steps in metrics.jsonl, divided by the run time of all attempts.
    metrics.jsonl has each step once: a step that a restart lost and repeated counts once. So
    loading, saving, evaluating, waiting for averages or in a queue, and lost steps lower goodput.
    The time between a stop and the next `isles train` does not count.
    """
    ran_s = sum(end - begin for begin, end in spans)
    return min(1.0, step_s / ran_s) if ran_s > 0 and step_s > 0 else None


def spans_of(run_dir: RunDir, now_s: float, *, is_alive: bool) -> list[tuple[float, float]]:
    """When each attempt ran, with its time in a queue, also in a queue again; `is_alive`: whether
    the last one still does."""
    attempts = run_dir.attempts()[-_MOST_ATTEMPTS:]
    found: list[tuple[float, float]] = []
    for attempt in attempts:
        begun_at = number_of(read_record(attempt.launch), "begun_at")
        if begun_at is None:
            continue
        if attempt is attempts[-1] and is_alive:
            end = now_s
        else:
            ended_at = number_of(read_record(attempt.outcome), "at")
            end = ended_at if ended_at is not None else _last_sign_at(attempt, begun_at)
        found.append((begun_at, max(begun_at, min(end, now_s))))
    return found


def _last_sign_at(attempt: Attempt, begun_at: float) -> float:
    # Of an attempt that was killed.
    times = [begun_at]
    for path in (attempt.last_step, attempt.nodes, attempt.live):
        with suppress(OSError):
            times.append(path.stat().st_mtime)
    return max(times)
