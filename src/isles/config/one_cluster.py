"""The part of a run file that one of its clusters needs."""

from __future__ import annotations

from dataclasses import replace

from isles.config.load import Loaded
from isles.errors import ConfigError

_OWN = ("strategy", "balance")


def of_cluster(loaded: Loaded, index: int) -> Loaded:
    """A run file as one of its clusters has it; where each value came from is kept.

    Its text is that of the whole file.
    """
    given = f"clusters.{index}"
    cluster = loaded.config.clusters[index]
    own = [name for name in _OWN if getattr(cluster, name) is not None]
    if len(loaded.config.clusters) == 1 and not own:
        return loaded
    origins: dict[str, str] = {}
    for key, origin in loaded.origins.items():
        first = key.partition(".")[0]
        if first in own:
            continue
        if first == "clusters" and key != "clusters":
            if key != given and not key.startswith(f"{given}."):
                continue
            name, _, rest = key.removeprefix(given).removeprefix(".").partition(".")
            if name in _OWN:
                if name in own:
                    origins[f"{name}.{rest}" if rest else name] = origin
                continue
            origins["clusters.0" + key.removeprefix(given)] = origin
        else:
            origins[key] = origin
    return replace(loaded, config=loaded.config.of_cluster(index), origins=origins)


def keys_of_cluster(text: str, index: int) -> str:
    """What one cluster has said of its keys, with the keys that it has in the run file of all.

    To itself it is the only one: `clusters[0]`, or `clusters.0.` in an override.
    """
    text = text.replace("clusters[0]", f"clusters[{index}]")
    return text.replace("clusters.0.", f"clusters.{index}.")


def only_cluster(loaded: Loaded) -> Loaded:
    """A run file with one cluster, whose own strategy and balance are the run's.

    Raises:
        ConfigError: there are several.
    """
    if len(loaded.config.clusters) > 1:
        raise ConfigError(
            f"one cluster is started at a time, and the run file has {len(loaded.config.clusters)}",
            where=loaded.where("clusters"),
            fix="`isles train` starts them all; for this command keep one of them",
        )
    return of_cluster(loaded, 0)
