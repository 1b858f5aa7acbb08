"""The launcher slurm: submits the job script of a run, on a machine that has sbatch."""

from __future__ import annotations

import re
from pathlib import Path

from isles.config.load import Loaded
from isles.config.resolve import Resolved
from isles.config.sections.cluster import SlurmLauncherConfig
from isles.errors import UserError
from isles.launch.base import Started, StartOptions
from isles.launch.queue.script import JobText, job_script
from isles.launch.queue.slurm import Slurm
from isles.launch.queue.status import refresh
from isles.launch.queue.submit import (
    check_packages,
    in_workdir,
    refresh_last,
    refuse_arrays,
    refuse_cut_options,
    settle,
    submission,
    submit_slurm,
)
from isles.run.begin import Begun, begin_run, choose_run, new_attempt, write_job_launch
from isles.run.env import allocation
from isles.run.paths import Attempt, RunDir
from isles.run.records import write_text_atomic

_NOT_LOOKED_AT = ("PENDING", "PENDING Priority")
"""What Slurm says of a job of the last moment."""

_ARRAYS = re.compile(r"^\s*(--array|-a)(=|\s|\d|$)")


def start_slurm(
    loaded: Loaded, launcher: SlurmLauncherConfig, options: StartOptions
) -> Started | str:
    """Start a run, or say what would be done; see `isles.launch.start.start`.

    Raises:
        ConfigErrors: every fault in the run file.
        PreflightError: Slurm's commands are not here, or do not answer.
        UserError: the run cannot be begun, or Slurm does not take the job.
    """
    if launcher.login is not None:
        from isles.launch.remote.login import start_on_login

        return start_on_login(loaded, options)
    refuse_arrays(loaded, _ARRAYS)
    refuse_cut_options(loaded)
    if not options.dry_run:
        _refuse_inside_job(options.path)
    with in_workdir(loaded) as workdir:
        resolved = settle(loaded)
        if options.dry_run:
            return _dry_run_text(resolved, launcher, workdir, options)
        check_packages(resolved)
        refresh_last(resolved, options.resume)
        begun = begin_run(resolved, loaded.text, options.resume, join=options.join)
        run_dir = RunDir(begun.run_dir.path.absolute())
        attempt = new_attempt(run_dir, loaded.text, typed=options.typed)
        write_text_atomic(attempt.script, _script(resolved, launcher, begun, attempt, workdir))
        slurm = Slurm(launcher.bin_path)
        with submission(begun, attempt):
            job_id = submit_slurm(slurm, attempt, loaded)
        if begun.note:
            options.say(begun.note)
        write_job_launch(
            attempt,
            launcher="slurm",
            job_id=job_id,
            world_size=resolved.world_size,
            device=resolved.device,
            command=(slurm.path("sbatch"), str(attempt.script)),
            resumed_from=begun.resume_from,
            bin_path=launcher.bin_path,
        )
    report = refresh(run_dir, attempt, max_age_s=0.0)
    options.say(f"submitted {run_dir.name} as Slurm job {job_id}, in {run_dir.path}")
    if report is not None and report.state == "pending" and report.word not in _NOT_LOOKED_AT:
        options.say(f"it waits: {report.reason}" + (f" ({report.fix})" if report.fix else ""))
    return Started(run_dir, attempt, None)


def _script(
    resolved: Resolved,
    launcher: SlurmLauncherConfig,
    begun: Begun,
    attempt: Attempt,
    workdir: Path,
) -> str:
    nodes = resolved.config.clusters[0].max_nodes
    return job_script(
        resolved.config,
        JobText(
            launcher=launcher,
            nodes=nodes,
            nproc=resolved.world_size // nodes,
            device=resolved.device,
            workdir=str(workdir),
            run_dir=str(begun.run_dir.path.absolute()),
            attempt=attempt.number,
        ),
    )


def _dry_run_text(
    resolved: Resolved, launcher: SlurmLauncherConfig, workdir: Path, options: StartOptions
) -> str:
    from isles.config.show import show

    begun = choose_run(resolved, options.resume)
    last = begun.run_dir.last_attempt()
    attempt = begun.run_dir.attempt(last.number + 1 if last else 1)
    note = begun.note or f"this would be a new run: {begun.run_dir.name}"
    script = _script(resolved, launcher, begun, attempt, workdir)
    sbatch = Slurm(launcher.bin_path).path("sbatch")
    return f"{show(resolved).rstrip()}\n\n{note}\n{sbatch} would take this script:\n\n{script}"


def _refuse_inside_job(path: Path) -> None:
    job_id = allocation()
    if job_id is not None:
        raise UserError(
            f"this shell is in Slurm job {job_id}, and the launcher slurm would submit another job",
            where=str(path),
            fix="leave it (exit) and start from the login node; or train on this node alone, with "
            "'clusters.0.launcher={kind: local}' on the command line; or, if another job is what "
            "you want: env -u SLURM_JOB_ID isles train …",
            id="queue.nested",
        )
