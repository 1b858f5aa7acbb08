"""Start of a run: chooses and calls the launcher of its run file."""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from isles.config.clusters import named_cluster
from isles.config.load import Loaded, load_run_file
from isles.config.sections.cluster import (
    LocalLauncherConfig,
    ManualLauncherConfig,
    PbsLauncherConfig,
    RayLauncherConfig,
    SkypilotLauncherConfig,
    SlurmLauncherConfig,
    SshLauncherConfig,
)
from isles.config.sections.kubernetes import KubernetesLauncherConfig
from isles.errors import ConfigError
from isles.launch.base import Started, StartOptions
from isles.launch.kubernetes.start import start_kubernetes
from isles.launch.local import start_local
from isles.launch.manual import start_manual
from isles.launch.queue.submit import start_in_queue
from isles.launch.ray.start import start_ray
from isles.launch.skypilot.start import start_skypilot
from isles.launch.ssh.start import start_ssh


def start(options: StartOptions) -> Started | Loaded | str:  # noqa: PLR0911  # one each
    """Start a run with the launcher of its run file.

    Returns:
        The started run; in a dry run the text to print. With several clusters nothing is started,
        and
        the result is the run file, for `isles.monitor.multi_cluster`.

    Raises:
        ConfigErrors: every issue in the run file.
        UserError: the run cannot be prepared or started.
    """
    loaded = options.loaded or load_run_file(options.path, options.overrides)
    if options.cluster:
        loaded = named_cluster(loaded, options.cluster)
        options = replace(options, overrides=())  # the text contains them
    elif len(loaded.config.clusters) > 1:
        return loaded
    if options.join and loaded.config.diloco is None:
        raise ConfigError(
            "a join line is given, but this run does not average with other clusters",
            where=loaded.where("outer.kind"),
            fix="set outer: {kind: diloco}, or start it without a join line",
        )
    match loaded.config.clusters[0].launcher:
        case LocalLauncherConfig():
            return start_local(loaded, options)
        case KubernetesLauncherConfig() as launcher:
            return start_kubernetes(loaded, launcher, options)
        case SshLauncherConfig() as launcher:
            return start_ssh(loaded, launcher, options)
        case SlurmLauncherConfig() | PbsLauncherConfig() as launcher:
            return start_in_queue(loaded, launcher, options)
        case RayLauncherConfig() as launcher:
            return start_ray(loaded, launcher, options)
        case ManualLauncherConfig() as launcher:
            return start_manual(loaded, launcher, options)
        case SkypilotLauncherConfig() as launcher:
            return start_skypilot(loaded, launcher, options)
        case launcher:
            assert_never(launcher)
