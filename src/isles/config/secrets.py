"""Refuse secrets in a run file or an override, since isles copies both into records and scripts."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

from isles.config import keys
from isles.config.yaml import KeyPath, dotted
from isles.errors import ConfigError
from isles.facts.secrets import is_secret, may_be_secret, secrets_in

_COPIED = "and isles copies this file into records, scripts, buckets and model descriptions"
_FIX = (
    "export it in the shell that runs `isles train` on this machine; on other hosts, let a line "
    "of environment.setup read it from a file; for Hugging Face, run hf auth login; instead of a "
    "secret that no server checks, write EMPTY"
)
_REFERENCE_FIX = (
    "nothing expands $NAME in environment.variables: delete the line if the shell that runs "
    "`isles train` on this machine exports it; on other hosts, let a line of environment.setup "
    "set it, such as export NAME=$(cat ~/.secrets/NAME)"
)
_ADDRESS_FIX = (
    "remove user and password from the address: git, pip and curl read them from ~/.netrc, and "
    "environment.setup can export an address that it reads from a file on the hosts"
)
_LINE_FIX = (
    "let the line read it from a file on the hosts, such as $(cat ~/.secrets/NAME). Instead of a "
    "secret that no server checks, write EMPTY"
)
_WITH_RULE = ("remote", "tracking_uri", "url")
_HAS_USER = re.compile(r"[\w+-]+://[^\s/]*@")
_COMMENT = re.compile(r"(?:^|\s)#(.*)")


def secret_errors(
    data: Mapping[str, object],
    overrides: Sequence[str],
    places: Mapping[KeyPath, str],
    text: str,
    name: str,
) -> list[ConfigError]:
    """An error for every secret in values, names, overrides and comments; none quotes it.

    Args:
        places: the place of every key in the run file or on the command line.
        text: text of the file `name`.
    """
    errors = []
    for path, what, fix in _in_values((), data):
        known = path
        while known and known not in places:
            known = known[:-1]
        place = places.get(known, f"{name}:1").partition(" ")[0]
        place = "command line" if place == "command" else place
        errors.append(ConfigError(f"{what}, {_COPIED}", where=f"{place} {dotted(path)}", fix=fix))
    where = {error.where for error in errors}
    for override in overrides:
        key = override.partition("=")[0].strip().lstrip("-")
        place = "command line" if any(secrets_in(key)) else f"command line {key}"
        if any(secrets_in(override)) and not any(known.startswith(place) for known in where):
            errors.append(ConfigError(f"it contains a secret, {_COPIED}", where=place, fix=_FIX))
    for number, line in enumerate(text.splitlines(), start=1):
        comment = _COMMENT.search(line)
        if comment is not None and any(secrets_in(comment[1])):
            what = f"a comment contains a secret, {_COPIED}"
            errors.append(ConfigError(what, where=f"{name}:{number}", fix="delete the comment"))
    return errors


def _in_values(path: KeyPath, value: object) -> Iterator[tuple[KeyPath, str, str]]:
    # Yields the key of a secret, the error and a fix.
    match value:
        case str():
            # Another rule refuses a user in these addresses, and its fix names the right place.
            has_rule = path[-1] in _WITH_RULE and _HAS_USER.match(value)
            if any(secrets_in(value)) and not has_rule:
                yield path, *_words(path, value)
        case Mapping():
            known = keys.children(keys.schema_at(path) or {})
            for key, inner in value.items():
                here = (*path, key)
                if any(secrets_in(str(key))):
                    yield path, "a name in it contains a secret", "give it another name"
                elif key not in known and _is_secret(here, inner):
                    is_reference = path[-1:] == ("variables",) and str(inner).startswith("$")
                    fix = _REFERENCE_FIX if is_reference else _FIX
                    yield here, f"{key} looks like a secret", fix
                else:
                    yield from _in_values(here, inner)
        case list():
            yield from _in_items(path, value)
        case _:
            pass


def _in_items(path: KeyPath, items: Sequence[object]) -> Iterator[tuple[KeyPath, str, str]]:
    split, before = _split_in(items), ""
    for index, item in enumerate(items):
        # An option and its value may be two items.
        is_value = before.startswith("-") and not str(item).startswith("-")
        if is_value and may_be_secret(before) and is_secret(before, str(item)):
            yield (*path, index), f"the value of {before} looks like a secret", _FIX
        elif index in split and not any(secrets_in(str(item))):
            yield (*path, index), "the command contains a secret", _FIX
        else:
            yield from _in_values((*path, index), item)
        before = str(item)


def _split_in(items: Sequence[object]) -> set[int]:
    # The items of a command, one word each, that hold a secret only together with earlier words.
    # An item with a blank is a separate line, and not part of a command.
    words = [str(item) if not re.search(r"\s", str(item)) else "\n" for item in items]
    line, found, start = " ".join(words), set[int](), 0
    places = deque(secrets_in(line))
    for index, word in enumerate(words):
        while places and places[0][1] <= start:
            places.popleft()
        if places and places[0][0] < start + len(word):
            found.add(index)
        start += len(word) + 1
    return found


def _is_secret(path: KeyPath, value: object) -> bool:
    if not isinstance(value, str | int) or isinstance(value, bool):
        return False
    name, text = str(path[-1]), str(value)
    # Nothing expands `$HF_TOKEN` in environment.variables, so it is not a reference there.
    is_reference = text.startswith("$") and path[-2:-1] != ("variables",)
    return may_be_secret(name) and not is_reference and is_secret(f"{name}=", text)


def _words(path: KeyPath, value: str) -> tuple[str, str]:
    is_line = "setup" in path
    if _HAS_USER.search(value) and not is_line:
        return "the address contains a password", _ADDRESS_FIX
    return "the value contains a secret", _LINE_FIX if is_line else _FIX
