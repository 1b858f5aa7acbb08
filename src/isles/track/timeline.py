"""Timeline of clusters as a picture: `python -m isles.track.timeline OUT.png`, JSON on stdin."""

from __future__ import annotations

import json
import sys
from typing import Any

COLORS = {
    "compute": "#4c78a8",
    "outer": "#f2a541",
    "wait": "#d9d9d9",
    "down": "#d62728",
    "joining": "#9467bd",
    "queue": "#bcbd22",
    "away": "#ffffff",
    "done": "#f4f4f4",
}


def draw(picture: dict[str, Any], path: str) -> None:
    """Draw the timeline to a PNG file.

    Args:
        picture: `rows` with a name and spans (state, begin, end); `commits`, `begin` and `end` in
            seconds.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rows, begin, end = picture["rows"], picture["begin"], picture["end"]
    figure = Figure(figsize=(10.0, 1.5 + 0.35 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for place, row in enumerate(rows):
        for span in row["spans"]:
            left, right = max(begin, span["begin"]), min(end, span["end"])
            if right > left:
                axes.barh(place, right - left, left=left, color=COLORS[span["state"]], height=0.8)
    for at in picture["commits"]:
        if begin <= at <= end:
            axes.axvline(at, color="black", linewidth=0.6)
    axes.set_yticks(range(len(rows)), [row["name"] for row in rows])
    axes.invert_yaxis()
    axes.set_xlim(begin, end)
    axes.set_xlabel("seconds (vertical line: the clusters received an average)")
    seen = {span["state"] for row in rows for span in row["spans"]}
    patches = [Patch(color=COLORS[state], label=state) for state in COLORS if state in seen]
    figure.legend(handles=patches, loc="outside right upper", fontsize=8)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    draw(json.load(sys.stdin), sys.argv[1])
