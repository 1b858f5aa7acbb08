"""What is found of files: folders, the run file's model and data, the hub."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from isles.check.finding import Finding, Level
from isles.check.panel import Answers
from isles.check.subject import Subject
from isles.config.sections.cluster import SshLauncherConfig
from isles.facts.units import format_bytes
from isles.launch.hub import hub_fault
from isles.run.refusals import how_to_write

_LEAST_BYTES = 1 << 30
_LEAST_INODES = 1000


def judge_files(subject: Subject, answers: Answers, names: Sequence[str]) -> list[Finding]:
    """Findings of every host's folders, and of what the run file names.

    Args:
        subject: what is checked.
        answers: of `isles.check.node.files.files`.
        names: hosts in their order; the first keeps the run directory.
    """
    findings: list[Finding] = []
    for name, own in answers.items():
        is_head = bool(names) and name == names[0]
        if not own["workdir_is_there"]:
            findings.append(_no_workdir(subject, name))
        findings += _output(subject, name, own["output"], is_head=is_head)
        findings += _caches(subject, name, own)
        findings += _named(subject, name, own["faults"], is_head=is_head)
    return findings


def _no_workdir(subject: Subject, name: str) -> Finding:
    copies = subject.cluster.sync is not None
    fix = f"on {name}: mkdir -p {subject.workdir}; or name another in clusters.workdir"
    if isinstance(subject.cluster.launcher, SshLauncherConfig):
        fix += ", or let isles copy this one: clusters.sync"
    return Finding(
        "files.workdir",
        "ok" if copies else "error",
        name,
        f"there is no folder {subject.workdir}, in which the ranks are to run"
        + ("; `isles train` makes it: sync" if copies else ""),
        measured="absent",
        fix="" if copies else fix,
    )


def _output(
    subject: Subject, name: str, folder: dict[str, Any], *, is_head: bool
) -> Iterator[Finding]:
    where = f"{folder['path']}" + (
        "" if folder["path"] == folder["existing"] else f" (to be made in {folder['existing']})"
    )
    fault = folder["fault"]
    if fault and "no space" not in fault:
        yield Finding(
            "files.output",
            "error",
            name,
            f"the output folder {where} cannot be written: {fault}",
            measured=fault,
            fix=f"on {name}: {how_to_write(fault, folder['existing'])}set another output_dir",
        )
        return
    if not fault:
        yield Finding("files.output", "ok", name, f"{where} can be written", folder["path"])
    yield from _space(subject, name, folder, is_head=is_head)


def _space(
    subject: Subject, name: str, folder: dict[str, Any], *, is_head: bool
) -> Iterator[Finding]:
    if "free" not in folder:
        return
    kept = (subject.checkpoint_bytes() or 0) if is_head else 0
    # Other hosts hold a part of one checkpoint at a time.
    needed = max(_LEAST_BYTES, kept)
    free = 0 if folder["fault"] else int(folder["free"])
    level: Level = "ok"
    if free < needed:
        level = "error" if free < max(kept, _LEAST_BYTES // 8) else "warning"
    what = f"{format_bytes(free)} free in {folder['existing']}"
    if kept and level != "ok" and subject.config is not None:
        keep = subject.config.checkpoint.keep
        what += f"; the run's checkpoints ({keep} and one on its way) take {format_bytes(needed)}"
    yield Finding(
        "disk.free",
        level,
        name,
        what,
        measured=format_bytes(free),
        limit=format_bytes(needed),
        fix=""
        if level == "ok"
        else f"on {name}: make room (du -xh {folder['existing']} | sort -h | tail); or another "
        "output_dir, or a smaller checkpoint.keep",
    )
    yield from _inodes(name, folder)


def _inodes(name: str, folder: dict[str, Any]) -> Iterator[Finding]:
    # Some file systems (btrfs) have no fixed number, and say 0 of 0.
    total, free = int(folder["total_inodes"]), int(folder["free_inodes"])
    is_ok = not total or free >= _LEAST_INODES
    yield Finding(
        "disk.inodes",
        "ok" if is_ok else "error",
        name,
        f"{free} more files can be made in {folder['existing']}" if total else "no limit of files",
        measured=str(free),
        limit=str(_LEAST_INODES),
        fix="" if is_ok else f"on {name}: delete small files (du --inodes -x / | sort -n | tail)",
    )


def _caches(subject: Subject, name: str, own: dict[str, Any]) -> Iterator[Finding]:
    """Where prepared data and downloads go."""
    wanted = {"the cache": (own["cache"], _LEAST_BYTES)}
    if subject.hub_repos():
        # The download of a model whose size is not known here is not guessed.
        wanted["the hub's cache"] = (
            own["hub_cache"],
            max(_LEAST_BYTES, 2 * (subject.num_params or 0)),
        )
    for what, (folder, needed) in wanted.items():
        fault = folder["fault"]
        if fault and "no space" not in fault:
            yield Finding(
                "files.output",
                "error",
                name,
                f"{what} {folder['path']} cannot be written: {fault}",
                measured=fault,
                fix=f"on {name}: {how_to_write(fault, folder['existing'])}set XDG_CACHE_HOME in "
                "clusters[0].environment.variables",
            )
        elif fault or int(folder.get("free", 0)) < needed:
            free = 0 if fault else int(folder["free"])
            yield Finding(
                "disk.free",
                "error" if free < needed // 8 else "warning",
                name,
                f"{format_bytes(free)} free in {folder['existing']}, for {what}",
                measured=format_bytes(free),
                limit=format_bytes(needed),
                fix=f"on {name}: make room, or set XDG_CACHE_HOME (HF_HOME for the hub's) in "
                "clusters[0].environment.variables to a larger disk",
            )


def _named(
    subject: Subject, name: str, faults: list[dict[str, str]], *, is_head: bool
) -> Iterator[Finding]:
    """What the run file names and this host does not have."""
    if subject.loaded is None:
        return
    bad = set()
    for fault in faults:
        key = fault["where"].rpartition(" ")[2]
        finding_id, text = _id_of(key), f"{fault['where']}: {fault['what']}"
        if finding_id == "files.data" and not is_head:
            continue  # prepared data travels from the first host
        bad.add(finding_id)
        level: Level = "error"
        if subject.cluster.sync is not None:
            level, text = "warning", f"{text}; unless `isles train` copies it: sync"
        yield Finding(finding_id, level, name, text, measured="absent", fix=fault["fix"])
    looked = ["files.script"] if subject.has_script else ["files.model", "files.data"]
    for finding_id in looked:
        if finding_id not in bad and (is_head or finding_id != "files.data"):
            yield Finding(finding_id, "ok", name, _WELL[finding_id])


_WELL = {
    "files.script": "the script is there",
    "files.model": "the model and tokenizer are there, or on the hub",
    "files.data": "the data is there, or on the hub",
}


def _id_of(key: str) -> str:
    if key.startswith("data"):
        return "files.data"
    return "files.script" if key.startswith("training.script") else "files.model"


def judge_shared(head: str, seen: Answers) -> list[Finding]:
    """Whether the others see the first host's output folder."""
    shared = [name for name, answer in seen.items() if answer["is_shared"]]
    own = [name for name, answer in seen.items() if not answer["is_shared"]]
    if not seen:
        return []
    if not own:
        text = "the output folder is one file system, which all hosts see"
        return [Finding("files.shared", "ok", "all hosts", text, "shared")]
    if not shared:
        text = (
            f"each host has an output folder of its own: checkpoints travel to {head}, which keeps "
            "the run directory"
        )
        return [Finding("files.shared", "ok", "all hosts", text, "not shared")]
    return [
        Finding(
            "files.shared",
            "warning",
            ", ".join(own),
            f"the output folder of {head} is seen by {', '.join(shared)} and not by "
            f"{', '.join(own)}: is a mount missing?",
            measured="not shared",
            limit="as on the others",
            fix=f"on {own[0]}: mount it (findmnt -T on {shared[0]} shows what), or go on: "
            "checkpoints travel where they must",
        )
    ]


def judge_hub(answers: Answers) -> list[Finding]:
    """What the hub says; of all hosts together where they agree."""
    findings: dict[tuple[str, ...], list[str]] = {}
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    for name, answer in answers.items():
        for row in answer["answers"]:
            key = (row["kind"], row["name"], row["state"])
            findings.setdefault(key, []).append(name)
            rows[key] = row
    return [_hub(", ".join(names), rows[key]) for key, names in findings.items()]


def _hub(where: str, row: dict[str, str]) -> Finding:
    what, said = f"{row['kind']} {row['name']}", row["said"]
    if row["state"] == "ok":
        return Finding("hub.access", "ok", where, f"{what} can be read", "ok")
    if row["state"] == "cached":
        text = f"{what} is here from before; the hub was not asked: {said}"
        return Finding("hub.access", "ok", where, text, "cached")
    finding_id, text, fix = hub_fault(row)
    level: Level = "warning" if row["state"] == "unknown" else "error"
    return Finding(finding_id, level, where, text, row["state"], fix=fix)
