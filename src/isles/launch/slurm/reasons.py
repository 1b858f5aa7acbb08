"""Why a job of Slurm waits, and how it ended, in words; and what can be done."""

from __future__ import annotations

from isles.errors import ExitCode

# Slurm's words for a reason, without their ends such as `ReqNodeNotAvail,_UnavailableNodes:a1`,
# -> what it means, what can be done. Source: https://slurm.schedmd.com/job_reason_codes.html
_REASONS: dict[str, tuple[str, str]] = {
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
_LIMITS: tuple[tuple[str, str, str], ...] = (
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


def pending_reason(reason: str, job_id: str) -> tuple[str, str]:
    """What Slurm's reason for waiting means, and what can be done.

    Args:
        reason: as `scontrol show job` writes it.
        job_id: the job.
    """
    head = reason.partition(",")[0]
    known = _REASONS.get(head)
    if known is not None:
        meaning, fix = known
        return meaning, fix.format(job=job_id)
    scope = next((s for s in ("QOS", "Assoc", "Part") if head.startswith(s)), None)
    if scope is not None:
        whose = {"QOS": "the qos", "Assoc": "the account", "Part": "the partition"}[scope]
        for end, counted, fix in _LIMITS:
            if end.lower() in head.lower():
                return f"a limit of {whose} is reached: {counted}", fix
        return f"a limit of {whose} is reached", "sacctmgr show qos,assoc; or wait"
    return reason.replace("_", " "), ""


ENDINGS: dict[str, tuple[str, ExitCode, str]] = {
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
