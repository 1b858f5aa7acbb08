"""Search for better outer settings of the same fleet, by simulated goodput.

The search knows only time. benchmarks/HISTORY.md has the loss of quality by setting. So of
two settings with about the same goodput, the search prefers the setting that learns better: a
shorter round, a shorter delay and a finer codec. It does not vary `deadline`, as clusters train on
after a deadline, which has the same effect as a longer round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from isles.config.sections.outer import CodecConfig, CodecName
from isles.plan.simulate.capacity import without_chance, without_end
from isles.plan.simulate.engine import settled, simulate
from isles.plan.simulate.fleet import FleetConfig
from isles.plan.simulate.setting import SimulationSettings

CLOSE = 0.01
"""Settings whose goodput differs by less count as equal."""
_EVERY = (10, 20, 30, 50, 75, 100, 150, 200, 300, 500, 750, 1000, 1500, 2000)
_FRAGMENTS = (1, 2, 4, 8)
_DELAYS = (0, 1, 2, 5, 10, 20, 50, 100)
_CODECS: tuple[CodecName, ...] = ("none", "bf16", "int8", "int4", "topk")
_NEVER_S = 1e9
_ROUNDS = 12
"""Outer steps to simulate for each setting."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One tried setting.

    Args:
        key: key of the section outer with another value than in the run. Empty: none.
        goodput: goodput in the middle of a run without failures.
    """

    key: str
    value: str
    goodput: float
    is_best: bool = False


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Result of a search: trials by key, and the best settings together."""

    now: float
    trials: tuple[Trial, ...]
    together: str
    goodput: float


def search(fleet: FleetConfig, setting: SimulationSettings) -> SearchResult:
    """Try other values of `sync_every`, `fragments`, `delay` and `codec`, each alone, then all."""
    fleet, setting = without_chance(fleet), without_end(settled(fleet, setting))
    setting = replace(setting, deadline_s=_NEVER_S)

    def goodput(tried: SimulationSettings) -> float:
        rounds = max(_ROUNDS, 2 * tried.num_fragments)
        return simulate(fleet, tried, rounds=rounds, is_batched=True).goodput

    now = goodput(setting)
    most = setting.num_fragments if setting.num_fragments > max(_FRAGMENTS) else max(_FRAGMENTS)
    tables: list[tuple[str, list[tuple[str, SimulationSettings]]]] = [
        ("sync_every", [(str(n), _fit(setting, sync_every=n)) for n in _EVERY]),
        (
            "fragments",
            [(str(n), _fit(setting, num_fragments=n)) for n in _FRAGMENTS if n <= most],
        ),
        ("delay", [(str(n), setting.with_outer(delay=n)) for n in _delays(setting)]),
        ("codec", [(c, setting.with_outer(codec=CodecConfig(kind=c))) for c in _CODECS]),
    ]
    trials = []
    for key, values in tables:
        tried = [(value, goodput(own)) for value, own in values]
        best = max(found for _, found in tried)
        first = next(value for value, found in tried if found >= best - CLOSE)
        trials += [Trial(key, value, found, value == first) for value, found in tried]
    together, found = _together(setting, goodput)
    return SearchResult(now, tuple(trials), together, found)


def _fit(
    setting: SimulationSettings, *, sync_every: int | None = None, num_fragments: int | None = None
) -> SimulationSettings:
    # A delay must end before the next outer step.
    tried = setting.with_outer(sync_every=sync_every, num_fragments=num_fragments)
    apart = tried.sync_every / tried.num_fragments
    return tried if tried.delay < apart else tried.with_outer(delay=max(0, -(-int(apart) // 2) - 1))


def _delays(setting: SimulationSettings) -> Iterable[int]:
    apart = setting.sync_every / setting.num_fragments
    return [delay for delay in _DELAYS if delay < apart]


def _together(
    setting: SimulationSettings, goodput: Callable[[SimulationSettings], float]
) -> tuple[str, float]:
    # The shortest round with about the goodput of the longest; int8, as its loss is negligible.
    coded = setting.with_outer(codec=CodecConfig(kind="int8"))
    longest = coded.with_outer(sync_every=_EVERY[-1], num_fragments=4, delay=50)
    goal = goodput(longest) - CLOSE
    best: tuple[int, int, int] | None = None
    text, found = "", 0.0
    for fragments in (1, 2, 4):
        for part in (0, 4, 2):  # delay: none, a quarter, half of the steps between outer steps

            def tried(
                every: int, fragments: int = fragments, part: int = part
            ) -> tuple[SimulationSettings, int]:
                delay = every // fragments // part if part else 0
                own = coded.with_outer(sync_every=every, num_fragments=fragments, delay=delay)
                return own, delay

            low, high = 0, len(_EVERY)  # the first of `_EVERY` that is long enough
            while low < high:
                middle = (low + high) // 2
                if goodput(tried(_EVERY[middle])[0]) >= goal:
                    high = middle
                else:
                    low = middle + 1
            if low == len(_EVERY):
                continue
            own, delay = tried(_EVERY[low])
            if best is None or (_EVERY[low], delay, fragments) < best:
                best = _EVERY[low], delay, fragments
                text = (
                    f"sync_every: {_EVERY[low]}, fragments: {fragments}, delay: {delay}, "
                    "codec: int8"
                )
                found = goodput(own)
    return text, found
