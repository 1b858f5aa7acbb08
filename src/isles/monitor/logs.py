"""`isles logs`: what the ranks of a run printed, all of them or one."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from isles.errors import UserError
from isles.monitor.tail import LineTail
from isles.rundir.paths import Attempt, RunDir
from isles.rundir.state import attempt_state

_RANK_LOG = re.compile(r"rank-(\d+)\.log")
_POLL_S = 0.2


def choose_attempt(run_dir: RunDir, number: int | None) -> Attempt:
    """The attempt whose logs are wanted; None: the newest.

    Raises:
        UserError: there is no such attempt.
    """
    attempts = run_dir.attempts()
    if not attempts:
        raise UserError(
            f"{run_dir.name} was never started", where=str(run_dir.path), fix="`isles train` it"
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
    )


def log_lines(
    run_dir: RunDir,
    attempt: Attempt,
    *,
    rank: int | None,
    last: int | None,
    follow: bool,
    pause: Callable[[float], object] = time.sleep,
) -> Iterator[str]:
    """Lines of the logs, each with the name of its rank in front where there are several.

    Args:
        run_dir: the run.
        attempt: which start of it.
        rank: only this rank, without a prefix; None: all ranks and the agent.
        last: how many lines of each log that are there already; None: all.
        follow: go on until the attempt ends.
        pause: waits between two looks.

    Raises:
        UserError: the rank has no log, and none can come.
    """
    tails: dict[str, LineTail] = {}
    is_first = True
    while True:
        # The state before the files: what is written before the end is then read after it.
        is_over = not follow or not attempt_state(run_dir, attempt).is_alive
        sources = _sources(attempt, rank)
        if is_over and not sources and rank is not None:
            raise _no_rank(attempt, rank)
        for name, tail in sources.items():
            # A log that appears later is new from its first line.
            tails.setdefault(name, LineTail(tail, last=last if is_first else None))
        has_prefix = rank is None and len([name for name in tails if _is_rank(name)]) > 1
        for name, lines in [(name, tail.read(final=is_over)) for name, tail in tails.items()]:
            prefix = f"[{name}] " if has_prefix or not _is_rank(name) else ""
            yield from (f"{prefix}{line}" for line in lines)
        if is_over:
            return
        is_first = False
        pause(_POLL_S)


def _sources(attempt: Attempt, rank: int | None) -> dict[str, Path]:
    if rank is not None:
        log = attempt.rank_log(rank)
        return {f"rank {rank}": log} if log.is_file() else {}
    found = {f"rank {number}": attempt.rank_log(number) for number in _ranks(attempt)}
    nodes = sorted(attempt.path.glob("node-*.log"))
    agents = {path.stem.replace("-", " "): path for path in nodes}
    return {"agent": attempt.agent_log, **agents, **found}


def _is_rank(name: str) -> bool:
    return name.startswith("rank")


def _ranks(attempt: Attempt) -> list[int]:
    if not attempt.path.is_dir():
        return []
    names = (_RANK_LOG.fullmatch(path.name) for path in attempt.path.iterdir())
    return sorted(int(match[1]) for match in names if match)


def _no_rank(attempt: Attempt, rank: int) -> UserError:
    ranks = ", ".join(map(str, _ranks(attempt))) or "none yet"
    return UserError(
        f"rank {rank} has no log in attempt {attempt.number}",
        where=str(attempt.path),
        fix=f"the ranks there are: {ranks}",
    )
