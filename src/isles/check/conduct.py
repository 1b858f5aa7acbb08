"""The course of a check over hosts: what is asked when, so that nothing waits needlessly."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from isles import __version__
from isles.check.course import QUICK_S, Course, Extent, Say
from isles.check.finding import Finding
from isles.check.judge.files import judge_files, judge_hub, judge_shared
from isles.check.judge.gpus import judge_gpus, judge_ranks
from isles.check.judge.machine import judge_clocks, judge_machines
from isles.check.judge.network import judge_interfaces
from isles.check.judge.versions import judge_duplicates, judge_versions
from isles.check.links import try_links, try_reduce
from isles.check.meeting import try_rendezvous
from isles.check.panel import Asked, Panel, Place
from isles.check.subject import Subject
from isles.errors import PreflightError
from isles.launch.ssh.addresses import Reach, choose_addresses

_CLOCK_ROUNDS = 5
_SMOKE_S = 180.0


def check_hosts(
    subject: Subject, places: Sequence[Place], extent: Extent, say: Say
) -> list[Finding]:
    """Check hosts, and the links between them.

    Args:
        subject: the cluster and its run.
        places: conversations with its hosts, in their order; the caller closes them.
        extent: how much is checked.
        say: takes a line about what is done now.
    """
    course = Course(subject, Panel(list(places), []), extent, say)
    panel = course.panel
    say(f"asking {_hosts(places)}")
    port = subject.cluster.network.port
    course.facts = panel.ask(
        "facts", lambda _: {"port": port}, timeout_s=extent.contact_s
    ).answers()
    if not course.facts:
        return panel.findings
    panel.findings += judge_duplicates(course.facts)
    _settle(course)
    # torch takes longest: it is imported while everything else is asked.
    ranks = _ask_ranks(course)
    gpus = panel.ask("gpus", timeout_s=extent.timeout_s)
    _look(course)
    say("importing torch and launching a kernel on every device")
    found = ranks.answers()
    panel.findings += judge_ranks(found, course.device)
    cards = gpus.answers("gpu.driver")
    panel.findings += judge_gpus(cards, course.nproc, course.device)
    here = __version__ if extent.compare_here else None
    panel.findings += judge_versions(course.facts, found, cards, here)
    if extent.net:
        try_reduce(course)
    panel.ask("end_ranks", timeout_s=QUICK_S).answers("host.answers")
    if extent.smoke:
        _smoke(course)
    return panel.findings


def _ask_ranks(course: Course) -> Asked:
    timeout_s = course.extent.timeout_s
    return course.panel.ask(
        "ranks",
        lambda name: {
            "device": course.device,
            "nproc": course.nproc[name],
            # The node says which rank is silent, before its own silence is taken for an answer.
            "timeout_s": timeout_s - 2,
        },
        timeout_s=timeout_s,
    )


def _look(course: Course) -> None:
    """Everything that needs no torch: machines, clocks, links, files, the hub."""
    panel, subject, timeout_s = course.panel, course.subject, course.extent.timeout_s
    machines = panel.ask("machine", timeout_s=timeout_s)
    files = panel.ask("files", lambda _: files_args(subject), timeout_s=timeout_s)
    repos = subject.hub_repos()
    hub = panel.ask("hub", lambda _: {"repos": repos}, timeout_s=timeout_s) if repos else None
    panel.findings += _clocks(course)
    course.machines = machines.answers()
    panel.findings += judge_machines(subject, course.machines, course.facts, course.nproc)
    _choose(course)
    if course.extent.net and len(panel.places) > 1:
        course.say("trying every link")
        try_links(course)
    if course.extent.net:
        try_rendezvous(course)
    answered = files.answers("files.output")
    panel.findings += judge_files(subject, answered, panel.names)
    _shared(course)
    if hub is not None:
        panel.findings += judge_hub(hub.answers("hub.access"))


def _settle(course: Course) -> None:
    """What the ranks compute on, and how many each host has."""
    cluster = course.subject.cluster
    has_gpus = any(facts["gpus"] for facts in course.facts.values())
    if cluster.device == "cuda" or (cluster.device == "auto" and has_gpus):
        course.device = "cuda"
    own = {host.ssh: host.gpus for host in cluster.hosts}
    for name, facts in course.facts.items():
        if course.device == "cpu":
            course.nproc[name] = 1  # one process tells as much as many
            continue
        asked = own.get(name) or cluster.gpus_per_node
        there = int(facts["gpus"])
        wanted = asked if isinstance(asked, int) else max(1, there)
        if (isinstance(asked, int) and there < asked) or not there:
            course.panel.findings.append(_too_few(name, wanted, there))
        course.nproc[name] = max(1, min(wanted, there))


def _too_few(name: str, wanted: int, there: int) -> Finding:
    return Finding(
        "gpu.count",
        "error",
        name,
        f"the run has {wanted} ranks there, and {there} GPUs are visible",
        measured=str(there),
        limit=str(wanted),
        fix="see nvidia-smi and CUDA_VISIBLE_DEVICES there; leave the host out; or give it a "
        f"number of its own: {{ssh: {name}, gpus: {there}}}"
        if there
        else "see nvidia-smi there; leave the host out; or train on CPUs: clusters.0.device=cpu",
    )


def files_args(subject: Subject) -> dict[str, Any]:
    """What the question `files` takes."""
    return {
        "workdir": subject.workdir,
        "output_dir": subject.output_dir,
        "loaded": subject.record(),
    }


def _clocks(course: Course) -> list[Finding]:
    """As NTP does it: a clock is compared with the middle of the round trip that was shortest."""
    best: dict[str, tuple[float, float]] = {}
    for _ in range(_CLOCK_ROUNDS):
        for name in course.panel.names:
            sent, begin = time.time(), time.monotonic()
            answer = course.panel.ask("clock", timeout_s=QUICK_S, only=[name]).answers()
            trip = time.monotonic() - begin
            if name in answer and trip < best.get(name, (0.0, float("inf")))[1]:
                best[name] = answer[name]["now"] - (sent + trip / 2), trip
    return judge_clocks(best)


def _choose(course: Course) -> None:
    """The addresses that the ranks would use."""
    names, cluster = course.panel.names, course.subject.cluster
    given = {host.ssh: host.address for host in cluster.hosts}
    if len(course.facts) == 1:
        course.reach = {name: Reach("127.0.0.1", None, None) for name in names}
        return
    try:
        found = choose_addresses(
            names,
            [course.facts[name] for name in names],
            [given.get(name) for name in names],
            cluster.network,
        )
    except PreflightError as error:
        course.panel.findings.append(
            Finding("net.interface", "error", error.where, error.what, fix=error.fix)
        )
        return
    course.reach = dict(zip(names, found, strict=True))
    course.panel.findings += judge_interfaces(course.reach, course.machines, cluster.network)


def _shared(course: Course) -> None:
    """Whether what one host writes into the output folder is seen by the others."""
    panel, folder = course.panel, {"output_dir": course.subject.output_dir}
    if len(panel.places) < 2:
        return
    head, *rest = panel.names
    left = panel.ask("probe_write", lambda _: folder, timeout_s=QUICK_S, only=[head])
    probe = left.answers("files.output").get(head)
    if not probe or not probe["path"]:
        return
    seen = panel.ask("probe_read", lambda _: probe, timeout_s=QUICK_S, only=rest)
    panel.findings += judge_shared(head, seen.answers("files.shared"))
    panel.ask("probe_remove", lambda _: probe, timeout_s=QUICK_S, only=[head]).answers(
        "files.output"
    )


def _smoke(course: Course) -> None:
    course.say("training three steps on each machine alone")
    answers = course.panel.ask(
        "smoke",
        lambda name: {"nproc": course.nproc[name], "timeout_s": _SMOKE_S},
        timeout_s=_SMOKE_S + 40,
    ).answers("train.smoke")
    for name, answer in answers.items():
        is_well = not answer["fault"]
        course.panel.findings.append(
            Finding(
                "train.smoke",
                "ok" if is_well else "error",
                name,
                "three steps trained"
                if is_well
                else f"a training of three steps {answer['fault']}:\n{answer['said']}",
                measured=f"{answer['seconds']:.1f} s",
                fix="" if is_well else "the lines above say why; isles train there shows more",
            )
        )


def _hosts(places: Sequence[Place]) -> str:
    return places[0].name if len(places) == 1 else f"{len(places)} hosts"
