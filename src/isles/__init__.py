"""isles: train or fine-tune one language model on whatever GPUs you have."""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"


def report(step: int, **figures: Any) -> None:
    """Tell how far a script of your own has come; see `isles.agent.script.report.report`."""
    from isles.agent.script.report import report

    report(step, **figures)
