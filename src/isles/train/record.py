"""The outputs of rank 0 while it trains: status.json, and rows for the trackers."""

from __future__ import annotations

import functools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, assert_never

import torch

import isles
from isles.checkpoint.upload import check_push
from isles.config.resolve import Resolved, leaves
from isles.config.sections.output import (
    JsonlConfig,
    MLflowConfig,
    TensorBoardConfig,
    WandbConfig,
    tracker_sections,
)
from isles.dist.world import World
from isles.errors import UserError
from isles.run.checkpoints import list_checkpoints
from isles.run.live import SampledMeans
from isles.run.packages import require_packages
from isles.run.paths import RunDir
from isles.run.records import write_record
from isles.run.restarts import LastStep
from isles.track.base import Background, RemoteTracker, RunFacts, Tracker, Trackers
from isles.track.local import JsonlTracker, TensorBoardTracker
from isles.track.mlflow import MLflowTracker, load_mlflow
from isles.track.wandb import WandbTracker, resolve_mode

log = logging.getLogger(__name__)

_STATUS_EVERY_S = 0.5
_HEARTBEAT_S = 5.0
"""Longest time in seconds between two writes of status.json, the heartbeat of rank 0."""
_MOST_NOTES, _LONGEST_NOTE = 100, 2000
"""Number of newest notes in status.json, and characters of each. The log has all notes."""


class Recorder:
    """Writes status.json and sends rows to the trackers. Does nothing on ranks other than 0.

    Args:
        is_main: whether this is rank 0.
        world_size: ranks in the run.
        last_step: called with the number of each step, if given.
        live: live.json; if given, its means are added to the rows of steps.
        heartbeat_s: longest time between two writes of status.json.
    """

    def __init__(
        self,
        run_dir: RunDir,
        *,
        is_main: bool,
        world_size: int,
        last_step: LastStep | None = None,
        live: Path | None = None,
        heartbeat_s: float = _HEARTBEAT_S,
    ) -> None:
        self._heartbeat_s = heartbeat_s
        self._run_dir = run_dir
        self._last_step = last_step
        self._is_main = is_main
        self._sampled = SampledMeans(live) if is_main and live is not None else None
        self._trackers = Trackers([])
        self._written_at = 0.0
        self._progress_at = time.time()
        self._notes = deque[str](maxlen=_MOST_NOTES)
        self._num_notes = 0
        self._writing = threading.Lock()
        self._is_closed = threading.Event()
        self._summary: dict[str, Any] | None = None
        self.status: dict[str, Any] = {"phase": "starting", "detail": "", "world_size": world_size}
        if is_main:
            threading.Thread(target=self._write_regularly, name="status", daemon=True).start()

    def use(self, trackers: Trackers) -> None:
        """Set the trackers that get rows from now on."""
        self._trackers = trackers
        if self._sampled is not None:
            self._sampled.since_last()  # drop samples from before the first step

    def phase(self, phase: str, detail: str = "") -> None:
        """Set the run's current phase: starting, preparing data, training, saving …"""
        if not self._is_main:
            return
        if (phase, detail) != (self.status["phase"], self.status["detail"]):
            log.info("phase=%s %s", phase.replace(" ", "-"), detail)
        self.status |= {"phase": phase, "detail": detail}
        self._progress_at = time.time()
        self._write()

    def update(self, *, progresses: bool = True, **fields: Any) -> None:
        """Other fields of status.json.

        Args:
            progresses: whether the run makes progress; False: it waits.
        """
        self.status |= fields
        if progresses:
            self._progress_at = time.time()
        if self._is_main and time.time() - self._written_at >= _STATUS_EVERY_S:
            self._write()

    def note(self, text: str) -> None:
        """Log a line for the user and show it once. Any thread may call this."""
        log.warning("%s", text)
        self._notes.append(text[:_LONGEST_NOTE])
        self._num_notes += 1
        if self._is_main and threading.current_thread() is threading.main_thread():
            self._write()  # a note from another thread goes into the next status

    def finished(self, summary: dict[str, Any]) -> None:
        """Send the run's final metrics to the trackers."""
        self._summary = summary

    def step_done(self, step: int) -> None:
        """Record the ranks' progress, in case a rank dies."""
        self._progress_at = time.time()
        if self._last_step is not None:
            self._last_step.note(step)

    def row(self, row: dict[str, Any]) -> None:
        """Send a recorded step or evaluation to every tracker."""
        if not self._is_main:
            return
        if self._sampled is not None and row["kind"] == "train":
            row = {**row, **self._sampled.since_last()}
        self._trackers.log({name: _finite(value) for name, value in row.items()})

    def close(self) -> None:
        """Close the trackers, in half a minute at most, and write the last status."""
        if self._is_main:
            self._write()
            self._trackers.close(self._summary)
            self._is_closed.set()
            self._write()
        if self._last_step is not None:
            self._last_step.close()

    def _write_regularly(self) -> None:
        # The heartbeat, also while the main thread is busy with one long task.
        while not self._is_closed.wait(self._heartbeat_s):
            if time.time() - self._written_at >= self._heartbeat_s:
                self._write(is_heartbeat=True)

    def _write(self, *, is_heartbeat: bool = False) -> None:
        with self._writing:
            if is_heartbeat and self._is_closed.is_set():
                return  # keep the last status
            self._written_at = time.time()
            record = {name: _finite(value) for name, value in list(self.status.items())}
            if self._notes:
                record |= {"notes": list(self._notes), "num_notes": self._num_notes}
            record |= {"progress_at": self._progress_at, "updated_at": self._written_at}
            try:
                write_record(self._run_dir.status, record, durable=False)
            except OSError as error:  # a full disk must not end training before a save fails
                log.warning("status.json could not be written: %s", error)


def _finite(value: Any) -> Any:
    # JSON does not support NaN and infinity.
    return None if isinstance(value, float) and not math.isfinite(value) else value


def check_outside(resolved: Resolved, run_dir: RunDir, recorder: Recorder, world: World) -> None:
    """Check the trackers and the upload before hours are spent. All ranks must call this.

    Raises:
        UserError: a tracker lacks its package, server address or key. Or Hugging Face would refuse
        the upload at the end, and nothing is saved yet. Every rank raises it.
    """

    def check() -> None:
        config = resolved.config
        require_packages(config)
        for section in tracker_sections(config.track):
            if isinstance(section, WandbConfig):
                try:
                    resolve_mode(section, run_dir.path)
                except UserError:
                    raise
                except Exception:  # an installed but broken package; `make_trackers` reports it
                    log.debug("wandb failed", exc_info=True)
        repo = config.checkpoint.push_to_hub
        if repo is None:
            return
        recorder.phase("starting", f"asking Hugging Face about {repo}")
        try:
            check_push(repo)
        except UserError as error:
            if not list_checkpoints(run_dir):
                raise
            # Hours are spent already: a hub that is unreachable for a moment must not end a run
            # that restarts.
            recorder.note(f"{error.where}: {error.what}; the upload at the end may fail")

    world.main_first(check, group=world.work)


def make_trackers(
    resolved: Resolved, run_dir: RunDir, recorder: Recorder, world: World, *, step: int
) -> Trackers:
    """Open the trackers on rank 0; other ranks get an empty list."""
    if not world.is_main:
        return Trackers([])
    local: list[Tracker] = [JsonlTracker(run_dir.metrics, resumed_step=step)]
    remote: list[Background] = []
    for section in tracker_sections(resolved.config.track):
        open_tracker: Callable[[], RemoteTracker]
        facts = _facts(section.kind, resolved, run_dir, world)
        try:
            match section:
                case JsonlConfig():
                    continue  # every run writes it, for status and loss.png
                case TensorBoardConfig():
                    local.append(TensorBoardTracker(run_dir.tensorboard, resumed_step=step))
                    continue
                case WandbConfig():
                    mode, note = resolve_mode(section, run_dir.path)
                    if note:
                        recorder.note(note)
                    open_tracker = functools.partial(WandbTracker, section, facts, mode=mode)
                case MLflowConfig():
                    load_mlflow()
                    open_tracker = functools.partial(MLflowTracker, section, facts)
                case _:
                    assert_never(section)
        except Exception as error:  # a failed tracker must not end a run; the traceback shows why
            log.info("%s failed", section.kind, exc_info=True)
            recorder.note(f"{section.kind} failed; training continues without it: {error}")
        else:
            remote.append(Background(section.kind, open_tracker, print_line=recorder.note))
    return Trackers(local, remote, recorder.note)


def _facts(kind: str, resolved: Resolved, run_dir: RunDir, world: World) -> RunFacts:
    import transformers

    about = {
        "version": isles.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "world_size": world.world_size,
        "device": world.device_name,
        "strategy": resolved.config.strategy.kind,
        "host": world.host,
        "run_dir": str(run_dir.path),
    }
    values = dict(leaves(resolved.config))
    return RunFacts(run_dir.name, run_dir.path, run_dir.tracker_record(kind), values, about)
