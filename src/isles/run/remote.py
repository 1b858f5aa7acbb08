"""Runs whose directory is on another machine, and runs of several clusters.

The output folder of the start has a record of both, so that every command finds them by name.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from isles.errors import UserError
from isles.run.entry import is_own, make_own_folder
from isles.run.nodes import Host
from isles.run.owner import not_own
from isles.run.paths import RunDir, is_file
from isles.run.records import (
    MAX_SHOWN_BYTES,
    as_kind,
    explain_write_errors,
    read_any,
    read_own,
    write_record,
)

RUNS = Path("runs")
"""Default folder of runs."""

Word = Annotated[str, Field(pattern=r"^([^-][^\n]*)?$")]
"""A path or a program on a command line, never an option."""

_CLUSTERS = "clusters.json"


@dataclass(frozen=True, slots=True)
class RemoteRun:
    """A run started from this machine, with its run directory on another machine.

    Args:
        ssh: the machine that has the run directory, as a name for ssh. For a run on Kubernetes,
            the name of a record; see `launch/kubernetes/reach.py`.
        path: the run directory on that machine.
        lines: bash to run before Python on that machine, from `launch.setting`.
        hosts: names of all hosts of the run for ssh. The first is `ssh`.
        started_at: seconds since the epoch.
        folder: local folder of the record, or empty if unknown.
        elsewhere: the run directory on the other hosts, or empty if the path is the same.
        owner: name of the other user who wrote the record; empty if this user wrote it.
    """

    name: str
    ssh: Host
    path: Word
    lines: tuple[str, ...]
    python: Word
    launcher: str
    hosts: tuple[Host, ...]
    started_at: float
    folder: str = field(default="", compare=False)
    elsewhere: str = ""
    owner: str = field(default="", compare=False)

    def require_own(self) -> None:
        """UserError: another user has written the record."""
        if self.owner:
            raise not_own(
                f"run the commands in the record of {self.label}", self.owner, self.folder
            )

    @property
    def host(self) -> str:
        return self.ssh.rpartition("@")[2]

    def path_on(self, host: str) -> str:
        """The run directory on one of its hosts."""
        return self.path if host == self.ssh else self.elsewhere or self.path

    @property
    def label(self) -> str:
        """NAME@HOST, for messages."""
        return f"{self.name}@{self.host}"

    @property
    def place(self) -> str:
        """HOST:PATH, which matches exactly one run, unlike the label."""
        return f"{self.ssh}:{self.path}"

    @property
    def behind(self) -> str:
        """Suffix of its name, with which a command on this machine finds it."""
        if not self.folder or Path(self.folder).absolute() == RUNS.absolute():
            return f"@{self.host}"
        return f"@{self.host} --output-dir {shlex.quote(self.folder)}"

    @property
    def typed(self) -> str:
        """Its name for a command."""
        return f"{self.name}{self.behind}"


def _folders(output_dir: Path) -> list[Path]:
    # Folders of records. If another user has made the first folder, or a link with its name, this
    # user has a folder with the uid. isles follows no link of another user.
    found = sorted(output_dir.glob(".remote")) + sorted(output_dir.glob(".remote.*"))
    return [path for path in found if not path.is_symlink() or is_own(path)]


def _own_folder(output_dir: Path) -> Path:
    shared = output_dir / ".remote"
    return shared if is_own(shared) else output_dir / f".remote.{os.geteuid()}"


def _file_name(run: RemoteRun) -> str:
    # Each user of a host may have a run of this name in a separate folder.
    digest = hashlib.sha256(f"{run.host}:{run.path}".encode()).hexdigest()[:8]
    return f"{run.label.replace('/', '_')}.{digest}.json"


def write_remote(output_dir: Path, run: RemoteRun) -> RemoteRun:
    """Record a run, and return it like `list_remotes`. UserError: the record is not writable."""
    path = _own_folder(output_dir) / _file_name(run)
    with explain_write_errors(path.parent):
        output_dir.mkdir(parents=True, exist_ok=True)
        make_own_folder(path.parent)
        record = asdict(run)
        del record["folder"], record["owner"]
        write_record(path, record)
    return replace(run, folder=str(output_dir))


def list_remotes(output_dir: Path) -> list[RemoteRun]:
    """Every recorded run, oldest first."""
    found = dict[str, RemoteRun]()
    for path in (path for folder in _folders(output_dir) for path in folder.glob("*.json")):
        with suppress(ValidationError):  # of another version of isles, which has fewer fields
            record = read_any(path)
            run = as_kind(RemoteRun, record)
            owner = record.owner if record else ""
            run = replace(run, folder=str(output_dir), owner=owner)
            old = found.get(path.name, run)
            # If a run has two records, this user's own record counts, then the newer record.
            found[path.name] = max(old, run, key=lambda run: (not run.owner, run.started_at))
    return sorted(found.values(), key=lambda run: run.started_at)


def forget_remote(output_dir: Path, run: RemoteRun) -> None:
    """Delete the record of a run whose directory is gone."""
    for folder in _folders(output_dir):
        for place in (folder, folder / "last"):
            with suppress(OSError):  # no permission for another user's folder
                if is_own(place) or not place.is_symlink():
                    (place / _file_name(run)).unlink(missing_ok=True)


def keep_report(output_dir: Path, run: RemoteRun, report: dict[str, Any]) -> None:
    """Keep the status from a run's machine, for times when the machine is unreachable."""
    path = _own_folder(output_dir) / "last" / _file_name(run)
    with suppress(OSError, UserError):  # the status is only a convenience
        make_own_folder(path.parent.parent)
        make_own_folder(path.parent)
        write_record(path, {"at": time.time(), "report": report}, durable=False)


def last_report(output_dir: Path, run: RemoteRun) -> tuple[float, dict[str, Any]] | None:
    """Time and content of the last status from a run's machine, or None."""
    files = [folder / "last" / _file_name(run) for folder in _folders(output_dir)]
    record: dict[str, Any] = next(
        filter(None, (read_own(file, MAX_SHOWN_BYTES) for file in files)), {}
    )
    at, report = record.get("at"), record.get("report")
    return (at, report) if isinstance(at, float) and isinstance(report, dict) else None


@dataclass(frozen=True, slots=True)
class ClusterRun:
    """One cluster of a run of several clusters, and itself a run.

    Args:
        launcher: kubernetes, local, manual, pbs, ray, skypilot, slurm or ssh.
        path: its run directory, on its machine, or empty if it never started.
        ssh: ssh destination of that machine, or empty for this machine.
    """

    name: str
    launcher: str
    path: Word = ""
    ssh: Host = ""
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class MultiClusterRun:
    """A run of several clusters, in the record of the machine that started it.

    Args:
        path: its folder, OUTPUT_DIR/NAME-N.
        clusters: its clusters, in the order of the run file.
        begun_at: start of its first attempt, seconds since the epoch.
        config: every value of the run file at its last attempt.
        hub: HOST:PORT of a separate hub, or empty if the hub belongs to this run or the run has no
            hub (`meets`).
        typed: the command that resumes the run, as the user types it; empty if unknown.
        owner: name of the other user who wrote the record; empty if this user wrote it.
    """

    path: Path
    clusters: tuple[ClusterRun, ...]
    begun_at: float
    started_at: float
    config: dict[str, Any]
    hub: str = ""
    typed: str = ""
    owner: str = field(default="", compare=False)

    def require_own(self, doing: str) -> None:
        """UserError: another user has written the record. `doing`: the refused action."""
        if self.owner:
            raise not_own(doing, self.owner, self.path / _CLUSTERS)

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def run_file(self) -> Path:
        return self.path / "run.yaml"

    @property
    def state(self) -> Path:
        """The state directory of its own hub."""
        return self.path / "hub"

    @property
    def meets(self) -> bool:
        """True if its clusters have a hub, which other engines do not need."""
        return self.engine == "hub"

    @property
    def engine(self) -> str:
        """How its clusters meet: `outer.engine`."""
        outer = self.config.get("outer")
        engine = outer.get("engine") if isinstance(outer, dict) else None
        return engine if isinstance(engine, str) and engine else "hub"

    @property
    def join_file(self) -> Path:
        """The join line: a secret."""
        return (self.path if self.hub else self.state) / "join"

    def cluster(self, name: str) -> ClusterRun:
        """The cluster of this name. UserError: it does not exist."""
        for cluster in self.clusters:
            if cluster.name == name:
                return cluster
        raise UserError(
            f"{self.name} has no cluster {name}",
            where="--cluster",
            fix=f"use one of: {', '.join(cluster.name for cluster in self.clusters)}",
        )

    def having(self, cluster: ClusterRun) -> MultiClusterRun:
        """The same, with another record of one cluster."""
        clusters = tuple(cluster if c.name == cluster.name else c for c in self.clusters)
        return replace(self, clusters=clusters)

    def write(self) -> None:
        """Write its record. UserError: the record is not writable."""
        record = {k: v for k, v in asdict(self).items() if k not in ("path", "owner")}
        with explain_write_errors(self.path):
            write_record(self.path / _CLUSTERS, record)


def is_multi_cluster(path: Path) -> bool:
    return is_file(path / _CLUSTERS)


def read_multi_cluster(path: Path) -> MultiClusterRun | None:
    """The run of several clusters in a folder, or None."""
    with suppress(ValidationError):  # of another version of isles
        record = read_any(path / _CLUSTERS)
        given = {**(record or {}), "path": path, "owner": record.owner if record else ""}
        if given["owner"]:
            given["typed"] = ""  # isles suggests no command of another user
        return as_kind(MultiClusterRun, given)
    return None


def list_multi_cluster(output_dir: Path) -> list[MultiClusterRun]:
    """The runs of several clusters in a folder, by start time. The newest run is the last."""
    if not output_dir.is_dir():
        return []
    found = [read_multi_cluster(path) for path in output_dir.iterdir() if is_multi_cluster(path)]
    return sorted((run for run in found if run is not None), key=lambda run: run.started_at)


def parent_of(
    runs: list[MultiClusterRun], found: RunDir | RemoteRun
) -> tuple[MultiClusterRun, ClusterRun] | None:
    """The run of several clusters that has this run, and the run's cluster in it.

    A record of another user counts only for the runs of that user.
    """
    path, ssh = str(Path(found.path).absolute()), ""
    if isinstance(found, RemoteRun):
        path, ssh = found.path, found.ssh
    for run in reversed(runs):
        for cluster in run.clusters:
            # This machine sees a folder that it shares with another machine.
            is_named = cluster.path == path and ssh in ("", cluster.ssh)
            if is_named and run.owner in ("", found.owner):
                return run, cluster
    return None
