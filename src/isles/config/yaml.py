"""Reads YAML 1.2 with the line of every key and item, and writes it without loss.

PyYAML composes the nodes. This module resolves scalars, and checks duplicate keys and limits.
"""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from yaml.reader import ReaderError

from isles.config.links import follow
from isles.errors import ConfigError, ConfigErrors

KeyPath = tuple[str | int, ...]
"""Path of a value: `("data", "sources", 0, "path")`."""

MAX_DEPTH = 32
MAX_NODES = 40_000
"""Limit for the values in a text. Each alias counts its values again."""

_MAX_DIGITS = 40
_MAX_BYTES, _NODE_BYTES = 1 << 20, 20
"""Limit for a text, and the bytes that each value in it adds: together they limit the time.

PyYAML takes two seconds for the longest texts of any kind. A run of 900 sources, whose
`resolved.yaml` has all values and origins, is within the limit.
"""

_NULL = frozenset(("", "~", "null", "Null", "NULL"))
_BOOL = frozenset(("true", "True", "TRUE", "false", "False", "FALSE"))
_INT = re.compile(r"[-+]?[0-9]+")
_INT_OTHER_BASE = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_INFINITE = re.compile(r"([-+]?)\.(?:inf|Inf|INF)")
_NAN = frozenset((".nan", ".NaN", ".NAN"))
_PLAIN_TAG, _NO_TAG = "plain", "none"
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff]")

_QUOTE = "put the text in quotes"
_INDENT = "give keys of one section the same number of spaces at the start of their lines"
_CLOSE = "close the quote, or use double quotes for text with an apostrophe"
_SINGLE = "use single quotes, which keep a backslash as it is"

# Words of PyYAML's problem -> the error and its fix. The first match counts.
_PROBLEMS = {
    "found character '\\t'": ("a tab stands where spaces must", "indent with spaces"),
    "found a tab character": ("a tab stands where spaces must", "indent with spaces"),
    "cannot start any token": ("a value cannot begin with this character", _QUOTE),
    "mapping values are not allowed here": (
        "a ':' is not allowed here",
        "check the indentation of this line and the line above, and put text with ': ' in quotes",
    ),
    "could not find expected ':'": (
        "this line is not a 'key: value' pair",
        "put ': ' after the key, or indent the line as part of the value above",
    ),
    "sequence entries are not allowed": ("a '- ' is not allowed here", _INDENT),
    "expected <block end>": ("this line does not fit the lines above", _INDENT),
    "expected '<document start>'": ("this line does not fit the lines above", _INDENT),
    "expected ',' or ']'": (
        "a list in [ ] is not closed",
        "put ',' between items, and ']' at the end",
    ),
    "expected ',' or '}'": (
        "a mapping in { } is not closed",
        "put ',' between keys, and '}' at the end",
    ),
    "found unexpected end of stream": ("a quote is opened here and never closed", _CLOSE),
    "found unexpected document separator": ("a quote is opened here and never closed", _CLOSE),
    "found unknown escape character": ("this backslash escape does not exist", _SINGLE),
    "expected escape sequence": ("this backslash escape is not complete", _SINGLE),
    "expected the node content": ("a value is missing here", "write the value, or null"),
    "undefined tag handle": ("a value cannot begin with '!'", _QUOTE),
    "expected alphabetic or numeric character": ("a value cannot begin with '*' or '&'", _QUOTE),
    "found undefined alias": ("an alias (*name) is not defined above", _QUOTE),
    "second occurrence": (
        "an anchor (&name) is defined twice",
        "give each anchor a different name",
    ),
    "but found another document": (
        "a second document begins here",
        "keep one run per file: delete the line ---, or split the file",
    ),
}


@dataclass(frozen=True, slots=True)
class Document:
    """A YAML text as plain data, and the line, from 1, of every key and of every list item."""

    value: dict[str, Any]
    lines: Mapping[KeyPath, int]


def parse_yaml(text: str, name: str) -> Document:
    """A run file's text as plain data.

    YAML 1.2 core schema: `4e-4` and `0o17` are numbers, only `true` and `false` are booleans, `on`
    and dates are text. Anchors and aliases work; merge keys (`<<`) and tags are refused, as they
    hide the values of a file.

    Raises:
        ConfigErrors: it is not YAML, not a mapping, or has a duplicate key. Each has file and line.
    """
    document, issues = scan_yaml(text, name)
    if issues:
        raise ConfigErrors(issues)
    return document


def _never(path: KeyPath) -> bool:
    return False


def scan_yaml(
    text: str, name: str, is_text: Callable[[KeyPath], bool] = _never
) -> tuple[Document, list[ConfigError]]:
    """Like `parse_yaml`, but return errors such as duplicate keys together with the readable
    values.

    Args:
        is_text: whether a path holds text, so that a number or boolean stays as typed.

    ConfigError: the text is not YAML at all, or its top is not a mapping.
    """
    root = _compose(text, name)
    if isinstance(root, yaml.MappingNode):
        builder = _Builder(name, is_text)
        value = builder.build(root, ())
        return Document(value if isinstance(value, dict) else {}, builder.lines), builder.issues
    if root is None or (root.tag == _PLAIN_TAG and not root.value):
        what, line = "the file is empty", 1
    else:
        kind = "a list" if isinstance(root, yaml.SequenceNode) else "a single value"
        what = f"the file holds {kind}, not sections such as model:, data: and training:"
        line = _line(root)
    fix = "isles init writes a run file to start from"
    raise ConfigError(what, where=f"{name}:{line}", fix=fix, id="config.syntax")


def parse_value(
    text: str, where: str, path: KeyPath = (), is_text: Callable[[KeyPath], bool] = _never
) -> object:
    """One value after `key=` on the command line: `4e-4`, `[a, b]`, `{kind: ddp}`.

    Args:
        path: path of the key.
        is_text: see `scan_yaml`.

    ConfigErrors: it is not YAML. Each error has `where`.
    """
    builder = _Builder("", is_text)
    try:
        root = _compose(text, "")
        value = None if root is None else builder.build(root, path)
    except ConfigError as error:
        builder.issues = [error]
    if builder.issues:
        raise ConfigErrors([ConfigError(i.what, where=where, fix=i.fix) for i in builder.issues])
    return value


def resolve_plain(text: str) -> str | int | float | bool | None:
    """The value of an unquoted scalar in the YAML 1.2 core schema.

    ValueError: a number that is too large for every key.
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
    """The text, cut if it is long, so that a message stays one line."""
    return text if len(text) <= length else f"{text[: length - 3]}..."


def dotted(path: KeyPath) -> str:
    """A path in the notation of messages and overrides: `data.sources.0.path`."""
    return ".".join(str(part) for part in path)


def read_text(
    path: Path,
    kind: str = "run file",
    hint: str = "check the path; isles init writes a run file to start from",
) -> str:
    """The text of a file that a person has written. Messages call it a `kind`.

    ConfigError: it is missing (with this hint), not readable, or not text.
    """

    def refused(what: str, fix: str, place: str = "") -> ConfigError:
        return ConfigError(what, where=f"{path}{place}", fix=fix, id="config.file")

    try:
        with follow(path, _open)[0] as stream:
            content = stream.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        raise refused("the file does not exist", hint) from None
    except IsADirectoryError:
        fix = f"give the {kind} in this folder"
        raise refused("this is a folder, not a file", fix) from None
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise refused(f"cannot be read: {reason}", "check the path and the permissions") from None
    if len(content) > _MAX_BYTES:
        raise refused(f"larger than 1 MiB, so this is not a {kind}", "check the path", ":1")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        what = f"the byte 0x{content[error.start]:02x} is not UTF-8"
        raise refused(what, "save the file as UTF-8 text", f":{line}") from None


def _open(name: str, flags: int, folder: int) -> io.BufferedReader:
    # Also a pipe, such as <(...) of a shell.
    return open(name, "rb", opener=lambda *_: os.open(name, flags | os.O_CLOEXEC, dir_fd=folder))


class _TooLarge(Exception):
    """A text has too many values, or is nested too deeply."""


class _Loader(yaml.SafeLoader):
    """PyYAML's composer. The tag of a node is plain text, or the tag in the text.

    It composes while it reads, so it refuses a large text before it has read all of it.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._num_nodes = self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._num_nodes += 1
        is_long = self.index + self._num_nodes * _NODE_BYTES > _MAX_BYTES
        if is_long or self._depth > MAX_DEPTH:
            raise _TooLarge
        self._depth += 1
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def resolve(self, kind: type[yaml.Node], value: Any, implicit: Any) -> str:
        return _PLAIN_TAG if kind is yaml.ScalarNode and implicit[0] else _NO_TAG


def _compose(text: str, name: str) -> yaml.Node | None:
    def refused(what: str, fix: str, line: int, column: int) -> ConfigError:
        where = f"{name}:{line + 1}:{column + 1}"
        return ConfigError(what, where=where, fix=fix, id="config.syntax")

    if len(text) > _MAX_BYTES:
        raise _too_large(name, 1)
    try:
        loader = _Loader(text)
    except ReaderError as error:
        before = text[: error.position]
        what = f"YAML does not allow the character U+{ord(text[error.position]):04X}"
        column = error.position - before.rfind("\n") - 1
        fix = "delete it, and save the file as UTF-8 text"
        raise refused(what, fix, before.count("\n"), column) from None
    try:
        return loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        problem = error.problem or error.context or "it cannot be read"
        what, fix = f"not valid YAML: {problem}", "compare the line with the lines around it"
        found = (texts for words, texts in _PROBLEMS.items() if words in problem)
        what, fix = next(found, (what, fix))
        mark: Any = error.problem_mark or error.context_mark or loader.get_mark()
        if "quoted scalar" in (error.context or "") and "unexpected" in problem:
            mark = error.context_mark  # report the open quote, not the end of the file
        raise refused(what, fix, mark.line, mark.column) from None
    except (_TooLarge, RecursionError):
        raise _too_large(name, loader.get_mark().line + 1) from None
    except (ValueError, OverflowError, IndexError):
        # PyYAML leaves "\UFFFFFFFF" and "%YAML 1.<5000 digits>" to chr() and int().
        what = "a backslash escape or a %YAML line is not valid"
        fix = "write the character itself, or the text in single quotes"
        raise refused(what, fix, loader.get_mark().line, loader.get_mark().column) from None


class _Builder:
    """Builds plain data from nodes, with the line of every path and all issues."""

    def __init__(self, name: str, is_text: Callable[[KeyPath], bool]) -> None:
        self.name, self.is_text = name, is_text
        self.lines: dict[KeyPath, int] = {}
        self.issues: list[ConfigError] = []
        self._num_nodes = 0

    def build(
        self, node: yaml.Node, path: KeyPath, depth: int = 0, *, is_key: bool = False
    ) -> object:
        self._num_nodes += 1  # counts each alias: ten nested aliases can mean millions of values
        if self._num_nodes > MAX_NODES or depth > MAX_DEPTH:
            raise _too_large(self.name, _line(node))
        if node.tag not in (_PLAIN_TAG, _NO_TAG):
            tag = shorten(node.tag.replace("tag:yaml.org,2002:", "!!"))
            self._refuse(node, path, f"the tag {tag} is not supported", "delete the tag")
            return None
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path, depth)
        if isinstance(node, yaml.SequenceNode):
            items = []
            for index, child in enumerate(node.value):
                self.lines[*path, index] = _line(child)
                items.append(self.build(child, (*path, index), depth + 1))
            return items
        return self._scalar(node, path, is_key)

    def _scalar(self, node: yaml.Node, path: KeyPath, is_key: bool) -> object:
        if odd := _UNPRINTABLE.search(node.value):
            what = f"the text contains the control character U+{ord(odd[0]):04X}"
            self._refuse(node, path, what, "delete it")
            return None
        if node.tag != _PLAIN_TAG:
            return node.value
        try:
            value, error = resolve_plain(node.value), ""
        except ValueError as refused:
            value, error = 0, str(refused)
        if isinstance(value, bool | int | float) and not is_key and self.is_text(path):
            return node.value
        if error:
            self._refuse(node, path, error, "write a smaller number")
            return None
        return value

    def _mapping(self, node: yaml.MappingNode, path: KeyPath, depth: int) -> dict[str, object]:
        data: dict[str, object] = {}
        for key_node, child in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                what = "a key must be a name, not a list or a mapping"
                self._refuse(key_node, path, what, "name the key")
                continue
            if key_node.value == "<<" and key_node.tag == _PLAIN_TAG:
                self._refuse(
                    key_node, path, "merge keys (<<) are not supported", "write the keys out"
                )
                continue
            num_issues = len(self.issues)
            key = self.build(key_node, path, depth, is_key=True)
            if not isinstance(key, str):
                if len(self.issues) == num_issues:
                    what = f"the key {shorten(key_node.value) or 'null'} is not a name"
                    self._refuse(key_node, path, what, "name the key")
            elif key in data:
                here = (*path, key)
                what = f"{key} is given twice, here and on line {self.lines[here]}"
                self._refuse(key_node, here, what, "keep one of them")
            else:
                self.lines[*path, key] = _line(key_node)
                data[key] = self.build(child, (*path, key), depth + 1)
        return data

    def _refuse(self, node: yaml.Node, path: KeyPath, what: str, fix: str) -> None:
        where = f"{self.name}:{_line(node)} {dotted(path)}".rstrip()
        self.issues.append(ConfigError(what, where=where, fix=fix, id="config.syntax"))


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _too_large(name: str, line: int) -> ConfigError:
    return ConfigError(
        f"more than {MAX_DEPTH} levels or {MAX_NODES} values, or longer than 1 MiB (each value "
        f"counts as {_NODE_BYTES} bytes more): this is not a run file",
        where=f"{name}:{line}",
        fix="check the path, and the brackets of this line",
    )


# isles does not use PyYAML's writer, which quotes, folds and indents differently and does not
# report the line of each key. JSON strings are valid YAML.
_PLAIN = re.compile(r"[A-Za-z0-9_./][A-Za-z0-9_./*+@=-]*")
_ESCAPED = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff\ud800-\udfff]")


def scalar_text(value: object) -> str:
    """One value on one line. Text gets quotes if it would otherwise read as another type."""
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
    """True if a value fits one line: a scalar, or a list of scalars."""
    if isinstance(value, list | tuple):
        return not any(isinstance(item, Mapping | list | tuple) for item in value)
    return not isinstance(value, Mapping)


def dump_yaml(data: Mapping[str, object]) -> str:
    """A mapping as block YAML."""
    return "".join(f"{line}\n" for line, _ in yaml_lines(data))


def dump_for_others(data: Mapping[str, object]) -> str:
    """A mapping as YAML for other tools: texts of several lines as blocks, and no aliases."""
    return yaml.dump(data, Dumper=_BlockDumper, sort_keys=False, allow_unicode=True, width=1000)


class _BlockDumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _block(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_BlockDumper.add_representer(str, _block)


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
