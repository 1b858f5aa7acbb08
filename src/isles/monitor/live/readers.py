"""Looks at a run: at its directory, by isles on another machine, at all clusters, through a hub."""

from __future__ import annotations

import subprocess
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Protocol

from pydantic import ValidationError

from isles.errors import UserError, cut_more
from isles.facts.units import format_duration
from isles.launch.hub import hub_process, local_line
from isles.launch.remote.login import remote_isles
from isles.launch.ssh.shell import SSH_FAILED, Shell, python_failure
from isles.monitor.clusters import hub_line
from isles.monitor.hub import resting_state
from isles.monitor.live.model import Snapshot
from isles.monitor.live.multi_cluster import HubAnswer, MultiClusterView, ask
from isles.monitor.live.snapshot import RunReader
from isles.run.find import is_run_dir, run_of
from isles.run.join_line import JoinLine
from isles.run.paths import RunDir
from isles.run.remote import (
    MultiClusterRun,
    RemoteRun,
    list_multi_cluster,
    parent_of,
    read_multi_cluster,
)

Found = RunDir | RemoteRun | MultiClusterRun | Path
"""A path: the state directory of a hub (`isles hub`)."""

_RETRY_S = 2.0
_LATE_S = 8.0
"""Another machine that has said nothing for this long is silent."""

_LATEST_AT = 1e11
"""Seconds since the epoch. No clock shows more, and `time.localtime` fails far above it."""


class Reader(Protocol):
    """Reads one run. `error` is the reason for an old or missing snapshot."""

    @property
    def error(self) -> str: ...

    @property
    def is_ready(self) -> bool:
        """True if all machines have answered, or are known not to."""
        ...

    def look(self) -> Snapshot | None:
        """The run as it is now; None: nothing has come yet."""
        ...

    def close(self) -> None:
        """End what runs for it."""
        ...


class LocalReader:
    """A run directory of this machine."""

    is_ready = True

    def __init__(self, run_dir: RunDir) -> None:
        self.error = ""
        self._path, self._reader = run_dir.path, RunReader(run_dir)
        self._latest: Snapshot | None = None

    def look(self) -> Snapshot | None:
        """See `Reader.look`."""
        if is_run_dir(self._path):
            self.error, self._latest = "", self._reader.look()
        else:
            self.error = f"its directory {self._path} is gone: it was deleted or moved away"
        return self._latest

    def close(self) -> None:
        """See `Reader.close`."""


class JoinedReader:
    """A cluster of this machine that has joined others elsewhere, which the hub shows."""

    error, is_ready = "", True

    def __init__(self, run_dir: RunDir, line: Path) -> None:
        self._line, self._reader = line, RunReader(run_dir)
        self._view = MultiClusterView(run_dir.name, str(run_dir.path), {self._reader.cluster: ""})

    def look(self) -> Snapshot | None:
        """See `Reader.look`."""
        own = self._reader.look()
        if own.run.state != "running":
            return own
        try:
            answer = ask(JoinLine.read(self._line))
        except UserError as error:
            answer = HubAnswer(error=error.what)
        return self._view.snapshot({self._reader.cluster: own}, {}, answer)

    def close(self) -> None:
        """See `Reader.close`."""


class RemoteReader:
    """A run on another machine: isles there looks, and writes a line each time.

    One ssh process lives as long as the reader. If the connection breaks, the reader reconnects.
    The remote isles ends when its standard input is closed.

    Args:
        is_own: skip the clusters that the remote machine knows only through the hub.
    """

    def __init__(self, run: RemoteRun, every_s: float, *, is_own: bool) -> None:
        self._run, self._every_s, self._is_own = run, every_s, is_own
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
        self._thread.join(timeout=2)  # another process may hold ssh's output open

    def _read(self) -> None:
        words = ["top", self._run.path, "--json", "--every", f"{self._every_s:g}", "--stdin"]
        words += ["--own"] if self._is_own else []
        try:
            argv = remote_isles(self._run, words, connect_timeout_s=5.0)
        except UserError as error:
            self._why = error.what
            return
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
            # NaN equals no time, so whoever waits for a newer snapshot would never wait.
            if not 0 <= found.at < _LATEST_AT:
                return
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


class MultiClusterReader:
    """A run on several clusters, from the machine that has started it."""

    error = ""

    def __init__(self, run: MultiClusterRun, every_s: float) -> None:
        self._run, self._every_s = run, every_s
        self._readers: dict[tuple[str, str, str], Reader] = {}
        launchers = {cluster.name: cluster.launcher for cluster in run.clusters}
        self._view = MultiClusterView(run.name, str(run.path), launchers, begun_at=run.begun_at)
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
                self._readers[key] = reader_of(found, self._every_s, is_own=True)
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


class HubReader:
    """A hub of this machine that was opened by itself, and the clusters that have joined it."""

    error, is_ready = "", True

    def __init__(self, state: Path) -> None:
        self._state = state
        self._view = MultiClusterView(state.name, str(state), {})

    def look(self) -> Snapshot | None:
        """See `Reader.look`."""
        line = local_line(self._state)
        is_on = hub_process(self._state) is not None
        answer = ask(line) if is_on else HubAnswer(line.address, error="it does not run")
        shown = self._view.snapshot({}, {}, answer)
        if is_on:
            return shown
        head = shown.run.model_copy(update={"state": resting_state(self._state)})
        return shown.model_copy(update={"run": head})

    def close(self) -> None:
        """See `Reader.close`."""


def reader_of(found: Found, every_s: float, *, is_own: bool) -> Reader:
    """Whatever looks at a run.

    Args:
        every_s: how often isles on other machines is to look.
        is_own: of a cluster that has joined others elsewhere only itself.
    """
    match found:
        case RunDir():
            parent = list_multi_cluster(found.path.parent)
            has_parent = parent_of(parent, found) is not None
            lines = [line for line in (found.join_line, found.tunnel_line) if line.exists()]
            alone = is_own or has_parent or not lines
            return LocalReader(found) if alone else JoinedReader(found, lines[0])
        case RemoteRun():
            owner = parent_of(list_multi_cluster(Path(found.folder)), found)
            return RemoteReader(found, every_s, is_own=is_own or owner is not None)
        case MultiClusterRun():
            return MultiClusterReader(found, every_s)
        case _:
            return HubReader(found)
