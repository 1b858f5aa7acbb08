"""Names of fields, as reports show them and as `ignore_fields` has them."""

from __future__ import annotations

import re
from collections.abc import Mapping

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
