"""Issues of a file, and the likely meaning of an unknown key.

The names that other tools use are data: aliases.yaml.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from pydantic import BaseModel

from isles import __version__
from isles.config import keys
from isles.config.sections.run import RunConfig
from isles.config.yaml import KeyPath, dotted, is_leaf, parse_yaml, scalar_text, shorten

_OUTER = "outer"
"""A section whose keys, such as lr, are mostly meant for the inner steps if given without it."""
_MESH_KEYS = ("tp_size", "cp_size", "pp_size", "pp_schedule", "cp_method")
_RENAMED = {"flavour": "flavor"}
"""Keys of earlier versions, with their present names in the same section."""
_NOT_WITH_DEEPSPEED = (
    ". isles does not combine DeepSpeed's ZeRO with tensor, context or pipeline parallelism. "
    "fsdp shards like ZeRO-3, and works with all three"
)


@dataclass(frozen=True, slots=True)
class Issue:
    """A problem of a file.

    Args:
        keys: its dotted keys. isles reports it at the first given key.
        meant: likely keys for an unknown key. isles skips the rules of these keys.
    """

    keys: tuple[str, ...]
    what: str
    fix: str
    meant: tuple[str, ...] = ()


_Guess = tuple[str, tuple[str, ...], tuple[str, ...]]
"""A fix for an unknown key, the likely keys, and the tools that use the name."""


def show_value(value: object) -> str:
    """A value as text in errors of rules: `true`, `0.3`, `q_proj, v_proj`."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case float():
            return f"{value:g}"
        case tuple():
            return ", ".join(str(item) for item in value)
        case _:
            return str(value)


def quote(value: object) -> str:
    """A value as the user wrote it, on one line."""
    match value:
        case str():
            return f'"{shorten(value)}"' if value.isprintable() else shorten(scalar_text(value))
        case Mapping():
            return "a section"
        case list() if not is_leaf(value):
            return "a list"
        case _:
            return shorten(scalar_text(value))


def nearest_multiples(number: int, unit: int) -> str:
    """The multiples of `unit` next to `number`, as a fix: `384 or 576`."""
    below = number // unit * unit
    return f"{below} or {below + unit}" if below else f"{unit}"


@dataclass(frozen=True, slots=True)
class Alias:
    """A key of another tool.

    Args:
        name: the tool's name, with underscores: `training.seq_len`.
        target: the dotted key of isles, or None.
        note: the reason why isles has no key, or a caution.
    """

    name: str
    tools: tuple[str, ...]
    target: str | None
    note: str


@cache
def aliases() -> Mapping[str, Any]:
    """The content of aliases.yaml: `keys`, `values`, `sections`."""
    entry = resources.files("isles.config") / "aliases.yaml"
    text = entry.read_text(encoding="utf-8").replace("{version}", __version__)
    return parse_yaml(text, entry.name).value


@cache
def alias_keys() -> dict[str, Alias]:
    """Every known key of another tool, by its name."""
    found: dict[str, Alias] = {}
    for entry in aliases()["keys"]:
        target, note = entry.get("here"), entry.get("note", entry.get("why", ""))
        for tool, names in entry.items():
            if tool in ("here", "note", "why"):
                continue
            for name in names.split():
                known = found.get(name, Alias(name, (), target, note))
                if tool not in known.tools:
                    found[name] = Alias(name, (*known.tools, tool), known.target, known.note)
    return found


@cache
def alias_words(kind: str, key: str) -> dict[str, str]:
    """Words of other tools for `values` of a key or for whole `sections`, with the isles values.

    The items of lists are item 0 in a key.
    """
    meanings: Mapping[str, str] = aliases()[kind].get(key, {})
    return {word: here for here, words in meanings.items() for word in words.split()}


def find_alias(path: Sequence[str | int]) -> Alias | None:
    """The alias that matches a key, by its whole path or its last part."""
    names = alias_keys()
    parts = [_normal(part) for part in path if isinstance(part, str)]
    found = (names.get(".".join(parts[start:])) for start in range(len(parts)))
    return next((alias for alias in found if alias is not None), None)


def unknown_key(path: KeyPath, value: object, file: type[BaseModel] = RunConfig) -> list[Issue]:
    """Issues of an unknown key, and of keys of other tools below it."""
    fix, meant, tools = _renamed(path, file) or next(_guesses(path, file))
    *others, last = tools or ("",)
    origin = f", a name from {', '.join(others)}{' and ' if others else ''}{last}" if tools else ""
    shown = f" (value {quote(value)})" if is_leaf(value) else ""
    what = f"unknown key {shorten(str(path[-1]))}{origin}{shown}"
    issues = [Issue((dotted(path),), what, fix, meant)]
    if isinstance(value, Mapping) and file is RunConfig:
        for inner, inner_value in value.items():
            if find_alias((*path, str(inner))) is not None:
                issues += unknown_key((*path, str(inner)), inner_value)
    return issues


def _renamed(path: KeyPath, file: type[BaseModel]) -> _Guess | None:
    old = _normal(str(path[-1]))
    new = (*path[:-1], _RENAMED.get(old, ""))
    return (f"{old} is called {new[-1]}", (dotted(new),), ()) if keys.schema_at(new, file) else None


def _guesses(path: KeyPath, file: type[BaseModel] = RunConfig) -> Iterator[_Guess]:
    # This spelling elsewhere, another tool's name, then the nearest name; the best guess first.
    name, parent = _normal(str(path[-1])), path[:-1]
    above = keys.schema_at(parent, file) or {}
    siblings = keys.children(above)
    if name == path[-1] and (kinds := keys.kinds_with(above, name)):
        why = _NOT_WITH_DEEPSPEED if name in _MESH_KEYS else ""
        yield f"it needs kind: {' or '.join(kinds)}{why}", (dotted(path),), ()
    if name in siblings:
        yield f"write it as {name}", (dotted((*parent, name)),), ()
    alias = find_alias(path) if file is RunConfig else None
    if "." in name:
        inner = tuple(int(part) if part.isdecimal() else part for part in name.split("."))
        for whole in (dotted(p) for p in ((*parent, *inner), inner) if keys.schema_at(p, file)):
            fix = f"a dotted key works only on the command line: write it {_place(whole)}"
            yield fix, (whole,), ()
        if alias is None:
            yield from _guesses((*parent, *inner), file)
    if alias is not None and "." in alias.name:
        yield _from_alias(alias)
    same = [dotted(known) for known in keys.all_paths(file) if known[-1] == name]
    alike = 0.9 if same or alias else 0.7
    for near in difflib.get_close_matches(name, siblings, n=1, cutoff=alike):
        yield f"did you mean {near}?", (dotted((*parent, near)),), ()
    if elsewhere := tuple(key for key in same if not key.startswith(f"{_OUTER}.")):
        yield f"it belongs {_place(elsewhere[0])}: {' or '.join(elsewhere)}", elsewhere, ()
    if alias is not None:
        yield _from_alias(alias)
    if same:
        yield f"it belongs {_place(same[0])}: {' or '.join(same)}", tuple(same), ()
    leaves = {str(known[-1]): dotted(known) for known in reversed(keys.all_paths(file))}
    for near in difflib.get_close_matches(name, leaves, n=1, cutoff=0.8):
        target = leaves[near]
        yield f"did you mean {target}? It belongs {_place(target)}", (target,), ()
    other_tools = alias_keys() if file is RunConfig else ()
    for near in difflib.get_close_matches(name, other_tools, n=1, cutoff=0.85):
        yield _from_alias(alias_keys()[near])
    there = f"{dotted(parent)} has" if parent else "the top of the file has"
    yield f"{there} these keys: {', '.join(siblings)}" if siblings else "delete it", (), ()


def _from_alias(alias: Alias) -> _Guess:
    if alias.target is None:
        return f"delete it: {alias.note}", (), alias.tools
    note = f" ({alias.note})" if alias.note else ""
    return f"isles calls it {alias.target}{note}", (alias.target,), alias.tools


def _place(target: str) -> str:
    section = target.rpartition(".")[0].replace(".0", "")
    return f"under {section}" if section else "at the top, without indentation"


def _normal(name: str) -> str:
    """A key as the table has it: lower case, underscores, no leading dashes."""
    return name.strip().lstrip("-").replace("-", "_").lower()
