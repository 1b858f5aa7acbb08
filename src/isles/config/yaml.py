"""YAML 1.2, read with the line of every key and item."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import yaml
from yaml import events
from yaml.reader import Reader

from isles.config.syntax import explain_syntax
from isles.errors import ConfigError, ConfigErrors

KeyPath = tuple[str | int, ...]
"""Where a value stands: `("data", "sources", 0, "path")`."""

MAX_DEPTH = 32
MAX_NODES = 20_000
_MAX_DIGITS = 40

_NULL = frozenset(("", "~", "null", "Null", "NULL"))
_BOOL = {
    "true": True,
    "True": True,
    "TRUE": True,
    "false": False,
    "False": False,
    "FALSE": False,
}
_INT = re.compile(r"[-+]?[0-9]+")
_INT_OTHER_BASE = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_INFINITE = re.compile(r"([-+]?)\.(?:inf|Inf|INF)")
_NAN = frozenset((".nan", ".NaN", ".NAN"))
_CORE_TAGS = {
    f"tag:yaml.org,2002:{name}": kind
    for name, kind in (
        ("str", str),
        ("int", int),
        ("float", float),
        ("bool", bool),
        ("null", type(None)),
    )
}
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Document:
    """What a YAML text says, and where.

    Args:
        value: plain data: dict with text keys, list, str, int, float, bool, None.
        lines: the line, from 1, of every key and of every list item.
    """

    value: object
    lines: Mapping[KeyPath, int]


@dataclass(slots=True)
class _Node:
    kind: Literal["scalar", "list", "map"]
    line: int
    text: str = ""
    is_plain: bool = False
    tag: str | None = None
    children: list[_Node] = field(default_factory=list)
    is_open: bool = False


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
    document, faults = scan_yaml(text, name)
    if faults:
        raise ConfigErrors(faults)
    return document


def scan_yaml(text: str, name: str) -> tuple[Document, list[ConfigError]]:
    """As `parse_yaml`, but doubled keys and the like are returned beside what could be read.

    Raises:
        ConfigError: the text is not YAML at all, or its top is not a mapping.
    """
    root = _compose(text, name)
    if root is None or (root.kind == "scalar" and not root.text and root.tag is None):
        raise ConfigError(
            "the file is empty",
            where=f"{name}:1",
            fix="isles init writes a run file to start from",
            id="config.syntax",
        )
    if root.kind != "map":
        what = "a list" if root.kind == "list" else "a single value"
        raise ConfigError(
            f"the file holds {what}, not sections such as model:, data: and training:",
            where=f"{name}:{root.line}",
            fix="isles init writes a run file to start from",
            id="config.syntax",
        )
    builder = _Builder(name)
    value = builder.build(root, (), 0)
    return Document(value, builder.lines), builder.faults


def parse_value(text: str, where: str) -> object:
    """One value as it stands after `key=` on the command line: `4e-4`, `[a, b]`, `{kind: ddp}`.

    Raises:
        ConfigErrors: it is not YAML; `where` is in each.
    """
    try:
        root = _compose(text, "")
    except ConfigError as error:
        raise ConfigErrors([ConfigError(error.what, where=where, fix=error.fix)]) from None
    builder = _Builder("")
    value = builder.build(root, (), 0) if root is not None else None
    if builder.faults:
        raise ConfigErrors([ConfigError(f.what, where=where, fix=f.fix) for f in builder.faults])
    return value


def resolve_plain(text: str) -> str | int | float | bool | None:
    """What an unquoted scalar means in the YAML 1.2 core schema.

    Raises:
        ValueError: a number that no key can hold.
    """
    if text in _NULL:
        return None
    if text in _BOOL:
        return _BOOL[text]
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


def _compose(text: str, name: str) -> _Node | None:
    if odd := Reader.NON_PRINTABLE.search(text):
        before = text[: odd.start()]
        raise ConfigError(
            f"the character U+{ord(odd[0]):04X} does not belong in YAML",
            where=f"{name}:{before.count(chr(10)) + 1}:{odd.start() - before.rfind(chr(10))}",
            fix="delete it, and save the file as UTF-8 text",
            id="config.syntax",
        )
    loader = yaml.SafeLoader(text)
    try:
        return _compose_events(loader, name)
    except yaml.MarkedYAMLError as error:
        what, fix, mark = explain_syntax(error)
        raise ConfigError(
            what, where=_at(name, mark or loader.get_mark()), fix=fix, id="config.syntax"
        ) from None
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


def _compose_events(loader: yaml.SafeLoader, name: str) -> _Node | None:
    root: _Node | None = None
    stack: list[_Node] = []
    labelled: dict[str, _Node] = {}
    num_nodes = 0
    while loader.check_event():
        event: events.Event = loader.get_event()  # type: ignore[no-untyped-call]
        if isinstance(event, events.CollectionEndEvent):
            stack.pop().is_open = False
            continue
        if not isinstance(event, events.NodeEvent):
            if isinstance(event, events.DocumentStartEvent) and root is not None:
                raise ConfigError(
                    "a second document begins here",
                    where=_at(name, event.start_mark),
                    fix="one run a file: delete the line ---, or split the file",
                    id="config.syntax",
                )
            continue
        num_nodes += 1
        if len(stack) >= MAX_DEPTH or num_nodes > MAX_NODES:
            raise _too_large(name, _line(event))
        node = _node_from_event(event, labelled, name)
        if stack:
            stack[-1].children.append(node)
        else:
            root = node
        if node.is_open:
            stack.append(node)
    return root


def _node_from_event(event: events.NodeEvent, labelled: dict[str, _Node], name: str) -> _Node:
    line = _line(event)
    if isinstance(event, events.AliasEvent):
        assert event.anchor is not None
        known = labelled.get(event.anchor)
        if known is None or known.is_open:
            problem = "stands inside itself" if known else "is not defined above"
            raise ConfigError(
                f"the alias *{shorten(event.anchor)} {problem}",
                where=_at(name, event.start_mark),
                fix="write the value out, or put text that begins with * in quotes",
                id="config.syntax",
            )
        return replace(known, line=line)
    if isinstance(event, events.ScalarEvent):
        is_plain = bool(event.implicit[0])
        node = _Node("scalar", line, text=event.value, is_plain=is_plain, tag=event.tag)
    elif isinstance(event, events.SequenceStartEvent):
        node = _Node("list", line, tag=None if event.implicit else event.tag, is_open=True)
    else:
        assert isinstance(event, events.MappingStartEvent)
        node = _Node("map", line, tag=None if event.implicit else event.tag, is_open=True)
    if event.anchor is not None:
        labelled[event.anchor] = node
    return node


class _Builder:
    """Plain data from nodes, with the line of every path and the faults met on the way."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lines: dict[KeyPath, int] = {}
        self.faults: list[ConfigError] = []
        self._num_nodes = 0

    def build(self, node: _Node, path: KeyPath, depth: int) -> object:
        """The data of one node and all below it."""
        self._num_nodes += 1  # aliases count each time: ten nested ones could stand for millions
        if self._num_nodes > MAX_NODES or depth > MAX_DEPTH:
            raise _too_large(self.name, node.line)
        if node.kind == "scalar":
            return self._scalar(node, path)
        if node.tag not in (None, "!", "tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"):
            self._refuse_tag(node, path)
        if node.kind == "map":
            return self._mapping(node, path, depth)
        items = []
        for index, child in enumerate(node.children):
            self.lines[(*path, index)] = child.line
            items.append(self.build(child, (*path, index), depth + 1))
        return items

    def _mapping(self, node: _Node, path: KeyPath, depth: int) -> dict[str, object]:
        data: dict[str, object] = {}
        for key_node, child in zip(node.children[::2], node.children[1::2], strict=True):
            key = self._key(key_node, path)
            if key is None:
                continue
            if key in data:
                self._fault(
                    key_node,
                    (*path, key),
                    f"{key} stands here and on line {self.lines[(*path, key)]} as well",
                    "keep one of them",
                )
                continue
            self.lines[(*path, key)] = key_node.line
            data[key] = self.build(child, (*path, key), depth + 1)
        return data

    def _key(self, node: _Node, path: KeyPath) -> str | None:
        if node.kind != "scalar":
            self._fault(node, path, "a key must be a name, not a list or a mapping", "name the key")
            return None
        if node.is_plain and node.text == "<<":
            self._fault(node, path, "merge keys (<<) are not supported", "write the keys out")
            return None
        key = self._scalar(node, path)
        if isinstance(key, str):
            return key
        self._fault(
            node, path, f"the key {shorten(node.text) or 'null'} is not a name", "name the key"
        )
        return None

    def _scalar(self, node: _Node, path: KeyPath) -> object:
        if odd := _UNPRINTABLE.search(node.text):
            what = f"the text holds the control character U+{ord(odd[0]):04X}"
            self._fault(node, path, what, "delete it")
            return None
        try:
            resolved = resolve_plain(node.text)
        except ValueError as error:
            if node.is_plain:
                self._fault(node, path, str(error), "write a number that fits")
                return None
            resolved = node.text
        if node.tag in (None, "!"):
            return resolved if node.is_plain and node.tag is None else node.text
        wanted = _CORE_TAGS.get(node.tag)
        if wanted is str:
            return node.text
        if wanted is None or type(resolved) is not wanted:
            self._refuse_tag(node, path)
            return None
        return resolved

    def _refuse_tag(self, node: _Node, path: KeyPath) -> None:
        tag = shorten((node.tag or "").replace("tag:yaml.org,2002:", "!!"))
        self._fault(node, path, f"the tag {tag} is not supported", "delete the tag")

    def _fault(self, node: _Node, path: KeyPath, what: str, fix: str) -> None:
        where = f"{self.name}:{node.line} {dotted(path)}".rstrip()
        self.faults.append(ConfigError(what, where=where, fix=fix, id="config.syntax"))


def dotted(path: KeyPath) -> str:
    """A path as messages and overrides write it: `data.sources.0.path`."""
    return ".".join(str(part) for part in path)


def _line(event: events.Event) -> int:
    assert event.start_mark is not None
    return event.start_mark.line + 1


def _too_large(name: str, line: int) -> ConfigError:
    return ConfigError(
        f"more than {MAX_DEPTH} levels or {MAX_NODES} values: this is no run file",
        where=f"{name}:{line}",
        fix="check the path, and the brackets of this line",
    )


def _at(name: str, mark: Any) -> str:  # the stubs know two classes of marks, and None
    return f"{name}:{mark.line + 1}:{mark.column + 1}"
