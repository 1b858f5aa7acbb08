"""YAML 1.2: read with the line of every key and item, and written so that it reads back the same.

PyYAML composes the nodes; what a scalar means, which tags count, doubled keys and limits are here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from typing import Any

import yaml
from yaml.events import AliasEvent
from yaml.reader import ReaderError

from isles.errors import ConfigError, ConfigErrors

KeyPath = tuple[str | int, ...]
"""Where a value stands: `("data", "sources", 0, "path")`."""

MAX_DEPTH = 32
MAX_NODES = 20_000
_MAX_DIGITS = 40

_NULL = frozenset(("", "~", "null", "Null", "NULL"))
_BOOL = frozenset(("true", "True", "TRUE", "false", "False", "FALSE"))
_INT = re.compile(r"[-+]?[0-9]+")
_INT_OTHER_BASE = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_INFINITE = re.compile(r"([-+]?)\.(?:inf|Inf|INF)")
_NAN = frozenset((".nan", ".NaN", ".NAN"))
_CORE = "tag:yaml.org,2002:"
_TYPES = {"str": str, "int": int, "float": float, "bool": bool, "null": type(None)}
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff]")

_QUOTE = "put the text in quotes"
_INDENT = "give keys of one section the same number of spaces at the start of their lines"
_CLOSE = "close the quote; text with an apostrophe goes in double quotes"
_SINGLE = "use single quotes, in which a backslash is a backslash"

# Words of PyYAML's problem -> what is wrong, and how to mend it; the first that is found counts.
_PROBLEMS = {
    "found character '\\t'": ("a tab stands where spaces must", "indent with spaces"),
    "found a tab character": ("a tab stands where spaces must", "indent with spaces"),
    "cannot start any token": ("a value cannot begin with this character", _QUOTE),
    "mapping values are not allowed here": (
        "a ':' stands where no key can be",
        "check the indentation of this line and the one above; text that holds ': ' needs quotes",
    ),
    "could not find expected ':'": (
        "this line is no 'key: value'",
        "put ': ' behind the key, or indent the line as part of the value above",
    ),
    "sequence entries are not allowed": ("a '- ' stands where no list can be", _INDENT),
    "expected <block end>": ("this line does not fit the lines above", _INDENT),
    "expected '<document start>'": ("this line does not fit the lines above", _INDENT),
    "expected ',' or ']'": ("a list in [ ] is not closed", "put ',' between items, ']' behind"),
    "expected ',' or '}'": ("a mapping in { } is not closed", "put ',' between keys, '}' behind"),
    "found unexpected end of stream": ("a quote is opened here and never closed", _CLOSE),
    "found unexpected document separator": ("a quote is opened here and never closed", _CLOSE),
    "found unknown escape character": ("this backslash escape does not exist", _SINGLE),
    "expected escape sequence": ("this backslash escape is not complete", _SINGLE),
    "expected the node content": ("a value is missing here", "write the value, or null"),
    "undefined tag handle": ("a value cannot begin with '!'", _QUOTE),
    "expected alphabetic or numeric character": ("a value cannot begin with '*' or '&'", _QUOTE),
    "but found another document": (
        "a second document begins here",
        "one run a file: delete the line ---, or split the file",
    ),
}


@dataclass(frozen=True, slots=True)
class Document:
    """What a YAML text says, and where.

    Args:
        value: plain data: dict with text keys, list, str, int, float, bool, None.
        lines: the line, from 1, of every key and of every list item.
    """

    value: object
    lines: Mapping[KeyPath, int]


def parse_yaml(text: str, name: str) -> Document:
    """A run file's text as plain data.

    YAML 1.2 core schema: `4e-4` and `0o17` are numbers, only `true` and `false` are booleans, `on`
    and dates are text. Anchors and aliases work; merge keys (`<<`) and tags outside the core
    schema are refused, for the file then says what it does not show.

    Args:
        text: the whole text.
        name: the file's name, for messages.

    Raises:
        ConfigErrors: it is not YAML, or not a mapping, or has a doubled key; file and line in each.
    """
    document, issues = scan_yaml(text, name)
    if issues:
        raise ConfigErrors(issues)
    return document


def scan_yaml(text: str, name: str) -> tuple[Document, list[ConfigError]]:
    """As `parse_yaml`, but doubled keys and the like are returned beside what could be read.

    Raises:
        ConfigError: the text is not YAML at all, or its top is not a mapping.
    """
    root = _compose(text, name)
    if isinstance(root, yaml.MappingNode):
        builder = _Builder(name)
        return Document(builder.build(root, ()), builder.lines), builder.issues
    if root is None or (not root.value and not root.tag and isinstance(root, yaml.ScalarNode)):
        what, line = "the file is empty", 1
    else:
        kind = "a list" if isinstance(root, yaml.SequenceNode) else "a single value"
        what = f"the file holds {kind}, not sections such as model:, data: and training:"
        line = _line(root)
    fix = "isles init writes a run file to start from"
    raise ConfigError(what, where=f"{name}:{line}", fix=fix, id="config.syntax")


def parse_value(text: str, where: str) -> object:
    """One value as it stands after `key=` on the command line: `4e-4`, `[a, b]`, `{kind: ddp}`.

    Raises:
        ConfigErrors: it is not YAML; `where` is in each.
    """
    builder = _Builder("")
    try:
        root = _compose(text, "")
        value = None if root is None else builder.build(root, ())
    except ConfigError as error:
        builder.issues = [error]
    if builder.issues:
        raise ConfigErrors([ConfigError(i.what, where=where, fix=i.fix) for i in builder.issues])
    return value


def resolve_plain(text: str) -> str | int | float | bool | None:
    """What an unquoted scalar means in the YAML 1.2 core schema.

    Raises:
        ValueError: a number that no key can hold.
    """
    if text in _NULL:
        return None
    if text in _BOOL:
        return text.lower() == "true"
    if _INT.fullmatch(text) or _INT_OTHER_BASE.fullmatch(text):
        if len(text) > _MAX_DIGITS:
            raise ValueError(f"a number of {len(text)} digits is too large")
        return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
    if _FLOAT.fullmatch(text):
        number = float(text)
        if number in (float("inf"), float("-inf")):
            raise ValueError(f"the number {shorten(text)} is too large")
        return number
    if infinite := _INFINITE.fullmatch(text):
        return float(f"{infinite[1]}inf")
    return float("nan") if text in _NAN else text


def shorten(text: str, length: int = 60) -> str:
    """The text, cut where it is long, so that a message stays one line."""
    return text if len(text) <= length else f"{text[: length - 3]}..."


def dotted(path: KeyPath) -> str:
    """A path as messages and overrides write it: `data.sources.0.path`."""
    return ".".join(str(part) for part in path)


class _Loader(yaml.SafeLoader):
    """PyYAML's composer with limits, and with the lines of aliases.

    A node's tag is the one that is written, empty where there is none.
    """

    def __init__(self, text: str, name: str) -> None:
        super().__init__(text)
        self.file = name
        self.depth = 0
        self.num_nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        self.num_nodes += 1
        if self.depth >= MAX_DEPTH or self.num_nodes > MAX_NODES:
            raise _too_large(self.file, event.start_mark.line + 1)
        if isinstance(event, AliasEvent):
            return self._alias(event)
        self.anchors.pop(event.anchor, None)  # YAML lets a later anchor take the name
        self.depth += 1
        node = super().compose_node(parent, index)
        assert node is not None
        self.depth -= 1
        node.tag = event.tag or ""
        return node

    def _alias(self, event: Any) -> yaml.Node:
        known = self.anchors.get(event.anchor)
        if known is None or known.end_mark is None:
            problem = "stands inside itself" if known else "is not defined above"
            raise ConfigError(
                f"the alias *{shorten(event.anchor)} {problem}",
                where=_at(self.file, event.start_mark),
                fix="write the value out, or put text that begins with * in quotes",
                id="config.syntax",
            )
        self.get_event()  # type: ignore[no-untyped-call]
        node = copy(known)
        node.start_mark = event.start_mark
        return node


def _compose(text: str, name: str) -> yaml.Node | None:
    try:
        loader = _Loader(text, name)
    except ReaderError as error:
        before = text[: error.position]
        raise ConfigError(
            f"the character U+{ord(text[error.position]):04X} does not belong in YAML",
            where=f"{name}:{before.count(chr(10)) + 1}:{error.position - before.rfind(chr(10))}",
            fix="delete it, and save the file as UTF-8 text",
            id="config.syntax",
        ) from None
    try:
        return loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        what, fix, mark = _explain(error)
        where = _at(name, mark or loader.get_mark())
        raise ConfigError(what, where=where, fix=fix, id="config.syntax") from None
    except (ValueError, OverflowError, IndexError):
        # PyYAML leaves "\UFFFFFFFF" and "%YAML 1.<5000 digits>" to chr() and int().
        raise ConfigError(
            "a backslash escape or a %YAML line names something that does not exist",
            where=_at(name, loader.get_mark()),
            fix="write the character itself, or the text in single quotes",
            id="config.syntax",
        ) from None
    finally:
        loader.dispose()


def _explain(error: yaml.MarkedYAMLError) -> tuple[str, str, yaml.Mark | None]:
    # What is wrong, how to mend it, and where it begins (None: PyYAML does not say).
    problem = error.problem or error.context or "it cannot be read"
    mark = error.problem_mark or error.context_mark
    if "quoted scalar" in (error.context or "") and "unexpected" in problem:
        mark = error.context_mark  # the end of the file says nothing; the open quote does
    for words, (what, fix) in _PROBLEMS.items():
        if words in problem:
            return what, fix, mark
    return f"not valid YAML: {problem}", "compare the line with the lines around it", mark


class _Builder:
    """Plain data from nodes, with the line of every path and the issues met on the way."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lines: dict[KeyPath, int] = {}
        self.issues: list[ConfigError] = []
        self._num_nodes = 0

    def build(self, node: yaml.Node, path: KeyPath, depth: int = 0) -> object:
        self._num_nodes += 1  # aliases count each time: ten nested ones could stand for millions
        if self._num_nodes > MAX_NODES or depth > MAX_DEPTH:
            raise _too_large(self.name, _line(node))
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        if node.tag not in ("", "!", f"{_CORE}map", f"{_CORE}seq"):
            self._refuse_tag(node, path)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path, depth)
        items = []
        for index, child in enumerate(node.value):
            self.lines[*path, index] = _line(child)
            items.append(self.build(child, (*path, index), depth + 1))
        return items

    def _mapping(self, node: yaml.MappingNode, path: KeyPath, depth: int) -> dict[str, object]:
        data: dict[str, object] = {}
        for key_node, child in node.value:
            key = self._key(key_node, path)
            if key is None:
                continue
            here = (*path, key)
            if key in data:
                what = f"{key} stands here and on line {self.lines[here]} as well"
                self._add(key_node, here, what, "keep one of them")
                continue
            self.lines[here] = _line(key_node)
            data[key] = self.build(child, here, depth + 1)
        return data

    def _key(self, node: yaml.Node, path: KeyPath) -> str | None:
        what, fix = "a key must be a name, not a list or a mapping", "name the key"
        if isinstance(node, yaml.ScalarNode):
            if _is_plain(node) and node.value == "<<":
                what, fix = "merge keys (<<) are not supported", "write the keys out"
            else:
                key = self._scalar(node, path)
                if isinstance(key, str):
                    return key
                what = f"the key {shorten(node.value) or 'null'} is not a name"
        self._add(node, path, what, fix)
        return None

    def _scalar(self, node: yaml.ScalarNode, path: KeyPath) -> object:
        if odd := _UNPRINTABLE.search(node.value):
            what = f"the text holds the control character U+{ord(odd[0]):04X}"
            self._add(node, path, what, "delete it")
            return None
        if node.tag in ("!", f"{_CORE}str") or (not node.tag and not _is_plain(node)):
            return node.value
        value: object = node.value
        try:
            value = resolve_plain(node.value)
        except ValueError as error:
            if not node.tag:
                self._add(node, path, str(error), "write a number that fits")
                return None
        if node.tag and type(value) is not _TYPES.get(node.tag.removeprefix(_CORE)):
            self._refuse_tag(node, path)
            return None
        return value

    def _refuse_tag(self, node: yaml.Node, path: KeyPath) -> None:
        tag = shorten(node.tag.replace(_CORE, "!!"))
        self._add(node, path, f"the tag {tag} is not supported", "delete the tag")

    def _add(self, node: yaml.Node, path: KeyPath, what: str, fix: str) -> None:
        where = f"{self.name}:{_line(node)} {dotted(path)}".rstrip()
        self.issues.append(ConfigError(what, where=where, fix=fix, id="config.syntax"))


def _is_plain(node: yaml.ScalarNode) -> bool:
    return node.style is None and not node.tag


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _too_large(name: str, line: int) -> ConfigError:
    return ConfigError(
        f"more than {MAX_DEPTH} levels or {MAX_NODES} values: this is no run file",
        where=f"{name}:{line}",
        fix="check the path, and the brackets of this line",
    )


def _at(name: str, mark: Any) -> str:  # the stubs know two classes of marks, and None
    return f"{name}:{mark.line + 1}:{mark.column + 1}"


# Written by hand, as PyYAML quotes, folds and indents otherwise, and cannot say which line holds
# which key. Strings are JSON's, which are YAML too.
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
            with suppress(ValueError):
                if _PLAIN.fullmatch(value) and isinstance(resolve_plain(value), str):
                    return value
            quoted = json.dumps(value, ensure_ascii=False)
            return _ESCAPED.sub(lambda found: f"\\u{ord(found[0]):04x}", quoted)
        case Sequence():
            return f"[{', '.join(scalar_text(item) for item in value)}]"
        case _:
            raise TypeError(f"{type(value).__name__} is not a value of a run file")


def is_leaf(value: object) -> bool:
    """Whether a value stands on one line: a scalar, or a list of scalars."""
    if isinstance(value, list | tuple):
        return not any(isinstance(item, Mapping | list | tuple) for item in value)
    return not isinstance(value, Mapping)


def dump_yaml(data: Mapping[str, object]) -> str:
    """A mapping as block YAML."""
    return "".join(f"{line}\n" for line, _ in yaml_lines(data))


def yaml_lines(data: Mapping[str, object], path: KeyPath = ()) -> list[tuple[str, KeyPath | None]]:
    """The lines of a mapping as block YAML, each with the path of the leaf on it, if any."""
    lines: list[tuple[str, KeyPath | None]] = []
    for key, value in data.items():
        here, name = (*path, key), scalar_text(key)
        if is_leaf(value):
            lines.append((f"{name}: {scalar_text(value)}", here))
        elif isinstance(value, Mapping):
            lines.append((f"{name}:" if value else f"{name}: {{}}", None))
            lines += [(f"  {text}", leaf) for text, leaf in yaml_lines(value, here)]
        else:
            assert isinstance(value, list | tuple)
            lines.append((f"{name}:", None))
            for index, item in enumerate(value):
                inner: list[tuple[str, KeyPath | None]]
                if isinstance(item, Mapping):
                    inner = yaml_lines(item, (*here, index))
                else:
                    assert is_leaf(item), "lists of a run file hold scalars or mappings"
                    inner = [(scalar_text(item), (*here, index))]
                lines += [
                    (f"{'    ' if later else '  - '}{text}", leaf)
                    for later, (text, leaf) in enumerate(inner)
                ]
    return lines
