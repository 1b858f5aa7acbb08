"""The rules between the keys that say what is fine-tuned, on what data, and how."""

from __future__ import annotations

from collections.abc import Iterator

from isles.config.run import RunConfig
from isles.config.violation import Violation


def finetune_rules(config: RunConfig) -> Iterator[Violation]:
    """Every rule about adapters, kinds of data and methods that is broken."""
    yield from _stochastic_rounding(config)


def _stochastic_rounding(config: RunConfig) -> Iterator[Violation]:
    training = config.training
    if not training.stochastic_rounding:
        return
    if training.precision != "bf16-true":
        yield Violation(
            ("training.stochastic_rounding", "training.precision"),
            f"stochastic_rounding is for weights in bf16, and precision {training.precision} keeps "
            "them in fp32",
            "delete it, or use precision: bf16-true",
        )
    if training.optimizer not in ("adamw", "adamw_8bit"):
        yield Violation(
            ("training.stochastic_rounding", "training.optimizer"),
            f"optimizer {training.optimizer} does not round stochastically",
            "delete it, or use optimizer: adamw or adamw_8bit",
        )
