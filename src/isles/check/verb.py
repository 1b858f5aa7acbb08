"""What `isles check` does: how the nodes of each launcher are reached, and the report."""

from __future__ import annotations

import json
import shlex
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from isles.check.checks.network import rendezvous_stand_in
from isles.check.conduct import check_hosts, check_login
from isles.check.finding import Finding, exit_code, record
from isles.check.hosts import fault_finding
from isles.check.plan import Extent, RunFacts, Say
from isles.check.queue.job import check_in_job
from isles.check.queue.nodes import queue_findings
from isles.check.report import report_lines
from isles.config.clusters import keys_of_cluster, named_cluster
from isles.config.load import Loaded, load_run_file
from isles.config.sections.cluster import (
    ClusterConfig,
    ManualLauncherConfig,
    PbsLauncherConfig,
    SlurmLauncherConfig,
    SshLauncherConfig,
)
from isles.errors import PreflightError, UserError
from isles.launch.ssh.channel import Channel, open_channel
from isles.launch.ssh.environment import python_of, setting_lines
from isles.launch.ssh.shell import Shell, on_all

_ANSWER_S = 30.0
"""Longest wait for a first answer once ssh has connected; Python may come from a slow disk."""

Found = tuple[list[Finding], list[str]]
"""Findings, and the names of the hosts."""


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """How `isles check` was typed.

    Args:
        run_file: None: the machines alone are checked.
        overrides: as `key.path=value`.
        hosts: these instead of the run file's.
        extent: how much is checked.
        as_json: print JSON.
        in_job: check the nodes by a job of Slurm or PBS.
    """

    run_file: Path | None
    overrides: tuple[str, ...]
    hosts: tuple[str, ...]
    extent: Extent
    as_json: bool = False
    in_job: bool = False


def run_check(options: CheckOptions, write: Callable[[str], object]) -> int:
    """Check, print the report, and give the exit code.

    Args:
        options: how it was typed.
        write: takes the report.

    Raises:
        UserError: the run file or the command line is wrong.
    """
    loaded = load_run_file(options.run_file, options.overrides) if options.run_file else None
    if loaded is None or len(loaded.config.clusters) < 2:
        code, text, found = _check_one(_run_facts(options, loaded), options)
        write(json.dumps(found, indent=1) if options.as_json else text)
        return code
    if options.hosts:
        raise UserError(
            f"these hosts would stand for {len(loaded.config.clusters)} clusters",
            where="--hosts",
            fix="check them without a run file, or leave them out",
        )
    codes, records = [], {}
    with rendezvous_stand_in(loaded) as standing:
        for index, cluster in enumerate(loaded.config.clusters):
            own = RunFacts.of(named_cluster(standing, cluster.name))
            code, text, records[cluster.name] = _check_one(
                own, replace(options, overrides=()), index
            )
            codes.append(code)
            if not options.as_json:
                write(f"=== cluster {cluster.name} ({cluster.launcher.kind}) ===\n{text}\n")
    if options.as_json:
        write(json.dumps({"clusters": records}, indent=1))
    return max(codes)


def _run_facts(options: CheckOptions, loaded: Loaded | None) -> RunFacts:
    if loaded is not None:
        run = RunFacts.of(loaded)
    elif options.overrides:
        raise UserError(
            f"{options.overrides[0]} changes a run file, and none is named",
            where="command line",
            fix="isles check run.yaml …",
        )
    else:
        # Of hosts that are named without a run file nothing is known but their homes.
        run = RunFacts(ClusterConfig(), "~" if options.hosts else str(Path.cwd()))
    if not options.hosts:
        return run
    twice = [host for i, host in enumerate(options.hosts) if host in options.hosts[:i]]
    if twice:
        raise UserError(f"{twice[0]} is there twice", where="--hosts", fix="name each host once")
    try:
        launcher = SshLauncherConfig(hosts=options.hosts)
    except ValueError:
        raise UserError(
            f"these are no hosts as ssh takes them: {' '.join(options.hosts)}",
            where="--hosts",
            fix="for example --hosts me@192.168.1.101 me@192.168.1.102",
        ) from None
    cluster = run.cluster.model_copy(update={"launcher": launcher, "nodes": "auto"})
    return replace(run, cluster=cluster)


def _check_one(
    run: RunFacts, options: CheckOptions, index: int = 0
) -> tuple[int, str, dict[str, Any]]:
    # To itself it is the only cluster; the user is told its place in the run file.
    begin = time.monotonic()
    is_terminal = sys.stdout.isatty() and not options.as_json

    def say(line: str) -> None:
        if sys.stderr.isatty() and not options.as_json:
            sys.stderr.write(f"{line} …\n")

    found, columns = _check_cluster(run, options, say)
    findings = [replace(each, fix=keys_of_cluster(each.fix, index)) for each in found]
    seconds = time.monotonic() - begin
    lines = report_lines(findings, columns, seconds=seconds, is_terminal=is_terminal)
    return exit_code(findings), "\n".join(lines), record(findings, seconds=seconds)


def _check_cluster(run: RunFacts, options: CheckOptions, say: Say) -> Found:
    if options.in_job:
        say("waiting for nodes, and checking them")
        return check_in_job(run, options.extent.timeout_s, options.overrides)
    extent = options.extent
    match run.cluster.launcher:
        case SshLauncherConfig(connect_timeout=connect_s):
            contact_s = connect_s + min(_ANSWER_S, extent.timeout_s)
            shells = {host.ssh: Shell(host.ssh, connect_s) for host in run.cluster.hosts}
            with _channels(run, shells) as channels:
                found = check_hosts(run, channels, replace(extent, contact_s=contact_s), say)
            return found, list(shells)
        case SlurmLauncherConfig() | PbsLauncherConfig() as launcher:
            return _check_queue(run, launcher, extent, say)
        case ManualLauncherConfig(hosts=hosts):
            found, columns = _check_here(run, extent, say)
            text = f"only this machine was checked; the run's are {', '.join(hosts)}, which ssh is "
            text += "not told of"
            fix = f"isles check --hosts {' '.join(hosts)}, or isles check on each of them"
            return [
                *found,
                Finding("host.unseen", "warning", "other hosts", text, fix=fix),
            ], columns
        case _:
            return _check_here(run, extent, say)


def _check_here(run: RunFacts, extent: Extent, say: Say) -> Found:
    variables = run.cluster.environment.variables
    lines = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    name = socket.gethostname()
    with _channel(Shell(), lines, sys.executable, name) as channel:
        return check_hosts(run, [channel], extent, say), [name]


def _check_queue(
    run: RunFacts, launcher: SlurmLauncherConfig | PbsLauncherConfig, extent: Extent, say: Say
) -> Found:
    shell = Shell(launcher.login)
    name = launcher.login or socket.gethostname()
    say(f"asking {launcher.kind} on {name}")
    if launcher.login is not None:
        try:
            shell.run(["true"], timeout_s=extent.contact_s)
        except PreflightError as error:
            return [fault_finding(name, error)], [name]
    findings = queue_findings(run.cluster, launcher, shell)
    findings = [replace(f, where=name) if f.where == shell.name else f for f in findings]
    with _channels(run, {name: shell}) as channels:
        return [*findings, *check_login(run, channels[0], extent)], [name]


@contextmanager
def _channels(run: RunFacts, shells: dict[str, Shell]) -> Iterator[Sequence[Channel]]:
    first, *rest = setting_lines(run.cluster, run.workdir)
    # A folder that is missing is a finding, and not the end.
    lines = [first.replace("|| exit 1", "2>/dev/null || cd || exit 1"), *rest]
    python = python_of(run.cluster.environment)
    found, faults = on_all(list(shells), lambda name: _channel(shells[name], lines, python, name))
    opened = [channel for channel in found if channel is not None]
    try:
        if faults:
            raise faults[0][1]
        yield opened
    finally:
        on_all(opened, Channel.close)


def _channel(shell: Shell, lines: Sequence[str], python: str, name: str) -> Channel:
    return open_channel(shell, lines=lines, python=python, module="isles.check.node", name=name)
