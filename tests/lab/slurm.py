"""A real Slurm over the pretend hosts: `ctl` is the login node, the others compute.

Needs the Debian packages slurmctld, slurmd, slurm-client and munge.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.deadline import DEADLINE_S
from tests.lab.home import sh
from tests.lab.hosts import Lab

_SLURM = Path(__file__).parent / "slurm"


@contextmanager
def slurm(lab: Lab) -> Iterator[None]:
    """Slurm, for as long as the block lasts; its commands work in every host.

    Partitions are `main` and, of a higher priority, `high`; jobs of `main` are queued again when
    `high` takes their nodes.
    """
    environ = lab.environ() | {"SLURM_STATE": str(lab.state / "slurm"), "GPUS": "1"}
    try:
        _run("up.sh", "netlab", environ=environ, timeout_s=DEADLINE_S)
        for host in ("ctl", *nodes(lab)):
            sh(lab, host, f"rm -rf /etc/slurm && ln -s {lab.state}/slurm /etc/slurm")
        yield
    finally:
        _run("down.sh", environ=environ, timeout_s=DEADLINE_S)


def nodes(lab: Lab) -> list[str]:
    """The hosts that compute."""
    return sorted(path.name for path in (lab.state / "hosts").iterdir() if path.name != "ctl")


def job_fields(lab: Lab, job_id: str) -> dict[str, str]:
    """What Slurm knows of a job, as `scontrol show job` names it."""
    words = sh(lab, "ctl", f"scontrol show job -o {job_id}").split()
    return dict(word.split("=", 1) for word in words if "=" in word)


def _run(script: str, *args: str, environ: dict[str, Any], timeout_s: float) -> None:
    done = subprocess.run(
        [str(_SLURM / script), *args],
        env=environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"slurm/{script}: {done.stdout}{done.stderr}")
