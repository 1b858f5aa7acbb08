"""Runs whose directory lies on another machine: where it is, so that every verb finds it again."""

from __future__ import annotations

import hashlib
import shlex
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from isles.run.records import read_record, write_record
from isles.run.refusals import clear_errors


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
        folder: where it is remembered here; empty where that is not known.
        elsewhere: the run directory on the other hosts; empty: the same path.
    """

    name: str
    ssh: str
    path: str
    lines: tuple[str, ...]
    python: str
    launcher: str
    hosts: tuple[str, ...]
    started_at: float
    folder: str = field(default="", compare=False)
    elsewhere: str = ""

    @property
    def host(self) -> str:
        """The machine that has the run directory, without the user's name."""
        return self.ssh.rpartition("@")[2]

    def path_on(self, host: str) -> str:
        """The run directory on one of its hosts."""
        return self.path if host == self.ssh else self.elsewhere or self.path

    @property
    def label(self) -> str:
        """Its name for people."""
        return f"{self.name}@{self.host}"

    @property
    def place(self) -> str:
        """What means this run and no other of the same label."""
        return f"{self.ssh}:{self.path}"

    @property
    def behind(self) -> str:
        """What is typed behind its name, so that a verb finds it from here."""
        if not self.folder or Path(self.folder).absolute() == RUNS.absolute():
            return f"@{self.host}"
        return f"@{self.host} --output-dir {shlex.quote(self.folder)}"

    @property
    def typed(self) -> str:
        """What is typed after a verb to mean it."""
        return f"{self.name}{self.behind}"


RUNS = Path("runs")
"""Where runs are looked for if nothing else is said."""


def _folder(output_dir: Path) -> Path:
    return output_dir / ".remote"


def _file(output_dir: Path, run: RemoteRun) -> Path:
    # The users of a host may each have a run of this name, in folders of their own.
    digest = hashlib.sha256(f"{run.host}:{run.path}".encode()).hexdigest()[:8]
    return _folder(output_dir) / f"{run.label.replace('/', '_')}.{digest}.json"


def _old_file(output_dir: Path, run: RemoteRun) -> Path | None:
    """Where the first versions of isles kept this run; None where they keep another there."""
    path = _folder(output_dir) / f"{run.label.replace('/', '_')}.json"
    is_it = (read_record(path) or {}).get("path") == run.path
    return path if is_it else None


def write_remote(output_dir: Path, run: RemoteRun) -> RemoteRun:
    """Remember a run; a second start of it replaces the record.

    Returns:
        The run, as `list_remotes` gives it.

    Raises:
        UserError: the folder cannot be written.
    """
    with clear_errors(_folder(output_dir)):
        _folder(output_dir).mkdir(parents=True, exist_ok=True)
        record = asdict(run)
        del record["folder"]
        write_record(_file(output_dir, run), record)
        if (old := _old_file(output_dir, run)) is not None:
            old.unlink(missing_ok=True)
    return replace(run, folder=str(output_dir))


def list_remotes(output_dir: Path) -> list[RemoteRun]:
    """Every remembered run, the oldest first."""
    found = []
    known = {each.name for each in fields(RemoteRun)}
    for path in _folder(output_dir).glob("*.json"):
        record = {key: value for key, value in (read_record(path) or {}).items() if key in known}
        try:
            lines, hosts = tuple(record.pop("lines")), tuple(record.pop("hosts"))
            run = RemoteRun(**{**record, "lines": lines, "hosts": hosts, "folder": str(output_dir)})
        except (KeyError, TypeError):
            continue  # of another version, which has not said enough
        found.append(run)
    return sorted(found, key=lambda run: run.started_at)


def forget_remote(output_dir: Path, run: RemoteRun) -> None:
    """Remember a run no longer: its directory is gone."""
    old = _old_file(output_dir, run)
    for path in (_file(output_dir, run), _last_known(output_dir, run), old):
        if path is not None:
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
