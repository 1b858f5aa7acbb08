"""A gloo group of one epoch's members: made through the rendezvous, left at any time."""

from __future__ import annotations

import hashlib
import logging
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions, ProcessGroupGloo, Store

from isles.errors import CommunicationError

log = logging.getLogger(__name__)

_OPERATION_BYTES = 4 * 2**20
_LEAST_BYTES = 1 << 16


class Group:
    """The members of an epoch, each a rank. All must call the same methods in the same order.

    Args:
        store: of the epoch.
        rank: of this cluster.
        names: of the clusters, by rank.
        place: network interface or address by which the others reach this one; empty: gloo's own
            choice.
        timeout_s: for connecting, and for each slice of a few MB.
        pace: is told how many bytes are about to be sent, and waits as long as a limit demands.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        names: Sequence[str],
        place: str,
        timeout_s: float,
        pace: Callable[[int], None],
    ) -> None:
        self.rank, self.names = rank, tuple(names)
        self.size = len(names)
        self.sent_bytes = self.received_bytes = 0
        self._pace = pace
        self._is_left = False
        self._gloo: ProcessGroupGloo | None = None
        if self.size == 1:
            return
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch's stubs lack it
        options._timeout = timedelta(seconds=timeout_s)
        options._devices = [_device(place)]
        self._gloo = ProcessGroupGloo(store, rank, self.size, options)

    def compare(self, header: dict[str, int | str]) -> None:
        """Make sure that all are about to average the same.

        Sizes that differ would make gloo abort the process. Headers are hashes of one size.

        Args:
            header: what must be equal, by its name.

        Raises:
            CommunicationError: it is not; says what differs from whom.
        """
        if self._gloo is None:
            return
        self._check()
        mine = torch.tensor([_number(value) for value in header.values()])
        found = [torch.empty_like(mine) for _ in self.names]
        work = self._gloo.allgather([found], [mine], AllgatherOptions())  # type: ignore[attr-defined]
        work.wait()
        for name, other in zip(self.names, found, strict=True):
            differing = [
                f"{key} is {value} here"
                for key, value, a, b in zip(header, header.values(), mine, other, strict=True)
                if int(a) != int(b)
            ]
            if differing:
                raise CommunicationError(
                    f"cluster {name} is about to average something else: {', '.join(differing)}",
                    where=f"cluster {self.names[self.rank]}",
                    fix="install the same version of isles on all clusters",
                )

    def exchange(self, rows: Sequence[Tensor], sizes: Sequence[int], longest: int) -> list[Tensor]:
        """Send a row to each rank, and receive one from each.

        Args:
            rows: bytes for each rank; that for the own rank is not sent.
            sizes: bytes that come from each rank.
            longest: the longest row that travels between any two ranks.

        Returns:
            A row from each rank; the own one as it is.
        """
        found = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        found[self.rank] = rows[self.rank]
        if self._gloo is None:
            return found
        step = max(_LEAST_BYTES, _OPERATION_BYTES // (self.size - 1))
        for start in range(0, longest, step):
            self._check()
            out = [self._part(row, start, step, rank) for rank, row in enumerate(rows)]
            into = [self._part(row, start, step, rank) for rank, row in enumerate(found)]
            sent = torch.cat(out)
            received = torch.empty(sum(map(len, into)), dtype=torch.uint8)
            self._pace(len(sent))
            work = self._gloo.alltoall_base(  # type: ignore[attr-defined]
                received, sent, [*map(len, into)], [*map(len, out)], AllToAllOptions()
            )
            work.wait()
            for part, new in zip(into, torch.split(received, [*map(len, into)]), strict=True):
                part.copy_(new)
            self.sent_bytes += len(sent)
            self.received_bytes += len(received)
        return found

    def _part(self, row: Tensor, start: int, step: int, rank: int) -> Tensor:
        return row[:0] if rank == self.rank else row[start : start + step]

    def leave(self) -> None:
        """Begin nothing more in this group; from another thread, at any time.

        What waits for another cluster now goes on to do so until its time is over: in torch 2.13
        `abort` wakes nobody.
        """
        self._is_left = True

    def _check(self) -> None:
        if self._is_left:
            raise CommunicationError(
                "the epoch has ended before its average was made",
                where=f"cluster {self.names[self.rank]}",
                fix="nothing: another epoch follows",
            )


def _device(place: str) -> ProcessGroupGloo.Device:
    if not place:
        return ProcessGroupGloo.create_default_device()
    if place in {name for _, name in socket.if_nameindex()}:
        return ProcessGroupGloo.create_device(interface=place)
    return ProcessGroupGloo.create_device(hostname=place)


def _number(value: int | str) -> int:
    if isinstance(value, int):
        return value
    return int.from_bytes(hashlib.sha256(value.encode()).digest()[:7], "big")
