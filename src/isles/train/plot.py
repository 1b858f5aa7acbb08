"""loss.png: the loss curve of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def plot_loss(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """Draw training and validation loss over steps.

    Args:
        rows: of metrics.jsonl.
        title: above the curves.
        path: of the PNG file.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for kind, label, style in (("train", "training", "-"), ("eval", "validation", "o-")):
        points = [(r["step"], r["loss"]) for r in rows if r["kind"] == kind and r["loss"]]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label, markersize=4)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
