"""The part of a benchmark that runs in isles' ranks: training, with something between its steps.

Only a process that is a rank imports this: it imports torch.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from common import PROCESS_DEADLINE_S

from isles.config.resolve import load_resolved
from isles.data.loader import Loader, StepData
from isles.run.env import read_rank_env
from isles.run.records import read_rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from isles.dist.world import World
    from isles.run.checkpoints import CheckpointInfo
    from isles.run.paths import RunDir
    from isles.train.parts import Parts


class Bare(Protocol):
    """A bare loop."""

    @property
    def losses(self) -> list[float]:
        """Losses that it has recorded, in order."""
        ...

    def run(self, steps: int) -> None:
        """Train for so many steps. All ranks must call this."""
        ...


class BetweenSteps(Loader):
    """The loop's own loader, which calls `before_step` before each step.

    A Loader like any other to isles, and to mypy: it takes over everything that `loader` has.
    """

    def __init__(self, loader: Loader) -> None:
        vars(self).update(vars(loader))
        self.calls = 0

    def step(self, samples_seen: int) -> StepData:
        """See Loader."""
        self.before_step()
        self.calls += 1
        return super().step(samples_seen)

    def before_step(self) -> None:
        """Called before a step, when `calls` steps have begun."""
        raise NotImplementedError


class Interleaved(BetweenSteps):
    """Lets the bare loops A and B run between chunks of isles' own loop.

    `barrier` is called before each chunk, so that the ranks begin it together.
    """

    def __init__(
        self, loader: Loader, bare: Sequence[Bare], chunk_steps: int, barrier: Callable[[], Any]
    ) -> None:
        super().__init__(loader)
        self._bare = bare
        self._chunk_steps, self._barrier = chunk_steps, barrier
        self._since = 0.0, 0.0
        self.chunks: list[tuple[str, float, float]] = []
        """As in Turns."""

    def before_step(self) -> None:
        """Between two chunks the bare loops run."""
        if self.calls % self._chunk_steps:
            return
        if self._ahead is not None:
            # What is read ahead is isles' work: it ends on isles' clock, not on bare's.
            wait([self._ahead[1]], timeout=PROCESS_DEADLINE_S)
        if self.calls:
            self._end("isles")
        for name in ("AB", "BA")[self.calls // self._chunk_steps % 2]:
            self._begin()
            self._bare["AB".index(name)].run(self._chunk_steps)
            self._end(name)
        self._begin()

    def _begin(self) -> None:
        self._barrier()
        self._since = time.perf_counter(), time.process_time()

    def _end(self, name: str) -> None:
        wall, cpu = self._since
        self.chunks.append((name, time.perf_counter() - wall, time.process_time() - cpu))


@contextmanager
def training(
    run_dir: RunDir,
    joined: Callable[[World], None] = lambda world: None,
    resume_from: CheckpointInfo | None = None,
) -> Iterator[Parts]:
    """The parts of a training as isles' worker builds them; at the block's end they are closed.

    All ranks must call this.

    Args:
        run_dir: the run directory.
        joined: called when the ranks have met, before anything is built.
        resume_from: the checkpoint to begin with. None: a new run.
    """
    from isles.dist.files import find_disks
    from isles.dist.world import join_world, leave_world
    from isles.train.build import build
    from isles.train.record import Recorder
    from isles.train.stop import StopSignals

    env = replace(read_rank_env(), store=run_dir.path / "store")
    resolved = load_resolved(run_dir.resolved.read_text(encoding="utf-8"))
    recorder = Recorder(run_dir, is_main=env.rank == 0, world_size=env.world_size)
    signals = StopSignals()
    timeout_s = resolved.config.clusters[0].comm_timeout
    world = join_world(env, device=resolved.device, timeout_s=timeout_s)
    joined(world)
    disks = find_disks(world, run_dir.path)
    parts = build(resolved, run_dir, world, recorder, signals, resume_from, disks, 1)
    signals.training_begins()
    yield parts
    parts.close(is_over=True)
    parts.checkpoints.close()
    recorder.close()
    leave_world()


def run_rank(
    run_dir: RunDir, chunk_steps: int, make_bare: Callable[[Parts], Sequence[Bare]]
) -> None:
    """Train as isles' worker does, with bare loops in between; rank 0 writes turns.json.

    Args:
        run_dir: the run directory.
        chunk_steps: see Effort.
        make_bare: the loops A and B.
    """
    import torch.distributed as dist

    from isles.train.loop import train

    with training(run_dir) as parts:
        bare = make_bare(parts)
        parts.loader = loader = Interleaved(parts.loader, bare, chunk_steps, dist.barrier)
        train(parts)
    if parts.world.is_main:
        rows = [row for row in read_rows(run_dir.metrics) if row["kind"] == "train"]
        losses = [loop.losses for loop in bare]
        tokens = [loop.tokens for loop in bare if hasattr(loop, "tokens")]
        result = {"chunks": loader.chunks, "rows": rows, "losses": losses, "tokens": tokens}
        (run_dir.path / "turns.json").write_text(json.dumps(result), encoding="utf-8")
