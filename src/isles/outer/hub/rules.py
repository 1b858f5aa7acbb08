"""Rules of a run: its settings, outliers among contributions, and diverged members."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from isles.outer.messages import MOST_CLUSTERS

_ENOUGH_NORMS = 4
_MOST_TIMES = 1000
"""Limit of the tokens that count for a member, as a multiple of the usual tokens of the others."""
_OWN_ROUNDS = 3
"""Rounds after which a cluster's own earlier tokens raise its limit."""
_HEAVY = 0.9

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]

FINISHED = "over"
"""Kind of the refusal of a cluster that has nothing left to train."""
FINISHED_WHAT = "the other clusters have finished this run"
FINISHED_FIX = (
    "the run's model is theirs. For a new run, set another name (name=…), or use another hub or "
    "outer.url. To train longer, resume all clusters from their run directories with a larger "
    "training.max_steps"
)

_STATUS = {"token": 401, "unknown": 404, "no_state": 404, "no_run_file": 404, "no_file": 404}
_STATUS |= dict.fromkeys(("malformed", "hash", "refused"), 422)
_STATUS |= {"too_large": 413, "encoded": 415, "gone": 410, "busy": 429}


class Refusal(Exception):
    """A refused request.

    Args:
        kind: one word that the client acts on.
        what: the problem, with the value.
        fix: what to do about it.
    """

    def __init__(self, kind: str, what: str, fix: str = "") -> None:
        super().__init__(what)
        self.kind, self.what, self.fix = kind, what, fix
        self.status = _STATUS.get(kind, 409)
        """HTTP status."""


class Settings(BaseModel):
    """Settings of one run; the same for all clusters."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    wait: Literal["all", "time_boxed", "quorum"] = "all"
    """all: wait for every living cluster. time_boxed: close `time_box_s` after the first
    contribution, without the missing ones. quorum: close `grace_s` after the `quorum`-th
    contribution. Both times start when the previous round is decided, or later: see `Rounds`."""
    min_clusters: Annotated[int, Field(ge=1)] = 1
    """Minimum number of contributions to an outer step."""
    gather: Annotated[int, Field(ge=1)] = 1
    """Number of clusters that start together: until they have joined, no round is closed for
    `gather_s` after the first join, nor after a restart."""
    gather_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 60.0
    max_clusters: Annotated[int, Field(ge=1, le=MOST_CLUSTERS)] = 64
    time_box_s: Seconds = 120.0
    quorum: Annotated[int, Field(ge=1)] = 2
    grace_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 30.0
    dead_after_s: Seconds = 10.0
    """Seconds without a heartbeat after which a cluster is dropped."""
    still_after_s: Seconds = 900.0
    """Seconds without an inner step after which rounds no longer wait for a living cluster."""
    outlier: Annotated[float, Field(gt=1, allow_inf_nan=False)] = 10.0
    """A contribution is refused if its norm is more than this multiple of the median of earlier
    ones."""
    keep_averages: Annotated[int, Field(ge=1)] = 8
    """Number of averages that stay on the disk for clusters that missed them."""
    open_rounds: Annotated[int, Field(ge=1)] = 8
    """Number of outer steps, from the next to be committed, that accept contributions."""
    source_s: Seconds = 60.0
    """Seconds without data after which another state source is chosen."""


def outliers(
    factor: float,
    history: Sequence[tuple[int, float, int]],
    contributions: Mapping[int, tuple[float, int]],
    num_living: int,
    *,
    may_be_common: bool,
) -> dict[int, str]:
    """Contributions whose norm is far above the usual, with the reason.

    A cluster that trained on more tokens, by its own claim, may have a proportionally larger norm,
    up to `factor` times; fewer tokens never count against it; see `tempered`. If all norms, or the
    norms of most living members, are above the limit, the cause is common, and these norms are
    compared with each other.

    Args:
        factor: the limit, as a multiple of the usual norm.
        history: see `tempered`.
        contributions: norm and tokens of each member's contribution.
        num_living: number of living members.
        may_be_common: whether the members of this round can show a common cause.
    """
    found = _above(factor, _usual(history, contributions), contributions)
    is_most = len(found) > 1 and 2 * len(found) > max(num_living, len(contributions))
    if found and (is_most or (may_be_common and len(found) == len(contributions))):
        most = {member: contributions[member] for member in found}
        norms, tokens = zip(*most.values(), strict=True)
        return _above(factor, (statistics.median_low(norms), statistics.median_low(tokens)), most)
    return found


def _above(
    factor: float, usual: tuple[float, float], contributions: Mapping[int, tuple[float, int]]
) -> dict[int, str]:
    found, (usual_norm, usual_tokens) = {}, usual
    for member, (norm, tokens) in contributions.items():
        more = min(max(1.0, tokens / usual_tokens), factor)
        limit = factor * usual_norm * more or math.inf
        if norm > limit:
            found[member] = (
                f"its norm {norm:.4g} is above {limit:.4g}, {factor:g} times the usual norm "
                f"({usual_norm:.4g} for {usual_tokens:.0f} tokens)"
            )
    return found


def tempered(
    factor: float,
    history: Sequence[tuple[int, float, int]],
    contributions: Mapping[int, tuple[float, int]],
) -> dict[int, int]:
    """Reduced token counts for contributions that would pull an average too far.

    A contribution pulls with its norm times its tokens. That is at most `factor` times the usual
    norm times the usual tokens of the others. A larger cluster reaches its full pull step by step,
    as in `counted_tokens`, but not with a norm above `factor` times the usual. So k liars among n
    clusters make the first averages at most `1 + factor * k / (n - k)` times as large as usual.
    Later averages are at most `factor` times as large, because a larger norm gets no weight from
    earlier rounds.

    Args:
        history: member, norm and counted tokens of earlier contributions, newest first.
        factor, contributions: see `outliers`; of contributions that are accepted.
    """
    found, (usual, _) = dict[int, int](), _usual(history, contributions)
    bases = _bases({n: tokens for n, (_, tokens) in contributions.items()}, history)
    for member, (norm, tokens) in contributions.items():
        if not norm > usual > 0 or member not in bases:
            continue
        of_others, own = bases[member]
        excess = norm / usual
        base = of_others if excess > factor else max(of_others, own)
        if tokens > (most := factor * base / excess):
            found[member] = max(1, int(most))
    return found


def _usual(
    history: Sequence[tuple[int, float, int]], contributions: Mapping[int, tuple[float, int]]
) -> tuple[float, float]:
    # The usual norm and tokens. Each member counts once, however long it was alone. Of two values
    # in
    # the middle, use the larger: half of the members cannot make the norms of the others outliers.
    # Without a history, the contributions of the round are compared with each other.
    earlier: dict[int, list[tuple[float, int]]] = {}
    for member, norm, tokens in history:
        earlier.setdefault(member, []).append((norm, tokens))
    if len(history) < _ENOUGH_NORMS:
        earlier = {member: [both] for member, both in contributions.items()}
    if not earlier:
        return 0.0, 1.0
    norms = [statistics.median(norm for norm, _ in its) for its in earlier.values()]
    tokens_each = [statistics.median(tokens for _, tokens in its) for its in earlier.values()]
    return statistics.median_high(norms), statistics.median_high(tokens_each)


def of_members(
    history: Sequence[tuple[int, float, int]], members: Set[int]
) -> Sequence[tuple[int, float, int]]:
    """The history of these members, or the whole history if theirs is too short.

    A cluster that rejoins repeatedly under new names would count as many members otherwise.
    """
    own = [each for each in history if each[0] in members]
    return own if len(own) >= _ENOUGH_NORMS else history


def counted_tokens(
    contributions: Mapping[int, int],
    history: Sequence[tuple[int, float, int]],
    factor: float,
    most: float = math.inf,
) -> dict[int, int]:
    """The tokens that count for each member: its claim, within bounds.

    A claim counts up to `factor` times the usual tokens of the others. A larger cluster reaches its
    full weight in steps of `factor` times its own tokens of earlier rounds.

    Args:
        contributions: tokens that each member claims for a round.
        history: see `tempered`.
        factor: see above.
        most: tokens of all samples that were ever leased.
    """
    bases, found = _bases(contributions, history), {}
    for member, tokens in contributions.items():
        limit = most
        if member in bases:
            of_others, own = bases[member]
            limit = min(most, factor * max(of_others, own), _MOST_TIMES * of_others)
        found[member] = int(max(1, min(tokens, limit)))
    return found


def _bases(
    contributions: Mapping[int, int], history: Sequence[tuple[int, float, int]]
) -> dict[int, tuple[float, float]]:
    # By member, unless it is alone: the usual tokens of the others, and its own of earlier rounds.
    earlier: dict[int, list[int]] = {}
    for member, _, tokens in history:
        earlier.setdefault(member, []).append(tokens)
    # Of two values in the middle, use the lower: one liar must not justify another.
    usual = {member: statistics.median_low(all_its) for member, all_its in earlier.items()}
    usual = {**contributions, **usual}
    found: dict[int, tuple[float, float]] = {}
    for member in contributions:
        if others := [n for other, n in usual.items() if other != member]:
            own = earlier.get(member, [])[:_OWN_ROUNDS]
            last = statistics.median_low(own) if len(own) == _OWN_ROUNDS else 0
            found[member] = statistics.median_low(others), last
    return found


def heavy(weights: Mapping[str, int]) -> tuple[list[str], float] | None:
    """The fewest clusters that outweigh all others of a round together, and their share.

    None if these are more than half of the clusters.
    """
    total, names, share = sum(weights.values()), list[str](), 0
    for name in sorted(weights, key=lambda name: (-weights[name], name)):
        if share > _HEAVY * total:
            break
        names.append(name)
        share += weights[name]
    # The larger of two clusters is half of them.
    return (names, share / total) if names and 2 * len(names) <= len(weights) else None


def may_judge(reports: Mapping[int, str], living: Set[int], had_part: Set[int]) -> bool:
    """True if enough members have reported to decide which weights are right after an outer step.

    The first reports are not enough, since a liar's may be among them. A majority decides. Without
    a majority, all living members must report, or all living members of the average if these are
    at least half.

    Args:
        reports: digest of the outer parameters that each member has reported. The digest is
            empty if the member has reported several, because none of them counts then.
        living: members that report sooner or later.
        had_part: members of the average.
    """
    holders = Counter(digest for digest in reports.values() if digest)
    if not holders:
        return False
    voters = living | reports.keys()
    if 2 * max(holders.values()) > len(voters):
        return True
    had_part = had_part & living
    has_all_parts = reports.keys() >= had_part and 2 * len(had_part) >= len(voters)
    return reports.keys() >= living or has_all_parts


def divergence(reports: Mapping[int, str]) -> tuple[str, list[int]]:
    """The right digest after an outer step, held by most members, and the members with another one.

    If several digests have equally many members, the member that joined first is right: its number
    is the lowest.

    Args:
        reports: see `may_judge`; at least one counts.
    """
    members, holders = sorted(reports), Counter(reports.values())
    digests = [reports[member] for member in members if reports[member]]
    right = max(digests, key=holders.__getitem__)  # the first one
    return right, [member for member in members if reports[member] != right]
