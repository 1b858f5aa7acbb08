"""A DeepSpeed JSON file: read, and compared with the run file, without DeepSpeed."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from isles.config.yaml import KeyPath, dotted, scan_yaml
from isles.errors import ConfigError, ConfigErrors, MissingDependencyError

Json = dict[str, Any]
"""What a JSON file holds: DeepSpeed's own names and types."""

AUTO = "auto"
_MAX_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class DeepSpeedFile:
    """A DeepSpeed JSON as it is.

    Args:
        path: as the run file names it.
        data: all of it.
        lines: the line of every key; empty where they could not be told.
    """

    path: Path
    data: Json
    lines: Mapping[KeyPath, int] = field(default_factory=dict)

    def where(self, *keys: str) -> str:
        """File, line and key, for messages."""
        line = self.lines.get(keys)
        return f"{self.path}{f':{line}' if line else ''} {dotted(keys)}"

    def section(self, *keys: str) -> Json:
        """A mapping inside; empty where it is absent."""
        value: object = self.data
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        return value if isinstance(value, dict) else {}


def read_deepspeed_file(path: Path) -> DeepSpeedFile:
    """Read a DeepSpeed JSON.

    Raises:
        ConfigError: it cannot be read, or is no JSON object; with the line.
    """
    try:
        content = path.read_bytes()
        text = content.decode("utf-8-sig")
        if len(content) > _MAX_BYTES:
            raise ConfigError("larger than 1 MiB: this is no DeepSpeed file", where=str(path))
        data = json.loads(text, object_pairs_hook=_without_doubles)
    except OSError as error:
        raise ConfigError(
            f"cannot be read: {error.strerror or error}",
            where=str(path),
            fix="strategy.config_file names a DeepSpeed JSON, from where isles is called",
        ) from None
    except UnicodeDecodeError:
        raise ConfigError("not UTF-8 text", where=str(path), fix="save it as UTF-8") from None
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"no JSON: {error.msg}", where=f"{path}:{error.lineno}:{error.colno}", fix="mend it"
        ) from None
    except (_DoubledKeyError, RecursionError) as error:
        raise ConfigError(f"{error}", where=str(path), fix="keep one of them") from None
    if not isinstance(data, dict):
        raise ConfigError(
            "the file holds no object with DeepSpeed's keys", where=f"{path}:1", fix="begin with {"
        )
    return DeepSpeedFile(path, data, _lines(text))


def missing_deepspeed() -> MissingDependencyError | None:
    """The error to raise where DeepSpeed is not installed; imports nothing."""
    if importlib.util.find_spec("deepspeed") is not None:
        return None
    return MissingDependencyError(
        "strategy deepspeed needs the package deepspeed, which is not installed",
        where="strategy.kind",
        fix="pip install 'isles[deepspeed]'; fsdp shards in the same way and needs nothing more",
    )


class _DoubledKeyError(Exception):
    """An object names a key twice."""


def _without_doubles(pairs: list[tuple[str, object]]) -> Json:
    names = [name for name, _ in pairs]
    if doubled := [name for name in names if names.count(name) > 1]:
        raise _DoubledKeyError(f"{doubled[0]} stands in one object {names.count(doubled[0])} times")
    return dict(pairs)


def _lines(text: str) -> Mapping[KeyPath, int]:
    """JSON is YAML, save for tabs between tokens, and our YAML knows its lines."""
    try:
        document, _ = scan_yaml(text.replace("\t", " "), "")
    except (ConfigError, ConfigErrors):
        return {}
    return document.lines
