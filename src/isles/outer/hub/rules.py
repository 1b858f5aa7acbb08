"""When a turn is closed, which contributions are outliers, who has diverged: pure functions."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from isles.outer.hub.settings import Settings

_ENOUGH_NORMS = 4


@dataclass(frozen=True, slots=True)
class TurnView:
    """A turn that collects, as the rule sees it. Members are numbers."""

    expected: frozenset[int]
    """Who lives and is up to date."""
    complete: frozenset[int]
    refused: frozenset[int]
    first_at: float | None
    """When the first contribution was complete (the clock's time)."""
    quorum_at: float | None
    """When so many were complete as make a quorum."""
    least: int
    """A turn has so many contributions at least."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What the rule says now."""

    is_closed: bool
    """Also where all who are waited for were refused: the turn then changes nothing."""
    due_at: float | None
    """When it will be closed without the missing; None: not settled by time, or not yet."""
    waits_for: frozenset[int]


def judge_turn(settings: Settings, view: TurnView, now: float) -> Decision:
    """Whether a turn is closed now."""
    answered = view.complete | view.refused
    missing = view.expected - answered
    due_at = _due_at(settings, view)
    if not answered or len(answered) < view.least:
        return Decision(False, due_at, missing)
    is_due = due_at is not None and now >= due_at
    return Decision(not missing or is_due, due_at, missing)


def _due_at(settings: Settings, view: TurnView) -> float | None:
    match settings.wait:
        case "all":
            return None
        case "time_boxed":
            return None if view.first_at is None else view.first_at + settings.time_box_s
        case "quorum":
            return None if view.quorum_at is None else view.quorum_at + settings.grace_s


def outliers(
    factor: float,
    history: Sequence[tuple[float, int]],
    contributions: Mapping[int, tuple[float, int]],
) -> dict[int, str]:
    """Contributions whose norm is far above what was usual, and by how much.

    A norm may be larger in proportion where its cluster trained on more tokens; fewer tokens
    never count against it. Where all are far above, none is at fault: what has changed is common.
    Before there is a history, each is compared with the others of the turn, if there are several.

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
        limit = factor * usual * max(1.0, tokens / usual_tokens) or math.inf
        if norm > limit:
            found[member] = (
                f"its norm {norm:.4g} is above {limit:.4g}, {factor:g} times what was usual "
                f"({usual:.4g} for {usual_tokens:.0f} tokens)"
            )
    return found if len(found) < len(contributions) else {}


def divergence(reports: Mapping[int, str]) -> tuple[str, list[int]]:
    """What most hold after a turn, and who holds something else.

    Where as many hold one thing as another, the member that joined first is right: its number is
    the lowest.

    Args:
        reports: digest of the outer parameters of each member.
    """
    holders: dict[str, list[int]] = {}
    for member, outer_params in reports.items():
        holders.setdefault(outer_params, []).append(member)
    right = min(
        holders, key=lambda outer_params: (-len(holders[outer_params]), min(holders[outer_params]))
    )
    return right, sorted(member for member in reports if reports[member] != right)
