"""Writes a memory-saving option into a run file. Comments and order stay the same."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import yaml
from pydantic import BaseModel

from isles.config.load import Loaded
from isles.config.yaml import scalar_text
from isles.errors import UserError


@dataclass(frozen=True, slots=True)
class Edit:
    """A key of a run file, by its dotted path, and its new value."""

    key: str
    value: object

    @property
    def text(self) -> str:
        """The edit as a line of YAML."""
        return f"{self.key}: {_flow(self.value)}"


def changed(changes: Mapping[str, object]) -> list[Edit]:
    """The edits of a run file that does not have these keys yet."""
    return [Edit(key, _plain(value)) for key, value in changes.items()]


def edits(loaded: Loaded, changes: Mapping[str, object], *, cluster: int = 0) -> list[Edit]:
    """The edits that write an option or a strategy into a run file.

    Args:
        cluster: index of the cluster to change. If there are several, its own strategy is changed.
    """
    found = []
    for key, value in changes.items():
        is_own = loaded.config.clusters[cluster].strategy is not None
        if key == "strategy" and (is_own or len(loaded.config.clusters) > 1):
            found.append(Edit(f"clusters.{cluster}.strategy", _plain(value)))
        elif key == "adapter" and "adapter" in loaded.origins and isinstance(value, BaseModel):
            # Keep the other keys of the section.
            found.append(Edit("adapter.type", value.model_dump()["type"]))
        else:
            found.append(Edit(key, _plain(value)))
    return found


def _plain(value: object) -> object:
    # A section as a person writes it: its kind, and values other than the defaults.
    if not isinstance(value, BaseModel):
        return value
    fields = type(value).model_fields
    return {
        name: own
        for name, own in value.model_dump().items()
        if name in ("kind", "type") or own != fields[name].default
    }


def edited(text: str, changes: list[Edit]) -> str:
    """The text of a run file with new values.

    Raises:
        UserError: the place of a key cannot be found in the text, for example below an alias.
    """
    for edit in changes:
        text = _set(text, edit.key.split("."), edit.value)
    return text


def difference(path: str, before: str, after: str) -> str:
    """Unified diff of two texts of a file."""
    lines = difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), path, f"{path} (new)"
    )
    return "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)


def _set(text: str, path: list[str], value: object) -> str:
    # PyYAML's marks count characters, so the text is parsed again for each edit.
    node: yaml.Node | None = yaml.compose(text, Loader=yaml.SafeLoader)
    place = list(path)
    while place and isinstance(node, yaml.MappingNode | yaml.SequenceNode):
        entry = _entry(node, place[0])
        if entry is None:
            break
        key, node = entry
        place.pop(0)
        if not place:
            return _replace(text, key, node, value)
    if not place or not isinstance(node, yaml.MappingNode):
        raise UserError(
            f"{'.'.join(path)} cannot be changed separately in this file",
            where=".".join(path),
            fix=f"edit the file manually: {'.'.join(path)}: {_flow(value)}",
        )
    for part in reversed(place[1:]):
        value = {part: value}
    return _insert(text, node, place[0], value)


def _entry(node: yaml.Node, name: str) -> tuple[yaml.Node, yaml.Node] | None:
    if isinstance(node, yaml.SequenceNode):
        item = node.value[int(name)] if name.isdecimal() and int(name) < len(node.value) else None
        return None if item is None else (item, item)
    for key, value in node.value:
        if key.value == name:
            return key, value
    return None


def _replace(text: str, key: yaml.Node, node: yaml.Node, value: object) -> str:
    begin, end = node.start_mark.index, _end(node)
    if isinstance(node, yaml.MappingNode) and isinstance(value, Mapping):
        names = {own.value for own, _ in node.value}
        if names and names <= set(value):
            # Key by key, so that comments next to them stay.
            place = node.start_mark.index
            for name, own in value.items():
                text = _at(text, place, name, own)
            return text
    if isinstance(node, yaml.CollectionNode) and not node.flow_style:
        # Remove the block; keep its key and the comment after it.
        begin = text.index(":", key.end_mark.index) + 1
        comment = re.search(r"\s*#[^\n]*", text[begin : node.start_mark.index])
        return f"{text[:begin]} {_flow(value)}{comment[0] if comment else ''}{text[end:]}"
    gap = "" if begin < end or text[begin - 1 : begin].isspace() else " "
    return f"{text[:begin]}{gap}{_flow(value)}{text[end:]}"


def _at(text: str, place: int, name: str, value: object) -> str:
    # Set one key of the mapping that begins at this place of the text.
    waiting = [yaml.compose(text, Loader=yaml.SafeLoader)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, yaml.MappingNode) and node.start_mark.index == place:
            entry = _entry(node, name)
            return _replace(text, *entry, value) if entry else _insert(text, node, name, value)
        if isinstance(node, yaml.CollectionNode):
            for own in node.value:
                waiting += own if isinstance(own, tuple) else [own]
    raise AssertionError("an edit of a value does not move where its mapping begins")


def _insert(text: str, node: yaml.MappingNode, name: str, value: object) -> str:
    pair = f"{name}: {_flow(value)}"
    if node.flow_style:
        close = node.end_mark.index - 1
        inside = text[:close].rstrip()
        comma = "" if inside.endswith(("{", ",")) else ","
        space = "" if inside.endswith("{") else " "
        return f"{inside}{comma}{space}{pair}{text[close:]}"
    # Insert below the last entry and the comment on its line.
    line_end = text.find("\n", _end(node))
    line_end = len(text) if line_end < 0 else line_end
    indent = " " * node.value[0][0].start_mark.column
    return f"{text[:line_end]}\n{indent}{pair}{text[line_end:]}"


def _end(node: yaml.Node) -> int:
    # The end of its last character: a block's own end mark is after the comments that follow it.
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _end(last[1] if isinstance(last, tuple) else last)
    end: int = node.end_mark.index
    return end


def _flow(value: object) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_flow(own)}" for key, own in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_flow, value)) + "]"
    return scalar_text(value)


def typed(changes: list[Edit]) -> Iterator[str]:
    """The edits as overrides for the command line, quoted for a shell."""
    for edit in changes:
        yield shlex.quote(f"{edit.key}={_flow(edit.value)}")
