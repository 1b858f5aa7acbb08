"""What Slurm and PBS have in common before a job is submitted."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Literal

from isles.config.adapter import missing_package
from isles.config.deepspeed_rules import check_start
from isles.config.files import data_faults, deepspeed_faults, shape_faults
from isles.config.launcher import QueueSection
from isles.config.load import Loaded
from isles.config.resolve import Resolved, resolve
from isles.errors import ConfigError, ConfigErrors
from isles.launch.queue import refresh
from isles.launch.setting import python_of
from isles.launch.verbs import require_train
from isles.rundir.begin import Begun
from isles.rundir.env import hub_cache
from isles.rundir.find import numbered_runs
from isles.rundir.paths import Attempt, RunDir
from isles.rundir.trackers import require_trackers


def refuse_arrays(loaded: Loaded, pattern: re.Pattern[str]) -> None:
    """Refuse an option that makes an array of a job.

    Args:
        loaded: the run file.
        pattern: how such an option begins.

    Raises:
        ConfigError: there is one in the launcher's `extra`.
    """
    launcher = loaded.config.clusters[0].launcher
    assert isinstance(launcher, QueueSection)
    for index, option in enumerate(launcher.extra):
        if pattern.match(option):
            raise ConfigError(
                f"{option} would start the same run many times, in one run directory",
                where=loaded.where(f"clusters.0.launcher.extra.{index}", "clusters.0.launcher"),
                fix="delete it, and start each run of a series by an `isles train` of its own, "
                "with a name of its own: name=tiny-lr-1 training.learning_rate=1e-4",
            )


def workdir_of(loaded: Loaded) -> Path:
    """The folder in which the ranks run, which this machine shares with the nodes.

    Raises:
        ConfigError: it is not here.
    """
    given = loaded.config.clusters[0].workdir
    folder = Path(given).expanduser().absolute() if given is not None else Path.cwd()
    if not folder.is_dir():
        raise ConfigError(
            f"there is no folder {folder} on this machine",
            where=loaded.where("clusters.0.workdir"),
            fix="make it, or name one that this machine shares with the nodes",
        )
    return folder


@contextmanager
def in_workdir(loaded: Loaded) -> Iterator[Path]:
    """Within the folder in which the ranks run: the paths of the run file are relative to it."""
    folder = workdir_of(loaded)
    with chdir(folder):
        yield folder


def settle(loaded: Loaded) -> Resolved:
    """The run with the ranks of its nodes, which cannot be looked at from here.

    Raises:
        ConfigErrors: every fault.
    """
    cluster = loaded.config.clusters[0]
    assert isinstance(cluster.gpus_per_node, int), "a rule asks for it"
    device: Literal["cuda", "cpu"] = "cpu" if cluster.device == "cpu" else "cuda"
    faults = [
        *shape_faults(loaded, hub_cache()),
        *deepspeed_faults(loaded),
        *data_faults(loaded),
    ]
    try:
        nproc = (cluster.gpus_per_node,) * cluster.max_nodes
        resolved = resolve(loaded, nproc=nproc, device=device)
    except ConfigError as error:
        raise ConfigErrors([*faults, error]) from None
    if faults:
        raise ConfigErrors(faults)
    return resolved


def check_packages(resolved: Resolved) -> None:
    """Make sure that the ranks can train, where their Python is this one.

    Raises:
        UserError: a package is missing.
    """
    config = resolved.config
    if python_of(config.clusters[0].environment) != sys.executable:
        return  # the Python of the nodes has its own packages
    require_train()
    if config.training.script is not None:
        return
    check_start(config, resolved.world_size)
    require_trackers(config)
    if fault := missing_package(config.adapter):
        raise fault


def refresh_last(resolved: Resolved, resume: str) -> None:
    """Ask the queue about the run that this start would go on with, so that nobody takes a job
    that has ended meanwhile for one that runs."""
    if resume == "no":
        return
    folder = Path(resolved.config.output_dir).expanduser()
    runs = [run for _, run in numbered_runs(folder, resolved.config.name)][-1:]
    if resume != "auto":
        given = Path(resume).expanduser()
        runs += [RunDir(path) for path in (given, folder / resume) if path.is_dir()]
    for run in runs:
        attempt = run.last_attempt()
        if attempt is not None:
            refresh(run, attempt, max_age_s=0.0)


def withdraw(begun: Begun, attempt: Attempt) -> None:
    """Nothing was submitted: leave no trace of it, neither a start nor a run without one."""
    shutil.rmtree(attempt.path, ignore_errors=True)
    if not begun.resumed and not begun.run_dir.attempts():
        shutil.rmtree(begun.run_dir.path, ignore_errors=True)
