"""Tables of inputs: one test that tries every row and lists all that are wrong."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Test = Callable[..., None]


def each(*rows: Any) -> Callable[[Test], Test]:
    """Like `pytest.mark.parametrize`, but all rows are one test.

    A row is what the test takes by position; its fixtures stand behind a `*`. Every row has a
    folder of its own as `tmp_path`, and its own `monkeypatch`; other fixtures are shared.
    """
    assert rows, "no rows"

    def decorate(test: Test) -> Test:
        signature = inspect.signature(test)
        parameters = signature.parameters.values()
        taken = [p for p in parameters if p.kind is not p.KEYWORD_ONLY]
        is_single = len(taken) == 1 and taken[0].kind is not taken[0].VAR_POSITIONAL

        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            wrong: list[BaseException] = []
            for number, row in enumerate(rows):
                values = (row,) if is_single else row
                try:
                    _run(functools.partial(test, *values), number, dict(fixtures))
                except (Exception, pytest.fail.Exception) as error:
                    error.add_note(f"row {number}: {row!r:.200}")
                    wrong.append(error)
            if wrong:
                raise BaseExceptionGroup(f"{len(wrong)} of {len(rows)} rows", wrong)

        kept = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
        run.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        return run

    return decorate


def _run(test: Test, number: int, fixtures: dict[str, Any]) -> None:
    if (folder := fixtures.get("tmp_path")) is not None:
        fixtures["tmp_path"] = Path(folder) / f"row-{number}"
        fixtures["tmp_path"].mkdir()
    for name in ("capsys", "capfd"):
        if name in fixtures:
            fixtures[name].readouterr()
    if "caplog" in fixtures:
        fixtures["caplog"].clear()
    if "monkeypatch" not in fixtures:
        test(**fixtures)
        return
    with fixtures["monkeypatch"].context() as patch:
        test(**fixtures | {"monkeypatch": patch})
