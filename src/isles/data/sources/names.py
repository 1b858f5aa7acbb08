"""Names of fields, as reports show them and as `ignore_fields` has them."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from typing import Any

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
