"""Runs whose directory lies on another machine: where it is, so that every verb finds it again."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from isles.rundir.records import read_record, write_record


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


def _folder(output_dir: Path) -> Path:
    return output_dir / ".remote"


def write_remote(output_dir: Path, run: RemoteRun) -> None:
    """Remember a run; a second start of it replaces the record."""
    folder = _folder(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    host = run.ssh.rpartition("@")[2].replace("/", "_")
    write_record(folder / f"{run.name}@{host}.json", asdict(run))


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
