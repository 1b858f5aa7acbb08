"""pydantic's errors as isles errors: the value, and a fix."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from isles.config import keys
from isles.config.issues import Issue, alias_words, aliases, quote, unknown_key
from isles.config.sections.run import RunConfig
from isles.config.yaml import KeyPath, dotted, is_leaf, resolve_plain, scalar_text

_SIZES = frozenset(
    ("greater_than", "greater_than_equal", "less_than", "less_than_equal", "too_short", "too_long")
)
_YES = frozenset(("yes", "on", "true", "1", "y"))
_NO = frozenset(("no", "off", "false", "0", "n"))


def explain(
    errors: Iterable[Mapping[str, Any]], data: object, file: type[BaseModel] = RunConfig
) -> list[Issue]:
    """Every issue in `ValidationError.errors()` of this data, one per key."""
    types_by_path: dict[KeyPath, set[str]] = {}
    for error in errors:
        path = _path_in_file(error["loc"], error["type"], data, file)
        if error["type"] == "too_short" and _value_at(data, path):
            continue  # pydantic counts only valid items, and the others have their own issue
        # pydantic's mark for an error of the name itself.
        kind = "name" if error["loc"][-1:] == ("[key]",) else error["type"]
        types_by_path.setdefault(path, set()).add(kind)
    issues: list[Issue] = []
    missing: list[Issue] = []
    for path, types in types_by_path.items():
        if "literal_error" in types and any(o[: len(path)] == path != o for o in types_by_path):
            continue  # the value is not a word, and has its own issue
        if "extra_forbidden" in types:
            issues += unknown_key(path, _value_at(data, path), file)
        elif "name" in types:
            what = f"{quote(path[-1])} is not a valid name in {dotted(path[:-1])}"
            fix = "use letters, digits and '_', and begin with a letter or '_'"
            issues.append(Issue((dotted(path),), what, fix))
        elif "missing" in types:
            missing.append(_missing(path, file))
        else:
            issues.append(_WrongValue(path, _value_at(data, path), types, file).issue())
    # `base_model: x` is one mistake: do not also report that model.name_or_path is missing.
    meant = [f"{key}." for issue in issues for key in issue.meant]
    return issues + [m for m in missing if not any(k.startswith(f"{m.keys[0]}.") for k in meant)]


def _missing(path: KeyPath, file: type[BaseModel]) -> Issue:
    node = keys.schema_at(path, file) or {}
    if not keys.is_section(node):
        fix = f"add {path[-1]}: followed by {keys.allowed(node)}"
        return Issue((dotted(path),), f"the key {dotted(path)} is missing", fix)
    required = [key for key, child in keys.children(node).items() if "default" not in child]
    below = f" with {', '.join(required)} below it" if required else ""
    what = f"the section {dotted(path)} is missing"
    return Issue((dotted(path),), what, f"add {path[-1]}:{below}")


class _WrongValue:
    """A value that pydantic refused, and the type of its key."""

    def __init__(
        self, path: KeyPath, value: object, errors: set[str], file: type[BaseModel]
    ) -> None:
        self.path, self.value, self.file = path, value, file
        self.errors = errors  # pydantic's error types
        self.node = keys.schema_at(path, file) or {}
        self.types = keys.value_types(self.node)
        self.name = f"{path[-2]}.{path[-1]}" if isinstance(path[-1], int) else str(path[-1])
        self.label = "" if isinstance(path[-1], int) else f"{path[-1]}: "  # items have no name
        # The key as aliases.yaml has it.
        indexed = tuple(0 if isinstance(part, int) else part for part in path)
        self.alias_key = "track" if path[:1] == ("track",) else dotted(indexed)

    def issue(self) -> Issue:
        value, node, allowed = self.value, self.node, keys.allowed(self.node)
        if keys.is_section(node):
            return self._section()
        if value in (None, "", [], {}):
            default = ", or delete the line for the default" if "default" in node else ""
            if keys.is_text_as_typed(self.path):
                default = f', or {self.label}"" for empty text, or delete the line'
            what = "an empty list" if value == [] else f"empty ({scalar_text(value or None)})"
            return self._issue(f" is {what}", f"write {allowed}{default}")
        if self.errors & _SIZES and not isinstance(value, list):
            is_large = bool(self.errors & {"less_than", "less_than_equal"})
            fix = f"use {keys.allowed(node, with_caps=is_large)}"
            return self._is(": too large" if is_large else ": too small", fix)
        if "duration" in self.types:
            what, fix = ", not a valid time", f"write {allowed}"
            if isinstance(value, int | float) and not isinstance(value, bool):
                what, fix = ", without a unit", f"write {value}s, {value}m or {value}h"
            return self._is(what, fix)
        if isinstance(value, str) and keys.literals(node) and _as_number(value) is None:
            return self._word()
        return self._type()

    def _issue(self, what: str, fix: str) -> Issue:
        return Issue((dotted(self.path),), f"{self.name}{what}", fix)

    def _is(self, what: str, fix: str) -> Issue:
        return self._issue(f" is {quote(self.value)}{what}", fix)

    def _section(self) -> Issue:
        # A value that is not a section, or a section of an unknown kind.
        value, node, kinds = self.value, self.node, tuple(keys.by_kind(self.node))
        if isinstance(value, Mapping):
            if "kind" in value:
                at = (*self.path, "kind")
                return _WrongValue(at, value["kind"], self.errors, self.file)._word()
            return self._issue(" has no kind", f"add kind: one of {', '.join(kinds)}")
        if value not in (None, "") and keys.literals(node):
            return self._word()  # a word means a section with default values
        inside = keys.children(node)
        fix = f"write its keys indented below it, such as {next(iter(inside))}: ..."
        if value is None:
            return self._issue(" is empty", f"{fix}, or delete the line")
        if isinstance(value, str):
            word = value.lower()
            key = next((k for k in ("name_or_path", "path") if k in inside), "")
            kind = word if word in kinds else ""
            kind = kind or alias_words("values", f"{self.alias_key}.kind").get(word, "")
            section = alias_words("sections", self.alias_key).get(word)
            if section and word not in kinds:
                fix = f"write {self.name}: {section}"
            elif kind:
                fix = f"write {self.name}: {{kind: {kind}}}"
            elif key:
                fix = f"write {self.label}{{{key}: {scalar_text(value)}}}"
        return self._is(", not a section", fix)

    def _word(self) -> Issue:
        # A word that the key does not accept.
        value, words = self.value, keys.literals(self.node)
        choices = f"use {keys.allowed(self.node)}"
        word = scalar_text(value).lower() if is_leaf(value) else ""
        word = value.lower() if isinstance(value, str) else word
        spelled = {choice.lower(): choice for choice in words}
        near = difflib.get_close_matches(word, spelled, n=1, cutoff=0.6)
        meant = alias_words("values", self.alias_key).get(word) or (near and spelled[near[0]])
        fix = f"did you mean {meant}? {choices}" if meant else choices
        fix = aliases()["refused"].get(self.alias_key, {}).get(word, fix)
        return self._is(", not one of its values", fix)

    def _type(self) -> Issue:
        value, node, has_numbers = self.value, self.node, keys.has_numbers(self.node)
        allowed, own_types = keys.allowed(node), keys.own_types(node)
        if isinstance(value, str) and "one-line" in own_types:
            if value.splitlines() not in ([], [value]):
                return self._is(", not one line", "write it on one line")
            return self._is(", with a control character", "delete the character")
        if "string_pattern_mismatch" in self.errors and not keys.is_own_text(node):
            what, fix = ", not the name of a repository", f"use {allowed}"
            if "huggingface-id" not in own_types:
                better = "-".join(re.findall(r"[A-Za-z0-9._]+", str(value))).lstrip("._-")[:63]
                what, fix = ", not a valid folder name", f"{fix}, such as {better or 'run'}"
            return self._is(what, fix)
        if isinstance(value, bool | int | float) and keys.literals(node) and not has_numbers:
            return self._word()
        fix = self._written_otherwise() or f"write {allowed}"
        if has_numbers and isinstance(value, float) and not _is_finite(value):
            return self._is(", not a finite number", fix)
        text = " (text)" if isinstance(value, str) and has_numbers else ""
        return self._is(f"{text}, not {keys.noun(node)}", fix)

    def _written_otherwise(self) -> str:
        # The value in a notation of the key's type, or empty if unknown.
        value, types, key = self.value, self.types, self.label
        if keys.is_own_text(self.node):
            return ""
        if not isinstance(value, str):
            if isinstance(value, float) and "integer" in types and value == value // 1:
                return f"write {key}{int(value)}"
            is_word = isinstance(value, bool) and "one-line" in keys.own_types(self.node)
            if is_word or (isinstance(value, int | float) and types <= {"string", "null"}):
                return f'put it in quotes: {key}"{scalar_text(value)}"'
            return ""
        fix, number, item, word = "", _as_number(value), keys.items(self.node), value.lower()
        if number is not None and keys.has_numbers(self.node):
            whole = int(number) if "integer" in types and number == int(number) else number
            is_quoted = isinstance(resolve_plain(value), int | float)
            fix = f"remove the quotes: {key}{value}" if is_quoted else f"write {key}{whole}"
        elif "boolean" in types and word in _YES | _NO:
            boolean = scalar_text(word in _YES)
            fix = f"write {key}{boolean} (in YAML 1.2 only true and false are booleans)"
        elif item is not None and value in keys.literals(item):
            fix = f"write {key}[{value}]"
        elif item is not None and keys.is_section(item) and not keys.literals(item):
            fix = f"write {key}[{{path: {scalar_text(value)}}}]"
        return fix


def _as_number(text: str) -> int | float | None:
    # The number behind `8` in quotes, `1_000` or `1,000`, or None for other text.
    try:
        number = resolve_plain(text.strip().replace("_", "").replace(",", ""))
    except ValueError:
        return None
    if isinstance(number, bool) or not isinstance(number, int | float):
        return None
    return number if _is_finite(number) else None


def _is_finite(number: float) -> bool:
    return number - number == 0


def _path_in_file(
    loc: Sequence[str | int], kind: str, data: object, file: type[BaseModel]
) -> KeyPath:
    # pydantic's location without names of union members, which no file contains.
    path: list[str | int] = []
    node: keys.Schema = keys.tree(file)
    for position, part in enumerate(loc):
        if isinstance(part, int):
            node = keys.items(node) or {}
        elif part in keys.children(node):
            node = keys.children(node)[part]
        elif (inner := keys.named(node)) is not None and _is_key(part, _value_at(data, path)):
            node = inner
        elif kind != "extra_forbidden" or position < len(loc) - 1:
            continue
        path.append(part)
    return tuple(path)


def _is_key(name: str, value: object) -> bool:
    return isinstance(value, Mapping) and name in value


def _value_at(data: Any, path: Sequence[str | int]) -> Any:  # what YAML holds
    for part in path:
        try:
            data = data[part]
        except (KeyError, IndexError, TypeError):
            return None
    return data
