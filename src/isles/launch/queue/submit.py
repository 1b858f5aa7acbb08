"""The launchers slurm and pbs: make the run directory and submit one job script.

This machine needs the scheduler's commands and must share the run directory with the nodes. If the
run file has a login node, isles does the same there.
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
"""Factor between the longest wait for a submission and the longest wait for a query."""

LastJob = tuple[RunDir, Attempt, JobReport]


class LostSubmission(PreflightError):
    """The scheduler has not answered, so it is unknown whether it has the job."""


def start_in_queue(
    loaded: Loaded, launcher: SlurmLauncherConfig | PbsLauncherConfig, options: StartOptions
) -> Started | str:
    """Start a run, or describe the start; see `isles.launch.start.start`.

    Raises:
        ConfigErrors: every issue in the run file.
        PreflightError: the scheduler's commands are not installed, or do not answer.
        UserError: the run cannot be started, or the scheduler refuses the job.
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
            note += f"\n{queue.path(queue.submit_command[0])} would get this script"
            return f"{show(resolved).rstrip()}\n\n{note}:\n\n{job_script(config, text.of(attempt))}"
        # A different Python on the nodes has its own packages.
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
    """Context with the ranks' working folder as current folder: paths of the run file are relative
    to it.

    Raises:
        ConfigError: this machine does not have the folder.
    """
    given = loaded.config.clusters[0].workdir
    folder = Path(given).expanduser().absolute() if given is not None else Path.cwd()
    if not folder.is_dir():
        raise ConfigError(
            f"folder not found on this machine: {folder}",
            where=loaded.where("clusters.0.workdir"),
            fix="create it, or use a folder that this machine shares with the nodes",
            id="files.workdir",
        )
    with chdir(folder):
        yield folder


def submit(queue: Scheduler, attempt: Attempt, loaded: Loaded) -> str:
    """Submit the script of an attempt; returns the job's id.

    Raises:
        PreflightError: this machine has no submit command.
        LostSubmission: it is unknown whether the scheduler has the job.
        UserError: the scheduler refuses the job.
    """
    name = queue.submit_command[0]
    if shutil.which(queue.path(name)) is None:
        raise PreflightError(
            f"{queue.path(name)} not found on this machine",
            where=loaded.where("clusters.0.launcher.bin_path", "clusters.0.launcher"),
            fix="start from a login node of the cluster, or set clusters.0.launcher.login to one; "
            f"if {queue.name}'s commands are not on PATH, set clusters.0.launcher.bin_path to "
            "their folder",
            id="queue.commands",
        )
    patient = replace(queue, ask_s=_SUBMIT_PATIENCE * queue.ask_s)
    try:
        done = patient.submit(attempt.script)
    except PreflightError as error:
        if (begun := claim(attempt, LOST)) != LOST:
            return begun  # the job that is training already
        raise LostSubmission(
            error.what,
            where=error.where,
            fix="try again when the scheduler answers. If it has accepted the job after all, that "
            "job exits as soon as it starts",
            id="queue.lost",
        ) from error
    if (job_id := queue.submitted_id(done)) is not None:
        return job_id
    lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
    lines = [line.removeprefix(f"{name}: ").removeprefix("error: ") for line in lines]
    text = "; ".join(lines) or f"exit status {done.returncode}"
    keys: list[str] = []
    fix = f"see the script for {name} with `isles train --dry-run`"
    for pattern, named, found_fix in words_of(queue.name.lower())["refused"]:
        if re.search(pattern, text, re.IGNORECASE):
            keys = named.split()
            fix = queue.refusal_fix(keys[0] if keys else "", loaded) or found_fix
            break
    raise UserError(
        f"{queue.name} rejected the job: {text}",
        where=loaded.where(*(f"clusters.0.launcher.{key}" for key in keys), "clusters.0.launcher"),
        fix=fix,
        id="queue.refused",
    )


@contextmanager
def submission(begun: Begun, attempt: Attempt) -> Iterator[None]:
    """Context of a submission: a refused job leaves no trace, a lost job an outcome."""
    try:
        yield
    except LostSubmission as error:
        # If the job was accepted after all, it finds this outcome and exits, so that two jobs never
        # train one run.
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
    # The section, with the dialect of this PBS.
    if launcher.time is None:
        options.warn(
            "clusters.0.launcher.time is not set, so PBS ends the job at the queue's own limit "
            "without notice, and the run cannot save before it"
        )
    if launcher.dialect != "auto":
        return launcher
    return launcher.model_copy(update={"dialect": Pbs(launcher.bin_path).dialect()})


def _look_at_image(container: dict[str, Any], loaded: Loaded, options: StartOptions) -> None:
    # An image that apptainer can run here is checked now, not after hours in the queue.
    found = Container.of(container)
    try:
        runtime, _ = find_runtime(found)
    except PreflightError:
        runtime = "pyxis"
    if runtime == "apptainer" and found.is_file:
        require_image(container, loaded)
    else:
        options.warn(
            f"the image {found.image} is not checked before the start, because only the job's "
            "nodes can enter it"
        )


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
                f"{option} would start the same run several times, in one run directory",
                where=where,
                fix="delete it, and start each run of a series with a separate `isles train` and a "
                "separate name, such as name=tiny-lr-1 training.learning_rate=1e-4",
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
        f"this shell is inside {queue.name} job {job_id}, but the launcher would submit another "
        "job",
        where=str(options.path),
        fix=f"train {', or '.join(ways)}. To submit another job, run `env -u {variable} {typed}`",
        id="queue.nested",
    )


def here_overrides(loaded: Loaded) -> list[str]:
    """Overrides that train the run of a queue on this machine."""
    cluster, key = loaded.config.clusters[0], "clusters.0"
    found = [f"{key}.launcher={{kind: local}}"]
    for name in sorted(cluster.environment.model_fields_set - {"variables", "container"}):
        # The ranks of this machine use the Python of this command.
        empty = "[]" if isinstance(getattr(cluster.environment, name), tuple) else "null"
        found.append(f"{key}.environment.{name}={empty}")
    found += [f"{key}.workdir=null"] if cluster.workdir is not None else []
    return found + ([f"{key}.nodes=1"] if cluster.max_nodes > 1 else [])


def refresh_last(resolved: Resolved, resume: str) -> list[LastJob]:
    """Query the state of a run's last job before a start; `resume` as in `choose_run`."""
    # A job that has ended in the meantime must not count as running, and a requeued job need not
    # wait longer.
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
