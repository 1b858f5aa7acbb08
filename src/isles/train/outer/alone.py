"""The line of a cluster that nobody joins: its contribution is the average."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from isles.outer.average import combine
from isles.outer.client.events import Claimed, Committed, Ended, Event, Joined, Progress, Sent
from isles.outer.client.link import Link
from isles.outer.layout import Layout


class Alone:
    """Stands where `Link` would: every turn is decided at once, samples come in their order.

    Args:
        layout: of the run.
        name: of the cluster.
        spool: folder for the contributions.
        version: turns that have been applied.
        next_sample: the first that was never dealt.
    """

    sent_bytes = received_bytes = pace = 0
    is_connected = True

    def __init__(
        self, layout: Layout, name: str, spool: Path, *, version: int, next_sample: int
    ) -> None:
        self._layout, self._name, self._spool = layout, name, spool
        self._next_sample = next_sample
        self._events: list[Event] = [Joined(standing="current", turn=version, from_turn=version)]
        self.members: tuple[str, ...] = (name,)
        spool.mkdir(mode=0o700, exist_ok=True)

    def contribution_path(self, turn: int) -> Path:
        """Where a contribution is to be written."""
        return self._spool / f"contribution-{turn:08d}"

    def state_paths(self) -> list[Path]:
        return []  # nobody asks for the state

    def contribute(self, sent: Sent) -> None:
        """Average a contribution with no other."""
        path, average = self.contribution_path(sent.turn), self._average(sent.turn)
        text = self._layout.codec.text
        size = 0
        with path.open("rb") as source, average.open("wb") as goal:
            for count in self._layout.piece_counts(sent.turn % len(self._layout.fragments)):
                data = source.read(self._layout.codec.size(count))
                size += goal.write(combine(text, count, [(data, 1.0)]))
        path.unlink()
        weights = {self._name: sent.tokens}
        self._events.append(
            Committed(
                turn=sent.turn,
                path=average,
                is_in=True,
                weights=weights,
                refused={},
                size_bytes=size,
            )
        )

    def _average(self, turn: int) -> Path:
        return self._spool / f"average-{turn:08d}"

    def applied(self, turn: int, digest: str) -> None:
        """An average is needed no more."""
        self._average(turn).unlink(missing_ok=True)

    def claim(self, num_samples: int) -> None:
        """Deal samples."""
        start, self._next_sample = self._next_sample, self._next_sample + num_samples
        self._events.append(Claimed(samples=((start, self._next_sample),)))

    def give_state(self, version: int, paths: Sequence[Path], outer_params: Sequence[str]) -> None:
        raise AssertionError("nobody asks for the state")

    def adopted(self, version: int, outer_params: Sequence[str]) -> None:
        raise AssertionError("nobody gives a state")

    def obeyed(self) -> None:
        raise AssertionError("nobody orders anything")

    def keep_since(self, version: int) -> None:
        pass  # an average is this cluster's own contribution: its steps are done again

    def progress(self, progress: Progress) -> None:
        """Nobody has a turn that is still to come."""
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
        pass


Line = Link | Alone
