"""`isles data show`: `python -m isles.train.data_show FOLDER`, which holds a resolved.yaml.

It prepares the data as training does, into the same cache, and prints the trained tokens.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

from rich.table import Table
from rich.text import Text

from isles.config.files import CHATML
from isles.config.resolve import load_resolved
from isles.config.sections.data import SourceConfig
from isles.config.sections.run import RunConfig
from isles.data.show import (
    Figures,
    ShownDocument,
    field_notes,
    figures_of,
    shown_document,
    shown_documents,
)
from isles.data.sources.find import open_source
from isles.data.sources.rows import Tally
from isles.data.tokens.encode import Encoded, Encoder, encode_rows
from isles.data.tokens.prepare import prepare
from isles.data.tokens.store import TokenStore
from isles.data.tokens.tokenizer import clear_panics
from isles.errors import ExitCode, UserError, more_lines
from isles.facts.console import Console
from isles.facts.terminal import show_streams
from isles.run.paths import RunDir
from isles.train.data import data_cache, run_tokenizer, write_tokenizer
from isles.train.logs import log_of_verb

_OPEN, _CLOSE = "⟦", "⟧"
"""Marks around trained tokens on a terminal without colors."""


def main() -> int:
    """Print the samples and counts; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m isles.train.data_show")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--samples", type=int, default=3)
    options = parser.parse_args()
    log_of_verb(level=logging.WARNING, form="warning: %(message)s")
    run_dir = RunDir(options.folder)
    console = Console(soft_wrap=True)
    try:
        config = load_resolved(run_dir.resolved.read_text(encoding="utf-8")).config
        show_data(config, run_dir, options.samples, console)
    except UserError as error:
        sys.stderr.write("\n".join([f"error: {error}", *more_lines(error.ids), ""]))
        return int(error.exit_code)
    except BrokenPipeError:
        # The reader (head, less) has closed the pipe. Python flushes stdout again when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    return ExitCode.OK


def show_data(config: RunConfig, run_dir: RunDir, num_samples: int, console: Console) -> None:
    """Prepare the sources of a run, print samples and counts, and put the tokenizer in
    `run_dir`."""
    write_tokenizer(config, run_dir.tokenizer)
    tokenizer = run_tokenizer(config, run_dir)
    figures: dict[str, Figures] = {}

    def decode(ids: list[int]) -> str:
        with clear_panics(str(run_dir.tokenizer)):
            return str(
                tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            )

    for number, source in enumerate(config.data.sources):
        encoder = Encoder(source, tokenizer)
        name = f"{number + 1}. {source.path}"
        console.print(Text(f"{name}: {_describe(source, encoder, config)}", style="bold"))
        if config.data.streaming:
            stream = open_source(source, streams=True)
            tally = Tally(stream.name, config.data.max_bad_fraction)
            rows = islice(stream.rows(encoder.parser), 20 * num_samples)
            batches = encode_rows(rows, encoder, tally)
            documents = _of_stream(batches, tally, encoder, config, num_samples, decode)
        else:
            folder = prepare(
                open_source(source),
                encoder,
                data_cache(config.data),
                progress=_report,
                max_bad_fraction=config.data.max_bad_fraction,
            )
            store = TokenStore.open(folder)
            figures[name] = figures_of(config.data, source, store)
            documents = shown_documents(store, decode, config.data.seq_length, num_samples)
        for document in documents:
            _print(document, console)
        record = tally.record() if config.data.streaming else store.manifest
        for note in field_notes(number, source, record):
            console.print(Text(note))
        console.print()
    if figures:
        console.print(_table(figures))
    else:
        console.print("data.streaming: rows are read during training, so they are not counted")


def _of_stream(
    batches: Iterator[Sequence[Encoded]],
    tally: Tally,
    encoder: Encoder,
    config: RunConfig,
    num_samples: int,
    decode: Callable[[list[int]], str],
) -> Iterator[ShownDocument]:
    # The first documents of a source that has not been read to its end.
    each = 2 if encoder.kind == "preference" else 1
    documents = (document for batch in batches for document in batch)
    for number, document in enumerate(islice(documents, each * num_samples)):
        name = f"{encoder.kind} {number // each + 1}"
        if each == 2:
            name += ", rejected" if number % 2 else ", chosen"
        yield shown_document(name, document.ids, document.trained, decode, config.data.seq_length)
    tally.judge()


def _describe(source: SourceConfig, encoder: Encoder, config: RunConfig) -> str:
    parts = [f"type {source.type}"]
    if encoder.template is not None:
        wanted = config.tokenizer
        own = "of the tokenizer" if wanted.train_vocab_size is None else CHATML
        parts.append(f"template {wanted.chat_template or own}")
    elif encoder.kind in ("instruct", "preference"):
        parts.append("without a chat template, as plain text")
    if encoder.kind in ("chat", "instruct"):
        parts.append(f"train_on {encoder.train_on}")
    if not encoder.has_mask:
        parts.append("every token is trained")
    return " · ".join(parts)


def _print(document: ShownDocument, console: Console) -> None:
    has_colors = console.is_terminal and console.color_system is not None
    console.print(Text(f"── {document.title}", style="dim"))
    text = Text()
    for stretch in document.stretches:
        if not stretch.is_trained:
            text.append(stretch.text)
        elif has_colors:
            text.append(stretch.text, style="bold green")
        else:
            text.append(f"{_OPEN}{stretch.text}{_CLOSE}")
    if document.num_hidden:
        text.append(f" … and {document.num_hidden} tokens more", style="dim")
    console.print(text)


def _table(figures: Mapping[str, Figures]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for name in figures:
        table.add_column(name, justify="right", overflow="fold")
    columns = [
        {
            "rows": one.rows,
            "bad rows, skipped": one.bad,
            "empty rows, skipped": one.empty,
            "documents": one.documents,
            "tokens": one.tokens,
            "trained tokens": f"{one.trained} ({one.trained / max(1, one.tokens):.1%})",
            "median length": one.median,
            "longest": one.longest,
            "longer than seq_length": one.over_length,
            "truncated": one.counts.truncated,
            "dropped, too long": one.counts.too_long,
            "dropped, nothing trained": one.counts.untrained,
            "samples": one.counts.samples,
            "padding": f"{one.counts.padding_share:.1%}",
        }
        for one in figures.values()
    ]
    for label in columns[0]:
        table.add_row(label, *(f"{column[label]}" for column in columns))
    return table


def _report(line: str) -> None:
    sys.stderr.write(f"{line}\n")


if __name__ == "__main__":
    show_streams()
    sys.exit(main())
