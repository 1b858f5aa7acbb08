"""Which rank is behind, told from where all of them stand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

STAGES = ("asking", "data loading", "forward and backward", "optimizer step", "agreeing")
"""The parts of a step, in their order."""

_LISTED = 3


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a rank stands.

    Args:
        step: which it is at.
        stage: a part of the step, or another phase: evaluating, saving.
        at: the place in its code; empty: unknown.
        waits_in: the collective operation that it waits in; empty: in none, as far as is known.
        silent_s: how long nothing has been heard of it; 0: it lives.
    """

    step: int
    stage: str
    at: str = ""
    waits_in: str = ""
    silent_s: float = 0.0

    @property
    def order(self) -> tuple[int, int]:
        """Smaller: further behind."""
        return self.step, STAGES.index(self.stage) if self.stage in STAGES else len(STAGES)


@dataclass(frozen=True, slots=True)
class Stall:
    """What holds up a step.

    Args:
        culprits: the ranks that the others wait for; empty: it cannot be told.
        text: it in words, each rank with its host.
    """

    culprits: tuple[int, ...]
    text: str


def find_stall(
    ranks: Mapping[int, Standing], hosts: Sequence[str], unknown: Sequence[int] = ()
) -> Stall:
    """Who holds up the others.

    Args:
        ranks: where each stands.
        hosts: of all ranks.
        unknown: ranks of which nothing was ever heard.
    """
    silent = [rank for rank, standing in ranks.items() if standing.silent_s]
    if silent or unknown:
        words = [_silent_words(rank, ranks[rank], hosts) for rank in silent]
        words += [f"{_name(rank, hosts)} was never heard of" for rank in unknown]
        return _stall((*silent, *unknown), words)
    first = min(standing.order for standing in ranks.values())
    last = max(standing.order for standing in ranks.values())
    behind = [rank for rank, standing in ranks.items() if standing.order == first]
    busy = [rank for rank in behind if not ranks[rank].waits_in]
    if first == last and not busy:
        waits = sorted({standing.waits_in for standing in ranks.values()})
        return Stall(
            (),
            f"all ranks wait for one another, in {', '.join(waits)}: look at the network between "
            "their hosts, and at the GPUs",
        )
    culprits = busy or behind
    if len(ranks) == 1:
        rank = culprits[0]
        return Stall((rank,), f"it is {_doing(ranks[rank])}")
    if len(culprits) == len(ranks):
        return Stall((), f"all ranks are busy; {_name(0, hosts)} is {_doing(ranks[0])}")
    words = [f"{_name(r, hosts)} is behind: {_doing(ranks[r])}" for r in culprits]
    return _stall(tuple(culprits), words)


def _stall(culprits: tuple[int, ...], words: list[str]) -> Stall:
    more = f"; and {len(words) - _LISTED} more" if len(words) > _LISTED else ""
    return Stall(culprits, "; ".join(words[:_LISTED]) + more)


def _name(rank: int, hosts: Sequence[str]) -> str:
    return f"rank {rank} on {hosts[rank]}"


def _doing(standing: Standing) -> str:
    words = f"in {standing.stage}" if standing.stage in STAGES else standing.stage
    if standing.waits_in:
        words += f", waiting in {standing.waits_in}"
    return f"{words}, {standing.at}" if standing.at else words


def _silent_words(rank: int, standing: Standing, hosts: Sequence[str]) -> str:
    last = f" (last seen in {standing.stage} of step {standing.step})" if standing.stage else ""
    return (
        f"{_name(rank, hosts)} has not been heard of for {standing.silent_s:.0f} s{last}: it is "
        "frozen, or its machine or network is down"
    )
