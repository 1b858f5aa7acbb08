"""Folders and links among data files: a folder's files are found, and broken links are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from isles.config.files import data_issues, named_files
from isles.config.load import load_run_file
from isles.config.sections.data import SourceConfig
from isles.data.sources.find import open_source
from isles.errors import DataError
from tests.each import each


def fill(folder: Path) -> None:
    (folder / "f" / "a").mkdir(parents=True)
    for file in ("x.jsonl", "f/x.jsonl", "f/a/x.jsonl"):
        (folder / file).write_text('{"text": "one"}\n')


@each(
    ("*.jsonl", "y.jsonl", "nowhere"),
    ("*.jsonl", "y.jsonl", "y.jsonl"),
    ("[xy].jsonl", "y.jsonl", "x.jsonl/below"),
    ("y.jsonl", "y.jsonl", "nowhere"),
    ("f/*", "f/y.jsonl", "../nowhere"),
    ("f/**", "f/a/y", "nowhere"),
    ("f/**/*.jsonl", "f/a/y.jsonl", "nowhere"),
    ("f/**/*.jsonl", "f/b", "/no/folder"),
    ("f/**/*.jsonl", "f/v1.0", "v1.0"),
    ("f/*/x.jsonl", "f/b", "nowhere"),
    ("g*/**/*.jsonl", "g1", "nowhere"),
)
def test_links_that_lead_to_no_file_are_named(glob, link, target, *, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fill(tmp_path)
    (tmp_path / link).symlink_to(target)
    with pytest.raises(DataError) as caught:
        open_source(SourceConfig(path=glob))
    assert f"the link {link} points to {target}" in caught.value.what
    assert f"rm {link}" in caught.value.fix
    # isles check finds it too
    run = tmp_path / "run.yaml"
    run.write_text(
        "model: {name_or_path: qwen3-0.6b}\n"
        f"data: {{sources: [{{path: '{glob}', type: text}}], seq_length: 16}}\n"
        "training: {max_steps: 1}\n"
    )
    (issue,) = [i for i in data_issues(load_run_file(run)) if i.id == "files.data"]
    assert issue.what == caught.value.what and issue.fix == caught.value.fix
    # The printed fix works.
    (tmp_path / link).unlink()
    (tmp_path / "y.jsonl").touch()
    (tmp_path / "g1").mkdir()
    (tmp_path / "g1" / "x.jsonl").touch()
    assert named_files(glob)


@each(
    ("f/*.jsonl", "f/README"),
    ("f/**/*.jsonl", "f/README.md"),
    ("f/**/*.jsonl", "f/.#x.jsonl"),
    ("f/*/x.jsonl", "f/a.lock"),
)
def test_other_broken_links_stop_no_run(glob, link, *, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fill(tmp_path)
    (tmp_path / link).symlink_to("nowhere")
    assert named_files(glob)


@each(
    ("chat", ("x.jsonl", "README.md"), ".jsonl"),
    ("chat", ("x.csv.gz", "README.md", "LICENSE.txt", "a.py", "b.py"), ".csv.gz"),
    ("preference", ("README.md",), ".jsonl"),
    ("text", ("x.jsonl", "README.md"), ".jsonl"),
    ("text", ("README.md", "x.parquet"), ".parquet"),
    ("text", ("a.md", "b.md", "x.json"), ".md"),
)
def test_the_fix_for_a_folder_fits_the_type(type, names, ending, *, tmp_path):
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(DataError) as caught:
        open_source(SourceConfig(path=str(tmp_path), type=type))
    assert caught.value.fix.endswith(f"such as {tmp_path}/**/*{ending}")


@each(
    ("*.jsonl", "a.jsonl", "x.jsonl", ["x.jsonl"]),
    ("*.jsonl", "y.jsonl", "x.jsonl", ["x.jsonl"]),
    ("f/*/x.jsonl", "f/0", "a", ["f/a/x.jsonl"]),
    ("f/**/*.jsonl", "f/0", "a", ["f/a/x.jsonl", "f/x.jsonl"]),
    ("f/**/*.jsonl", "f/0.jsonl", "a/x.jsonl", ["f/a/x.jsonl", "f/x.jsonl"]),
    ("f/*.jsonl", "f/0.jsonl", "a/x.jsonl", ["f/0.jsonl", "f/x.jsonl"]),
)
def test_a_file_and_links_to_it_are_read_once(glob, link, target, files, *, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fill(tmp_path)
    (tmp_path / link).symlink_to(target)
    assert list(map(str, named_files(glob))) == files
    # Two links to a file outside, and two files of equal content, or with one inode.
    for name in ("y.txt", "z.txt"):
        (tmp_path / name).symlink_to("f/x.jsonl")
    assert list(map(str, named_files("*.txt"))) == ["y.txt"]
    (tmp_path / "0.md").write_text("a")
    (tmp_path / "1.md").write_text("a")
    (tmp_path / "2.md").hardlink_to(tmp_path / "1.md")
    assert len(named_files("*.md")) == 3
