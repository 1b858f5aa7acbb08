"""Reads, checks and types the run file and the overrides, with the origin of each value."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from isles.config import keys
from isles.config.explain import explain
from isles.config.issues import Issue
from isles.config.rules import check_rules
from isles.config.secrets import secret_errors
from isles.config.sections.run import RunConfig
from isles.config.yaml import KeyPath, dotted, parse_value, read_text, scan_yaml, shorten
from isles.errors import ConfigError, ConfigErrors
from isles.facts.secrets import without_secrets

COMMAND_LINE = "command line"
_LENGTHS = ("max_steps", "num_train_epochs")


@dataclass(frozen=True, slots=True)
class Loaded:
    """A run file without issues, before checks that need a machine.

    Args:
        origins: dotted path of every given key, section and item -> `run.yaml:9` or `command line`.
            Absent keys have their default.
        path: the file, as the user gave it.
    """

    config: RunConfig
    origins: dict[str, str]
    text: str
    path: Path

    def where(self, *dotted_keys: str) -> str:
        """Place of an issue of these keys: the first given key."""
        for key in dotted_keys:
            if key in self.origins:
                return f"{self.origins[key]} {key}"
        section = dotted_keys[0]
        while section and section not in self.origins:
            section = section.rpartition(".")[0]
        return f"{self.origins.get(section, f'{self.path}:1')} {dotted_keys[0]}"

    def errors(self, issues: Iterable[Issue]) -> list[ConfigError]:
        """Issues found after loading, with their places."""
        return [ConfigError(i.what, where=self.where(*i.keys), fix=i.fix) for i in issues]


@dataclass(frozen=True, slots=True)
class Base:
    """Values by section from another cluster of the run, whose name is `name`."""

    values: Mapping[str, object]
    name: str


def load_run_file(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    text: str | None = None,
    base: Base | None = None,
) -> Loaded:
    """Read a run file.

    Args:
        overrides: `training.max_steps=100`, as on the command line. They override the file.
        text: its content, if the file is not on this machine.
        base: values for keys that the file omits.

    Raises:
        ConfigError: the file cannot be read, or is not YAML.
        ConfigErrors: every issue of the file, each with file, line and key, or with the override.
    """
    text = read_text(path) if text is None else text
    document, errors = scan_yaml(text, str(path), keys.is_text_as_typed)
    refused = {error.where.rpartition(" ")[2] for error in errors}
    data = document.value if base is None else _over(base.values, document.value)
    given = {at: f"{path}:{line}" for at, line in document.lines.items()}
    for override in overrides:
        trial = deepcopy(data)
        try:
            changed = _apply_override(trial, override)
        except ConfigError as error:
            errors.append(error)
            continue
        data, first = trial, changed[0]
        given = {at: place for at, place in given.items() if at[: len(first)] != first}
        given |= dict.fromkeys(changed, f"{COMMAND_LINE} {shorten(override)}")
        _drop_other_length(data, given, first)
    # Report only these errors: others might quote the secret.
    if secrets := secret_errors(data, overrides, given, text, str(path)):
        raise ConfigErrors(sorted(secrets, key=lambda error: _line_of(error, path)))
    config, issues = _check(data)
    places = {dotted(at): place for at, place in given.items()}
    found = placed(issues, places, base.name if base else f"{path}:1")
    errors += [error for key, error in found if key not in refused]
    if errors or config is None:
        raise ConfigErrors(sorted(errors, key=lambda error: _line_of(error, path)))
    origins = {} if base is None else {dotted(at): base.name for at in _below((), data)}
    for key, place in places.items():
        origins[key] = COMMAND_LINE if place.startswith(COMMAND_LINE) else place
    return Loaded(config, origins, text, path)


def placed(
    issues: Iterable[Issue], places: Mapping[str, str], nowhere: str
) -> Iterator[tuple[str, ConfigError]]:
    """Issues as errors with their places, by their keys.

    Args:
        places: places of the given keys, by dotted key.
        nowhere: place of an issue of no given key or section.
    """
    for issue in issues:
        key = next((key for key in issue.keys if key in places), issue.keys[0])
        section = key
        while section and section not in places:
            section = section.rpartition(".")[0]
        place = places.get(section, nowhere)
        where = place if place.startswith(COMMAND_LINE) else f"{place} {key}"
        yield key, ConfigError(issue.what, where=where, fix=issue.fix)


def _check(data: dict[str, Any]) -> tuple[RunConfig | None, list[Issue]]:
    # The typed config and all issues. Unknown keys alone give both a config and issues.
    config, issues = None, list[Issue]()
    try:
        config = _typed(data)
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False)
        issues = explain(details, data)
        if all(detail["type"] == "extra_forbidden" for detail in details):
            with suppress(ValidationError):
                config = _typed(_without_unknown(data, ()))
    if config is not None:
        # Skip rules about a misspelled key.
        meant = {key for issue in issues for key in issue.meant}
        issues += [rule for rule in check_rules(config) if meant.isdisjoint(rule.keys)]
    return config, issues


def _line_of(error: ConfigError, path: Path) -> tuple[int, int]:
    # By line in the file, and the command line last.
    head, _, rest = error.where.partition(f"{path}:")
    digits = rest.partition(" ")[0].partition(":")[0]
    return (0, int(digits)) if not head and digits.isdecimal() else (1, 0)


def _over(base: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    # The given values over the base values. A section of another kind replaces the whole section.
    found = {key: deepcopy(value) for key, value in base.items()}
    for key, value in data.items():
        below = found.get(key)
        found[key] = value
        if isinstance(below, dict) and isinstance(value, dict):
            kinds = [(below.get(name), value.get(name)) for name in ("kind", "type")]
            if all(new in (old, None) for old, new in kinds):
                found[key] = _over(below, value)
    return found


def _typed(data: object) -> RunConfig:
    return RunConfig.model_validate(data, context={"is_run_file": True})


def _without_unknown(data: object, path: KeyPath) -> object:
    if isinstance(data, list):
        return [_without_unknown(item, (*path, index)) for index, item in enumerate(data)]
    if not isinstance(data, dict):
        return data
    node = keys.schema_at(path) or {}
    if keys.named(node) is not None:
        return data
    known = keys.children(node)
    return {k: _without_unknown(v, (*path, k)) for k, v in data.items() if k in known}


def _below(path: KeyPath, value: object) -> list[KeyPath]:
    # The path of every key and item below a value, each before those below it.
    children: Iterable[tuple[str | int, object]] = ()
    if isinstance(value, dict):
        children = value.items()
    elif isinstance(value, list):
        children = enumerate(value)
    found: list[KeyPath] = []
    for part, child in children:
        found += [(*path, part), *_below((*path, part), child)]
    return found


def _apply_override(data: dict[str, object], override: str) -> list[KeyPath]:
    # Set one key, and add missing sections and first list items above it. Returns the paths that
    # the override set: the outermost first, then all below it.
    shown = shorten(without_secrets(override))
    where = f"{COMMAND_LINE} {shown}"
    key, equals, text = override.partition("=")
    path = _override_path(key.strip().lstrip("-"))
    if not equals or "" in path:
        what = f'"{shown}" is not of the form key=value'
        raise ConfigError(what, where=COMMAND_LINE, fix="write it as training.max_steps=100")
    try:
        value = parse_value(text, where, path, keys.is_text_as_typed)
    except ConfigErrors as errors:
        raise errors.issues[0] from None
    parent: Any = data
    first = len(path)
    for length, part in enumerate(path, start=1):
        if isinstance(parent, dict) and isinstance(part, str):
            child = parent.get(part)
        elif isinstance(parent, list) and isinstance(part, int) and part <= len(parent):
            child = parent[part] if part < len(parent) else None
        else:
            raise _no_way(parent, path[:length], where)
        if length == len(path):
            child = value
        elif child is None:
            child = [] if isinstance(path[length], int) else {}
            first = min(first, length)
        if isinstance(part, int):
            parent[part : part + 1] = [child]  # perhaps a new one at the end
        else:
            parent[part] = child
        parent = child
    return [path[:length] for length in range(first, len(path) + 1)] + _below(path, value)


def _drop_other_length(data: dict[str, Any], given: dict[KeyPath, str], path: KeyPath) -> None:
    """A length from the command line replaces the run file's length in the other unit."""
    if path[:-1] != ("training",) or path[-1] not in _LENGTHS:
        return
    other = ("training", _LENGTHS[1 - _LENGTHS.index(str(path[-1]))])
    is_set = data["training"][path[-1]] is not None
    if is_set and not given.get(other, COMMAND_LINE).startswith(COMMAND_LINE):
        del data["training"][other[1]], given[other]


def _override_path(key: str) -> KeyPath:
    # A dash may replace an underscore. `clusters.0.x` and `clusters[0].x` are the first item.
    path: list[str | int] = []
    parts = re.sub(r"\[(\d+)\](?=\.|$)", r".\1", key).split(".")
    for position, part in enumerate(parts):
        if keys.named(keys.schema_at(tuple(path)) or {}) is not None:
            # A user's own name, such as a host name, keeps its dots and dashes.
            return (*path, ".".join(parts[position:]))
        is_index = part.isascii() and part.isdecimal() and len(part) < 7
        path.append(int(part) if is_index else part.replace("-", "_"))
    return tuple(path)


def _no_way(parent: object, path: KeyPath, where: str) -> ConfigError:
    above, part = dotted(path[:-1]) or "the run file", path[-1]
    if isinstance(parent, list) and isinstance(part, int):
        what = f"{above} has no item {part - 1}, so it cannot have item {part}"
        return ConfigError(what, where=where, fix=f"use {len(parent)}, as items count from 0")
    if isinstance(parent, list):
        fix = f"write {above}.0 for its first item"
        return ConfigError(f"{above} is a list", where=where, fix=fix)
    kind = "a section" if isinstance(parent, dict) else "a single value"
    what = f"{above} is {kind} without the key {part}"
    return ConfigError(what, where=where, fix="see the keys in isles config schema")
