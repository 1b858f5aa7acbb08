"""The data of a run, put together: training and validation set, and text for a tokenizer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from isles.config.sections.data import DataConfig, SourceConfig
from isles.data.cut import cut_samples, fake_samples, store_samples
from isles.data.dataset import Dataset
from isles.data.order import SampleOrder
from isles.data.samples import SampleSource
from isles.data.sources.find import Source, open_source
from isles.data.sources.items import texts_of
from isles.data.sources.parse import columns_of
from isles.data.sources.rows import Rows, Tally
from isles.data.stream.open import HeldOut, open_stream
from isles.data.stream.rows import row_stream
from isles.data.stream.source import StreamStart, open_streams
from isles.data.tokens.encode import Encoder, read_items
from isles.data.tokens.prepare import NO_PROGRESS_S, no_documents, prepare, wait_for_prepared
from isles.data.tokens.split import Ranges
from isles.data.tokens.store import TokenStore
from isles.data.tokens.transfer import prepare_everywhere
from isles.dist.world import World
from isles.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)


def build_datasets(
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    cache_dir: Path,
    *,
    seed: int,
    is_preparer: bool,
    progress: Callable[[str], None],
    vocab_size: int | None = None,
    no_progress_s: float = NO_PROGRESS_S,
    world: World | None = None,
    pairs: bool = False,
    fixed_length: bool = False,
    stream: StreamStart | None = None,
) -> tuple[Dataset, Dataset | None]:
    """The training set and the validation set of a run.

    All ranks call this; one of those that share the cache folder prepares the tokens, and the
    others wait for it.

    Args:
        data: the run file's section.
        tokenizer: may be None where every source is fake.
        cache_dir: where prepared tokens are kept.
        seed: of the split and of the order.
        is_preparer: whether this rank prepares.
        progress: called with a line for people.
        vocab_size: the model's, for fake sources.
        no_progress_s: how long to wait for a sign of life of the rank that prepares.
        world: the ranks; with it, a source may lie on some of several nodes only.
        pairs: whether fake samples are pairs, for training.method: dpo.
        fixed_length: whether every batch must have rows of data.seq_length; else they are as long
            as the longest of them needs.
        stream: where a run that streams begins; None: with its first sample.

    Returns:
        Training set, and validation set or None where nothing is held out.

    Raises:
        DataError: a source cannot be read, or is too short.
        CommunicationError: the rank that prepares gives no sign of life.
    """
    how = _Preparing(data, tokenizer, cache_dir, is_preparer, world, progress, no_progress_s)
    make_set = partial(_dataset, seq_length=data.seq_length, trims=not fixed_length)
    if data.streaming:
        held_out = [how.held_out_of_stream(number, seed) for number in range(len(data.sources))]
        training = how.stream(seed, vocab_size, stream or StreamStart(), fixed_length)
    else:
        parts = [how.parts(k, seed, vocab_size, pairs=pairs) for k in range(len(data.sources))]
        held_out = [held for _, held in parts]
        training = make_set([part for part, _ in parts], data.sources, seed)
    # The validation set has an order of its own, the same at every evaluation.
    kept = [(h, s) for h, s in zip(held_out, data.sources, strict=True) if h is not None]
    if not kept:
        return training, None
    return training, make_set([h for h, _ in kept], [s for _, s in kept], seed + 1)


@dataclass(frozen=True, slots=True)
class _Preparing:
    """How the sources are prepared; see `build_datasets`."""

    data: DataConfig
    tokenizer: PreTrainedTokenizerBase | None
    cache_dir: Path
    is_preparer: bool
    world: World | None
    progress: Callable[[str], None]
    no_progress_s: float

    def parts(
        self, number: int, seed: int, vocab_size: int | None, *, pairs: bool
    ) -> tuple[SampleSource, SampleSource | None]:
        """The samples of a source for training, and for validation. All ranks must call this."""
        source = self.data.sources[number]
        if source.type == "fake":
            assert vocab_size is not None, "a fake source needs the model's vocabulary"
            return fake_samples(self.data, vocab_size, seed + number, pairs=pairs)
        store = self._store(source, partial(open_source, source))
        return store_samples(self.data, source, store, seed)

    def stream(
        self, seed: int, vocab_size: int | None, start: StreamStart, fixed_length: bool
    ) -> Dataset:
        """The endless training set. All ranks must call this."""
        assert self.tokenizer is not None and vocab_size is not None
        return open_streams(
            self.data,
            self.tokenizer,
            self.cache_dir,
            start,
            seed=seed,
            vocab_size=vocab_size,
            world=self.world,
            fixed_length=fixed_length,
            progress=self.progress,
            no_progress_s=self.no_progress_s,
        )

    def held_out_of_stream(self, number: int, seed: int) -> SampleSource | None:
        """The validation part of a source that streams. All ranks must call this."""
        data, tokenizer = self.data, self.tokenizer
        if data.validation_fraction == 0:
            return None
        assert tokenizer is not None, "text needs a tokenizer"

        def open_held_out() -> Source:
            return HeldOut(open_stream(data, number, tokenizer, seed), data.validation_fraction)

        source = data.sources[number]
        store = self._store(source, open_held_out)
        ends = np.asarray(store.document_ends)
        samples = cut_samples(data, source, store, Ranges(np.concatenate([[0], ends[:-1]]), ends))
        if samples.num_samples:
            return samples
        log.warning("source=%s holds out too little for a sample", store.name)
        return None

    def _store(self, source: SourceConfig, open_rows: Callable[[], Source]) -> TokenStore:
        """The prepared tokens of some rows. All ranks must call this."""
        tokenizer, world, no_progress_s = self.tokenizer, self.world, self.no_progress_s
        assert tokenizer is not None, "text needs a tokenizer"
        finish = partial(
            prepare,
            cache_dir=self.cache_dir,
            max_bad_fraction=self.data.max_bad_fraction,
            no_progress_s=no_progress_s,
        )

        def make(say: Callable[[str], None]) -> Path:
            return finish(open_rows(), Encoder(source, tokenizer), progress=say)

        if world is not None and world.world_size > world.local_world_size:
            folder = prepare_everywhere(
                source,
                make,
                world,
                self.cache_dir,
                progress=self.progress,
                no_progress_s=no_progress_s,
            )
        elif self.is_preparer:
            folder = make(self.progress)
        else:
            folder = wait_for_prepared(
                open_rows(),
                Encoder(source, tokenizer),
                self.cache_dir,
                max_bad_fraction=self.data.max_bad_fraction,
                no_progress_s=no_progress_s,
            )
        return TokenStore.open(folder)


def documents_for_tokenizer(data: DataConfig) -> Iterator[str]:
    """All that the sources say, in turn, so that the first of it stands for all.

    Raises:
        DataError: a source cannot be read, or there is no text.
    """
    sources = [source for source in data.sources if source.type not in ("fake", "tokens")]
    if not sources:
        raise DataError(
            f"there is no text to train a tokenizer on: every source is {data.sources[0].type}",
            where="tokenizer.train_vocab_size",
            fix="take it out: fake sources need no tokenizer"
            if data.sources[0].type == "fake"
            else "name the tokenizer that the token ids belong to in tokenizer.name_or_path",
            id="data.untrained",
        )
    for texts in zip_longest(*(_texts(source, data) for source in sources)):
        yield from (text for text in texts if text is not None)


def _texts(source: SourceConfig, data: DataConfig) -> Iterator[str]:
    columns = columns_of(source)
    if data.streaming:  # nothing is downloaded that is not read
        stream = row_stream(source, columns)
        name = stream.describe()
        rows: Rows = (row for chunk in stream.chunks(None) for row in chunk.rows)
    else:
        opened = open_source(source)
        name, rows = opened.describe(), opened.rows(columns)
    tally = Tally(name, data.max_bad_fraction)
    is_empty = True
    for item in read_items(rows, source, tally):
        is_empty = False
        yield from texts_of(item)
    tally.judge()
    if is_empty:
        raise no_documents(name, source.type)


def _dataset(
    samples: Sequence[SampleSource],
    sources: Sequence[SourceConfig],
    seed: int,
    *,
    seq_length: int,
    trims: bool,
) -> Dataset:
    weights = [1.0 if source.weight is None else source.weight for source in sources]
    weighted = any(source.weight is not None for source in sources)
    sizes = [part.num_samples for part in samples]
    order = SampleOrder(sizes, weights if weighted else None, seed)
    return Dataset(samples, order, seq_length, trims=trims)
