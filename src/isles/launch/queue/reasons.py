"""The words of Slurm and PBS in sentences: why a job waits, how it ended, why it is refused."""

from __future__ import annotations

import re
from collections.abc import Mapping

from isles.errors import ExitCode

Refusal = tuple[str, tuple[str, ...], str]
"""Pattern of what a submit command says -> keys of the section `launcher`, what to do."""

# Slurm's words for a reason, without their ends such as `ReqNodeNotAvail,_UnavailableNodes:a1`,
# -> what it means, what can be done. Source: https://slurm.schedmd.com/job_reason_codes.html
_SLURM_REASONS: dict[str, tuple[str, str]] = {
    "Resources": ("waiting for nodes that are free", ""),
    "Priority": ("other jobs come first", "a shorter `time` may let it start earlier"),
    "None": ("not looked at by the scheduler yet", ""),
    "Cleaning": ("its last start is still being cleaned up", ""),
    "BeginTime": ("not to start before its time", "scontrol update jobid={job} StartTime=now"),
    "Dependency": ("waiting for another job to end", "scontrol show job {job} | grep Dependency"),
    "DependencyNeverSatisfied": (
        "waiting for a job that can no longer end as asked",
        "isles stop, then take the dependency out of `extra`",
    ),
    "JobHeldUser": ("held by its user", "scontrol release {job}"),
    "JobHeldAdmin": ("held by an administrator", "ask the administrators why"),
    "Reservation": ("waiting for its reservation to begin", "scontrol show reservation"),
    "ReservationDeleted": ("its reservation is gone", "take `reservation` out of the run file"),
    "PartitionDown": ("the partition is down", "sinfo, or another `partition`"),
    "PartitionInactive": ("the partition takes jobs but starts none", "another `partition`"),
    "PartitionNodeLimit": (
        "it asks for more nodes than the partition gives to one job",
        "fewer `nodes`, or another `partition`: scontrol show partition",
    ),
    "PartitionTimeLimit": (
        "its time limit is longer than the partition allows",
        "a shorter `time` (the run is queued again until it is done), or another `partition`",
    ),
    "PartitionConfig": (
        "the partition cannot give what it asks for",
        "compare with: scontrol show partition, scontrol show job {job}",
    ),
    "BadConstraints": (
        "no node can ever give what it asks for",
        "correct `constraint`, `gres`, `gpus_per_node` or `memory_per_node`: "
        "sinfo -o '%n %c %m %G %f'",
    ),
    "ReqNodeNotAvail": ("nodes that it needs are not to be had", "sinfo -R says why"),
    "NodeDown": ("a node that it needs is down", "sinfo -R says why"),
    "Nodes_required_for_job_are_DOWN": (
        "the nodes that it needs are down, drained, or kept for other jobs",
        "sinfo -R says why",
    ),
    "Licenses": ("waiting for a licence", ""),
    "Prolog": ("its nodes are being prepared", ""),
    "InvalidAccount": ("its account is not valid", "correct `account`: sacctmgr show assoc"),
    "InvalidQOS": ("its quality of service is not valid", "correct `qos`: sacctmgr show assoc"),
    "AccountNotAllowed": (
        "its account may not use this partition",
        "another `account` or `partition`",
    ),
    "QOSNotAllowed": ("its qos may not use this partition", "another `qos` or `partition`"),
    "JobArrayTaskLimit": ("too many tasks of its array run", ""),
    "MaxRequeueExceeded": ("it was queued again too often", "scontrol release {job}"),
    "JobLaunchFailure": (
        "Slurm could not start it, perhaps for a bad node, and holds it",
        "scontrol show job {job}; then scontrol release {job}, or `exclude` the node",
    ),
    "launch_failed_requeued_held": (
        "Slurm could not start it, perhaps for a bad node, and holds it",
        "scontrol release {job}, or `exclude` the node",
    ),
    "job_requeued_in_held_state": ("it was queued again and is held", "scontrol release {job}"),
    "FrontEndDown": ("a front end of the cluster is down", ""),
    "NonZeroExitCode": ("it ended with an error", "isles logs"),
    "FedJobLock": ("waiting for another cluster of the federation", ""),
    "BurstBufferResources": ("waiting for the burst buffer", ""),
}

# What a limit of a QOS, an association or a partition ends with -> what it counts.
_SLURM_LIMITS: tuple[tuple[str, str, str], ...] = (
    ("JobsPerUser", "jobs of one user", "wait for your other jobs, or stop one: squeue --me"),
    ("JobsLimit", "jobs", "wait for other jobs, or stop one: squeue --me"),
    ("SubmitJob", "jobs that wait and run", "wait for your other jobs: squeue --me"),
    ("WallDuration", "time of one job", "a shorter `time`; the run is queued again until done"),
    ("WallDur", "time of one job", "a shorter `time`; the run is queued again until done"),
    ("RunMinutes", "minutes that run at once", "a shorter `time`, or wait for other jobs"),
    ("Minutes", "minutes that are used up", "another `account`, or ask for more"),
    ("Billing", "what may be charged", "another `account`, or ask for more"),
    ("GRES", "GPUs and other such resources", "fewer `nodes` or `gpus_per_node`, or wait"),
    ("Cpu", "CPU cores", "fewer `nodes` or `cpus_per_node`, or wait"),
    ("Memory", "memory", "less `memory_per_node`, or wait"),
    ("Mem", "memory", "less `memory_per_node`, or wait"),
    ("Node", "nodes", "fewer `nodes`, or wait for other jobs"),
)


def slurm_pending(reason: str, job_id: str) -> tuple[str, str]:
    """Why a job of Slurm waits, and what can be done.

    Args:
        reason: as `scontrol show job` writes it.
        job_id: the job.
    """
    head = reason.partition(",")[0]
    known = _SLURM_REASONS.get(head)
    if known is not None:
        meaning, fix = known
        return meaning, fix.format(job=job_id)
    scope = next((s for s in ("QOS", "Assoc", "Part") if head.startswith(s)), None)
    if scope is not None:
        whose = {"QOS": "the qos", "Assoc": "the account", "Part": "the partition"}[scope]
        for end, counted, fix in _SLURM_LIMITS:
            if end.lower() in head.lower():
                return f"a limit of {whose} is reached: {counted}", fix
        return f"a limit of {whose} is reached", "sacctmgr show qos,assoc; or wait"
    return reason.replace("_", " "), ""


SLURM_ENDINGS: dict[str, tuple[str, ExitCode, str]] = {
    "TIMEOUT": (
        "its time limit ended it before it had saved",
        ExitCode.TRAINING,
        "a longer `save_before` or `time` in the launcher section, or smaller "
        "checkpoint.every_steps",
    ),
    "CANCELLED": ("it was cancelled (scancel)", ExitCode.INTERRUPTED, ""),
    "PREEMPTED": ("a job with a higher priority took its nodes", ExitCode.REQUEUE, ""),
    "NODE_FAIL": ("one of its nodes failed", ExitCode.COMMUNICATION, "sinfo -R says more"),
    "OUT_OF_MEMORY": (
        "it used more memory than it had asked for, and was killed",
        ExitCode.OUT_OF_MEMORY,
        "a larger `memory_per_node` in the launcher section, or a smaller "
        "training.micro_batch_size",
    ),
    "BOOT_FAIL": ("its nodes could not be booted", ExitCode.COMMUNICATION, "sinfo -R says more"),
    "DEADLINE": ("its deadline has passed", ExitCode.TRAINING, ""),
    "REVOKED": ("another cluster of the federation has it", ExitCode.TRAINING, ""),
}
"""State of a job that ended -> what happened, the exit code it stands for, what can be done."""

SLURM_REFUSALS: tuple[Refusal, ...] = (
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
    (r"memory", ("memory_per_node",), "sinfo -o '%n %m' shows the memory of the nodes, in MB"),
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

_PBS_LETTERS = {
    "H": ("it is held", "qrls {job} lets it go, if the hold is yours: qstat -f {job}"),
    "W": ("it waits for its start time, or for files that are copied for it", ""),
    "T": ("it is being moved to another server", ""),
    "M": ("it was moved to another server", ""),
}

# What a scheduler writes into the comment of a job: OpenPBS, and Torque under Maui or Moab.
_PBS_COMMENTS = (
    (
        r"can never run",
        "it can never run: the cluster has no nodes of this kind",
        "compare nodes, gpus_per_node, cpus_per_node and memory_per_node with `pbsnodes -a`; then "
        "isles stop, correct the run file, start again",
    ),
    (
        r"insufficient amount of (queue|server) resource",
        "a limit of the queue or the server is reached",
        "wait, or ask for less",
    ),
    (r"insufficient amount of resource", "nodes of this kind are taken", ""),
    (r"not enough (free )?(total )?nodes", "there are not enough free nodes", ""),
    (r"no available resources on nodes|nodes? (are )?unavailable", "nodes are taken or down", ""),
    (
        r"would exceed .*limit|job limit|has reached .*limit|maximum number of (running )?jobs|"
        r"exceeds .*limit",
        "a limit of the user, group or project is reached",
        "wait for other jobs of yours to end",
    ),
    (r"queue not started|queue .*stopped", "its queue is stopped by the administrator", ""),
    (
        r"dedicated time|cross (dedicated|reservation)|reservation|conflict with",
        "it would run into a reservation, such as one for maintenance",
        "a shorter launcher.time may fit before it",
    ),
    (r"prime ?time", "jobs of its queue run at certain hours only", ""),
    (r"depend", "it waits for another job", ""),
    (r"higher priority|strict order|fair ?share", "other jobs come first", ""),
    (r"held|system hold", "it is held", "qrls {job} lets it go, if the hold is yours"),
    (r"license", "it waits for a licence", ""),
)

# From PBS's own header: what a negative exit status stands for.
_PBS_ENDINGS = {
    -1: "it could not be started, before its files were in place",
    -2: "it could not be started, after its files were in place",
    -3: "it could not be started, and is tried again",
    -4: "its node was started anew while it ran",
    -5: "its node was started anew while it ran, and it is tried again",
    -6: "its node was started anew while it ran",
    -10: "one of its nodes refused it",
    -11: "it was ended to be run again",
    -12: "it ended, and is run again from a checkpoint",
    -20: "the prologue of one of its nodes failed",
}

_PBS_LIMITS = {
    -24: "file size",
    -25: "CPU time",
    -26: "CPU use",
    -27: "memory",
    -28: "virtual memory",
    -29: "time",
}

_GO_ON = "`isles train` again goes on from the last checkpoint"

_PBS_DELETED = (271, 143)
"""256 + TERM; and 128 + TERM where the script's shell has ended of it."""


def pbs_pending(letter: str, attributes: Mapping[str, str], job_id: str) -> tuple[str, str]:
    """Why a job of PBS waits, and what can be done.

    Args:
        letter: its job_state.
        attributes: of `qstat -f`.
        job_id: its id.
    """
    comment = attributes.get("comment", "").strip()
    note = f" ({comment})" if comment else ""
    for pattern, meaning, fix in _PBS_COMMENTS:
        if comment and re.search(pattern, comment, re.IGNORECASE):
            return f"{meaning}{note}", fix.format(job=job_id)
    if letter in _PBS_LETTERS:
        meaning, fix = _PBS_LETTERS[letter]
        return f"{meaning}{note}", fix.format(job=job_id)
    if comment:
        return f"it waits: {comment}", ""
    return "it waits for its turn: the scheduler has not said why", ""


def pbs_ended(status: str, attributes: Mapping[str, str]) -> tuple[str, str]:
    """How a job of PBS ended, and what can be done.

    Args:
        status: its Exit_status; empty where it never ran.
        attributes: of `qstat -f`.
    """
    if not re.fullmatch(r"-?\d+", status):
        comment = attributes.get("comment", "")
        return f"it was deleted before it ran{f' ({comment})' if comment else ''}", ""
    code = int(status)
    if code in _PBS_LIMITS:
        what, fix = _PBS_LIMITS[code], "ask the administrator about this limit"
        if what == "time":
            fix = (
                "a longer launcher.time; or a longer launcher.save_before, if saving took too long"
            )
        elif "memory" in what:
            fix = "a larger launcher.memory_per_node, or a smaller training.micro_batch_size"
        return f"it was killed: it went over its limit of {what}", fix
    if code in _PBS_ENDINGS:
        return _PBS_ENDINGS[code], _GO_ON
    if code in _PBS_DELETED:
        return "it was deleted (qdel)", ""
    if code > 128:
        return f"its script was killed by signal {code - (256 if code > 256 else 128)}", _GO_ON
    return ("its script ended" if code == 0 else f"its script ended with exit status {code}"), ""


PBS_REFUSALS: tuple[Refusal, ...] = (
    (r"unknown queue|queue.*(not exist|not found)", ("queue",), "qstat -Q shows the queues"),
    (
        r"account|project",
        ("account",),
        "ask your site for its name; where it wants a project: extra: ['-P NAME']",
    ),
    (
        r"walltime|exceeds? (queue|server)|violates",
        ("time",),
        "qstat -Qf shows the limits of queues",
    ),
    (
        r"specification|select|nodes?\b|resource|ngpus|gpus|ncpus|place",
        ("resources",),
        "compare nodes, gpus_per_node, cpus_per_node and memory_per_node with pbsnodes -a; "
        "launcher.resources takes the whole request, word for word; launcher.dialect says which "
        "PBS it is",
    ),
    (r"authorized|permission|denied", ("queue",), "another queue, or ask your site"),
)
