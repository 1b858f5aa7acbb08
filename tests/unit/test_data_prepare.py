"""Tokens prepared once: whole or absent, whatever happens to those who prepare them."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isles.config.sections.data import SourceConfig
from isles.data.sources.find import BuiltIn, open_source
from isles.data.sources.rows import PLAIN, Parser, Row, Rows
from isles.data.tokens.encode import Encoder
from isles.data.tokens.prepare import prepare
from isles.data.tokens.store import TokenStore
from isles.errors import CommunicationError, DataError
from isles.run.checkpoints import hash_file
from tests.deadline import DEADLINE_S

ROOT = Path(__file__).parents[2]


class Letters:
    """A slow tokenizer, as far as data/ needs one: a character is an id."""

    is_fast = False
    eos_token_id: int | None = 1
    name_or_path = "letters"

    def __init__(self, size: int = 300) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def get_vocab(self) -> dict[str, int]:
        return {chr(number): number for number in range(self.size)}

    def __call__(self, texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": [[ord(character) for character in text] for text in texts]}


def letters(tokenizer: Any = None) -> Encoder:
    """Text to ids by Letters, or by another tokenizer."""
    return Encoder(SourceConfig(path="any"), tokenizer or Letters())


class Told:
    """A source that follows lines on standard input: `more` is a document, the end the end."""

    name = "told"

    def identity(self) -> dict[str, Any]:
        return {"told": 1}

    def rows(self, parser: Parser) -> Rows:
        yield Row("told", {PLAIN: "first"})
        for line in sys.stdin:
            if line == "fail\n":
                raise DataError("told to fail", where="told:1", fix="tell it something else")
            # Larger than a batch: what came before is written.
            yield Row("told", {PLAIN: line * 2**18 + "b"})
            sys.stdout.write("written\n")
            sys.stdout.flush()


@contextmanager
def preparing(cache: Path, script: str = "") -> Iterator[subprocess.Popen[str]]:
    """A process that prepares `Told` and has begun."""
    script = script or (
        "import sys, pathlib\n"
        "from tests.unit.test_data_prepare import Told, letters, prepare\n"
        "prepare(Told(), letters(), pathlib.Path(sys.argv[1]), progress=lambda text: None)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(cache)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write("more\nmore\n")
        process.stdin.flush()
        # When the second is asked for, the first batch lies on the disk.
        assert process.stdout.readline() == "written\n", process.communicate()[1]
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=DEADLINE_S)


def quiet(_: str) -> None:
    """Nobody listens."""


def leftovers(cache: Path) -> list[str]:
    """The folders in a cache."""
    return [entry.name for entry in cache.iterdir() if entry.is_dir()]


@pytest.fixture
def source(tmp_path: Path):
    file = tmp_path / "rows.jsonl"
    rows = ["alpha", "", "be\n", "gamma delta"]
    file.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return open_source(SourceConfig(path=str(file)))


def test_tokens_of_the_documents_in_order(source, tmp_path: Path):
    lines: list[str] = []
    folder = prepare(source, letters(), tmp_path / "cache", progress=lines.append)
    store = TokenStore.open(folder)
    files = store.manifest["files"]
    assert all(hash_file(folder / name) == facts["sha256"] for name, facts in files.items())
    text = "".join(chr(token) for token in store.tokens)
    assert text == "alpha\x01be\n\x01gamma delta\x01"
    assert store.document_ends.tolist() == [6, 10, 22]
    assert (store.end_of_text_id, store.max_token_id) == (1, ord("t"))
    assert store.tokens.dtype == np.uint16
    assert lines == [f"{source.name}: 3 documents, 22 tokens"]
    assert leftovers(tmp_path / "cache") == [folder.name]


def test_prepared_once_and_the_same_bytes_again(source, tmp_path: Path):
    first = prepare(source, letters(), tmp_path / "a", progress=quiet)
    stamp = (first / "tokens.bin").stat().st_mtime_ns
    assert prepare(source, letters(), tmp_path / "a", progress=quiet) == first
    assert (first / "tokens.bin").stat().st_mtime_ns == stamp
    second = prepare(source, letters(), tmp_path / "b", progress=quiet)
    assert first.name == second.name
    for file in first.iterdir():
        assert file.read_bytes() == (second / file.name).read_bytes()


def test_another_source_or_tokenizer_is_another_folder(source, tmp_path: Path):
    folders = {prepare(source, letters(), tmp_path, progress=quiet)}
    folders.add(prepare(source, letters(Letters(301)), tmp_path, progress=quiet))
    os.utime(source.files[0], ns=(0, 0))
    folders.add(prepare(source, letters(), tmp_path, progress=quiet))
    assert len(folders) == 3


def test_large_vocabularies_take_four_bytes(source, tmp_path: Path):
    folder = prepare(source, letters(Letters(70_000)), tmp_path, progress=quiet)
    assert TokenStore.open(folder).tokens.dtype == np.uint32
    assert (folder / "tokens.bin").stat().st_size == 22 * 4


@pytest.mark.parametrize("damage", ["cut", "no tokens", "no manifest", "half a manifest"])
def test_a_damaged_folder_is_noticed_and_prepared_anew(
    source, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
):
    folder = prepare(source, letters(), tmp_path, progress=quiet)
    whole = (folder / "tokens.bin").read_bytes()
    match damage:
        case "cut":
            os.truncate(folder / "tokens.bin", len(whole) - 2)
        case "no tokens":
            (folder / "tokens.bin").unlink()
        case "no manifest":
            (folder / "manifest.json").unlink()
        case "half a manifest":
            os.truncate(folder / "manifest.json", 50)
    with pytest.raises(DataError, match="not whole"):
        TokenStore.open(folder)
    assert prepare(source, letters(), tmp_path, progress=quiet) == folder
    assert "damaged" in caplog.text
    assert (folder / "tokens.bin").read_bytes() == whole
    assert leftovers(tmp_path) == [folder.name]


def test_a_source_that_changes_meanwhile(tmp_path: Path):
    file = tmp_path / "a.txt"
    file.write_text("text")

    class Growing(Letters):
        def __call__(self, texts: list[str], **keys: Any) -> dict[str, list[list[int]]]:
            file.write_text("other text")
            return super().__call__(texts, **keys)

    with pytest.raises(DataError, match="changed while it was read"):
        prepare(
            open_source(SourceConfig(path=str(file))),
            letters(Growing()),
            tmp_path / "c",
            progress=quiet,
        )
    assert leftovers(tmp_path / "c") == []


def test_a_tokenizer_without_end_of_text(source, tmp_path: Path):
    tokenizer = Letters()
    tokenizer.eos_token_id = None
    with pytest.raises(DataError, match="no eos_token"):
        prepare(source, letters(tokenizer), tmp_path / "c", progress=quiet)


def test_a_cache_that_cannot_be_a_folder(source, tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be written") as caught:
        prepare(source, letters(), tmp_path / "file" / "cache", progress=quiet)
    assert "data.cache_dir" in caught.value.fix


def test_kill_9_leaves_nothing_that_is_taken_for_whole(tmp_path: Path):
    with preparing(tmp_path) as process:
        (half,) = [name for name in leftovers(tmp_path) if name.startswith(".tmp-")]
        assert (tmp_path / half / "tokens.bin").stat().st_size > 2**20
        process.send_signal(signal.SIGKILL)
        process.wait(DEADLINE_S)
        assert leftovers(tmp_path) == [half]
    other = prepare(BuiltIn("python-docs"), letters(Letters(10_000)), tmp_path, progress=quiet)
    assert leftovers(tmp_path) == [other.name]  # what the dead one left is gone
    with preparing(tmp_path) as process:
        prepare(BuiltIn("python-docs"), letters(Letters(10_001)), tmp_path, progress=quiet)
        process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0  # what a living one writes is not
    folder = prepare(Told(), letters(), tmp_path, progress=quiet)
    assert len(leftovers(tmp_path)) == 3
    assert TokenStore.open(folder).document_ends.size == 3


def test_two_processes_prepare_the_same(tmp_path: Path):
    with preparing(tmp_path) as first:
        tokens: list[Path] = []

        def second() -> None:
            tokens.append(prepare(Told(), letters(), tmp_path, progress=quiet))

        thread = threading.Thread(target=second)
        thread.start()
        first.communicate(timeout=DEADLINE_S)
        thread.join(DEADLINE_S)
        assert first.returncode == 0 and leftovers(tmp_path) == [tokens[0].name]
        assert TokenStore.open(tokens[0]).document_ends.size == 3  # the first one's


def test_who_waits_goes_on_when_the_other_dies(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("more\n"))
    with preparing(tmp_path) as first:
        told = threading.Event()
        lines: list[str] = []
        tokens: list[Path] = []

        def second() -> None:
            def hear(line: str) -> None:
                lines.append(line)
                told.set()

            tokens.append(prepare(Told(), letters(), tmp_path, progress=hear))

        thread = threading.Thread(target=second)
        thread.start()
        assert told.wait(DEADLINE_S) and "another process prepares it" in lines[0]
        first.kill()
        thread.join(DEADLINE_S)
    assert leftovers(tmp_path) == [tokens[0].name]
    assert TokenStore.open(tokens[0]).document_ends.size == 2  # its own


def test_who_waits_does_not_wait_for_ever(tmp_path: Path):
    with preparing(tmp_path) as process:
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(CommunicationError, match="has written nothing for 0 s"):
            prepare(Told(), letters(), tmp_path, progress=quiet, no_progress_s=0.3)
        process.send_signal(signal.SIGCONT)


@pytest.mark.skipif(os.getuid() != 0, reason="mounting a small disk takes root")
def test_a_full_disk(tmp_path: Path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], check=False
    )
    if mounted.returncode != 0:
        pytest.skip("this machine lets nobody mount")
    try:
        text = tmp_path / "a.txt"
        text.write_text("some text\n" * 100_000)
        source = open_source(SourceConfig(path=str(text)))
        with pytest.raises(DataError, match="disk full") as caught:
            prepare(source, letters(), disk / "cache", progress=quiet)
        assert caught.value.where == str(disk / "cache")
        assert " bytes are free" in caught.value.what
        assert "data.cache_dir" in caught.value.fix
        assert leftovers(disk / "cache") == []
        text.write_text("some text\n" * 1000)
        prepare(open_source(SourceConfig(path=str(text))), letters(), disk / "c", progress=quiet)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_file_that_may_not_grow(tmp_path: Path):
    script = (
        "import resource, sys, pathlib\n"
        "from tests.unit.test_data_prepare import Letters, SourceConfig, letters\n"
        "from tests.unit.test_data_prepare import open_source, prepare\n"
        "from isles.errors import DataError\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "cache = pathlib.Path(sys.argv[1])\n"
        "source = open_source(SourceConfig(path='python-docs'))\n"
        "try: prepare(source, letters(Letters(70_000)), cache, progress=print)\n"
        "except DataError as error: sys.exit(str(error))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        check=False,
        text=True,
        timeout=DEADLINE_S,
    )
    assert ended.returncode == 1 and "a file may not grow further" in ended.stderr, ended.stderr
    assert str(tmp_path) in ended.stderr and "Traceback" not in ended.stderr
    assert leftovers(tmp_path) == []
