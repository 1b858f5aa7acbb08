"""YAML written so that it reads back the same, bit for bit."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from isles.config.yaml import resolve_plain

_PLAIN = re.compile(r"[A-Za-z0-9_./][A-Za-z0-9_./*+@=-]*")
_ESCAPED = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff\ud800-\udfff]")


def scalar_text(value: object) -> str:
    """One value on one line; text is quoted where it would read as something else."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case str():
            if _PLAIN.fullmatch(value) and _is_text(value):
                return value
            quoted = json.dumps(value, ensure_ascii=False)
            return _ESCAPED.sub(lambda found: f"\\u{ord(found[0]):04x}", quoted)
        case Sequence():
            return f"[{', '.join(scalar_text(item) for item in value)}]"
        case _:
            raise TypeError(f"{type(value).__name__} is not a value of a run file")


def is_leaf(value: object) -> bool:
    """Whether a value stands on one line: a scalar, or a list of scalars."""
    if isinstance(value, Mapping):
        return False
    if isinstance(value, (list, tuple)):
        return all(not isinstance(item, (Mapping, list, tuple)) for item in value)
    return True


def dump_yaml(data: Mapping[str, object]) -> str:
    """A mapping as block YAML."""
    return "".join(f"{line}\n" for line, _ in yaml_lines(data))


def yaml_lines(
    data: Mapping[str, object], path: tuple[str | int, ...] = ()
) -> list[tuple[str, tuple[str | int, ...] | None]]:
    """The lines of a mapping as block YAML, each with the path of the leaf on it, if any."""
    lines: list[tuple[str, tuple[str | int, ...] | None]] = []
    for key, value in data.items():
        here = (*path, key)
        name = scalar_text(key)
        if is_leaf(value):
            lines.append((f"{name}: {scalar_text(value)}", here))
        elif isinstance(value, Mapping):
            lines.append((f"{name}:" if value else f"{name}: {{}}", None))
            lines += [(f"  {text}", leaf) for text, leaf in yaml_lines(value, here)]
        else:
            assert isinstance(value, (list, tuple))
            lines.append((f"{name}:", None))
            for index, item in enumerate(value):
                if not isinstance(item, Mapping):
                    assert is_leaf(item), "lists of a run file hold scalars or mappings"
                    lines.append((f"  - {scalar_text(item)}", (*here, index)))
                    continue
                inner = yaml_lines(item, (*here, index))
                lines += [
                    (f"{'  - ' if first == 0 else '    '}{text}", leaf)
                    for first, (text, leaf) in enumerate(inner)
                ]
    return lines


def _is_text(text: str) -> bool:
    try:
        return isinstance(resolve_plain(text), str)
    except ValueError:
        return False
