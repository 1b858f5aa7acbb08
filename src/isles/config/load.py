"""The run file and the overrides, read, checked and typed, with where each value came from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from isles.config import keys
from isles.config.explain import explain
from isles.config.issues import Issue
from isles.config.rules import check_rules
from isles.config.sections.run import RunConfig
from isles.config.yaml import KeyPath, dotted, parse_value, scan_yaml, shorten
from isles.errors import ConfigError, ConfigErrors

COMMAND_LINE = "command line"
_MAX_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Loaded:
    """A run file without an issue, as far as the file alone can tell.

    Args:
        config: every value, defaults filled in.
        origins: dotted path of every key, section and item that was given -> `run.yaml:9` or
            `command line`. What is absent has its default.
        text: the file as it is.
        path: the file, as it was named.
    """

    config: RunConfig
    origins: dict[str, str]
    text: str
    path: Path

    def where(self, *dotted_keys: str) -> str:
        """Where to look for an issue of these keys: at the first of them that was given."""
        for key in dotted_keys:
            if key in self.origins:
                return f"{self.origins[key]} {key}"
        section = dotted_keys[0]
        while section and section not in self.origins:
            section = section.rpartition(".")[0]
        return f"{self.origins.get(section, f'{self.path}:1')} {dotted_keys[0]}"

    def errors(self, issues: Iterable[Issue]) -> list[ConfigError]:
        """Issues that were found after loading, with their places."""
        return [ConfigError(i.what, where=self.where(*i.keys), fix=i.fix) for i in issues]


@dataclass(frozen=True, slots=True)
class Base:
    """Values that a run file need not give: another cluster of the run has given them.

    Args:
        values: by section, as a run file has them.
        name: where they are from, for messages.
    """

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
        path: the file.
        overrides: `training.max_steps=100`, as on the command line; they win over the file.
        text: what stands in it, where it is no file of this machine.
        base: what holds where the file says nothing.

    Raises:
        ConfigError: the file cannot be read, or is not YAML.
        ConfigErrors: every issue of it, each with file, line and key, or with the override.
    """
    text = read_text(path) if text is None else text
    document, syntax_issues = scan_yaml(text, str(path))
    data = document.value
    assert isinstance(data, dict)
    data = data if base is None else _over(base.values, data)
    return _Loading(text, path, base, data, dict(document.lines)).finish(overrides, syntax_issues)


@dataclass(slots=True)
class _Loading:
    """One run file on its way: the data, and where each part of it was given."""

    text: str
    path: Path
    base: Base | None
    data: dict[str, object]
    lines: dict[KeyPath, int]
    given: dict[KeyPath, str] = field(default_factory=dict)
    """Path -> the override that set it."""

    def finish(self, overrides: Sequence[str], syntax_issues: Sequence[ConfigError]) -> Loaded:
        # Overrides, types and rules, in this order; or every issue at once.
        errors = list(syntax_issues)
        for override in overrides:
            trial = deepcopy(self.data)
            try:
                changed = _apply_override(trial, override)
            except ConfigError as error:
                errors.append(error)
                continue
            self.data = trial
            first = changed[0]
            self.lines = {p: n for p, n in self.lines.items() if p[: len(first)] != first}
            self.given = {p: o for p, o in self.given.items() if p[: len(first)] != first}
            self.given.update(dict.fromkeys(changed, override))
        config, issues = self._validate()
        if config is not None:
            meant = {key for issue in issues for key in issue.meant}
            # A rule about a key whose name is misspelt would only confuse.
            issues += [rule for rule in check_rules(config) if meant.isdisjoint(rule.keys)]
        lost = {error.where.rpartition(" ")[2] for error in syntax_issues}
        places = {dotted(path): f"{self.path}:{line}" for path, line in self.lines.items()}
        places |= {dotted(p): f"{COMMAND_LINE} {shorten(o)}" for p, o in self.given.items()}
        for issue in issues:
            key = next((key for key in issue.keys if key in places), issue.keys[0])
            if key not in lost:
                where = self._where(key, places)
                errors.append(ConfigError(issue.what, where=where, fix=issue.fix))
        if errors or config is None:
            raise ConfigErrors(sorted(errors, key=self._order))
        origins = {} if self.base is None else dict.fromkeys(_below((), self.data), self.base.name)
        origins |= {path: f"{self.path}:{line}" for path, line in self.lines.items()}
        origins |= dict.fromkeys(self.given, COMMAND_LINE)
        by_key = {dotted(path): origin for path, origin in origins.items()}
        return Loaded(config, by_key, self.text, self.path)

    def _validate(self) -> tuple[RunConfig | None, list[Issue]]:
        # The typed config and the issues; a config beside issues where keys were only unknown.
        try:
            return _typed(self.data), []
        except ValidationError as error:
            details = error.errors(include_url=False, include_input=False)
            issues = explain(details, self.data)
        if any(detail["type"] != "extra_forbidden" for detail in details):
            return None, issues
        try:
            return _typed(_without_unknown(self.data, ())), issues
        except ValidationError:
            return None, issues

    def _where(self, key: str, places: Mapping[str, str]) -> str:
        # The place of a key that was given, or of the section that lacks it.
        given = key
        while given and given not in places:
            given = given.rpartition(".")[0]
        place = places.get(given, self.base.name if self.base else f"{self.path}:1")
        return place if place.startswith(COMMAND_LINE) else f"{place} {key}"

    def _order(self, error: ConfigError) -> tuple[int, int]:
        # By line in the file; the command line last.
        head, _, rest = error.where.partition(f"{self.path}:")
        digits = rest.partition(" ")[0].partition(":")[0]
        return (0, int(digits)) if not head and digits.isdigit() else (1, 0)


def _over(base: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    # What is given, over what holds otherwise; a section of another kind replaces the whole.
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
    """Set one key; sections on the way, and the first item of a list, are made where absent.

    Returns:
        The paths that the override set: the outermost first, then all below it.

    Raises:
        ConfigError: it is not of the form `key.path=value`, or leads through something without
            keys.
    """
    where = f"{COMMAND_LINE} {shorten(override)}"
    key, equals, text = override.partition("=")
    path = _override_path(key.strip().lstrip("-"))
    if not equals or "" in path:
        raise ConfigError(
            f'"{shorten(override)}" is not of the form key=value',
            where=COMMAND_LINE,
            fix="write it as training.max_steps=100",
        )
    try:
        value = parse_value(text, where)
    except ConfigErrors as errors:
        raise errors.issues[0] from None
    parent: object = data
    first = len(path)
    for length, part in enumerate(path[:-1], start=1):
        child = _child(parent, part, path[:length], where)
        if child is None:
            child = [] if isinstance(path[length], int) else {}
            _set(parent, part, child, path[:length], where)
            first = min(first, length)
        parent = child
    _set(parent, path[-1], value, path, where)
    return [path[:length] for length in range(first, len(path) + 1)] + _below(path, value)


def _override_path(key: str) -> KeyPath:
    # Dashes are as good as underscores; a number is an item of a list, from 0.
    path: list[str | int] = []
    parts = key.split(".")
    for position, part in enumerate(parts):
        if keys.named(keys.schema_at(tuple(path)) or {}) is not None:
            # A name of the user's own, such as a host's: dots and dashes belong to it.
            return (*path, ".".join(parts[position:]))
        is_index = part.isascii() and part.isdigit() and len(part) < 7
        path.append(int(part) if is_index else part.replace("-", "_"))
    return tuple(path)


def _child(parent: object, part: str | int, path: KeyPath, where: str) -> object:
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
        fix = f"write {above}.0 for its first item"
        return ConfigError(f"{above} is a list", where=where, fix=fix)
    kind = "a section" if isinstance(parent, dict) else "a single value"
    what = f"{above} is {kind}: there is no {path[-1]} in it"
    return ConfigError(what, where=where, fix="isles config schema lists the keys")


def read_text(
    path: Path,
    kind: str = "run file",
    hint: str = "check the path; isles init writes a run file to start from",
) -> str:
    """The text of a file that a person has written.

    Args:
        path: the file.
        kind: what it should be, for messages.
        hint: how to mend it where there is no such file.

    Raises:
        ConfigError: it cannot be read, or is no text.
    """

    def refused(what: str, fix: str, place: str = "") -> ConfigError:
        return ConfigError(what, where=f"{path}{place}", fix=fix, id="config.file")

    try:
        with path.open("rb") as stream:
            content = stream.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        raise refused("there is no such file", hint) from None
    except IsADirectoryError:
        fix = f"name the {kind} inside it"
        raise refused("this is a folder, not a file", fix) from None
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise refused(f"cannot be read: {reason}", "check the path and the permissions") from None
    if len(content) > _MAX_BYTES:
        raise refused(f"larger than 1 MiB: this is no {kind}", "check the path", ":1")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        what = f"the byte 0x{content[error.start]:02x} is not UTF-8"
        raise refused(what, "save the file as UTF-8 text", f":{line}") from None
