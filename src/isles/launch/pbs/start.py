"""The launcher pbs: submits the job script of a run, on the machine that has qsub."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

from isles.config.load import Loaded
from isles.config.resolve import Resolved
from isles.config.sections.cluster import PbsLauncherConfig
from isles.errors import PreflightError, UserError
from isles.launch.base import Started, StartOptions
from isles.launch.queue.pbs import Dialect, Pbs, dialect_note, last_line
from isles.launch.queue.script import InRunDir, pbs_job_script
from isles.launch.queue.status import refresh
from isles.launch.queue.submit import (
    SUBMIT_PATIENCE,
    check_packages,
    find_lost,
    in_workdir,
    refresh_last,
    refuse_arrays,
    settle,
    submission,
)
from isles.run.begin import begin_run, choose_run, new_attempt, write_job_launch
from isles.run.env import pbs_job
from isles.run.paths import Attempt, RunDir
from isles.run.records import write_record, write_text_atomic

_ARRAYS = re.compile(r"^\s*-[Jt]\s*\d")
_JOB = re.compile(r"^\d+(\[\])?\.?[\w.-]*$")


def start_pbs(loaded: Loaded, launcher: PbsLauncherConfig, options: StartOptions) -> Started | str:
    """Start a run, or say what would be done; see `isles.launch.start.start`.

    Raises:
        ConfigErrors: every fault in the run file.
        PreflightError: PBS cannot be asked, or does not answer.
        UserError: the run cannot be begun, or PBS does not take the job.
    """
    if launcher.login is not None:
        from isles.launch.remote.login import start_on_login

        return start_on_login(loaded, options)
    refuse_arrays(loaded, _ARRAYS)
    _refuse_inside_job(options)
    with in_workdir(loaded) as workdir:
        resolved = settle(loaded)
        pbs = Pbs(launcher.bin_path)
        dialect = launcher.dialect if launcher.dialect != "auto" else pbs.dialect()
        if launcher.time is None:
            options.warn(
                "launcher.time is not given: PBS ends the job at the queue's own limit without a "
                "word, and nothing is saved before it"
            )
        if options.dry_run:
            return _dry_run_text(resolved, launcher, dialect, workdir, options)
        check_packages(resolved)
        # A job that has ended leaves a record of its end only when it is asked.
        refresh_last(resolved, options.resume)
        begun = begin_run(resolved, loaded.text, options.resume, join=options.join)
        if begun.note:
            options.say(begun.note)
        run_dir = RunDir(begun.run_dir.path.absolute())
        attempt = new_attempt(run_dir, loaded.text, typed=options.typed)
        with submission(begun, attempt):
            text = _script(resolved, launcher, dialect, run_dir, attempt, workdir)
            write_text_atomic(attempt.script, text)
            write_record(dialect_note(attempt), {"dialect": dialect})  # the job itself reads it
            job_id = _submit(pbs, attempt, loaded)
        write_job_launch(
            attempt,
            launcher="pbs",
            job_id=job_id,
            world_size=resolved.world_size,
            device=resolved.device,
            command=(pbs.path("qsub"), str(attempt.script)),
            resumed_from=begun.resume_from,
            bin_path=launcher.bin_path,
        )
    refresh(run_dir, attempt, max_age_s=0.0)
    options.say(
        f"submitted {run_dir.name} as PBS job {job_id}: {resolved.derived['world_size']} ranks on "
        f"{resolved.config.clusters[0].max_nodes} nodes, in {run_dir.path}"
    )
    return Started(run_dir, attempt, None)


def _refuse_inside_job(options: StartOptions) -> None:
    job_id = pbs_job()
    if job_id is not None and not options.dry_run:
        raise UserError(
            f"this is inside of PBS job {job_id}, and the launcher pbs submits another job",
            where=str(options.path),
            fix="start it from the login node; or, to train on this node alone, add "
            "clusters.0.launcher.kind=local to the command line",
            id="queue.nested",
        )


def _script(
    resolved: Resolved,
    launcher: PbsLauncherConfig,
    dialect: Dialect,
    run_dir: RunDir,
    attempt: Attempt,
    workdir: Path,
) -> str:
    cluster = resolved.config.clusters[0]
    return pbs_job_script(
        resolved.config,
        launcher,
        dialect,
        InRunDir(str(run_dir.path), attempt.number),
        workdir=str(workdir),
        num_ranks=resolved.world_size // cluster.max_nodes,
        device=resolved.device,
    )


def _submit(pbs: Pbs, attempt: Attempt, loaded: Loaded) -> str:
    """Hand the script to PBS; the job's id."""
    patient = replace(pbs, ask_s=SUBMIT_PATIENCE * pbs.ask_s)
    try:
        done = patient.run("qsub", str(attempt.script))
    except PreflightError as error:
        if shutil.which(pbs.path("qsub")) is None:
            raise
        return find_lost(lambda: pbs.find_by_output(str(attempt.path / "pbs.out")), error)
    words = done.stdout.split()
    if done.returncode == 0 and words and _JOB.match(words[-1]):
        return words[-1]
    said = last_line(done)
    where, fix = _refusal(said, loaded)
    raise UserError(f"PBS does not take the job: {said}", where=where, fix=fix, id="queue.refused")


_REFUSALS = (
    (r"unknown queue|queue.*(not exist|not found)", "queue", "qstat -Q shows the queues"),
    (
        r"account|project",
        "account",
        "ask your site for its name; where it wants a project: extra: ['-P NAME']",
    ),
    (r"walltime|exceeds? (queue|server)|violates", "time", "qstat -Qf shows the limits of queues"),
    (
        r"specification|select|nodes?\b|resource|ngpus|gpus|ncpus|place",
        "resources",
        "compare nodes, gpus_per_node, cpus_per_node and memory_per_node with pbsnodes -a; "
        "launcher.resources takes the whole request, word for word; launcher.dialect says which "
        "PBS it is",
    ),
    (r"authorized|permission|denied", "queue", "another queue, or ask your site"),
)


def _refusal(said: str, loaded: Loaded) -> tuple[str, str]:
    """Where in the run file to look for what PBS has said, and what to do."""
    for pattern, key, fix in _REFUSALS:
        if re.search(pattern, said, re.IGNORECASE):
            return loaded.where(f"clusters.0.launcher.{key}", "clusters.0.launcher"), fix
    where = loaded.where("clusters.0.launcher")
    return where, "`isles train --dry-run` shows the script that qsub was given"


def _dry_run_text(
    resolved: Resolved,
    launcher: PbsLauncherConfig,
    dialect: Dialect,
    workdir: Path,
    options: StartOptions,
) -> str:
    from isles.config.show import show

    begun = choose_run(resolved, options.resume)
    run_dir = RunDir(begun.run_dir.path.absolute())
    last = run_dir.last_attempt()
    attempt = run_dir.attempt(last.number + 1 if last else 1)
    script = _script(resolved, launcher, dialect, run_dir, attempt, workdir)
    note = begun.note or f"this would be a new run: {run_dir.name}"
    return (
        f"{show(resolved).rstrip()}\n\n{note}\n"
        f"this would be submitted with {Pbs(launcher.bin_path).path('qsub')}:\n\n{script.rstrip()}"
    )
