"""The line of a cluster that nobody joins: its contribution is the average."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from isles.outer.average import combine
from isles.outer.layout import Layout
from isles.outer.link.messages import Claimed, Committed, Ended, Event, Interval, Joined, Progress


class OuterLine(Protocol):
    """What rank 0 needs of a line to the other clusters; `isles.outer.link.link.Link` is one."""

    members: tuple[str, ...]
    is_connected: bool
    pace: int
    sent_bytes: int
    received_bytes: int

    def contribution_path(self, turn: int) -> Path: ...

    def state_paths(self) -> list[Path]: ...

    def contribute(
        self,
        turn: int,
        path: Path,
        *,
        tokens: int,
        samples: Sequence[Interval],
        inner_steps: int,
        norm: float,
    ) -> None: ...

    def applied(self, turn: int, digest: str) -> None: ...

    def claim(self, num_samples: int) -> int: ...

    def give_state(
        self, version: int, paths: Sequence[Path], outer_params: Sequence[str]
    ) -> None: ...

    def adopted(self, version: int, outer_params: Sequence[str]) -> None: ...

    def keep_since(self, version: int) -> None: ...

    def obeyed(self) -> None: ...

    def progress(self, progress: Progress) -> None: ...

    def poll(self) -> list[Event]: ...

    def wait(self, timeout_s: float) -> bool: ...

    def close(
        self, *, leaves: bool = True, has_finished: bool = False, timeout_s: float = 10.0
    ) -> None: ...


class Alone:
    """Every turn is decided at once, with one contribution; samples are dealt in their order.

    Args:
        layout: of the run.
        name: of the cluster.
        spool: folder for the contributions.
        version: turns that have been applied.
        next_sample: the first that was never dealt.
    """

    def __init__(
        self, layout: Layout, name: str, spool: Path, *, version: int, next_sample: int
    ) -> None:
        self._layout, self._name, self._spool = layout, name, spool
        self._next_sample = next_sample
        self._claims = 0
        self._events: list[Event] = [Joined(standing="current", turn=version, from_turn=version)]
        self.members: tuple[str, ...] = (name,)
        self.is_connected = True
        self.pace = self.sent_bytes = self.received_bytes = 0
        spool.mkdir(mode=0o700, exist_ok=True)

    def contribution_path(self, turn: int) -> Path:
        """Where a contribution is to be written."""
        return self._spool / f"contribution-{turn:08d}"

    def state_paths(self) -> list[Path]:
        """Nobody asks for the state."""
        return []

    def contribute(
        self,
        turn: int,
        path: Path,
        *,
        tokens: int,
        samples: Sequence[Interval],
        inner_steps: int,
        norm: float,
    ) -> None:
        """Average a contribution with no other."""
        average = self._spool / f"average-{turn:08d}"
        text = self._layout.codec.text
        size = 0
        with path.open("rb") as source, average.open("wb") as goal:
            for count in self._layout.piece_counts(turn % len(self._layout.fragments)):
                data = source.read(self._layout.codec.size(count))
                size += goal.write(combine(text, count, [(data, 1.0)]))
        path.unlink()
        self._events.append(
            Committed(
                turn=turn,
                path=average,
                digest="",
                is_in=True,
                weights={self._name: tokens},
                refused={},
                size_bytes=size,
            )
        )

    def applied(self, turn: int, digest: str) -> None:
        """An average is needed no more."""
        (self._spool / f"average-{turn:08d}").unlink(missing_ok=True)

    def claim(self, num_samples: int) -> int:
        """Deal samples."""
        start, self._next_sample = self._next_sample, self._next_sample + num_samples
        self._claims += 1
        self._events.append(Claimed(number=self._claims, samples=((start, self._next_sample),)))
        return self._claims

    def give_state(self, version: int, paths: Sequence[Path], outer_params: Sequence[str]) -> None:
        """Nobody asks for the state."""

    def adopted(self, version: int, outer_params: Sequence[str]) -> None:
        """Nobody gives a state."""

    def keep_since(self, version: int) -> None:
        """An average is this cluster's own contribution: its steps are done again."""

    def obeyed(self) -> None:
        """Nobody orders anything."""

    def progress(self, progress: Progress) -> None:
        """Nobody is told; nobody has a turn that is still to come."""
        if progress.ends:
            self._events.append(Ended(turns=0))

    def poll(self) -> list[Event]:
        """What has happened since the last call."""
        found, self._events = self._events, []
        return found

    def wait(self, timeout_s: float) -> bool:
        """Whether `poll` has something."""
        return bool(self._events)

    def close(
        self, *, leaves: bool = True, has_finished: bool = False, timeout_s: float = 10.0
    ) -> None:
        """Nobody is told."""
