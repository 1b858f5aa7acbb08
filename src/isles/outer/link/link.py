"""Rank 0's side of the line to the other clusters: never waits for the network, survives all."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from isles.outer.layout import Layout
from isles.outer.link.account import Account
from isles.outer.link.messages import (
    Alive,
    AppliedTurn,
    Begin,
    Command,
    Contribute,
    Event,
    GiveState,
    Interval,
    Joined,
    Leave,
    Member,
    Members,
    Note,
    Progress,
    Refused,
    RendezvousFound,
    RendezvousLost,
)
from isles.outer.link.process import SideProcess
from isles.outer.link.settings import LinkSettings
from isles.outer.spans import joined

log = logging.getLogger(__name__)

_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_HEALTHY_S = 20.0


def member_of(
    layout: Layout, *, name: str, member_id: str, identity: Mapping[str, str] | None = None
) -> Member:
    """What a cluster joins with.

    Args:
        layout: of the run.
        name: of the cluster.
        member_id: 32 hexadecimal digits (`secrets.token_hex(16)`), kept for the whole run.
        identity: what else must be equal on all clusters: outer settings, the model's name …
    """
    fragments = range(len(layout.fragments))
    return Member(
        name=name,
        member_id=member_id,
        identity={"layout": layout.digest, **(identity or {})},
        codec=layout.codec.text,
        pieces=[layout.piece_counts(fragment) for fragment in fragments],
    )


class Link:
    """Starts the side process, starts it again when it dies, and passes lines to and fro.

    To be used by one thread of rank 0. No method waits for the network, nor for the side process,
    save `wait` and `close`, which have deadlines.
    """

    def __init__(
        self,
        member: Member,
        settings: LinkSettings,
        join_file: Path,
        spool: Path,
        version: int,
        outer_params: Sequence[str],
        holding: Sequence[Interval],
        log_file: Path,
    ) -> None:
        self._member, self._settings = member, settings
        self._join_file, self._spool, self._log_file = join_file, spool, log_file
        self._account = Account(version, outer_params, holding)
        self._progress = Progress()
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._news = threading.Condition(self._lock)
        self._process: SideProcess | None = None
        self._is_closed = self._is_refused = False
        self._wake = threading.Event()
        self.members: tuple[str, ...] = ()
        """Who takes part now, this cluster too."""
        self.pace = 0
        """Inner steps that a round should have for the slowest link of all; 0: not known."""
        self.is_connected = False
        """Whether the rendezvous answers."""
        self.sent_bytes = self.received_bytes = 0
        """By this attempt's side processes, to and from other clusters and the rendezvous."""
        self._bytes_before = (0, 0)
        self._attendant = threading.Thread(target=self._attend, name="link", daemon=True)

    @classmethod
    def start(
        cls,
        member: Member,
        settings: LinkSettings,
        *,
        join_file: Path,
        spool: Path,
        version: int,
        outer_params: Sequence[str],
        holding: Sequence[Interval] = (),
        log_file: Path,
    ) -> Link:
        """Start the side process, which joins; the first event is `Joined`, later or never.

        Args:
            member: who this cluster is; see `member_of`.
            settings: how it reaches the others.
            join_file: holds the join line (mode 0600); it is read by the side process only, each
                time that it is started.
            spool: a folder of this cluster's own, kept over attempts; contributions and averages
                lie in it for a while.
            version: turns applied to the outer parameters (0, or what the checkpoint says).
            outer_params: the digest of each fragment's outer parameters (`Cluster.digest`).
            holding: samples claimed before this attempt that the cluster still means to train on,
                or has trained on since its last contribution that is in an average. What it has
                claimed and does not hold is dealt to others. From here on the link keeps account.
            log_file: what the side process says on stderr; added to.

        Returns:
            The link, at once.
        """
        spool.mkdir(mode=0o700, exist_ok=True)
        link = cls(member, settings, join_file, spool, version, outer_params, holding, log_file)
        link._attendant.start()
        return link

    # What rank 0 says.

    def contribution_path(self, turn: int) -> Path:
        """Where a contribution is to be written (`Cluster.encode`) before `contribute`."""
        return self._spool / f"contribution-{turn:08d}"

    def state_paths(self) -> list[Path]:
        """Where the state is to be written (`Cluster.export_state`) before `give_state`."""
        folder = self._spool / "given"
        return [folder / f"fragment-{i}.safetensors" for i in range(len(self._member.pieces))]

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
        """Bring a contribution into a turn; `Committed` tells what became of it.

        Args:
            turn: the one that this cluster is at: all before it are contributed to or missed.
            path: the file; from now on the link's, which removes it. It must not change.
            tokens: that the pseudo-gradient was trained on: its weight, at least 1.
            samples: trained on since the last contribution to any fragment, and those of earlier
                ones that were in no average (`Committed.is_in` was false).
            inner_steps: in it.
            norm: `Contribution.norm`.
        """
        command = Contribute(
            turn=turn,
            path=path,
            tokens=tokens,
            samples=tuple(joined(samples)),
            inner_steps=inner_steps,
            norm=norm,
        )
        with self._lock:
            self._account.contributions[turn] = command
            self._send(command)

    def applied(self, turn: int, digest: str) -> None:
        """An average was applied (also an empty one); its file is the link's again.

        Args:
            turn: of the average.
            digest: `Applied.digest`, of the fragment's outer parameters thereafter.
        """
        with self._lock:
            self._account.applied(turn, digest)
            self._send(AppliedTurn(turn=turn, digest=digest))

    def claim(self, num_samples: int) -> int:
        """Ask for samples; `Claimed` brings them. May be asked several times, ahead.

        Returns:
            The number that stands in the answer.
        """
        with self._lock:
            command = self._account.claim(num_samples)
            self._send(command)
            return command.number

    def give_state(self, version: int, paths: Sequence[Path], outer_params: Sequence[str]) -> None:
        """The answer to `Donate`: safetensors, one for each fragment; they must not change.

        Args:
            version: turns applied to all of them.
            paths: see `state_paths`.
            outer_params: digest of each fragment's outer parameters.
        """
        with self._lock:
            self._send(
                GiveState(version=version, outer_params=tuple(outer_params), paths=tuple(paths))
            )

    def adopted(self, version: int, outer_params: Sequence[str]) -> None:
        """The answer to `StateReady`: the state was imported; contributions under way are void.

        Args:
            version: turns applied to it.
            outer_params: `Cluster.digest` of each fragment.
        """
        with self._lock:
            self._send(self._account.adopted(version, outer_params))

    def keep_since(self, version: int) -> None:
        """The cluster may have to go on from a checkpoint with so many turns applied.

        Until this is called first it may be the one that it has been started from.
        """
        with self._lock:
            self._send(self._account.keep_since(version))

    def obeyed(self) -> None:
        """The answer to `Reset`: the weights are the outer parameters again."""
        with self._lock:
            self._send(self._account.obey())

    def progress(self, progress: Progress) -> None:
        """What the others are told of this cluster with the next sign of life. Costs nothing."""
        is_urgent = progress.ends and not self._progress.ends
        self._progress = progress
        if is_urgent:
            with self._lock:
                self._send(progress)

    # What rank 0 hears.

    def poll(self) -> list[Event]:
        """What has happened since the last call, in order; never waits."""
        found = []
        while not self._events.empty():
            found.append(self._events.get())
        return found

    def wait(self, timeout_s: float) -> bool:
        """Wait until `poll` has something; False: nothing within the time."""
        end = time.monotonic() + timeout_s
        with self._news:
            while self._events.empty():
                left_s = end - time.monotonic()
                if left_s <= 0:
                    return False
                self._news.wait(left_s)
        return True

    @property
    def side_pid(self) -> int | None:
        """The side process that runs now."""
        process = self._process
        return None if process is None else process.pid

    @property
    def holding(self) -> list[Interval]:
        """Samples of this cluster that no average has: to be kept in a checkpoint, for `start`."""
        with self._lock:
            return list(self._account.holding)

    def close(
        self, *, leaves: bool = True, has_finished: bool = False, timeout_s: float = 10.0
    ) -> None:
        """End the side process, within a time.

        Args:
            leaves: tell the rendezvous, so that nobody waits for this cluster; it may join again.
            has_finished: tell it that the training is over, too.
            timeout_s: for telling it.
        """
        with self._lock:
            self._is_closed = True
            process = self._process
            if leaves:
                self._send(Leave(has_finished=has_finished))
        self._wake.set()
        if process is not None:
            process.end(timeout_s if leaves and self.is_connected else 0.0)
        self._attendant.join(timeout_s)

    # The side process.

    def _send(self, command: Command) -> None:
        if self._process is not None:
            self._process.send(command)

    def _attend(self) -> None:
        """Have a side process run until this link is closed; in a thread of its own."""
        pause_s = _PAUSE_S
        while not self._is_over():
            started = time.monotonic()
            try:
                why = self._run_once()
            # The edge of a thread: without it nobody would hear of the other clusters again.
            except Exception as error:
                log.exception("the side process cannot be attended to")
                why = f"the side process cannot be started or heard: {error}"
            with self._lock:
                self._process = None
                self._bytes_before = (self.sent_bytes, self.received_bytes)
            if self._is_over():
                return
            is_healthy = time.monotonic() - started > _HEALTHY_S
            pause_s = _PAUSE_S if is_healthy else min(2 * pause_s, _LONGEST_PAUSE_S)
            text = f"{why}; it is started again in {pause_s:.1f} s, and goes on where it was"
            self._pass_on(Note(text=text, is_warning=True))
            self._wake.wait(pause_s)

    def _run_once(self) -> str:
        """A side process, from its start to its end; how it ended."""
        process = SideProcess(self._log_file, self._settings, lambda: self._progress)
        with self._lock:
            process.send(self._begin())
            self._process = process
            if self._is_closed:
                process.end(0.0)
        return process.attend(self._take)

    def _is_over(self) -> bool:
        return self._is_closed or self._is_refused

    def _begin(self) -> Begin:
        return self._account.begin(
            self._member, self._settings, self._join_file, self._spool, self._progress
        )

    def _take(self, event: Event | Alive) -> None:
        """Keep account of what the side process says, and pass it on."""
        with self._lock:
            kept = self._account.take(event)
            match event:
                case Alive():
                    before = self._bytes_before
                    self.sent_bytes = before[0] + event.sent_bytes
                    self.received_bytes = before[1] + event.received_bytes
                case Members():
                    self.members, self.pace = event.names, event.pace
                case RendezvousLost():
                    self.is_connected = False
                case RendezvousFound() | Joined():
                    self.is_connected = True
                case Refused():
                    self._is_refused = True
                case _:
                    pass
        if kept is not None:
            self._pass_on(kept)

    def _pass_on(self, event: Event) -> None:
        with self._news:
            self._events.put(event)
            self._news.notify_all()
