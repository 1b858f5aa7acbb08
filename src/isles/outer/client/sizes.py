"""Check of announced file sizes from a hub or a bucket, against this run's own layout."""

from __future__ import annotations

from isles.facts.units import format_bytes
from isles.outer.hub.files import average_bytes, state_bytes
from isles.outer.messages import MOST_CLUSTERS, Join, RoundAnswer, StateAnswer


def average_fault(join: Join, answer: RoundAnswer) -> str:
    """Why an average must not be fetched; empty if it may be.

    Args:
        join: this cluster's join request.
    """
    outer_step, clusters = answer.outer_step, len(answer.weights)
    if not 0 < clusters <= MOST_CLUSTERS:
        return f"the average of outer step {outer_step} is announced for {clusters} clusters"
    due = average_bytes(join.codec, join.pieces[outer_step % len(join.pieces)], clusters)
    if answer.size_bytes == due:
        return ""
    return (
        f"the average of outer step {outer_step} is announced with {answer.size_bytes} bytes, but "
        f"an average of {clusters} clusters has {due} in this run"
    )


def state_fault(join: Join, answer: StateAnswer) -> str:
    """Why a state must not be fetched; like `average_fault`."""
    files, most = answer.files, state_bytes(join.pieces)
    size_bytes, names = sum(file.size_bytes for file in files), {file.name for file in files}
    if len(files) == len(names) == len(join.pieces) and size_bytes <= most:
        return ""
    return (
        f"the state of {answer.source} is announced with {len(files)} files ({len(names)} names) "
        f"and {format_bytes(size_bytes)}, but a state of this run has {len(join.pieces)} and at "
        "most "
        f"{format_bytes(most)}"
    )
