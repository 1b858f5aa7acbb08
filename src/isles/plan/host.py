"""Main memory and disk of a run: what is held beside the cards, and what it leaves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from isles.config.files import BUILT_IN, named_files
from isles.config.memory import checkpoint_sizes
from isles.config.sections.run import RunConfig
from isles.config.sections.training import length_in_steps
from isles.plan.model import ModelFacts
from isles.plan.step import Job, Outcome

PROCESS_BYTES = 2.5 * 2**30
"""Of a rank: Python, torch and its libraries. A guess."""

_TEXTS = (".txt", ".text", ".md", ".rst", ".py", ".jsonl", ".json", ".ndjson", ".csv", ".tsv")
_BYTES_PER_TOKEN = 4
"""Of text, as tokenizers of 32 thousand tokens and more cut English. A guess."""


@dataclass(frozen=True, slots=True)
class Item:
    """Bytes for one purpose."""

    name: str
    size_bytes: float
    is_guess: bool = False


@dataclass(frozen=True, slots=True)
class Store:
    """Main memory, or the disk, of one host; `has_bytes` None: not known."""

    host: str
    what: str
    items: tuple[Item, ...]
    has_bytes: float | None

    @property
    def needed_bytes(self) -> float:
        return sum(item.size_bytes for item in self.items)


@dataclass(frozen=True, slots=True)
class Data:
    """What is known of the data before it is prepared.

    Args:
        tokens: of all sources; None: not known.
        steps: length of the run; None: not known, or a time.
    """

    tokens: float | None
    steps: int | None
    is_guess: bool


def data_of(config: RunConfig) -> Data:
    """Tokens by the size of local files, and the length of the run that follows."""
    tokens = _tokens(config)
    samples = None if tokens is None else max(1, int(tokens / config.data.seq_length))
    steps = length_in_steps(config.training, samples)
    return Data(tokens, steps, config.training.max_steps is None)


def _tokens(config: RunConfig) -> float | None:
    total = 0.0
    for source in config.data.sources:
        if source.path is None or source.path in BUILT_IN:
            return None
        files = named_files(source.path)
        if not files or any(file.suffix not in _TEXTS for file in files):
            return None
        total += sum(file.stat().st_size for file in files) / _BYTES_PER_TOKEN
    return total


def stores(job: Job, own: Outcome, model: ModelFacts, data: Data) -> list[Store]:
    """Main memory of each host, and the disk of the first, which keeps the run directory."""
    found = []
    rank = 0
    for host in job.machines.hosts:
        count = len(host.devices)
        items = tuple(_in_memory(job, own, model, rank, count))
        found.append(Store(host.name, "main memory", items, host.memory_bytes))
        rank += count
    first = job.machines.hosts[0]
    items = tuple(_on_disk(job, model, data))
    return [*found, Store(first.name, "disk", items, first.disk_free_bytes)]


def _in_memory(job: Job, own: Outcome, model: ModelFacts, rank: int, count: int) -> Iterator[Item]:
    yield Item("processes", count * PROCESS_BYTES, is_guess=True)
    offloaded = sum(each.memory.host for each in own.ranks[rank : rank + count])
    if offloaded:
        yield Item("offloaded", offloaded)
    diloco = job.config.diloco
    if diloco is not None:
        # Outer parameters, momentum and what encodings left out, in fp32, cut over the ranks.
        width = 4 + 4 * bool(diloco.momentum)
        width += 4 * (diloco.codec_config.kind in ("int8", "int4", "topk"))
        share = count / len(job.machines.devices)
        yield Item(f"outer parameters ({width} bytes each)", model.trained * width * share)


def _on_disk(job: Job, model: ModelFacts, data: Data) -> Iterator[Item]:
    config = job.config
    sizes = checkpoint_sizes(job.model, config)
    kept, number = config.checkpoint.keep, config.checkpoint.keep + 1
    yield Item(f"{number} checkpoints ({kept} and one on its way)", sizes.one * number)
    if config.checkpoint.export_on_finish:
        merged = config.checkpoint.merge_adapter and config.adapter.type != "none"
        yield Item("export", model.params * 2 if merged else sizes.export)
    if data.tokens is not None and not config.data.streaming:
        wide = 2 if job.model.vocab <= 1 << 16 else 4
        yield Item("prepared tokens", data.tokens * wide, is_guess=True)
    if config.model.init == "pretrained" and model.is_on_hub:
        yield Item("weights to download (16 bits)", model.params * 2, is_guess=True)
