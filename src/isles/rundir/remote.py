"""Runs whose directory lies on another machine: where it is, so that every verb finds it again."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from isles.rundir.records import read_record, write_record
from isles.rundir.refusals import clear_errors


@dataclass(frozen=True, slots=True)
class RemoteRun:
    """A run that was started from here, and whose run directory is not here.

    Args:
        name: of the run, as on its own machine.
        ssh: the machine that has the run directory, as ssh takes it from here.
        path: the run directory there.
        lines: bash that comes before Python there, of `launch.setting`.
        python: Python there.
        launcher: ssh, slurm or pbs.
        hosts: every host of the run, as ssh takes it; the first is `ssh`.
        started_at: seconds since the epoch.
    """

    name: str
    ssh: str
    path: str
    lines: tuple[str, ...]
    python: str
    launcher: str
    hosts: tuple[str, ...]
    started_at: float

    @property
    def host(self) -> str:
        """The machine that has the run directory, without the user's name."""
        return self.ssh.rpartition("@")[2]

    @property
    def label(self) -> str:
        """The name by which every verb finds exactly this run."""
        return f"{self.name}@{self.host}"


def _folder(output_dir: Path) -> Path:
    return output_dir / ".remote"


def _file(output_dir: Path, run: RemoteRun) -> Path:
    return _folder(output_dir) / f"{run.label.replace('/', '_')}.json"


def write_remote(output_dir: Path, run: RemoteRun) -> None:
    """Remember a run; a second start of it replaces the record.

    Raises:
        UserError: the folder cannot be written.
    """
    with clear_errors(_folder(output_dir)):
        _folder(output_dir).mkdir(parents=True, exist_ok=True)
        write_record(_file(output_dir, run), asdict(run))


def list_remotes(output_dir: Path) -> list[RemoteRun]:
    """Every remembered run, the oldest first."""
    found = []
    for path in _folder(output_dir).glob("*.json"):
        record = read_record(path) or {}
        try:
            lines, hosts = tuple(record.pop("lines")), tuple(record.pop("hosts"))
            found.append(RemoteRun(**record, lines=lines, hosts=hosts))
        except (KeyError, TypeError):
            continue  # of another version
    return sorted(found, key=lambda run: run.started_at)


def forget_remote(output_dir: Path, run: RemoteRun) -> None:
    """Remember a run no longer: its directory is gone."""
    for path in (_file(output_dir, run), _last_known(output_dir, run)):
        path.unlink(missing_ok=True)


def keep_report(output_dir: Path, run: RemoteRun, report: dict[str, Any]) -> None:
    """Keep what a run's machine has said of it, for when it cannot be reached."""
    path = _last_known(output_dir, run)
    with suppress(OSError):  # without it one only knows less
        path.parent.mkdir(exist_ok=True)
        write_record(path, {"at": time.time(), "report": report}, durable=False)


def last_report(output_dir: Path, run: RemoteRun) -> tuple[float, dict[str, Any]] | None:
    """When a run's machine was last asked, and what it said; None: never."""
    record = read_record(_last_known(output_dir, run)) or {}
    at, report = record.get("at"), record.get("report")
    return (at, report) if isinstance(at, float) and isinstance(report, dict) else None


def _last_known(output_dir: Path, run: RemoteRun) -> Path:
    return _folder(output_dir) / "last" / _file(output_dir, run).name
