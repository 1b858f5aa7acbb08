"""The verb `isles check`."""

from __future__ import annotations

import json
import shlex
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from isles.check.conduct import check_hosts
from isles.check.course import Extent
from isles.check.finding import Finding, exit_code, record
from isles.check.login import check_login
from isles.check.meeting import rendezvous_stand_in
from isles.check.panel import fault_finding
from isles.check.queue.pbs import check_pbs
from isles.check.queue.slurm import check_slurm
from isles.check.report import report_lines
from isles.check.subject import Subject
from isles.config.clusters import keys_of_cluster, named_cluster
from isles.config.load import Loaded, load_run_file
from isles.config.sections.cluster import (
    ClusterConfig,
    ManualLauncherConfig,
    PbsLauncherConfig,
    QueueSection,
    SlurmLauncherConfig,
    SshLauncherConfig,
)
from isles.errors import PreflightError, UserError
from isles.launch.pbs.job import Pbs
from isles.launch.slurm.job import Slurm
from isles.launch.ssh.channel import Channel
from isles.launch.ssh.setting import python_of, setting_lines
from isles.launch.ssh.shell import Shell, on_all

_MODULE = "isles.check.node.operations"
_ANSWER_S = 30.0
"""Longest wait for a first answer once ssh has connected; Python may come from a slow disk."""

Say = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """How `isles check` was typed.

    Args:
        run_file: None: the machines alone are checked.
        overrides: as `key.path=value`.
        hosts: these instead of the run file's.
        net, smoke: as in `Extent`.
        in_job: check the nodes by a job of Slurm or PBS.
        timeout_s: longest wait for one answer.
        as_json: print JSON.
    """

    run_file: Path | None
    overrides: tuple[str, ...]
    hosts: tuple[str, ...]
    net: bool
    smoke: bool
    timeout_s: float
    as_json: bool
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
        code, text, found = _check_one(_subject(options, loaded), options)
        write(json.dumps(found, indent=1) if options.as_json else text)
        return code
    if options.hosts:
        raise UserError(
            f"these hosts would stand for {len(loaded.config.clusters)} clusters",
            where="--hosts",
            fix="check them without a run file, or leave them out",
        )
    codes, records = [], {}
    with rendezvous_stand_in(loaded) as meeting:
        for index, cluster in enumerate(loaded.config.clusters):
            own = named_cluster(meeting, cluster.name)
            code, text, records[cluster.name] = _check_one(
                Subject.of(own), replace(options, overrides=()), index
            )
            codes.append(code)
            if not options.as_json:
                write(f"=== cluster {cluster.name} ({cluster.launcher.kind}) ===\n{text}\n")
    if options.as_json:
        write(json.dumps({"clusters": records}, indent=1))
    return max(codes)


def _check_one(
    subject: Subject, options: CheckOptions, index: int = 0
) -> tuple[int, str, dict[str, Any]]:
    """Check a cluster: the exit code, the report, and the same as JSON takes it.

    Args:
        subject: the cluster, as if it were the only one.
        options: how it was typed.
        index: its place in the run file, which is what the user is told.
    """
    begin = time.monotonic()
    is_terminal = sys.stdout.isatty() and not options.as_json

    def say(line: str) -> None:
        if sys.stderr.isatty() and not options.as_json:
            sys.stderr.write(f"{line} …\n")

    found, columns = check_subject(subject, options, say)
    findings = [replace(each, fix=keys_of_cluster(each.fix, index)) for each in found]
    seconds = time.monotonic() - begin
    lines = report_lines(findings, columns, seconds=seconds, is_terminal=is_terminal)
    return exit_code(findings), "\n".join(lines), record(findings, seconds=seconds)


def check_subject(
    subject: Subject, options: CheckOptions, say: Say
) -> tuple[list[Finding], list[str]]:
    """Everything that is checked for a launcher; and the names of the hosts."""
    cluster = subject.cluster
    if options.in_job:
        from isles.check.in_job import check_in_job

        say("waiting for nodes, and checking them")
        return check_in_job(subject, cluster.launcher, options.timeout_s, options.overrides)
    extent = Extent(net=options.net, smoke=options.smoke, timeout_s=options.timeout_s)
    match cluster.launcher:
        case SshLauncherConfig(connect_timeout=connect_s):
            answer_s = min(_ANSWER_S, options.timeout_s)
            extent = replace(extent, contact_s=connect_s + answer_s)
            return _check_ssh(subject, extent, connect_s, say)
        case SlurmLauncherConfig() | PbsLauncherConfig() as launcher:
            return _check_queue(subject, launcher, extent, say)
        case ManualLauncherConfig(hosts=hosts):
            findings, columns = _check_here(subject, extent, say)
            names = ", ".join(hosts)
            text = f"only this machine was checked; the run's are {names}, which ssh is not told of"
            fix = f"isles check --hosts {' '.join(hosts)}, or isles check on each of them"
            return [
                *findings,
                Finding("host.unseen", "warning", "other hosts", text, fix=fix),
            ], columns
        case _:
            return _check_here(subject, extent, say)


def _subject(options: CheckOptions, loaded: Loaded | None) -> Subject:
    if loaded is None:
        if options.overrides:
            raise UserError(
                f"{options.overrides[0]} changes a run file, and none is named",
                where="command line",
                fix="isles check run.yaml …",
            )
        # Of hosts that are named without a run file nothing is known but their homes.
        subject = Subject(ClusterConfig(), "~" if options.hosts else str(Path.cwd()))
    else:
        subject = Subject.of(loaded)
    if not options.hosts:
        return subject
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
    cluster = subject.cluster.model_copy(update={"launcher": launcher, "nodes": "auto"})
    return replace(subject, cluster=cluster)


def _check_here(subject: Subject, extent: Extent, say: Say) -> tuple[list[Finding], list[str]]:
    name = socket.gethostname()
    channel = Channel(
        Shell(),
        lines=[
            f"export {k}={shlex.quote(v)}" for k, v in subject.cluster.environment.variables.items()
        ],
        python=sys.executable,
        module=_MODULE,
        name=name,
    )
    try:
        return check_hosts(subject, [channel], extent, say), [name]
    finally:
        channel.close()


def _check_ssh(
    subject: Subject, extent: Extent, connect_s: float, say: Say
) -> tuple[list[Finding], list[str]]:
    cluster = subject.cluster
    names = [host.ssh for host in cluster.hosts]
    channels, faults = on_all(
        names, lambda name: _channel(cluster, subject.workdir, Shell(name, connect_s), name)
    )
    if faults:
        raise faults[0][1]  # there is no ssh on this machine
    opened = [channel for channel in channels if channel is not None]
    try:
        return check_hosts(subject, opened, extent, say), names
    finally:
        on_all(opened, lambda channel: channel.close())


def _channel(cluster: ClusterConfig, workdir: str, shell: Shell, name: str) -> Channel:
    return Channel(
        shell,
        lines=check_lines(cluster, workdir),
        python=python_of(cluster.environment),
        module=_MODULE,
        name=name,
    )


def check_lines(cluster: ClusterConfig, workdir: str) -> list[str]:
    """As `setting_lines`, but a folder that is missing is a finding, and not the end."""
    first, *rest = setting_lines(cluster, workdir)
    return [first.replace("|| exit 1", "2>/dev/null || cd || exit 1"), *rest]


def _check_queue(
    subject: Subject,
    launcher: SlurmLauncherConfig | PbsLauncherConfig,
    extent: Extent,
    say: Say,
) -> tuple[list[Finding], list[str]]:
    assert isinstance(launcher, QueueSection)
    shell = Shell(launcher.login)
    name = launcher.login or socket.gethostname()
    say(f"asking {launcher.kind} on {name}")
    if launcher.login is not None:
        try:
            shell.run(["true"], timeout_s=extent.contact_s)
        except PreflightError as error:
            return [fault_finding(name, error)], [name]
    if isinstance(launcher, SlurmLauncherConfig):
        findings = check_slurm(subject.cluster, launcher, Slurm(launcher.bin_path, shell))
    else:
        findings = check_pbs(subject.cluster, launcher, Pbs(launcher.bin_path, shell))
    findings = [replace(f, where=name) if f.where == shell.name else f for f in findings]
    channel = _channel(subject.cluster, subject.workdir, shell, name)
    try:
        return [*findings, *check_login(subject, channel, extent)], [name]
    finally:
        channel.close()
