"""Draw the bar charts of docs/pictures from figures of docs/benchmarks.md.

`python docs/make_charts.py` writes them; `--check` fails if one differs, or if the page has another
figure. A chart of a benchmark that was run again takes the new figures here.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from html import escape
from pathlib import Path

DOCS = Path(__file__).parent
WIDTH, LABELS, BAR, ROW = 720, 250, 22, 34
GRAY, BLUE = "#66727f", "#3f51b5"


@dataclass(frozen=True)
class Bar:
    """A bar; `figure` is a number of the page, and `text` shows it to the reader."""

    label: str
    figure: str
    text: str
    is_ours: bool = False

    @property
    def length(self) -> float:
        """The number that the bar shows."""
        return float(self.figure)


@dataclass(frozen=True)
class Chart:
    """A chart: its file below docs/pictures, the number at its full width, and a line below it."""

    name: str
    title: str
    full: float
    bars: tuple[Bar, ...]
    below: str


CHARTS = (
    Chart(
        "unequal-ranks",
        "Step time of three ranks with speeds 1 : 1/2 : 1/3, as a multiple of the ideal time",
        2.2,
        (
            Bar("even split", "2.004", "2.00 × the ideal"),
            Bar("isles, balance: auto", "1.046", "1.05 ×", is_ours=True),
            Bar("ideal", "1", "1.00 ×"),
        ),
        "Shorter is better. DDP on CPU cores: benchmarks/balance.py --quick",
    ),
    Chart(
        "slow-link",
        "Share of the time that two clusters compute, with links of 100 Mbit/s",
        1.15,
        (
            Bar("DDP", "0.114", "11 %, with 404 × the bytes"),
            Bar("isles with DiLoCo (int8)", "0.995", "99.5 %", is_ours=True),
        ),
        "Longer is better. 15M parameters on CPU cores: benchmarks/slow_link.py --quick",
    ),
)


def svg(chart: Chart) -> str:
    """The chart as a file: text and rectangles, readable on a light and on a dark page."""
    height = 78 + ROW * len(chart.bars)
    scale = (WIDTH - LABELS - 20) / chart.full
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img"',
        '     font-family="system-ui, sans-serif" font-size="14" fill="#1f2933">',
        f"<title>{escape(chart.title)}</title>",
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#f7f8fa"/>',
        f'<text x="20" y="30" font-size="16" font-weight="600">{escape(chart.title)}</text>',
    ]
    for index, bar in enumerate(chart.bars):
        top = 48 + ROW * index
        width = bar.length * scale
        inside = width > WIDTH - LABELS - 200
        x, anchor, color = (
            (LABELS + width - 8, "end", "#ffffff") if inside else (LABELS + width + 8, "start", "")
        )
        fill = f' fill="{color}"' if color else ""
        lines += [
            f'<text x="{LABELS - 12}" y="{top + 16}" text-anchor="end">{escape(bar.label)}</text>',
            f'<rect x="{LABELS}" y="{top}" width="{width:.1f}" height="{BAR}" rx="3" '
            f'fill="{BLUE if bar.is_ours else GRAY}"/>',
            f'<text x="{x:.1f}" y="{top + 16}" text-anchor="{anchor}"{fill}>'
            f"{escape(bar.text)}</text>",
        ]
    below = f'<text x="20" y="{height - 14}" font-size="12" fill="#52606d">'
    return "\n".join([*lines, f"{below}{escape(chart.below)}</text>", "</svg>"]) + "\n"


def main() -> int:
    """Write the charts, or compare them."""
    page = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    faults = [
        f"docs/benchmarks.md has no {bar.figure} for {chart.name}: change the chart"
        for chart in CHARTS
        for bar in chart.bars
        if bar.figure not in page
    ]
    for chart in CHARTS:
        path, text = DOCS / "pictures" / f"{chart.name}.svg", svg(chart)
        if "--check" not in sys.argv:
            path.write_text(text, encoding="utf-8")
        elif not path.is_file() or path.read_text(encoding="utf-8") != text:
            faults.append(f"{path} is old: python docs/make_charts.py")
    sys.stderr.writelines(f"{fault}\n" for fault in faults)
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
