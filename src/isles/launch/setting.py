"""The lines of bash that bring a node to where its ranks run: folder, modules, venv or conda."""

from __future__ import annotations

import shlex
import sys

from isles.config.cluster import ClusterConfig
from isles.config.environment import EnvironmentConfig


def setting_lines(cluster: ClusterConfig, workdir: str) -> list[str]:
    """What a script or a remote command begins with, one line of bash each; `set -e` is not
    assumed, and every line that can fail says so in words and ends the shell with 1.

    Args:
        cluster: the cluster.
        workdir: the folder in which the ranks run.
    """
    environment = cluster.environment
    lines = [f"cd {quoted(workdir)} || exit 1", *environment.setup]
    lines += [f"module load {shlex.quote(name)} || exit 1" for name in environment.modules]
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


def quoted(path: str) -> str:
    """A path as a word of bash on a node; a leading ~/ is the home of the user there."""
    return f"~/{shlex.quote(path[2:])}" if path[:2] == "~/" and path[2:] else shlex.quote(path)


def python_of(environment: EnvironmentConfig) -> str:
    """Python on the nodes, as typed after `setting_lines`."""
    if environment.python is not None:
        return environment.python
    if environment.venv is not None or environment.conda is not None:
        return "python"
    return sys.executable


_CONDA_FAILED = (
    "Failed to activate conda environment: is conda on PATH, and the environment on this node?"
)
