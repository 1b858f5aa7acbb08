"""What every launcher is given, and what it gives back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from isles.config.files import data_faults, deepspeed_faults, shape_faults
from isles.config.load import Loaded
from isles.config.resolve import Resolved, resolve
from isles.errors import ConfigError, ConfigErrors
from isles.launch.gpus import find_gpus
from isles.run.env import hub_cache
from isles.run.nodes import Fleet
from isles.run.paths import Attempt, RunDir
from isles.run.process import ProcessId
from isles.run.remote import RemoteRun

Say = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class Job:
    """One start of a run, ready to be launched.

    Args:
        run_dir: the run directory.
        attempt: the folder of this start.
        world_size: number of ranks.
        device: cpu or cuda.
        command: the command line that runs until the ranks have ended.
        resumed_from: the checkpoint that was asked for by name.
        variables: of the environment, that the run file sets.
        fleet: its nodes, for the agents; None: the command needs none.
    """

    run_dir: RunDir
    attempt: Attempt
    world_size: int
    device: str
    command: tuple[str, ...]
    resumed_from: Path | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    fleet: Fleet | None = None


@dataclass(frozen=True, slots=True)
class StartOptions:
    """How `isles train` was typed.

    Args:
        path: the run file.
        overrides: as `key.path=value`.
        resume: `auto`, `no`, or a path; see `isles.run.begin.choose_run`.
        dry_run: only say what would be done.
        say, warn: take lines for the user.
        cluster: of several in the run file, the one that is started; empty: there is one.
        join: a join line, a secret: how the started cluster reaches the others. It lies in the file
            `join` of the run directory, and nowhere else. Empty: a run that goes on keeps its own.
        loaded: the run file of `path` where it is no file of this machine; its text says
            everything, so that there are no overrides.
        typed: the command that goes on with the run, as the user types it; empty: not known.
    """

    path: Path
    overrides: tuple[str, ...]
    resume: str
    dry_run: bool
    say: Say
    warn: Say
    cluster: str = ""
    join: str = field(default="", repr=False)
    loaded: Loaded | None = None
    typed: str = ""


@dataclass(frozen=True, slots=True)
class Started:
    """A run that was just started.

    Args:
        run_dir: its directory, as the machine sees it that has it.
        attempt: this start of it.
        process: who runs it, where that is a process of this machine.
        remote: where the run directory is, if not here.
        text: what the user must do now (manual); nothing is followed then.
    """

    run_dir: RunDir
    attempt: Attempt
    process: ProcessId | None
    remote: RemoteRun | None = None
    text: str = ""


def settle_here(loaded: Loaded, warn: Say, *, needs_data: bool) -> tuple[Loaded, Resolved]:
    """A run file, and its values for the GPUs of this machine.

    Args:
        loaded: the run file.
        warn: takes a warning about the GPUs.
        needs_data: also refuse sources that are not here.

    Raises:
        ConfigErrors: every fault in it.
    """
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
