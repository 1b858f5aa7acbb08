"""The course of a check over hosts: what is asked when, so that nothing waits needlessly."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from isles import __version__
from isles.check.checks.files import try_shared
from isles.check.checks.links import try_links
from isles.check.checks.machine import clock_skew
from isles.check.checks.network import choose_reach, try_rendezvous
from isles.check.checks.ranks import try_reduce
from isles.check.checks.versions import compare_versions, duplicates
from isles.check.finding import Finding
from isles.check.hosts import QUICK_S, Hosts, findings_of
from isles.check.plan import Extent, RunFacts, Say
from isles.launch.ssh.channel import Channel

_CLOCK_ROUNDS = 5
_SMOKE_S = 220.0


def check_hosts(
    run: RunFacts, channels: Sequence[Channel], extent: Extent, say: Say
) -> list[Finding]:
    """Check hosts, and the links between them.

    Args:
        run: the cluster and its run.
        channels: to its hosts, in their order; the caller closes them.
        extent: how much is checked.
        say: takes a line about what is done now.
    """
    hosts = Hosts(channels, run, extent, say)
    names = hosts.names
    say(f"asking {names[0]}" if len(names) == 1 else f"asking {len(names)} hosts")
    port = {"port": run.cluster.network.port}
    hosts.facts = hosts.ask("facts", port, timeout_s=extent.contact_s)()
    if not hosts.facts:
        return hosts.findings
    hosts.findings += duplicates(hosts.facts)
    _count_ranks(hosts)
    # torch takes longest: it is imported while everything else is asked.
    ranks = hosts.ask(
        "ranks",
        # The node says which rank is silent, before its own silence is taken for an answer.
        lambda name: {**hosts.plan(name), "timeout_s": extent.timeout_s - 2},
        timeout_s=extent.timeout_s,
    )
    gpus = hosts.check("gpus", finding_id="gpu.driver")
    _look(hosts)
    say("importing torch and launching a kernel on every device")
    answers = ranks()
    hosts.findings += findings_of(answers)
    found = gpus()
    hosts.findings += found
    imported = {name: answer["versions"] for name, answer in answers.items()}
    drivers = {f.where: f.measured for f in found if f.id == "gpu.driver" and f.level == "ok"}
    here = __version__ if extent.compare_here else None
    hosts.findings += compare_versions(hosts.facts, imported, drivers, here)
    if extent.net:
        try_reduce(hosts)
    hosts.ask("end_ranks", finding_id="host.answers")()
    if extent.smoke:
        say("training three steps on each machine alone")
        hosts.findings += hosts.check("smoke", timeout_s=_SMOKE_S, finding_id="train.smoke")()
    return hosts.findings


def check_login(run: RunFacts, channel: Channel, extent: Extent) -> list[Finding]:
    """Check the node that submits: its versions, and the files that the job's nodes will see. Its
    memory and GPUs are not those of the job, and are left alone.

    Args:
        run: the cluster and its run.
        channel: to the node; the caller closes it.
        extent: how long answers may take.
    """
    hosts = Hosts([channel], run, extent, lambda _: None)
    hosts.facts = hosts.ask("facts", timeout_s=extent.contact_s)()
    if not hosts.facts:
        return hosts.findings
    hosts.nproc = {channel.name: 1}
    files = hosts.check("files", finding_id="files.output")
    hub = hosts.check("hub", finding_id="hub.access")
    hosts.findings += joined(hub())
    hosts.findings += files()
    hosts.findings += compare_versions(hosts.facts, {}, {}, __version__)
    return hosts.findings


def _look(hosts: Hosts) -> None:
    # Everything that needs no torch.
    machines = hosts.check("machine")
    files = hosts.check("files", finding_id="files.output")
    hub = hosts.check("hub", finding_id="hub.access")
    hosts.findings += clock_skew(_clocks(hosts))
    hosts.findings += machines()
    hosts.findings += choose_reach(hosts)
    if hosts.extent.net and len(hosts.names) > 1:
        try_links(hosts)
    if hosts.extent.net:
        try_rendezvous(hosts)
    hosts.findings += files()
    try_shared(hosts)
    hosts.findings += joined(hub())


def _count_ranks(hosts: Hosts) -> None:
    cluster = hosts.run.cluster
    has_gpus = any(facts["gpus"] for facts in hosts.facts.values())
    if cluster.device == "cuda" or (cluster.device == "auto" and has_gpus):
        hosts.device = "cuda"
    own = {host.ssh: host.gpus for host in cluster.hosts}
    for name, facts in hosts.facts.items():
        if hosts.device == "cpu":
            hosts.nproc[name] = 1  # one process tells as much as many
            continue
        asked = own.get(name) or cluster.gpus_per_node
        there = int(facts["gpus"])
        wanted = asked if isinstance(asked, int) else max(1, there)
        hosts.nproc[name] = max(1, min(wanted, there))
        if there >= wanted:
            continue
        text = f"the run has {wanted} ranks there, and {there} GPUs are visible"
        fix = "see nvidia-smi there; leave the host out; or train on CPUs: clusters.0.device=cpu"
        if there:
            fix = "see nvidia-smi and CUDA_VISIBLE_DEVICES there; leave the host out; or give it a "
            fix += f"number of its own: {{ssh: {name}, gpus: {there}}}"
        count = Finding("gpu.count", "error", name, text, str(there), str(wanted), fix)
        hosts.findings.append(count)


def _clocks(hosts: Hosts) -> dict[str, tuple[float, float]]:
    """As NTP does it: a clock is compared with the middle of the round trip that was shortest."""
    best: dict[str, tuple[float, float]] = {}
    for _ in range(_CLOCK_ROUNDS):
        for name in hosts.names:
            sent, begin = time.time(), time.monotonic()
            answer = hosts.ask("clock", timeout_s=QUICK_S, only=[name])().get(name)
            trip = time.monotonic() - begin
            if answer is not None and trip < best.get(name, (0.0, float("inf")))[1]:
                best[name] = answer["now"] - (sent + trip / 2), trip
    return best


def joined(findings: Sequence[Finding]) -> list[Finding]:
    """Findings that are the same on several hosts as one."""
    where: dict[Finding, list[str]] = {}
    for finding in findings:
        where.setdefault(replace(finding, where=""), []).append(finding.where)
    return [replace(finding, where=", ".join(names)) for finding, names in where.items()]
