"""Names of fields: in reports, in `ignore_fields`, and only once in an object of JSON."""

from __future__ import annotations

import json
import logging
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from isles.errors import DataError
from isles.facts.units import printable

log = logging.getLogger(__name__)

_OLD_NAMES = {"tools": "functions", "tool_calls": "function_call"}
"""Names of the same fields in older data."""


def bare_name(field: str) -> str:
    """The last part of a name from a report: `timestamp` for `messages.timestamp`."""
    return re.sub(r"^(messages|tools|chat_template_kwargs)\.(.*\.)?", "", field)


def ignored_names(field: str, columns: Mapping[str, str]) -> set[str]:
    """All names that rows may use for a field of `ignore_fields`.

    Args:
        columns: names of columns in the data, by the name that the run file uses.
    """
    bare = bare_name(field)
    return {bare, columns.get(bare, bare), _OLD_NAMES.get(bare, bare)}


class RepeatedKey(ValueError):
    """A JSON object has two fields of one name."""

    def of_row(self, where: str) -> DataError:
        """The error for the row."""
        return DataError(str(self), where=where, fix="delete or rename one field")


def _object(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(fields)
    if len(found) < len(fields):
        name, _ = Counter(name for name, _ in fields).most_common(1)[0]
        raise RepeatedKey(f"a JSON object has two fields {name[:100]!r}")
    return found


# Takes 0.2 to 7 us longer for a chat of 3 kB than json.loads, which keeps the last of two fields.
JSON = json.JSONDecoder(object_pairs_hook=_object)
"""Reads the JSON of rows. RepeatedKey: an object has two fields of one name."""


class OddNumber(ValueError):
    """JSON text has NaN, Infinity or a number too large for a float."""


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise OddNumber(f"the number {text[:100]} is not finite")
    return number


FINITE_JSON = json.JSONDecoder(
    object_pairs_hook=_object, parse_float=_finite, parse_constant=_finite
)
"""Reads JSON that a template writes again. Also OddNumber: a number would change."""


class Remark(str):
    """A sentence about a row, among the names of the fields that nothing reads."""

    __slots__ = ()


def unread_message(record: Mapping[str, Any]) -> str:
    """The fields that nothing reads, with their shares of rows: `history 100 %, weight 3 %`."""
    unread = record.get("unread", {})
    return ", ".join(f"{printable(name)} {_share(unread[name], record)}" for name in unread)


def remarks_of(record: Mapping[str, Any]) -> Iterator[str]:
    """The remarks of a `Tally.record`, with their shares of rows."""
    for text, count in record.get("remarks", {}).items():
        yield f"{printable(text)} ({_share(count, record)} of the rows)"


def _share(count: int, record: Mapping[str, Any]) -> str:
    share = 100 * count / max(1, record.get("rows", 0))
    return f"{share:.{0 if share >= 1 else 2}f} %"


def log_unread(name: str, record: Mapping[str, Any]) -> None:
    """Log the remarks of a `Tally.record` and the fields that nothing reads, if there are any."""
    if fields := unread_message(record):
        log.info("source=%s has fields that nothing reads (share of rows): %s", name, fields)
    for text in remarks_of(record):
        log.info("source=%s %s", name, text)
