"""Faults of a run file in plain words: what is wrong with a value or a key, and how to mend it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from isles import __version__
from isles.config import keys
from isles.config.aliases.names import find_foreign
from isles.config.aliases.values import SECTIONS, VALUES, VALUES_NOT_YET
from isles.config.emit import is_leaf, scalar_text
from isles.config.unknown import guess_meant
from isles.config.yaml import KeyPath, dotted, resolve_plain, shorten

_SIZES = frozenset(
    ("greater_than", "greater_than_equal", "less_than", "less_than_equal", "too_short", "too_long")
)
_YES = frozenset(("yes", "on", "true", "1", "y"))
_NO = frozenset(("no", "off", "false", "0", "n"))


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault, by the path of the key that it is about.

    Args:
        path: where it stands, in the file or among the overrides.
        what: what is wrong, with the value.
        fix: what to do about it.
        meant: keys of isles that the user may have meant; rules about them would only confuse.
    """

    path: KeyPath
    what: str
    fix: str
    meant: tuple[str, ...] = ()


def explain(errors: Iterable[Mapping[str, Any]], data: object) -> list[Fault]:
    """Every fault that pydantic found, one a key, in plain words.

    Args:
        errors: `ValidationError.errors()`.
        data: what was validated.
    """
    kinds_by_path: dict[KeyPath, set[str]] = {}
    for error in errors:
        path = _path_in_file(error["loc"], error["type"], data)
        if error["type"] == "too_short" and _value_at(data, path):
            continue  # pydantic counts the items that are right; the others have their own fault
        kinds_by_path.setdefault(path, set()).add(error["type"])
    faults: list[Fault] = []
    missing: list[Fault] = []
    for path, kinds in kinds_by_path.items():
        if "literal_error" in kinds and any(o[: len(path)] == path != o for o in kinds_by_path):
            continue  # no such word, and it was none: the fault is below it
        if "extra_forbidden" in kinds:
            faults += unknown_key(path, _value_at(data, path))
        elif "missing" in kinds:
            missing.append(_missing(path))
        else:
            faults.append(_wrong_value(path, _value_at(data, path), kinds))
    meant = tuple(key for fault in faults for key in fault.meant)
    # `base_model: x` is one mistake, not two: no word on model.name_or_path being absent as well.
    return faults + [f for f in missing if not _is_within(meant, dotted(f.path))]


def unknown_key(path: KeyPath, value: object) -> list[Fault]:
    """A key that isles does not have; and those below it that another tool has."""
    meant = guess_meant(path)
    origin = f", a name from {_listing(meant.tools)}" if meant.tools else ""
    shown = f" (value {_show(value)})" if is_leaf(value) else ""
    what = f"unknown key {shorten(str(path[-1]))}{origin}{shown}"
    faults = [Fault(path, what, meant.fix, meant.keys)]
    if isinstance(value, Mapping):
        for inner, inner_value in value.items():
            if find_foreign((*path, str(inner))) is not None:
                faults += unknown_key((*path, str(inner)), inner_value)
    return faults


def _missing(path: KeyPath) -> Fault:
    node = keys.schema_at(path) or {}
    if not keys.is_section(node):
        fix = f"add {path[-1]}: with {keys.allowed(node)}"
        return Fault(path, f"the key {dotted(path)} is missing", fix)
    required = [key for key, child in keys.children(node).items() if "default" not in child]
    below = f", and below it {', '.join(required)}" if required else ""
    return Fault(path, f"the section {dotted(path)} is missing", f"add {path[-1]}:{below}")


def _wrong_value(path: KeyPath, value: object, kinds: set[str]) -> Fault:
    node = keys.schema_at(path) or {}
    if keys.is_section(node):
        return _wrong_section(path, value, node)
    if value in (None, ""):
        fix = f"write {keys.allowed(node)}{_or_default(node)}"
        return Fault(path, f"{_name(path)} is empty ({scalar_text(value)})", fix)
    if kinds & _SIZES:
        return _wrong_size(path, value, node, kinds)
    if "duration" in keys.value_types(node):
        return _not_a_time(path, value, node)
    if isinstance(value, str) and keys.literals(node) and _as_number(value) is None:
        return _wrong_word(path, value, node)
    return _wrong_type(path, value, node, kinds)


def _wrong_size(path: KeyPath, value: object, node: keys.Schema, kinds: set[str]) -> Fault:
    name = _name(path)
    if isinstance(value, Mapping):
        return Fault(path, f"{name} is empty", f"write {keys.allowed(node)}")
    if isinstance(value, list):
        if not value:
            return Fault(path, f"{name} is an empty list", "write one item")
        return Fault(path, f"{name} has {len(value)} items, which is too many", "keep fewer")
    size = "large" if kinds & {"less_than", "less_than_equal"} else "small"
    fix = f"use {keys.allowed(node, with_caps=size == 'large')}"
    return Fault(path, f"{name} is {_show(value)}: too {size}", fix)


def _wrong_section(path: KeyPath, value: object, node: keys.Schema) -> Fault:
    """A section that is none, or of no kind that there is."""
    if not isinstance(value, Mapping) and value not in (None, "") and keys.literals(node):
        return _wrong_word(path, value, node)  # a word stands for a section with its defaults
    if not isinstance(value, Mapping):
        return _not_a_section(path, value, node)
    if "kind" in value:
        kind_path = (*path, "kind")
        return _wrong_word(kind_path, value["kind"], keys.children(node)["kind"])
    words = ", ".join(keys.kinds(node))
    return Fault(path, f"{_name(path)} does not say its kind", f"add kind: one of {words}")


def _not_a_section(path: KeyPath, value: object, node: keys.Schema) -> Fault:
    name, inside = _name(path), keys.children(node)
    below = f"write its keys below it, indented, such as {next(iter(inside))}:"
    if value is None:
        return Fault(path, f"{name} is empty", f"{below} ..., or delete the line")
    what = f"{name} is {_show(value)}, not a section with keys of its own"
    if isinstance(value, str):
        if value.lower() in keys.kinds(node):
            return Fault(path, what, f"write {name}: {{kind: {value.lower()}}}")
        if section := _section_meant(path, value):
            return Fault(path, what, f"write {name}: {section}")
        if value in VALUES_NOT_YET.get(_table_key((*path, "kind")), ()):
            what = f"{name} is {_show(value)}, which isles {__version__} does not have yet"
            return Fault(path, what, f"write {name}: {{kind: {keys.kinds(node)[0]}}}")
        for key in ("name_or_path", "path"):
            if key in inside:
                label = "" if isinstance(path[-1], int) else f"{name}: "
                return Fault(path, what, f"write {label}{{{key}: {scalar_text(value)}}}")
    return Fault(path, what, f"{below} ...")


def _section_meant(path: KeyPath, value: str) -> str:
    """The section that another tool says by one word; empty: not known."""
    word = value.lower()
    if section := SECTIONS.get(_table_key(path), {}).get(word):
        return section
    kind = VALUES.get(_table_key((*path, "kind")), {}).get(word)
    return f"{{kind: {kind}}}" if kind else ""


def _not_a_time(path: KeyPath, value: object, node: keys.Schema) -> Fault:
    if isinstance(value, int | float) and not isinstance(value, bool):
        what = f"{_name(path)} is {_show(value)}, without a unit"
        return Fault(path, what, f"write {value}s, {value}m or {value}h")
    what = f"{_name(path)} is {_show(value)}, not a time that can be used"
    return Fault(path, what, f"write {keys.allowed(node)}")


def _wrong_word(path: KeyPath, value: object, node: keys.Schema) -> Fault:
    words, choices = keys.literals(node), f"use {keys.allowed(node)}"
    word = value.lower() if isinstance(value, str) else scalar_text(value) if is_leaf(value) else ""
    if word in VALUES_NOT_YET.get(_table_key(path), ()):
        what = f"{_name(path)} is {_show(value)}, which isles {__version__} does not have yet"
        return Fault(path, what, choices)
    known = VALUES.get(_table_key(path), {}).get(word)
    spelled = {choice.lower(): choice for choice in words}
    near = difflib.get_close_matches(word, spelled, n=1, cutoff=0.6)
    meant = known or (spelled[near[0]] if near else None)
    fix = f"did you mean {meant}? {choices}" if meant else choices
    return Fault(path, f"{_name(path)} is {_show(value)}, not one of its values", fix)


def _wrong_type(path: KeyPath, value: object, node: keys.Schema, kinds: set[str]) -> Fault:
    if "string_pattern_mismatch" in kinds and keys.is_hub_id(node):
        found = re.search(r"([\w.-]+/[\w.-]+)/?$", str(value))
        hint = f", such as {found[1]}" if found else ""
        what = f"{_name(path)} is {_show(value)}, not the name of a repository"
        return Fault(path, what, f"use {keys.allowed(node)}{hint}")
    if isinstance(value, str) and keys.is_one_line(node):
        return Fault(path, f"{_name(path)} is {_show(value)}, not one line", "write it on one line")
    if "string_pattern_mismatch" in kinds and not keys.is_own_text(node):
        better = "-".join(re.findall(r"[A-Za-z0-9._]+", str(value))).lstrip("._")[:63]
        hint = f", such as {better}" if better else ""
        what = f"{_name(path)} is {_show(value)}, no name for a folder"
        return Fault(path, what, f"use {keys.allowed(node)}{hint}")
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if keys.literals(node) and isinstance(value, bool | int | float) and not keys.has_numbers(node):
        return _wrong_word(path, value, node)
    text = " (text)" if isinstance(value, str) and keys.has_numbers(node) else ""
    what = f"{_name(path)} is {_show(value)}{text}, not {keys.noun(node)}"
    if is_number and keys.has_numbers(node) and isinstance(value, float) and not _is_finite(value):
        what = f"{_name(path)} is {_show(value)}, not a finite number"
    table_key = _table_key(path)
    if isinstance(value, str) and value in VALUES_NOT_YET.get(table_key, ()):
        what = f"{_name(path)} is {_show(value)}, which isles {__version__} does not have yet"
    key = "" if isinstance(path[-1], int) else f"{path[-1]}: "  # an item of a list has no name
    return Fault(path, what, _how_to_write(key, value, node))


def _how_to_write(key: str, value: object, node: keys.Schema) -> str:
    """How a value of the wrong type is written instead, after its `key: `."""
    types = keys.value_types(node)
    if keys.is_own_text(node):
        return f"write {keys.allowed(node)}"
    if isinstance(value, str) and (fix := _text_as_meant(key, value, node)):
        return fix
    if isinstance(value, float) and "integer" in types and value == value // 1:
        return f"write {key}{int(value)}"
    is_text = types <= {"string", "null"} or (isinstance(value, bool) and keys.is_one_line(node))
    if isinstance(value, bool | int | float) and is_text:
        return f'put it in quotes: {key}"{scalar_text(value)}"'
    return f"write {keys.allowed(node)}"


def _text_as_meant(key: str, text: str, node: keys.Schema) -> str:
    """How text is written where a number, a boolean or a list belongs; empty: no idea."""
    fix, types, item = "", keys.value_types(node), keys.items(node)
    number, word = _as_number(text), text.lower()
    if number is not None and keys.has_numbers(node):
        whole = int(number) if "integer" in types and number == int(number) else number
        is_quoted = isinstance(resolve_plain(text), int | float)
        fix = f"remove the quotes: {key}{text}" if is_quoted else f"write {key}{whole}"
    elif "boolean" in types and word in _YES | _NO:
        boolean = scalar_text(word in _YES)
        fix = f"write {key}{boolean} (in YAML 1.2 only true and false are booleans)"
    elif types == {"integer"} and (digits := re.fullmatch(r"[A-Za-z_ -]+(\d{1,4})", text)):
        fix = f"write {key}{digits[1]}"  # stage2, zero-3
    elif item is not None and text in keys.literals(item):
        fix = f"write {key}[{text}]"
    elif item is not None and keys.is_section(item) and not keys.literals(item):
        fix = f"write {key}[{{path: {scalar_text(text)}}}]"
    return fix


def _as_number(text: str) -> int | float | None:
    """The number that was meant by `8` in quotes, `1_000` or `1,000`; None for other text."""
    try:
        number = resolve_plain(text.strip().replace("_", "").replace(",", ""))
    except ValueError:
        return None
    if isinstance(number, bool) or not isinstance(number, int | float):
        return None
    return number if _is_finite(number) else None


def _is_finite(number: float) -> bool:
    return number - number == 0


def _listing(words: Sequence[str]) -> str:
    *others, last = words
    return f"{', '.join(others)} and {last}" if others else last


def _name(path: KeyPath) -> str:
    return f"{path[-2]}.{path[-1]}" if isinstance(path[-1], int) else str(path[-1])


def _show(value: object) -> str:
    match value:
        case str():
            return f'"{shorten(value)}"' if value.isprintable() else shorten(scalar_text(value))
        case Mapping():
            return "a section"
        case list() if not is_leaf(value):
            return "a list"
        case _:
            return shorten(scalar_text(value))


def _or_default(node: keys.Schema) -> str:
    return ", or delete the line to have the default" if "default" in node else ""


def _table_key(path: KeyPath) -> str:
    if path[:1] == ("track",):
        return "track"
    return dotted(tuple(0 if isinstance(part, int) else part for part in path))


def _is_within(keys_meant: Iterable[str], section: str) -> bool:
    return any(key == section or key.startswith(f"{section}.") for key in keys_meant)


def _path_in_file(loc: Sequence[str | int], kind: str, data: object) -> KeyPath:
    """pydantic's place without the names of union members, which are in no file."""
    path: list[str | int] = []
    node: keys.Schema = keys.run_schema()
    for position, part in enumerate(loc):
        if isinstance(part, int):
            path.append(part)
            node = keys.items(node) or {}
        elif part in keys.children(node):
            path.append(part)
            node = keys.children(node)[part]
        elif (inner := keys.named(node)) is not None and _has(_value_at(data, path), part):
            path.append(part)
            node = inner
        elif kind == "extra_forbidden" and position == len(loc) - 1:
            path.append(part)
    return tuple(path)


def _has(value: object, name: str) -> bool:
    return isinstance(value, Mapping) and name in value


def _value_at(data: object, path: Sequence[str | int]) -> object:
    for part in path:
        try:
            data = data[part]  # type: ignore[index]
        except (KeyError, IndexError, TypeError):
            return None
    return data
