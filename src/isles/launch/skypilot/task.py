"""Task files of SkyPilot: the nodes of a cluster, their setup, and an agent on each."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from isles import __version__
from isles.config.load import Loaded
from isles.config.sections.cluster import ClusterConfig, SkypilotLauncherConfig
from isles.config.yaml import dump_for_others
from isles.errors import ExitCode
from isles.launch.base import ranks_text
from isles.launch.queue.script import fill_template
from isles.launch.remote.setup import extras_of, make_lines, wheel_name
from isles.launch.ssh.environment import python_of, quoted, setting_lines
from isles.run.env import SKY_JOIN, SKY_TOKEN

WORKDIR = "~/sky_workdir"
"""Folder where SkyPilot puts the workdir of a task, and where its commands start."""

_VENV = "~/.isles/venv"
_WHEELS = "~/.isles/wheels"


@dataclass(frozen=True, slots=True)
class TaskText:
    """Values of a task that are not in the run file.

    Args:
        launcher: the launcher section; if the run file has another launcher, a section that fits
            it.
        overrides: of the command line, for the first node.
        device: cuda or cpu.
        wheel: local path of isles as a wheel; None: pip can install isles.
        has_join: whether the start has a join line.
        notes: comments at the top.
    """

    launcher: SkypilotLauncherConfig
    overrides: Sequence[str]
    device: str
    resume: str = "auto"
    typed: str = ""
    wheel: str | None = None
    has_join: bool = False
    notes: Sequence[str] = ()


def node_cluster(cluster: ClusterConfig) -> ClusterConfig:
    """The cluster as its nodes see it: with the folder and the Python of the task."""
    environment = cluster.environment
    if not _names_python(cluster):
        environment = environment.model_copy(update={"venv": _VENV})
    workdir = cluster.workdir or WORKDIR
    return cluster.model_copy(update={"environment": environment, "workdir": workdir})


def task_file(loaded: Loaded, task: TaskText) -> str:
    """The text of the task file: YAML, without secrets."""
    config, cluster = loaded.config, loaded.config.clusters[0]
    ranks = ranks_text(int(cluster.gpus_per_node), task.device)
    size = f"1 node with {ranks}" if cluster.max_nodes == 1 else f"{cluster.max_nodes} nodes with "
    size += "" if cluster.max_nodes == 1 else f"{ranks} each"
    head = [f"{config.name}: {size}, on SkyPilot", f"written by isles {__version__}", *task.notes]
    comments = "".join(f"# {line}\n" for line in head)
    return comments + dump_for_others(_content(loaded, task))


def secret_names(launcher: SkypilotLauncherConfig, *, has_join: bool) -> list[str]:
    """Variables that the task gets as secrets: the token of the attempt, and the user's secrets."""
    return [SKY_TOKEN, *([SKY_JOIN] if has_join else []), *launcher.secrets]


def _content(loaded: Loaded, task: TaskText) -> dict[str, Any]:
    config, launcher = loaded.config, task.launcher
    content: dict[str, Any] = {"name": config.name, "num_nodes": config.clusters[0].max_nodes}
    if launcher.workdir is not None:
        content["workdir"] = launcher.workdir
    content["resources"] = _resources(config.clusters[0], task)
    # A secret without a value is required: sky refuses the task if the value is missing.
    names = secret_names(launcher, has_join=task.has_join)
    content["secrets"] = dict.fromkeys(names)
    mounts = dict(launcher.file_mounts)
    if task.wheel is not None and _installs(config.clusters[0], launcher):
        mounts[f"{_WHEELS}/{wheel_name()}"] = task.wheel
    if mounts:
        content["file_mounts"] = mounts
    if setup := _setup(loaded, task):
        content["setup"] = setup
    content["run"] = _run(loaded, task)
    return content


def _resources(cluster: ClusterConfig, task: TaskText) -> dict[str, Any]:
    launcher, resources = task.launcher, dict(task.launcher.resources)
    cards = [f"{name}:{cluster.gpus_per_node}" for name in launcher.accelerators]
    if len(cards) == 1:
        resources["accelerators"] = cards[0]
    elif cards:
        resources["any_of"] = [{"accelerators": card} for card in cards]
    if launcher.autostop is not None:
        resources["autostop"] = {"idle_minutes": max(1, round(launcher.autostop / 60))}
    given = resources.get("job_recovery")
    recovery = dict(given) if isinstance(given, dict) else {"strategy": given} if given else {}
    codes = recovery.get("recover_on_exit_codes") or []
    codes = [codes] if isinstance(codes, int) else list(codes)
    # A managed job that has saved and may continue, such as a job whose nodes are taken away, is
    # restarted; other jobs ignore this.
    recovery["recover_on_exit_codes"] = sorted({*codes, int(ExitCode.REQUEUE)})
    return {**resources, "job_recovery": recovery}


def _names_python(cluster: ClusterConfig) -> bool:
    environment = cluster.environment
    return any((environment.python, environment.venv, environment.conda))


def _installs(cluster: ClusterConfig, launcher: SkypilotLauncherConfig) -> bool:
    return not launcher.setup and not _names_python(cluster)


def _setup(loaded: Loaded, task: TaskText) -> str:
    cluster = loaded.config.clusters[0]
    if not _installs(cluster, task.launcher):
        return "".join(f"{line}\n" for line in task.launcher.setup)
    there = node_cluster(cluster)
    pip = f"{_VENV}/bin/python -m pip install --quiet --disable-pip-version-check"
    extras = ",".join(extras_of(loaded.config, cluster))
    isles, again = f"'isles[{extras}]=={__version__}'", []
    if task.wheel is not None:
        wheel = f"{_WHEELS}/{wheel_name()}"
        isles = f'"isles[{extras}] @ file://$HOME{wheel[1:]}"'
        # Installs exactly this code, even over an older build of the same version.
        again = [f"{pip} --no-deps --force-reinstall {wheel} || exit 1"]
    packages = "".join(f" {shlex.quote(name)}" for name in cluster.environment.packages)
    lines = make_lines(there.environment, there.workdir or WORKDIR)
    return "\n".join([*lines, f"{pip} {isles}{packages} || exit 1", *again, ""])


def _run(loaded: Loaded, task: TaskText) -> str:
    there = node_cluster(loaded.config.clusters[0])
    assert there.workdir is not None
    words = [loaded.path.name, *task.overrides, f"--resume={task.resume}"]
    words += [f"--typed={task.typed}"] if task.typed else []
    mark = "ISLES_RUN_FILE"
    while any(line == mark for line in loaded.text.splitlines()):
        mark += "_"
    return fill_template(
        "skypilot.sh.jinja",
        folder=quoted(there.workdir),
        setting=setting_lines(there, there.workdir),
        python=quoted(python_of(there.environment)),
        port=there.network.port,
        token=SKY_TOKEN,
        words=shlex.join(words),
        text=loaded.text.rstrip("\n"),
        mark=mark,
    )
