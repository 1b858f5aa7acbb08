"""Files: folders of the run, paths of the run file, Hugging Face, and the shared output folder."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from isles.check.finding import Finding, Level
from isles.check.plan import Answers, Hosts, NodePlan
from isles.config.files import data_issues, deepspeed_issues, shape_issues
from isles.config.length import data_of, guessed_issues
from isles.config.load import Loaded
from isles.config.sections.run import RunConfig
from isles.errors import UserError
from isles.facts.units import format_bytes
from isles.launch.huggingface import ask_huggingface, huggingface_issue
from isles.run.env import cache_home, huggingface_cache
from isles.run.records import NO_SPACE, NOT_A_FOLDER, how_to_write, refusal

_LEAST_BYTES = 1 << 30
_LEAST_INODES = 1000
_WELL = {
    "files.script": "the script exists",
    "files.model": "the model and tokenizer exist, or are on Hugging Face",
    "files.data": "the data exists, or is on Hugging Face",
}


def files(plan: NodePlan) -> Iterator[Finding]:
    """Findings on the folders of a run, and on the paths of its run file.

    Raises:
        UserError: isles on this host refuses the run file.
    """
    loaded = None if plan.run is None else _loaded(plan.run)
    if not Path(plan.workdir).expanduser().is_dir():
        yield _no_workdir(plan)
    yield from _folders(plan, loaded.config if loaded is not None else None)
    if loaded is not None:
        yield from _named(plan, loaded)


def _loaded(record: dict[str, Any]) -> Loaded:
    try:
        config = RunConfig.model_validate(record["config"])
    except ValueError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise UserError(
            f"isles on this host refuses the run file: {lines[0][:200] if lines else ''}",
            fix="install the same isles on all hosts: isles setup",
            id="version.isles",
        ) from None
    return Loaded(config, record["origins"], record["text"], Path(record["path"]))


def _no_workdir(plan: NodePlan) -> Finding:
    text = f"working folder {plan.workdir} not found"
    if plan.is_copied:
        text += "; `isles train` creates it (sync)"
        return Finding("files.workdir", "ok", plan.name, text, "absent")
    fix = f"on {plan.name}: mkdir -p {plan.workdir}, or set clusters.0.workdir to another folder"
    if plan.launcher == "ssh":
        fix += ", or let isles copy this folder with clusters.0.sync"
    return Finding("files.workdir", "error", plan.name, text, "absent", fix=fix)


def existing(path: Path) -> Path:
    """The folder, or its nearest existing parent."""
    path = path.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _usable(folder: Path) -> tuple[int, str]:
    # Free bytes, and the reason why the folder is not writable, or an empty text.
    try:
        free = shutil.disk_usage(folder).free
        if not folder.is_dir():
            return 0, NOT_A_FOLDER
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".isles-check-") as stream:
            stream.write(b"x" * 4096)
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        return 0, refusal(error)
    return free, ""


def _folders(plan: NodePlan, config: RunConfig | None) -> Iterator[Finding]:
    # All findings on the output folder, and only bad findings on the caches.
    variables = "clusters.0.environment.variables"
    # Other hosts have only a part of one checkpoint.
    kept = plan.kept_bytes if plan.is_first else 0
    output = Path(plan.output_dir).expanduser().absolute()
    other = "set another output_dir"
    yield from _folder(plan, "the output folder", output, kept, other, config)
    other = f"set XDG_CACHE_HOME in {variables} to a larger disk"
    yield from _folder(plan, "the cache", cache_home(), 0, other)
    if plan.repos:
        # If the size of the model is unknown, do not guess its download.
        other = f"set HF_HOME in {variables} to a larger disk"
        yield from _folder(
            plan, "the Hugging Face cache", huggingface_cache(), 2 * plan.num_params, other
        )


def _folder(
    plan: NodePlan, what: str, path: Path, kept: int, other: str, config: RunConfig | None = None
) -> Iterator[Finding]:
    # `kept`: bytes that the run will write to it; `other`: a fix other than making room.
    path, folder, is_output = path.absolute(), existing(path), what == "the output folder"
    free, failure = _usable(folder)
    where = str(path) if path == folder else f"{path} (to be created in {folder})"
    if failure and failure != NO_SPACE:
        text = f"{what} {where} is not writable: {failure}"
        fix = f"on {plan.name}: {how_to_write(failure, str(folder))}{other}"
        yield Finding("files.output", "error", plan.name, text, failure, fix=fix)
        return
    if is_output and not failure:
        yield Finding("files.output", "ok", plan.name, f"{where} is writable", str(path))
    needed = max(_LEAST_BYTES, kept)
    measured, limit = format_bytes(free), format_bytes(needed)
    if free < needed:
        # A run needs its checkpoints. A cache may already have a part of its files.
        least = kept if is_output else kept // 8
        level: Level = "error" if free < max(least, _LEAST_BYTES // 8) else "warning"
        text = f"{measured} free in {folder}, for {what}"
        if kept and config is not None:
            text += f"; the run's checkpoints ({config.checkpoint.keep} kept, one being written) "
            text += f"{'and export ' * config.checkpoint.export_on_finish}take {format_bytes(kept)}"
        fix = f"on {plan.name}: free some space (du -xh {folder} | sort -h | tail); or {other}"
        fix += ", or a smaller checkpoint.keep" if is_output else ""
        yield Finding("disk.free", level, plan.name, text, measured, limit, fix)
    elif is_output:
        text = f"{measured} free in {folder}"
        yield Finding("disk.free", "ok", plan.name, text, measured, limit)
    if is_output:
        yield _inodes(plan.name, folder)


def _inodes(name: str, folder: Path) -> Finding:
    inodes = os.statvfs(folder)
    free = inodes.f_favail
    text = f"{folder} has room for {free} more files"
    level: Level = "ok"
    fix = ""
    if not inodes.f_files:  # some file systems (btrfs) have no fixed number, and report 0 of 0
        text = "no limit of files"
    elif free < _LEAST_INODES:
        level = "error"
        fix = f"on {name}: delete small files (du --inodes -x / | sort -n | tail)"
    return Finding("disk.inodes", level, name, text, str(free), str(_LEAST_INODES), fix)


def _named(plan: NodePlan, loaded: Loaded) -> Iterator[Finding]:
    # Paths of the run file that this node does not have.
    is_script = loaded.config.training.script is not None
    looked = ["files.script"] if is_script else ["files.model", "files.data"]
    ignored = "" if plan.is_first else "files.data"  # the first host sends prepared data
    bad = {ignored}
    failures = [
        *data_issues(loaded),
        *shape_issues(loaded, huggingface_cache()),
        *deepspeed_issues(loaded),
    ]
    for failure in failures:
        key = failure.where.rpartition(" ")[2]
        finding_id = "files.script" if key.startswith("training.script") else "files.model"
        if key.startswith("data"):
            finding_id = "files.data"
        if finding_id == ignored:
            continue
        bad.add(finding_id)
        level: Level = "error"
        text = f"{failure.where}: {failure.what}"
        if plan.is_copied:
            level, text = "warning", f"{text}, unless `isles train` copies it (sync)"
        yield Finding(finding_id, level, plan.name, text, "absent", fix=failure.fix)
    if plan.is_first and not is_script and "files.data" not in bad:
        for issue in guessed_issues(loaded.config, data_of(loaded.config)):
            bad.add("files.data")
            text = f"{loaded.where(*issue.keys)}: {issue.what} (a guess from the files)"
            yield Finding("files.data", "warning", plan.name, text, fix=issue.fix)
    for finding_id in looked:
        if finding_id not in bad:
            yield Finding(finding_id, "ok", plan.name, _WELL[finding_id])


def huggingface(plan: NodePlan) -> Iterator[Finding]:
    """Findings on access to the repositories of the run file on Hugging Face."""
    for row in ask_huggingface(plan.repos):
        what, state = f"{row['kind']} {row['name']}", row["state"]
        if state == "ok":
            yield Finding("huggingface.access", "ok", plan.name, f"{what} is readable", "ok")
        elif state == "cached":
            text = f"{what} is in the cache; Hugging Face was not queried ({row['answer']})"
            yield Finding("huggingface.access", "ok", plan.name, text, "cached")
        else:
            finding_id, text, fix = huggingface_issue(row)
            level: Level = "warning" if state == "unknown" else "error"
            yield Finding(finding_id, level, plan.name, text, state, fix=fix)


def try_shared(hosts: Hosts) -> None:
    """Check whether the hosts share the output folder: the first host writes, the others read."""
    if len(hosts.names) < 2:
        return
    first, *rest = hosts.names
    asked = {"output_dir": hosts.run.output_dir}
    left = hosts.ask("probe_write", asked, only=[first], finding_id="files.output")()
    probe = left.get(first)
    if not probe or not probe["path"]:
        return
    seen = hosts.ask("probe_read", probe, only=rest, finding_id="files.shared")()
    hosts.findings += shared_findings(first, seen)
    hosts.ask("probe_remove", {"path": probe["path"]}, only=[first], finding_id="files.output")()


def shared_findings(first: str, seen: Answers) -> list[Finding]:
    """Findings on the output folder. `seen`: answers of `probe_read` from the other hosts."""
    shared = [name for name, answer in seen.items() if answer["is_shared"]]
    own = [name for name, answer in seen.items() if not answer["is_shared"]]
    if not seen:
        return []
    if not own:
        text = "all hosts share the file system of the output folder"
        return [Finding("files.shared", "ok", "all hosts", text, "shared")]
    if not shared:
        text = "each host has a separate output folder: checkpoints are copied to "
        text += f"{first}, which has the run directory"
        return [Finding("files.shared", "ok", "all hosts", text, "not shared")]
    there, lacks = ", ".join(shared), ", ".join(own)
    text = (
        f"{there} can see the output folder of {first}, and {lacks} cannot: a mount may be missing"
    )
    fix = f"on {own[0]}: mount it (findmnt -T on {shared[0]} shows its source), or continue: "
    fix += "isles copies checkpoints if needed"
    limit = "as on other hosts"
    return [Finding("files.shared", "warning", lacks, text, "not shared", limit, fix)]


def probe_write(output_dir: str) -> dict[str, str]:
    """Write a file with a random name where the run directory will be. Returns its path and
    content, or empty texts if it is not writable."""
    word = os.urandom(8).hex()
    path = existing(Path(output_dir).expanduser()) / f".isles-check-{word}"
    try:
        path.write_text(word, encoding="ascii")
    except OSError:
        path.unlink(missing_ok=True)
        return {"path": "", "word": ""}  # `files` reports why
    return {"path": str(path.absolute()), "word": word}


def probe_read(path: str, word: str) -> dict[str, bool]:
    try:
        return {"is_shared": Path(path).read_text(encoding="ascii") == word}
    except OSError:
        return {"is_shared": False}


def probe_remove(path: str) -> dict[str, bool]:
    if Path(path).name.startswith(".isles-check-"):
        Path(path).unlink(missing_ok=True)
    return {}
