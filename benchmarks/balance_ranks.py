"""The part of balance.py that runs in the ranks."""

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
from balance import MODEL, ROWS, Effort, wait_for
from torch import nn

from isles.dist.split import RowSplit, even_split
from isles.models.attention import use_maskless_attention
from isles.models.build import build_model
from isles.train.loop import train
from ranks import BetweenSteps, training

if TYPE_CHECKING:
    from isles.dist.world import World
    from isles.run.paths import RunDir
    from isles.train.parts import Parts


class Turns(BetweenSteps):
    """Changes the split between chunks, and measures each rank for itself."""

    def __init__(self, parts: Parts, effort: Effort, barrier: Callable[[], Any]) -> None:
        super().__init__(parts.loader)
        self._parts = parts
        self._effort, self._barrier = effort, barrier
        self._since = 0.0
        self._name = ""
        self.rounds: list[dict[str, Any]] = []
        self.chosen: RowSplit | None = None

    def before_step(self) -> None:
        """Before a chunk's first step: change the split."""
        at = self.calls - self._effort.warmup_steps
        # The first step after a change of rows is not measured: its data has not been read ahead.
        length = self._effort.chunk_steps + 1
        if at >= 0 and at % length == 0:
            self._end_chunk()
            self._begin_chunk(at // length)
        elif at > 0 and at % length == 1:
            self._barrier()
            self._since = time.perf_counter()

    def _end_chunk(self) -> None:
        if self._name:
            seconds = (time.perf_counter() - self._since) / self._effort.chunk_steps
            self.rounds[-1][self._name] = seconds
            self._name = ""

    def _begin_chunk(self, number: int) -> None:
        if self.chosen is None:
            self.chosen = self.split
            # From now on the rows change for the benchmark's sake, which is nothing to learn from.
            self._parts.balancer.rest()
        turn = number % 2
        if turn == 0:
            self.rounds.append({"speeds": self._speeds()})
        self._name = ("balanced", "even")[(turn + number // 2) % 2]
        even = even_split(ROWS, len(self._effort.factors), 8, in_step=self.chosen.in_step)
        self.use(self.chosen if self._name == "balanced" else even)

    def _speeds(self) -> list[float]:
        """Rows per second of each rank for itself."""
        world = self._parts.world
        assert self.chosen is not None
        self._twin()
        self._barrier()
        return world.gather(self._solo(max(self.chosen.micro_steps(world.rank))))

    def _solo(self, rows: int) -> float:
        twin = self._twin()
        tokens = torch.randint(MODEL["vocab_size"], (rows, self._effort.seq_length))
        done, began = 0, time.perf_counter()
        while time.perf_counter() - began < self._effort.solo_s:
            logits = twin(input_ids=tokens, use_cache=False).logits
            loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
            loss.backward()  # type: ignore[no-untyped-call]
            done += rows
        return done / (time.perf_counter() - began)

    def _twin(self) -> Any:
        if not hasattr(self, "_own"):
            device, dtype = torch.device("cpu"), torch.float32
            config = self._parts.config.model
            self._own = build_model(config, device=device, dtype=dtype, seed=0, vocab_size=None)
            use_maskless_attention(self._own)
            if self._effort.works:
                self._own.train()
                types = self._parts.balancer.block_types
                make_slow(self._own, types, int(self._effort.factors[self._parts.world.rank]))
        return self._own


def make_slow(model: nn.Module, block_types: tuple[type, ...], factor: int) -> None:
    """Have each block do all its work so many times, forward and backward."""

    class Again(torch.autograd.Function):
        """The identity; its backward pass, when the block is done with its own, does some work."""

        @staticmethod
        def forward(ctx: Any, hidden: Any, work: Callable[[], None]) -> Any:
            ctx.work = work
            return hidden.view_as(hidden)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            ctx.work()
            return gradients[0], None

    def slow(forward: Callable[..., Any]) -> Callable[..., Any]:
        def computed(hidden: Any, *args: Any, **kwargs: Any) -> Any:
            def work(times: int) -> None:
                with torch.no_grad():
                    for _ in range(times):
                        forward(hidden.detach(), *args, **kwargs)

            work(factor - 1)
            # A backward pass is the work of two forward passes.
            again = Again.apply(hidden, lambda: work(2 * factor - 2))  # type: ignore[no-untyped-call]
            return forward(again, *args, **kwargs)

        return computed

    for module in model.modules():
        if isinstance(module, block_types) and factor > 1:
            vars(module)["forward"] = slow(module.forward)


def run_rank(run_dir: RunDir, effort: Effort) -> None:
    """Train as isles' worker does; rank 0 writes rounds.json."""

    def joined(world: World) -> None:
        if world.is_main:
            logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
        # All have been imported; from here on the slowdown is on.
        (run_dir.path / f"ready-{world.rank}").touch()
        world.main_first(lambda: wait_for(run_dir.path / "go"))

    with training(run_dir, joined) as parts:
        world = parts.world
        turns = Turns(parts, effort, lambda: dist.barrier(group=world.control))
        if effort.works:
            types = parts.balancer.block_types
            make_slow(parts.engine.model, types, int(effort.factors[world.rank]))
        if effort.rounds:
            parts.loader = turns
        train(parts)
        split = turns.chosen or parts.loader.split
    if world.is_main:
        result = {"rounds": turns.rounds, "rows": split.rows}
        (run_dir.path / "rounds.json").write_text(json.dumps(result), encoding="utf-8")
