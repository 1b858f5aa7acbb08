"""A job handed to Slurm, once; and what sbatch's refusals mean."""

from __future__ import annotations

import difflib
import re
import shutil
from dataclasses import replace

from isles.config.load import Loaded
from isles.config.sections.cluster import SlurmLauncherConfig
from isles.errors import PreflightError, UserError
from isles.launch.queue.slurm import Slurm
from isles.launch.queue.submit import SUBMIT_PATIENCE, find_lost
from isles.run.paths import Attempt

_REFUSALS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    (r"invalid partition|partition name", ("partition",), "sinfo -s shows the partitions"),
    (
        r"invalid account|account/partition",
        ("account", "partition"),
        "sacctmgr show assoc user=$USER format=account,partition,qos shows what you may use",
    ),
    (r"invalid qos|qos specification", ("qos",), "sacctmgr show assoc user=$USER format=qos"),
    (
        r"time limit|time specification",
        ("time", "partition"),
        "scontrol show partition says MaxTime; a shorter time is enough: before it ends the run is "
        "saved, and queued again until it is done",
    ),
    (r"feature", ("constraint",), "sinfo -o '%n %f' shows the features of the nodes"),
    (
        r"generic resource|gres",
        ("gres",),
        "sinfo -o '%n %G' shows the GPUs of the nodes; gres: none asks for none",
    ),
    (
        r"memory",
        ("memory_per_node",),
        "sinfo -o '%n %m' shows the memory of the nodes, in MB",
    ),
    (r"reservation", ("reservation",), "scontrol show reservation"),
    (r"node name", ("nodelist", "exclude"), "sinfo -N shows the names"),
    (
        r"node configuration|node count|processors|cpu count|partition configuration",
        ("gres", "cpus_per_node", "memory_per_node", "partition"),
        "no node has all that is asked for: compare nodes, gpus_per_node, gres, cpus_per_node and "
        "memory_per_node with sinfo -o '%n %c %m %G %D'",
    ),
    (
        r"violates accounting|policy|submit limit",
        ("qos", "account"),
        "you have too many jobs, or ask for more than your account may: squeue --me, sacctmgr show "
        "assoc user=$USER",
    ),
    (
        r"unrecognized option|invalid option|unknown option",
        ("extra",),
        "sbatch --help shows its options",
    ),
    (r"permission|not permitted|access", ("partition",), "another partition, or ask your site"),
    (r"contact slurm controller|connect|socket", (), "scontrol ping; try again when it is up"),
)
"""What sbatch says -> the keys of the section `launcher` that it is about, and what to do."""


def submit_slurm(slurm: Slurm, attempt: Attempt, loaded: Loaded) -> str:
    """Hand the script of an attempt to Slurm; the job's number.

    Raises:
        PreflightError: there is no sbatch here.
        LostSubmission: it is not known whether Slurm has the job.
        UserError: Slurm does not take it.
    """
    if shutil.which(slurm.path("sbatch")) is None:
        raise PreflightError(
            f"there is no {slurm.path('sbatch')} on this machine",
            where=loaded.where("clusters.0.launcher.bin_path", "clusters.0.launcher"),
            fix="start from a login node of the cluster, or name one: clusters[0].launcher.login; "
            "where Slurm's commands are not on PATH, clusters[0].launcher.bin_path names their "
            "folder",
            id="queue.commands",
        )
    patient = replace(slurm, ask_s=SUBMIT_PATIENCE * slurm.ask_s)
    try:
        done = patient.run("sbatch", "--parsable", str(attempt.script))
    except PreflightError as error:
        return find_lost(lambda: _find(slurm, attempt), error)
    job_id = done.stdout.strip().partition(";")[0]
    if done.returncode == 0 and job_id.isdecimal():
        return job_id
    said = [line.removeprefix("sbatch: ") for line in done.stderr.strip().splitlines()]
    text = "; ".join(line.removeprefix("error: ") for line in said) or "no word"
    for pattern, keys, fix in _REFUSALS:
        if re.search(pattern, text, re.IGNORECASE):
            where = [f"clusters.0.launcher.{key}" for key in keys]
            known = _partitions(slurm, loaded) if keys[:1] == ("partition",) else ""
            raise UserError(
                f"Slurm does not take the job: {text}",
                where=loaded.where(*where, "clusters.0.launcher"),
                fix=known or fix,
                id="queue.refused",
            )
    raise UserError(
        f"Slurm does not take the job: {text}",
        where=loaded.where("clusters.0.launcher"),
        fix="`isles train --dry-run` shows the script that sbatch was given",
        id="queue.refused",
    )


def _partitions(slurm: Slurm, loaded: Loaded) -> str:
    """Which partitions there are; empty where sinfo does not say."""
    launcher = loaded.config.clusters[0].launcher
    assert isinstance(launcher, SlurmLauncherConfig)
    try:
        names = slurm.run("sinfo", "-h", "-o", "%R").stdout.split()
    except PreflightError:
        return ""
    near = difflib.get_close_matches(launcher.partition or "", names, n=1)
    if near and near[0] != launcher.partition:
        return f"did you mean {near[0]}? There are: {', '.join(names)}"
    return f"the partitions are: {', '.join(names)}" if names else ""


def _find(slurm: Slurm, attempt: Attempt) -> str | None:
    """The job that has this attempt's script, which no other job has; None: there is none."""
    done = slurm.run("squeue", "-h", "--me", "--states=all", "-o", "%i|%o")
    if done.returncode:
        raise PreflightError(
            done.stderr.strip() or "squeue failed", where="squeue", id="queue.commands"
        )
    for line in done.stdout.splitlines():
        job_id, _, command = line.partition("|")
        if command.strip() == str(attempt.script) and job_id.isdecimal():
            return job_id
    return None
