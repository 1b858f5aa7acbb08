"""The launchers slurm and pbs: a start makes the run directory and submits one job script.

The machine must have the scheduler's commands and share the run directory with the nodes; where the
run file names a login node, isles there does the same.
"""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from isles.config.load import Loaded
from isles.config.resolve import Resolved
from isles.config.sections.cluster import PbsLauncherConfig, SlurmLauncherConfig
from isles.config.show import show
from isles.errors import ConfigError, ExitCode, PreflightError, UserError
from isles.launch.base import Started, StartOptions, check_packages, next_attempt, resolve_for_nodes
from isles.launch.container.enter import Container, container_record, find_runtime
from isles.launch.container.image import require_image
from isles.launch.queue.job import LOST, JobReport, Scheduler, claim, words_of
from isles.launch.queue.pbs import Pbs, write_dialect
from isles.launch.queue.script import JobText, job_script
from isles.launch.queue.slurm import Slurm
from isles.launch.queue.status import refresh
from isles.launch.remote.login import start_on_login
from isles.launch.ssh.environment import python_of
from isles.run.begin import begin_attempt, write_launch
from isles.run.choose import Begun, choose_run, is_unchanged
from isles.run.env import allocation, is_job_node, pbs_job
from isles.run.find import own_runs
from isles.run.outcome import end_failed, error_record
from isles.run.paths import Attempt, RunDir
from isles.run.records import write_text_atomic

_SUBMIT_PATIENCE = 3.0
"""A submission is waited for so many times longer than the answer to a question."""

LastJob = tuple[RunDir, Attempt, JobReport]


class LostSubmission(PreflightError):
    """The scheduler has not answered: it may have the job or not."""


def start_in_queue(
    loaded: Loaded, launcher: SlurmLauncherConfig | PbsLauncherConfig, options: StartOptions
) -> Started | str:
    """Start a run, or say what would be done; see `isles.launch.start.start`.

    Raises:
        ConfigErrors: every issue in the run file.
        PreflightError: the scheduler's commands are not here, or do not answer.
        UserError: the run cannot be begun, or the scheduler does not take the job.
    """
    if launcher.login is not None:
        return start_on_login(loaded, options)
    is_pbs = isinstance(launcher, PbsLauncherConfig)
    queue = Pbs(launcher.bin_path) if is_pbs else Slurm(launcher.bin_path)
    _refuse_extra(loaded, launcher.extra, queue)
    if not options.dry_run:
        _refuse_inside_job(loaded, options, queue)
    with in_workdir(loaded) as workdir:
        resolved = resolve_for_nodes(loaded)
        if isinstance(launcher, PbsLauncherConfig):
            launcher = _known(launcher, options)
        config, nodes = resolved.config, resolved.config.clusters[0].max_nodes
        text = JobText(launcher, nodes, resolved.world_size // nodes, resolved.device, str(workdir))
        if options.dry_run:
            begun = choose_run(resolved, options.resume)
            attempt = next_attempt(RunDir(begun.run_dir.path.absolute()))
            note = begun.note or f"this would be a new run: {begun.run_dir.name}"
            note += f"\n{queue.path(queue.submit_command[0])} would take this script"
            return f"{show(resolved).rstrip()}\n\n{note}:\n\n{job_script(config, text.of(attempt))}"
        # Another Python of the nodes has its own packages.
        container = container_record(config.clusters[0], config, resolved.device)
        if container is not None:
            _look_at_image(container, loaded, options)
        elif python_of(config.clusters[0].environment) == sys.executable:
            check_packages(resolved)
        for run, last, job in refresh_last(resolved, options.resume):
            if job.state == "requeued" and is_unchanged(run, resolved):
                what = f"is queued again as {queue.name} job {job.job_id}: {job.reason}"
                options.print_line(f"{run.name} {what}")
                return Started(run, last, None)
        begun, attempt = begin_attempt(
            resolved, loaded.text, options.resume, join=options.join, typed=options.typed
        )
        run_dir = RunDir(begun.run_dir.path.absolute())
        with submission(begun, attempt):
            write_text_atomic(attempt.script, job_script(config, text.of(attempt)))
            if isinstance(launcher, PbsLauncherConfig):
                write_dialect(attempt, launcher.dialect)
            job_id = submit(queue, attempt, loaded)
        if begun.note:
            options.print_line(begun.note)
        write_launch(
            attempt,
            None,
            launcher=launcher.kind,
            job_id=job_id,
            world_size=resolved.world_size,
            device=resolved.device,
            command=(queue.path(queue.submit_command[0]), str(attempt.script)),
            resumed_from=begun.resume_from,
            bin_path=launcher.bin_path,
        )
    report = refresh(run_dir, attempt, max_age_s=0.0)
    options.print_line(f"submitted {run_dir.name} as {queue.name} job {job_id}, in {run_dir.path}")
    if report is not None and report.state == "pending" and report.word not in queue.new_words:
        fix = f" ({report.fix})" if report.fix else ""
        options.print_line(f"it waits: {report.reason}{fix}")
    return Started(run_dir, attempt, None)


@contextmanager
def in_workdir(loaded: Loaded) -> Iterator[Path]:
    """Within the folder in which the ranks run: the paths of the run file are relative to it.

    Raises:
        ConfigError: it is not on this machine.
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
    with chdir(folder):
        yield folder


def submit(queue: Scheduler, attempt: Attempt, loaded: Loaded) -> str:
    """Submit the script of an attempt; returns the job's id.

    Raises:
        PreflightError: there is no submit command here.
        LostSubmission: it is not known whether the scheduler has the job.
        UserError: the scheduler does not take it.
    """
    name = queue.submit_command[0]
    if shutil.which(queue.path(name)) is None:
        raise PreflightError(
            f"there is no {queue.path(name)} on this machine",
            where=loaded.where("clusters.0.launcher.bin_path", "clusters.0.launcher"),
            fix="start from a login node of the cluster, or name one: clusters[0].launcher.login; "
            f"where {queue.name}'s commands are not on PATH, clusters[0].launcher.bin_path names "
            "their folder",
            id="queue.commands",
        )
    patient = replace(queue, ask_s=_SUBMIT_PATIENCE * queue.ask_s)
    try:
        done = patient.submit(attempt.script)
    except PreflightError as error:
        if (begun := claim(attempt, LOST)) != LOST:
            return begun  # the job that trains already
        raise LostSubmission(
            error.what,
            where=error.where,
            fix="try again when the scheduler answers; should it have taken the job all the same, "
            "that one ends as soon as it begins",
            id="queue.lost",
        ) from error
    if (job_id := queue.submitted_id(done)) is not None:
        return job_id
    lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
    lines = [line.removeprefix(f"{name}: ").removeprefix("error: ") for line in lines]
    text = "; ".join(lines) or f"exit status {done.returncode}"
    keys: list[str] = []
    fix = f"`isles train --dry-run` shows the script that {name} was given"
    for pattern, named, found_fix in words_of(queue.name.lower())["refused"]:
        if re.search(pattern, text, re.IGNORECASE):
            keys = named.split()
            fix = queue.refusal_fix(keys[0] if keys else "", loaded) or found_fix
            break
    raise UserError(
        f"{queue.name} does not take the job: {text}",
        where=loaded.where(*(f"clusters.0.launcher.{key}" for key in keys), "clusters.0.launcher"),
        fix=fix,
        id="queue.refused",
    )


@contextmanager
def submission(begun: Begun, attempt: Attempt) -> Iterator[None]:
    """While a job is submitted: a refused one leaves no trace, a lost one an outcome."""
    try:
        yield
    except LostSubmission as error:
        # A job that was taken all the same finds this outcome and ends: never do two jobs train
        # one run.
        record = error_record(
            error.what,
            id=error.id,
            kind="LostSubmission",
            code=ExitCode.PREFLIGHT,
            where=error.where,
            fix=error.fix,
        )
        end_failed(attempt, record)
        raise
    except BaseException:
        shutil.rmtree(attempt.path, ignore_errors=True)
        if not begun.resumed and not begun.run_dir.attempts():
            shutil.rmtree(begun.run_dir.path, ignore_errors=True)
        raise


def _known(launcher: PbsLauncherConfig, options: StartOptions) -> PbsLauncherConfig:
    # The section with the dialect of this PBS.
    if launcher.time is None:
        options.warn(
            "launcher.time is not given: PBS ends the job at the queue's own limit without "
            "a word, and nothing is saved before it"
        )
    if launcher.dialect != "auto":
        return launcher
    return launcher.model_copy(update={"dialect": Pbs(launcher.bin_path).dialect()})


def _look_at_image(container: dict[str, Any], loaded: Loaded, options: StartOptions) -> None:
    # A file that apptainer can run here shows now what it lacks, not after hours in the queue.
    found = Container.of(container)
    try:
        runtime, _ = find_runtime(found)
    except PreflightError:
        runtime = "pyxis"
    if runtime == "apptainer" and found.is_file:
        require_image(container, loaded)
    else:
        options.warn(f"the image {found.image} is not looked at here: the job's nodes enter it")


def _refuse_extra(loaded: Loaded, extra: tuple[str, ...], queue: Scheduler) -> None:
    for index, option in enumerate(extra):
        where = loaded.where(f"clusters.0.launcher.extra.{index}", "clusters.0.launcher")
        for pattern, instead in queue.own_options:
            try:
                words = shlex.split(option, comments=True)
            except ValueError as error:
                fix = "write it as in bash: --comment='two words'"
                raise ConfigError(f"{option}: {error}", where=where, fix=fix) from None
            if any(re.match(pattern, word) for word in words):
                what = f"{option} is an option that isles sets itself"
                raise ConfigError(what, where=where, fix=f"delete it: {instead}")
        if re.match(queue.array_option, option):
            raise ConfigError(
                f"{option} would start the same run many times, in one run directory",
                where=where,
                fix="delete it, and start each run of a series by an `isles train` of its own, "
                "with a name of its own: name=tiny-lr-1 training.learning_rate=1e-4",
            )


def _refuse_inside_job(loaded: Loaded, options: StartOptions, queue: Scheduler) -> None:
    is_slurm = isinstance(queue, Slurm)
    job_id = allocation() if is_slurm else pbs_job()
    if job_id is None:
        return
    typed = options.typed or f"isles train {options.path}"
    here = f"{typed} {' '.join(map(shlex.quote, here_overrides(loaded)))}"
    # The shell of salloc stays on the login node.
    is_node = not is_slurm or is_job_node()
    on_one = f"`{here}`" if is_node else f"`srun --nodes=1 --ntasks=1 --pty {here}`"
    ways = [f"on {'this' if is_node else 'one'} node of the job: {on_one}"]
    if loaded.config.clusters[0].max_nodes > 1:
        words = [str(options.path), *options.overrides]
        script = f"isles render {shlex.join(words)} --to {'sbatch' if is_slurm else 'pbs'}"
        ways.insert(0, f"on the nodes of this job: `{script} --output job.sh && bash job.sh`")
    variable = "SLURM_JOB_ID" if is_slurm else "PBS_JOBID"
    raise UserError(
        f"this shell is in {queue.name} job {job_id}, and the launcher would submit another job",
        where=str(options.path),
        fix=f"train {', or '.join(ways)}. For another job: `env -u {variable} {typed}`",
        id="queue.nested",
    )


def here_overrides(loaded: Loaded) -> list[str]:
    """Overrides that let the run of a queue train on this machine."""
    cluster, key = loaded.config.clusters[0], "clusters.0"
    found = [f"{key}.launcher={{kind: local}}"]
    for name in sorted(cluster.environment.model_fields_set - {"variables", "container"}):
        # The ranks of this machine run in the Python of the command.
        empty = "[]" if isinstance(getattr(cluster.environment, name), tuple) else "null"
        found.append(f"{key}.environment.{name}={empty}")
    found += [f"{key}.workdir=null"] if cluster.workdir is not None else []
    return found + ([f"{key}.nodes=1"] if cluster.max_nodes > 1 else [])


def refresh_last(resolved: Resolved, resume: str) -> list[LastJob]:
    """Ask for the state of the last job of a run that is about to start; `resume` as in
    `choose_run`."""
    # A job that has ended meanwhile must not be taken for one that runs, and one that was queued
    # again need not wait longer.
    if resume == "no":
        return []
    folder = Path(resolved.config.output_dir).expanduser().absolute()
    runs = own_runs(folder, resolved.config.name)[-1:]
    if resume != "auto":
        runs += [
            RunDir(p) for p in (Path(resume).expanduser().absolute(), folder / resume) if p.is_dir()
        ]
    found = []
    for run in runs:
        if (attempt := run.last_attempt()) is not None:
            report = refresh(run, attempt, max_age_s=0.0, hasten=True)
            found += [(run, attempt, report)] if report is not None else []
    return found
