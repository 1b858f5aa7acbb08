"""A start on a Ray cluster: makes the run directory, and submits one job.

The job's driver (`driver.py`) starts the agents. This machine must share the run directory with the
head of the cluster, or be the head. If the run file has a login node, isles does the same there.
"""

from __future__ import annotations

import secrets
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from isles.config.load import Loaded
from isles.config.resolve import Resolved
from isles.config.sections.cluster import ClusterConfig, RayLauncherConfig
from isles.config.show import show
from isles.launch.base import (
    Started,
    StartOptions,
    check_packages,
    next_attempt,
    ranks_text,
    resolve_checked,
)
from isles.launch.queue.submit import LostSubmission, in_workdir, refresh_last, submission
from isles.launch.ray.bundles import RayRequest, amounts_text, bundles, ranks_of
from isles.launch.ray.jobs import SUBMIT_S, RayJobs
from isles.launch.remote.login import start_on_login
from isles.launch.ssh.environment import python_of, setting_lines
from isles.run.begin import begin_attempt, write_launch
from isles.run.choose import choose_run
from isles.run.paths import Attempt, RunDir
from isles.run.records import read_record


def start_ray(loaded: Loaded, launcher: RayLauncherConfig, options: StartOptions) -> Started | str:
    """Start a run, or describe the start; see `isles.launch.start.start`.

    Raises:
        ConfigErrors: every issue in the run file.
        UserError: the cluster cannot be reached or refuses the job, or the run cannot be started.
    """
    if launcher.login is not None:
        return start_on_login(loaded, options)
    with in_workdir(loaded) as workdir:
        resolved = resolve_for_ray(loaded)
        cluster = resolved.config.clusters[0]
        if options.dry_run:
            begun = choose_run(resolved, options.resume)
            run_dir = RunDir(begun.run_dir.path.absolute())
            command = _entrypoint(cluster, workdir, run_dir, next_attempt(run_dir))
            note = begun.note or f"this would be a new run: {run_dir.name}"
            wanted = "\n".join(
                f"    node {n}: {amounts_text(bundle)}" for n, bundle in enumerate(bundles(cluster))
            )
            return (
                f"{show(resolved).rstrip()}\n\n{note}\nisles would request from the Ray cluster "
                f"{launcher.address}\n{wanted}\nand submit this job:\n\n{command}"
            )
        # A different Python on the nodes has its own packages.
        if python_of(cluster.environment) == sys.executable:
            check_packages(resolved)
        jobs = RayJobs.reach(launcher.address)
        refresh_last(resolved, options.resume)
        begun, attempt = begin_attempt(
            resolved, loaded.text, options.resume, join=options.join, typed=options.typed
        )
        run_dir = RunDir(begun.run_dir.path.absolute())
        command = _entrypoint(cluster, workdir, run_dir, attempt)
        job_id = f"{run_dir.name}-{attempt.number}-{secrets.token_hex(3)}"
        with submission(begun, attempt):
            # Before the job, which may start immediately; isles chooses its id.
            write_launch(
                attempt,
                None,
                launcher=launcher.kind,
                job_id=job_id,
                address=jobs.address,
                world_size=resolved.world_size,
                device=resolved.device,
                command=(command,),
                resumed_from=begun.resume_from and begun.resume_from.absolute(),
                request=asdict(RayRequest.of(cluster, str(workdir))),
            )
            try:
                jobs.submit(job_id, command)
            except TimeoutError:
                raise LostSubmission(
                    f"the Ray cluster did not answer within {SUBMIT_S:.0f} s",
                    where=jobs.address,
                    fix="try again when it answers. If it has accepted the job after all, that "
                    "job exits as soon as it starts",
                    id="queue.lost",
                ) from None
        if begun.note:
            options.print_line(begun.note)
        ranks = ranks_text(resolved.world_size, resolved.device)
        options.print_line(
            f"submitted {run_dir.name} as Ray job {job_id}: {ranks} on {cluster.max_nodes} "
            f"node{'s' * (cluster.max_nodes > 1)}, in {run_dir.path}"
        )
        return Started(run_dir, attempt, None)


def resolve_for_ray(loaded: Loaded) -> Resolved:
    """The run with the ranks of its bundles.

    Raises:
        ConfigErrors: every issue.
    """
    cluster = loaded.config.clusters[0]
    device: Literal["cuda", "cpu"] = "cpu" if cluster.device == "cpu" else "cuda"
    return resolve_checked(loaded, nproc=ranks_of(cluster), device=device)


def _entrypoint(cluster: ClusterConfig, workdir: Path, run_dir: RunDir, attempt: Attempt) -> str:
    # The dashboard shows it to everyone, so the token of the attempt stays in the run directory.
    words = [python_of(cluster.environment), "-m", "isles.launch.ray.driver", str(run_dir.path)]
    begun_at = (read_record(attempt.launch) or {}).get("begun_at", 0.0)
    words += ["--attempt", str(attempt.number), "--begun-at", repr(begun_at)]
    lines = [*setting_lines(cluster, str(workdir)), f"exec {shlex.join(words)}"]
    return f"exec bash -c {shlex.quote(chr(10).join(lines))}"
