"""Whether files that a hub or a bucket announces have the sizes of this run, by its own layout."""

from __future__ import annotations

from isles.facts.units import format_bytes
from isles.outer.hub.files import average_bytes, state_bytes
from isles.outer.messages import MOST_CLUSTERS, Join, RoundAnswer, StateAnswer


def average_fault(join: Join, answer: RoundAnswer) -> str:
    """Why an average must not be fetched; empty if it may be.

    Args:
        join: what this cluster has joined with.
    """
    outer_step, clusters = answer.outer_step, len(answer.weights)
    if not 0 < clusters <= MOST_CLUSTERS:
        return f"the average of outer step {outer_step} is announced as one of {clusters} clusters"
    due = average_bytes(join.codec, join.pieces[outer_step % len(join.pieces)], clusters)
    if answer.size_bytes == due:
        return ""
    return (
        f"the average of outer step {outer_step} is announced with {answer.size_bytes} bytes; an "
        f"average of {clusters} clusters has {due} here"
    )


def state_fault(join: Join, answer: StateAnswer) -> str:
    """Why a state must not be fetched; as `average_fault`."""
    files, most = answer.files, state_bytes(join.pieces)
    size_bytes, names = sum(file.size_bytes for file in files), {file.name for file in files}
    if len(files) == len(names) == len(join.pieces) and size_bytes <= most:
        return ""
    return (
        f"the state of {answer.source} is announced with {len(files)} files ({len(names)} names) "
        f"and {format_bytes(size_bytes)}; one of this run has {len(join.pieces)} and at most "
        f"{format_bytes(most)}"
    )
