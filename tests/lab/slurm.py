"""A real Slurm over the pretend hosts: `ctl` is the login node, the others compute.

Needs the Debian packages slurmctld, slurmd, slurm-client and munge.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tests.lab.home import sh, until
from tests.lab.hosts import Lab, run_script

OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


@contextmanager
def slurm(lab: Lab) -> Iterator[None]:
    """Slurm, for as long as the block lasts; its commands work in every host.

    Partitions are `main` and, of a higher priority, `high`; jobs of `main` are queued again when
    `high` takes their nodes.
    """
    environ = lab.environ() | {"SLURM_STATE": str(lab.state / "slurm")}
    try:
        run_script("slurm/up.sh", environ=environ)
        for host in ("ctl", *nodes(lab)):
            sh(lab, host, f"rm -rf /etc/slurm && ln -s {lab.state}/slurm /etc/slurm")
        yield
    finally:
        run_script("slurm/down.sh", environ=environ)


def nodes(lab: Lab) -> list[str]:
    """The hosts that compute."""
    return sorted(path.name for path in (lab.state / "hosts").iterdir() if path.name != "ctl")


def job_fields(lab: Lab, job_id: str) -> dict[str, str]:
    """What Slurm knows of a job, as `scontrol show job` names it."""
    words = sh(lab, "ctl", f"scontrol show job -o {job_id}").split()
    return dict(word.split("=", 1) for word in words if "=" in word)


def wait_for_job(lab: Lab, job_id: str, *states: str) -> str:
    """Wait until a job is in one of these states, or else in one of its last; that state."""
    wanted = states or OVER

    def state() -> str:
        return job_fields(lab, job_id)["JobState"]

    return str(until(lambda: (s := state()) in wanted and s, lambda: f"{wanted}: {state()}"))
