"""Where a process stands among the ranks, whichever launcher has started it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from isles.errors import PreflightError


@dataclass(frozen=True, slots=True)
class Place:
    """A rank, or the one process that is to start them all.

    Args:
        world_size: ranks; None: nobody has started any.
        rank: this one.
        variables: what torchrun would have set and this launcher has not.
    """

    world_size: int | None
    rank: int
    variables: Mapping[str, str]


def find_place(environ: Mapping[str, str]) -> Place:
    """The place of this process: under torchrun, under `deepspeed`, as a task of srun, or alone.

    Raises:
        PreflightError: launchers of srun that do not know of one another, or tasks of srun that
            know of no meeting point.
    """
    if "RANK" in environ:
        local = environ.get("LOCAL_WORLD_SIZE") or environ.get("LOCAL_SIZE", "1")
        _check_launchers(environ, int(local))
        missing = "LOCAL_WORLD_SIZE" not in environ  # DeepSpeed's launcher has a name of its own
        variables = {"LOCAL_WORLD_SIZE": local} if missing else {}
        return Place(int(environ["WORLD_SIZE"]), int(environ["RANK"]), variables)
    if int(environ.get("SLURM_STEP_NUM_TASKS", "1")) == 1:
        return Place(None, 0, {})
    if missing_names := [n for n in ("MASTER_ADDR", "MASTER_PORT") if not environ.get(n)]:
        raise PreflightError(
            f"these are tasks of srun, and {' and '.join(missing_names)} not set",
            where="the job script",
            fix='export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) '
            "MASTER_PORT=29500 before srun",
        )
    variables = {
        "RANK": environ["SLURM_PROCID"],
        "LOCAL_RANK": environ["SLURM_LOCALID"],
        "WORLD_SIZE": environ["SLURM_STEP_NUM_TASKS"],
        "LOCAL_WORLD_SIZE": str(_tasks_here(environ)),
        "GROUP_RANK": environ["SLURM_NODEID"],
    }
    return Place(int(variables["WORLD_SIZE"]), int(variables["RANK"]), variables)


def speaks_for_node(environ: Mapping[str, str]) -> bool:
    """Whether this process is the one of its node that tells what all of them find."""
    return environ.get("LOCAL_RANK", environ.get("SLURM_LOCALID", "0")) == "0"


def _check_launchers(environ: Mapping[str, str], local: int) -> None:
    """Refuse launchers that srun has started and that would all start the same ranks."""
    tasks = _tasks_here(environ)
    nodes = int(environ.get("SLURM_STEP_NUM_NODES", "1"))
    if tasks > 1 and local > 1:
        what = (
            f"srun has started {tasks} tasks on this node, and each is a launcher that starts "
            f"{local} ranks: {tasks * local} processes for {local} GPUs"
        )
    elif tasks and nodes > 1 and int(environ["WORLD_SIZE"]) == local:
        what = (
            f"srun has started a launcher on each of {nodes} nodes, and this one knows of its own "
            f"{local} ranks only: {nodes} runs, not one"
        )
    else:
        return
    raise PreflightError(
        what,
        where="the job script",
        fix="write it anew: python scripts/distributed_setup.py slurm …; or start a task for each "
        "GPU and no launcher: srun python src/train.py …",
    )


def _tasks_here(environ: Mapping[str, str]) -> int:
    """Tasks of this step of srun on this node; 0: this is none of them."""
    counts = environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    node = int(environ.get("SLURM_NODEID", "0"))
    found: list[int] = []
    for part in filter(None, counts.split(",")):  # 8(x3),4
        count, _, times = part.partition("(x")
        found += [int(count)] * int(times.rstrip(")") or 1)
    return found[node] if node < len(found) else 0
