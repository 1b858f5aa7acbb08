"""What errors of libraries mean to the user; ids of errors, each with one paragraph of its page."""

from __future__ import annotations

import ast
import io
import json
import re
import zipfile
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from isles import errors
from isles.agent.failure import failure_report
from isles.agent.protocol import refusal
from isles.check.finding import IDS
from isles.cli import main
from isles.errors import ConfigError, ExitCode, PreflightError, UserError
from isles.facts import troubleshooting as page
from isles.launch.remote.setup import wheel_bytes
from isles.launch.ssh.hosts import refuse
from isles.monitor.outcome import failure_lines
from isles.run.env import RankEnv
from isles.run.join_line import NOTHING_LEFT
from isles.run.paths import Attempt
from isles.run.records import write_record
from isles.train.worker import record_error
from tests.documents import ROOT, is_key
from tests.each import each


def test_out_of_memory_has_its_code_and_its_levers(tmp_path):
    """More than any machine has: the allocator's real error."""
    attempt = Attempt(tmp_path, 1)
    try:
        torch.empty(1 << 50)
    except RuntimeError as error:
        code = record_error(attempt, RankEnv(1, 1, 2, 2, 1, None), error)
    assert code == ExitCode.OUT_OF_MEMORY
    record = json.loads(attempt.rank_error(1).read_text())
    assert record["rank"] == 1 and not record["is_communication"]
    assert "micro_batch_size" in record["fix"]


def test_who_has_lost_another_is_no_culprit_even_where_its_disk_holds_no_word(tmp_path):
    """Its exit code says so, to the agents of several nodes and to itself."""
    attempt = Attempt(tmp_path, 1)
    attempt.rank_error(0).mkdir(parents=True)  # nothing can be written there
    error = RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer")
    env = RankEnv(0, 0, 2, 1, 1, None)
    code = record_error(attempt, env, error)
    assert code == ExitCode.COMMUNICATION and attempt.rank_error(0).is_dir()
    attempt.rank_error(0).rmdir()

    assert failure_report(attempt, 0, [0], 2, {0: code})["root_cause"] is None
    found = failure_report(attempt, 0, [0, 1], 3, {0: code, 1: 1})["root_cause"]
    assert found["what"] == "rank 1 ended with exit code 1"
    found = failure_report(attempt, 0, [0, 1], 3, {0: code, 1: -9})["root_cause"]
    assert found["what"] == "rank 1 was killed by SIGKILL"


def ids_of_code(text: str) -> set[str]:
    """Every id that a file gives to an error: where one is made, as a default, in a record."""
    texts = (
        child.value
        for node in ast.walk(ast.parse(text))
        for given in _given(node)
        for child in ast.walk(given)
        if isinstance(child, ast.Constant) and isinstance(child.value, str)
    )
    return {text for text in texts if re.fullmatch(r"[a-z]+(\.[a-z]+)*", text)} - {"id"}


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


def test_every_id_has_one_paragraph_and_every_paragraph_an_id_that_is_used():
    assert ids_of_code('DataError("x", id="a.b" if many else "c")') == {"a.b", "c"}
    used = {*IDS, NOTHING_LEFT}
    for path in (ROOT / "src" / "isles").rglob("*.py"):
        used |= ids_of_code(path.read_text(encoding="utf-8"))
    on_page = Counter(id for paragraph in page.paragraphs() for id in paragraph.ids)
    assert used - set(on_page) == set(), "without a paragraph"
    assert set(on_page) - used == set(), "on the page, and nowhere in the code"
    assert [id for id, count in on_page.items() if count > 1] == [], "in two paragraphs"
    kinds = [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, UserError)]
    assert {kind.id for kind in kinds} <= set(on_page), "kinds of errors"
    assert [id for id in on_page if "." in id and is_key(id)] == [], "keys of the run file"


def test_the_wheel_for_hosts_has_the_page():
    with zipfile.ZipFile(io.BytesIO(wheel_bytes())) as wheel:
        content = wheel.read("isles/facts/troubleshooting.md")
    assert content == (ROOT / "docs" / "troubleshooting.md").read_bytes()


@each(*sorted(page.by_id()))
def test_explain_prints_the_paragraph(id: str, *, capsys):
    assert main(["explain", id]) == ExitCode.OK
    out = capsys.readouterr().out
    head, _, body = out.partition("\n\n")
    assert f"`{id}`" in head and body.strip()
    assert "](" not in out and "**" not in out


def test_explain_answers_an_old_id_with_the_new_name(capsys):
    for old, new in page.RENAMED.items():
        assert main(["explain", old]) == ExitCode.OK
        first, *body = capsys.readouterr().out.splitlines()
        assert first == f"{old} is called {new}" and f"`{new}`" in body[1]
        assert old not in page.by_id()


def test_explain_lists_every_id_once_and_knows_exit_codes(capsys):
    assert main(["explain"]) == ExitCode.OK
    lines = capsys.readouterr().out.splitlines()
    firsts = [line.split()[0] for line in lines if line]
    assert all(firsts.count(id) == 1 for id in page.by_id())
    assert max(map(len, lines)) <= 100
    (line,) = (line for line in lines if line.startswith("data.rows "))
    assert "rows cannot be trained on" in line
    for code in set(ExitCode) - {ExitCode.OK}:
        assert main(["explain", str(int(code))]) == ExitCode.OK
        assert f"exit code {int(code)}: " in capsys.readouterr().out


def test_a_wrong_id_names_the_nearest(capsys):
    for given, meant in (("data.rwos", "data.rows"), ("ssh", "ssh.connect"), ("0", "lists them")):
        assert main(["explain", given]) == ExitCode.USER
        error = capsys.readouterr().err
        assert f"there is no id '{given}'" in error and meant in error


def test_a_printed_error_ends_with_its_id(tmp_path, capsys):
    wrong = tmp_path / "run.yaml"
    wrong.write_text("modle: {}\ndata: {seq_lenght: 4}\n")
    for command, id in (
        (["config", "show", str(tmp_path / "none.yaml")], "config.file"),
        (["status", f"--output-dir={tmp_path}", "x"], "run.unknown"),
        (["status", "--frobnicate"], "usage"),
        (["config", "show", str(wrong)], "config"),  # several errors, one id
    ):
        assert main(command) == ExitCode.USER
        error = capsys.readouterr().err
        assert error.splitlines()[-1] == f"  more: isles explain {id}"
        assert error.count("more: ") == 1


def test_several_errors_keep_their_ids_each_once():
    given = [ConfigError("a"), ConfigError("b", id="files.data"), ConfigError("c")]
    assert errors.ConfigErrors(given).ids == ("config", "files.data")
    issues = [PreflightError("a", id="ssh.connect"), PreflightError("b", id="gpu.count")]
    with pytest.raises(PreflightError) as caught:
        refuse([*issues, issues[0]], 3)
    assert caught.value.ids == ("ssh.connect", "gpu.count")


def test_an_error_that_is_quoted_is_not_followed_by_a_second_line():
    said = "a1: no run\n  fix: start one\n  more: isles explain run.unknown"
    assert errors.more_lines(["usage"], said) == []
    assert errors.cut_more(said) == ("a1: no run\n  fix: start one", "run.unknown")
    assert errors.cut_more("a1: no run") == ("a1: no run", "")
    # What is no id has no line.
    assert errors.more_lines(["", None, 5, "; rm -rf ~", "a b", "A.B", "data.rows\nx"]) == []


def test_a_refusal_keeps_its_id_on_its_way():
    told: dict[str, Any] = {"what": "full", "where": "a1", "fix": "go", "exit_code": 2}
    assert refusal({**told, "id": "start.refused"}).ids == ("start.refused",)
    assert refusal(told).ids == ("",)


def test_the_error_of_a_rank_shows_its_id(tmp_path):
    def failed_rank(name: str, error: Exception) -> list[str]:
        attempt = Attempt(tmp_path / name, 1)
        attempt.path.mkdir(parents=True)
        record_error(attempt, RankEnv(1, 1, 2, 2, 1, None), error)
        return failure_lines(attempt, ["  nothing was saved"])

    lines = failed_rank("rows", errors.DataError("12 rows", id="data.rows"))
    assert lines[-2:] == ["  nothing was saved", "  more: isles explain data.rows"]
    lines = failed_rank("lost", errors.CommunicationError("silence"))
    assert lines[-1] == "  more: isles explain communication"
    assert "more: " not in "\n".join(failed_rank("unforeseen", ZeroDivisionError("x")))
    attempt = Attempt(tmp_path / "queue", 1)  # a record without an id
    attempt.path.mkdir(parents=True)
    error = {"rank": None, "what": "the queue is gone", "fix": "wait", "exit_code": 5}
    write_record(attempt.outcome, {"state": "failed", "exit_code": 5, "error": error})
    assert failure_lines(attempt) == ["error: the queue is gone", "  fix: wait"]
