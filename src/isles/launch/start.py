"""Starting a run on this machine: from the run file to a recorded process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from isles.config.adapter import missing_package
from isles.config.deepspeed_rules import check_start
from isles.config.files import data_faults, deepspeed_faults, shape_faults
from isles.config.load import Loaded, load_run_file
from isles.config.resolve import Resolved, resolve
from isles.errors import ConfigError, ConfigErrors
from isles.launch.gpus import find_gpus
from isles.launch.local import LocalLauncher, local_job
from isles.rundir.begin import begin_run, choose_run, new_attempt
from isles.rundir.env import hub_cache
from isles.rundir.find import numbered_runs
from isles.rundir.nodes import living_nodes, read_meeting, start_node
from isles.rundir.paths import Attempt, RunDir
from isles.rundir.process import ProcessId
from isles.rundir.state import attempt_state
from isles.rundir.trackers import require_trackers

Say = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class Started:
    """A run that was just started."""

    run_dir: RunDir
    attempt: Attempt
    process: ProcessId


def read_run_file(
    path: Path, overrides: Sequence[str], warn: Say, *, needs_data: bool = False
) -> tuple[Loaded, Resolved]:
    """A run file, and its values for the GPUs of this machine.

    Args:
        path: the run file.
        overrides: as `key.path=value`.
        warn: takes a warning about the GPUs.
        needs_data: also refuse sources that are not here.

    Raises:
        ConfigErrors: every fault in it.
    """
    loaded = load_run_file(path, overrides)
    finding = find_gpus()
    if finding.warning:
        warn(finding.warning)
    faults = [*shape_faults(loaded, hub_cache()), *deepspeed_faults(loaded)]
    if needs_data:
        faults += data_faults(loaded)
    try:
        resolved = resolve(loaded, num_gpus=len(finding.gpus))
    except ConfigError as error:
        raise ConfigErrors([*faults, error]) from None
    if faults:
        raise ConfigErrors(faults)
    return loaded, resolved


def start_run(loaded: Loaded, resolved: Resolved, *, resume: str, say: Say) -> Started:
    """Make or choose the run directory, and start the ranks.

    Args:
        loaded: the run file.
        resolved: its values.
        resume: `auto`, `no`, or a path; see `isles.rundir.begin.choose_run`.
        say: takes lines for the user.

    Raises:
        UserError: the run cannot be begun, or the machine cannot start it.
    """
    check_start(resolved.config, resolved.world_size)
    require_trackers(resolved.config)
    if fault := missing_package(resolved.config.adapter):
        raise fault
    joined = _join_running(resolved, resume, say)
    if joined is not None:
        return joined
    begun = begin_run(resolved, loaded.text, resume)
    if begun.note:
        say(begun.note)
    run_dir = begun.run_dir
    attempt = new_attempt(run_dir, loaded.text)
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
    meeting = read_meeting(attempt) if attempt is not None else None
    if run_dir is None or attempt is None or meeting is None:
        return None
    state = attempt_state(run_dir, attempt)
    there = living_nodes(attempt, meeting.max_nodes)
    missing = [node for node in range(meeting.max_nodes) if node not in there]
    if state.state != "running" or state.process is None or not state.is_here or not missing:
        return None
    for node in missing:
        start_node(run_dir, attempt, node)
    names = ", ".join(str(node) for node in missing)
    say(
        f"{run_dir.name} is running with {len(there)} of {meeting.max_nodes} nodes: "
        f"bringing back node {names}"
    )
    return Started(run_dir, attempt, state.process)


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
