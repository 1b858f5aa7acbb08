"""`isles plan RUN_FILE --simulate`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

from isles.config.load import Loaded
from isles.errors import ExitCode, MissingDependencyError, UserError
from isles.plan.simulate.capacity import capacity
from isles.plan.simulate.engine import settled, simulate
from isles.plan.simulate.fleet import fleet_of, load_fleet
from isles.plan.simulate.result import Result
from isles.plan.simulate.search import search
from isles.plan.simulate.setting import setting_of
from isles.plan.simulate.show import report, window

DAY_H = 24.0
"""Simulated where neither --hours nor max_steps says how long."""


def simulate_run(
    loaded: Loaded,
    fleet_path: Path | None,
    hours: float | None,
    seed: int,
    *,
    as_json: bool,
    png: Path | None,
    print_line: Callable[[str], None],
) -> int:
    """Simulate a run, and print what becomes of it.

    Args:
        fleet_path: left out: the clusters of the run file, with assumptions that are printed.
        hours: of the virtual clock, at most; left out: to the run's last step, or a day.
        png: where the timeline is drawn, too.

    Raises:
        UserError: the run has no outer steps, or the fleet file has issues.
    """
    if hours is not None and not 0 < hours <= 100_000:
        raise UserError(f"{hours:g} hours cannot be simulated", where="--hours", fix="such as 24")
    if png is not None and find_spec("matplotlib") is None:
        raise MissingDependencyError(
            "the picture needs the package matplotlib, which is not installed",
            where="--png",
            fix="pip install matplotlib, or look at the timeline in the terminal",
        )
    if png is not None and not png.absolute().parent.is_dir():
        raise UserError(
            f"there is no folder {png.absolute().parent}",
            where="--png",
            fix="make it, or give another",
        )
    notes: list[str] = []
    if fleet_path is None:
        setting = setting_of(loaded)
        fleet, notes = fleet_of(loaded, setting)
    else:
        fleet = load_fleet(fleet_path)
        setting = setting_of(loaded, parameters=fleet.parameters)
    setting = settled(fleet, setting)
    if hours is None and setting.max_steps is None:
        hours = DAY_H
    result = simulate(fleet, setting, hours=hours, seed=seed)
    limits, found = capacity(fleet, setting), search(fleet, setting)
    if as_json:
        figures = result.figures() | {
            "assumed": notes,
            "one_hub": {"carries": limits.first.clusters, "until": limits.first.what},
            "limits": [asdict(limit) for limit in limits.limits],
            "search": asdict(found),
        }
        print_line(json.dumps(figures))
    else:
        print_line(report(fleet, setting, result, limits, found, notes))
    if png is not None:
        _draw(result, png)
    return ExitCode.OK


def _draw(result: Result, path: Path) -> None:
    # In a process of its own: this wing imports nothing that only a picture needs.
    begin, end = window(result)
    rows = [
        {"name": name, "spans": [asdict(span) for span in spans if span.end > begin]}
        for name, spans in result.timeline
    ]
    picture = {"rows": rows, "commits": result.commits, "begin": begin, "end": end}
    command = [sys.executable, "-m", "isles.track.timeline", str(path)]
    done = subprocess.run(
        command, input=json.dumps(picture), text=True, capture_output=True, check=False
    )
    if done.returncode:
        raise UserError(
            f"the picture cannot be written: {done.stderr.strip().splitlines()[-1][:200]}",
            where=str(path),
            fix="give another --png",
        )
