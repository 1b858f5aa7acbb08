"""What Slurm and PBS have in common before a job is submitted."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Literal

from isles.config.files import data_faults, deepspeed_faults, shape_faults
from isles.config.interop.deepspeed import check_start
from isles.config.load import Loaded
from isles.config.resolve import Resolved, resolve
from isles.config.sections.cluster import QueueSection
from isles.config.sections.model import missing_package
from isles.errors import ConfigError, ConfigErrors, ExitCode, PreflightError
from isles.launch.queue.status import refresh
from isles.launch.ssh.environment import python_of
from isles.launch.worker import require_train
from isles.run.begin import Begun, require_packages
from isles.run.env import hub_cache
from isles.run.find import numbered_runs
from isles.run.outcome import end_failed, error_record
from isles.run.paths import Attempt, RunDir


def refuse_arrays(loaded: Loaded, pattern: re.Pattern[str]) -> None:
    """Refuse an option that makes an array of a job.

    Args:
        loaded: the run file.
        pattern: how such an option begins.

    Raises:
        ConfigError: there is one in the launcher's `extra`.
    """
    launcher = loaded.config.clusters[0].launcher
    assert isinstance(launcher, QueueSection)
    for index, option in enumerate(launcher.extra):
        if pattern.match(option):
            raise ConfigError(
                f"{option} would start the same run many times, in one run directory",
                where=loaded.where(f"clusters.0.launcher.extra.{index}", "clusters.0.launcher"),
                fix="delete it, and start each run of a series by an `isles train` of its own, "
                "with a name of its own: name=tiny-lr-1 training.learning_rate=1e-4",
            )


def refuse_cut_options(loaded: Loaded) -> None:
    """Refuse an option of `extra` of which sbatch would read a part, for a comment begins there.

    Raises:
        ConfigError: there is one.
    """
    launcher = loaded.config.clusters[0].launcher
    assert isinstance(launcher, QueueSection)
    for index, option in enumerate(launcher.extra):
        try:
            words, read = shlex.split(option), shlex.split(option, comments=True)
        except ValueError:
            what, fix = (
                f"a quotation has no end: {option}",
                "close it, or put a backslash before it",
            )
        else:
            if words == read:
                continue
            what = f"# begins a comment: sbatch would read only {' '.join(read)}"
            key, _, value = option.partition("=")
            fix = f'put the value in quotation marks: {key}="{value}"'
        where = loaded.where(f"clusters.0.launcher.extra.{index}", "clusters.0.launcher")
        raise ConfigError(what, where=where, fix=fix)


def workdir_of(loaded: Loaded) -> Path:
    """The folder in which the ranks run, which this machine shares with the nodes.

    Raises:
        ConfigError: it is not here.
    """
    given = loaded.config.clusters[0].workdir
    folder = Path(given).expanduser().absolute() if given is not None else Path.cwd()
    if not folder.is_dir():
        raise ConfigError(
            f"there is no folder {folder} on this machine",
            where=loaded.where("clusters.0.workdir"),
            fix="make it, or name one that this machine shares with the nodes",
            id="files.workdir",
        )
    return folder


@contextmanager
def in_workdir(loaded: Loaded) -> Iterator[Path]:
    """Within the folder in which the ranks run: the paths of the run file are relative to it."""
    folder = workdir_of(loaded)
    with chdir(folder):
        yield folder


def settle(loaded: Loaded) -> Resolved:
    """The run with the ranks of its nodes, which cannot be looked at from here.

    Raises:
        ConfigErrors: every fault.
    """
    cluster = loaded.config.clusters[0]
    assert isinstance(cluster.gpus_per_node, int), "a rule asks for it"
    device: Literal["cuda", "cpu"] = "cpu" if cluster.device == "cpu" else "cuda"
    faults = [
        *shape_faults(loaded, hub_cache()),
        *deepspeed_faults(loaded),
        *data_faults(loaded),
    ]
    try:
        nproc = (cluster.gpus_per_node,) * cluster.max_nodes
        resolved = resolve(loaded, nproc=nproc, device=device)
    except ConfigError as error:
        raise ConfigErrors([*faults, error]) from None
    if faults:
        raise ConfigErrors(faults)
    return resolved


def check_packages(resolved: Resolved) -> None:
    """Make sure that the ranks can train, where their Python is this one.

    Raises:
        UserError: a package is missing.
    """
    config = resolved.config
    if python_of(config.clusters[0].environment) != sys.executable:
        return  # the Python of the nodes has its own packages
    require_train()
    if config.training.script is not None:
        return
    check_start(config, resolved.world_size)
    require_packages(config)
    if fault := missing_package(config.adapter):
        raise fault


def refresh_last(resolved: Resolved, resume: str) -> None:
    """Ask the queue about the run that this start would go on with, so that nobody takes a job
    that has ended meanwhile for one that runs. One that was queued again need not wait longer."""
    if resume == "no":
        return
    folder = Path(resolved.config.output_dir).expanduser()
    runs = [run for _, run in numbered_runs(folder, resolved.config.name)][-1:]
    if resume != "auto":
        given = Path(resume).expanduser()
        runs += [RunDir(path) for path in (given, folder / resume) if path.is_dir()]
    for run in runs:
        attempt = run.last_attempt()
        if attempt is not None:
            refresh(run, attempt, max_age_s=0.0, hasten=True)


SUBMIT_PATIENCE = 3.0
"""A submission is waited for so many times longer than the answer to a question."""


class LostSubmission(PreflightError):
    """It is not known whether the scheduler has a job or not."""


def find_lost(find: Callable[[], str | None], error: PreflightError) -> str:
    """The id of a job whose submission was not answered in time, if the scheduler has it.

    Args:
        find: looks for it in the queue; may raise PreflightError.
        error: what became of the submission.

    Raises:
        LostSubmission: it is not there, or the queue does not answer either.
    """
    try:
        job_id = find()
        seen = "no job of it is in the queue"
    except PreflightError as fault:
        job_id, seen = None, f"the queue cannot be looked at: {fault.what}"
    if job_id is not None:
        return job_id
    raise LostSubmission(
        f"{error.what}; {seen}",
        where=error.where,
        fix="try again when the scheduler answers; should it have taken the job all the same, that "
        "one ends as soon as it begins",
        id="queue.lost",
    ) from error


def _strand(attempt: Attempt, error: LostSubmission) -> None:
    """Put on record that a start was given up. A job of it that was taken all the same looks there
    first, and ends: never do two jobs train one run."""
    record = error_record(
        error.what,
        id=error.id,
        kind="LostSubmission",
        code=ExitCode.PREFLIGHT,
        where=error.where,
        fix=error.fix,
    )
    end_failed(attempt, record)


def _withdraw(begun: Begun, attempt: Attempt) -> None:
    """Nothing was submitted: leave no trace of it, neither a start nor a run without one."""
    shutil.rmtree(attempt.path, ignore_errors=True)
    if not begun.resumed and not begun.run_dir.attempts():
        shutil.rmtree(begun.run_dir.path, ignore_errors=True)


@contextmanager
def submission(begun: Begun, attempt: Attempt) -> Iterator[None]:
    """While a job is submitted: what fails leaves no trace, and what may not have failed does.

    Args:
        begun: the run.
        attempt: this start of it.
    """
    try:
        yield
    except LostSubmission as error:
        _strand(attempt, error)
        raise
    except BaseException:
        _withdraw(begun, attempt)
        raise
