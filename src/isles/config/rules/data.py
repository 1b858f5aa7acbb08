"""The rules between the keys that say what is read, as what, and with which tokenizer."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from isles.config.issue import Violation
from isles.config.sections.data import COLUMNS, SourceConfig
from isles.config.sections.run import RunConfig
from isles.facts.models import shape_names


def data_rules(config: RunConfig) -> Iterator[Violation]:
    """Every rule about sources and tokenizers that is broken."""
    for index, source in enumerate(config.data.sources):
        yield from _source_rules(f"data.sources.{index}", source)
    yield from _mixture_rules(config)
    yield from _tokenizer_rules(config)
    yield from _template_rules(config)


def _source_rules(at: str, source: SourceConfig) -> Iterator[Violation]:
    if source.type == "fake":
        for key in source.model_fields_set - {"type"}:
            if getattr(source, key) != type(source).model_fields[key].default:
                yield Violation((f"{at}.{key}",), f"a fake source has no {key}", "delete this line")
        return
    if source.path is None:
        yield Violation(
            (at,),
            "this source has no path",
            "add path: a file, a glob, a folder, a hub id, python-docs or python-stdlib",
        )
    if source.type != "text" and source.text_column != "text":
        yield Violation(
            (f"{at}.text_column",),
            f"text_column means nothing to a source of type {source.type}",
            f"delete it; columns names the columns of {source.type} data",
        )
    if source.train_on != "assistant" and source.type not in ("chat", "instruct"):
        yield Violation(
            (f"{at}.train_on", f"{at}.type"),
            f"train_on {source.train_on} means nothing to a source of type {source.type}",
            "delete it",
        )
    yield from _column_rules(at, source)


def _column_rules(at: str, source: SourceConfig) -> Iterator[Violation]:
    known = COLUMNS.get(source.type, ())
    for key in source.columns:
        if key in known:
            continue
        others = [kind for kind, names in COLUMNS.items() if key in names]
        near = difflib.get_close_matches(key, known, n=1)
        if not known:
            fix = "set text_column: the name of the column with the text"
        elif near:
            fix = f"did you mean {near[0]}?"
        elif others:
            fix = f"it goes with type: {' or '.join(others)}; {source.type} has {', '.join(known)}"
        elif source.columns[key] in known:
            fix = f"write {source.columns[key]}: {key} (the name here, then the name in the data)"
        else:
            fix = f"use one of: {', '.join(known)}"
        yield Violation(
            (f"{at}.columns.{key}", f"{at}.columns"),
            f"data of type {source.type} has no {key}",
            fix,
        )
    question = {"instruction", "input", "output"} & set(source.columns)
    answer = {"prompt", "completion"} & set(source.columns)
    if source.type == "instruct" and question and answer:
        yield Violation(
            (f"{at}.columns",),
            f"columns has {min(question)} and {min(answer)}, which belong to two forms of data",
            "keep instruction, input and output, or prompt and completion",
        )


def _mixture_rules(config: RunConfig) -> Iterator[Violation]:
    sources = config.data.sources
    fakes = [index for index, source in enumerate(sources) if source.type == "fake"]
    if fakes and len(fakes) < len(sources):
        yield Violation(
            (f"data.sources.{fakes[0]}.type",),
            "a fake source stands among real ones",
            "keep the fake source alone, or delete it",
        )
    unweighted = [index for index, source in enumerate(sources) if source.weight is None]
    if unweighted and len(unweighted) < len(sources):
        yield Violation(
            (f"data.sources.{unweighted[0]}",),
            f"source {unweighted[0] + 1} has no weight and others have",
            "give every source a weight, or none",
        )


def _tokenizer_rules(config: RunConfig) -> Iterator[Violation]:
    name, vocab = config.tokenizer.name_or_path, config.tokenizer.train_vocab_size
    model = config.model
    kinds = {source.type for source in config.data.sources}
    train_key, name_key = "tokenizer.train_vocab_size", "tokenizer.name_or_path"
    if name is not None and vocab is not None:
        yield Violation(
            (train_key, name_key),
            f"name_or_path {name} and train_vocab_size {vocab} are two tokenizers",
            "keep one of them",
        )
    if vocab is not None and model.init == "pretrained":
        yield Violation(
            (train_key, "model.init"),
            f"the embeddings of {model.name_or_path} belong to another tokenizer",
            "delete train_vocab_size, or use init: scratch",
        )
    if vocab is not None and kinds == {"fake"}:
        yield Violation(
            (train_key, "data.sources"),
            "there is no text to train a tokenizer on: the source is fake",
            "delete train_vocab_size; fake token ids need no tokenizer",
        )
    if vocab is not None and "tokens" in kinds:
        index = [source.type for source in config.data.sources].index("tokens")
        yield Violation(
            (train_key, f"data.sources.{index}.type"),
            "the token ids of the data belong to another tokenizer than one that is trained here",
            "name that tokenizer in tokenizer.name_or_path, and delete train_vocab_size",
        )
    has_own = model.name_or_path not in shape_names() and not model.name_or_path.endswith(".json")
    if name is None and vocab is None and kinds != {"fake"} and not has_own:
        yield Violation(
            ("tokenizer", "model.name_or_path", train_key, name_key),
            f"{model.name_or_path} comes without a tokenizer",
            "add tokenizer: {name_or_path: ...}, the one that the token ids belong to"
            if kinds == {"tokens"}
            else "add tokenizer: {train_vocab_size: 8192}, or tokenizer: {name_or_path: ...}",
        )


def _template_rules(config: RunConfig) -> Iterator[Violation]:
    template = config.tokenizer.chat_template
    if template is not None and all(source.type == "fake" for source in config.data.sources):
        yield Violation(
            ("tokenizer.chat_template", "data.sources"),
            "there are no messages for a chat template: the source is fake",
            "delete chat_template",
        )
