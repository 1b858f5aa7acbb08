"""The part of pipeline.py that runs in the ranks."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from balance_ranks import make_slow
from pipeline import LENGTH, MODEL, SLOW, Effort

from isles.models.attention import use_maskless_attention
from isles.models.build import build_model
from isles.run.checkpoints import find_checkpoint
from isles.train.loop import train
from ranks import BetweenSteps, training

if TYPE_CHECKING:
    from isles.dist.world import World
    from isles.run.paths import RunDir
    from isles.train.parts import Parts


class Rounds(BetweenSteps):
    """Measures each rank for itself between chunks of steps."""

    def __init__(self, parts: Parts, effort: Effort, barrier: Callable[[], Any]) -> None:
        super().__init__(parts.loader)
        self._parts, self._effort, self._barrier = parts, effort, barrier
        self._since = 0.0
        self._twin: Any = None
        self.rounds: list[dict[str, Any]] = []

    def before_step(self) -> None:
        """Between two chunks each rank computes for itself."""
        at = self.calls - self._effort.warmup_steps
        if at < 0 or at % self._effort.chunk_steps:
            return
        if self.rounds:
            seconds = time.perf_counter() - self._since
            self.rounds[-1]["step_s"] = seconds / self._effort.chunk_steps
        if len(self.rounds) == self._effort.rounds:
            return
        self.rounds.append({"speeds": self._parts.world.gather(self._solo())})
        self._barrier()
        self._since = time.perf_counter()

    def _solo(self) -> float:
        # Rows per second of the whole model on this rank.
        if self._twin is None:
            device, dtype = torch.device("cpu"), torch.float32
            config = self._parts.config.model
            self._twin = build_model(config, device=device, dtype=dtype, seed=0, vocab_size=None)
            use_maskless_attention(self._twin, device=device)
            slow_down(self._twin, self._parts)
        tokens = torch.randint(MODEL["vocab_size"], (1, LENGTH))
        self._barrier()
        done, began = 0, time.perf_counter()
        while time.perf_counter() - began < self._effort.solo_s:
            logits = self._twin(input_ids=tokens, use_cache=False).logits
            loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
            loss.backward()  # type: ignore[no-untyped-call]
            done += 1
        return done / (time.perf_counter() - began)


def slow_down(model: torch.nn.Module, parts: Parts) -> None:
    """Make the first rank slow."""
    factor = SLOW if parts.world.rank == 0 else 1
    make_slow(model, parts.balancer.block_types, factor)


def run_rank(run_dir: RunDir, effort: Effort, before: RunDir | None) -> None:
    """Train as isles' worker does; rank 0 writes rounds.json."""

    def joined(world: World) -> None:
        if world.is_main:
            logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)

    resume_from = None if before is None else find_checkpoint(before, None)
    with training(run_dir, joined, resume_from) as parts:
        world, cut = parts.world, parts.cut
        assert cut is not None
        rounds = Rounds(parts, effort, lambda: dist.barrier(group=world.control))
        slow_down(parts.engine.model, parts)
        parts.loader = rounds
        train(parts)
    if world.is_main:
        result = {"rounds": rounds.rounds, "layers": cut.layers}
        (run_dir.path / "rounds.json").write_text(json.dumps(result), encoding="utf-8")
