"""The rules of a run: its settings, which contributions are outliers, who has diverged."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

_ENOUGH_NORMS = 4
_MOST_TIMES = 1000
"""A contribution counts at most so many times the usual tokens of the others."""
_HEAVY = 0.9

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


_STATUS = {"token": 401, "unknown": 404, "no_state": 404, "no_run_file": 404, "no_file": 404}
_STATUS |= dict.fromkeys(("malformed", "hash", "refused"), 422)
_STATUS |= {"too_large": 413, "encoded": 415, "gone": 410, "busy": 429}


class Refusal(Exception):
    """A request that is refused.

    Args:
        kind: one word that the client acts on.
        what: what is wrong, with the value.
        fix: what to do about it.
    """

    def __init__(self, kind: str, what: str, fix: str = "") -> None:
        super().__init__(what)
        self.kind, self.what, self.fix = kind, what, fix
        self.status = _STATUS.get(kind, 409)
        """Of HTTP."""


class Settings(BaseModel):
    """The rules of one run; the same for all clusters."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    wait: Literal["all", "time_boxed", "quorum"] = "all"
    """all: every living cluster. time_boxed: `time_box_s` after the first contribution without
    the missing. quorum: `grace_s` after the `quorum`-th contribution."""
    min_clusters: Annotated[int, Field(ge=1)] = 1
    """An outer step has at least so many contributions."""
    gather: Annotated[int, Field(ge=1)] = 1
    """So many clusters begin together: before that, no round is closed for `gather_s` after the
    first has come, nor again after a restart."""
    gather_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 60.0
    max_clusters: Annotated[int, Field(ge=1, le=4096)] = 64
    time_box_s: Seconds = 120.0
    quorum: Annotated[int, Field(ge=1)] = 2
    grace_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 30.0
    dead_after_s: Seconds = 10.0
    """A cluster not heard for so long is dropped."""
    still_after_s: Seconds = 900.0
    """A round no longer waits for a cluster that lives, but has done no inner step for so long."""
    outlier: Annotated[float, Field(gt=1, allow_inf_nan=False)] = 10.0
    """A contribution is refused whose norm is so many times the median of those before it."""
    keep_averages: Annotated[int, Field(ge=1)] = 8
    """So many averages stay on the disk for clusters that missed them."""
    open_rounds: Annotated[int, Field(ge=1)] = 8
    """Contributions are taken for so many outer steps from the next one to be committed on."""
    source_s: Seconds = 60.0
    """Another state source is asked where one has sent nothing of its state for so long."""


def outliers(
    factor: float,
    history: Sequence[tuple[float, int]],
    contributions: Mapping[int, tuple[float, int]],
) -> dict[int, str]:
    """Contributions whose norm is far above what was usual, and by how much.

    A norm may be larger in proportion where its cluster trained on more tokens, by its own word,
    and up to `factor` times; fewer tokens never count against it. Where all are far above, none is
    at fault: what has changed is common.
    Before there is a history, each is compared with the others of the round, if there are several.

    Args:
        factor: how far is too far.
        history: norm and tokens of accepted contributions to the same fragment.
        contributions: norm and tokens of each member's.
    """
    has_history = len(history) >= _ENOUGH_NORMS
    found = {}
    for member, (norm, tokens) in contributions.items():
        others = [both for other, both in contributions.items() if other != member]
        if not has_history and len(others) < 2:
            continue
        known = history if has_history else others
        usual = statistics.median(norm for norm, _ in known)
        usual_tokens = statistics.median(tokens for _, tokens in known)
        more = min(max(1.0, tokens / usual_tokens), factor)
        limit = factor * usual * more or math.inf
        if norm > limit:
            found[member] = (
                f"its norm {norm:.4g} is above {limit:.4g}, {factor:g} times what was usual "
                f"({usual:.4g} for {usual_tokens:.0f} tokens)"
            )
    return found if len(found) < len(contributions) else {}


def counted_tokens(
    contributions: Mapping[int, int], history: Sequence[tuple[int, int]], most: float = math.inf
) -> dict[int, int]:
    """The tokens that count for each member: its claim, within bounds.

    A cluster may be a thousand times as large as the others are; who claims more counts that much.

    Args:
        contributions: tokens that each member claims for a round.
        history: members and tokens of earlier rounds.
        most: tokens of all samples that were ever leased.
    """
    found = {}
    for member, tokens in contributions.items():
        others = [n for other, n in (*contributions.items(), *history) if other != member]
        limit = min(most, _MOST_TIMES * statistics.median(others) if others else math.inf)
        found[member] = int(max(1, min(tokens, limit)))
    return found


def heavy(weights: Mapping[str, int]) -> tuple[str, float] | None:
    """The cluster that outweighs all others of a round, and its share; None if no cluster does."""
    total = sum(weights.values())
    name = max(weights, key=weights.__getitem__, default="")
    if len(weights) < 2 or weights[name] <= _HEAVY * total:
        return None
    return name, weights[name] / total


def divergence(reports: Mapping[int, str]) -> tuple[str, list[int]]:
    """What most hold after an outer step, and who holds something else.

    Where as many hold one thing as another, the member that joined first is right: its number is
    the lowest.

    Args:
        reports: digest of the outer parameters of each member.
    """
    members, holders = sorted(reports), Counter(reports.values())
    right = max((reports[member] for member in members), key=holders.__getitem__)  # the first such
    return right, [member for member in members if reports[member] != right]
