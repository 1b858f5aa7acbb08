"""A run file, damaged in every way: it loads, or says where the damage is. Never a traceback."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from isles.config.load import load_run_file
from isles.config.resolve import dump_resolved, load_resolved, resolve
from isles.config.show import TEMPLATES, template
from isles.errors import ConfigError, ConfigErrors

TEXTS = [template(kind) for kind in TEMPLATES] + [
    "model: {name_or_path: gpt2}\n"
    "data: {sources: [{path: a, weight: 0.5}, {path: 'b', weight: 1}], seq_length: 0x100}\n"
    "training: &t {max_steps: 10, micro_batch_size: 4, max_time: 1h30m}\n"
    "track: [jsonl]\n"
    "strategy: {kind: ddp}\n"
    "checkpoint:\n  every_minutes: 2.5\n"
    "clusters:\n- gpus_per_node: 2\n  launcher: {kind: local}\n"
]

ODD = [
    "", "null", "~", "true", "on", "0", "-1", "1.5", "1e999", ".nan", "-.inf", "1_000", "9" * 50,
    '"8"', "''", "[]", "{}", "[1, [2, [3]]]", "{a: {b: c}}", "[{}]", "[null]", "- x", "a: b",
    "!!python/object x", "!!int 5", "! x", "&a x", "*a", "*t", "&t {a: *t}", "|", ">-", "'", '"',
    "[", "{", "}", "]", ",", "#", "%YAML 1.1", "---", "...", "? x", ": x", "<<: *t", "\t", "@x",
    "`", "1h", "99:99:99", "9999999999999999999999d", "auto", "fsdp", "chat", "wandb", "2026-01-01",
    '"\\UFFFFFFFF"', '"\\ud800"', '"\\0"', "\u2028", "\x85", "\ufeff", "\x00", "\x07", "é😀",
    "lr: 1", "hv: {local_steps: 5}", "optimizer: {lr: 1}", "training.max_steps: 5", "kind: x",
    "name_or_path: [a]", "gpus_per_node: 3", "1: 2", "null: 1", "[a]: b", "{a: b}: c",
]  # fmt: skip

POSITION = st.integers(0, 10_000)
MUTATIONS = st.one_of(
    st.tuples(st.just("delete"), POSITION, st.integers(1, 30)),
    st.tuples(st.just("double"), POSITION, st.integers(1, 40)),
    st.tuples(st.just("insert"), POSITION, st.sampled_from(ODD)),
    st.tuples(st.just("insert"), POSITION, st.text(max_size=5)),
    st.tuples(st.just("value"), POSITION, st.sampled_from(ODD)),
    st.tuples(st.just("line"), POSITION, st.sampled_from(ODD)),
    st.tuples(st.just("double line"), POSITION, st.just("")),
    st.tuples(st.just("drop line"), POSITION, st.just("")),
    st.tuples(st.just("indent"), POSITION, st.sampled_from([" ", "  ", "\t"])),
    st.tuples(st.just("bytes"), POSITION, st.binary(min_size=1, max_size=4)),
    st.tuples(st.just("cut"), POSITION, st.just("")),
)


def mutate(content: bytes, kind: str, position: int, what: int | str | bytes) -> bytes:
    at = position % (len(content) + 1)
    if isinstance(what, bytes):
        return content[:at] + what + content[at:]
    if isinstance(what, int):
        part = b"" if kind == "delete" else content[at : at + what] * 2
        return content[:at] + part + content[at + what :]
    new = what.encode("utf-8", "surrogatepass")
    if kind == "insert":
        return content[:at] + new + content[at:]
    if kind == "cut":
        return content[:at]
    lines = content.splitlines(keepends=True) or [b"\n"]
    number = position % len(lines)
    line = lines[number]
    indent = line[: len(line) - len(line.lstrip())]
    lines[number] = {
        "value": re.sub(rb"(: +)[^#\n]*", lambda found: found[1] + new, line, count=1),
        "line": line + indent + new + b"\n",
        "double line": line + line,
        "drop line": b"",
        "indent": new + line,
    }[kind]
    return b"".join(lines)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


def check(file: Path, overrides: tuple[str, ...] = ()) -> None:
    try:
        loaded = load_run_file(file, overrides)
        resolved = resolve(loaded, num_gpus=0, world_size=None)
    except ConfigError as error:
        issues: tuple[ConfigError, ...] = (error,)
    except ConfigErrors as error:
        issues = error.issues
    else:
        assert load_resolved(dump_resolved(resolved)) == resolved
        return
    for issue in issues:
        in_file = re.match(rf"{re.escape(str(file))}:\d+", issue.where)
        assert in_file or (overrides and issue.where.startswith("command line")), issue
        assert issue.what and "Input should" not in str(issue), issue
        assert issue.fix, issue


@settings(
    max_examples=1000,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(st.sampled_from(TEXTS), st.lists(MUTATIONS, min_size=1, max_size=4))
def test_a_damaged_run_file_never_gives_a_traceback(
    folder: Path, text: str, mutations: list[tuple[str, int, int | str | bytes]]
) -> None:
    content = text.encode()
    for kind, position, what in mutations:
        content = mutate(content, kind, position, what)
    file = folder / "run.yaml"
    file.write_bytes(content)
    check(file)


PARTS = ["training", "max_steps", "data", "sources", "0", "path", "clusters", "7", "", "track", "é"]
VALUES = st.sampled_from(ODD) | st.text(max_size=4)


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(st.lists(st.sampled_from(PARTS), max_size=4), VALUES, st.booleans())
def test_a_damaged_override_never_gives_a_traceback(
    folder: Path, parts: list[str], value: str, has_equals: bool
) -> None:
    file = folder / "good.yaml"
    file.write_text(TEXTS[0], encoding="utf-8")
    check(file, (".".join(parts) + ("=" if has_equals else "") + value,))
