"""Finding runs by the names that people type."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from isles.errors import UserError
from isles.rundir.paths import RunDir
from isles.rundir.records import read_record

_NUMBERED = re.compile(r"(?P<name>.+)-(?P<number>\d+)")
_LISTED = 8


def is_run_dir(path: Path) -> bool:
    """Whether a folder is a run directory."""
    return RunDir(path).resolved.is_file()


def list_runs(output_dir: Path) -> list[RunDir]:
    """The runs in a folder, the one that was started last at the end."""
    if not output_dir.is_dir():
        return []
    runs = [RunDir(path) for path in output_dir.iterdir() if is_run_dir(path)]
    return sorted(runs, key=lambda run: (_started_at(run), run.name))


def numbered_runs(output_dir: Path, name: str) -> list[tuple[int, RunDir]]:
    """Every entry NAME-N of a folder with its N, in order; not all of them need be runs."""
    if not output_dir.is_dir():
        return []
    found = []
    for path in output_dir.iterdir():
        match = _NUMBERED.fullmatch(path.name)
        if match and match["name"] == name:
            found.append((int(match["number"]), RunDir(path)))
    return sorted(found, key=lambda entry: entry[0])


def find_run(name_or_path: str | None, output_dir: Path) -> RunDir:
    """The run that a command means.

    Args:
        name_or_path: a path, a full name (`quickstart-1`), the name in the run file
            (`quickstart`: its newest run), or None: the run that was started last.
        output_dir: where runs are looked for by name.

    Raises:
        UserError: there is none; the message names those there are.
    """
    runs = list_runs(output_dir)
    if name_or_path is None:
        if runs:
            return runs[-1]
        raise UserError(
            f"there is no run in {output_dir}/",
            fix="start one with `isles train run.yaml`, or say where they are: --output-dir",
        )
    for path in (Path(name_or_path).expanduser(), output_dir / name_or_path):
        if is_run_dir(path):
            return RunDir(path)
    named = [run for _, run in numbered_runs(output_dir, name_or_path) if is_run_dir(run.path)]
    if named:
        return named[-1]
    raise _not_found(name_or_path, output_dir, runs)


def _not_found(given: str, output_dir: Path, runs: list[RunDir]) -> UserError:
    if given.endswith((".yaml", ".yml")):
        what = f"{given} is a run file; this command takes the name of a run"
    elif Path(given).is_dir():
        what = f"{given} is not a run directory: it holds no resolved.yaml"
    else:
        what = f"there is no run {given!r} in {output_dir}/"
    names = [run.name for run in reversed(runs)]
    stems = {name: name.rpartition("-")[0] for name in names}
    if not names:
        return UserError(what, fix="start one with `isles train run.yaml`, or give --output-dir")
    close = difflib.get_close_matches(given, [*names, *stems.values()], n=1)
    if close:
        return UserError(what, fix=f"did you mean {close[0]}?")
    more = f" and {len(names) - _LISTED} older ones" if len(names) > _LISTED else ""
    return UserError(what, fix=f"the runs there are: {', '.join(names[:_LISTED])}{more}")


def _started_at(run: RunDir) -> float:
    attempt = run.last_attempt()
    record = read_record(attempt.launch) if attempt else None
    begun_at = (record or {}).get("begun_at")
    return float(begun_at) if isinstance(begun_at, int | float) else run.path.stat().st_mtime
