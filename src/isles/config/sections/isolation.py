"""Which packed documents attend to themselves alone."""

from __future__ import annotations

from isles.config.sections.data import DataConfig, SourceConfig


def isolates(data: DataConfig, source: SourceConfig) -> bool:
    """Whether documents of a source that share a sample are kept apart.

    Pairs of preferences and fake samples are never packed.
    """
    if not data.packing or source.type in ("fake", "preference"):
        return False
    if data.isolate_documents is not None:
        return data.isolate_documents
    return source.type != "text"


def isolates_any(data: DataConfig) -> bool:
    """Whether packed documents of any source are kept apart."""
    return any(isolates(data, source) for source in data.sources)
