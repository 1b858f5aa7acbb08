"""Rank 0's end of the hub: a thread in which the `Session` runs; survives whatever happens there.

Nothing that is called here waits for the network. What is computed in the thread must leave the
interpreter to the inner steps: hashes, files and TLS release its lock.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from isles.outer.average import combine
from isles.outer.client.session import HubState, Session
from isles.outer.client.transfer import Spool
from isles.outer.hivemind import HivemindSettings
from isles.outer.layout import Layout
from isles.outer.messages import Apply, Command, End, Join, Lease, Pending
from isles.outer.samples import Interval

log = logging.getLogger(__name__)

_KEPT_AVERAGES = 8
"""Engine hivemind: so many averages stay for clusters that missed them."""

_PEERS_END_S = 15.0
"""Engine hivemind: until others have left the hub that is hosted here, and the daemon has ended."""


def join_of(
    layout: Layout,
    *,
    name: str,
    member_id: str,
    outer_params: Sequence[str],
    identity: Mapping[str, str] | None = None,
    version: int = 0,
    holding: Sequence[Interval] = (),
) -> Join:
    """What a cluster joins with.

    Args:
        member_id: 32 hexadecimal digits (`secrets.token_hex(16)`), kept for the whole run.
        outer_params: the digest of each fragment's outer parameters (`Cluster.digest`).
        identity: what else must be equal on all clusters: outer settings, the model's name …
        version: outer steps applied to the outer parameters (0, or what the checkpoint says).
        holding: samples leased before this attempt that the cluster still means to train on, or
            has trained on since its last contribution that is in an average. What was leased to it
            and it does not hold is leased to others. From here on the client keeps account.
    """
    return Join(
        id=member_id,
        name=name,
        identity={"layout": layout.digest, **(identity or {})},
        codec=layout.codec.text,
        pieces=[layout.piece_counts(fragment) for fragment in range(len(layout.fragments))],
        version=version,
        outer_params=list(outer_params),
        holding=list(holding),
    )


class HubClient:
    """Joins the other clusters at once, in a thread. To be used by one thread of rank 0.

    No method waits for the network, save `wait` and `close`, which have deadlines.

    Args:
        join: see `join_of`.
        join_file: holds the join line (mode 0600).
        spool: a folder of this cluster's own, kept over attempts; contributions and averages lie
            in it for a while.
        note: takes lines for the user, in the thread.
        max_bytes_per_s: limit on what is sent, and on what is fetched, on the wire; 0: none.
        heartbeat_s: between two heartbeats.
        hivemind: the hub is in one of the clusters; None: it was started by itself.
    """

    def __init__(
        self,
        join: Join,
        *,
        join_file: Path,
        spool: Path,
        note: Callable[[str], None],
        max_bytes_per_s: float = 0.0,
        heartbeat_s: float = 2.0,
        hivemind: HivemindSettings | None = None,
    ) -> None:
        self._more_s = 0.0 if hivemind is None else _PEERS_END_S
        kept = 0 if hivemind is None else _KEPT_AVERAGES
        self._spool = Spool.of(spool, join.pieces, join.version, kept)
        self._num_fragments = len(join.pieces)
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._news = threading.Condition()
        self._session = Session(
            join,
            join_file,
            self._spool,
            self._emit,
            note,
            max_bytes_per_s=max_bytes_per_s,
            heartbeat_s=heartbeat_s,
            hivemind=hivemind,
        )
        self.state: HubState = self._session.state
        self._loop = asyncio.new_event_loop()
        self._task = self._loop.create_task(self._session.run())
        self._thread = threading.Thread(target=self._run, name="hub", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._task)
        except asyncio.CancelledError:
            pass
        except BaseException:  # the edge of a thread
            log.exception("what speaks with the hub has ended")
        finally:
            with suppress(RuntimeError):
                self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    def _emit(self, command: Command) -> None:
        with self._news:
            self._commands.put(command)
            self._news.notify_all()

    def _call(self, function: Callable[..., object], *args: object) -> None:
        with suppress(RuntimeError):  # the thread has ended: see `HubState.refusal`
            self._loop.call_soon_threadsafe(function, *args)

    # What rank 0 has done.

    def contribution_path(self, outer_step: int) -> Path:
        """Where a contribution is to be written (`Cluster.encode`) before `contribute`."""
        return self._spool.contribution(outer_step)

    def state_paths(self) -> list[Path]:
        """Where the state is to be written (`Cluster.export_state`) before `give_state`."""
        folder = self._spool.given
        return [folder / f"fragment-{i}.safetensors" for i in range(self._num_fragments)]

    def contribute(self, pending: Pending) -> None:
        """Upload a contribution; `Apply` tells what became of it.

        Its file lies at `contribution_path`, and is the client's from now on. All outer steps
        before it are contributed to or missed.
        """
        self._call(self._session.transfers.contribute, pending)

    def applied(self, outer_step: int, digest: str) -> None:
        """An average was applied (also an empty one), which has led to these outer parameters."""
        self._call(self._session.applied, outer_step, digest)

    def lease(self, num_samples: int) -> None:
        """Ask for samples; `Lease` brings them. May be asked several times, ahead."""
        self._call(self._session.lease, num_samples)

    def give_state(self, version: int, paths: Sequence[Path], outer_params: Sequence[str]) -> None:
        """The state that `SendState` asked for lies at `state_paths`; it must not change.

        Args:
            version: outer steps applied to all fragments.
            paths: safetensors, one for each fragment.
            outer_params: digest of each fragment's outer parameters.
        """
        self._call(self._session.give_state, version, paths, outer_params)

    def adopted(self, version: int, outer_params: Sequence[str]) -> None:
        """`Adopt` is done; contributions under way are void."""
        self._call(self._session.adopted, version, outer_params)

    def reset_done(self) -> None:
        """`Reset` is done."""
        self._call(self._session.reset_done)

    def keep_since(self, version: int) -> None:
        """The cluster may have to go on from a checkpoint with so many outer steps applied.

        Until this is called first it may be the one that it has been started from.
        """
        self._spool.since = version

    def report(self, **progress: Any) -> None:
        """Set fields of the next `Heartbeat`. Costs nothing."""
        self._session.progress = progress

    # What the hub has for the ranks.

    def poll(self) -> list[Command]:
        """The commands since the last call, in order; never waits."""
        found = []
        while not self._commands.empty():
            found.append(self._commands.get())
        return found

    def wait(self, timeout_s: float) -> None:
        """Wait until `poll` has something, or the time is over."""
        end = time.monotonic() + timeout_s
        with self._news:
            while self._commands.empty() and (left_s := end - time.monotonic()) > 0:
                self._news.wait(left_s)

    def close(
        self, *, leaves: bool = True, has_finished: bool = False, timeout_s: float = 10.0
    ) -> None:
        """End the thread, within a time.

        Args:
            leaves: tell the hub, so that nobody waits for this cluster; it may join again.
            has_finished: tell it that the training is over, too.
            timeout_s: for telling it.
        """
        self._call(self._session.leave, leaves and self.state.is_connected, has_finished)
        self._thread.join(timeout_s + self._more_s)
        if self._thread.is_alive():
            self._call(self._task.cancel)
            self._thread.join(timeout_s)


class Alone:
    """Stands where `HubClient` would in a run of one cluster: its contribution is the average.

    Args:
        spool: folder for the contributions.
        version: outer steps that have been applied.
        next_sample: the first that was never leased.
    """

    def __init__(
        self, layout: Layout, name: str, spool: Path, *, version: int, next_sample: int
    ) -> None:
        self._layout, self._name, self._spool = layout, name, spool
        self._next_sample = next_sample
        self._commands: list[Command] = []
        self.state = HubState(members=(name,), is_connected=True, is_joined=True, decided=version)
        spool.mkdir(mode=0o700, exist_ok=True)

    def contribution_path(self, outer_step: int) -> Path:
        return self._spool / f"contribution-{outer_step:08d}"

    def _average(self, outer_step: int) -> Path:
        return self._spool / f"average-{outer_step:08d}"

    def contribute(self, pending: Pending) -> None:
        outer_step, codec = pending.outer_step, self._layout.codec
        path, average = self.contribution_path(outer_step), self._average(outer_step)
        size = 0
        with path.open("rb") as source, average.open("wb") as goal:
            for count in self._layout.piece_counts(outer_step % len(self._layout.fragments)):
                data = source.read(codec.size(count))
                size += goal.write(combine(codec.text, count, [(data, 1.0)]))
        path.unlink()
        weights = {self._name: pending.tokens}
        self._commands.append(
            Apply(outer_step=outer_step, path=average, weights=weights, refused={}, size_bytes=size)
        )

    def applied(self, outer_step: int, digest: str) -> None:
        self._average(outer_step).unlink(missing_ok=True)

    def lease(self, num_samples: int) -> None:
        start, self._next_sample = self._next_sample, self._next_sample + num_samples
        self._commands.append(Lease(((start, self._next_sample),)))

    def state_paths(self) -> list[Path]:
        return []

    def give_state(self, version: int, paths: Sequence[Path], outer_params: Sequence[str]) -> None:
        raise AssertionError("nobody asks for the state")

    def adopted(self, version: int, outer_params: Sequence[str]) -> None:
        raise AssertionError("nobody gives a state")

    def reset_done(self) -> None:
        raise AssertionError("nobody asks for a reset")

    def keep_since(self, version: int) -> None:
        pass  # an average is this cluster's own contribution: its steps are done again

    def report(self, **progress: Any) -> None:
        if progress.get("ends"):  # nobody has an outer step that is still to come
            self._commands.append(End(0))

    def poll(self) -> list[Command]:
        found, self._commands = self._commands, []
        return found

    def wait(self, timeout_s: float) -> None:
        pass

    def close(self, *, leaves: bool = True, has_finished: bool = False) -> None:
        pass


Hub = HubClient | Alone
