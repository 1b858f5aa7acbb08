"""A hub that dies at every step at which it touches its disk, and is asked on.

Run as `python -m tests.outer_deaths FOLDER`, in a process of its own: it forks.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np

import isles.outer.average  # noqa: F401  torch, once for all children
from isles.outer.hub.files import Incoming, average, norm_of
from isles.outer.messages import CHUNK_BYTES, Contribution, digest_of, hash_chunks
from tests.outer_world import World, member_id

TURNS, NUMBERS = 6, CHUNK_BYTES // 4 + 5
PIECES = [[NUMBERS]]
_FILES = ("open", "os.rename", "os.remove", "os.truncate", "os.rmdir")


def open_world(folder: Path) -> World:
    """The hub, as the disk has it."""
    return World(folder, dead_after_s=1e9)


def requests() -> list[Callable[[World], None]]:
    """What clusters ask, one after the other; each is asked again until it is answered."""

    def ask(name: str, outer_step: int) -> list[Callable[[World], None]]:
        samples: list[tuple[int, int]] = []

        def lease(world: World) -> None:
            world.lease(name, outer_step + 1, 3)

        def contribute(world: World) -> None:
            samples[:] = world.lease(name, outer_step + 1, 3)
            path = world.do(world.core.part_path, member_id(name), outer_step)
            number = int(path.stem)
            data = np.full(NUMBERS, outer_step + number, np.float32).tobytes()
            source = world.folder.parent / f"{name}.part"
            source.write_bytes(data)
            incoming = Incoming(path, len(data))
            for index, sha256 in enumerate(hash_chunks(source)):
                chunk = data[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]
                incoming.put(index, chunk, sha256)
            digest = digest_of(hash_chunks(source))
            incoming.seal(digest)
            norm = norm_of("none", PIECES[0], path)
            part = Contribution(
                id=member_id(name), tokens=number, steps=1, samples=samples, digest=digest
            )
            world.do(world.core.complete, outer_step, part, norm)

        def contribute_once(world: World) -> None:
            if not world.do(world.core.is_counted, member_id(name), outer_step):
                contribute(world)

        return [lease, contribute_once]

    def decide(world: World) -> None:
        job = world.do(world.core.rounds.close)
        if job is not None:
            world.do(world.core.commit, job.outer_step, *average("none", PIECES[0], job))
            world.do(world.core.sweep)

    found: list[Callable[[World], None]] = [
        lambda world: world.join("a", pieces=PIECES) and None,
        lambda world: world.join("b", pieces=PIECES) and None,
    ]
    for outer_step in range(TURNS):
        found += [*ask("a", outer_step), *ask("b", outer_step), decide]
        for name in "ab":
            found.append(lambda world, n=name, t=outer_step: world.applied(n, t, f"{t:064x}"))
    return found


def die_again_and_again(folder: Path) -> tuple[int, int]:
    """Answer all requests by processes that die at their 1st, 2nd, 3rd … step.

    Returns:
        How many have died, and the most steps that one has made.
    """
    folder.mkdir()
    asked = requests()
    answered = deaths = steps = longest = 0
    while answered < len(asked):
        steps = steps % 20 + 1
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            _work(folder, asked[answered:], steps, writer)
        os.close(writer)
        with os.fdopen(reader, "rb") as pipe:
            answered += len(pipe.read())
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            deaths, longest = deaths + 1, max(longest, steps)
            assert os.WTERMSIG(status) == signal.SIGKILL
        else:
            assert os.waitstatus_to_exitcode(status) == 0, "see the log"
    return deaths, longest


def _work(folder: Path, asked: list[Callable[[World], None]], steps: int, writer: int) -> None:
    left = steps

    def count(step: str) -> None:
        nonlocal left
        left -= not step.startswith(("SELECT", "BEGIN", "--"))
        if left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)

    code = 1
    try:
        world = open_world(folder)
        world.core.journal._db.set_trace_callback(count)  # before each statement, COMMIT as well
        sys.addaudithook(lambda event, _: count(event) if event in _FILES else None)
        for request in asked:
            request(world)
            os.write(writer, b".")
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


if __name__ == "__main__":
    sys.stdout.write(" ".join(map(str, die_again_and_again(Path(sys.argv[1])))))
