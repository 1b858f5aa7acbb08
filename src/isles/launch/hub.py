"""The DiLoCo hub as a process of this machine: started, found again, and stopped.

`isles hub` starts a hub for a run file (`start_hub`); `isles train` with several clusters starts
one too (`open_hub`). A restarted hub continues from its state directory: token, certificate, port,
averages.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

from isles.config.clusters import shared_text
from isles.config.load import Loaded, load_run_file
from isles.config.sections.outer import DiLoCoConfig
from isles.errors import ConfigError, MissingDependencyError, PreflightError, UserError
from isles.launch.ssh.shell import start_detached
from isles.run.entry import is_own, make_own_folder, open_own_file, require_own
from isles.run.env import inherited
from isles.run.find import next_run, numbered_runs
from isles.run.join_line import JoinLine
from isles.run.owner import Record, owner_of
from isles.run.process import ProcessId
from isles.run.records import (
    explain_write_errors,
    read_any,
    read_own,
    read_record,
    write_record,
    write_secret,
)
from isles.run.stop import kill_now, send_signal

EVERYWHERE = ("0.0.0.0", "::")
_OPEN_S = 60.0
_END_S = 10.0
_LOOK_S = 0.1
_TAIL_BYTES = 2000
_NEEDED = ("aiohttp", "torch")


@dataclass(frozen=True, slots=True)
class OpenHub:
    """A running hub and its state directory. `is_new`: it was started just now. `has_past`: the
    directory existed before."""

    state: Path
    line: JoinLine
    is_new: bool
    has_past: bool

    @property
    def join_file(self) -> Path:
        """The file with the join line."""
        return self.state / "join"


def start_hub(
    run_file: Path, overrides: Sequence[str], *, public: str, listen: str, is_anew: bool
) -> OpenHub:
    """Start the hub of a run file, or continue a hub that was started before.

    Args:
        public: HOST:PORT for the clusters; empty: as in `outer.public`, or none.
        listen: HOST:PORT; empty: derived from `public`.
        is_anew: start with an empty state.

    Raises:
        UserError: the run file is not for several clusters, or the hub cannot be started.
    """
    loaded = load_run_file(run_file, overrides)
    outer = _outer_with_hub(loaded)
    public = public or outer.public or ""
    if public and split_address(public, "--public")[1] == 0:
        raise ConfigError(
            f"{public} has no port for the clusters",
            where="--public",
            fix="add a port, such as 29400",
            id="hub.address",
        )
    place = listen_address(public, listen)
    state = _state_directory(loaded, is_anew=is_anew)
    has_past = (state / "join").exists()
    line, is_new = open_hub(
        state,
        run=loaded.config.name,
        settings=outer.hub_settings,
        listen=place,
        announce=public,
        run_file=shared_text(loaded.config),
    )
    return OpenHub(state, line, is_new, has_past)


def _state_directory(loaded: Loaded, *, is_anew: bool) -> Path:
    # OUTPUT_DIR/NAME-hub-N: the last existing folder, or the next one.
    folder = Path(loaded.config.output_dir).expanduser()
    name = f"{loaded.config.name}-hub"
    taken = numbered_runs(folder, name)
    # Other users of a shared folder may have hubs of the same name.
    settings = [(run.path, run.path / "settings.json") for _, run in taken]
    settings = [(path, file) for path, file in settings if file.exists() and is_own(path)]
    ours = [path for path, file in settings if not owner_of(file)]
    if ours and not is_anew:
        return ours[-1]
    return next_run(folder, name)


def _outer_with_hub(loaded: Loaded) -> DiLoCoConfig:
    outer, key = loaded.config.diloco, "kind"
    if outer is None or loaded.config.training.script is not None:
        what = "this run does not average with other clusters, so a hub would have no clients"
        fix = "set outer: {kind: diloco}"
    elif outer.engine == "hivemind":
        key, what = "engine", "clusters with engine hivemind do not use a hub"
        fix = "set it to hub, or start hivemind as described in docs/hivemind.md"
    elif outer.engine == "bucket":
        key, what = "engine", f"clusters with engine bucket meet at {outer.url} without a hub"
        fix = "set it to hub, or join through the bucket as described in docs/bucket.md"
    elif outer.hub is not None:
        key, what = "hub", f"the run file names an existing hub, {outer.hub}"
        fix = "delete this key; set the address of the new hub with --public"
    else:
        return outer
    raise ConfigError(what, where=loaded.where(f"outer.{key}"), fix=fix)


def hub_process(state: Path) -> ProcessId | None:
    """The hub process of a state directory; None if it is not running on this machine."""
    process = ProcessId.from_record(read_record(state / "process.json") or {})
    return process if process is not None and process.is_here() and process.is_alive() else None


def running_settings(state: Path, name: str) -> dict[str, Any] | None:
    """The settings of the running hub of a state directory; None: it is not running.

    Args:
        name: name of the run, as a user types it.

    Raises:
        UserError: the hub's record is damaged.
    """
    if hub_process(state) is None:
        return None
    file = state / "process.json"
    settings = (read_record(file) or {}).get("settings")
    if not isinstance(settings, dict):
        raise UserError(
            f"the settings in the hub's record are invalid: {ascii(settings)[:60]}",
            where=str(file),
            fix=f"stop the run with `isles stop {name}`, and start it again",
        )
    return settings


def open_hub(
    state: Path,
    *,
    run: str,
    settings: Mapping[str, object],
    listen: str,
    announce: str = "",
    run_file: str = "",
    until_finished: bool = False,
) -> tuple[JoinLine, bool]:
    """Start the hub of a state directory, in a separate session, or find it running.

    Args:
        run: name of the run.
        settings: settings of the run (`DiLoCoConfig.hub_settings`).
        listen: HOST:PORT; port 0: the last port, or any.
        announce: HOST or HOST:PORT for the clusters, if it differs from `listen`.
        run_file: text for clusters of other sites that join; empty: none.
        until_finished: stop when all clusters have finished and left.

    Returns:
        The join line, and whether the hub was started just now.

    Raises:
        UserError: it cannot listen there, a package is missing, or it runs with other settings.
    """
    asked: dict[str, object] = {"run": run, "settings": dict(settings), "listen": listen}
    asked |= {"announce": announce} | ({"run_file": run_file} if run_file else {})
    with explain_write_errors(state):
        require_own(state)
    if (process := hub_process(state)) is not None:
        record = read_record(state / "process.json") or {}
        other = [key for key, value in asked.items() if record.get(key, value) != value]
        if not other:
            return JoinLine.read(state / "join"), False
        raise ConfigError(
            f"the hub is running already (pid {process.pid}) with a different "
            f"value of {', '.join(other)}",
            where=str(state / "process.json"),
            fix="use the same values, or stop that hub first (clusters continue to train, and "
            "reconnect to the new hub)",
        )
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        raise MissingDependencyError(
            f"the hub needs packages that are not installed: {', '.join(missing)}",
            where=sys.executable,
            fix="run pip install 'isles[train]', or in a clone pip install -e '.[train]'",
        )
    with explain_write_errors(state):
        state.parent.mkdir(parents=True, exist_ok=True)
        make_own_folder(state, 0o700)
        write_secret(state / "settings.json", json.dumps(asked["settings"]))
        command = [sys.executable, "-m", "isles.outer.hub", str(state.absolute())]
        command += ["--run", run, "--listen", listen, "--announce", announce]
        command += ["--settings", str(state.absolute() / "settings.json")]
        if run_file:
            write_secret(state / "run.yaml", run_file)
        if until_finished:
            command.append("--until-finished")
    _launch(state, {**asked, "command": command})
    return JoinLine.read(state / "join"), True


def reopen_hub(state: Path) -> bool:
    """Restart a hub that has died, with its last settings; False if it runs, or never ran here.

    Raises:
        UserError: it stops again immediately.
    """
    record = read_own(state / "process.json")
    if record is None or hub_process(state) is not None or "command" not in record:
        return False
    _launch(state, record)
    return True


def _launch(state: Path, record: Mapping[str, Any]) -> None:
    # Start it, and wait until it listens: it writes the join line again then.
    log, join = state / "hub.log", state / "join"
    begin, before = log.stat().st_size if log.exists() else 0, _changed_at(join)
    with explain_write_errors(state):
        require_own(state)
        with open_own_file(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600) as stream:
            child = start_detached(record["command"], inherited(), stream, state)
        write_record(state / "process.json", {**record, **ProcessId.of(child.pid).record()})
    end = time.monotonic() + _OPEN_S
    while _changed_at(join) == before:
        code = child.poll()
        if code is not None or time.monotonic() > end:
            child.kill()
            raise _not_opened(log, begin, code)
        time.sleep(_LOOK_S)


def _not_opened(log: Path, begin: int, code: int | None) -> PreflightError:
    with log.open(encoding="utf-8", errors="replace") as stream:
        stream.seek(begin)
        text = stream.read()[-_TAIL_BYTES:].strip()
    _, found, error = text.rpartition("error: ")
    what, _, fix = (error if found else text).partition("\n  fix: ")
    why = "did not start within 60 s" if code is None else f"exited with code {code}"
    return PreflightError(
        what if found and code is not None else f"the hub {why}: {what or 'no output'}",
        where="" if found else str(log),
        fix=fix or "fix the error above",
        id="hub.ended",
    )


def _changed_at(path: Path) -> float:
    with suppress(FileNotFoundError):
        found = path.stat()
        return found.st_mtime_ns + found.st_ino
    return 0


def local_line(state: Path) -> JoinLine:
    """The join line of a hub on this machine, with an address that this machine itself can use:
    routers seldom route one's own public address back.

    Raises:
        ConfigError: there is no join line.
    """
    line = JoinLine.read(state / "join")
    record = read_any(state / "process.json") or Record()
    line = replace(line, owner=line.owner or record.owner)
    listen = str(record.get("listen", ""))
    host = listen.rpartition(":")[0].strip("[]") or line.host
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    try:
        return replace(line, host=host, port=int((state / "port").read_text()))
    except (OSError, ValueError):
        return line


def end_hub(state: Path) -> bool:
    """Stop the hub of a state directory, and keep its state; False if it was not running."""
    process = hub_process(state)
    if process is None:
        return False
    send_signal(process, signal.SIGTERM)
    with suppress(psutil.NoSuchProcess):
        child = psutil.Process(process.pid)
        try:
            child.wait(timeout=_END_S)
        except psutil.TimeoutExpired:
            kill_now(process)
            with suppress(psutil.TimeoutExpired):  # it hangs in the kernel, on a disk
                child.wait(timeout=_END_S)
    return True


def listen_address(public: str, listen: str) -> str:
    """Address on which a hub on this machine must listen for its clusters.

    Args:
        public: HOST:PORT for the clusters; empty: only clusters of this machine.
        listen: HOST:PORT from the user; empty: derived from `public`.

    Raises:
        ConfigError: clusters could not connect to the address.
    """
    if not listen:
        if not public:
            return "127.0.0.1:0"
        host, port = split_address(public, "--public")
        places: list[str] = []
        with suppress(OSError, UnicodeError):
            found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            places = [str(place[4][0]) for place in found]
        own = own_addresses()
        place = next((address for address in places if address in own), EVERYWHERE[0])
        return f"[{place}]:{port}" if ":" in place else f"{place}:{port}"
    host, _ = split_address(listen, "--listen")
    if host in EVERYWHERE and not public:
        raise ConfigError(
            f"{host} means all addresses of this machine, so clusters cannot connect to it",
            where="--listen",
            fix="pass the address for the clusters, --public HOST:PORT",
            id="hub.address",
        )
    return listen


def split_address(text: str, where: str) -> tuple[str, int]:
    """Split HOST:PORT into host and port.

    Raises:
        ConfigError: the text is not HOST:PORT.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) >= 1 << 16:
        raise ConfigError(
            f"{text!r} is not a valid address",
            where=where,
            fix="write HOST:PORT, such as hub.example.org:29400",
            id="hub.address",
        )
    return host.strip("[]"), int(port)


def own_addresses() -> set[str]:
    """The addresses of this machine, as text."""
    families = (socket.AF_INET, socket.AF_INET6)
    entries = [entry for some in psutil.net_if_addrs().values() for entry in some]
    return {e.address.partition("%")[0] for e in entries if e.family in families}
