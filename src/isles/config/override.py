"""One override, `training.max_steps=100`, put into the data of a run file."""

from __future__ import annotations

from isles.config import keys
from isles.config.yaml import KeyPath, dotted, parse_value, shorten
from isles.errors import ConfigError, ConfigErrors


def apply_override(data: dict[str, object], override: str) -> list[KeyPath]:
    """Set one key; sections on the way, and the first item of a list, are made where absent.

    Args:
        data: the run file's data; changed in place.
        override: `key.path=value`, the value as YAML. A leading `--` and dashes in the key are
            as good as underscores; a number is an item of a list, from 0.

    Returns:
        The paths that the override set: the outermost first, then all below it.

    Raises:
        ConfigError: it is not of this form, or the path leads through something without keys.
    """
    where = f"command line {shorten(override)}"
    key, equals, text = override.partition("=")
    path = _path(key.strip().lstrip("-"))
    if not equals or not all(part != "" for part in path):
        raise ConfigError(
            f'"{shorten(override)}" is not of the form key=value',
            where="command line",
            fix="write it as training.max_steps=100",
        )
    try:
        value = parse_value(text, where)
    except ConfigErrors as errors:
        raise errors.faults[0] from None
    parent: object = data
    made: KeyPath | None = None
    for length, part in enumerate(path[:-1], start=1):
        child = _get(parent, part, path[:length], where)
        if child is None:
            child = [] if isinstance(path[length], int) else {}
            _set(parent, part, child, path[:length], where)
            made = made or path[:length]
        parent = child
    _set(parent, path[-1], value, path, where)
    first = len(made or path)
    return [path[:length] for length in range(first, len(path) + 1)] + _below(path, value)


def _path(key: str) -> KeyPath:
    path: list[str | int] = []
    parts = key.split(".")
    for position, part in enumerate(parts):
        if keys.named(keys.schema_at(tuple(path)) or {}) is not None:
            # A name of the user's own, such as a host's: dots and dashes belong to it.
            return (*path, ".".join(parts[position:]))
        path.append(_part(part))
    return tuple(path)


def _part(text: str) -> str | int:
    return (
        int(text) if text.isascii() and text.isdigit() and len(text) < 7 else text.replace("-", "_")
    )


def _get(parent: object, part: str | int, path: KeyPath, where: str) -> object:
    if isinstance(parent, list) and isinstance(part, int):
        return parent[part] if part < len(parent) else None
    if isinstance(parent, dict) and isinstance(part, str):
        return parent.get(part)
    raise _no_way(parent, path, where)


def _set(parent: object, part: str | int, value: object, path: KeyPath, where: str) -> None:
    if isinstance(parent, list) and isinstance(part, int):
        if part > len(parent):
            what = f"{dotted(path[:-1])} has no item {part - 1}, so it cannot have item {part}"
            raise ConfigError(what, where=where, fix=f"items count from 0; use {len(parent)}")
        parent[part : part + 1] = [value]
    elif isinstance(parent, dict) and isinstance(part, str):
        parent[part] = value
    else:
        raise _no_way(parent, path, where)


def _no_way(parent: object, path: KeyPath, where: str) -> ConfigError:
    above = dotted(path[:-1]) or "the run file"
    if isinstance(parent, list):
        return ConfigError(
            f"{above} is a list", where=where, fix=f"write {above}.0 for its first item"
        )
    kind = "a section" if isinstance(parent, dict) else "a single value"
    what = f"{above} is {kind}: there is no {path[-1]} in it"
    return ConfigError(what, where=where, fix="isles config schema lists the keys")


def _below(path: KeyPath, value: object) -> list[KeyPath]:
    found: list[KeyPath] = []
    if isinstance(value, dict):
        children = [((*path, key), child) for key, child in value.items()]
    elif isinstance(value, list):
        children = [((*path, index), child) for index, child in enumerate(value)]
    else:
        return found
    for here, child in children:
        found += [here, *_below(here, child)]
    return found
