"""torchrun's own command line, and what nodes need before it: by hand or in a queue's script."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import PurePath, PurePosixPath

from isles.config.load import Loaded
from isles.config.sections.cluster import ClusterConfig
from isles.config.sections.run import RunConfig
from isles.launch.ssh.environment import network_variables, python_of, quoted, setting_lines

MOST_TIMES = 20
"""How often a rendered job with a script of the user's own goes on after its time limit: whether it
comes any further cannot be seen from outside."""


def node_lines(cluster: ClusterConfig, workdir: str, *, nodes: int, device: str) -> list[str]:
    """Lines of bash after which `torchrun` is that of the run file's Python.

    Args:
        cluster: the cluster.
        workdir: the folder in which the ranks run.
        nodes: how many.
        device: cpu or cuda.
    """
    lines = setting_lines(cluster, workdir, is_login=True)
    environment = cluster.environment
    python = PurePath(python_of(environment))
    if environment.venv is None and environment.conda is None and python.is_absolute():
        lines.append(f'export PATH={shlex.quote(str(python.parent))}:"$PATH"')
    variables = network_variables(cluster.network, None, device)
    if nodes == 1:
        variables = {"GLOO_SOCKET_IFNAME": "lo"}
        variables |= {"NCCL_SOCKET_IFNAME": "lo"} if device == "cuda" else {}
    return [*lines, *(f'export {key}="${{{key}:-{text}}}"' for key, text in variables.items())]


def alone_command(loaded: Loaded, overrides: Sequence[str]) -> list[str]:
    """What follows torchrun's own options where nothing of isles but its trainer is needed.

    Args:
        loaded: the run file.
        overrides: of the command line, which the trainer is given too.
    """
    config = loaded.config
    if config.training.script is not None:
        return script_command(config)
    # On other machines the run file lies in workdir, under the name that was typed here.
    is_here = config.clusters[0].workdir is None
    path = loaded.path.absolute() if is_here else loaded.path
    return ["-m", "isles.train", str(path), *overrides]


def script_command(config: RunConfig) -> list[str]:
    """What follows torchrun's own options, where a script runs without isles."""
    assert config.training.script is not None
    return [config.training.script, *map(str, config.training.script_args)]


def runs_pattern(config: RunConfig, workdir: str) -> str | None:
    """The run directories of this name, as bash finds them; None for a script of the user's own,
    which makes none.

    Args:
        config: the run file.
        workdir: the folder in which the ranks run.
    """
    if config.training.script is not None:
        return None
    folder = config.output_dir
    if not folder.startswith("~/"):
        folder = str(PurePosixPath(workdir) / folder)
    return f"{quoted(f'{folder}/{config.name}')}-[0-9]*"
