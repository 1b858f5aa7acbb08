"""The job script of Slurm, from the run file: the same with and without a run directory."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from isles import __version__
from isles.config.sections.cluster import SlurmLauncherConfig
from isles.config.sections.run import RunConfig
from isles.errors import ConfigError
from isles.launch.render import MOST_TIMES, node_lines, runs_pattern
from isles.launch.script_template import fill_template
from isles.launch.ssh.environment import python_of, quoted


@dataclass(frozen=True, slots=True)
class JobText:
    """What a job script is made from, besides the run file.

    Args:
        launcher: the section; where the run file has another launcher, one that fits it.
        nodes: how many.
        nproc: ranks on each.
        device: cpu or cuda.
        workdir: the folder in which the ranks run.
        command: what follows torchrun's own options, in a script that runs without isles.
        run_dir: the run directory as the nodes see it; None: the script runs without isles.
        attempt: the number of this start; 0 without a run directory.
        notes: comments at the head.
    """

    launcher: SlurmLauncherConfig
    nodes: int
    nproc: int
    device: str
    workdir: str
    command: Sequence[str] = ()
    run_dir: str | None = None
    attempt: int = 0
    notes: Sequence[str] = ()


def job_script(config: RunConfig, job: JobText) -> str:
    """The script of a run that isles follows: what the agents run in, and the coordinator.

    Raises:
        ConfigError: Slurm cannot write into the run directory.
    """
    cluster = config.clusters[0]
    return fill_template(
        "job.sh.jinja",
        shebang=_shebang(config),
        title=f"{config.name}: {_size_text(job)}, written by isles {__version__}",
        head=["`isles train` has submitted this file as it is."],
        sign="#SBATCH",
        options=sbatch_options(config, job),
        setting=node_lines(cluster, job.workdir, nodes=job.nodes, device=job.device),
        log=None,
        python=quoted(python_of(cluster.environment)),
        run_dir=job.run_dir,
        attempt=job.attempt,
        more="",
    )


def sbatch_script(config: RunConfig, job: JobText) -> str:
    """A script that runs without isles' control wing: torchrun on each node."""
    cluster = config.clusters[0]
    cpus = job.launcher.cpus_per_node
    return fill_template(
        "sbatch.sh.jinja",
        shebang=_shebang(config),
        title=f"{config.name}: {_size_text(job)}, written by isles {__version__}",
        head=["One task a node runs torchrun, which starts the ranks of that node.", *job.notes],
        options=sbatch_options(config, job),
        setting=node_lines(cluster, job.workdir, nodes=job.nodes, device=job.device),
        nodes=job.nodes,
        nproc=job.nproc,
        interface=cluster.network.interface,
        port=cluster.network.port,
        start_timeout=math.ceil(cluster.start_timeout),
        command=shlex.join(str(word) for word in job.command),
        # Since Slurm 22.05 a step no longer takes this from its job.
        srun_cpus=f" --cpus-per-task={cpus}" if cpus else "",
        requeue=job.launcher.requeue,
        runs=runs_pattern(config, job.workdir),
        most_times=MOST_TIMES,
    )


def _shebang(config: RunConfig) -> str:
    # Modules and conda are functions that only a login shell is sure to have.
    environment = config.clusters[0].environment
    return "#!/bin/bash -l" if environment.modules or environment.conda else "#!/bin/bash"


def sbatch_options(config: RunConfig, job: JobText) -> list[str]:
    """What follows `#SBATCH`, in a fixed order."""
    launcher = job.launcher
    asked = launcher.gres
    if asked is None and job.device == "cuda":
        asked = f"gpu:{job.nproc}"
    values: dict[str, object] = {
        "job-name": config.name,
        "nodes": job.nodes,
        "ntasks-per-node": 1,
        "gres": None if asked == "none" else asked,
        "cpus-per-task": launcher.cpus_per_node,
        "mem": launcher.memory_per_node,
        "time": slurm_time(launcher.time) if launcher.time is not None else None,
        "account": launcher.account,
        "partition": launcher.partition,
        "qos": launcher.qos,
        "constraint": launcher.constraint,
        "nodelist": launcher.nodelist,
        "exclude": launcher.exclude,
        "reservation": launcher.reservation,
        "output": _output(job),
        "open-mode": "append",
        "signal": f"B:USR1@{math.ceil(launcher.save_before)}",
    }
    options = [f"--{name}={_value(value)}" for name, value in values.items() if value is not None]
    options.append("--requeue" if launcher.requeue else "--no-requeue")
    if config.clusters[0].min_nodes < job.nodes:
        options.append("--no-kill")  # the run goes on without a node that fails
    return [*options, *launcher.extra]


def slurm_time(seconds: float) -> str:
    """A time limit as Slurm takes it: DAYS-HH:MM:SS or HH:MM:SS, never shorter than asked."""
    minutes, rest = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    clock = f"{hours:02d}:{minutes:02d}:{rest:02d}"
    return f"{days}-{clock}" if days else clock


def _size_text(job: JobText) -> str:
    kind = "GPU" if job.device == "cuda" else "CPU process"
    plural = "" if job.nproc == 1 else "es" if job.device == "cpu" else "s"
    each = f" with {job.nproc} {kind}{plural}"
    return f"{job.nodes} node{'s' if job.nodes > 1 else ''}{each}{' each' * (job.nodes > 1)}"


def _value(value: object) -> str:
    """Quoted where sbatch would take a space for the next option, or # for a comment."""
    text = str(value)
    if not re.search(r"""[\s#"'\\]""", text):
        return text
    return '"' + re.sub(r'(["\\])', r"\\\1", text) + '"'


def _output(job: JobText) -> str:
    """Where the script's own output goes; sbatch takes % for a sign of its own."""
    if job.run_dir is None:
        return "slurm-%j.out"
    if "\\" in job.run_dir:
        raise ConfigError(
            f"Slurm writes to no path with a backslash: {job.run_dir}",
            where="output_dir",
            fix="set output_dir to a folder without one",
        )
    folder = job.run_dir.replace("%", "%%")
    return f"{folder}/attempts/{job.attempt:03d}/slurm-%j.out"
