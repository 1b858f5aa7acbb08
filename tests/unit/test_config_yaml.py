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
)
def test_scalars_mean_what_yaml_1_2_says(text: str, value: object):
    read = parse_value(text, "command line")
    assert read == value
    assert type(read) is type(value)


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n"
    for old, new in zip("abcdefg", "bcdefgh", strict=True)
)


@each(
    ("", "run.yaml:1", "empty"),
    ("- a\n", "run.yaml:1", "a list"),
    ("a: 1\nb: 2\na: 3\n", "run.yaml:3 a", "line 1"),
    ("a: 1\n3: 2\n", "run.yaml:2", "the key 3 is not a name"),
    ("a: !!python/object:os.system x\n", "run.yaml:1 a", "tag !!python/object:os.system"),
    ("b: {c: 1}\na:\n  <<: {d: 1}\n", "run.yaml:3 a", "merge keys"),
    ("a: 1\n---\nb: 1\n", "run.yaml:2:1", "second document"),
    ("a:\n\tb: 1\n", "run.yaml:2:1", "a tab"),
    ("a: b: c\n", "run.yaml:1:5", "a ':' is not allowed here"),
    ("a:\n  b: 1\n c: 2\n", "run.yaml:3:2", "does not fit the lines above"),
    ("a: [1, 2\nb: 3\n", "run.yaml:2:2", "not closed"),
    ("x: 1\na: 'never\nb: 3\n", "run.yaml:2:4", "a quote is opened here"),
    ('a: "C:\\path"\n', "run.yaml:1:8", "backslash"),
    ("a: @b\n", "run.yaml:1:4", "cannot begin with this character"),
    ("a: *b\n", "run.yaml:1:4", "is not defined above"),
    ("a: &a [*a]\n", "run.yaml:1", "this is not a run file"),
    (BOMB, "run.yaml:", "this is not a run file"),
    ("a: " + "[" * 5000 + "]" * 5000, "run.yaml:1", "this is not a run file"),
    ("a:\n" + "- 1\n" * 60_000 + "@", "run.yaml:4", "this is not a run file"),
    ("#" * (1 << 20) + "\na: @", "run.yaml:1", "this is not a run file"),
    ("a: 1\nb: 1e999\n", "run.yaml:2 b", "the number 1e999 is too large"),
    ("a: 1\nb: " + "9" * 10_000 + "\n", "run.yaml:2 b", "10000 digits"),
    ("a: 1\nb: x\x00y\n", "run.yaml:2:5", "U+0000"),
    ('a: "\\ud800"\n', "run.yaml:1 a", "U+D800"),
)
def test_what_is_no_run_file_is_refused_with_its_place(text: str, place: str, words: str):
    with pytest.raises((ConfigError, ConfigErrors)) as raised:
        parse_yaml(text, "run.yaml")
    first = getattr(raised.value, "issues", [raised.value])[0]
    assert first.where.startswith(place)
    assert words in first.what
    assert first.fix


SAME = settings(
    deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
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


@settings(SAME, max_examples=40)
@given(DATA)
def test_what_is_written_reads_back_the_same(data: dict[str, object]) -> None:
    read = parse_yaml(dump_yaml(data), "x").value
    assert read == data
    assert repr(read) == repr(data)  # 1 is not 1.0 is not True


def test_a_run_whose_resolved_values_are_too_many_is_refused(tmp_path: Path) -> None:
    sources = "".join(f"  - {{path: /data/texts/part-{n:05}.txt}}\n" for n in range(1500))
    head = "model: {name_or_path: m}\ntraining: {max_steps: 5}\n"
    text = f"{head}data:\n  sources:\n{sources}"
    loaded = load_run_file(tmp_path / "run.yaml", text=text)
    with pytest.raises(ConfigError, match="more values than isles reads") as caught:
        resolve(loaded)
    assert caught.value.where == f"{tmp_path}/run.yaml:4 data.sources" and "*" in caught.value.fix


def test_a_run_of_many_sources_and_a_long_variable_is_read_back() -> None:
    sources = "".join(f"  - {{path: /data/texts/part-{n:04}.txt, weight: 1}}\n" for n in range(700))
    variable = f"clusters: [{{environment: {{variables: {{A: {'a:' * 50_000}b}}}}}}]\n"
    head = "model: {name_or_path: gpt2}\ntraining: {max_steps: 10}\n"
    text = f"{head}{variable}data:\n  seq_length: 64\n  sources:\n{sources}"
    resolved = resolve(load_run_file(Path("run.yaml"), text=text), num_gpus=0)
    assert load_resolved(dump_resolved(resolved)) == resolved


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

ODD_BYTES = st.sampled_from([*map(str.encode, ODD), b" ", b"  ", b"\xff", b"\xc3"])
WHAT = ODD_BYTES | st.text(max_size=30).map(str.encode)
DAMAGE = st.tuples(st.integers(0, 8), st.integers(0, 10_000), WHAT)


def damaged(content: bytes, way: int, position: int, what: bytes) -> bytes:
    """Bytes or a line are put in, come twice, go, or are replaced; or all that follows goes."""
    at, size = position % (len(content) + 1), len(what)
    head, tail = content[:at], content[at:]
    lines = content.splitlines(keepends=True) or [b"\n"]
    place = position % len(lines)
    before, line, after = lines[:place], lines[place], lines[place + 1 :]
    indent = line[: len(line) - len(line.lstrip())]
    new_lines = (
        re.sub(rb"(: +)[^#\n]*", lambda found: found[1] + what, line, count=1),
        line + indent + what + b"\n",
        line + line,
        b"",
        what + line,
    )
    whole = [b"".join([*before, new, *after]) for new in new_lines]
    return [head, head + tail[size:], head + tail[:size] + tail, head + what + tail, *whole][way]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


def check(file: Path, overrides: tuple[str, ...] = ()) -> None:
    try:
        loaded = load_run_file(file, overrides)
        resolved = resolve(loaded, num_gpus=0, world_size=None)
    except (ConfigError, ConfigErrors) as error:
        issues = getattr(error, "issues", (error,))
    else:
        assert load_resolved(dump_resolved(resolved)) == resolved
        return
    for issue in issues:
        in_file = re.match(rf"{re.escape(str(file))}:\d+", issue.where)
        assert in_file or (overrides and issue.where.startswith("command line")), issue
        assert issue.what and "Input should" not in str(issue), issue
        assert issue.fix, issue


@settings(SAME, max_examples=1000)
@given(st.sampled_from(TEXTS), st.lists(DAMAGE, min_size=1, max_size=4))
def test_a_damaged_run_file_never_gives_a_traceback(folder, text, damages):
    content = text.encode()
    for way, position, what in damages:
        content = damaged(content, way, position, what)
    file = folder / "run.yaml"
    file.write_bytes(content)
    check(file)


PARTS = ["training", "max_steps", "data", "sources", "0", "path", "clusters", "7", "", "track", "é"]
VALUES = st.sampled_from(ODD) | st.text(max_size=4)


@settings(SAME, max_examples=200)
@given(st.lists(st.sampled_from(PARTS), max_size=4), VALUES, st.booleans())
def test_a_damaged_override_never_gives_a_traceback(folder, parts, value, has_equals):
    file = folder / "good.yaml"
    file.write_text(TEXTS[0], encoding="utf-8")
    check(file, (".".join(parts) + ("=" if has_equals else "") + value,))
