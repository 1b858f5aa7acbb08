"""`isles logs`: the lines of all nodes of a run in one stream, wherever their files are."""

from __future__ import annotations

import queue
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from isles.config.resolve import load_resolved
from isles.errors import UserError
from isles.launch.ssh.setting import path_elsewhere, python_of, setting_lines
from isles.launch.ssh.shell import Shell
from isles.monitor.logs import LogChoice, LogSources, choose_attempt, log_lines, node_lines
from isles.run.fleet import read_fleet
from isles.run.paths import Attempt, RunDir
from isles.run.remote import RemoteRun
from isles.run.state import QUEUES

Note = Callable[[str], object]

_CONNECT_S = 5.0
_QUIET_S = 30.0
"""Longest silence of a host whose last lines are wanted."""


@dataclass(frozen=True, slots=True)
class FarLogs:
    """The logs of one node on another machine.

    Args:
        node: its number; None: of all nodes that the machine sees.
        name: the machine, for messages.
        argv: the command line, to be run here, that prints them.
    """

    node: int | None
    name: str
    argv: tuple[str, ...]


def shown_lines(
    found: RunDir | RemoteRun, choice: LogChoice, *, by_node: bool, note: Note
) -> Iterator[str]:
    """The lines that `isles logs` prints.

    Args:
        found: the run.
        choice: which lines.
        by_node: one node after the other, below headlines.
        note: takes what is to be said beside them: which logs cannot be read, and where they are.

    Raises:
        UserError: there is no such attempt, rank or node.
    """
    if isinstance(found, RemoteRun):
        return _joined([], _far_of_remote(found, choice, by_node=by_node), choice, note)
    attempt = choose_attempt(found, choice.attempt)
    sources = LogSources(attempt)
    _check_node(sources, attempt, choice)
    far: list[FarLogs] = []
    if not choice.is_here:
        try:
            far = _far_of_fleet(found, attempt, sources, choice, by_node=by_node)
        except UserError as error:
            note(f"only logs that are here: {error}")
    if by_node:
        return _joined([_blocks(found, attempt, sources, choice, far)], far, choice, note)
    return _joined([log_lines(found, attempt, choice)], far, choice, note)


def _check_node(sources: LogSources, attempt: Attempt, choice: LogChoice) -> None:
    if choice.node in (None, 0) or choice.node in sources.nodes or choice.is_here:
        return
    there = ", ".join(f"{n} ({name})" for n, name in sources.nodes.items()) or "0, the only one"
    raise UserError(
        f"there is no node {choice.node} in attempt {attempt.number}",
        where=str(attempt.path),
        fix=f"the nodes there are: {there}",
        id="run.logs",
    )


def _blocks(
    run_dir: RunDir,
    attempt: Attempt,
    sources: LogSources,
    choice: LogChoice,
    far: Sequence[FarLogs],
) -> Iterator[str]:
    """The nodes whose logs are here, each below its headline."""
    elsewhere = {logs.node for logs in far}
    for node, name in (sources.nodes or {0: ""}).items():
        if choice.node not in (None, node) or node in elsewhere:
            continue
        yield f"=== Node {node}{f' ({name})' if name else ''} ==="
        yield from node_lines(attempt, run_dir, replace(choice, node=node))


def _far_of_remote(run: RemoteRun, choice: LogChoice, *, by_node: bool) -> list[FarLogs]:
    """From every host of the run, what it alone may have."""
    if run.launcher in QUEUES or len(run.hosts) < 2:
        return [_far(run.ssh, run.lines, run.python, run.path, choice, by_node=by_node)]
    return [
        _far(
            host,
            run.lines,
            run.python,
            run.path_on(host),
            replace(choice, node=node),
            by_node=by_node,
        )
        for node, host in enumerate(run.hosts)
        if choice.node in (None, node)
    ]


def _far_of_fleet(
    run_dir: RunDir, attempt: Attempt, sources: LogSources, choice: LogChoice, *, by_node: bool
) -> list[FarLogs]:
    """From the hosts of nodes of which nothing is here."""
    fleet = read_fleet(attempt)
    if fleet is None or fleet.launcher == "local":
        return []
    wanted = [
        node
        for node in fleet.nodes
        if choice.node in (None, node.node) and not sources.is_here(node.node)
    ]
    if choice.rank is not None:
        at = sources.node_of(choice.rank)
        wanted = [node for node in wanted if node.node == at]
    if not wanted:
        return []
    lines, python, path = _setting(run_dir)
    return [
        _far(
            node.ssh or node.address,
            lines,
            python,
            path,
            replace(choice, node=node.node),
            by_node=by_node,
        )
        for node in wanted
    ]


def _setting(run_dir: RunDir) -> tuple[list[str], str, str]:
    """What comes before Python on another node of a run, its Python, and the run's folder."""
    path = run_dir.path.absolute()
    try:
        config = load_resolved(run_dir.resolved.read_text(encoding="utf-8")).config
    except (OSError, UserError):
        return [], sys.executable, str(path)  # of another version: perhaps it is as here
    cluster = config.clusters[0]
    lines = setting_lines(cluster, cluster.workdir or _workdir(run_dir, config.output_dir))
    return lines, python_of(cluster.environment), path_elsewhere(path, config)


def _workdir(run_dir: RunDir, output_dir: str) -> str:
    """The folder in which the run was begun: its path ends with output_dir and its name."""
    given = Path(output_dir).expanduser()
    up = 0 if given.is_absolute() else len(given.parts)
    return str(run_dir.path.absolute().parents[up])


def _far(
    ssh: str, lines: Sequence[str], python: str, path: str, choice: LogChoice, *, by_node: bool
) -> FarLogs:
    words = [python, "-m", "isles", "logs", path, "--here", *choice.words()]
    words += ["--by-node"] if by_node else []
    script = "\n".join([*lines, f"exec {shlex.join(words)}"])
    argv = Shell(ssh, _CONNECT_S).argv(["bash", "-c", script])
    return FarLogs(choice.node, ssh.rpartition("@")[2], tuple(argv))


def _joined(
    here: Sequence[Iterator[str]], far: Sequence[FarLogs], choice: LogChoice, note: Note
) -> Iterator[str]:
    """All lines: node by node, or as they come where they are followed."""
    if not far:
        for lines in here:
            yield from lines
        return
    pump = _Pump(note)
    for lines in here:
        pump.add_lines(lines)
    for logs in far:
        pump.add_far(logs)
    try:
        yield from pump.mixed() if choice.follow else pump.in_order()
    finally:
        pump.close()


def merged(streams: Sequence[Iterator[str]], *, follow: bool, note: Note) -> Iterator[str]:
    """Several streams of lines, one after the other, or as they come where they are followed."""
    pump = _Pump(note)
    for lines in streams:
        pump.add_lines(lines)
    try:
        yield from pump.mixed() if follow else pump.in_order()
    finally:
        pump.close()


class _Pump:
    """Reads several streams of lines at once, each by a thread."""

    def __init__(self, note: Note) -> None:
        self._note = note
        self._lines: queue.Queue[tuple[int, str | Exception | None]] = queue.Queue(10_000)
        self._left: dict[int, str] = {}
        """Streams that have not ended: whose lines they are."""
        self._count = 0
        self._processes: list[subprocess.Popen[str]] = []
        self._is_closed = False

    def add_lines(self, lines: Iterator[str]) -> None:
        """Lines of this machine."""
        self._start(lines, "this machine")

    def add_far(self, logs: FarLogs) -> None:
        """Lines of another one. It ends there when this process closes its stdin, or ends."""
        process = subprocess.Popen(
            logs.argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._processes.append(process)
        self._start(self._read(process, logs), logs.name)

    def in_order(self) -> Iterator[str]:
        """Stream after stream; a host that hangs keeps nobody from the lines of the others."""
        kept: list[list[str]] = [[] for _ in range(self._count)]
        for index, line in self._all(_QUIET_S):
            kept[index].append(line)
        for lines in kept:
            yield from lines

    def mixed(self) -> Iterator[str]:
        """As they come."""
        for _, line in self._all(None):
            yield line

    def close(self) -> None:
        """Nobody wants more."""
        self._is_closed = True
        for process in self._processes:
            process.kill()
            process.wait()

    def _start(self, lines: Iterator[str], name: str) -> None:
        index, self._count = self._count, self._count + 1
        self._left[index] = name

        def pump() -> None:
            try:
                for line in lines:
                    self._lines.put((index, line))
                self._lines.put((index, None))
            except Exception as error:  # raised again where the lines are wanted
                self._lines.put((index, error))

        threading.Thread(target=pump, daemon=True).start()

    def _all(self, quiet_s: float | None) -> Iterator[tuple[int, str]]:
        while self._left:
            try:
                index, line = self._lines.get(timeout=quiet_s)
            except queue.Empty:
                names = ", ".join(self._left.values())
                self._note(
                    f"not a word from {names} for {quiet_s:.0f} s: its logs may be cut short"
                )
                return
            if isinstance(line, Exception):
                raise line
            if line is None:
                del self._left[index]
            else:
                yield index, line

    def _read(self, process: subprocess.Popen[str], logs: FarLogs) -> Iterator[str]:
        assert process.stdout is not None
        assert process.stderr is not None
        noise: list[str] = []
        errors = process.stderr
        reader = threading.Thread(target=lambda: noise.extend(errors), daemon=True)
        reader.start()
        for line in process.stdout:
            yield line.rstrip("\n")
        code = process.wait()
        reader.join(timeout=5)
        if code and not self._is_closed:
            words = [line.strip() for line in noise if line.strip()]
            what = words[0].removeprefix("error: ") if words else f"exit status {code}"
            node = f"node {logs.node}" if logs.node is not None else "this run"
            self._note(f"the logs of {node} are on {logs.name}, and cannot be read there: {what}")
