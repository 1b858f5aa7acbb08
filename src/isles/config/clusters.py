"""A run file of several clusters: the part of one of them, and what all of them share."""

from __future__ import annotations

import re
from copy import deepcopy
from dataclasses import replace
from typing import Any

from isles.config.keys import as_written
from isles.config.load import Loaded
from isles.config.sections.run import RunConfig
from isles.config.yaml import dump_yaml
from isles.errors import ConfigError

MAX_NAME_LENGTH = 63
"""Of a run's name."""

_OWN = ("strategy", "balance")
"""Keys at the top that a cluster may have of its own."""

_SHARED = (
    "name",
    "seed",
    "model",
    "tokenizer",
    "adapter",
    "data",
    "training",
    "outer",
    "checkpoint",
)
_NOT_SHARED = (
    "data.cache_dir",
    "training.script",
    "training.script_args",
    "training.micro_batch_size",
    "training.max_time",
    "outer.hub",
    "outer.public",
    "outer.max_rate",
    "checkpoint.push_to_hub",
    "checkpoint.remote",
)
"""Of the shared sections, what each cluster has for itself."""

_PATHS = re.compile(r"(data\.sources\.\d+\.path|.*\.name_or_path|tokenizer\.chat_template)")


def of_cluster(loaded: Loaded, index: int) -> Loaded:
    """A run file as one of its clusters has it, with the text and the origins of the whole file."""
    cluster = loaded.config.clusters[index]
    own = [name for name in _OWN if getattr(cluster, name) is not None]
    if len(loaded.config.clusters) == 1 and not own:
        return loaded
    given = f"clusters.{index}"
    origins: dict[str, str] = {}
    for key, origin in loaded.origins.items():
        first = key.partition(".")[0]
        if key == given or key.startswith(f"{given}."):
            inside = key.removeprefix(given).removeprefix(".")
            name = inside.partition(".")[0]
            if name not in _OWN:
                origins["clusters.0" + key.removeprefix(given)] = origin
            elif name in own:
                origins[inside] = origin
        elif first not in own and (first != "clusters" or key == first):
            origins[key] = origin
    return replace(loaded, config=loaded.config.of_cluster(index), origins=origins)


def keys_of_cluster(text: str, index: int) -> str:
    """A message of one cluster's run, in which it is `clusters[0]`, with its place in the file."""
    text = text.replace("clusters[0]", f"clusters[{index}]")
    return text.replace("clusters.0.", f"clusters.{index}.")


def named_cluster(loaded: Loaded, name: str) -> Loaded:
    """The run of one of several clusters, RUN-CLUSTER, whose text loads again to the same values.

    ConfigError: there is no such cluster, or both names together are too long.
    """
    names = [cluster.name for cluster in loaded.config.clusters]
    if name not in names:
        raise ConfigError(
            f"there is no cluster {name}",
            where=loaded.where("clusters"),
            fix=f"the run file has {', '.join(names)}",
        )
    index = names.index(name)
    both = f"{loaded.config.name}-{name}"
    if len(both) > MAX_NAME_LENGTH:
        raise ConfigError(
            f"the cluster's run would be called {both}, which has {len(both)} characters",
            where=loaded.where(f"clusters.{index}.name", "clusters"),
            fix=f"use shorter names of run and cluster: {MAX_NAME_LENGTH - 1} characters together",
        )
    config = loaded.config.model_copy(update={"name": both})
    own = of_cluster(replace(loaded, config=config), index)
    comment = f"# The cluster {name} of {loaded.path}; written by isles.\n"
    return replace(own, text=comment + dump_yaml(as_written(own.config.values())))


def shared_text(config: RunConfig) -> str:
    """The values that all clusters of a run have, as a run file: no machines, folders or people."""
    data = config.values()
    found: dict[str, Any] = {key: deepcopy(data[key]) for key in _SHARED if key in data}
    for key in _NOT_SHARED:
        section, _, name = key.partition(".")
        found.get(section, {}).pop(name, None)
    if found.get("training", {}).get("max_steps") is None and config.training.max_time:
        found["training"]["max_time"] = config.training.max_time  # it is the run's length
    return dump_yaml(as_written(found))


def leads_outside(key: str, value: object) -> bool:
    """Whether a value from another cluster is a path that leads out of the folder of the run."""
    if not _PATHS.fullmatch(key) or not isinstance(value, str):
        return False
    return value.startswith(("/", "~")) or ".." in re.split(r"[/\\]", value)
