"""Starting a run on this machine: from the run file to a recorded process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from isles.config.load import Loaded, load_run_file
from isles.config.resolve import Resolved, resolve
from isles.launch.gpus import find_gpus
from isles.launch.local import LocalLauncher, local_job
from isles.rundir.begin import begin_run, choose_run, new_attempt
from isles.rundir.paths import Attempt, RunDir
from isles.rundir.process import ProcessId

Say = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class Started:
    """A run that was just started."""

    run_dir: RunDir
    attempt: Attempt
    process: ProcessId


def read_run_file(path: Path, overrides: Sequence[str], warn: Say) -> tuple[Loaded, Resolved]:
    """A run file, and its values for the GPUs of this machine.

    Args:
        path: the run file.
        overrides: as `key.path=value`.
        warn: takes a warning about the GPUs.

    Raises:
        ConfigErrors: every fault in it.
    """
    loaded = load_run_file(path, overrides)
    finding = find_gpus()
    if finding.warning:
        warn(finding.warning)
    return loaded, resolve(loaded, num_gpus=len(finding.gpus))


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
    )
    process = LocalLauncher().submit(job)
    say(f"started {run_dir.name}: {_ranks_text(resolved)}, in {run_dir.path}")
    return Started(run_dir, attempt, process)


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
    )
    note = begun.note or f"this would be a new run: {begun.run_dir.name}"
    command = LocalLauncher().render(job)
    head = f"{_ranks_text(resolved)}; the command that would start them:"
    return f"{show(resolved).rstrip()}\n\n{note}\n{head}\n\n{command}"


def _ranks_text(resolved: Resolved) -> str:
    kind, plural = (
        ("GPU", "GPUs") if resolved.device == "cuda" else ("CPU process", "CPU processes")
    )
    return f"{resolved.world_size} {kind if resolved.world_size == 1 else plural}"
