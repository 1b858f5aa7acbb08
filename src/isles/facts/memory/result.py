"""Memory of a rank in one training step, by cause and by phase."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PhaseMemory:
    """Bytes on the device in one phase of a step, by cause."""

    name: str
    weights: float
    optimizer: float
    gradients: float
    gathered: float = 0.0
    activations: float = 0.0
    logits: float = 0.0

    @property
    def total(self) -> float:
        return sum(self.by_cause().values())

    def by_cause(self) -> dict[str, float]:
        """Bytes by cause, in the order of tables."""
        return {
            "weights": self.weights,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "activations": self.activations,
            "logits": self.logits,
            "gathered": self.gathered,
        }


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Memory of a rank: on the device in each phase of a step, and in main memory.

    Args:
        moments: phases in their order.
        host: bytes in main memory for offloaded tensors.
        saved: bytes in main memory of the copy for a checkpoint that is written while training
            continues.
    """

    moments: tuple[PhaseMemory, ...]
    host: float = 0.0
    saved: float = 0.0

    @property
    def peak(self) -> PhaseMemory:
        """The phase with the most memory."""
        return max(self.moments, key=lambda moment: moment.total)

    @property
    def standing(self) -> float:
        """Peak of bytes without activations and logits."""
        return max(moment.total - moment.activations - moment.logits for moment in self.moments)
