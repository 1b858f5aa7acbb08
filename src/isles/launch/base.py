"""Options that every launcher takes, and the started run that it returns."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from isles.config.files import data_issues, deepspeed_issues, shape_issues
from isles.config.interop.deepspeed import check_start
from isles.config.load import Loaded
from isles.config.resolve import Resolved, dump_resolved, resolve
from isles.config.sections.model import missing_package
from isles.errors import ConfigError, ConfigErrors
from isles.facts.gpus import lacking
from isles.launch.container.enter import container_record
from isles.launch.gpus import find_gpus
from isles.launch.worker import require_train
from isles.run.env import huggingface_cache
from isles.run.nodes import Fleet, FleetNode
from isles.run.packages import require_packages
from isles.run.paths import Attempt, RunDir
from isles.run.process import ProcessId
from isles.run.remote import RemoteRun

PrintLine = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class StartOptions:
    """Options of one `isles train` command.

    Args:
        resume: `auto`, `no`, or a path; see `isles.run.choose.choose_run`.
        print_line, warn: print lines for the user.
        cluster: name of the cluster to start, if the run file has several; else empty.
        join: a join line, a secret: address and token of the hub for the started cluster. It is
            stored only in the file `join` of the run directory. Empty: a resumed run keeps its own.
        loaded: the run file, if `path` is not a file of this machine; its text is complete, so
            there
            are no overrides.
        typed: the command that resumes the run, as the user types it; empty: unknown.
    """

    path: Path
    overrides: tuple[str, ...]
    resume: str
    dry_run: bool
    print_line: PrintLine
    warn: PrintLine
    cluster: str = ""
    join: str = field(default="", repr=False)
    loaded: Loaded | None = None
    typed: str = ""


@dataclass(frozen=True, slots=True)
class Started:
    """A run that was just started.

    Args:
        process: process that runs it, if it is on this machine.
        remote: location of the run directory, if it is on another machine.
        text: instructions for the user (manual); then nothing is followed.
    """

    run_dir: RunDir
    attempt: Attempt
    process: ProcessId | None
    remote: RemoteRun | None = None
    text: str = ""


def resolve_checked(
    loaded: Loaded,
    *,
    needs_data: bool = True,
    num_gpus: int = 0,
    nproc: Sequence[int] | None = None,
    device: Literal["cuda", "cpu"] | None = None,
) -> Resolved:
    """The values of a run file whose files are on this machine; see `isles.config.resolve.resolve`.

    Args:
        needs_data: also refuse data sources that are missing on this machine.

    Raises:
        ConfigErrors: every issue.
    """
    issues = [*shape_issues(loaded, huggingface_cache()), *deepspeed_issues(loaded)]
    if needs_data:
        issues += data_issues(loaded)
    try:
        resolved = resolve(loaded, num_gpus=num_gpus, nproc=nproc, device=device)
    except ConfigError as error:
        raise ConfigErrors([*issues, error]) from None
    issues += check_cpu(loaded, resolved)
    if issues:
        raise ConfigErrors(issues)
    return resolved


def check_cpu(loaded: Loaded, resolved: Resolved) -> list[ConfigError]:
    """The refusal of a precision that CPUs do not have, if the run found no GPUs."""
    training = resolved.config.training
    lack = lacking(training.precision, None)
    if resolved.device == "cuda" or training.script is not None or lack is None:
        return []
    what = f"precision {training.precision} {lack.what.format('the CPUs of this run')}"
    where = loaded.where("training.precision")
    return [ConfigError(what, where=where, fix=lack.fix, id="gpu.precision")]


def resolve_for_nodes(loaded: Loaded, *, needs_data: bool = True) -> Resolved:
    """`resolve_checked`, with the number of ranks per node from the run file alone."""
    cluster = loaded.config.clusters[0]
    assert isinstance(cluster.gpus_per_node, int), "a config rule guarantees it"
    nproc = (cluster.gpus_per_node,) * cluster.max_nodes
    device: Literal["cuda", "cpu"] = "cpu" if cluster.device == "cpu" else "cuda"
    return resolve_checked(loaded, needs_data=needs_data, nproc=nproc, device=device)


def resolve_here(loaded: Loaded, warn: PrintLine, *, needs_data: bool) -> Resolved:
    """`resolve_checked` for the GPUs of this machine; `warn` prints a warning about them."""
    finding = find_gpus()
    if finding.warning:
        warn(finding.warning)
    return resolve_checked(loaded, needs_data=needs_data, num_gpus=len(finding.gpus))


def check_packages(resolved: Resolved) -> None:
    """Check that ranks of this Python can train the run.

    Raises:
        UserError: a package is missing, or DeepSpeed cannot start on this machine.
    """
    require_train()
    check_start(resolved.config, resolved.world_size)
    require_packages(resolved.config)
    if issue := missing_package(resolved.config.adapter):
        raise issue


def ranks_text(num: int, device: str) -> str:
    """Text for a number of ranks, such as `4 GPUs` or `1 CPU process`."""
    kind, plural = ("GPU", "s") if device == "cuda" else ("CPU process", "es")
    return f"{num} {kind}{plural * (num != 1)}"


def make_fleet(
    resolved: Resolved, nodes: Sequence[FleetNode], *, port: int, resume_from: Path | None = None
) -> Fleet:
    """The record of the nodes of an attempt.

    Args:
        port: port of the coordinator; 0: any free port, or no listener.
        resume_from: a checkpoint that the user chose.
    """
    cluster = resolved.config.clusters[0]
    return Fleet(
        launcher=cluster.launcher.kind,
        nodes=tuple(nodes),
        port=port,
        min_nodes=cluster.min_nodes,
        device=resolved.device,
        start_timeout_s=cluster.start_timeout,
        digest=hashlib.sha256(dump_resolved(resolved).encode()).hexdigest(),
        resume_from=str(resume_from.absolute()) if resume_from else None,
        container=container_record(cluster, resolved.config, resolved.device),
    )


def next_attempt(run_dir: RunDir) -> Attempt:
    """The attempt that a start would create."""
    last = run_dir.last_attempt()
    return run_dir.attempt(last.number + 1 if last else 1)
