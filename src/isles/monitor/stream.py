"""`isles logs`: the lines of all nodes and clusters in one stream, wherever their files are."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from isles.errors import UserError
from isles.launch.remote.login import remote_isles
from isles.launch.ssh.environment import path_elsewhere, python_of, setting_lines
from isles.monitor.children import Children, isles_argv
from isles.monitor.logs import LogChoice, LogFiles, choose_attempt, local_lines
from isles.run.find import run_of
from isles.run.nodes import read_own_fleet
from isles.run.owner import shown_only
from isles.run.paths import Attempt, RunDir
from isles.run.remote import MultiClusterRun, RemoteRun
from isles.run.resolved import read_resolved
from isles.run.state import QUEUES

Note = Callable[[str], object]

_CONNECT_S = 5.0
_SILENT_S = 30.0
"""Longest wait for a host whose last lines are wanted."""


@dataclass(frozen=True, slots=True)
class LogCommand:
    """A command of this machine that prints some logs.

    Args:
        host: the machine that has the logs, for messages. Empty for this machine.
        node: node of the logs. None means all nodes that the machine sees.
        prefix: text before each line.
    """

    argv: Sequence[str]
    host: str = ""
    node: int | None = None
    prefix: str = ""


def shown_lines(
    found: RunDir | RemoteRun | MultiClusterRun, choice: LogChoice, note: Note
) -> Iterator[str]:
    """The lines that `isles logs` prints: source after source, or as they come if followed.

    In a multi-cluster run each line has the name of its cluster. `note` gets remarks, such as logs
    that cannot be read, with their place.

    Raises:
        UserError: there is no such attempt, rank or node.
    """
    if isinstance(found, RunDir) and choice.is_here:
        return local_lines(found, choose_attempt(found, choice.attempt), choice)
    if not isinstance(found, MultiClusterRun):
        sources = _sources(found, choice, note)
        if isinstance(found, RunDir) and len(sources) == 1:
            return local_lines(found, choose_attempt(found, choice.attempt), choice)
        return _merged_lines(sources, choice, note)
    width = max((len(cluster.name) for cluster in found.clusters), default=0)
    sources = []
    for cluster in found.clusters:
        run = run_of(found, cluster)
        if run is None:
            note(f"{cluster.name} was never started")
            continue
        try:
            own = _sources(run, choice, note)
        except UserError as error:
            note(f"{cluster.name}: {error.what}")
            continue
        sources += [replace(each, prefix=f"{cluster.name.ljust(width)} | ") for each in own]
    return _merged_lines(sources, choice, note)


def _sources(found: RunDir | RemoteRun, choice: LogChoice, note: Note) -> list[LogCommand]:
    if isinstance(found, RemoteRun):
        if found.launcher in QUEUES or len(found.hosts) < 2:
            return [_remote_source(found, found.ssh, choice)]
        return [  # each host prints what it alone may have
            _remote_source(found, host, replace(choice, node=node))
            for node, host in enumerate(found.hosts)
            if choice.node in (None, node)
        ]
    attempt = choose_attempt(found, choice.attempt)
    files = LogFiles(attempt)
    if not (choice.node in (None, 0) or choice.node in files.nodes):
        there = ", ".join(f"{n} ({name})" for n, name in files.nodes.items()) or "0, the only one"
        raise UserError(
            f"attempt {attempt.number} has no node {choice.node}",
            where=str(attempt.path),
            fix=f"its nodes are: {there}",
            id="run.logs",
        )
    if (owner := found.owner) != "":
        note(f"{found.name}: {shown_only(owner)}")
    sources = [LogCommand(isles_argv(["logs", str(found.path), "--here", *choice.words()]))]
    try:
        sources += _nodes_elsewhere(found, attempt, files, choice)
    except UserError as error:
        note(f"only logs that are here: {error}")
    return sources


def _nodes_elsewhere(
    run_dir: RunDir, attempt: Attempt, files: LogFiles, choice: LogChoice
) -> list[LogCommand]:
    # Nodes that have no log here are asked by ssh.
    fleet = read_own_fleet(attempt)
    if fleet is None or len(fleet) == 1 or fleet.launcher == "local":
        return []
    wanted = [
        node
        for node in fleet.nodes
        if choice.node in (None, node.node) and not files.is_here(node.node)
    ]
    if choice.rank is not None:
        at = files.node_of(choice.rank)
        wanted = [node for node in wanted if node.node == at]
    if not wanted:
        return []
    path = run_dir.path.absolute()
    lines, python, there = [], sys.executable, str(path)
    try:
        config = read_resolved(run_dir).config
    except (OSError, UserError):
        pass  # of another version: perhaps it is as here
    else:
        cluster, folder = config.clusters[0], Path(config.output_dir).expanduser()
        # The folder in which the run was begun: its path ends with output_dir and its name.
        begun_in = path.parents[0 if folder.is_absolute() else len(folder.parts)]
        lines = setting_lines(cluster, cluster.workdir or str(begun_in))
        python, there = python_of(cluster.environment), path_elsewhere(path, config)
    found = []
    for node in wanted:
        ssh = node.ssh or node.address
        run = RemoteRun(run_dir.name, ssh, there, tuple(lines), python, fleet.launcher, (ssh,), 0.0)
        found.append(_remote_source(run, ssh, replace(choice, node=node.node)))
    return found


def _remote_source(run: RemoteRun, host: str, choice: LogChoice) -> LogCommand:
    words = ["logs", run.path_on(host), "--here", *choice.words()]
    argv = remote_isles(run, words, host=host, connect_timeout_s=_CONNECT_S)
    return LogCommand(argv, host.rpartition("@")[2], choice.node)


def _merged_lines(sources: Sequence[LogCommand], choice: LogChoice, note: Note) -> Iterator[str]:
    # Lines that are followed are yielded as they come. Else source after source, and one host
    # that hangs does not hold back the lines of the others.
    by_name = {str(index): source for index, source in enumerate(sources)}
    kept: dict[str, list[str]] = {name: [] for name in by_name}
    noise: dict[str, list[str]] = {name: [] for name in by_name}
    children = Children()
    try:
        for name, source in by_name.items():
            children.start(name, source.argv)
        while children.left:
            line = children.next(None if choice.follow else _SILENT_S)
            if line is None:
                names = ", ".join(by_name[name].host or "this machine" for name in children.left)
                note(f"no line from {names} for {_SILENT_S:.0f} s: its logs may be cut short")
                break
            source = by_name[line.child]
            if line.kind == "err":
                noise[line.child].append(line.text.strip())
            elif line.kind == "out" and choice.follow:
                yield f"{source.prefix}{line.text}"
            elif line.kind == "out":
                kept[line.child].append(f"{source.prefix}{line.text}")
            elif line.code:
                words = [word for word in noise[line.child] if word]
                what = words[0].removeprefix("error: ") if words else f"exit status {line.code}"
                node = f"node {source.node}" if source.node is not None else "this run"
                place = source.host or "this machine"
                note(f"the logs of {node} are on {place}, and cannot be read there: {what}")
    finally:
        children.kill()
    for lines in kept.values():
        yield from lines
