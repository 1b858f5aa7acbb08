"""The verb `isles join-node`: one node of a run that people start by hand."""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from cyclopts import App

from isles.errors import ExitCode, UserError
from isles.monitor.signals import Signals, caught_signals

if TYPE_CHECKING:
    from isles.monitor.logs import LineTail

join_app = App(name="join-node", help="Start one node of a run, as `isles train` has printed it.")
_LOOK_S = 0.2


@join_app.default
def join_node(
    target: str,
    /,
    *,
    node: int | None = None,
    digest: str = "",
    timeout: str = "10m",
    output_dir: Path | None = None,
) -> int:
    """Start one node of a run whose launcher is manual, and show what it does.

    Args:
        target: On the first node the run directory; on the others HOST:PORT of the first.
        node: This node's number.
        digest: How the digest of the run begins, so that no other run is taken for it.
        timeout: Longest wait for the first node to answer.
        output_dir: Folder on this host for the node's logs; left out: as the run file says.
    """
    if Path(target).is_dir():
        return _lead(Path(target))
    from isles.facts.units import parse_duration_s
    from isles.launch.join import join
    from isles.monitor.logs import LineTail

    if node is None or len(digest) < 12:
        raise UserError(
            "a node needs its number and the run's digest",
            where="isles join-node",
            fix="type the command as `isles train` has printed it, with --node and --digest",
        )
    try:
        timeout_s = parse_duration_s(timeout)
    except ValueError as error:
        raise UserError(str(error), where="--timeout", fix="for example --timeout 5m") from error
    # Until the agent is there, Ctrl+C ends this command alone.
    joined = join(target, node, digest, output_dir=output_dir, timeout_s=timeout_s, say=_say)
    with caught_signals() as signals:
        _say(f"node {node} of {joined.run_dir.name}; its log is {joined.log}")
        _say("Ctrl+C saves and stops all nodes; closing this terminal leaves it running")
        return _watch(joined.process, LineTail(joined.log), signals)


def _lead(path: Path) -> int:
    from isles.launch.manual import lead
    from isles.monitor.follow import RunFollower
    from isles.monitor.table import console
    from isles.run.paths import RunDir

    run_dir = RunDir(path)
    with caught_signals() as signals:
        attempt, process = lead(run_dir)
        _say(f"the first node of {run_dir.name} is starting; its log is {attempt.agent_log}")
        _say("Ctrl+C saves and stops all nodes; closing this terminal leaves it running")
        consoles = console(), console(stderr=True)
        return RunFollower(run_dir, attempt, *consoles, process=process).follow(signals)


def _watch(process: subprocess.Popen[bytes], log: LineTail, signals: Signals) -> int:
    """Show what an agent prints until it ends, and hand it signals."""
    code: int | None = None
    while code is None:
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(_LOOK_S)
        for line in log.read(final=code is not None):
            _say(line)
        for signum in signals.take():
            if signum == signal.SIGHUP:
                return ExitCode.OK
            process.send_signal(signum)
    return code if code >= 0 else ExitCode.TRAINING


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
