"""Ids of errors: each has one paragraph of docs/troubleshooting.md, and its error names it."""

from __future__ import annotations

import ast
import io
import json
import sys
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from isles import errors
from isles.agent.protocol import refusal
from isles.check.finding import IDS
from isles.cli import main
from isles.errors import (
    CommunicationError,
    ConfigError,
    ConfigErrors,
    DataError,
    ExitCode,
    PreflightError,
    UserError,
    cut_more,
    more_lines,
)
from isles.facts import troubleshooting as page
from isles.launch.remote.setup import wheel_bytes
from isles.launch.ssh.channel import open_channel
from isles.launch.ssh.hosts import refuse
from isles.launch.ssh.shell import Shell
from isles.monitor.outcome import failure_lines
from isles.run.env import RankEnv
from isles.run.paths import Attempt
from isles.run.records import write_record
from isles.train.worker import record_error
from tests.deadline import DEADLINE_S
from tests.documents import ROOT, is_key
from tests.each import each

SRC = ROOT / "src" / "isles"


def ids_of_code(text: str) -> set[str]:
    """Every id that a file gives to an error: where one is made, as a default, in a record."""
    nodes = ast.walk(ast.parse(text))
    return {id for node in nodes for given in _given(node) for id in _values(given) if id}


def _values(given: ast.expr) -> Iterator[str]:
    """What the expression may be, as far as it stands in it."""
    match given:
        case ast.Constant(value=str(value)):
            yield value
        case ast.IfExp(body=one, orelse=other):
            yield from (*_values(one), *_values(other))
        case ast.BoolOp(values=values):
            yield from (id for value in values for id in _values(value))
        case ast.Call(func=ast.Name(id="str"), args=[value]):
            yield from _values(value)


def _given(node: ast.AST) -> Iterator[ast.expr]:
    match node:
        case ast.keyword(arg="id", value=value):
            yield value
        case ast.Assign(targets=[ast.Name(id="id")], value=ast.Constant() | ast.IfExp() as value):
            yield value
        case ast.Dict(keys=keys, values=values):
            pairs = zip(keys, values, strict=True)
            yield from (v for k, v in pairs if isinstance(k, ast.Constant) and k.value == "id")
        case ast.arguments(kwonlyargs=names, kw_defaults=defaults):
            pairs = zip(names, defaults, strict=True)
            yield from (value for name, value in pairs if name.arg == "id" and value is not None)


def ids_used() -> set[str]:
    """All ids: of errors, and of the findings of `isles check`."""
    found = set(IDS)
    for path in SRC.rglob("*.py"):
        found |= ids_of_code(path.read_text(encoding="utf-8"))
    return found


@each(
    ("code", "ids"),
    [
        ('raise DataError("x", where="y", id="data.rows")', {"data.rows"}),
        ('DataError("x", id="a.b" if many else "c")', {"a.b", "c"}),
        ('class A(UserError):\n    id = "usage"', {"usage"}),
        ('def f(*, id: str = "a.b"): pass', {"a.b"}),
        ('{"what": "x", "id": "a.b"}', {"a.b"}),
        ('trouble("x", id=str(first.get("id") or "machine"))', {"machine"}),
        ('DataError("x", id="a.b" if name == "SIGKILL" else "")', {"a.b"}),
        ('DataError("x", id=error.id)', set()),
        ('DataError("x")', set()),
    ],
)
def test_ids_of_code_are_found(code: str, ids: set[str]) -> None:
    assert ids_of_code(code) == ids


def test_every_id_has_one_paragraph_and_every_paragraph_an_id_that_is_used() -> None:
    on_page = Counter(id for paragraph in page.paragraphs() for id in paragraph.ids)
    used = ids_used()
    assert used - set(on_page) == set(), "without a paragraph"
    assert set(on_page) - used == set(), "on the page, and nowhere in the code"
    assert [id for id, count in on_page.items() if count > 1] == [], "in two paragraphs"


def test_every_kind_of_error_has_an_id_with_a_paragraph() -> None:
    kinds = [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, UserError)
    ]
    assert len(kinds) >= 9
    assert {kind.id for kind in kinds} <= set(page.by_id())


def test_versions_of_hosts_have_the_ids_of_findings() -> None:
    text = (SRC / "launch" / "ssh" / "hosts.py").read_text(encoding="utf-8")
    assert 'id=f"version.{what.lower()}"' in text
    assert {"version.isles", "version.torch", "version.python"} <= set(IDS)


def test_an_id_is_no_key_of_the_run_file() -> None:
    finer = {id for id in page.by_id() if "." in id}
    assert [id for id in finer if is_key(id)] == []


@each("id", sorted(page.by_id()))
def test_explain_prints_the_paragraph(id: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", id]) == ExitCode.OK
    out = capsys.readouterr().out
    head, _, body = out.partition("\n\n")
    assert f"`{id}`" in head
    assert body.strip()
    assert "](" not in out
    assert "**" not in out


def test_the_list_has_every_id_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain"]) == ExitCode.OK
    lines = capsys.readouterr().out.splitlines()
    firsts = [line.split()[0] for line in lines if line]
    assert all(firsts.count(id) == 1 for id in page.by_id())
    assert max(map(len, lines)) <= 100
    (line,) = (line for line in lines if line.startswith("data.rows "))
    assert "rows cannot be trained on" in line


def test_exit_codes_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    for code in set(ExitCode) - {ExitCode.OK}:
        assert main(["explain", str(int(code))]) == ExitCode.OK
        assert f"exit code {int(code)}: " in capsys.readouterr().out
    assert main(["explain", "4"]) == ExitCode.OK
    assert "memory.gpu" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "meant"), [("data.rwos", "data.rows"), ("ssh", "ssh.connect"), ("0", "lists them")]
)
def test_a_wrong_id_names_the_nearest(
    given: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", given]) == ExitCode.USER
    error = capsys.readouterr().err
    assert f"there is no id '{given}'" in error
    assert meant in error


def test_a_printed_error_ends_with_its_id(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = str(tmp_path / "none.yaml")
    for command, last in (
        (["config", "show", missing], "  more: isles explain config.file"),
        (["status", f"--output-dir={tmp_path}", "x"], "  more: isles explain run.unknown"),
        (["status", "--frobnicate"], "  more: isles explain usage"),
    ):
        assert main(command) == ExitCode.USER
        assert capsys.readouterr().err.splitlines()[-1] == last


def test_many_faults_name_each_id_once_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("modle: {}\ndata: {seq_lenght: 4}\n")
    assert main(["config", "show", str(file)]) == ExitCode.USER
    error = capsys.readouterr().err
    assert error.count("error: ") >= 2
    assert error.count("more: ") == 1
    assert error.splitlines()[-1] == "  more: isles explain config"
    two = ConfigErrors([ConfigError("a"), ConfigError("b", id="files.data"), ConfigError("c")])
    assert two.ids == ("config", "files.data")


def test_faults_of_several_hosts_keep_their_ids() -> None:
    issues = [PreflightError("a", id="ssh.connect"), PreflightError("b", id="gpu.count")]
    with pytest.raises(PreflightError) as caught:
        refuse([*issues, issues[0]], 3)
    assert caught.value.ids == ("ssh.connect", "gpu.count")


def test_an_error_that_is_quoted_is_not_followed_by_a_second_line() -> None:
    said = "a1: no run\n  fix: start one\n  more: isles explain run.unknown"
    assert more_lines(["usage"], said) == []
    assert cut_more(said) == ("a1: no run\n  fix: start one", "run.unknown")
    assert cut_more("a1: no run") == ("a1: no run", "")


@each("id", ["", None, 5, "; rm -rf ~", "a b", "A.B", "data.rows\nx"])
def test_what_is_no_id_has_no_line(id: object) -> None:
    assert more_lines([id]) == []


def failed_rank(tmp_path: Path, error: Exception) -> list[str]:
    """What is shown of a run of which one rank has failed."""
    attempt = Attempt(tmp_path, 1)
    attempt.path.mkdir(parents=True, exist_ok=True)
    record_error(attempt, RankEnv(1, 1, 2, 2, 1, None), error)
    return failure_lines(attempt, ["  nothing was saved"])


def test_the_error_of_a_rank_shows_its_id(tmp_path: Path) -> None:
    lines = failed_rank(tmp_path / "rows", DataError("12 rows", id="data.rows"))
    assert lines[-2:] == ["  nothing was saved", "  more: isles explain data.rows"]
    lines = failed_rank(tmp_path / "lost", CommunicationError("silence"))
    assert lines[-1] == "  more: isles explain communication"


def test_an_unforeseen_error_has_no_id(tmp_path: Path) -> None:
    assert "more: " not in "\n".join(failed_rank(tmp_path, ZeroDivisionError("x")))


def test_a_record_without_an_id_shows_none(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path, 1)
    error = {"rank": None, "what": "the queue is gone", "fix": "wait", "exit_code": 5}
    write_record(attempt.outcome, {"state": "failed", "exit_code": 5, "error": error})
    assert failure_lines(attempt) == ["error: the queue is gone", "  fix: wait"]


def test_a_refusal_keeps_its_id_on_its_way() -> None:
    told: dict[str, Any] = {"what": "full", "where": "a1", "fix": "go", "exit_code": 2}
    assert refusal({**told, "id": "start.refused"}).ids == ("start.refused",)
    assert refusal(told).ids == ("",)
    assert json.loads(json.dumps(told)) == told


def test_a_node_of_a_run_answers_with_the_id() -> None:
    with (
        open_channel(Shell(), python=sys.executable) as channel,
        pytest.raises(UserError) as caught,
    ):
        channel.call("frobnicate", timeout_s=DEADLINE_S)
    assert caught.value.id == "version.isles"


def test_the_wheel_for_hosts_has_the_page() -> None:
    with zipfile.ZipFile(io.BytesIO(wheel_bytes())) as wheel:
        content = wheel.read("isles/facts/troubleshooting.md")
    assert content == (ROOT / "docs" / "troubleshooting.md").read_bytes()
