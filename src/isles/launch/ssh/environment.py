"""The lines of bash and variables that ranks need on a node: folder, modules, venv, network."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # nodes use this file without the config classes, which are slow to import
    from isles.config.sections.cluster import ClusterConfig, EnvironmentConfig, NetworkConfig
    from isles.config.sections.run import RunConfig

_FIND_MODULE = "type module >/dev/null 2>&1 || source /etc/profile"
_FIND_CONDA = "type conda >/dev/null 2>&1 || PATH=$PATH:" + ":".join(
    f"{place}/condabin"
    for place in ("~/miniforge3", "~/miniconda3", "~/mambaforge", "~/anaconda3", "/opt/conda")
)
_CONDA_FAILED = (
    "Failed to activate conda environment (conda must be on PATH, and the environment on this node)"
)

_PROFILES = {
    "auto": {},
    "infiniband": {"NCCL_IB_DISABLE": "0"},
    # The GID index is for RoCE only; on InfiniBand it would select a wrong GID.
    "roce": {"NCCL_IB_DISABLE": "0", "NCCL_IB_GID_INDEX": "3"},
    "ethernet": {"NCCL_IB_DISABLE": "1"},
}


def setting_lines(cluster: ClusterConfig, workdir: str, *, is_login: bool = False) -> list[str]:
    """Setup at the start of a script or remote command, one line of bash each. The lines do not
    need `set -e`: every line that can fail prints an error and ends the shell with 1.

    Args:
        is_login: whether a login shell reads them, as in the job scripts.
    """
    environment = cluster.environment
    lines = [f"cd {quoted(workdir)} || exit 1", *tool_lines(environment, is_login=is_login)]
    if environment.venv is not None:
        lines.append(f"source {quoted(environment.venv)}/bin/activate || exit 1")
    if environment.conda is not None:
        name = quoted(environment.conda)
        lines += [
            'eval "$(conda shell.bash hook)" && '
            f"conda activate {name} || {{ echo {shlex.quote(_CONDA_FAILED)} >&2; exit 1; }}"
        ]
    lines += [f"export {k}={shlex.quote(v)}" for k, v in environment.variables.items()]
    return lines


def tool_lines(environment: EnvironmentConfig, *, is_login: bool = False) -> list[str]:
    """Lines before the Python environment itself: the user's own lines, modules, conda.

    A shell that ssh starts for a command is not a login shell. Often it has neither the command
    module, which /etc/profile defines, nor conda, which an interactive ~/.bashrc puts on PATH.
    """
    lines = [_FIND_MODULE] if environment.modules and not is_login else []
    lines += environment.setup
    lines += [f"module load {shlex.quote(name)} || exit 1" for name in environment.modules]
    return [*lines, _FIND_CONDA] if environment.conda is not None and not is_login else lines


def python_of(environment: EnvironmentConfig) -> str:
    """Python on the nodes, as a command after `setting_lines`."""
    if environment.python is not None:
        return environment.python
    if environment.venv is not None or environment.conda is not None:
        return "python"
    return sys.executable


def quoted(path: str) -> str:
    """A path as a word of bash on a node; a leading ~/ is the user's home there."""
    if path in ("~", "~/"):
        return "~"
    return f"~/{shlex.quote(path[2:])}" if path[:2] == "~/" else shlex.quote(path)


def path_elsewhere(run_dir: Path, config: RunConfig) -> str:
    """Path of a run directory for the other hosts of the run; called on its own host.

    If the run directory is in a home, it is in the home of each host's own user.
    """
    workdir = config.clusters[0].workdir or ""
    is_relative = not Path(config.output_dir).is_absolute()
    if config.output_dir.startswith("~/") or (is_relative and workdir.startswith("~")):
        for home in (Path.home(), Path.home().resolve()):
            if run_dir.is_relative_to(home):
                return f"~/{run_dir.relative_to(home)}"
    return str(run_dir)


def network_variables(network: NetworkConfig, interface: str | None, device: str) -> dict[str, str]:
    """Variables of gloo and NCCL that the ranks of one node need to reach the others; variables of
    the user (`environment.variables`) must override them.

    Args:
        interface: the interface with the node's address; None: unknown. An interface in `network`
            overrides it.
    """
    name = network.interface or interface
    # Ranks on GPUs also use gloo: for small messages, and for checkpoints during training.
    variables = {"GLOO_SOCKET_IFNAME": name} if name else {}
    if device == "cuda":
        variables |= {"NCCL_SOCKET_IFNAME": name} if name else {}
        variables |= _PROFILES[network.profile]
    return variables


def network_line(network: NetworkConfig, interface: str | None, device: str) -> str:
    """Text about the choice, one line, for the user."""
    variables = network_variables(network, interface, device)
    words = " ".join(f"{name}={value}" for name, value in variables.items())
    return f"network {network.profile}: {words or 'chosen by gloo and NCCL'}"
