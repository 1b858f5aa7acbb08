"""Content of an image, checked before a run is started in it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from isles import __version__
from isles.config.load import Loaded
from isles.errors import ConfigError, ConfigErrors, PreflightError
from isles.launch.ssh.channel import Channel, open_channel
from isles.launch.ssh.shell import Shell
from isles.launch.worker import NEEDED_TO_TRAIN

ANSWER_S = 90.0
"""Longest wait for the first answer of an image, which may be on a slow disk."""


def open_image(container: Mapping[str, Any]) -> Channel:
    """Channel to a process in the container on this machine, which answers like a node."""
    return open_channel(
        Shell(), python=sys.executable, container=container, name=os.uname().nodename
    )


def require_image(container: Mapping[str, Any], loaded: Loaded) -> None:
    """Check on this machine that the image can train the run.

    Raises:
        PreflightError: the container cannot be entered, or lacks isles or a package.
        ConfigErrors: paths of the run file that are missing in the container.
    """
    with open_image(container) as image:
        facts = image.call("facts", timeout_s=ANSWER_S)
        needed = NEEDED_TO_TRAIN if loaded.config.training.script is None else ("torch",)
        if (failure := image_failure(facts, container["image"], needed)) is not None:
            raise failure
        found = image.call(
            "issues",
            timeout_s=ANSWER_S,
            config=loaded.config.model_dump(),
            origins=loaded.origins,
            text=loaded.text,
            path=str(loaded.path),
        )["issues"]
    if found:
        on = f" (in {container['image']})"
        raise ConfigErrors(
            [ConfigError(i["what"], where=i["where"] + on, fix=i["fix"], id=i["id"]) for i in found]
        )


def image_failure(
    facts: Mapping[str, Any], image: str, needed: Sequence[str]
) -> PreflightError | None:
    """Why an image cannot be used, from its facts (`node_facts`); None: it can be used."""
    missing = [name for name in facts["missing"] if name in needed]
    where = f"host {facts['host']}"
    if missing:
        return PreflightError(
            f"the image {image} lacks packages for {facts['executable']}: {', '.join(missing)}",
            where=where,
            fix=f"install them in the image (pip install 'isles[train]=={__version__}'), or set "
            "clusters.0.environment.container.python to another Python of the image",
            id="packages.missing",
        )
    if facts["isles"] != __version__:
        return PreflightError(
            f"the image {image} has isles {facts['isles']}, this machine has {__version__}",
            where=where,
            fix=f"install the same version in the image: pip install 'isles[train]=={__version__}'",
            id="version.isles",
        )
    return None
