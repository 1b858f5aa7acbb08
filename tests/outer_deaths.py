"""A hub that dies at every step at which it touches its disk, and is asked on.

Run as `python -m tests.outer_deaths FOLDER`, in a process of its own: it forks.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

import isles.outer.average  # noqa: F401  torch, once for all children
from isles.outer.hub.files import Incoming, average, norm_of
from isles.outer.messages import CHUNK_BYTES, digest_of, hash_chunks
from isles.outer.samples import Interval
from tests.outer_world import World, after, member_id

TURNS, NUMBERS = 6, CHUNK_BYTES // 4 + 5
PIECES = [[NUMBERS]]
_FILES = ("open", "os.rename", "os.remove", "os.truncate", "os.rmdir")


def open_world(folder: Path) -> World:
    """The hub, as the disk has it."""
    return World(folder, dead_after_s=1e9)


def requests() -> list[Callable[[World], object]]:
    """What clusters ask, one after the other; each is asked again until it is answered."""
    found: list[Callable[[World], object]] = []
    found += [partial(World.join, own=name, pieces=PIECES) for name in "ab"]
    for outer_step in range(TURNS):
        for name in "ab":
            turn = {"name": name, "outer_step": outer_step}
            found += [partial(_lease, **turn), partial(_contribute, **turn)]
        found.append(_decide)
        digest = {"outer_step": outer_step, "outer_params": after(outer_step)}
        found += [partial(World.applied, name=name, **digest) for name in "ab"]
    return found


def _lease(world: World, name: str, outer_step: int) -> list[Interval]:
    return world.lease(name, outer_step + 1, 3)


def _contribute(world: World, name: str, outer_step: int) -> None:
    if world.do(world.core.is_counted, member_id(name), outer_step):
        return
    samples = _lease(world, name, outer_step)
    path = world.do(world.core.part_path, member_id(name), outer_step)
    number = int(path.stem)
    data = np.full(NUMBERS, outer_step + number, np.float32).tobytes()
    source = world.folder.parent / f"{name}.part"
    source.write_bytes(data)
    incoming, hashes = Incoming(path, len(data)), hash_chunks(source)
    for index, sha256 in enumerate(hashes):
        incoming.put(index, data[index * CHUNK_BYTES :][:CHUNK_BYTES], sha256)
    incoming.seal(digest_of(hashes))
    norm = norm_of("none", PIECES[0], incoming.path)
    incoming.keep()
    world.complete(name, outer_step, samples, tokens=number, norm=norm)


def _decide(world: World) -> None:
    job = world.do(world.core.rounds.close)
    if job is not None:
        world.do(world.core.commit, job.outer_step, *average("none", PIECES[0], job))
        world.do(world.core.sweep)


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


def _work(folder: Path, asked: list[Callable[[World], object]], steps: int, writer: int) -> None:
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
