"""Tables of inputs: one test that tries every row and lists all that are wrong."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark import ParameterSet

Test = Callable[..., None]


def each(
    names: str | Sequence[str],
    rows: Iterable[Any],
    *,
    ids: Callable[[Any], str] | Sequence[str] | None = None,
) -> Callable[[Test], Test]:
    """Like `pytest.mark.parametrize`, but all rows are one test.

    Every row has a folder of its own as `tmp_path`, and its own `monkeypatch`; other fixtures are
    shared by all rows.

    Args:
        names: of the test's arguments, a text with commas or one by one.
        rows: values of these; a single name takes the row itself.
        ids: what a failed row is called.
    """
    text = names if isinstance(names, str) else ",".join(names)
    arguments = [name.strip() for name in text.split(",")]
    table = list(rows)
    assert table, f"no rows for {names}"

    def decorate(test: Test) -> Test:
        signature = inspect.signature(test)

        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            wrong: list[Exception] = []
            for number, row in enumerate(table):
                values = _values(row, len(arguments))
                own = dict(zip(arguments, values, strict=True))
                try:
                    _run(test, number, {**fixtures, **own})
                except (Exception, pytest.fail.Exception) as error:
                    error.add_note(f"row {number}: {_name(ids, number, row)}")
                    # pytest's own failures are no Exception, and a group takes nothing else.
                    known = isinstance(error, Exception)
                    wrong.append(error if known else AssertionError(*error.args))
            if wrong:
                raise ExceptionGroup(f"{len(wrong)} of {len(table)} rows", wrong)

        kept = [value for name, value in signature.parameters.items() if name not in arguments]
        run.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        return run

    return decorate


def _run(test: Test, number: int, values: dict[str, Any]) -> None:
    if (folder := values.get("tmp_path")) is not None:
        values["tmp_path"] = Path(folder) / f"row-{number}"
        values["tmp_path"].mkdir()
    for name in ("capsys", "capfd"):
        if name in values:
            values[name].readouterr()
    if "caplog" in values:
        values["caplog"].clear()
    if "monkeypatch" not in values:
        test(**values)
        return
    with values["monkeypatch"].context() as patch:
        test(**values | {"monkeypatch": patch})


def _values(row: Any, count: int) -> tuple[Any, ...]:
    if isinstance(row, ParameterSet):
        return tuple(row.values)
    return (row,) if count == 1 else tuple(row)


def _name(ids: Callable[[Any], str] | Sequence[str] | None, number: int, row: Any) -> str:
    if callable(ids):
        return ids(row)
    if ids is not None:
        return ids[number]
    named = isinstance(row, ParameterSet) and row.id
    return str(row.id) if named else repr(row)[:200]
