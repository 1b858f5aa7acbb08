"""Gathers what a node's agent and ranks print into one log of the node, while they run."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import IO

from isles.run.node_log import new_node_log
from isles.run.paths import Attempt, RunDir

_EVERY_S = 0.5


class NodeLog:
    """The log of one node, written by a thread beside whatever the block does.

    Args:
        run_dir, attempt: the run.
        node: this node's number.
        ranks: says which ranks are of this node now.
        agent_log: what the node's agent prints; None: it has no log of its own.
        is_first: whether nothing was started before under this attempt.
    """

    def __init__(
        self,
        run_dir: RunDir,
        attempt: Attempt,
        node: int,
        ranks: Callable[[], Iterable[int]],
        agent_log: Path | None = None,
        *,
        is_first: bool = False,
    ) -> None:
        self._run_dir = run_dir
        self._attempt = attempt
        self._node = node
        self._ranks = ranks
        # What earlier starts have printed is in their own log.
        self._sources = {"agent": agent_log} if agent_log is not None else {}
        earlier = [] if is_first else [*self._sources.values(), *attempt.path.glob("rank-*.log")]
        self._offsets = {path: _size(path) for path in earlier}
        self._rest: dict[Path, bytes] = {}
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> None:
        try:
            out = new_node_log(self._run_dir, self._node).open("ab", buffering=0)
        except OSError as error:
            # The same lines are in the logs of the agent and the ranks.
            sys.stderr.write(f"agent: this node has no log of its own: {error}\n")
            return
        self._thread = threading.Thread(
            target=self._write, args=(out,), name="node-log", daemon=True
        )
        self._thread.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_over.set()
        if self._thread is not None:
            self._thread.join(timeout=5)

    def _write(self, out: IO[bytes]) -> None:
        is_over = False
        while not is_over:
            is_over = self._is_over.wait(_EVERY_S)
            for rank in self._ranks():
                self._sources.setdefault(f"rank {rank}", self._attempt.rank_log(rank))
            try:
                for name, path in self._sources.items():
                    out.write(self._new(name, path, is_last=is_over))
            except OSError:
                return  # a full disk: the lines are where they came from
        out.close()

    def _new(self, name: str, path: Path, *, is_last: bool) -> bytes:
        offset = self._offsets.get(path, 0)
        try:
            with path.open("rb") as stream:
                stream.seek(offset)
                data = stream.read()
        except FileNotFoundError:
            return b""
        self._offsets[path] = offset + len(data)
        *lines, rest = (self._rest.pop(path, b"") + data).split(b"\n")
        if rest and is_last:
            lines.append(rest)
        elif rest:
            self._rest[path] = rest
        prefix = f"[{name}] ".encode()
        return b"".join(prefix + line + b"\n" for line in lines)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
