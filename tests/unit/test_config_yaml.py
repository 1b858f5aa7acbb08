"""YAML 1.2 with lines, and what is written reads back the same."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isles.config.yaml import dump_yaml, parse_value, parse_yaml, scalar_text
from isles.errors import ConfigError, ConfigErrors
from tests.each import each


@each(
    ("text", "value"),
    [
        ("4e-4", 4e-4),
        ("+7", 7),
        ("0o17", 15),
        ("0x1F", 31),
        ("-.inf", -math.inf),
        ("true", True),
        ("on", "on"),
        ("null", None),
        ("", None),
        ("12:30:00", "12:30:00"),
        ("1_000", "1_000"),
        ("'8'", "8"),
        ("[1, a, null]", [1, "a", None]),
        ("{a: [b, {c: 1}]}", {"a": ["b", {"c": 1}]}),
    ],
)
def test_scalars_mean_what_yaml_1_2_says(text: str, value: object) -> None:
    read = parse_value(text, "command line")
    assert read == value
    assert type(read) is type(value)


def test_every_key_and_item_has_its_line() -> None:
    text = "# head\na:\n  c: &x\n    - b\n    - d: [2,\n        3]\nf: {g: *x}\n"
    document = parse_yaml(text, "run.yaml")
    items = ["b", {"d": [2, 3]}]
    assert document.value == {"a": {"c": items}, "f": {"g": items}}
    lines = {".".join(map(str, path)): line for path, line in document.lines.items()}
    assert lines.items() >= {"a": 2, "a.c": 3, "a.c.0": 4, "a.c.1.d": 5, "a.c.1.d.1": 6}.items()
    assert lines.items() >= {"f": 7, "f.g": 7}.items()


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n"
    for old, new in zip("abcdefg", "bcdefgh", strict=True)
)


@each(
    ("text", "place", "words"),
    [
        ("", "run.yaml:1", "empty"),
        ("# only a comment\n", "run.yaml:1", "empty"),
        ("- a\n", "run.yaml:1", "a list"),
        ("a: 1\nb: 2\na: 3\n", "run.yaml:3 a", "line 1"),
        ("a: 1\n3: 2\n", "run.yaml:2", "the key 3 is not a name"),
        ("a: 1\n? [x]\n: 2\n", "run.yaml:2", "not a list"),
        ("a: !!python/object:os.system x\n", "run.yaml:1 a", "tag !!python/object:os.system"),
        ("a: !!int x\n", "run.yaml:1 a", "tag !!int"),
        ("b: {c: 1}\na:\n  <<: {d: 1}\n", "run.yaml:3 a", "merge keys"),
        ("a: 1\n---\nb: 1\n", "run.yaml:2:1", "second document"),
        ("a:\n\tb: 1\n", "run.yaml:2:1", "a tab"),
        ("a: b: c\n", "run.yaml:1:5", "a ':' stands where no key can be"),
        ("a:\n  b: 1\n c: 2\n", "run.yaml:3:2", "does not fit the lines above"),
        ("a: [1, 2\nb: 3\n", "run.yaml:2:2", "not closed"),
        ("x: 1\na: 'never\nb: 3\n", "run.yaml:2:4", "a quote is opened here"),
        ('a: "C:\\path"\n', "run.yaml:1:8", "backslash"),
        ('a: "\\UFFFFFFFF"\n', "run.yaml:1:", "backslash"),
        ("a: @b\n", "run.yaml:1:4", "cannot begin with this character"),
        ("a: *b\n", "run.yaml:1:4", "is not defined above"),
        ("a: &a [*a]\n", "run.yaml:1", "this is no run file"),
        ("a: &a 1\nb: &a 2\n", "run.yaml:2:4", "stands twice"),
        (BOMB, "run.yaml:", "this is no run file"),
        ("a: " + "[" * 5000 + "]" * 5000, "run.yaml:1", "this is no run file"),
        ("a: 1\nb: 1e999\n", "run.yaml:2 b", "the number 1e999 is too large"),
        ("a: 1\nb: " + "9" * 10_000 + "\n", "run.yaml:2 b", "10000 digits"),
        ("a: 1\nb: x\x00y\n", "run.yaml:2:5", "U+0000"),
        ('a: "\\0"\n', "run.yaml:1 a", "U+0000"),
        ('a: "\\ud800"\n', "run.yaml:1 a", "U+D800"),
        ("%YAML 1." + "1" * 5000 + "\n---\na: 1\n", "run.yaml:1:", "%YAML"),
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


@each("text", ["on", "4e-4", "0o17", "null", "12:30:00", "", "- a", "#", "ä: b"])
def test_text_that_looks_like_something_else_stays_text(text: str) -> None:
    assert parse_value(scalar_text(text), "x") == text
