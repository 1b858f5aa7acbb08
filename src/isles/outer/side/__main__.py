"""Runs the side process of a cluster: `python -m isles.outer.side`, started by rank 0."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import traceback
from typing import TypeVar

from isles.errors import ConfigError, UserError
from isles.outer.link.messages import Begin, Refused
from isles.outer.side.faults import NotLetInError, RejoinError
from isles.outer.side.pipe import Pipe
from isles.outer.side.side import Side

E = TypeVar("E", bound=BaseException)

_REJOIN, _NOT_LET_IN, _FAULT = 75, 77, 70
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main() -> int:
    """Work until the pipe to rank 0 ends; the exit code."""
    for number in _IGNORED:  # they go to the whole job; rank 0 decides what follows from them
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    pipe = Pipe()
    begin = pipe.begin()
    if begin is None:
        return 0
    try:
        asyncio.run(_run(begin, pipe))
    except* NotLetInError as group:
        refusal = _first(group, NotLetInError).refusal
        pipe.emit(_refused(refusal.kind, refusal))
        code = _NOT_LET_IN
    except* ConfigError as group:
        pipe.emit(_refused("join_line", _first(group, ConfigError)))
        code = _NOT_LET_IN
    except* RejoinError as group:
        sys.stderr.write(f"to join anew: {_first(group, RejoinError)}\n")
        code = _REJOIN
    except* Exception:
        traceback.print_exc()
        code = _FAULT
    return code


def _refused(reason: str, error: UserError) -> Refused:
    return Refused(reason=reason, what=error.what, where=error.where, fix=error.fix)


async def _run(begin: Begin, pipe: Pipe) -> None:
    if begin.settings.engine != "hivemind":
        await Side(begin, pipe.listen(), pipe.emit).run()
        return
    from isles.outer.hivemind.node import Node

    node = Node(begin, pipe.emit)
    begin = await node.open_door()
    async with asyncio.TaskGroup() as group:
        group.create_task(node.run())
        group.create_task(Side(begin, pipe.listen(), pipe.emit, node).run())


def _first(group: BaseException, kind: type[E]) -> E:
    """The first error of a kind in a group of groups."""
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    assert isinstance(group, kind)
    return group


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # threads within gloo must not keep this process
