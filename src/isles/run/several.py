"""A run on several clusters: which clusters it has, and where the run of each one is."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from isles.errors import UserError
from isles.run.records import read_record, write_record
from isles.run.refusals import clear_errors

_RECORD = "clusters.json"


@dataclass(frozen=True, slots=True)
class ClusterRun:
    """One cluster of a run on several; it is a run of its own.

    Args:
        name: of the cluster.
        launcher: local, ssh, slurm, pbs or manual.
        path: its run directory, on the machine that has it; empty: it was never started.
        ssh: that machine as ssh takes it from here; empty: this one.
        attempt: the last start of it.
    """

    name: str
    launcher: str
    path: str = ""
    ssh: str = ""
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class SeveralRun:
    """A run on several clusters, as the machine that has started it keeps it.

    Args:
        path: its folder, OUTPUT_DIR/NAME-N.
        clusters: in the order of the run file.
        begun_at: its first start, seconds since the epoch.
        started_at: its last start.
        config: every value of the run file at its last start.
        rendezvous: HOST:PORT of one that was started by itself; empty: it belongs to this run, or
            there is none (`meets`).
        typed: the command that goes on with it, as the user types it; empty: not known.
    """

    path: Path
    clusters: tuple[ClusterRun, ...]
    begun_at: float
    started_at: float
    config: dict[str, Any]
    rendezvous: str = ""
    typed: str = ""

    @property
    def name(self) -> str:
        """The run's name, as commands take it."""
        return self.path.name

    @property
    def run_file(self) -> Path:
        """The run file as it was given at first, word for word."""
        return self.path / "run.yaml"

    @property
    def state(self) -> Path:
        """The state directory of the rendezvous that belongs to it."""
        return self.path / "rendezvous"

    @property
    def meets(self) -> bool:
        """Whether its clusters have a rendezvous; those of engine hivemind find one another."""
        return dict(self.config.get("outer") or {}).get("engine") != "hivemind"

    @property
    def join_file(self) -> Path:
        """The join line: a secret."""
        return (self.path if self.rendezvous else self.state) / "join"

    def cluster(self, name: str) -> ClusterRun:
        """The cluster of this name.

        Raises:
            UserError: there is none.
        """
        for cluster in self.clusters:
            if cluster.name == name:
                return cluster
        raise UserError(
            f"{self.name} has no cluster {name}",
            where="--cluster",
            fix=f"it has {', '.join(cluster.name for cluster in self.clusters)}",
        )

    def having(self, cluster: ClusterRun) -> SeveralRun:
        """The same, with another record of one cluster."""
        clusters = tuple(cluster if c.name == cluster.name else c for c in self.clusters)
        return replace(self, clusters=clusters)

    def write(self) -> None:
        """Put it on record.

        Raises:
            UserError: its folder cannot be written.
        """
        record = {key: value for key, value in asdict(self).items() if key != "path"}
        with clear_errors(self.path):
            write_record(self.path / _RECORD, record)


def is_several(path: Path) -> bool:
    """Whether a folder is that of a run on several clusters."""
    return (path / _RECORD).is_file()


def read_several(path: Path) -> SeveralRun | None:
    """The run on several clusters that a folder is of; None: it is of none."""
    record = read_record(path / _RECORD)
    if record is None:
        return None
    known = {field.name for field in fields(ClusterRun)}
    try:
        clusters = tuple(
            ClusterRun(**{key: value for key, value in each.items() if key in known})
            for each in record["clusters"]
        )
        return SeveralRun(
            path,
            clusters,
            float(record["begun_at"]),
            float(record["started_at"]),
            dict(record["config"]),
            str(record.get("rendezvous", "")),
            str(record.get("typed", "")),
        )
    except (KeyError, TypeError, ValueError):
        return None  # of another version


def list_several(output_dir: Path) -> list[SeveralRun]:
    """The runs on several clusters in a folder, the one that was started last at the end."""
    if not output_dir.is_dir():
        return []
    found = [read_several(path) for path in output_dir.iterdir() if is_several(path)]
    return sorted((run for run in found if run is not None), key=lambda run: run.started_at)


def owner_of(
    runs: list[SeveralRun], path: Path | str, ssh: str = ""
) -> tuple[SeveralRun, ClusterRun] | None:
    """The run on several clusters that a run belongs to, and as which of them."""
    for run in reversed(runs):
        for cluster in run.clusters:
            # A folder that another machine shares with this one is seen here.
            if cluster.path == str(path) and ssh in ("", cluster.ssh):
                return run, cluster
    return None
