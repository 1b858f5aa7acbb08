"""YAML 1.2 with lines; a run file that is damaged in any way loads, or says where."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from isles.config.load import load_run_file
from isles.config.resolve import dump_resolved, load_resolved, resolve
from isles.config.show import TEMPLATES, template
from isles.config.yaml import dump_yaml, parse_value, parse_yaml
from isles.errors import ConfigError, ConfigErrors
from tests.each import each


@each(
    ("text", "value"),
    [
        ("4e-4", 4e-4),
        ("0o17", 15),
        ("-.inf", -math.inf),
        ("true", True),
        ("on", "on"),
        ("", None),
        ("12:30:00", "12:30:00"),
        ("1_000", "1_000"),
        ("'8'", "8"),
        ("{a: [b, {c: 1}]}", {"a": ["b", {"c": 1}]}),
    ],
)
def test_scalars_mean_what_yaml_1_2_says(text: str, value: object) -> None:
    read = parse_value(text, "command line")
    assert read == value
    assert type(read) is type(value)


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n"
    for old, new in zip("abcdefg", "bcdefgh", strict=True)
)


@each(
    ("text", "place", "words"),
    [
        ("", "run.yaml:1", "empty"),
        ("- a\n", "run.yaml:1", "a list"),
        ("a: 1\nb: 2\na: 3\n", "run.yaml:3 a", "line 1"),
        ("a: 1\n3: 2\n", "run.yaml:2", "the key 3 is not a name"),
        ("a: !!python/object:os.system x\n", "run.yaml:1 a", "tag !!python/object:os.system"),
        ("b: {c: 1}\na:\n  <<: {d: 1}\n", "run.yaml:3 a", "merge keys"),
        ("a: 1\n---\nb: 1\n", "run.yaml:2:1", "second document"),
        ("a:\n\tb: 1\n", "run.yaml:2:1", "a tab"),
        ("a: b: c\n", "run.yaml:1:5", "a ':' stands where no key can be"),
        ("a:\n  b: 1\n c: 2\n", "run.yaml:3:2", "does not fit the lines above"),
        ("a: [1, 2\nb: 3\n", "run.yaml:2:2", "not closed"),
        ("x: 1\na: 'never\nb: 3\n", "run.yaml:2:4", "a quote is opened here"),
        ('a: "C:\\path"\n', "run.yaml:1:8", "backslash"),
        ("a: @b\n", "run.yaml:1:4", "cannot begin with this character"),
        ("a: *b\n", "run.yaml:1:4", "is not defined above"),
        ("a: &a [*a]\n", "run.yaml:1", "this is no run file"),
        (BOMB, "run.yaml:", "this is no run file"),
        ("a: " + "[" * 5000 + "]" * 5000, "run.yaml:1", "this is no run file"),
        ("a: 1\nb: 1e999\n", "run.yaml:2 b", "the number 1e999 is too large"),
        ("a: 1\nb: " + "9" * 10_000 + "\n", "run.yaml:2 b", "10000 digits"),
        ("a: 1\nb: x\x00y\n", "run.yaml:2:5", "U+0000"),
        ('a: "\\ud800"\n', "run.yaml:1 a", "U+D800"),
    ],
)
def test_what_is_no_run_file_is_refused_with_its_place(text: str, place: str, words: str) -> None:
    with pytest.raises((ConfigError, ConfigErrors)) as raised:
        parse_yaml(text, "run.yaml")
    error = raised.value
    first = error.issues[0] if isinstance(error, ConfigErrors) else error
    assert first.where.startswith(place)
    assert words in first.what
    assert first.fix


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0")).filter(
        lambda text: all(char.isprintable() or char in "\n\t" for char in text)
    )
    | st.floats(allow_nan=False, allow_infinity=False)
)
DATA = st.dictionaries(
    st.from_regex(r"[a-z_]{1,8}", fullmatch=True),
    st.recursive(
        SCALARS | st.lists(SCALARS, max_size=3),
        lambda inner: st.dictionaries(st.from_regex(r"[a-z]{1,5}", fullmatch=True), inner),
        max_leaves=8,
    ),
    min_size=1,
)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(DATA)
def test_what_is_written_reads_back_the_same(data: dict[str, object]) -> None:
    read = parse_yaml(dump_yaml(data), "x").value
    assert read == data
    assert repr(read) == repr(data)  # 1 is not 1.0 is not True


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
