"""Loading, training and naming tokenizers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from isles.config.sections.data import DataConfig, SourceConfig
from isles.data.mix import documents_for_tokenizer
from isles.data.tokens.tokenizer import (
    END_OF_TEXT,
    PIECE_CHARS,
    check_vocabulary,
    encode,
    end_of_text_id,
    load_tokenizer,
    tokenizer_digest,
    train_tokenizer,
    vocabulary_size,
)
from isles.errors import DataError
from tests.deadline import run_program
from tests.each import each

DOCS = DataConfig(sources=(SourceConfig(path="python-docs"),))


def train_on_docs():
    return train_tokenizer(documents_for_tokenizer(DOCS), 600)


@pytest.fixture(scope="module")
def trained():
    return train_on_docs()


def test_a_trained_tokenizer_gives_text_back(trained):
    assert len(trained) == vocabulary_size(trained) == 600
    assert trained.eos_token == trained.bos_token == trained.pad_token == END_OF_TEXT
    assert end_of_text_id(trained) == 0
    text = 'The "for" statement\n\n\tzwölf 😀 \x00'
    (ids,) = encode(trained, [text])
    assert trained.decode(ids) == text and 0 not in ids


def test_training_is_deterministic_over_processes(trained):
    script = (
        "from tests.unit.test_data_tokenizer import tokenizer_digest, train_on_docs\n"
        "print(tokenizer_digest(train_on_docs()))\n"
    )
    other = run_program([sys.executable, "-c", script])
    assert other.returncode == 0, other.stderr
    assert other.stdout.strip() == tokenizer_digest(trained)


def test_the_digest_survives_saving_and_use(trained, tmp_path: Path):
    digest = tokenizer_digest(trained)
    trained.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    assert tokenizer_digest(loaded) == digest
    loaded(["a", "b c"], truncation=True, max_length=1, padding="max_length")
    assert tokenizer_digest(loaded) == digest
    loaded.add_tokens(["another"])
    assert tokenizer_digest(loaded) != digest


@each("border", ["\n", " ", ""])
def test_long_documents_are_tokenized_in_pieces(border: str):
    sizes: list[int] = []

    class Letters:
        def __call__(self, texts, **_):
            sizes.extend(len(text) for text in texts)
            return {"input_ids": [list(text) for text in texts]}

    text = ("x" * 999 + (border or "x")) * (3 * PIECE_CHARS // 1000)
    assert encode(Letters(), ["short", text, ""]) == [list("short"), list(text), []]
    assert max(sizes) <= PIECE_CHARS and min(sizes[1:-2]) > PIECE_CHARS // 2


def test_what_is_no_tokenizer_is_an_error(trained, tmp_path: Path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
    trained.save_pretrained(tmp_path / "damaged")
    (tmp_path / "damaged" / "tokenizer.json").write_text("{broken")
    for name, what in [
        ("none", "no such folder"),
        ("model", "holds no tokenizer"),
        ("damaged", "cannot be loaded"),
    ]:
        with pytest.raises(DataError, match=what) as caught:
            load_tokenizer(str(tmp_path / name))
        assert "train_vocab_size" in caught.value.fix


def test_a_tokenizer_without_end_of_text_is_an_error():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    bare = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, "a")))
    with pytest.raises(DataError, match="no eos_token"):
        end_of_text_id(bare)


def test_a_tokenizer_that_is_larger_than_the_model(trained, tmp_path: Path):
    trained.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    assert check_vocabulary(tokenizer, 600) == ""
    with pytest.raises(DataError, match=r"has 600 tokens, the model knows 590.*token 590\) and 9"):
        check_vocabulary(tokenizer, 590)
    assert "590" in check_vocabulary(tokenizer, 590, is_trained=True)
    tokenizer.add_tokens(["<image>"])
    assert "lacks '<image>' (token 600); no text" in check_vocabulary(tokenizer, 600)


def test_a_slow_tokenizer_works_as_well():
    from transformers import ByT5Tokenizer

    slow = ByT5Tokenizer()
    assert not slow.is_fast and end_of_text_id(slow) == 1
    assert encode(slow, ["ab", "", "c"]) == [[100, 101], [], [102]]
    assert vocabulary_size(slow) >= 259
    assert tokenizer_digest(slow) == tokenizer_digest(ByT5Tokenizer())
    assert tokenizer_digest(slow) != tokenizer_digest(ByT5Tokenizer(extra_ids=7))
