"""Starting a run: by which launcher; and, on this machine, up to a recorded process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import assert_never

from isles.config.clusters import named_cluster
from isles.config.interop.deepspeed import check_start
from isles.config.load import Loaded, load_run_file
from isles.config.resolve import Resolved
from isles.config.sections.cluster import (
    LocalLauncherConfig,
    ManualLauncherConfig,
    PbsLauncherConfig,
    SlurmLauncherConfig,
    SshLauncherConfig,
)
from isles.config.sections.model import missing_package
from isles.errors import ConfigError, ConfigErrors
from isles.launch.base import Say, Started, StartOptions, settle_here
from isles.launch.huggingface import hub_faults
from isles.launch.local import LocalLauncher, local_job, place_here
from isles.launch.manual import start_manual
from isles.launch.pbs.start import start_pbs
from isles.launch.slurm.start import start_slurm
from isles.launch.ssh.start import start_ssh
from isles.launch.worker import require_train
from isles.run.begin import begin_run, choose_run, new_attempt, require_packages
from isles.run.find import numbered_runs
from isles.run.nodes import read_fleet
from isles.run.paths import Attempt
from isles.run.process import ProcessId
from isles.run.records import read_record
from isles.run.state import attempt_state


def start(options: StartOptions) -> Started | Loaded | str:
    """Start a run by the launcher of its run file.

    Returns:
        The started run; in a dry run the text to print. Of several clusters nothing is started:
        the run file, for `isles.monitor.multi_cluster`.

    Raises:
        ConfigErrors: every fault in the run file.
        UserError: the run cannot be begun or started.
    """
    loaded = options.loaded or load_run_file(options.path, options.overrides)
    if options.cluster:
        loaded = named_cluster(loaded, options.cluster)
        options = replace(options, overrides=())  # they are in its text
    elif len(loaded.config.clusters) > 1:
        return loaded
    if options.join and loaded.config.diloco is None:
        raise ConfigError(
            "a join line is given, and this run averages with no other cluster",
            where=loaded.where("outer.kind"),
            fix="set outer: {kind: diloco}, or start it without a join line",
        )
    return _start_one(loaded, options)


def _start_one(loaded: Loaded, options: StartOptions) -> Started | str:
    match loaded.config.clusters[0].launcher:
        case LocalLauncherConfig():
            loaded, resolved = settle_here(loaded, options.warn, needs_data=True)
            if options.dry_run:
                return dry_run_text(resolved, options.resume)
            require_train()
            return start_run(
                loaded,
                resolved,
                resume=options.resume,
                say=options.say,
                join=options.join,
                typed=options.typed,
            )
        case SshLauncherConfig() as launcher:
            return start_ssh(loaded, launcher, options)
        case SlurmLauncherConfig() as launcher:
            return start_slurm(loaded, launcher, options)
        case PbsLauncherConfig() as launcher:
            return start_pbs(loaded, launcher, options)
        case ManualLauncherConfig() as launcher:
            return start_manual(loaded, launcher, options)
        case launcher:
            assert_never(launcher)


def start_run(
    loaded: Loaded,
    resolved: Resolved,
    *,
    resume: str,
    say: Say,
    join: str = "",
    typed: str = "",
) -> Started:
    """Make or choose the run directory, and start the ranks on this machine.

    Args:
        loaded: the run file.
        resolved: its values.
        resume: `auto`, `no`, or a path; see `isles.run.begin.choose_run`.
        say: takes lines for the user.
        join, typed: see `StartOptions`.

    Raises:
        UserError: the run cannot be begun, or the machine cannot start it.
    """
    check_start(resolved.config, resolved.world_size)
    require_packages(resolved.config)
    if fault := missing_package(resolved.config.adapter):
        raise fault
    joined = _join_running(resolved, resume, say)
    if joined is not None:
        return joined
    if faults := hub_faults(loaded):
        raise ConfigErrors(faults)
    begun = begin_run(resolved, loaded.text, resume, join=join)
    if begun.note:
        say(begun.note)
    run_dir = begun.run_dir
    attempt = new_attempt(run_dir, loaded.text, typed=typed)
    job = local_job(
        run_dir,
        attempt,
        world_size=resolved.world_size,
        device=resolved.device,
        resumed_from=begun.resume_from,
        cluster=resolved.config.clusters[0],
    )
    process = LocalLauncher().submit(job)
    say(f"started {run_dir.name}: {_ranks_text(resolved)}, in {run_dir.path}")
    return Started(run_dir, attempt, process)


def _join_running(resolved: Resolved, resume: str, say: Say) -> Started | None:
    """Bring the missing nodes back to a run that is on its way with fewer than it may have."""
    if resume != "auto" or resolved.config.clusters[0].max_nodes == 1:
        return None
    runs = numbered_runs(Path(resolved.config.output_dir).expanduser(), resolved.config.name)
    run_dir = next((run for _, run in reversed(runs) if run.attempts()), None)
    attempt = run_dir.last_attempt() if run_dir is not None else None
    if run_dir is None or attempt is None:
        return None
    fleet, state = read_fleet(attempt), attempt_state(run_dir, attempt)
    if fleet is None or state.state != "running" or state.process is None or not state.is_here:
        return None
    there = [node.node for node in fleet.nodes if _has_agent(attempt, node.node)]
    missing = [node.node for node in fleet.nodes if node.node not in there]
    if not missing or fleet.launcher != "local":
        return None
    for node in missing:
        place_here(run_dir, attempt, fleet, node)
    names = ", ".join(str(node) for node in missing)
    say(
        f"{run_dir.name} is running with {len(there)} of {len(fleet.nodes)} nodes: "
        f"bringing back node {names}"
    )
    return Started(run_dir, attempt, state.process)


def _has_agent(attempt: Attempt, node: int) -> bool:
    process = ProcessId.from_record(read_record(attempt.node_record(node)) or {})
    return process is not None and process.is_alive()


def dry_run_text(resolved: Resolved, resume: str) -> str:
    """What `start_run` would do, without doing it.

    Raises:
        UserError: the run cannot be begun.
    """
    from isles.config.show import show

    begun = choose_run(resolved, resume)
    last = begun.run_dir.last_attempt()
    job = local_job(
        begun.run_dir,
        begun.run_dir.attempt(last.number + 1 if last else 1),
        world_size=resolved.world_size,
        device=resolved.device,
        resumed_from=begun.resume_from,
        cluster=resolved.config.clusters[0],
    )
    note = begun.note or f"this would be a new run: {begun.run_dir.name}"
    command = LocalLauncher().render(job)
    head = f"{_ranks_text(resolved)}; the command that would start them:"
    return f"{show(resolved).rstrip()}\n\n{note}\n{head}\n\n{command}"


def _ranks_text(resolved: Resolved) -> str:
    kind, plural = (
        ("GPU", "GPUs") if resolved.device == "cuda" else ("CPU process", "CPU processes")
    )
    nodes = resolved.config.clusters[0].max_nodes
    end = f" on {nodes} nodes" if nodes > 1 else ""
    return f"{resolved.world_size} {kind if resolved.world_size == 1 else plural}{end}"
