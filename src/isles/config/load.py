"""The run file and the overrides, read, checked and typed, with where each value came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from isles.config import keys
from isles.config.explain import Fault, explain
from isles.config.override import apply_override
from isles.config.rules.all import check_rules
from isles.config.sections.run import RunConfig
from isles.config.yaml import KeyPath, dotted, scan_yaml, shorten
from isles.errors import ConfigError, ConfigErrors

COMMAND_LINE = "command line"
_MAX_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Loaded:
    """A run file that has no fault, as far as the file alone can tell.

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
        """Where to look for a fault about these keys: at the first of them that was given."""
        for key in dotted_keys:
            if key in self.origins:
                return f"{self.origins[key]} {key}"
        section = dotted_keys[0]
        while section and section not in self.origins:
            section = section.rpartition(".")[0]
        return f"{self.origins.get(section, f'{self.path}:1')} {dotted_keys[0]}"


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
        ConfigErrors: every fault in it, each with file, line and key, or with the override.
    """
    text = read_text(path) if text is None else text
    document, syntax_faults = scan_yaml(text, str(path))
    assert isinstance(document.value, dict)
    loading = _Loading(text, path, document.value, document.lines, base)
    return loading.finish(overrides, syntax_faults)


class _Loading:
    """One run file on its way: the data, and where each part of it was given."""

    def __init__(
        self,
        text: str,
        path: Path,
        data: dict[str, object],
        lines: Mapping[KeyPath, int],
        base: Base | None,
    ) -> None:
        self.text = text
        self.path = path
        self.base = base
        self.data = data if base is None else _over(base.values, data)
        self.lines = dict(lines)
        self.given: dict[KeyPath, str] = {}  # path -> the override that set it

    def finish(self, overrides: Sequence[str], syntax_faults: Sequence[ConfigError]) -> Loaded:
        """Overrides, types and rules, in this order; or every fault at once."""
        errors = list(syntax_faults)
        for override in overrides:
            trial = deepcopy(self.data)
            try:
                changed = apply_override(trial, override)
            except ConfigError as error:
                errors.append(error)
                continue
            self.data = trial
            self._forget(changed[0])
            self.given.update(dict.fromkeys(changed, override))
        config, faults = self._validate()
        if config is not None:
            meant = {key for fault in faults for key in fault.meant}
            # A rule about a key whose name is misspelt would only confuse.
            faults += [
                Fault(self._first_given(rule.keys), rule.what, rule.fix)
                for rule in check_rules(config)
                if not meant.intersection(rule.keys)
            ]
        lost = {error.where.rpartition(" ")[2] for error in syntax_faults}
        faults = [fault for fault in faults if dotted(fault.path) not in lost]
        errors += [ConfigError(f.what, where=self._where(f.path), fix=f.fix) for f in faults]
        if errors or config is None:
            raise ConfigErrors(sorted(errors, key=self._order))
        return Loaded(config, self._origins(), self.text, self.path)

    def _validate(self) -> tuple[RunConfig | None, list[Fault]]:
        """The typed config and the faults; a config beside faults where keys were only unknown."""
        try:
            return _typed(self.data), []
        except ValidationError as error:
            details = error.errors(include_url=False, include_input=False)
            faults = explain(details, self.data)
        if any(detail["type"] != "extra_forbidden" for detail in details):
            return None, faults
        try:
            return _typed(_without_unknown(self.data, ())), faults
        except ValidationError:
            return None, faults

    def _forget(self, path: KeyPath) -> None:
        for known in [known for known in self.lines if known[: len(path)] == path]:
            del self.lines[known]
        for known in [known for known in self.given if known[: len(path)] == path]:
            del self.given[known]

    def _first_given(self, rule_keys: Sequence[str]) -> KeyPath:
        paths = [_path(key) for key in rule_keys]
        return next((p for p in paths if p in self.lines or p in self.given), paths[0])

    def _where(self, path: KeyPath) -> str:
        for length in range(len(path), 0, -1):
            if path[:length] in self.given:
                return f"{COMMAND_LINE} {shorten(self.given[path[:length]])}"
            if path[:length] in self.lines:
                return f"{self.path}:{self.lines[path[:length]]} {dotted(path)}"
        return (
            f"{self.path}:1 {dotted(path)}"
            if self.base is None
            else f"{self.base.name} {dotted(path)}"
        )

    def _order(self, error: ConfigError) -> tuple[int, int]:
        """By line in the file; the command line last."""
        head, _, rest = error.where.partition(f"{self.path}:")
        digits = rest.partition(" ")[0].partition(":")[0]
        return (0, int(digits)) if not head and digits.isdigit() else (1, 0)

    def _origins(self) -> dict[str, str]:
        origins = {} if self.base is None else dict.fromkeys(_keys(self.data), self.base.name)
        origins.update({dotted(path): f"{self.path}:{line}" for path, line in self.lines.items()})
        origins.update({dotted(path): COMMAND_LINE for path in self.given})
        return origins


def _over(base: Mapping[str, object], data: Mapping[str, object]) -> dict[str, object]:
    """What is given, over what holds otherwise; a section of another kind replaces the whole."""
    found: dict[str, object] = {key: deepcopy(value) for key, value in base.items()}
    for key, value in data.items():
        below = found.get(key)
        if isinstance(below, dict) and isinstance(value, dict) and _is_one_kind(below, value):
            found[key] = _over(below, value)
        else:
            found[key] = value
    return found


def _is_one_kind(below: dict[str, object], value: dict[str, object]) -> bool:
    return all(value.get(name, below.get(name)) == below.get(name) for name in ("kind", "type"))


def _keys(data: Mapping[Any, object], above: KeyPath = ()) -> list[str]:
    found = []
    for key, value in data.items():
        found.append(dotted((*above, key)))
        items = dict(enumerate(value)) if isinstance(value, list) else value
        if isinstance(items, dict):
            found += _keys(items, (*above, key))
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


def _path(key: str) -> KeyPath:
    return tuple(int(part) if part.isdigit() else part for part in key.split("."))


def read_text(path: Path) -> str:
    """The text of a run file.

    Raises:
        ConfigError: it cannot be read, or is none.
    """
    try:
        with path.open("rb") as stream:
            content = stream.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        fix = "check the path; isles init writes a run file to start from"
        raise ConfigError(
            "there is no such file", where=str(path), fix=fix, id="config.file"
        ) from None
    except IsADirectoryError:
        fix = "name the run file inside it"
        raise ConfigError(
            "this is a folder, not a run file", where=str(path), fix=fix, id="config.file"
        ) from None
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        fix = "check the path and the permissions"
        raise ConfigError(
            f"cannot be read: {reason}", where=str(path), fix=fix, id="config.file"
        ) from None
    if len(content) > _MAX_BYTES:
        raise ConfigError(
            "larger than 1 MiB: this is no run file",
            where=f"{path}:1",
            fix="check the path",
            id="config.file",
        )
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ConfigError(
            f"the byte 0x{content[error.start]:02x} is not UTF-8",
            where=f"{path}:{line}",
            fix="save the file as UTF-8 text",
            id="config.file",
        ) from None
