"""New snapshots of a run every few seconds, wherever it runs; and what one may do with it."""

from __future__ import annotations

import logging
import subprocess
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Protocol

from pydantic import ValidationError

from isles.errors import PreflightError, UserError, cut_more
from isles.facts.units import format_duration, parse_duration_s, printable
from isles.launch.hub import hub_process, local_line
from isles.launch.remote.login import ask_isles, remote_isles
from isles.launch.ssh.shell import SSH_FAILED, Shell, python_failure
from isles.monitor.clusters import hub_line, stop_clusters
from isles.monitor.hub import stop_hub
from isles.monitor.live.model import RankRow, Snapshot
from isles.monitor.live.several import HubAnswer, SeveralView, ask
from isles.monitor.live.snapshot import RunReader
from isles.monitor.logs import LogChoice
from isles.monitor.stop import stop_run
from isles.monitor.stream import shown_lines
from isles.run.find import run_of, typed_name
from isles.run.live import ask_for_stacks
from isles.run.paths import RunDir
from isles.run.records import clear_errors, read_record
from isles.run.remote import MultiClusterRun, RemoteRun, read_multi_cluster
from isles.run.state import number_of

log = logging.getLogger(__name__)

Found = RunDir | RemoteRun | MultiClusterRun | Path
"""A path: the state directory of a hub (`isles hub`)."""

_RETRY_S = 2.0
_LATE_S = 8.0
"""Another machine that has said nothing for so much longer than it should is silent."""

_FIRST_S = 20.0
"""Longest wait for the first snapshot of a run on another machine."""

_STACK_S, _LOOK_S = 20.0, 0.1
_STOP_TIMEOUT = "10m"


class Reader(Protocol):
    """Looks at one run; `error`: why what it gives is old, or nothing, since when."""

    @property
    def error(self) -> str: ...

    @property
    def is_ready(self) -> bool:
        """Whether all machines have answered, or are known not to."""
        ...

    def look(self) -> Snapshot | None:
        """The run as it is now; None: nothing has come yet."""
        ...

    def close(self) -> None:
        """End what runs for it."""
        ...


class Here:
    """A run directory of this machine."""

    error, is_ready = "", True

    def __init__(self, run_dir: RunDir) -> None:
        self._reader = RunReader(run_dir)

    def look(self) -> Snapshot | None:
        """See `Reader.look`."""
        return self._reader.look()

    def close(self) -> None:
        """See `Reader.close`."""


class There:
    """A run on another machine: isles there looks, and writes a line each time.

    One ssh process lasts as long as this does; where it is cut it is opened again. isles there ends
    when its standard input is closed.
    """

    def __init__(self, run: RemoteRun, every_s: float) -> None:
        self._run, self._every_s = run, every_s
        self._latest: Snapshot | None = None
        self._heard_at = time.monotonic()
        self._why = ""
        self._is_closed = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._starting = threading.Lock()
        self._thread = threading.Thread(target=self._read, name="top-there", daemon=True)
        self._thread.start()

    @property
    def error(self) -> str:
        """See `Reader`."""
        silent_s = time.monotonic() - self._heard_at
        if self._why:
            since = f", for {format_duration(silent_s)}" if self._latest is not None else ""
            return f"{self._run.host} cannot be asked{since}: {self._why}"
        if silent_s > self._every_s + _LATE_S and self._latest is not None:
            return f"{self._run.host} has said nothing for {format_duration(silent_s)}"
        return ""

    @property
    def is_ready(self) -> bool:
        """See `Reader.is_ready`."""
        return self._latest is not None or bool(self._why)

    def look(self) -> Snapshot | None:
        """See `Reader.look`."""
        return self._latest

    def close(self) -> None:
        """See `Reader.close`."""
        with self._starting:
            self._is_closed.set()
            process = self._process
        if process is not None:
            with suppress(OSError):
                assert process.stdin is not None
                process.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=2)
            if process.poll() is None:
                process.kill()
        self._thread.join()

    def _read(self) -> None:
        words = ["top", self._run.path, "--json", "--every", f"{self._every_s:g}", "--stdin"]
        argv = remote_isles(self._run, words, connect_timeout_s=5.0)
        while not self._is_closed.is_set():
            with tempfile.TemporaryFile() as errors:
                with self._starting:
                    if self._is_closed.is_set():
                        return
                    process = self._process = subprocess.Popen(
                        argv,
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=errors,
                        start_new_session=True,
                    )
                assert process.stdout is not None
                for raw in process.stdout:
                    self._take(raw)
                code = process.wait()
                errors.seek(0)
                self._why = self._failure(code, errors)
            self._is_closed.wait(_RETRY_S)

    def _take(self, raw: bytes) -> None:
        if not raw.startswith(b"{"):
            return  # what a login prints
        with suppress(ValidationError):
            found = Snapshot.model_validate_json(raw)
            place = f"{self._run.ssh}:{self._run.path}"
            run = found.run.model_copy(update={"path": place})
            self._latest = found.model_copy(update={"run": run})
            self._heard_at, self._why = time.monotonic(), ""

    def _failure(self, code: int, errors: IO[bytes]) -> str:
        text = errors.read().decode(errors="replace")
        if code == SSH_FAILED:
            return Shell(self._run.ssh).failure(text).what
        if (found := python_failure(self._run.host, self._run.python, code, text)) is not None:
            return found.what
        lines = cut_more(text)[0].strip().splitlines()
        return lines[0].removeprefix("error: ") if lines else f"exit status {code}"


class Several:
    """A run on several clusters, from the machine that has started it."""

    error = ""

    def __init__(self, run: MultiClusterRun, every_s: float) -> None:
        self._run, self._every_s = run, every_s
        self._readers: dict[tuple[str, str, str], Reader] = {}
        launchers = {cluster.name: cluster.launcher for cluster in run.clusters}
        self._view = SeveralView(run.name, str(run.path), launchers, begun_at=run.begun_at)
        self._open()

    @property
    def is_ready(self) -> bool:
        """See `Reader.is_ready`."""
        return all(reader.is_ready for reader in self._readers.values())

    def _open(self) -> dict[str, str]:
        # A reader for each cluster; why there is none.
        run = self._run = read_multi_cluster(self._run.path) or self._run
        errors: dict[str, str] = {}
        for cluster in run.clusters:
            found = run_of(run, cluster)
            key = cluster.name, cluster.ssh, cluster.path
            if found is not None and key not in self._readers:
                old = [other for other in self._readers if other[0] == cluster.name]
                for other in old:  # it was started anew
                    self._readers.pop(other).close()
                self._readers[key] = _reader_of(found, self._every_s)
            elif found is None and cluster.path:
                errors[cluster.name] = f"its run is not at {cluster.path} any more"
        return errors

    def look(self) -> Snapshot | None:
        """See `Reader.look`."""
        errors, asked = self._open(), set[str]()
        parts: dict[str, Snapshot] = {}
        for (name, _, _), reader in self._readers.items():
            try:
                part = reader.look()
            except OSError as error:
                errors[name] = str(error)
                continue
            if part is not None:
                parts[name] = part
            if reader.error:
                errors[name] = reader.error
            elif part is None:
                asked.add(name)
        return self._view.snapshot(parts, errors, self._ask_hub(self._run), asked)

    def _ask_hub(self, run: MultiClusterRun) -> HubAnswer | None:
        if not run.meets:
            return None
        if not run.hub and hub_process(run.state) is None:
            return HubAnswer(error="it does not run")
        try:
            return ask(hub_line(run))
        except UserError as error:
            return HubAnswer(error=error.what)

    def close(self) -> None:
        """See `Reader.close`."""
        for reader in self._readers.values():
            reader.close()


class Hub:
    """A hub of this machine that was opened by itself, and the clusters that have joined it."""

    error, is_ready = "", True

    def __init__(self, state: Path) -> None:
        self._state = state
        self._view = SeveralView(state.name, str(state), {})

    def look(self) -> Snapshot | None:
        """See `Reader.look`."""
        line = local_line(self._state)
        is_on = hub_process(self._state) is not None
        answer = ask(line) if is_on else HubAnswer(line.address, error="it does not run")
        return self._view.snapshot({}, {}, answer)

    def close(self) -> None:
        """See `Reader.close`."""


def _reader_of(found: Found, every_s: float) -> Reader:
    match found:
        case RunDir():
            return Here(found)
        case RemoteRun():
            return There(found, every_s)
        case MultiClusterRun():
            return Several(found, every_s)
        case _:
            return Hub(found)


def snapshot(found: Found, every_s: float = 2.0) -> Snapshot:
    """A run as it is now, wherever it runs.

    Raises:
        UserError: its machine, or its directory, cannot be read.
    """
    reader = _reader_of(found, every_s)
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
            fix="`isles status` shows what was last known of it",
            id="host.answers",
        )
    return shown


class Watch:
    """Looks at a run every few seconds, in a thread, while the `with` block lasts.

    Args:
        found: what `find_any` or `find_hub` has found.
        output_dir: where runs are, as the user has given it.
    """

    def __init__(self, found: Found, output_dir: Path, every_s: float = 2.0) -> None:
        self.latest: Snapshot | None = None
        """The newest snapshot; None: none has come yet."""
        self.typed = _typed(found)
        """What is typed after a verb to mean this run."""
        self.said: list[str] = []
        """What `stop` has to say, line by line."""
        self._found, self._output_dir, self._every_s = found, output_dir, every_s
        self._error = ""
        self._news = threading.Condition()
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_closed.set()
        self._thread.join()

    @property
    def error(self) -> str:
        """Why `latest` is old, and since when; empty: it is not."""
        return self._error

    def wait(self, after_at: float, timeout_s: float) -> Snapshot | None:
        """The next snapshot after one (its `at`); None: none has come in time.

        One thread or many may wait.
        """

        def newer() -> bool:
            return self.latest is not None and self.latest.at != after_at

        with self._news:
            return self.latest if self._news.wait_for(newer, timeout_s) else None

    def _watch(self) -> None:
        reader = _reader_of(self._found, self._every_s)
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
            UserError: nobody has answered.
        """
        return stack_of(self._run_of(row), row.rank)

    def log_lines(self, row: RankRow, count: int) -> list[str]:
        """The last lines that a rank has printed, and why there are none.

        Raises:
            UserError: its machine cannot be reached.
        """
        notes: list[str] = []
        choice = LogChoice(rank=row.rank, last=count)
        lines = list(shown_lines(self._run_of(row), choice, notes.append))
        return lines or notes

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
                words = ["stop", found.path, *(["--now"] if now else [])]
                timeout_s = parse_duration_s(_STOP_TIMEOUT) + _FIRST_S
                done = ask_isles(found, words, timeout_s=timeout_s)
                self.said += [*done.stdout.splitlines(), *done.stderr.splitlines()]
                return done.returncode
            case _:
                return stop_hub(found, print_line=say)

    def _run_of(self, row: RankRow) -> RunDir | RemoteRun:
        found = self._found
        if isinstance(found, MultiClusterRun):
            found = read_multi_cluster(found.path) or found
            names = [cluster.name for cluster in found.clusters]
            run = run_of(found, found.cluster(row.cluster)) if row.cluster in names else None
        else:
            run = None if isinstance(found, Path) else found
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
        UserError: nobody has answered, or the machine cannot be reached.
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
        with clear_errors(attempt.path):
            asked_at = ask_for_stacks(attempt)
        end = time.monotonic() + _STACK_S
        while time.monotonic() < end:
            found = read_record(attempt.stacks) or {}
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
    return printable(f"{head}\n\n{answer.get('stacks')}")


def _typed(found: Found) -> str:
    match found:
        case RemoteRun():
            return found.typed
        case Path():
            return found.name
        case _:
            return typed_name(found)
