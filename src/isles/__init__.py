"""isles: train or fine-tune one language model on whatever GPUs you have."""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"


def report(step: int, **figures: Any) -> None:
    """Tell how far a script of your own has come; see `isles.run.report.report`."""
    from isles.run.report import report

    report(step, **figures)
