"""Reading resolved.yaml of a run, to show the run or to use its checkpoints."""

from __future__ import annotations

from dataclasses import replace

from isles.config.resolve import Resolved, load_resolved
from isles.config.sections.cluster import EnvironmentConfig
from isles.config.sections.outer import DiLoCoConfig
from isles.config.sections.run import RunConfig
from isles.errors import ConfigError
from isles.run.owner import read_text
from isles.run.paths import RunDir


def read_resolved(run_dir: RunDir) -> Resolved:
    """Read `resolved.yaml`, but drop the values that isles would act on if another user wrote it.

    Raises:
        OSError: it cannot be read.
        ConfigError: another version of isles wrote it, or it is not a resolved.yaml.
    """
    try:
        text, owner = read_text(run_dir.resolved)
    except ValueError as error:
        raise ConfigError(
            f"this file is not a valid resolved.yaml: {error}",
            where=f"{run_dir.resolved}:1",
            fix="put the file back as isles wrote it, or start a new run",
        ) from error
    resolved = load_resolved(text)
    return replace(resolved, config=_harmless(resolved.config)) if owner else resolved


def _harmless(config: RunConfig) -> RunConfig:
    # Remove model code, shell lines, programs, containers, a bucket that this user's keys would
    # open, a folder that would be written, and a secret that would be read.
    clusters = tuple(
        cluster.model_copy(update={"environment": EnvironmentConfig(), "workdir": None})
        for cluster in config.clusters
    )
    outer = config.outer
    if isinstance(outer, DiLoCoConfig) and outer.hivemind is not None:
        hivemind = outer.hivemind.model_copy(update={"secret_file": None})
        outer = outer.model_copy(update={"hivemind": hivemind})
    return config.model_copy(
        update={
            "outer": outer,
            "clusters": clusters,
            "model": config.model.model_copy(update={"trust_remote_code": False}),
            "checkpoint": config.checkpoint.model_copy(update={"remote": None}),
            "data": config.data.model_copy(update={"cache_dir": None}),
        }
    )
