"""Job scripts for Slurm and PBS: for a run that isles follows, and for a run without isles."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import PurePath, PurePosixPath

from jinja2 import Environment, PackageLoader, StrictUndefined

from isles import __version__
from isles.config.sections.cluster import (
    ClusterConfig,
    PbsLauncherConfig,
    QueueSection,
    SlurmLauncherConfig,
)
from isles.config.sections.run import RunConfig
from isles.errors import ConfigError, ExitCode
from isles.facts.units import printable
from isles.launch.base import ranks_text
from isles.launch.container.rendered import torchrun_words
from isles.launch.ssh.environment import network_variables, python_of, quoted, setting_lines
from isles.run.paths import Attempt

_MAX_SCRIPT_STARTS = 20
"""Number of times that a rendered job with a user's own script continues after its time limit:
isles cannot see its progress."""

_END_S = 45
"""Longest time for torchrun to end its ranks: it gives them 30 s."""

_TORQUE_NAME = 15
"""The longest job name that every version of Torque accepts."""


@dataclass(frozen=True, slots=True)
class JobText:
    """Values of a job script that are not in the run file.

    Args:
        launcher: the launcher section; if the run file has another launcher, a section that fits
            it.
            The dialect of PBS is known: `auto` means openpbs.
        workdir: working folder of the ranks, absolute.
        run_dir: the run directory as the nodes see it; None: the script runs without isles.
        attempt: the number of this attempt; 0 without a run directory.
    """

    launcher: SlurmLauncherConfig | PbsLauncherConfig
    nodes: int
    nproc: int
    device: str
    workdir: str
    run_dir: str | None = None
    attempt: int = 0

    def of(self, attempt: Attempt) -> JobText:
        """The same values, for an attempt of a run that isles follows."""
        run_dir = str(attempt.path.parent.parent)
        return replace(self, run_dir=run_dir, attempt=attempt.number)

    @property
    def size(self) -> str:
        ranks, is_one = ranks_text(self.nproc, self.device), self.nodes == 1
        return f"1 node with {ranks}" if is_one else f"{self.nodes} nodes with {ranks} each"


def fill_template(name: str, /, **values: object) -> str:
    """The text of a template of `launch/templates`."""
    for lines in ("head", "options"):
        # These lines become bash comments, and the current folder may have any name.
        found = values.get(lines)
        if isinstance(found, list):
            values[lines] = [printable(line, keep="\t") for line in found]
    return _templates().get_template(name).render(**values)


@cache
def _templates() -> Environment:
    # Cached, because compiling a template takes ten times as long as filling it.
    environment = Environment(
        loader=PackageLoader("isles.launch"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        comment_start_string="<#",  # ${#name[@]} is bash's
        comment_end_string="#>",
        autoescape=False,  # shell scripts; values are quoted for the shell
    )
    environment.filters["quote"] = lambda value: shlex.quote(str(value))
    return environment


def node_lines(cluster: ClusterConfig, workdir: str, *, nodes: int, device: str) -> list[str]:
    """Lines of bash that set up the Python of the run file, so that `torchrun` is its torchrun."""
    lines = setting_lines(cluster, workdir, is_login=True)
    environment = cluster.environment
    python = PurePath(python_of(environment))
    is_named = environment.venv is not None or environment.conda is not None
    if not is_named and environment.container is None and python.is_absolute():
        lines.append(f'export PATH={shlex.quote(str(python.parent))}:"$PATH"')
    variables = network_variables(cluster.network, None, device)
    if nodes == 1:
        variables = {"GLOO_SOCKET_IFNAME": "lo"}
        variables |= {"NCCL_SOCKET_IFNAME": "lo"} if device == "cuda" else {}
    return [*lines, *(f'export {key}="${{{key}:-{text}}}"' for key, text in variables.items())]


def job_script(config: RunConfig, job: JobText) -> str:
    """The script of a run that isles follows; it starts the coordinator, which starts the agents.

    Raises:
        ConfigError: a value that the scheduler would misread.
    """
    cluster, launcher = config.clusters[0], job.launcher
    setting = node_lines(cluster, job.workdir, nodes=job.nodes, device=job.device)
    is_pbs = isinstance(launcher, PbsLauncherConfig)
    if is_pbs and (threads := _pbs_threads(cluster, launcher, job.nproc)) is not None:
        setting.append(f"export OMP_NUM_THREADS={threads} # per rank; PBS sets it to all cores")
    return fill_template(
        "job.sh.jinja",
        shebang=_shebang(cluster, launcher),
        head=[
            f"{config.name}: {job.size}",
            f"written by isles {__version__} for attempt {job.attempt} of {job.run_dir}",
            *_container_notes(cluster),
        ],
        sign="#PBS" if is_pbs else "#SBATCH",
        options=pbs_options(config, job) if is_pbs else slurm_options(config, job),
        setting=setting,
        # The coordinator starts a script of PBS on each node, with the agent's arguments: a task
        # of pbsdsh starts in $HOME, with a bare environment.
        log=f"{job.run_dir}/attempts/{job.attempt:03d}/pbs.log" if is_pbs else None,
        python=quoted(python_of(cluster.environment)),
        run_dir=job.run_dir,
        attempt=job.attempt,
    )


def _container_notes(cluster: ClusterConfig) -> list[str]:
    found = cluster.environment.own_container
    if found is None:
        return []
    by = f" by {found.runtime}" if found.runtime != "auto" else ""
    return [f"the agents and ranks run in {found.image}{by}; this script, and srun, outside"]


def rendered_script(
    config: RunConfig,
    job: JobText,
    command: Sequence[str],
    *,
    notes: Sequence[str] = (),
    path: str | None = None,
) -> str:
    """A script that runs without isles' control processes: torchrun on each node.

    Args:
        command: the words after torchrun's own options.
        notes: comments at the top.
        path: absolute path of the future script; None: unknown. A script for PBS submits itself.
    """
    cluster, launcher = config.clusters[0], job.launcher
    head = [f"{config.name}: {job.size} under torchrun"]
    head += [f"written by isles {__version__}; it does not need the command isles to run"]
    head += notes
    run, options = torchrun_words(config, job.workdir, job.device, launcher.kind)
    shared: dict[str, object] = {
        "run": run,
        "setting": node_lines(cluster, job.workdir, nodes=job.nodes, device=job.device),
        "nodes": job.nodes,
        "nproc": job.nproc,
        "interface": cluster.network.interface,
        "port": cluster.network.port,
        "start_timeout": math.ceil(cluster.start_timeout),
        "command": shlex.join(command),
        "requeue": launcher.requeue,
        "runs": _runs_pattern(config, job.workdir),
        "most_times": _MAX_SCRIPT_STARTS,
        "head": head,
    }
    if isinstance(launcher, SlurmLauncherConfig):
        cpus = launcher.cpus_per_node
        return fill_template(
            "sbatch.sh.jinja",
            shebang=_shebang(cluster, launcher),
            options=slurm_options(config, job),
            # Since Slurm 22.05 a step does not inherit this from its job.
            srun_options=(f" --cpus-per-task={cpus}" if cpus else "")
            + f" {options}" * bool(options),
            **shared,
        )
    save_after = int(launcher.time - launcher.save_before) if launcher.time is not None else None
    if save_after is not None and launcher.requeue and path is None:
        head.append("submit it again to resume it after its time limit; a script written with")
        head.append("--output resumes by itself")
    bin_path = launcher.bin_path.rstrip("/") + "/" if launcher.bin_path else ""
    has_limit = save_after is not None and config.training.script is not None
    return fill_template(
        "pbs.sh.jinja",
        options=pbs_options(config, job),
        # A script of the user's own gets SIGTERM; the trainer is asked to save by a file.
        limit=f"timeout --kill-after={_END_S} {save_after} " if has_limit else "",
        lost=int(ExitCode.COMMUNICATION),
        threads=_pbs_threads(cluster, launcher, job.nproc),
        name=config.name,
        path=path,
        pbsdsh=[f"{bin_path}pbsdsh"] + ["-u"] * (launcher.dialect == "torque"),
        qsub=f"{bin_path}qsub",
        save_after=save_after,
        **shared,
    )


def _runs_pattern(config: RunConfig, workdir: str) -> str | None:
    # Glob for the run directories of this name; a user's own script makes none.
    if config.training.script is not None:
        return None
    folder = config.output_dir
    if not folder.startswith("~/"):
        folder = str(PurePosixPath(workdir) / folder)
    return f"{quoted(f'{folder}/{config.name}')}-[0-9]*"


def slurm_options(config: RunConfig, job: JobText) -> list[str]:
    """Options for `#SBATCH` lines, in a fixed order.

    Raises:
        ConfigError: Slurm cannot write into the run directory.
    """
    launcher = job.launcher
    assert isinstance(launcher, SlurmLauncherConfig)
    asked = launcher.gres
    if asked is None and job.device == "cuda":
        asked = f"gpu:{job.nproc}"
    output = "slurm-%j.out"
    if job.run_dir is not None:
        if "\\" in job.run_dir:
            raise ConfigError(
                f"Slurm cannot write to a path with a backslash: {job.run_dir}",
                where="output_dir",
                fix="set output_dir to a folder without a backslash",
            )
        folder = job.run_dir.replace("%", "%%")
        output = f"{folder}/attempts/{job.attempt:03d}/{output}"
    values: dict[str, object] = {
        "job-name": config.name,
        "nodes": job.nodes,
        "ntasks-per-node": 1,
        "gres": None if asked == "none" else asked,
        "cpus-per-task": launcher.cpus_per_node,
        "mem": launcher.memory_per_node,
        "time": clock(launcher.time) if launcher.time is not None else None,
        "account": launcher.account,
        "partition": launcher.partition,
        "qos": launcher.qos,
        "constraint": launcher.constraint,
        "nodelist": launcher.nodelist,
        "exclude": launcher.exclude,
        "reservation": launcher.reservation,
        "output": output,
        "open-mode": "append",
        "signal": f"B:USR1@{math.ceil(launcher.save_before)}",
    }
    options = [
        f"--{key}={_slurm_value(value)}" for key, value in values.items() if value is not None
    ]
    options.append("--requeue" if launcher.requeue else "--no-requeue")
    if config.clusters[0].min_nodes < job.nodes:
        options.append("--no-kill")  # the run continues without a failed node
    return [*options, *launcher.extra]


def clock(seconds: float) -> str:
    """A time limit as HH:MM:SS, never shorter than requested."""
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:{rest:02d}"


def _slurm_value(value: object) -> str:
    # sbatch would read a space as the start of the next option, and # as a comment.
    text = str(value)
    if not re.search(r"""[\s#"'\\]""", text):
        return text
    return '"' + re.sub(r'(["\\])', r"\\\1", text) + '"'


def _shebang(cluster: ClusterConfig, launcher: QueueSection) -> str:
    # Only a login shell is sure to have the functions for modules and conda; PBS uses one.
    environment, is_pbs = cluster.environment, isinstance(launcher, PbsLauncherConfig)
    is_login = not is_pbs and (environment.modules or environment.conda)
    return "#!/bin/bash -l" if is_login else "#!/bin/bash"


def pbs_options(config: RunConfig, job: JobText) -> list[str]:
    """Options for `#PBS` lines, in a fixed order, for OpenPBS or Torque.

    Raises:
        ConfigError: a memory size that cannot be multiplied, for Torque; a run directory that PBS
            would read as a path on another host.
    """
    launcher = job.launcher
    assert isinstance(launcher, PbsLauncherConfig)
    name = config.name[:_TORQUE_NAME] if launcher.dialect == "torque" else config.name
    lines = [f"-N {name}", *(f"-l {request}" for request in _pbs_resources(launcher, job))]
    lines += [f"-l walltime={clock(launcher.time)}"] if launcher.time is not None else []
    lines += [f"-q {shlex.quote(launcher.queue)}"] if launcher.queue is not None else []
    lines += [f"-A {shlex.quote(launcher.account)}"] if launcher.account is not None else []
    lines += [f"-r {'y' if launcher.requeue else 'n'}", "-j oe"]
    if job.run_dir is not None:
        output = f"{job.run_dir}/attempts/{job.attempt:03d}/pbs.out"
        if ":" in output:
            raise ConfigError(
                "output_dir must not contain a colon, because PBS reads the part before it as a "
                f"host: {output}",
                where="output_dir",
                fix="set output_dir to a folder without a colon",
            )
        lines.append(f"-o {shlex.quote(output)}")
    return [*lines, *launcher.extra]


def _pbs_resources(launcher: PbsLauncherConfig, job: JobText) -> list[str]:
    if launcher.resources is not None:
        return [launcher.resources]
    nodes, cpus = job.nodes, launcher.cpus_per_node or job.nproc
    gpus = job.nproc if job.device == "cuda" else 0
    memory = launcher.memory_per_node
    if launcher.dialect != "torque":
        request = f"select={nodes}:ncpus={cpus}" + (f":ngpus={gpus}" if gpus else "")
        request += f":mem={memory}" if memory is not None else ""
        # One line of the node file for each node, and each node on a different host.
        return [f"{request}:mpiprocs=1", "place=scatter"]
    request = f"nodes={nodes}:ppn={cpus}" + (f":gpus={gpus}" if gpus else "")
    if memory is None:
        return [request]
    size = re.fullmatch(r"(\d+)([kmgtKMGT]?[bBwW]?)", memory)
    if size is None:
        raise ConfigError(
            f"memory_per_node {memory} is not a valid size for Torque",
            where="clusters.0.launcher.memory_per_node",
            fix="write a whole number and kb, mb, gb or tb, such as 200gb",
        )
    # Torque's mem is for the whole job.
    return [request, f"mem={int(size[1]) * nodes}{size[2]}"]


def _pbs_threads(cluster: ClusterConfig, launcher: QueueSection, nproc: int) -> int | None:
    # PBS sets OMP_NUM_THREADS to all cores of the node: a rank gets its share.
    if "OMP_NUM_THREADS" in cluster.environment.variables:
        return None
    return max(1, (launcher.cpus_per_node or nproc) // nproc)
