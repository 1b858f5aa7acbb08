"""A link shared by many flows. Each flow gets its fair share, up to the limit of its other end.

Flows with the same limit have the same rate, so one number serves all of them: the bytes that each
of them has received. The cost of an event depends on the number of limits, not of flows.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

_CRUMB_BYTES = 1e-3
"""Rounding error in the bytes of a finished flow."""


class Flow:
    """A transfer of `size` bytes to or from each of `count` equal clusters.

    Args:
        limit: bytes/s of one of them at its own end.
        done: called when the transfer is complete.
    """

    __slots__ = ("count", "done", "end", "is_over", "limit")

    def __init__(self, limit: float, count: int, done: Callable[[], None]) -> None:
        self.limit, self.count, self.done = limit, count, done
        self.end = 0.0
        self.is_over = False


@dataclass(slots=True)
class _Lane:
    # Flows of one limit. `got`: bytes that each flow would have by now if it had been active from
    # the start.
    rate: float = 0.0
    got: float = 0.0
    flows: int = 0
    ends: list[tuple[float, int, Flow]] = field(default_factory=list)


class Line:
    """One direction of a link.

    Args:
        bytes_per_s: rate of the whole link. `math.inf`: only the other ends limit the rate.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.total_bytes = 0.0
        """Bytes of all flows since the start."""
        self.busy_s = 0.0
        """Total time during which the link was full, in seconds."""
        self._at = 0.0
        self._used = 0.0
        self._lanes: dict[float, _Lane] = {}
        self._numbers = itertools.count()

    def add(self, now: float, size: float, flow: Flow) -> None:
        """Start a flow of `size` bytes."""
        self._settle(now)
        lane = self._lanes.setdefault(flow.limit, _Lane())
        flow.end, flow.is_over = lane.got + size, False
        heapq.heappush(lane.ends, (flow.end, next(self._numbers), flow))
        lane.flows += flow.count
        self.total_bytes += size * flow.count
        self._share()

    def remove(self, now: float, flow: Flow) -> float:
        """Stop a flow early. Returns the bytes that are left."""
        self._settle(now)
        lane = self._lanes[flow.limit]
        left = max(0.0, flow.end - lane.got)
        flow.is_over = True
        lane.flows -= flow.count
        self.total_bytes -= left * flow.count
        self._share()
        return left

    def take_one(self, now: float, flow: Flow, done: Callable[[], None]) -> Flow:
        """Separate one cluster's transfer from a flow, with its progress, as a new flow."""
        self._settle(now)
        one = Flow(flow.limit, 1, done)
        one.end = flow.end
        flow.count -= 1
        lane = self._lanes[flow.limit]
        heapq.heappush(lane.ends, (one.end, next(self._numbers), one))
        return one

    def next_end(self) -> float:
        """End of the next flow, if the flows do not change before. `math.inf`: no flows."""
        found = math.inf
        for lane in self._lanes.values():
            while lane.ends and lane.ends[0][2].is_over:
                heapq.heappop(lane.ends)
            if lane.ends and lane.rate > 0:
                left = max(0.0, lane.ends[0][0] - lane.got)
                found = min(found, self._at + left / lane.rate)
        return found

    def finished(self, now: float) -> list[Flow]:
        """Remove and return the flows that are complete by now."""
        self._settle(now)
        found = []
        for limit, lane in list(self._lanes.items()):
            crumb = _CRUMB_BYTES + 1e-12 * lane.got
            while lane.ends and (lane.ends[0][2].is_over or lane.ends[0][0] <= lane.got + crumb):
                flow = heapq.heappop(lane.ends)[2]
                if not flow.is_over:
                    flow.is_over = True
                    lane.flows -= flow.count
                    found.append(flow)
            if not lane.ends:
                del self._lanes[limit]
        self._share()
        return found

    def _settle(self, now: float) -> None:
        passed = now - self._at
        if passed > 0:
            if self._used >= self.bytes_per_s * (1 - 1e-9):
                self.busy_s += passed
            for lane in self._lanes.values():
                lane.got += lane.rate * passed
        self._at = now

    def _share(self) -> None:
        # Max-min fair: lanes with a limit below the fair share get their limit, and the others
        # share the rest.
        left, flows = self.bytes_per_s, sum(lane.flows for lane in self._lanes.values())
        self._used = 0.0
        for limit, lane in sorted(self._lanes.items()):
            fair = left / flows if flows else math.inf
            lane.rate = min(limit, fair)
            self._used += lane.rate * lane.flows
            left -= lane.rate * lane.flows
            flows -= lane.flows
