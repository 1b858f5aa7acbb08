"""The rules of `data` and `tokenizer`: sources, columns, packing, streams, chat templates."""

from __future__ import annotations

from collections.abc import Iterator

from isles.config.issues import Issue
from isles.config.rules.idle import idle_keys, no_effect
from isles.config.sections.data import COLUMNS, SourceConfig, isolates_any
from isles.config.sections.model import OWN_VARIABLES
from isles.config.sections.run import RunConfig
from isles.config.sections.strategy import MeshSection
from isles.facts.models import shape_names

_JOINED = "data.packing: false (a row per document) or data.isolate_documents: false"


def data_rules(config: RunConfig) -> Iterator[Issue]:
    """Every broken rule of data sources, tokenizer and samples."""
    for index, source in enumerate(config.data.sources):
        yield from _source_rules(f"data.sources.{index}", source)
    yield from _mixture_rules(config)
    yield from _tokenizer_rules(config)
    yield from _packing_rules(config)
    yield from _streaming_rules(config)


def _source_rules(at: str, source: SourceConfig) -> Iterator[Issue]:
    if source.type == "fake":
        for key in source.model_fields_set - {"type"}:
            if not source.is_default(key):
                yield Issue((f"{at}.{key}",), f"a fake source has no {key}", "delete this line")
        return
    if source.path is None:
        yield Issue(
            (at,),
            "this source has no path",
            "add path: a file, a glob, a folder, a Hugging Face id, python-docs or python-stdlib",
        )
    if source.type != "text" and source.text_column != "text":
        yield Issue(
            (f"{at}.text_column",),
            f"text_column has no effect on a source of type {source.type}",
            f"delete it, and name the columns of {source.type} data with columns",
        )
    if source.type not in ("chat", "instruct"):
        to = f"a source of type {source.type}"
        yield from no_effect(source, f"{at}.train_on", to, "", f"{at}.type")
    known = COLUMNS.get(source.type, ())
    for key in source.columns:
        if key not in known:
            yield Issue(
                (f"{at}.columns.{key}", f"{at}.columns"),
                f"data of type {source.type} has no column {key}",
                f"use one of: {', '.join(known)} (followed by the name in your data)"
                if known
                else "set text_column to the name of the column with the text",
            )
    question = {"instruction", "input", "output"} & set(source.columns)
    answer = {"prompt", "completion"} & set(source.columns)
    if source.type == "instruct" and question and answer:
        yield Issue(
            (f"{at}.columns",),
            f"columns mixes {min(question)} and {min(answer)}, which belong to two data formats",
            "keep instruction, input and output, or prompt and completion",
        )


def _mixture_rules(config: RunConfig) -> Iterator[Issue]:
    sources = config.data.sources
    fakes = [index for index, source in enumerate(sources) if source.type == "fake"]
    if fakes and len(fakes) < len(sources):
        yield Issue(
            (f"data.sources.{fakes[0]}.type",),
            "sources mixes a fake source with real sources",
            "keep the fake source alone, or delete it",
        )
    unweighted = [index for index, source in enumerate(sources) if source.weight is None]
    if unweighted and len(unweighted) < len(sources):
        yield Issue(
            (f"data.sources.{unweighted[0]}",),
            f"source {unweighted[0] + 1} has no weight, and other sources have one",
            "give every source a weight, or no source",
        )
    # dpo compares answers in pairs, and nothing else reads pairs.
    method = config.training.method
    for index, source in enumerate(sources):
        at = f"data.sources.{index}.type"
        if source.type == "preference" and method != "dpo":
            yield Issue(
                ("training.method", at, f"data.sources.{index}"),
                f"method {method} does not read a preference source",
                "use method: dpo, or a source of another type",
            )
        elif method == "dpo" and source.type not in ("preference", "fake"):
            yield Issue(
                (at, f"data.sources.{index}", "training.method"),
                f"dpo compares two answers per prompt, and a {source.type} source has one",
                "use type: preference, or training.method: causal_lm",
            )


def _tokenizer_rules(config: RunConfig) -> Iterator[Issue]:
    name, vocab = config.tokenizer.name_or_path, config.tokenizer.train_vocab_size
    model = config.model
    kinds = {source.type for source in config.data.sources}
    train_key, name_key = "tokenizer.train_vocab_size", "tokenizer.name_or_path"
    if name is not None and vocab is not None:
        yield Issue(
            (train_key, name_key),
            f"name_or_path {name} and train_vocab_size {vocab} give two tokenizers",
            "keep one of them",
        )
    if vocab is not None and model.init == "pretrained":
        yield Issue(
            (train_key, "model.init"),
            f"the embeddings of {model.name_or_path} belong to another tokenizer",
            "delete train_vocab_size, or use init: scratch",
        )
    if vocab is not None and kinds == {"fake"}:
        yield Issue(
            (train_key, "data.sources"),
            "a fake source has no text to train a tokenizer on",
            "delete train_vocab_size; fake token ids need no tokenizer",
        )
    if vocab is not None and "tokens" in kinds:
        index = [source.type for source in config.data.sources].index("tokens")
        yield Issue(
            (train_key, f"data.sources.{index}.type"),
            "the token ids of the data do not match a tokenizer that this run trains",
            "set tokenizer.name_or_path to the tokenizer of the data, and delete train_vocab_size",
        )
    has_own = model.name_or_path not in shape_names() and not model.name_or_path.endswith(".json")
    if name is None and vocab is None and kinds != {"fake"} and not has_own:
        yield Issue(
            ("tokenizer", "model.name_or_path", train_key, name_key),
            f"{model.name_or_path} has no tokenizer",
            "add tokenizer: {name_or_path: ...}, with the tokenizer of the token ids"
            if kinds == {"tokens"}
            else "add tokenizer: {train_vocab_size: 8192}, or tokenizer: {name_or_path: ...}",
        )
    if config.tokenizer.chat_template is not None and kinds == {"fake"}:
        yield Issue(
            ("tokenizer.chat_template", "data.sources"),
            "a fake source has no messages for a chat template",
            "delete chat_template",
        )
    for taken in OWN_VARIABLES & config.tokenizer.chat_template_kwargs.keys():
        yield Issue(
            (f"tokenizer.chat_template_kwargs.{taken}", "tokenizer.chat_template_kwargs"),
            f"isles itself sets {taken} for the chat template",
            f"delete {taken}",
        )


def _packing_rules(config: RunConfig) -> Iterator[Issue]:
    data, strategy = config.data, config.strategy
    kinds = sorted({source.type for source in data.sources})
    if data.isolate_documents:
        yield from idle_keys(config, "data")
    if not set(kinds) - {"text", "fake"}:
        to = f"{' and '.join(kinds)}: isles splits long text into samples"
        yield from no_effect(data, "data.too_long", to, "", "data.sources")
    if not isolates_any(data) or not isinstance(strategy, MeshSection):
        return
    keys = ("data.isolate_documents", "data.packing", "strategy.pp_size")
    if strategy.pp_size > 1 and strategy.cp_size > 1:
        yield Issue(
            (*keys, "strategy.cp_size"),
            f"pipeline stages (pp_size {strategy.pp_size}) find documents by the positions of "
            f"their tokens, and with cp_size {strategy.cp_size} each rank has only some positions",
            f"use {_JOINED}, or set cp_size: 1 or pp_size: 1",
        )
    if strategy.pp_size > 1 and config.model.attn_implementation == "flash_attention_2":
        yield Issue(
            (*keys, "model.attn_implementation"),
            "isles does not support flash_attention_2 between documents in pipeline stages "
            f"(pp_size {strategy.pp_size}), which was never tested",
            f"use attn_implementation: sdpa, {_JOINED}",
        )


def _streaming_rules(config: RunConfig) -> Iterator[Issue]:
    # Rules of a stream: its number of samples is unknown.
    data, epochs = config.data, config.training.num_train_epochs
    if not data.streaming:
        return
    if all(source.type == "fake" for source in data.sources):
        yield Issue(
            ("data.streaming", "data.sources.0.type"),
            "fake data needs no streaming, as isles generates it during training",
            "delete streaming: true",
        )
        return
    if epochs is not None:
        yield Issue(
            ("training.num_train_epochs", "data.streaming"),
            f"num_train_epochs {epochs:g} has no length in steps, as isles does not count "
            "streamed data",
            "use max_steps or max_time",
        )
    if len(data.sources) > 1 and any(source.weight is None for source in data.sources):
        yield Issue(
            ("data.sources", "data.streaming"),
            f"{len(data.sources)} streamed sources need weights, as isles does not know their "
            "sizes",
            "give every source a weight, such as weight: 1 for equal shares",
        )
