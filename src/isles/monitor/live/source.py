"""New snapshots of a run every few seconds, wherever it runs; and what one may do with it."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Any

from isles.errors import PreflightError, UserError, cut_more
from isles.facts.units import parse_duration_s
from isles.launch.remote.login import ask_isles
from isles.monitor.clusters import stop_clusters
from isles.monitor.hub import stop_hub
from isles.monitor.live.model import RankRow, Snapshot
from isles.monitor.live.readers import Found, reader_of
from isles.monitor.logs import LogChoice
from isles.monitor.remote import stop_remote
from isles.monitor.stop import stop_run
from isles.monitor.stream import shown_lines
from isles.run.find import run_of, typed_name
from isles.run.live import ask_for_stacks
from isles.run.paths import RunDir
from isles.run.records import MAX_LIST_BYTES, explain_write_errors, read_record
from isles.run.remote import MultiClusterRun, RemoteRun, read_multi_cluster
from isles.run.state import number_of, script_of

log = logging.getLogger(__name__)

_FIRST_S = 20.0
"""Longest wait for the first snapshot of a run on another machine."""

_STACK_S, _LOOK_S = 20.0, 0.1
_STOP_TIMEOUT = "10m"


def snapshot(found: Found, *, is_own: bool = False) -> Snapshot:
    """A run as it is now, wherever it runs.

    Args:
        is_own: of a cluster that has joined others elsewhere only itself.

    Raises:
        UserError: its machine, or its directory, cannot be read.
    """
    reader = reader_of(found, 2.0, is_own=is_own)
    end, shown = time.monotonic() + _FIRST_S, None
    try:
        while not reader.is_ready and time.monotonic() < end:
            time.sleep(_LOOK_S)
        shown = reader.look()
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", where=str(error.filename)) from error
    finally:
        reader.close()
    if shown is None:
        raise PreflightError(
            reader.error or f"no answer within {_FIRST_S:.0f} s",
            where=_typed(found),
            fix="`isles status` shows its last known state",
            id="host.answers",
        )
    return shown


class Watch:
    """Looks at a run every few seconds, in a thread, while the `with` block lasts.

    Args:
        found: what `find_any` or `find_hub` has found.
        output_dir: where runs are, as the user has given it.
        is_own: as of `snapshot`.
    """

    def __init__(
        self, found: Found, output_dir: Path, every_s: float = 2.0, *, is_own: bool = False
    ) -> None:
        self.latest: Snapshot | None = None
        """The newest snapshot; None: none has come yet."""
        self.typed = _typed(found)
        """Argument that names this run on the command line."""
        self.said: list[str] = []
        """Output of `stop`, line by line."""
        self._found, self._every_s = found, every_s
        self._error, self._is_own = "", is_own
        self._news = threading.Condition()
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_closed.set()
        self._thread.join(timeout=10)

    @property
    def error(self) -> str:
        """Why `latest` is old, and since when, or empty."""
        return self._error

    def wait(self, after_at: float, timeout_s: float) -> Snapshot | None:
        """The first snapshot after the time `after_at`, or None after the timeout.

        One thread or many may wait.
        """

        def newer() -> bool:
            return self.latest is not None and self.latest.at != after_at

        with self._news:
            return self.latest if self._news.wait_for(newer, timeout_s) else None

    def _watch(self) -> None:
        reader = reader_of(self._found, self._every_s, is_own=self._is_own)
        try:
            while not self._is_closed.is_set():
                begun, shown = time.monotonic(), None
                try:
                    shown = reader.look()
                    self._error = reader.error
                except (UserError, OSError) as error:
                    self._error = str(error)
                except Exception as error:  # a thread's edge: the next look may succeed
                    log.exception("a look at %s has failed", self.typed)
                    self._error = repr(error)
                with self._news:
                    self.latest = shown or self.latest
                    self._news.notify_all()
                # Until the first snapshot of another machine has come it is looked for more often.
                pause_s = self._every_s if reader.is_ready else _LOOK_S
                self._is_closed.wait(max(_LOOK_S, pause_s - (time.monotonic() - begun)))
        finally:
            reader.close()

    # What one may do with it.

    def stack(self, row: RankRow) -> str:
        """Where a rank stands now: the stacks of its threads. Takes some seconds.

        Raises:
            UserError: its agent does not answer.
        """
        return stack_of(self._run_of(row), row.rank)

    def log_lines(self, row: RankRow, count: int) -> list[str]:
        """The last lines of a rank's output, or why they are missing.

        Raises:
            UserError: its machine cannot be reached.
        """
        notes: list[str] = []
        choice = LogChoice(rank=row.rank, last=count)
        lines = list(shown_lines(self._run_of(row), choice, notes.append))
        return lines or notes

    @property
    def stop_means(self) -> str:
        """Description of what `stop` does."""
        if isinstance(self._found, Path):
            return "The hub ends. Its clusters continue, each alone, until you open the hub again."
        if isinstance(self._found, RunDir) and script_of(self._found) is not None:
            return "isles asks the script to stop. Whether it saves depends on the script."
        who = "clusters" if isinstance(self._found, MultiClusterRun) else "ranks"
        return f"All its {who} save a checkpoint after this step, and end. It can be resumed."

    def stop(self, now: bool) -> int:
        """Stop the run as `isles stop` does, and wait until it has; the exit code.

        Raises:
            UserError: as of `isles stop`.
        """
        say, found = self.said.append, self._found
        match found:
            case RunDir():
                timeout_s = parse_duration_s(_STOP_TIMEOUT)
                return stop_run(found, now=now, timeout_s=timeout_s, print_line=say)
            case MultiClusterRun():
                return stop_clusters(
                    found, now=now, timeout=_STOP_TIMEOUT, print_line=say, warn=say
                )
            case RemoteRun():
                return stop_remote(
                    found, now=now, timeout=_STOP_TIMEOUT, print_line=say, ask=self._ask_to_stop
                )
            case _:
                return stop_hub(found, print_line=say)

    def _ask_to_stop(self, run: RemoteRun, words: list[str]) -> int:
        done = ask_isles(run, words, timeout_s=parse_duration_s(_STOP_TIMEOUT) + _FIRST_S)
        self.said += [*done.stdout.splitlines(), *done.stderr.splitlines()]
        return done.returncode

    def _run_of(self, row: RankRow) -> RunDir | RemoteRun:
        found = self._found
        if isinstance(found, MultiClusterRun):
            found = read_multi_cluster(found.path) or found
            names = [cluster.name for cluster in found.clusters]
            run = run_of(found, found.cluster(row.cluster)) if row.cluster in names else None
        else:
            clusters = self.latest.clusters if self.latest is not None else ()
            is_here = row.cluster in ("", *(own.name for own in clusters[:1]))
            run = found if is_here and not isinstance(found, Path) else None
        if run is None:
            raise UserError(
                f"there is no way from here to the machines of {row.cluster}",
                where=f"rank {row.rank} on {row.host}",
                fix="look there: `isles top`",
                id="run.unknown",
            )
        return run


def stack_of(run: RunDir | RemoteRun, rank: int) -> str:
    """The stacks of a rank, by rank 0 of its run.

    Raises:
        UserError: the agent does not answer, or the machine is unreachable.
    """
    if isinstance(run, RemoteRun):
        done = ask_isles(run, ["rank-stack", run.path, str(rank)], timeout_s=_STACK_S + 15.0)
        if done.returncode:
            what = cut_more(done.stderr)[0].strip().splitlines() or ["no answer"]
            raise UserError(what[0].removeprefix("error: "), where=f"host {run.host}")
        return done.stdout
    attempt = run.last_attempt()
    answer: dict[str, Any] = {}
    if attempt is not None:
        with explain_write_errors(attempt.path):
            asked_at = ask_for_stacks(attempt)
        end = time.monotonic() + _STACK_S
        while time.monotonic() < end:
            found = read_record(attempt.stacks, MAX_LIST_BYTES) or {}
            if (number_of(found, "asked_at") or 0.0) >= asked_at:
                answer = found.get("ranks", {}).get(str(rank)) or {}
                break
            time.sleep(_LOOK_S)
    if not answer:
        raise UserError(
            f"rank {rank} has not said within {_STACK_S:.0f} s where it stands",
            where=str(run.path),
            fix="it is frozen, or does not train; `isles logs` may say more",
            id="step.stalled",
        )
    doing = f"step {answer.get('step')}, {answer.get('stage')}"
    waits = f", waiting in {answer['waits_in']}" if answer.get("waits_in") else ""
    head = f"rank {rank} on {answer.get('host')}: {doing}{waits}, {answer.get('at')}"
    return f"{head}\n\n{answer.get('stacks')}"


def _typed(found: Found) -> str:
    match found:
        case RemoteRun():
            return found.typed
        case Path():
            return found.name
        case _:
            return typed_name(found)
