"""The fixes that isles prints for rows and files of data: each is read, followed, and works."""

from __future__ import annotations

import gzip
import io
import json
import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from isles.config.load import load_run_file
from isles.data.tokens.tokenizer import train_tokenizer
from isles.errors import UserError
from isles.facts.console import Console
from isles.launch.base import resolve_here
from isles.run.paths import RunDir
from isles.train.data_show import show_data
from tests.each import each
from tests.unit.test_given_rows import KNOWS, PLAIN, TOOL, A, U, call, template_of

GOOD: dict[str, Any] = {
    "chat": {"messages": [U, {**A, "content": "Good."}]},
    "instruct": {"instruction": "a", "output": "Good."},
    "preference": {"prompt": "a", "chosen": "Good.", "rejected": "c"},
    "text": {"text": "Good."},
    "tokens": {"input_ids": [5, 6]},
}
"""Rows beside the broken one; whatever a fix does to that, isles trains them as before."""
PRINTS = template_of("{{- m.content ~ (m.tool_calls | string if m.tool_calls else '') -}}")
NO_ARGUMENTS = template_of(
    "{{- m.content or '' -}}{%- for c in m.tool_calls or [] -%}"
    "{{- c.function.name -}}{%- endfor -%}"
)
ALL = KNOWS.replace("m.content or ''", "(m.reasoning_content or '') + (m.content or '')")
WEATHER = {**call(), "content": "Let me look."}
TALK = [U, WEATHER, {"role": "tool", "content": "dry"}, A]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fixes") / "tok"
    made = train_tokenizer(["The quick brown fox"], 320)
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    made.save_pretrained(folder)
    return folder


class Given:
    """A folder with a run file and its data, as a user has them."""

    def __init__(self, folder: Path, tokenizer: Path) -> None:
        self.folder, self.tokenizer = folder, {"name_or_path": str(tokenizer)}
        self.source: dict[str, Any] = {}

    def write(self, rows: list[Any], kind: str, template: str | None, **source: Any) -> None:
        """JSON lines, the broken row first, and a good row of its kind."""
        file = self.folder / "a.jsonl"
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        lines += [] if "Good." in lines[0] else [json.dumps(GOOD[kind])]
        file.write_text("".join(f"{line}\n" for line in lines))
        self.source = {"path": str(file), "type": kind, **source}
        if template:
            self.use_template(template)

    def use_template(self, text: str) -> None:
        if text != "chatml":
            (self.folder / "given.jinja").write_text(text)
            text = str(self.folder / "given.jinja")
        self.tokenizer["chat_template"] = text

    def look(self, *overrides: str) -> str:
        """The output of `isles data show`, whose module is run in this process."""
        run_file = self.folder / "run.yaml"
        method = "dpo" if self.source["type"] == "preference" else "causal_lm"
        content = {
            "name": "a",
            "model": {"name_or_path": "llama-2m", "init": "scratch"},
            "tokenizer": self.tokenizer,
            "data": {"sources": [self.source], "seq_length": 256, "cache_dir": f"{self.folder}/c"},
            "training": {"max_steps": 2, "method": method},
        }
        run_file.write_text(yaml.safe_dump(content))
        config = resolve_here(load_run_file(run_file, overrides), str, needs_data=True).config
        shown, run_dir = io.StringIO(), self.folder / "prepared"
        shutil.rmtree(run_dir, ignore_errors=True)
        run_dir.mkdir()
        show_data(config, RunDir(run_dir), 9, Console(file=shown, soft_wrap=True))
        return shown.getvalue()

    def look_until(self, keys: dict[str, str]) -> str:
        """Look with these keys. A fix may give one of them a longer value, such as a list."""
        for _ in range(3):
            try:
                return self.look(*(f"{key}={value}" for key, value in keys.items()))
            except UserError as error:
                last, (_, follow) = error, next(ways_of(error), ("", partial(_set, {})))
                if not (found := follow(self)) or found.keys() != keys.keys():
                    raise
                keys = found
        raise last

    def row(self, where: str) -> tuple[list[str], int]:
        """The lines of the file, and the index of the line that an error names."""
        named, _, line = where.rpartition(":")
        assert named == self.source["path"], where
        return Path(named).read_text().splitlines(), int(line) - 1

    def rewrite(self, where: str, change: Callable[[str], str]) -> None:
        """Replace the line that an error names; an empty line is no row."""
        lines, index = self.row(where)
        lines[index] = change(lines[index])
        Path(self.source["path"]).write_text("".join(f"{line}\n" for line in lines if line))


Way = Callable[[Given], dict[str, str]]
"""Follows one alternative of a fix; gives the keys that it sets."""
_KEY = r"(data\.sources(?:\.\d+)?\.\w+|tokenizer\.\w+|data\.\w+|(?<![\w.])type)"
_SETTING = re.compile(_KEY + r"(?:: | to )(\[[^\]]*\]|\{[^}]*\}|(?!a |its |one )[\w./-]*[\w/])")
_TEMPLATE = re.compile(r"template that accepts it \((\S+)\)|(\S+\.chat_template) to a Jinja file")
_TEMPLATE_TOO = re.compile(r"(\S+\.chat_template): \w+, or to a Jinja file")
_WRITE = re.compile(r"(?:write|use one of:) (\w+)(?:(?: or|,) (\w+))?")


def ways_of(error: UserError) -> Iterator[tuple[str, Way]]:
    """Each thing that the fix says to do, as a person would do it."""
    fix, where = error.fix, error.where
    for key, value in _SETTING.findall(fix):
        path = f"data.sources.{key}" if key == "type" else key
        path = re.sub(r"^data.sources.(?=[a-z])", "data.sources.0.", path)
        yield f"{path}={value}", partial(_set, {path: value})
    if found := _TEMPLATE.search(fix) or _TEMPLATE_TOO.search(fix):
        yield "a template", partial(_use_template, next(filter(None, found.groups())))
    if re.search(r"remove that (row|line)", fix):
        yield "remove", partial(_edit, where, lambda _: "")
    if found := _WRITE.match(fix):
        value = re.search(r"is (?:\w+ )?'([^']*)'", error.what)
        assert value is not None, error.what
        for word in filter(None, found.groups()):
            yield f"write {word}", partial(_edit, where, _replaced(value[1], word))
    if found := re.match(r"delete (\w+) from data.sources.columns", fix):
        yield "delete it", partial(_delete_column, found[1])
    if found := re.match(r"remove (\w+) from it", fix):
        yield "remove it", partial(_edit, where, _without(found[1]))
    if found := re.match(r"rename it to (\S+) so that", fix):
        yield "rename", partial(_rename, found[1])


def _set(keys: dict[str, str], given: Given) -> dict[str, str]:
    return keys


def _use_template(key: str, given: Given) -> dict[str, str]:
    (path := given.folder / "knows.jinja").write_text(ALL)
    return {key: str(path)}


def _edit(where: str, change: Callable[[str], str], given: Given) -> dict[str, str]:
    given.rewrite(where, change)
    return {}


def _delete_column(key: str, given: Given) -> dict[str, str]:
    del given.source["columns"][key]
    return {}


def _rename(name: str, given: Given) -> dict[str, str]:
    path = Path(given.source["path"]).rename(given.folder / name)
    return {"data.sources.0.path": str(path)}


def _replaced(value: str, word: str) -> Callable[[str], str]:
    """Another value in a line of JSON, where it stands last."""
    old = re.compile(rf'("{re.escape(value)}"|\b{re.escape(value)})(?=[,}}])')
    return lambda line: old.sub(word if word.isdigit() else json.dumps(word), line, count=1)


def _without(key: str) -> Callable[[str], str]:
    return lambda line: re.sub(rf'"{key}": \[\],? ?(?=[^\]]*$)', "", line)


def assert_all_work(
    kind: str,
    rows: list[Any],
    template: str | None,
    source: dict[str, Any],
    folder: Path,
    tokenizer: Path,
) -> None:
    given, wrong = Given(folder, tokenizer), []
    given.write(rows, kind, template, **source)
    with pytest.raises(UserError) as caught:
        given.look()
    ways = list(ways_of(caught.value))
    assert ways, f"nothing to follow: {caught.value}"
    for name, follow in ways:
        given.write(rows, kind, template, **source)
        keys = follow(given)
        try:
            text = given.look_until(keys)
        except UserError as error:
            wrong.append(f"{name}: {error}\n  of {caught.value}")
            continue
        if "⟦Good.<|im_end|>⟧" not in text and "Good.<|endoftext|>" not in text:
            wrong.append(f"{name}: the good row is trained otherwise: {text}")
    assert not wrong, "\n".join(wrong)


TWO = [U, A, U]
ROLES = [{"roles": "user", "content": "a"}, {"roles": "assistant", "content": "Good."}]
KIT, CALLS = {"tools": "kit"}, ["tool_calls"]
OLD = {**A, "content": "Let me look.", "function_call": {"name": "weather", "arguments": "{}"}}
MASKED = [*TWO, {**A, "weight": 0}]
ROWS: list[tuple[str, list[Any], str | None, dict[str, Any]]] = [
    # A part that the template does not write.
    ("chat", [{"messages": TALK}], PLAIN, {}),
    ("chat", [{"messages": TALK, "tools": [TOOL]}], PLAIN, {}),
    ("chat", [{"messages": TALK}], "chatml", {}),
    ("chat", [{"messages": [U, A], "tools": [TOOL]}], PLAIN, {}),
    ("chat", [{"messages": [U, A], "tools": [TOOL]}], "chatml", {}),
    ("chat", [{"messages": [U, {**A, "reasoning_content": "wet"}]}], PLAIN, {}),
    ("chat", [{"messages": [U, {**A, "reasoning_content": "wet"}]}], "chatml", {}),
    ("chat", [{"messages": [U, call()]}], PRINTS, {}),
    ("chat", [{"messages": [U, call(), TALK[2], A]}], NO_ARGUMENTS, {}),
    (
        "preference",
        [{"tools": [TOOL], "prompt": [U], "chosen": [A], "rejected": [U, WEATHER]}],
        PLAIN,
        {},
    ),
    ("instruct", [{"tools": [TOOL], "prompt": [U], "completion": [A]}], PLAIN, {}),
    # No template.
    ("instruct", [{"tools": [TOOL], "prompt": "Rain?", "completion": "No."}], None, {}),
    ("preference", [{"tools": [TOOL], "prompt": "a", "chosen": "b", "rejected": "c"}], None, {}),
    ("instruct", [{"instruction": "a", "output": "b", "history": [["c", "d"]]}], None, {}),
    ("chat", [{"messages": [U, A]}], None, {}),
    # Odd values of fields.
    ("chat", [{"messages": [*TWO, {**A, "weight": 0.5}]}], PLAIN, {}),
    ("chat", [{"messages": [*TWO, {**A, "train": "no"}]}], PLAIN, {}),
    ("chat", [{"messages": MASKED}], PLAIN, {"train_on": "all"}),
    ("chat", [{"messages": MASKED[2:]}], PLAIN, {}),
    ("instruct", [{"instruction": "a", "output": "b", "history": [[1, 2]]}], PLAIN, {}),
    ("instruct", [{"instruction": "a", "output": "b", "history": "x"}], PLAIN, {}),
    ("chat", [{"messages": [U, A], "chat_template_kwargs": {"messages": []}}], PLAIN, {}),
    ("chat", [{"messages": [U, {"role": "asistant", "content": "No."}]}], PLAIN, {}),
    ("chat", [{"messages": [U, {"role": "narrator", "content": "No."}, A]}], PLAIN, {}),
    ("chat", [{"messages": [U, {**A, "content": ""}]}], PLAIN, {}),
    ("preference", [{"prompt": "a", "chosen": "b", "rejected": "b"}], PLAIN, {}),
    # Other names of columns and messages.
    ("chat", [GOOD["chat"]], PLAIN, {"columns": {"messages": "mesages"}}),
    ("instruct", [{"instructions": "a", "outputs": "Good."}], PLAIN, {}),
    ("instruct", [{"instruction": "a", "outputs": "Good."}], PLAIN, {"columns": {"input": "c"}}),
    ("chat", [{"dialogue": GOOD["chat"]["messages"]}], PLAIN, {}),
    ("chat", [{"messages": ROLES}], PLAIN, {}),
    ("text", [{"body": "Good."}], None, {}),
    # Other names of the fields, and fields that are ignored already.
    ("chat", [{"messages": [U, A], "functions": [TOOL["function"]]}], PLAIN, {}),
    ("chat", [{"messages": [U, OLD, A]}], PLAIN, {}),
    ("chat", [{"messages": [U, A], "kit": [TOOL]}], PLAIN, {"columns": KIT}),
    ("instruct", [{"prompt": "a", "completion": "b", "kit": [TOOL]}], None, {"columns": KIT}),
    ("chat", [{"messages": TALK, "tools": [TOOL]}], PLAIN, {"ignore_fields": ["tools"]}),
    ("chat", [{"messages": [*TWO, {**A, "weight": 0.5}]}], PLAIN, {"ignore_fields": ["train"]}),
    ("chat", [{"messages": [*TALK[:2], {**A, "thinking": "x"}]}], PLAIN, {"ignore_fields": CALLS}),
    ("chat", ['{"messages": 5'], PLAIN, {}),
]


@pytest.mark.long
@each(*ROWS)
def test_every_fix_of_a_row_works(kind, rows, template, source, *, tmp_path, tokenizer):
    assert_all_work(kind, rows, template, source, tmp_path, tokenizer)


LINES = '{"text": "Good."}\n{"text": "two"}\n'
FILES: list[tuple[str, str, dict[str, Any]]] = [
    ("a.txt", LINES, {"type": "text"}),
    ("a.md.gz", LINES, {"type": "text"}),
    ("b.py", '[{"text": "Good."}, {"text": "two"}]', {"type": "text"}),
    ("notes.txt", "Good.", {"type": "chat"}),
    ("notes", "Good.", {"type": "instruct"}),
]


@each(*FILES)
def test_every_fix_of_a_file_works(name, content, source, *, tmp_path, tokenizer):
    def write() -> None:
        data = content.encode()
        (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        given.source = {"path": str(tmp_path / name), **source}

    given = Given(tmp_path, tokenizer)
    given.use_template(PLAIN)
    write()
    with pytest.raises(UserError) as caught:
        given.look()
    ways = list(ways_of(caught.value))
    assert ways, f"nothing to follow: {caught.value}"
    for _, follow in ways:
        write()
        keys = follow(given)
        assert "Good.⟧" in given.look_until(keys) or "Good.<|endoftext|>" in given.look_until(keys)


def test_the_split_of_a_saved_folder_is_that_of_the_fix(tmp_path, tokenizer):
    import datasets

    rows = datasets.Dataset.from_list([GOOD["text"]] * 2)
    datasets.DatasetDict({"training": rows, "test": rows}).save_to_disk(tmp_path / "saved")
    given = Given(tmp_path, tokenizer)
    given.source = {"path": str(tmp_path / "saved"), "type": "text"}
    with pytest.raises(UserError) as caught:
        given.look()
    ((name, follow),) = ways_of(caught.value)
    assert name == "data.sources.0.split=training"
    assert "Good." in given.look_until(follow(given))
