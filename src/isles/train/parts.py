"""The parts that the training loop uses on one rank."""

from __future__ import annotations

import functools
import math
import subprocess
import time
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch

import isles
from isles.balance.balancer import Balancer
from isles.checkpoint.save import CheckpointManager
from isles.config.auto import describe
from isles.config.layout import Strategy
from isles.config.resolve import Resolved, digest
from isles.config.sections.run import RunConfig
from isles.data.loader import Loader, evaluation_batches
from isles.data.mix import Dataset
from isles.data.stream.samples import PassedError
from isles.dist.mesh import Mesh
from isles.dist.world import World
from isles.errors import TrainingError
from isles.outer.samples import joined
from isles.run.manifest import MANIFEST_VERSION
from isles.run.paths import RunDir
from isles.strategies.base import Engine
from isles.train.cut import PipelineCut
from isles.train.metrics import StepMeter, evaluate, score_probe
from isles.train.progress import Progress
from isles.train.record import Recorder
from isles.train.stop import Agreement

if TYPE_CHECKING:  # importing it loads a web client
    from isles.outer.trainer.outer import Outer


@dataclass(slots=True)
class Parts:
    """The parts that the training loop uses on one rank."""

    resolved: Resolved
    run_dir: RunDir
    world: World
    mesh: Mesh
    recorder: Recorder
    tokenizer: Any
    strategy: Strategy
    engine: Engine
    loader: Loader
    validation: Dataset | None
    progress: Progress
    agreement: Agreement
    meter: StepMeter
    checkpoints: CheckpointManager
    balancer: Balancer
    total_steps: int | None
    training: Dataset
    base: dict[str, str] | None
    vocab_size: int
    cut: PipelineCut | None = None
    outer: Outer | None = None

    @property
    def config(self) -> RunConfig:
        """The run file."""
        return self.resolved.config

    @property
    def checks_every_step(self) -> bool:
        """True if reading a number does not wait, as on a CPU."""
        return self.world.device.type == "cpu"

    def is_due(self, every: int | None) -> bool:
        """True if an action with this interval in steps is due now."""
        return every is not None and self.progress.has_reached(every)

    def record(self, *, lr: float, grad_norm: torch.Tensor) -> None:
        """Record the step that has just ended. All ranks must call this."""
        figures = self.meter.row(
            grad_norm=grad_norm,
            communication_s=self.engine.communication_s(),
            blocks_s=self.balancer.blocks_s(),
            sums=self.engine.take_figures(of_training=True),
        )
        if self.engine.routers is not None:
            figures |= self.engine.routers.figures()
        self.checkpoints.poll()
        progress = self.progress
        row = {"kind": "train", "step": progress.step, "learning_rate": lr, **figures}
        row |= {"tokens": progress.tokens, "target_tokens": progress.target_tokens}
        row |= {"elapsed_s": progress.elapsed_s, "at": time.time()}
        self.recorder.row(row)
        left = None if self.total_steps is None else self.total_steps - progress.step
        self.recorder.update(
            step=progress.step,
            loss=figures["loss"],
            learning_rate=lr,
            tokens_per_second=figures["tokens_per_second"],
            eta_s=None if left is None else left * figures["step_time_s"],
            checkpoint_step=self.checkpoints.last_step,
            checkpoint_at=self.checkpoints.last_at,
        )

    def rebalance(self, num_samples: int) -> None:
        """Rebalance the rows if ranks have become faster or slower. All ranks must call this.

        `num_samples`: samples of the step that has just ended.
        """
        is_whole = num_samples == self.loader.split.global_batch_size
        split = self.balancer.after_step(self.progress.step, is_whole=is_whole)
        if split is not None:
            self.loader.use(split)
            # Other rows take other times, and a compiled model is compiled once more.
            self.meter.clock.forget()

    def close(self, *, is_over: bool) -> None:
        """Stop the threads and connections next to the loop.

        Args:
            is_over: whether the run has finished normally.
        """
        self.loader.close()
        if self.outer is not None:
            self.outer.close(leaves=is_over)

    def evaluate(self) -> None:
        """Evaluate on the validation text, if there is any. All ranks must call this."""
        if self.validation is None:
            return
        paused = self.meter.pause("evaluating")
        self.recorder.phase("evaluating", f"step {self.progress.step}")
        batches = evaluation_batches(
            self.validation,
            self.config.training.eval_samples or self.validation.num_samples,
            micro_batch_size=self.balancer.even_size,
            dp_rank=self.mesh.dp_rank,
            dp_size=self.mesh.dp_size,
            device=self.world.device,
        )
        place = self.mesh.place
        figures = evaluate(
            self.engine,
            batches,
            self.world,
            counts=place.pp == place.cp == place.tp == 0,
        )
        self.recorder.row(
            {"kind": "eval", "step": self.progress.step, **figures, "at": time.time()}
        )
        self.recorder.update(eval_loss=figures["loss"])
        self.recorder.phase("training")
        self.meter.resume(paused)

    def save(self, *, wait: bool) -> None:
        """Save a checkpoint of this step. All ranks must call this."""
        paused = self.meter.pause("saving")
        began = time.monotonic()
        if self.outer is not None:
            # The state has no place for an average that the weights do not have yet.
            self.outer.exchange.finish_move()
        self.checkpoints.save(
            self.engine.state_dict(),
            self._manifest(),
            replicas=self.engine.replicas,
            own={} if self.outer is None else self.outer.exchange.tensors(),
            wait=wait,
        )
        if self.outer is not None:
            self.outer.exchange.saved()
        self.agreement.saved(time.monotonic() - began)
        self.meter.resume(paused)

    def check_finite(self) -> None:
        """Stop if some step since the last check was not finite. All ranks must call this.

        The engine keeps the weights of the last good step. They are saved before the error is
        raised.

        Raises:
            TrainingError: with the step, the ranks and the sample indices.
        """
        good = self.engine.good_steps()
        if good is None:
            self.progress.forget_history()
            return
        self.progress.rewind_to(good)
        bad_step = self.progress.step + 1
        if self.world.is_main:
            self.checkpoints.forget_after(self.progress.step)
        self.save(wait=True)  # first, so that the weights are safe whatever the search finds
        bad_ranks = self._find_bad_ranks()
        if bad_ranks:
            what = f"the loss of step {bad_step} is not finite; {'; '.join(bad_ranks)}"
        else:
            numbers = self.loader.sample_ids(self.progress.samples).tolist()
            spans = joined([(number, number + 1) for number in numbers])
            samples = ", ".join(f"{start} to {stop - 1}" for start, stop in spans)
            what = (
                f"the loss or the gradient of step {bad_step} is not finite (samples {samples})"
                if bad_ranks is None
                else f"the gradient of step {bad_step} is not finite, although its losses are "
                f"(samples {samples})"
            )
        raise TrainingError(
            what,
            where=f"step {bad_step}",
            fix="lower training.learning_rate or lengthen training.warmup_steps, inspect those "
            "samples, or use a higher precision (bf16-mixed, 32-true). The weights of step "
            f"{self.progress.step}, the last good step, are saved",
            id="loss.finite",
        )

    def _find_bad_ranks(self) -> list[str] | None:
        # One line per rank whose loss is not finite, from the last good weights. None if some rank
        # cannot read the step again because its stream has passed the segment.
        try:
            data = self.loader.step(self.progress.samples)
        except PassedError:
            data = None
        has_data = self.world.gather(data is not None)
        if data is None or not all(has_data):
            return None
        rows = [
            (sample, batch.sample(row))
            for batch in data.micro_batches
            for row, sample in enumerate(batch.sample_ids)
        ]
        filler = data.micro_batches[0].sample(0)
        bad = []
        # All ranks must run a sharded model the same number of times.
        for index in range(max(self.world.gather(len(rows)))):
            sample, row = rows[index] if index < len(rows) else (None, filler)
            is_good = math.isfinite(float(self.engine.evaluate(row)))
            if not is_good and sample is not None:
                bad.append(sample)
        every = self.world.gather((self.world.rank, self.world.host, bad))
        return [
            f"rank {rank} on {host}: samples {', '.join(map(str, samples))}"
            for rank, host, samples in every
            if samples
        ]

    def _manifest(self) -> dict[str, Any]:
        # All ranks must call this.
        import transformers

        progress, pipeline = self.progress, None
        if self.cut is not None:
            row_s = self.balancer.row_s(self.mesh.dp_rank)
            pipeline = self.cut.record(self.world.gather(row_s), self.mesh.layout)
        return {
            "version": MANIFEST_VERSION,
            "step": progress.step,
            "samples": progress.samples,
            "tokens": progress.tokens,
            "target_tokens": progress.target_tokens,
            "elapsed_s": progress.elapsed_s,
            "total_steps": self.total_steps,
            "lr_scheduler_type": self.config.training.lr_scheduler_type,
            "global_batch_size": self.config.training.global_batch_size,
            "micro_batch_size": self.balancer.even_size,
            "rows": list(self.loader.split.rows),
            "micro_batch_sizes": list(self.loader.split.micro_batch_sizes),
            "balance": self.balancer.record(),
            "pipeline": pipeline,
            "outer": None if self.outer is None else self.outer.exchange.manifest(),
            "seed": self.config.seed,
            "data": self.training.content,
            "samples_per_epoch": self.training.samples_per_epoch,
            "stream": self.loader.stream_state(progress.samples),
            "base": self.base,
            "probe": score_probe(self.engine, self.mesh, self.world, self.vocab_size),
            "world_size": self.world.world_size,
            "strategy": self.strategy.kind,
            "sharding": describe(self.strategy),
            "device": self.world.device_name,
            "config_digest": digest(self.config),
            "git_commit": _git_commit() if self.world.is_main else None,
            "created_at": time.time(),
            "host": self.world.host,
            "versions": {
                "isles": isles.__version__,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                **({} if self.base is None else {"peft": version("peft")}),
            },
        }


# A run does not change folders, and each save would start git again.
@functools.cache
def _git_commit() -> str | None:
    # The git commit of the folder that the run was started in, if any.
    try:
        result = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None
