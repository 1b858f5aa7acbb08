"""The first node of a task of SkyPilot: starts the run, then becomes its agent and coordinator.

    python -m isles.launch.skypilot.head RUN_FILE [KEY=VALUE …] < RUN_FILE

The task passes the run file's text on standard input. The list of nodes, and the token of the
attempt, are in the environment.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from isles import __version__
from isles.config.load import load_run_file
from isles.errors import ConfigErrors, PreflightError, UserError
from isles.facts.terminal import show_streams
from isles.launch.answers import Announced
from isles.launch.base import check_packages, make_fleet, resolve_for_nodes
from isles.launch.manual import node_environ
from isles.launch.ssh.environment import path_elsewhere
from isles.run.begin import begin_attempt, write_launch
from isles.run.env import SkyStart, settle_home, take_sky_start
from isles.run.find import find_attempt
from isles.run.nodes import FleetNode
from isles.run.process import ProcessId
from isles.run.records import explain_write_errors


def main(words: Sequence[str] | None = None) -> int:
    """Start the run, and continue as its agent; returns only if the run cannot be started."""
    parser = argparse.ArgumentParser(prog="python -m isles.launch.skypilot.head")
    parser.add_argument("run_file", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--resume", default="auto")
    parser.add_argument("--typed", default="")
    options = parser.parse_args(words)
    settle_home()
    try:
        command = _begin(options, take_sky_start(), sys.stdin.read())
    except UserError as error:
        issues = error.issues if isinstance(error, ConfigErrors) else (error,)
        sys.stderr.write("".join(f"error: {issue}\n" for issue in issues))
        return int(error.exit_code)
    return os.execv(command[0], command)


def _begin(options: argparse.Namespace, start: SkyStart, text: str) -> list[str]:
    # Makes the run directory and its records; returns the command of the agent.
    loaded = load_run_file(options.run_file, options.overrides, text=text)
    cluster = loaded.config.clusters[0]
    if len(start.addresses) != cluster.max_nodes:
        raise PreflightError(
            f"SkyPilot has provided {len(start.addresses)} nodes, but the run file requests "
            f"{cluster.max_nodes}",
            where="SKYPILOT_NODE_IPS",
            fix="write the task file again with isles render --to skypilot",
            id="start.refused",
        )
    resolved = resolve_for_nodes(loaded)
    check_packages(resolved)
    # SkyPilot restarts a managed job unchanged: it resumes the run of its first start.
    folder = Path(resolved.config.output_dir).expanduser()
    has_begun = find_attempt(folder, resolved.config.name, start.token) is not None
    resume = "auto" if has_begun else options.resume
    begun, attempt = begin_attempt(
        resolved, loaded.text, resume, join=start.join, typed=options.typed, token=start.token
    )
    run_dir = begun.run_dir
    nodes = [
        FleetNode(node, address, None, address, int(cluster.gpus_per_node))
        for node, address in enumerate(start.addresses)
    ]
    fleet = make_fleet(resolved, nodes, port=cluster.network.port, resume_from=begun.resume_from)
    command = [sys.executable, "-m", "isles.agent", str(run_dir.path.absolute())]
    command += ["--attempt", str(attempt.number)]
    with explain_write_errors(attempt.path):
        fleet.write(attempt)
    # The agent replaces this process, and keeps its pid.
    write_launch(
        attempt,
        ProcessId.of(os.getpid()),
        world_size=fleet.world_size,
        device=fleet.device,
        command=tuple(command),
        resumed_from=begun.resume_from,
        launcher="skypilot",
    )
    os.environ.update(node_environ(run_dir, fleet, 0))
    path = run_dir.path.absolute()
    elsewhere, home = path_elsewhere(path, resolved.config), str(Path.home())
    announced = Announced(__version__, str(path), attempt.number, elsewhere=elsewhere, home=home)
    note = f"{begun.note}\n" if begun.note else ""
    sys.stdout.write(f"{note}{announced.line()}\n")
    sys.stdout.flush()
    return command


if __name__ == "__main__":
    show_streams()
    sys.exit(main())
