"""Logs of agents and ranks that this machine sees."""

from __future__ import annotations

import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from io import UnsupportedOperation
from pathlib import Path

from isles.errors import UserError
from isles.facts.units import format_bytes
from isles.monitor.status import node_reports
from isles.run.manifest import number_of
from isles.run.owner import open_shown
from isles.run.paths import Attempt, RunDir
from isles.run.process import ProcessId
from isles.run.records import MAX_LINE_BYTES, read_record
from isles.run.state import attempt_state

_RANK_LOG = re.compile(r"rank-(\d+)\.log")
_END = b"---- the end of this log on "
_POLL_S = 0.2
_BLOCK_BYTES = 64 * 1024
_MOST_BYTES = 64 * 2**20
"""Limit of one read. If a log has grown by more, isles shows only its end."""


class LineTail:
    """Reads whole lines of a file as they appear; the file may come late, shrink or be replaced.

    Args:
        last: number of existing lines to start with. None means all.
    """

    def __init__(self, path: Path, *, last: int | None = None) -> None:
        self.path = path
        self._last = last
        self._rest = b""
        self._offset = 0
        self._inode: int | None = None
        self._is_refused = False

    def read(self, *, final: bool = False) -> list[str]:
        """The lines of `lines` as a list, if all of them fit into memory."""
        return list(self.lines(final=final))

    def lines(self, *, final: bool = False) -> Iterator[str]:
        """The lines added since the last call, without their ends.

        Lines that come during the read wait for the next call, so each read has an end. The caller
        must take all lines before the next call.

        A progress bar rewrites its line many times; only its last state is returned.

        Args:
            final: also return the text after the last line end, since nothing will follow.
        """
        try:
            with open_shown(self.path) as stream:
                yield from self._added(stream.fileno())
        except (FileNotFoundError, NotADirectoryError):
            return
        except (UnsupportedOperation, PermissionError) as error:
            if not self._is_refused:
                self._is_refused = True
                yield f"isles cannot read {self.path} ({error.strerror or error})"
            return
        if final and self._rest:
            line, self._rest = self._rest, b""
            yield _state(line).decode("utf-8", errors="replace")

    def _added(self, handle: int) -> Iterator[str]:
        info = os.fstat(handle)
        if self._inode is None and self._last is not None:
            self._offset = _start_of_last_lines(handle, info.st_size, self._last)
        elif info.st_ino != self._inode or info.st_size < self._offset:
            self._offset, self._rest = 0, b""
        self._inode = info.st_ino
        if (skipped := info.st_size - self._offset - _MOST_BYTES) > 0:
            self._offset += skipped
            self._rest = f"isles: {format_bytes(skipped)} of {self.path} are skipped\n".encode()
        while (left := info.st_size - self._offset) > 0:
            block = os.pread(handle, min(left, _BLOCK_BYTES), self._offset)
            if not block:
                break
            self._offset += len(block)
            *lines, rest = (self._rest + block).split(b"\n")
            self._rest = _state(rest, is_whole=False)
            for line in lines:
                yield _state(line).decode("utf-8", errors="replace")


def _state(line: bytes, *, is_whole: bool = True) -> bytes:
    # The last state of a line that a progress bar rewrites. An unfinished line keeps the carriage
    # return at its end, because the next state may follow.
    state = line.rstrip(b"\r").rpartition(b"\r")[2]
    if is_whole or len(state) > MAX_LINE_BYTES:
        return state[:MAX_LINE_BYTES]
    return state + b"\r" * line.endswith(b"\r")


def _start_of_last_lines(handle: int, size_bytes: int, count: int) -> int:
    blocks: list[bytes] = []
    num_ends, start = 0, size_bytes
    while start > max(0, size_bytes - _MOST_BYTES) and num_ends <= count:
        step = min(_BLOCK_BYTES, start)
        start -= step
        blocks.append(os.pread(handle, step, start))
        num_ends += blocks[-1].count(b"\n")
    *whole, rest = b"".join(reversed(blocks)).split(b"\n")
    # A line that is still being written counts as one of them.
    lines = [line + b"\n" for line in whole] + ([rest] if rest else [])
    return size_bytes - sum(len(line) for line in (lines[-count:] if count else []))


@dataclass(frozen=True, slots=True)
class LogChoice:
    """Choice of log lines.

    Args:
        rank: only this rank, without a prefix; None: all ranks and agents.
        node: only this node; None: all.
        last: number of existing lines per log. None means all.
        follow: keep printing until the run ends.
        attempt: its number; None: the last.
        is_here: only what this machine sees.
        by_node: one node after the other, below headlines.
    """

    rank: int | None = None
    node: int | None = None
    last: int | None = None
    follow: bool = False
    attempt: int | None = None
    is_here: bool = False
    by_node: bool = False

    def words(self) -> list[str]:
        """The same as options of `isles logs`."""
        words = ["--lines", str(self.last)] if self.last is not None else []
        words += ["--follow"] if self.follow else []
        words += ["--by-node"] if self.by_node else []
        for name, value in (("rank", self.rank), ("node", self.node), ("attempt", self.attempt)):
            words += [f"--{name}", str(value)] if value is not None else []
        return words


def choose_attempt(run_dir: RunDir, number: int | None) -> Attempt:
    """The attempt whose logs are wanted; None: the newest.

    Raises:
        UserError: there is no such attempt.
    """
    attempts = run_dir.attempts()
    if not attempts:
        raise UserError(
            f"{run_dir.name} was never started",
            where=str(run_dir.path),
            fix="`isles train` it",
            id="run.logs",
        )
    if number is None:
        return attempts[-1]
    for attempt in attempts:
        if attempt.number == number:
            return attempt
    numbers = ", ".join(str(attempt.number) for attempt in attempts)
    raise UserError(
        f"{run_dir.name} has no attempt {number}",
        where=str(run_dir.path),
        fix=f"the attempts there are: {numbers}",
        id="run.logs",
    )


def log_lines(
    run_dir: RunDir,
    attempt: Attempt,
    choice: LogChoice,
    *,
    pause: Callable[[float], object] = time.sleep,
) -> Iterator[str]:
    """Lines of the logs, each with the name of its node and rank if there is more than one.

    Raises:
        UserError: the rank has no log, and none can come.
    """
    tails: dict[str, LineTail] = {}
    is_first = True
    while True:
        # The state before the files: what is written before the end is then read after it.
        is_over = not choice.follow or not _goes_on(run_dir, attempt, choice.node)
        files = LogFiles(attempt).choose(choice.rank, choice.node)
        if is_over and not files and choice.rank is not None and not choice.is_here:
            ranks = ", ".join(map(str, _ranks(attempt))) or "none yet"
            raise UserError(
                f"rank {choice.rank} has no log in attempt {attempt.number}",
                where=str(attempt.path),
                fix=f"the ranks there are: {ranks}",
                id="run.logs",
            )
        for name, path in files.items():
            # A log that appears later is new from its first line.
            tails.setdefault(name, LineTail(path, last=choice.last if is_first else None))
        num_ranks = len([name for name in tails if "rank" in name])
        for name, tail in tails.items():
            lines = tail.lines(final=is_over)
            is_named = choice.rank is None and (num_ranks > 1 or name != "rank 0")
            prefix = f"[{name}] " if is_named else ""
            yield from (f"{prefix}{line}" for line in lines)
        if is_over:
            return
        is_first = False
        pause(_POLL_S)


def local_lines(run_dir: RunDir, attempt: Attempt, choice: LogChoice) -> Iterator[str]:
    """Lines of the logs that this machine sees, as `choice` wants them; errors as `log_lines`."""
    if not choice.by_node:
        yield from log_lines(run_dir, attempt, choice)
        return
    files = LogFiles(attempt)
    for node, name in (files.nodes or {0: ""}).items():
        is_away = choice.is_here and bool(files.nodes) and not files.is_here(node)
        if choice.node not in (None, node) or is_away:
            continue
        yield f"=== Node {node}{f' ({name})' if name else ''} ==="
        path = run_dir.latest_node_log(node)
        if choice.attempt is None and path.is_file():
            yield from LineTail(path, last=choice.last).lines(final=True)
        else:
            lines = log_lines(run_dir, attempt, replace(choice, node=node))
            yield from deque(lines, choice.last) if choice.last else lines


class LogFiles:
    """The log files of an attempt on this machine, by the names that stand before their lines."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        reports = node_reports(attempt, time.time())
        self.nodes = {report.node: report.host for report in reports}
        self._places = {report.node: report.ranks for report in reports}
        if len(set(self.nodes.values())) < len(self.nodes):
            self.nodes = {node: f"node {node}" for node in self.nodes}

    def choose(self, rank: int | None, node: int | None) -> dict[str, Path]:
        """The files of a rank, of a node, or all."""
        attempt = self._attempt
        ranks = [number for number in _ranks(attempt) if rank in (None, number)]
        found: dict[str, Path] = {}
        if rank is None:
            found |= self._agents(node)
        for number in ranks:
            of = self.node_of(number)
            if node is None or of is None or of == node:
                found[self._name(of, f"rank {number}")] = attempt.rank_log(number)
        return found

    def node_of(self, rank: int) -> int | None:
        """The node that has a rank, or None for a run on one node."""
        record = read_record(self._attempt.rank_record(rank))
        if record is not None:
            at = [node for node, host in self.nodes.items() if host == record.get("host")]
            if len(at) == 1:
                return at[0]
        for node, place in self._places.items():
            if place is not None and place[0] <= rank <= place[1]:
                return node
        return None

    def is_here(self, node: int) -> bool:
        """True if any log of a node is here."""
        if self._agents(node, only=True):
            return True
        for rank in _ranks(self._attempt):
            if self.node_of(rank) == node:
                # It may be only the end of a log, sent from another host when its rank failed.
                with suppress(OSError), open_shown(self._attempt.rank_log(rank)) as stream:
                    if stream.read(len(_END)) != _END:
                        return True
        return False

    def _agents(self, node: int | None, *, only: bool = False) -> dict[str, Path]:
        # Output that belongs to no node in particular goes with node 0.
        attempt, found = self._attempt, {}
        if node in (None, 0) and not only:
            found["agent"] = attempt.agent_log
            found |= {path.stem: path for path in sorted(attempt.path.glob("*.out"))}
        for path in sorted(attempt.path.glob("node-*.log")):
            number = number_of(path.stem.partition("-")[2])
            if number is not None and node in (None, number):
                name = self._name(number, "agent") if self.nodes else f"node {number}"
                found[name] = path
        return found

    def _name(self, node: int | None, what: str) -> str:
        return f"{self.nodes[node]} {what}" if node in self.nodes and node is not None else what


def _goes_on(run_dir: RunDir, attempt: Attempt, node: int | None) -> bool:
    # More lines may come while the node's own agent lives, else while the run does.
    record = read_record(attempt.node_record(node)) if node is not None else None
    process = ProcessId.from_record(record) if record else None
    if process is not None and process.is_here():
        return process.is_alive()
    return attempt_state(run_dir, attempt).is_alive


def _ranks(attempt: Attempt) -> list[int]:
    names = (_RANK_LOG.fullmatch(path.name) for path in attempt.path.glob("rank-*.log"))
    return sorted(int(match[1]) for match in names if match)
