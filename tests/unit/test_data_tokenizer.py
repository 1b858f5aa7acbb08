"""Tokenizers, and tokens prepared once: whole or absent, whatever happens to who prepares them."""

from __future__ import annotations

import errno
import io
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

from isles.config.sections.data import DataConfig, SourceConfig
from isles.data.mix import documents_for_tokenizer
from isles.data.sources.find import BuiltIn, open_source
from isles.data.sources.rows import PLAIN, Chunk, ChunkStart, Parser, Row, Source
from isles.data.tokens import prepare as preparing_tokens
from isles.data.tokens import tokenizer as tokens
from isles.data.tokens.encode import Encoder
from isles.data.tokens.prepare import prepare, reporting
from isles.data.tokens.store import TokenStore, disk_errors
from isles.errors import CommunicationError, DataError
from isles.run.checkpoints import hash_file
from tests.data import quiet, write_rows
from tests.deadline import DEADLINE_S, run_program
from tests.disks import small_disk
from tests.each import each

ROOT = Path(__file__).parents[2]
DOCS = DataConfig(sources=(SourceConfig(path="python-docs"),))


def train_on_docs():
    return tokens.train_tokenizer(documents_for_tokenizer(DOCS), 600)


@pytest.fixture(scope="module")
def trained():
    return train_on_docs()


def test_a_trained_tokenizer_gives_text_back_and_is_the_same_in_another_process(trained):
    assert len(trained) == tokens.vocabulary_size(trained) == 600
    assert trained.eos_token == trained.bos_token == trained.pad_token == tokens.END_OF_TEXT
    assert tokens.end_of_text_id(trained) == 0
    text = 'The "for" statement\n\n\tzwölf 😀 \x00'
    (ids,) = tokens.encode(trained, [text])
    assert trained.decode(ids) == text and 0 not in ids
    script = "from tests.unit.test_data_tokenizer import tokens, train_on_docs\n"
    script += "print(tokens.tokenizer_digest(train_on_docs()))"
    other = run_program([sys.executable, "-c", script])
    assert other.stdout.strip() == tokens.tokenizer_digest(trained), other.stderr


def test_saving_and_use_keep_the_digest_and_tokens_beyond_the_model_are_named(trained, tmp_path):
    digest = tokens.tokenizer_digest(trained)
    trained.save_pretrained(tmp_path)
    loaded = tokens.load_tokenizer(str(tmp_path))
    assert tokens.tokenizer_digest(loaded) == digest
    loaded(["a", "b c"], truncation=True, max_length=1, padding="max_length")
    assert tokens.tokenizer_digest(loaded) == digest
    assert tokens.check_vocabulary(loaded, 600) == ""
    with pytest.raises(DataError, match=r"has 600 tokens, the model knows 590.*token 590\) and 9"):
        tokens.check_vocabulary(loaded, 590)
    assert "590" in tokens.check_vocabulary(loaded, 590, is_trained=True)
    loaded.add_tokens(["<image>"])
    assert tokens.tokenizer_digest(loaded) != digest
    assert "lacks '<image>' (token 600); isles cannot train" in tokens.check_vocabulary(loaded, 600)


class Letters:
    """A slow tokenizer, as far as data/ needs one: a character is an id."""

    is_fast = False
    eos_token_id = 1
    name_or_path = "letters"

    def __init__(self, size: int = 300) -> None:
        self.size = size
        self.lengths: list[int] = []

    def __len__(self) -> int:
        return self.size

    def get_vocab(self) -> dict[str, int]:
        return {chr(number): number for number in range(self.size)}

    def __call__(self, texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
        self.lengths += map(len, texts)
        return {"input_ids": [[ord(character) for character in text] for text in texts]}


@each("\n", " ", "")
def test_long_documents_are_tokenized_in_pieces(border):
    slow, long = Letters(), ("x" * 999 + (border or "x")) * (3 * tokens.PIECE_CHARS // 1000)
    texts = ["short", long, ""]
    assert tokens.encode(slow, texts) == [[*map(ord, text)] for text in texts]
    assert max(slow.lengths) <= tokens.PIECE_CHARS
    assert min(slow.lengths[1:-2]) > tokens.PIECE_CHARS // 2


def test_what_is_no_tokenizer_or_has_no_end_of_text_is_an_error(trained, tmp_path):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
    trained.save_pretrained(tmp_path / "damaged")
    (tmp_path / "damaged" / "tokenizer.json").write_text("{broken")
    trained.save_pretrained(tmp_path / "newer")
    newer = tmp_path / "newer" / "tokenizer.json"
    newer.write_text(newer.read_text().replace('"BPE"', '"of a newer library"'))
    for name, what in [
        ("none", "folder not found"),
        ("model", "does not contain a tokenizer"),
        ("damaged", "cannot be used: Expecting property name"),
        ("newer", "cannot load the tokenizer: Exception: "),
    ]:
        with pytest.raises(DataError, match=what) as caught:
            tokens.load_tokenizer(str(tmp_path / name))
        assert "train_vocab_size" in caught.value.fix
    bare = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, "a")))
    with pytest.raises(DataError, match="no eos_token"):
        tokens.end_of_text_id(bare)


def letters(tokenizer: Any = None) -> Encoder:
    return Encoder(SourceConfig(path="any"), tokenizer or Letters())


class Told(Source):
    """A source that follows lines on standard input: each is a document, the end the end."""

    name = "told"

    def identity(self) -> dict[str, Any]:
        return {"told": 1}

    def chunks(self, parser: Parser, begin: ChunkStart | None = None) -> Iterator[Chunk]:
        yield Chunk({}, {}, [Row("told", {PLAIN: "first"})])
        for line in sys.stdin:
            # Larger than a batch: what came before is written.
            yield Chunk({}, {}, [Row("told", {PLAIN: line * 2**18 + "b"})])
            sys.stdout.write("written\n")
            sys.stdout.flush()


def prepare_told(cache: Path, progress: Any = quiet, **options: Any) -> int:
    """Prepare what is told; the number of documents."""
    folder = prepare(Told(), letters(), cache, progress=progress, **options)
    # One that is killed lets go of its lock before it is dead: what it leaves may go with the next.
    assert folder.name in leftovers(cache)
    return TokenStore.open(folder).document_ends.size


@contextmanager
def preparing(cache: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that prepares `Told` and has begun."""
    script = (
        "import sys, pathlib\n"
        "from tests.unit.test_data_tokenizer import Told, letters, prepare, quiet\n"
        "prepare(Told(), letters(), pathlib.Path(sys.argv[1]), progress=quiet)\n"
    )
    command = [sys.executable, "-c", script, str(cache)]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as process:
        try:
            process.stdin.write("more\nmore\n")
            process.stdin.flush()
            # When the second is asked for, the first batch lies on the disk.
            assert process.stdout.readline() == "written\n", process.communicate()[1]
            yield process
        finally:
            process.kill()


def leftovers(cache: Path) -> list[str]:
    return [entry.name for entry in cache.iterdir() if entry.is_dir()]


@pytest.fixture
def source(tmp_path):
    rows = ["alpha", "", "be\n", "gamma delta"]
    file = write_rows(tmp_path / "rows.jsonl", [{"text": row} for row in rows])
    return open_source(SourceConfig(path=str(file)))


def test_tokens_of_the_documents_in_order(source, tmp_path):
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
    large = prepare(source, letters(Letters(70_000)), tmp_path / "cache", progress=quiet)
    assert TokenStore.open(large).tokens.dtype == np.uint32
    assert (large / "tokens.bin").stat().st_size == 22 * 4


def test_prepared_once_and_the_same_bytes_again(source, tmp_path):
    first = prepare(source, letters(), tmp_path / "a", progress=quiet)
    stamp = (first / "tokens.bin").stat().st_mtime_ns
    assert prepare(source, letters(), tmp_path / "a", progress=quiet) == first
    assert (first / "tokens.bin").stat().st_mtime_ns == stamp
    second = prepare(source, letters(), tmp_path / "b", progress=quiet)
    assert first.name == second.name
    for file in first.iterdir():
        assert file.read_bytes() == (second / file.name).read_bytes()
    os.utime(source.files[0], ns=(0, 0))
    assert prepare(source, letters(), tmp_path / "a", progress=quiet) == first


@each(("tokens.bin", 42), ("tokens.bin", None), ("manifest.json", 50), ("manifest.json", None))
def test_a_damaged_folder_is_noticed_and_prepared_anew(file, size, *, source, tmp_path, caplog):
    folder = prepare(source, letters(), tmp_path, progress=quiet)
    whole = (folder / "tokens.bin").read_bytes()
    if size is None:
        (folder / file).unlink()
    else:
        os.truncate(folder / file, size)
    with pytest.raises(DataError, match="are incomplete"):
        TokenStore.open(folder)
    assert prepare(source, letters(), tmp_path, progress=quiet) == folder
    assert "damaged" in caplog.text
    assert (folder / "tokens.bin").read_bytes() == whole
    assert leftovers(tmp_path) == [folder.name]


@each("link", "fifo")
def test_a_lock_that_another_has_planted_is_refused(kind, *, source, tmp_path):
    cache, other = tmp_path / "shared", tmp_path / "other"
    folder = prepare(source, letters(), cache, progress=quiet)
    lock = cache / f".{folder.name.rpartition('-')[0]}.{os.geteuid()}.lock"
    lock.unlink(missing_ok=True)
    lock.symlink_to(other) if kind == "link" else os.mkfifo(lock)
    assert prepare(source, letters(), cache, progress=quiet) == folder, "whole: no lock"
    (folder / "manifest.json").unlink()
    with pytest.raises(DataError, match=lock.name) as caught:
        prepare(source, letters(), cache, progress=quiet)
    assert "data.cache_dir" in caught.value.fix and not other.exists()


def test_an_odd_name_in_a_shared_cache_is_left_alone(source, tmp_path):
    odd = [tmp_path / f".tmp-new-x@h@1@{number}" for number in ("1.2.3", ".", "9" * 200)]
    for folder in odd:
        folder.mkdir()
    prepare(source, letters(), tmp_path, progress=quiet)
    assert all(folder.is_dir() for folder in odd)


def test_ends_and_ids_that_another_has_written_are_named_with_their_folder(source, tmp_path):
    folder = prepare(source, letters(), tmp_path, progress=quiet)
    kept = (folder / "docs.npy").read_bytes()
    for ends in ([-3, 5, 22], [9, 5, 22], [5, 9, 21]):
        np.save(folder / "docs.npy", np.array(ends, "<i8"))
        with pytest.raises(DataError, match="does not belong to") as caught:
            TokenStore.open(folder)
        assert caught.value.where == str(folder)
    (folder / "docs.npy").write_bytes(kept)
    store = TokenStore.open(folder)
    with pytest.raises(DataError, match="hold id 60000"):
        store.check_ids(np.array([1, 60000], np.uint16))


def test_a_source_that_changes_meanwhile_and_a_cache_that_cannot_be_a_folder(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("text")

    class Growing(Letters):
        def __call__(self, texts: list[str], **keys: Any) -> dict[str, list[list[int]]]:
            file.write_text("other text")
            return super().__call__(texts, **keys)

    opened = open_source(SourceConfig(path=str(file)))
    with pytest.raises(DataError, match="changed while it was read"):
        prepare(opened, letters(Growing()), tmp_path / "c", progress=quiet)
    assert leftovers(tmp_path / "c") == []
    opened = open_source(SourceConfig(path=str(file)))
    with pytest.raises(DataError, match="cannot write to the cache folder") as caught:
        prepare(opened, letters(), file / "cache", progress=quiet)
    assert "data.cache_dir" in caught.value.fix


def test_kill_9_leaves_nothing_that_is_taken_for_whole(tmp_path):
    with preparing(tmp_path) as process:
        (half,) = [name for name in leftovers(tmp_path) if name.startswith(".tmp-")]
        assert (tmp_path / half / "tokens.bin").stat().st_size > 2**20
        process.send_signal(signal.SIGKILL)
        process.wait(DEADLINE_S)
        assert leftovers(tmp_path) == [half]
    docs = BuiltIn("python-docs")
    other = prepare(docs, letters(Letters(10_000)), tmp_path, progress=quiet)
    assert leftovers(tmp_path) == [other.name]  # what the dead one left is gone
    with preparing(tmp_path) as process:
        prepare(docs, letters(Letters(10_001)), tmp_path, progress=quiet)
        process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0  # what a living one writes is not
    assert prepare_told(tmp_path) == len(leftovers(tmp_path)) == 3


@each(False, True)
def test_who_waits_takes_what_the_other_made_or_goes_on_when_it_dies(
    dies, *, tmp_path, monkeypatch
):
    monkeypatch.setattr(sys, "stdin", io.StringIO("more\n"))
    waits = threading.Event()
    counts, lines = list[int](), list[str]()

    def say(line: str) -> None:
        lines.append(line)
        waits.set()

    with preparing(tmp_path) as first:
        thread = threading.Thread(target=lambda: counts.append(prepare_told(tmp_path, say)))
        thread.start()
        assert waits.wait(DEADLINE_S) and "another process prepares it" in lines[0]
        if dies:
            first.kill()
        first.communicate(timeout=DEADLINE_S)
        thread.join(DEADLINE_S)
    assert counts == [2 if dies else 3], "its own has one less"


def test_who_waits_does_not_wait_for_ever(tmp_path):
    with preparing(tmp_path) as process:
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(CommunicationError, match="has not written for 0 s"):
            prepare_told(tmp_path, no_progress_s=0.3)


def test_reading_without_a_document_and_opening_are_signs_of_life(tmp_path, monkeypatch):
    """As of a stream of which few rows are held out, and of a dataset that is downloaded."""
    monkeypatch.setattr(preparing_tokens, "REPORT_EVERY_S", 0.0)
    touched, lines = list[int](), list[str]()

    class Sparse(Told):
        def chunks(self, parser: Parser, begin: ChunkStart | None = None) -> Iterator[Chunk]:
            for number in range(4):
                yield Chunk({}, {}, [Row("told", {PLAIN: "last"})] if number == 3 else [])
                (half,) = tmp_path.glob(".tmp-*")
                touched.append(half.stat().st_mtime_ns)
                os.utime(half, ns=(0, 0))

    prepare(Sparse(), letters(), tmp_path, progress=lines.append)
    assert all(touched) and lines[2] == "told: 0 documents, 0 tokens, 3 pieces read"
    heard = threading.Event()
    with reporting(lambda line: lines.append(line) or heard.set(), "opening a/b", every_s=0.01):
        assert heard.wait(DEADLINE_S)
    assert lines[-1] == "opening a/b for 0 s"


def test_a_full_disk(tmp_path):
    disk, text = tmp_path / "disk", tmp_path / "a.txt"
    source = SourceConfig(path=str(text))
    with small_disk(disk, "1m"):
        text.write_text("some text\n" * 100_000)
        with pytest.raises(DataError, match="no space left") as caught:
            prepare(open_source(source), letters(), disk / "cache", progress=quiet)
        assert caught.value.where == str(disk / "cache")
        assert " bytes are free" in caught.value.what
        assert "data.cache_dir" in caught.value.fix
        assert leftovers(disk / "cache") == []
        text.write_text("some text\n" * 1000)
        prepare(open_source(source), letters(), disk / "cache", progress=quiet)
    with pytest.raises(DataError, match="the file is larger than allowed"), disk_errors(tmp_path):
        raise OSError(errno.EFBIG, "as ulimit -f has it")
