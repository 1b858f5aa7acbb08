"""The tree of a file's keys and their types, from its JSON schema."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from pydantic import BaseModel

from isles.config.sections.run import RunConfig
from isles.facts.units import write_duration

Schema = Mapping[str, Any]  # a JSON schema: its values are of every kind


@cache
def run_schema() -> dict[str, Any]:
    """The JSON schema of a run file as pydantic writes it. Shared: do not change it."""
    return RunConfig.model_json_schema()


@cache
def tree(file: type[BaseModel] = RunConfig) -> Schema:
    """The keys of a kind of file: its JSON schema with every reference replaced."""
    schema = file.model_json_schema()

    def whole(node: Any) -> Any:
        if isinstance(node, list):
            return [whole(item) for item in node]
        if not isinstance(node, dict):
            return node
        own = {key: whole(child) for key, child in node.items() if key not in ("$ref", "$defs")}
        if "$ref" not in node:
            return own
        return {**whole(schema["$defs"][node["$ref"].rpartition("/")[2]]), **own}

    found: Schema = whole(schema)
    return found


def children(node: Schema) -> dict[str, Schema]:
    """The keys of a section, of all its kinds. Empty for a value."""
    found: dict[str, Schema] = {}
    for option in _options(node):
        for key, child in option.get("properties", {}).items():
            known = found.get(key, child)
            found[key] = child if known == child else {"anyOf": [known, child]}
    return found


def items(node: Schema) -> Schema | None:
    """The schema of the items of a list, or None if the key holds no list."""
    return next((option["items"] for option in _options(node) if "items" in option), None)


def named(node: Schema) -> Schema | None:
    """The schema of the values of a key that takes the user's own names, or None."""
    inner = (
        value
        for option in _options(node)
        # pydantic writes names with a pattern as `patternProperties`.
        for value in (
            option.get("additionalProperties"),
            *option.get("patternProperties", {}).values(),
        )
    )
    return next((value for value in inner if isinstance(value, Mapping)), None)


def is_text_as_typed(path: tuple[str | int, ...]) -> bool:
    """True if a key is an environment variable, whose value is text: `0010` stays `0010`.

    For `config/yaml.py`: YAML would read such values as numbers and booleans.
    """
    # Not every section with free names: the resources of SkyPilot, for one, have booleans.
    if path[-2:-1] != ("variables",):
        return False
    inner = named(schema_at(path[:-1]) or {})
    return inner is not None and value_types(inner) == {"string"}


def by_kind(node: Schema) -> dict[str, Schema]:
    """The variants of a section, by their `kind`."""
    return {
        kind: option
        for option in _options(node)
        for kind in literals(option.get("properties", {}).get("kind", {}))
    }


def kinds_with(node: Schema, key: str) -> tuple[str, ...]:
    """The kinds of a section that have a key."""
    return tuple(kind for kind, form in by_kind(node).items() if key in form["properties"])


def schema_at(path: tuple[str | int, ...], file: type[BaseModel] = RunConfig) -> Schema | None:
    """The schema of one key, or None if the key does not exist."""
    node: Schema | None = tree(file)
    for part in path:
        if node is None:
            return None
        node = items(node) if isinstance(part, int) else children(node).get(part) or named(node)
    return node


@cache
def all_paths(file: type[BaseModel] = RunConfig) -> tuple[tuple[str | int, ...], ...]:
    """Every key and section, from the top down; with item 0 for the items of a list."""

    def walk(node: Schema, path: tuple[str | int, ...]) -> Iterator[tuple[str | int, ...]]:
        for key, child in children(node).items():
            here = (*path, key)
            yield here
            item = items(child)
            yield from walk(child, here) if item is None else walk(item, (*here, 0))

    return tuple(walk(tree(file), ()))


def own_types(node: Schema) -> set[str]:
    """Types of isles that a key accepts: `duration`, `huggingface-id`, `one-line` and others."""
    return {option["x-isles-type"] for option in _options(node) if "x-isles-type" in option}


def is_own_text(node: Schema) -> bool:
    """True if a key holds a type with one notation, such as a rate or an address."""
    return not own_types(node).isdisjoint(_OWN_TEXTS)


def is_section(node: Schema) -> bool:
    return bool(children(node))


def allowed(node: Schema, *, with_caps: bool = False) -> str:
    """Text for the type of a key, such as `a whole number, at least 1, or auto`.

    Upper limits above 10^9 appear only `with_caps`.
    """
    words: list[str] = []
    for option in _options(node):
        if not {"const", "enum"} & option.keys() and option.get("type") != "null":
            word = _wording(option, with_caps)
            words += [word] if word not in words else []
    if choices := literals(node):
        words.append(choices[0] if len(choices) == 1 else f"one of: {', '.join(choices)}")
    if "null" in value_types(node):
        words.append("null")
    return ", or ".join(words)


def literals(node: Schema) -> tuple[str, ...]:
    """The words that a key accepts."""
    words = (
        str(value)
        for option in _options(node)
        for value in option.get("enum", [option["const"]] if "const" in option else [])
    )
    return tuple(dict.fromkeys(words))


def value_types(node: Schema) -> set[str]:
    """JSON types that a key accepts, including `duration`."""
    return {
        "duration" if option.get("x-isles-type") == "duration" else option.get("type", "object")
        for option in _options(node)
    }


def has_numbers(node: Schema) -> bool:
    return bool(value_types(node) & {"integer", "number"})


def noun(node: Schema) -> str:
    """Short text for the type of a key: `a whole number`."""
    option = next(option for option in _options(node) if option.get("type") != "null")
    if (own := option.get("x-isles-type")) in _OWN_TEXTS:
        return _OWN_TYPES[own]
    return _NOUNS.get(option.get("type", ""), "a value")


def as_written(values: Mapping[str, object]) -> dict[str, object]:
    """Values in the notation of a run file: durations as `20m`."""

    def written(value: object, path: tuple[str | int, ...]) -> object:
        if isinstance(value, Mapping):
            return {key: written(child, (*path, key)) for key, child in value.items()}
        if isinstance(value, list | tuple):
            return [written(child, (*path, index)) for index, child in enumerate(value)]
        if isinstance(value, float) and "duration" in value_types(schema_at(path) or {}):
            return write_duration(value)
        return value

    return {key: written(value, (key,)) for key, value in values.items()}


def _options(node: Schema) -> Iterator[Schema]:
    alternatives = node.get("anyOf") or node.get("oneOf")
    if alternatives is None:
        yield node
        return
    for option in alternatives:
        yield from _options(option)


_NOUNS = {
    "integer": "a whole number",
    "number": "a number",
    "string": "text",
    "boolean": "true or false",
    "array": "a list",
    "object": "a section",
}
_OWN_TYPES = {
    "duration": "a time such as 90s, 20m, 23h30m, 2d or 12:30:00",
    "range": "a range such as 1:3",
    "text": "text",
    "one-line": "text on one line",
    "interface": "a network interface such as eth0",
    "login": "an ssh destination such as me@big-box",
    "huggingface-id": "owner/name",
    "rate": "bytes per second, such as 500kB or 20MB",
    "line": "a rate with its unit, such as 100Mbit/s or 12MB/s",
    "count": "a number such as 7000000000 or 7B",
    "address": "HOST:PORT, such as hub.example.org:29400",
    "peer": "a peer's whole address, such as /ip4/203.0.113.5/tcp/30001/p2p/QmXyz",
    "bucket": "a place in object storage such as s3://bucket/prefix, or file:///shared/folder",
    "maddr": "an address such as /ip4/0.0.0.0/tcp/30001",
}
_OWN_TEXTS = ("rate", "line", "count", "address", "peer", "maddr", "bucket", "login", "interface")
_LIMITS = (
    ("minimum", "at least"),
    ("exclusiveMinimum", "greater than"),
    ("maximum", "at most"),
    ("exclusiveMaximum", "less than"),
)


def _wording(option: Schema, with_caps: bool) -> str:
    if (own := option.get("x-isles-type")) in _OWN_TYPES:
        return _OWN_TYPES[own]
    if (inner := named(option)) is not None:
        example = "NAME: text" if value_types(inner) == {"string"} else "big-box: 3"
        return f"names with {allowed(inner)}, such as {{{example}}}"
    if "pattern" in option:
        return "letters, digits, '.', '_' and '-', at most 63, a letter or digit first"
    if option.get("type") == "array":
        if is_section(option["items"]):
            return "a list of sections, each with '- ' before its first key"
        return f"a list such as [a, b], each item {allowed(option['items'])}"
    limits = [
        f"{word} {option[key]}"
        for key, word in _LIMITS
        if key in option and (with_caps or option[key] < 10**9)
    ]
    return ", ".join((_NOUNS.get(option.get("type", ""), "a value"), *limits))
