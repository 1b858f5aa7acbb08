"""tests/requirements.md: every number once, with a test that is there, or the reason for none."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from tests.documents import ROOT, broken_links, named_in_text

PAGE = ROOT / "tests" / "requirements.md"
NUMBERS = {"S0": 111, "S1": 124, "S2": 86, "S3": 70, "S4": 75, "A6": 15}
"""The last number of each document, and of the list of what the documents have wrong."""
_TEST = re.compile(r"`(\w+/test_\w+\.py)::(test_\w+)`")
_REASON = re.compile(r"not (?:done|tested)(?:, because|:) \S.{8,}")


def rows() -> list[list[str]]:
    """The cells of every row with a number."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [row for row in cells if re.fullmatch(r"[A-Z]\d-\d+", row[0])]


def test_every_number_is_there_once_and_in_order() -> None:
    expected = [f"{name}-{n}" for name, last in NUMBERS.items() for n in range(1, last + 1)]
    assert [row[0] for row in rows()] == expected


def test_every_row_names_a_test_that_is_there_or_a_reason() -> None:
    assert all(len(row) == 4 and row[1] and row[2] for row in rows())
    issues = [f"{row[0]}: {issue}" for row in rows() for issue in faults_of(row[3])]
    assert not issues, "\n".join(issues)
    wrong = ("", "test_b", "not done", "`unit/test_docs.py::test_b`", f"{_FIRST}; later")
    assert all(map(faults_of, wrong))


_FIRST = "`unit/test_requirements.py::test_every_number_is_there_once_and_in_order`"


def faults_of(cell: str) -> list[str]:
    """What in the last cell is neither a test nor a reason: tests, and reasons behind `; `."""
    named, *reasons = cell.split("; ")
    if not cell:
        return ["nothing"]
    if named.startswith("not "):
        named, reasons = "", [named, *reasons]
    rest = _TEST.sub("", named).replace(",", "").strip()
    unknown = [name for file, name in _TEST.findall(named) if name not in functions_of(file)]
    others = [reason for reason in reasons if not _REASON.fullmatch(reason)]
    return [*([rest] if rest else []), *unknown, *others]


def test_links_and_commands_of_the_page_exist() -> None:
    assert not broken_links(PAGE)
    unknown = [word for _, word in named_in_text(PAGE.read_text(encoding="utf-8"))]
    assert not unknown, unknown


@cache
def functions_of(file: str) -> frozenset[str]:
    """The functions of a test file, found without importing it."""
    path = ROOT / "tests" / Path(file)
    if not path.is_file():
        return frozenset()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))
