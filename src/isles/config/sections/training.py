"""The sections `training` and `watchdog`, the length of a run and the learning rate of each
step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from isles.config.sections.base import DurationS, Section, Text
from isles.errors import MissingDependencyError, not_installed
from isles.facts.gpus import Products

PositiveInt = Annotated[int, Field(ge=1, le=10**12)]
Fraction = Annotated[float, Field(ge=0, lt=1)]

Precision = Literal["32-true", "bf16-mixed", "fp16-mixed", "fp8-mixed", "bf16-true"]
Scheduler = Literal["constant", "linear", "cosine", "wsd"]
OptimizerName = Literal["adamw", "adamw_8bit", "sgd", "muon"]


class TrainingConfig(Section):
    """Length, batch size, optimizer and precision."""

    script: Text | None = None
    """Your own Python script. isles starts it once per rank, with torchrun's variables, see
    docs/own-script.md. The run file then needs only name, training.script and clusters."""

    script_args: Annotated[tuple[Text | int | float, ...], Field(strict=False)] = ()
    """Arguments of the script, such as [--epochs, 20]. Process lists show them, so do not put
    secrets here."""

    method: Literal["causal_lm", "dpo"] = "causal_lm"
    """causal_lm predicts the next token of text, chats or instructions. dpo prefers the chosen
    answer of a preference source to the rejected answer (arXiv:2305.18290)."""

    dpo_beta: Annotated[float, Field(gt=0, le=100)] = 0.1
    """With dpo: a larger value keeps the model closer to its initial weights."""

    dpo_label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """With dpo: assumed share of pairs with swapped answers."""

    max_steps: PositiveInt | None = None
    """Length of the run in inner (optimizer) steps. On the command line, max_steps and
    num_train_epochs replace each other."""

    num_train_epochs: Annotated[float, Field(gt=0, le=10**6)] | None = None
    """Length of the run in passes over the training data. A pass reads each sample once, and its
    last step may have fewer samples. If sources have weights, a pass repeats some samples and omits
    others."""

    max_time: Annotated[DurationS, Field(gt=0)] | None = None
    """Wall-clock limit of training in one attempt, without preparation. isles then saves and exits
    with 85, and `isles train` resumes the run. Without max_steps and num_train_epochs, max_time is
    the length of the whole run, over all attempts, and the run then finishes with exit code 0."""

    global_batch_size: PositiveInt = 64
    """Sequences, or preference pairs, per inner step, over all ranks and gradient accumulation."""

    micro_batch_size: (
        PositiveInt | Literal["auto"] | Annotated[dict[str, PositiveInt], Field(min_length=1)]
    ) = "auto"
    """Sequences per rank in one forward pass. auto: the largest number that fits on the GPU, or at
    most 8 on a CPU. A map, such as {big-box: 16}, sets the number for some hosts, and other hosts
    have auto. isles derives the gradient accumulation."""

    learning_rate: Annotated[float, Field(gt=0, le=100)] = 4e-4
    """Peak learning rate."""

    lr_scheduler_type: Scheduler = "cosine"
    """Learning rate after the warm-up. wsd: constant, then a linear decay."""

    warmup_steps: Annotated[int, Field(ge=0, le=10**12)] | Fraction = 0
    """Steps of linear warm-up. A number below 1, such as 0.05, is a share of the run."""

    decay_steps: PositiveInt | None = None
    """With wsd: steps of the final decay. Default: a fifth of the run."""

    min_lr_ratio: Fraction = 0.0
    """Final learning rate as a share of the peak (linear, cosine and wsd)."""

    optimizer: OptimizerName = "adamw"
    """adamw_8bit keeps two bytes of state per weight instead of eight, and needs `pip install
    'isles[torchao]'`. muon uses AdamW for embeddings, norms and the head."""

    adam_beta1: Fraction = 0.9
    """Decay of AdamW's first moment."""

    adam_beta2: Fraction = 0.95
    """Decay of AdamW's second moment."""

    adam_epsilon: Annotated[float, Field(gt=0, lt=1)] = 1e-8
    """AdamW's denominator offset."""

    momentum: Fraction = 0.9
    """Momentum of sgd and muon."""

    weight_decay: Annotated[float, Field(ge=0, lt=10)] = 0.1
    """Weight decay of matrices, but not of norms and biases. Decoupled in adamw and muon."""

    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Largest global gradient norm. null disables clipping."""

    precision: Precision = "bf16-mixed"
    """bf16-mixed: fp32 weights and bf16 matmuls. fp16-mixed: the same with fp16 and a loss scaler.
    bf16-true: bf16 weights, which need the least memory. fp8-mixed: as bf16-mixed, with fp8 matmuls
    in the blocks, on NVIDIA GPUs from compute capability 8.9 on. isles never ran it on a GPU. It
    needs `pip install 'isles[torchao]'`. 32-true: fp32 weights and matmuls, without tensor cores
    unless tf32 is true."""

    tf32: bool = False
    """Multiply fp32 matrices in TF32, with the range of fp32 and the 10 mantissa bits of fp16, on
    NVIDIA GPUs of compute capability 8.0 or newer. By data sheets, 32-true is then up to 8 times
    faster on an A100 and no faster on a GeForce. Other precisions have almost no fp32 matmuls."""

    @property
    def products(self) -> Products:
        """The type that matrices are multiplied in."""
        if self.precision != "32-true":
            return "16-bit"
        return "tf32" if self.tf32 else "fp32"

    stochastic_rounding: bool = False
    """With bf16-true, and adamw or adamw_8bit: round updated weights at random, so that small
    updates have an effect on average. Needs `pip install 'isles[torchao]'`."""

    gradient_checkpointing: Literal["none", "full", "selective", "offload"] = "none"
    """Recompute activations in the backward pass to save memory. selective keeps the results of
    attention and of every second matrix product. full keeps only the input of each block. offload
    keeps these inputs in main memory, for long rows."""

    torch_compile: Literal["auto"] | bool = "auto"
    """Compile the model's blocks with torch.compile, for a slower start and faster steps. auto
    compiles on NVIDIA GPUs from compute capability 8.0 on, if all rows have one length (packed
    data) and the run has at least 300 steps; never with pp_size above 1, deepspeed, qlora or DoRA.
    auto always compiles with fp8-mixed. true also pads each row to seq_length."""

    logging_steps: PositiveInt = 10
    """Steps between two records of loss, speed and memory."""

    eval_steps: PositiveInt | None = 200
    """Steps between two evaluations. isles also evaluates at the end. null evaluates only at the
    end."""

    eval_samples: PositiveInt | None = 512
    """Validation sequences, the same in each evaluation. null uses all."""


class WatchdogConfig(Section):
    """Notices a step that takes far longer than usual, reports the slow rank and its position, and
    keeps the stacks of all ranks in the run directory."""

    slow_factor: Annotated[float, Field(ge=2, le=10_000)] = 10.0
    """isles reports a step as stuck after this multiple of the usual time of a step."""

    min_time: Annotated[DurationS, Field(ge=1)] = 60.0
    """isles reports no step as stuck before this time."""

    max_silence: DurationS | None = 1800.0
    """With training.script: isles reports the script as stuck if no rank has reported a step or
    printed anything for this time. null disables this report."""

    action: Literal["report", "stop"] = "report"
    """report logs the step, and the ranks wait until clusters.0.comm_timeout is over. stop restarts
    the ranks up to clusters.0.max_restarts times, then ends the run."""


def needs_torchao(training: TrainingConfig) -> bool:
    """True if the run uses an optimizer or the fp8 products of torchao."""
    return (
        training.optimizer == "adamw_8bit"
        or training.stochastic_rounding
        or training.precision == "fp8-mixed"
    )


def missing_torchao(training: TrainingConfig) -> MissingDependencyError | None:
    """The error to raise if the run needs torchao and torchao is not installed."""
    if not needs_torchao(training):
        return None
    key, value = "stochastic_rounding", "true"
    if training.optimizer == "adamw_8bit":
        key, value = "optimizer", "adamw_8bit"
    elif training.precision == "fp8-mixed":
        key, value = "precision", "fp8-mixed"
    return not_installed("torchao", f"{key}: {value}", f"training.{key}", "torchao")


@dataclass(frozen=True, slots=True)
class Epochs:
    """The global batches of a run whose length is in epochs. The last step of an epoch has the rest
    of its samples.

    Args:
        samples: samples in one pass over the data.
        end: samples of the whole run, which may end within a pass.
        batch: samples in each of the other steps.
    """

    samples: int
    end: int
    batch: int

    @classmethod
    def of(cls, config: TrainingConfig, samples_per_epoch: int) -> Epochs | None:
        """The epochs of a run, or None if its length is in steps or a time, with steps of equal
        size."""
        if config.num_train_epochs is None or config.max_steps is not None:
            return None
        end = max(1, round(config.num_train_epochs * samples_per_epoch))
        return cls(samples_per_epoch, end, config.global_batch_size)

    def batch_at(self, cursor: int) -> int:
        """Number of samples of the step that begins at this sample, or 0 at the end of the run."""
        left = min(self.samples - cursor % self.samples, self.end - cursor)
        return max(0, min(self.batch, left))

    def steps_from(self, cursor: int) -> int:
        """Steps from this sample to the end of the run."""
        if cursor >= self.end:
            return 0
        # The rest of the epoch, whole epochs, and a part of the last one.
        rest = min(self.samples - cursor % self.samples, self.end - cursor)
        epochs, part = divmod(self.end - cursor - rest, self.samples)
        each, first, last = (-(-n // self.batch) for n in (self.samples, rest, part))
        return first + epochs * each + last


def length_in_steps(
    config: TrainingConfig, samples_per_epoch: int | None, *, step: int = 0, cursor: int = 0
) -> int | None:
    """The length of a run in inner steps.

    Args:
        config: the run file's section.
        samples_per_epoch: training samples in one pass over the data, or None if unknown.
        step, cursor: finished steps, and the next sample.

    Returns:
        None if the length is a time, or unknown without the number of samples.
    """
    if config.max_steps is not None or samples_per_epoch is None:
        return config.max_steps
    epochs = Epochs.of(config, samples_per_epoch)
    return None if epochs is None else step + epochs.steps_from(cursor)


def warmup_in_steps(config: TrainingConfig, total_steps: int | None) -> int:
    """The warm-up of a run in inner steps. A share always leaves one step at the peak.

    Args:
        config: the run file's section.
        total_steps: length of the run; None only if the warm-up is not a share.
    """
    if isinstance(config.warmup_steps, int):
        return config.warmup_steps
    assert total_steps is not None, "rules refuse a share of a run without a last step"
    return min(math.ceil(config.warmup_steps * total_steps), total_steps - 1)


def learning_rate(config: TrainingConfig, step: int, total_steps: int | None) -> float:
    """The learning rate of an inner step.

    Args:
        config: the run file's section.
        step: 1 for the first step.
        total_steps: length of the run; None only for a constant rate.

    Returns:
        The rate. Falling shapes reach `min_lr_ratio` of the peak just after the last step, so that
        no step is wasted on a rate of zero.
    """
    peak, warmup = config.learning_rate, warmup_in_steps(config, total_steps)
    if step <= warmup:
        return peak * step / (warmup + 1)
    if config.lr_scheduler_type == "constant":
        return peak
    assert total_steps is not None, "rules let only a constant rate run without an end"
    falling = total_steps - warmup
    if config.lr_scheduler_type == "wsd":
        falling = min(falling, config.decay_steps or max(1, total_steps // 5))
    start = total_steps - falling
    progress = min(1.0, max(0.0, (step - 1 - start) / max(1, falling)))
    low = config.min_lr_ratio
    if config.lr_scheduler_type == "cosine":
        return peak * (low + (1 - low) * (1 + math.cos(math.pi * progress)) / 2)
    return peak * (low + (1 - low) * (1 - progress))
