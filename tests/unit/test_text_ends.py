"""A text begins and ends as its tokenizer begins and ends it: in training and in `generate`."""

from __future__ import annotations

from typing import Any

import numpy as np
from tokenizers import Tokenizer, processors
from transformers import PreTrainedTokenizerFast

from isles.config.sections.data import SourceConfig
from isles.data.sources.rows import Continuation
from isles.data.tokens.encode import Encoder
from isles.data.tokens.tokenizer import add_nothing
from isles.train.verbs import prompt_ids
from tests.each import each
from tests.unit.test_exported_files import backend

TEXT = "don't stop"
BOS, EOS, START, END = range(4)


def tokenizer_that_writes(single: str) -> Any:
    """A tokenizer that makes this of a text, which is `$A`."""
    made = Tokenizer.from_str(backend())
    names = ["<bos>", "<eos>", "<|im_start|>", "<|im_end|>"]
    special = list(zip(names, range(4), strict=True))
    if single != "$A":
        made.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)
    known = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<bos>", eos_token="<eos>")
    known.add_special_tokens({"extra_special_tokens": names[2:]})
    return known


def ids_of(tokenizer: Any, item: Any, kind: str) -> tuple[list[int], list[bool]]:
    """One document: its ids, and which of them are trained."""
    encoder = Encoder(SourceConfig(path="any", type=kind), tokenizer)
    [[document]] = encoder.encode([("", item)])
    trained = document.trained
    every = np.ones(len(document.ids), dtype=bool)
    return document.ids, (every if trained is None else trained).tolist()


@each(
    ("$A", [], [EOS]),
    ("<bos> $A", [BOS], [EOS]),
    ("<bos> $A <eos>", [BOS], [EOS]),
    ("$A <eos>", [], [EOS]),
    ("<|im_start|> $A <|im_end|>", [START], [END, EOS]),
    ("<bos> <|im_start|> $A", [BOS, START], [EOS]),
)
def test_a_document_is_what_the_tokenizer_makes_of_a_text(single, first, last):
    tokenizer = tokenizer_that_writes(single)
    bare = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    whole = tokenizer(TEXT)["input_ids"]
    ids, trained = ids_of(tokenizer, TEXT, "text")
    assert ids == [*first, *bare, *last] and all(trained)
    assert ids in (whole, [*whole, EOS])
    ids, trained = ids_of(tokenizer, Continuation("don't", " stop"), "instruct")
    assert ids == [*first, *bare, *last]
    assert not any(trained[: len(first)]) and all(trained[-len(last) :])
    assert prompt_ids(tokenizer, TEXT, is_chat=False) == [*first, *bare]
    assert prompt_ids(tokenizer, "", is_chat=False) == (first or [EOS])


def test_what_is_written_out_is_not_doubled_and_all_can_be_turned_off():
    tokenizer = tokenizer_that_writes("<bos> $A <eos>")
    bare = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    written = f"<bos>{TEXT}"
    assert ids_of(tokenizer, written, "text")[0] == [BOS, *bare, EOS]
    assert ids_of(tokenizer, Continuation("<bos>don't", " stop"), "instruct")[0] == [
        BOS,
        *bare,
        EOS,
    ]
    assert prompt_ids(tokenizer, written, is_chat=False) == [BOS, *bare]
    key = Encoder(SourceConfig(path="any"), tokenizer).identity()
    add_nothing(tokenizer)
    assert ids_of(tokenizer, TEXT, "text")[0] == [*bare, EOS]
    assert prompt_ids(tokenizer, TEXT, is_chat=False) == bare
    assert Encoder(SourceConfig(path="any"), tokenizer).identity() != key, "prepared anew"
