"""Prepared tokens are found again by content, held by who uses them, and removed when unused."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from isles.cli import main
from isles.config.sections.data import DataConfig, SourceConfig
from isles.data.mix import build_datasets
from isles.data.sources.find import Files, open_source
from isles.data.tokens.encode import Encoder
from isles.data.tokens.prepare import prepare
from isles.data.tokens.store import TokenStore
from isles.data.tokens.tokenizer import train_tokenizer
from isles.errors import DataError
from isles.run.prepared import Prepared, doomed, prepared_in
from tests.data import prepare_file, quiet, write_parquet, write_rows
from tests.disks import closed
from tests.each import each

ROWS = [{"text": f"text {number}"} for number in range(20)]
DAY_S = 86400


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer([row["text"] for row in ROWS] * 9, 300)


@pytest.fixture
def hashed(monkeypatch) -> list[str]:
    """The sources whose content has been read for a hash."""
    seen: list[str] = []
    digest = Files.digest

    def count(self: Files, *args: Any) -> str:
        seen.append(self.name)
        return digest(self, *args)

    monkeypatch.setattr(Files, "digest", count)
    return seen


def folders(cache: Path) -> list[Path]:
    return sorted(cache.glob("tokens-*"))


def test_what_is_touched_moved_or_copied_is_found_again(tmp_path, tokenizer, hashed):
    cache = tmp_path / "cache"
    parts = [write_rows(tmp_path / f"data/part-{n}.jsonl", ROWS[n::2]) for n in made(tmp_path)]
    glob = tmp_path / "data" / "*.jsonl"
    first = prepare_file(tokenizer, glob, cache)
    before = (first.folder / "tokens.bin").stat()
    assert prepare_file(tokenizer, glob, cache).folder == first.folder and len(hashed) == 1
    os.utime(parts[0], ns=(0, 0))
    assert prepare_file(tokenizer, glob, cache).folder == first.folder and len(hashed) == 2
    assert prepare_file(tokenizer, glob, cache).folder == first.folder and len(hashed) == 2, "noted"
    shutil.copytree(tmp_path / "data", tmp_path / "copy/deep")
    (tmp_path / "copy/deep/part-1.jsonl").rename(tmp_path / "copy/deep/renamed.JSONL")
    for path in (tmp_path / "copy/deep/*", tmp_path / "copy/**/*"):
        found = prepare_file(tokenizer, path, cache)
        assert found.folder == first.folder
    after = (first.folder / "tokens.bin").stat()
    assert (after.st_mtime_ns, after.st_ino) == (before.st_mtime_ns, before.st_ino)
    assert folders(cache) == [first.folder]


def made(folder: Path) -> range:
    (folder / "data").mkdir()
    return range(2)


def test_other_content_is_prepared_anew_also_of_the_same_size(tmp_path, tokenizer, hashed):
    cache, file = tmp_path / "cache", write_rows(tmp_path / "a.jsonl", ROWS)
    os.utime(file, ns=(0, 0))  # as tar and rsync set the time
    first = prepare_file(tokenizer, file, cache)
    text = file.read_text()
    file.write_text(text.replace("text 11", "text 77"))
    os.utime(file, ns=(0, 0))
    other = prepare_file(tokenizer, file, cache)
    assert other.folder != first.folder and other.digest != first.digest
    file.write_text(text)
    os.utime(file, ns=(2, 2))
    assert prepare_file(tokenizer, file, cache).folder == first.folder
    assert folders(cache) == sorted([first.folder, other.folder])
    # Nor by another reading of the same bytes, another order, or a part.
    plain = tmp_path / "a.log"
    plain.write_text("no rows")
    one = prepare_file(tokenizer, plain, cache)
    (tmp_path / "a.csv").write_text("text\n1\n")
    (tmp_path / "a.tsv").write_text("text\n1\n")
    stores = [prepare_file(tokenizer, tmp_path / name, cache) for name in ("a.csv", "a.tsv")]
    assert len({one.folder, *(store.folder for store in stores)}) == 3
    assert len(hashed) == 6


def test_the_report_of_unread_fields_is_that_of_this_source(tmp_path, tokenizer):
    file = write_rows(tmp_path / "a.jsonl", [{**row, "title": "t"} for row in ROWS])
    for ignored, unread in ((["title"], {}), ([], {"title": len(ROWS)}), (["title"], {})):
        store = prepare_file(tokenizer, file, tmp_path / "cache", ignore_fields=ignored)
        assert store.manifest["unread"] == unread, ignored


def test_a_saved_dataset_elsewhere_is_the_same(tmp_path, tokenizer):
    import datasets

    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    first = prepare_file(tokenizer, tmp_path / "saved", tmp_path / "cache")
    shutil.copytree(tmp_path / "saved", tmp_path / "copy")
    assert prepare_file(tokenizer, tmp_path / "copy", tmp_path / "cache").folder == first.folder


def test_each_rank_names_a_source_by_the_run_file(tmp_path, tokenizer, monkeypatch, caplog):
    import datasets

    monkeypatch.chdir(tmp_path)
    datasets.Dataset.from_list(ROWS).save_to_disk("saved")
    data = DataConfig.model_validate({"sources": [{"path": "saved"}], "seq_length": 8})
    with caplog.at_level(logging.INFO, logger="isles"):
        build_datasets(data, tokenizer, tmp_path / "cache", seed=0, progress=quiet)
    assert [line.split()[0] for line in caplog.messages if "documents=" in line] == ["source=saved"]


@each("jsonl", "parquet")
def test_bad_rows_of_a_copy_are_named_by_the_copy(ending, *, tmp_path, tokenizer):
    rows: list[Any] = [*ROWS[:4], {"text": None}, *ROWS[4:]]
    one, other = tmp_path / f"one.{ending}", tmp_path / f"other.{ending}"
    if ending == "jsonl":
        write_rows(one, rows)
    else:
        write_parquet(one, {"text": [row["text"] for row in rows]})
    prepare_file(tokenizer, one, tmp_path / "cache", max_bad_fraction=0.1)
    one.rename(other)
    with pytest.raises(DataError, match="holds null") as caught:
        prepare_file(tokenizer, other, tmp_path / "cache")
    assert caught.value.where in (f"{other}:5", f"{other} row 4")


def test_a_cache_that_cannot_be_written_is_searched_by_content(tokenizer, hashed):
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:  # not closed, as /tmp of tests is
        folder = Path(name)
        folder.chmod(0o755)
        cache, file = folder / "cache", write_rows(folder / "a.jsonl", ROWS)
        first = prepare_file(tokenizer, file, cache)
        os.utime(file, ns=(0, 0))
        names = sorted(entry.name for entry in cache.iterdir())
        with closed(cache, 0o555):
            assert prepare_file(tokenizer, file, cache).folder == first.folder
        assert sorted(entry.name for entry in cache.iterdir()) == names and len(hashed) == 2


def test_a_source_that_cannot_be_read_leaves_nothing(tmp_path, tokenizer):
    file, cache = tmp_path / "a.jsonl", tmp_path / "cache"
    file.write_text('{"text": "a"}\n' * 2000 + "{broken\n")
    with pytest.raises(DataError, match="not JSON"):
        prepare_file(tokenizer, file, cache)
    assert [entry.name for entry in cache.iterdir() if not entry.name.endswith(".lock")] == []


def aged(store: TokenStore, days: float) -> None:
    """As if it had been used last so many days ago."""
    for entry in (store.folder, *store.folder.parent.glob(".known-*")):
        facts = entry.stat()
        is_its = entry == store.folder or store.folder.name.endswith(entry.read_text())
        if is_its:
            os.utime(entry, (facts.st_atime, facts.st_mtime - days * DAY_S))


@pytest.fixture
def prune(tmp_path, monkeypatch, capfd):
    """`isles data prune` in the default cache, which is a folder of the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def run(*words: str) -> str:
        assert main(["data", "prune", *words]) == 0
        return str(capfd.readouterr().out)

    return run


def test_unused_tokens_are_listed_first_and_then_deleted(tmp_path, tokenizer, prune):
    cache = tmp_path / "isles" / "data"
    assert "0 folders" in prune() and "0 folders" in prune("--yes")
    kept = []
    for number in range(4):
        file = write_rows(tmp_path / f"rows-{number}.jsonl", ROWS * (number + 1))
        used = prepare_file(tokenizer, file, cache)
        kept.append(used.folder)
        aged(used, 10 * number)
    said = prune("--unused-for=15d")
    assert "rows-2.jsonl" in said and "rows-1.jsonl" not in said and "rows-3.jsonl" not in said
    assert "1 folder (" in said and "must stay: in use" in said and "--yes" in said
    assert folders(cache) == sorted(kept), "nothing is deleted"
    said = prune("--unused-for=15d", "--yes")
    assert "deleted 1 folder" in said and folders(cache) == sorted([*kept[:2], kept[3]])
    assert len(used.tokens) and "deleted 0 folders" in prune("--unused-for=15d", "--yes"), "in use"
    del used
    assert "deleted 1 folder" in prune("--unused-for=15d", "--yes")
    assert folders(cache) == sorted(kept[:2])
    smallest = prepared_in(cache)[0].size_bytes
    assert "deleted 1 folder" in prune(f"--max-size={smallest}B", "--yes")
    assert folders(cache) == [kept[0]] and len(list(cache.glob(".known-*"))) == 1
    assert len(list(cache.glob(".tokens-*.lock"))) == 1
    # It is prepared again when it is needed.
    assert prepare_file(tokenizer, tmp_path / "rows-1.jsonl", cache).folder == kept[1]


def test_tokens_open_during_a_listing_and_not_during_a_removal(tmp_path, tokenizer, monkeypatch):
    file = write_rows(tmp_path / "a.jsonl", ROWS)
    folder = prepare_file(tokenizer, file, tmp_path / "cache").folder
    old = folder.with_name("old")

    def open_while_locked(then: Callable[[], object]) -> TokenStore:
        """Open the tokens, which another process has locked. It does this before it unlocks."""
        with (folder / "tokens.bin").open("r+b") as other:
            fcntl.flock(other, fcntl.LOCK_EX)
            monkeypatch.setattr(time, "sleep", lambda _: (then(), other.close()))
            return TokenStore.open(folder)

    assert open_while_locked(lambda: None).digest
    with pytest.raises(DataError, match="No such file"):
        open_while_locked(lambda: folder.rename(old))
    old.rename(folder)
    with pytest.raises(DataError, match="is being removed"):
        open_while_locked(lambda: (folder.rename(old), shutil.copytree(old, folder)))


def test_the_longest_unused_tokens_go_until_the_rest_is_small_enough():
    def names_of_doomed(max_bytes: float, *sizes: int, kept: int = -1) -> str:
        # A was used last, and C is the longest unused.
        found = [
            Prepared(Path(name), name, size, -float(age), "in use" * (age == kept))
            for age, (name, size) in enumerate(zip("ABC", sizes, strict=False))
        ]
        return "".join(each.name for each in doomed(found, DAY_S, max_bytes, now=0.0))

    assert names_of_doomed(10, 9, 4, 2) == "BC", "large and new tokens stay"
    assert names_of_doomed(11, 9, 4, 2) == "BC" and names_of_doomed(13, 9, 4, 2) == "C"
    assert names_of_doomed(15, 9, 4, 2) == "" and names_of_doomed(8, 9, 4, 2) == "ABC"
    assert names_of_doomed(8, 6, 6, 1, kept=1) == "AC", "tokens in use have their part of the size"


def test_a_use_is_noted_and_what_is_damaged_or_old_goes(tmp_path, tokenizer, prune):
    cache = tmp_path / "isles" / "data"
    file = write_rows(tmp_path / "a.jsonl", ROWS)
    folder = prepare_file(tokenizer, file, cache).folder
    aged(TokenStore.open(folder), 40)
    prepare_file(tokenizer, file, cache)
    assert "1 folder " not in prune().partition("would be")[2]
    store = TokenStore.open(folder)
    (folder / "tokens.bin").unlink()
    aged(store, 40)
    earlier = cache / f"tokens-{'0' * 32}"  # of a version before this one
    earlier.mkdir()
    (earlier / "tokens.bin").write_bytes(b"1")
    os.utime(earlier, (0, 0))
    (cache / "tokens-of-mine").mkdir()
    stale = cache / f".tmp-new-x@{os.uname().nodename}@{2**30}@1.0"
    stale.mkdir()
    pipes = [cache / f".known-x.{os.geteuid() + 1}", cache / f".known-x.{os.geteuid()}"]
    for pipe in pipes:
        os.mkfifo(pipe)  # reading it would never end
    assert "2 folders (" in prune("--yes") and not stale.exists()
    assert [entry.name for entry in folders(cache)] == ["tokens-of-mine"]
    assert [pipe.exists() for pipe in pipes] == [True, False], "another user's stays"


def test_the_cache_of_a_run_file_is_pruned_and_odd_flags_are_refused(
    tmp_path, tokenizer, run_file, prune, capfd
):
    file = write_rows(tmp_path / "a.jsonl", ROWS)
    store = prepare_file(tokenizer, file, tmp_path / "own")
    aged(store, 40)
    folder = store.folder
    del store
    assert folder.name in prune(str(run_file), f"data.cache_dir={tmp_path}/own")
    assert folder.name not in prune(str(run_file))
    for words in ("--unused-for=long", "--max-size=much"):
        assert main(["data", "prune", words]) == 1
        flag, said = words.partition("=")[0], capfd.readouterr().err
        (example,) = re.findall(r"fix: for example (.+)", said)
        assert example.startswith(flag) and main(["data", "prune", *example.split()]) == 0
    file = write_rows(tmp_path / "b.jsonl", ROWS)
    aged(prepare_file(tokenizer, file, tmp_path / "isles" / "data"), 3)
    for example in re.findall(r"`(--[^`]+)`", prune()):
        assert main(["data", "prune", *example.split()]) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of two users")
def test_another_users_tokens_stay(tmp_path, tokenizer, prune, give):
    cache = tmp_path / "isles" / "data"
    store = prepare_file(tokenizer, write_rows(tmp_path / "a.jsonl", ROWS), cache)
    aged(store, 40)
    folder = store.folder
    del store
    for entry in (folder, *folder.iterdir()):
        give(entry)
    assert "must stay: another user's" in prune("--yes") and folder.exists()


def test_preparing_goes_on_where_another_has_removed_it(tmp_path, tokenizer):
    config = SourceConfig(path=str(write_rows(tmp_path / "a.jsonl", ROWS)))
    source, encoder = open_source(config), Encoder(config, tokenizer)
    folder = prepare(source, encoder, tmp_path / "cache", progress=quiet)
    shutil.rmtree(folder)
    assert prepare(source, encoder, tmp_path / "cache", progress=quiet) == folder
    assert TokenStore.open(folder).digest
