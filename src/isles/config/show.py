"""The resolved run file for people, and the JSON schema for their editors."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from decimal import Decimal
from typing import Any

from isles.config import keys
from isles.config.emit import scalar_text, yaml_lines
from isles.config.load import Loaded
from isles.config.one_cluster import of_cluster
from isles.config.resolve import Resolved
from isles.errors import ConfigError

_WIDEST = 60
NAME_LENGTH = 63
"""Of a run's name, at most."""


def show(resolved: Resolved, *, origins: bool = True) -> str:
    """Every value as a run file that loads again, with where it came from.

    Args:
        resolved: the run.
        origins: add `# run.yaml:9`, `# command line` or `# default` to each line.
    """
    data = for_people(resolved.config.values(), ())
    assert isinstance(data, dict)
    rows: list[tuple[str, str]] = []
    for text, path in yaml_lines(data):
        key = ".".join(str(part) for part in path or ())
        rows.append((text, resolved.origins[key] if path else ""))
    rows.append(("# derived:", ""))
    rows += [
        (f"#   {name}: {scalar_text(value)}", resolved.origins[f"derived.{name}"])
        for name, value in resolved.derived.items()
    ]
    if not origins:
        return "".join(f"{text}\n" for text, _ in rows)
    width = min(_WIDEST, max(len(text) for text, origin in rows if origin))
    return "".join(f"{text.ljust(width)}  # {o}\n" if o else f"{text}\n" for text, o in rows)


def for_cluster(loaded: Loaded, index: int) -> Loaded:
    """The run file of one of several clusters, as that cluster's run directory has it.

    It loads again, and gives the same values.
    """
    own = of_cluster(loaded, index)
    data = for_people(own.config.values(), ())
    assert isinstance(data, dict)
    head = f"# The cluster {own.config.clusters[0].name} of {loaded.path}; written by isles.\n"
    return replace(own, text=head + "".join(f"{text}\n" for text, _ in yaml_lines(data)))


def named_cluster(loaded: Loaded, name: str) -> Loaded:
    """The run of one of several clusters: RUN-CLUSTER, with the text of `for_cluster`.

    Raises:
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
    if len(both) > NAME_LENGTH:
        raise ConfigError(
            f"the cluster's run would be called {both}, which has {len(both)} characters",
            where=loaded.where(f"clusters.{index}.name", "clusters"),
            fix=f"use shorter names of run and cluster: {NAME_LENGTH - 1} characters together",
        )
    config = loaded.config.model_copy(update={"name": both})
    return for_cluster(replace(loaded, config=config), index)


def json_schema() -> dict[str, Any]:
    """The JSON schema of run files, with a description of each key, for editors."""
    schema = _for_editors(deepcopy(keys.run_schema()))
    assert isinstance(schema, dict)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "isles run file",
    }


def write_duration(seconds: float) -> str:
    """A length of time as a run file has it; it reads back the same: `20m`, `23h30m`, `0.5s`."""
    if seconds != int(seconds):
        return f"{Decimal(repr(seconds)):f}s"
    whole = int(seconds)
    parts = ((whole // 86400, "d"), (whole // 3600 % 24, "h"), (whole // 60 % 60, "m"))
    text = "".join(f"{number}{unit}" for number, unit in parts if number)
    return f"{text}{whole % 60}s" if whole % 60 or not text else text


def for_people(value: object, path: tuple[str | int, ...]) -> object:
    """Values as a run file has them, lengths of time as `20m`."""
    if isinstance(value, Mapping):
        return {key: for_people(child, (*path, key)) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [for_people(child, (*path, index)) for index, child in enumerate(value)]
    node = keys.schema_at(path)
    if isinstance(value, float) and node is not None and keys.is_duration(node):
        return write_duration(value)
    return value


def _for_editors(node: object) -> object:
    """Times written as text, and no defaults of whole sections, which their keys have."""
    if isinstance(node, list):
        return [_for_editors(item) for item in node]
    if not isinstance(node, dict):
        return node
    changed = {key: _for_editors(child) for key, child in node.items()}
    default = node.get("default")
    if isinstance(default, float) and keys.is_duration(node):
        changed["default"] = write_duration(default)
    if isinstance(default, dict) or (
        isinstance(default, list) and default != [] and isinstance(default[0], dict)
    ):
        del changed["default"]
    return changed
