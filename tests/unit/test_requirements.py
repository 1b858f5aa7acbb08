"""docs/requirements.md: every number once, with a test that is there, or the reason for none."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from isles.check.finding import IDS
from isles.config.keys import run_schema
from tests.documents import ROOT, broken_links, is_key, named_in_text

PAGE = ROOT / "docs" / "requirements.md"
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


def test_every_row_says_what_and_how_and_by_which_test() -> None:
    assert all(len(row) == 4 and row[1] and row[2] for row in rows())
    issues = [f"{row[0]}: {issue}" for row in rows() for issue in faults_of(row[3])]
    assert not issues, "\n".join(issues)
    assert all(map(faults_of, ("", "test_b", "not done", "`unit/test_a.py::test_b`; later")))


def faults_of(cell: str) -> list[str]:
    """What in the last cell is neither a test nor a reason: tests, and reasons behind `; `."""
    named, *reasons = cell.split("; ")
    if not cell:
        return ["nothing"]
    if named.startswith("not "):
        named, reasons = "", [named, *reasons]
    rest = _TEST.sub("", named).replace(",", "").strip()
    issues = [rest] if rest else []
    return issues + [reason for reason in reasons if not _REASON.fullmatch(reason)]


def test_every_named_test_is_there() -> None:
    assert functions_of("unit/test_no_such_file.py") == frozenset()
    unknown = [
        f"{number}: {file}::{name}"
        for number, *_, test in rows()
        for file, name in _TEST.findall(test)
        if name not in functions_of(file)
    ]
    assert not unknown, "\n".join(unknown)


def test_links_commands_and_keys_are_there() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert broken_links(PAGE) == []
    assert list(named_in_text(text)) == []
    unknown = [code for code in re.findall(r"`([^`]+)`", text) if not names_what_is_there(code)]
    assert not unknown, unknown
    wrong = ("training.max_stepps", "clusters.network.profil: roce", "net.conect")
    assert not any(names_what_is_there(code) for code in wrong)


def names_what_is_there(code: str) -> bool:
    """Whether code between backticks names no key and no finding, or one that there is."""
    dotted = re.match(r"([a-z_]+(?:\.[a-z0-9_]+)+)(?=$|: )", code)
    if dotted is None:
        return True
    first = dotted[1].partition(".")[0]
    if first in run_schema()["properties"]:
        return is_key(dotted[1])
    findings = {name.partition(".")[0] for name in IDS}
    return first not in findings or dotted[1] in IDS


@cache
def functions_of(file: str) -> frozenset[str]:
    """The functions of a test file, found without importing it."""
    path = ROOT / "tests" / Path(file)
    if not path.is_file():
        return frozenset()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))
