"""The command `isles check`: connects to the nodes of a launcher, checks them, prints the report.

`check_hosts` is the check itself, for nodes over any kind of connection.
"""

from __future__ import annotations

import json
import shlex
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.text import Text

from isles import __version__
from isles.check.checks.files import try_shared
from isles.check.checks.links import try_links
from isles.check.checks.machine import clock_skew
from isles.check.checks.network import choose_reach, try_bucket, try_hub
from isles.check.checks.ranks import try_reduce
from isles.check.checks.rows import LONGEST_S
from isles.check.checks.versions import compare_versions, duplicates
from isles.check.finding import Finding, exit_code, record, report_lines
from isles.check.job import check_in_job
from isles.check.plan import (
    QUICK_S,
    CheckedRun,
    Extent,
    Hosts,
    PrintLine,
    error_finding,
    findings_of,
)
from isles.check.scheduler import queue_findings, ray_findings
from isles.config.clusters import keys_of_cluster, named_cluster
from isles.config.load import Loaded, load_run_file
from isles.config.sections.cluster import (
    ClusterConfig,
    ManualLauncherConfig,
    PbsLauncherConfig,
    QueueSection,
    RayLauncherConfig,
    SkypilotLauncherConfig,
    SlurmLauncherConfig,
    SshLauncherConfig,
)
from isles.config.sections.kubernetes import KubernetesLauncherConfig
from isles.errors import PreflightError, UserError
from isles.facts.units import plural
from isles.launch.container.enter import container_record, is_file_image
from isles.launch.container.image import image_failure
from isles.launch.multi_cluster import refuse_peers
from isles.launch.ssh.channel import Channel, open_channel
from isles.launch.ssh.environment import python_of, setting_lines
from isles.launch.ssh.shell import Shell, on_all
from isles.launch.worker import NEEDED_TO_TRAIN

_ANSWER_S = 30.0
"""Longest wait for a first answer after ssh has connected. Python may be on a slow disk."""

_CLOCK_ROUNDS = 5
_SMOKE_S = 220.0

Found = tuple[list[Finding], list[str]]
"""Findings and names of the hosts."""


def run_check(
    run_file: Path | None,
    overrides: Sequence[str],
    hosts: tuple[str, ...],
    extent: Extent,
    write: Callable[[str | Text], object],
) -> int:
    """Check, print the report, and return the exit code.

    Args:
        run_file: run file. None: check the machines alone.
        hosts: hosts to check instead of the hosts of the run file.

    Raises:
        UserError: the run file or the command line is not valid.
    """
    loaded = load_run_file(run_file, overrides) if run_file else None
    if loaded is None or len(loaded.config.clusters) < 2:
        code, text, found = _check_one(_run_facts(loaded, overrides, hosts), extent)
        write(json.dumps(found, indent=1) if extent.as_json else text)
        return code
    if hosts:
        raise UserError(
            f"--hosts cannot replace the hosts of {len(loaded.config.clusters)} clusters",
            where="--hosts",
            fix="check them without a run file, or remove --hosts",
        )
    refuse_peers(loaded)
    codes, records = [], {}
    for index, cluster in enumerate(loaded.config.clusters):
        own = CheckedRun.of(named_cluster(loaded, cluster.name))
        code, text, records[cluster.name] = _check_one(own, extent, index)
        codes.append(code)
        if not extent.as_json:
            head = f"=== cluster {cluster.name} ({cluster.launcher.kind}) ===\n"
            write(Text.assemble(head, text, "\n"))
    if extent.as_json:
        write(json.dumps({"clusters": records}, indent=1))
    return max(codes)


def _run_facts(
    loaded: Loaded | None, overrides: Sequence[str], hosts: tuple[str, ...]
) -> CheckedRun:
    if loaded is not None:
        run = CheckedRun.of(loaded)
    elif overrides:
        raise UserError(
            f"{overrides[0]} changes a run file, and no run file was given",
            where="command line",
            fix="use isles check run.yaml …",
        )
    else:
        # Without a run file, only the home folders of the hosts are known.
        run = CheckedRun(ClusterConfig(), "~" if hosts else str(Path.cwd()))
    if not hosts:
        return run
    twice = [host for i, host in enumerate(hosts) if host in hosts[:i]]
    if twice:
        raise UserError(f"{twice[0]} appears twice", where="--hosts", fix="pass each host once")
    try:
        launcher = SshLauncherConfig(hosts=hosts)
    except ValueError:
        raise UserError(
            f"not valid names of hosts for ssh: {' '.join(hosts)}",
            where="--hosts",
            fix="pass, for example, --hosts me@192.168.1.101 me@192.168.1.102",
        ) from None
    cluster = run.cluster.model_copy(update={"launcher": launcher, "nodes": "auto"})
    return replace(run, cluster=cluster)


def _check_one(run: CheckedRun, extent: Extent, index: int = 0) -> tuple[int, Text, dict[str, Any]]:
    begin = time.monotonic()
    is_terminal = sys.stdout.isatty() and not extent.as_json

    def print_line(line: str) -> None:
        if sys.stderr.isatty() and not extent.as_json:
            sys.stderr.write(f"{line} …\n")

    found, columns = _check_cluster(run, extent, print_line)
    # A cluster's own config has index 0. Show its index in the run file instead.
    findings = [replace(each, fix=keys_of_cluster(each.fix, index)) for each in found]
    seconds = time.monotonic() - begin
    lines = report_lines(findings, columns, seconds=seconds, is_terminal=is_terminal)
    return exit_code(findings), Text("\n").join(lines), record(findings, seconds=seconds)


def _check_cluster(run: CheckedRun, extent: Extent, print_line: PrintLine) -> Found:  # noqa: PLR0911  # one each
    if extent.in_job:
        print_line("waiting for nodes to check")
        return check_in_job(run, extent.timeout_s)
    match run.cluster.launcher:
        case SshLauncherConfig(connect_timeout=connect_s):
            contact_s = connect_s + min(_ANSWER_S, extent.timeout_s)
            shells = {host.ssh: Shell(host.ssh, connect_s) for host in run.cluster.hosts}
            with _channels(run, shells) as channels:
                found = check_hosts(run, channels, replace(extent, contact_s=contact_s), print_line)
            return found, list(shells)
        case SlurmLauncherConfig() | PbsLauncherConfig() as launcher:
            return _check_queue(run, launcher, extent, print_line)
        case RayLauncherConfig() as launcher:
            return _check_ray(run, launcher, extent, print_line)
        case KubernetesLauncherConfig(image=image):
            text = f"nothing was checked: pods with the image {image} are visible only in a run"
            fix = "run isles train: the first pod checks itself, and isles reports why pods wait"
            return [Finding("host.unseen", "warning", "pods", text, fix=fix)], ["pods"]
        case ManualLauncherConfig(hosts=hosts):
            found, columns = _check_here(run, extent, print_line)
            text = f"only this machine was checked. The run uses {', '.join(hosts)}, which ssh "
            text += "does not know"
            fix = f"isles check --hosts {' '.join(hosts)}, or isles check on each of them"
            unseen = Finding("host.unseen", "warning", "other hosts", text, fix=fix)
            return [*found, unseen], columns
        case SkypilotLauncherConfig():
            found, columns = _check_here(run, extent, print_line)
            text = "only this machine was checked, as SkyPilot has not started the run's nodes yet"
            fix = "sky check lists the clouds it can use; isles train --dry-run shows the task"
            unseen = Finding("host.unseen", "warning", "SkyPilot's nodes", text, fix=fix)
            return [*found, unseen], columns
        case _:
            return _check_here(run, extent, print_line)


def _check_here(run: CheckedRun, extent: Extent, print_line: PrintLine) -> Found:
    variables = run.cluster.environment.variables
    lines = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    name = socket.gethostname()
    with _channel(Shell(), lines, sys.executable, name, _container(run)) as channel:
        return check_hosts(run, [channel], extent, print_line), [name]


def _check_queue(
    run: CheckedRun,
    launcher: SlurmLauncherConfig | PbsLauncherConfig,
    extent: Extent,
    print_line: PrintLine,
) -> Found:
    shell = Shell(launcher.login)
    name = launcher.login or socket.gethostname()
    print_line(f"querying {launcher.kind} on {name}")
    if launcher.login is not None:
        try:
            shell.run(["true"], timeout_s=extent.contact_s)
        except PreflightError as error:
            return [error_finding(name, error)], [name]
    findings = queue_findings(run.cluster, launcher, shell)
    findings = [replace(f, where=name) if f.where == shell.name else f for f in findings]
    findings += _check_image(run, shell, name, extent)
    with _channels(run, {name: shell}) as channels:
        return [*findings, *_check_login(run, channels[0], extent)], [name]


def _check_ray(
    run: CheckedRun, launcher: RayLauncherConfig, extent: Extent, print_line: PrintLine
) -> Found:
    # This machine submits, and shares files with the nodes. It cannot see the nodes.
    if launcher.login is not None:
        text = f"Ray is queried from {launcher.login}, which starts the run"
        fix = f"run isles check on that host: ssh {launcher.login}"
        return [Finding("host.unseen", "warning", launcher.login, text, fix=fix)], [launcher.login]
    name = socket.gethostname()
    print_line(f"querying Ray at {launcher.address}")
    findings = ray_findings(run.cluster, launcher, name)
    with _channels(run, {name: Shell()}) as channels:
        return [*findings, *_check_login(run, channels[0], extent)], [name]


def _check_image(run: CheckedRun, shell: Shell, name: str, extent: Extent) -> list[Finding]:
    # An image file runs on the submitting node too. The nodes of its jobs cannot be seen.
    container = _container(run)
    if container is None or not is_file_image(container["image"]):
        return []
    lines = setting_lines(run.cluster, run.workdir)
    python, image = python_of(run.cluster.environment), container["image"]
    try:
        with _channel(shell, lines, python, name, container) as channel:
            facts = channel.call("facts", timeout_s=extent.contact_s)
    except UserError as error:
        found = error_finding(name, error)
        is_weak = error.id == "container.runtime"  # the nodes may still have it
        return [replace(found, level="warning") if is_weak else found]
    is_script = run.config is not None and run.config.training.script is not None
    failure = image_failure(facts, image, ("torch",) if is_script else NEEDED_TO_TRAIN)
    if failure is not None:
        return [error_finding(name, failure)]
    text = f"{image} has isles {facts['isles']} and Python {facts['python']}"
    return [Finding("container.image", "ok", name, text, facts["isles"])]


@contextmanager
def _channels(run: CheckedRun, shells: dict[str, Shell]) -> Iterator[Sequence[Channel]]:
    first, *rest = setting_lines(run.cluster, run.workdir)
    # A missing folder is a finding, and does not end the check.
    lines = [first.replace("|| exit 1", "2>/dev/null || cd || exit 1"), *rest]
    python = python_of(run.cluster.environment)
    # Only the login node of a queue can be seen, and it may not have a container runtime.
    container = None if isinstance(run.cluster.launcher, QueueSection) else _container(run)
    found, failures = on_all(
        list(shells), lambda name: _channel(shells[name], lines, python, name, container)
    )
    opened = [channel for channel in found if channel is not None]
    try:
        if failures:
            raise failures[0][1]
        yield opened
    finally:
        on_all(opened, Channel.close)


def _channel(
    shell: Shell,
    lines: Sequence[str],
    python: str,
    name: str,
    container: dict[str, Any] | None = None,
) -> Channel:
    return open_channel(
        shell, lines=lines, python=python, module="isles.check.node", name=name, container=container
    )


def _container(run: CheckedRun) -> dict[str, Any] | None:
    return container_record(run.cluster, run.config, run.cluster.device)


def check_hosts(
    run: CheckedRun, channels: Sequence[Channel], extent: Extent, print_line: PrintLine
) -> list[Finding]:
    """Check hosts and the links between them. For the arguments, see `Hosts`."""
    hosts = Hosts(channels, run, extent, print_line)
    names = hosts.names
    print_line(f"checking {names[0]}" if len(names) == 1 else f"checking {len(names)} hosts")
    port = {"port": run.cluster.network.port}
    hosts.facts = hosts.ask("facts", port, timeout_s=extent.contact_s)()
    if not hosts.facts:
        return hosts.findings
    hosts.findings += duplicates(hosts.facts)
    _count_ranks(hosts)
    # The import of torch takes longest, so it runs during all other queries.
    ranks = hosts.ask(
        "ranks",
        # A node must report a silent rank before the node itself counts as silent.
        lambda name: {**hosts.plan(name), "timeout_s": extent.timeout_s - 2},
        timeout_s=extent.timeout_s,
    )
    gpus = hosts.check("gpus", finding_id="gpu.driver")
    between = hosts.check("topology", finding_id="gpu.links")
    machines = hosts.check("machine")
    files = hosts.check("files", finding_id="files.output")
    repos = hosts.check("huggingface", finding_id="huggingface.access")
    rows = _first_rows(hosts)
    hosts.findings += clock_skew(_clocks(hosts))
    hosts.findings += machines()
    hosts.findings += choose_reach(hosts)
    if extent.net and len(hosts.names) > 1:
        try_links(hosts)
    if extent.net:
        try_hub(hosts)
    hosts.findings += files()
    try_shared(hosts)
    hosts.findings += merge_equal(repos())
    print_line("importing torch and running a kernel on every device")
    answers = ranks()
    hosts.findings += findings_of(answers)
    hosts.findings += rows()
    found = gpus()
    hosts.findings += found
    hosts.findings += between()
    imported = {name: answer["versions"] for name, answer in answers.items()}
    drivers = {f.where: f.measured for f in found if f.id == "gpu.driver" and f.level == "ok"}
    hosts.findings += compare_versions(hosts.facts, imported, drivers, __version__)
    if extent.net:
        try_reduce(hosts)
    hosts.ask("end_ranks", finding_id="host.answers")()
    if extent.smoke:
        print_line("training three steps on each machine separately")
        hosts.findings += hosts.check("smoke", timeout_s=_SMOKE_S, finding_id="train.smoke")()
    return hosts.findings


def _check_login(run: CheckedRun, channel: Channel, extent: Extent) -> list[Finding]:
    # The submitting node: check its versions, and the files that the nodes of the job share. The
    # job has other memory and GPUs.
    hosts = Hosts([channel], run, extent, lambda _: None)
    hosts.facts = hosts.ask("facts", timeout_s=extent.contact_s)()
    if not hosts.facts:
        return hosts.findings
    if run.cluster.environment.container is not None:
        for own in hosts.facts.values():
            own["missing"] = []  # the image has the packages for training
    hosts.nproc = {channel.name: 1}
    files = hosts.check("files", finding_id="files.output")
    repos = hosts.check("huggingface", finding_id="huggingface.access")
    rows = _first_rows(hosts)
    hosts.findings += merge_equal(repos())
    hosts.findings += files()
    hosts.findings += rows()
    if extent.net:
        try_bucket(hosts)
    hosts.findings += compare_versions(hosts.facts, {}, {}, __version__)
    return hosts.findings


def _first_rows(hosts: Hosts) -> Callable[[], list[Finding]]:
    if not hosts.extent.rows:
        return list
    rows = hosts.check("rows", timeout_s=LONGEST_S + QUICK_S, finding_id="data.rows")

    def found() -> list[Finding]:
        # A source that `files.data` has not found has no rows: the same fix is shown once.
        shown = {f.fix for f in hosts.findings if f.id == "files.data" and f.level == "error"}
        return [finding for finding in rows() if finding.fix not in shown]

    return found


def _count_ranks(hosts: Hosts) -> None:
    cluster = hosts.run.cluster
    has_gpus = any(facts["gpus"] for facts in hosts.facts.values())
    if cluster.device == "cuda" or (cluster.device == "auto" and has_gpus):
        hosts.device = "cuda"
    own = {host.ssh: host.gpus for host in cluster.hosts}
    for name, facts in hosts.facts.items():
        if hosts.device == "cpu":
            hosts.nproc[name] = 1  # one process is enough for the check
            continue
        asked = own.get(name) or cluster.gpus_per_node
        there = int(facts["gpus"])
        wanted = asked if isinstance(asked, int) else max(1, there)
        hosts.nproc[name] = max(1, min(wanted, there))
        if there >= wanted:
            continue
        text = (
            f"the run needs {plural(wanted, 'rank')}; the host has {plural(there, 'visible GPU')}"
        )
        fix = "see nvidia-smi there; remove the host, or train on CPUs with clusters.0.device=cpu"
        if there:
            fix = "see nvidia-smi and CUDA_VISIBLE_DEVICES there; remove the host, or set its "
            fix += f"number of GPUs: {{ssh: {name}, gpus: {there}}}"
        count = Finding("gpu.count", "error", name, text, str(there), str(wanted), fix)
        hosts.findings.append(count)


def _clocks(hosts: Hosts) -> dict[str, tuple[float, float]]:
    # As in NTP: compare a clock with the middle of the shortest round trip.
    best: dict[str, tuple[float, float]] = {}
    for _ in range(_CLOCK_ROUNDS):
        for name in hosts.names:
            sent, begin = time.time(), time.monotonic()
            answer = hosts.ask("clock", timeout_s=QUICK_S, only=[name])().get(name)
            trip = time.monotonic() - begin
            if answer is not None and trip < best.get(name, (0.0, float("inf")))[1]:
                best[name] = answer["now"] - (sent + trip / 2), trip
    return best


def merge_equal(findings: Sequence[Finding]) -> list[Finding]:
    """Findings with equal ones of several hosts merged."""
    where: dict[Finding, list[str]] = {}
    for finding in findings:
        where.setdefault(replace(finding, where=""), []).append(finding.where)
    return [replace(finding, where=", ".join(names)) for finding, names in where.items()]
