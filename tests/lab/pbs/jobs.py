"""Job records of the PBS stand-in: one file a job, in a folder that every host of the lab sees."""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

SERVER = "ctl"
FOLDER = Path(os.environ.get("PBS_STANDIN", "/shared/.pbs"))
FLAVOUR = os.environ.get("PBS_FLAVOUR", "openpbs")
NODES = tuple(os.environ.get("PBS_NODES", "").split())
NUM_CPUS, NUM_GPUS = 4, 2
"""Of each node, as far as requests are concerned."""


@dataclass(frozen=True)
class Chunk:
    """Equal nodes of a job.

    Args:
        count: how many.
        lines: how often each stands in the node file: mpiprocs, or ppn.
        cpus, gpus: of each.
        host: the one that it must be; None: any.
    """

    count: int = 1
    lines: int = 1
    cpus: int = 1
    gpus: int = 0
    host: str | None = None


@dataclass
class Job:
    """One job, from qsub on; `state` is PBS's letter: Q, R, F (OpenPBS) or C (Torque)."""

    number: int
    name: str
    chunks: list[Chunk]
    walltime_s: int
    variables: dict[str, str]
    output: str
    script: str
    queue: str
    state: str = "Q"
    comment: str = ""
    exit_status: int | None = None
    run_count: int = 0
    hosts: list[str] = field(default_factory=list)
    begun_at: float = 0.0
    is_deleted: bool = False

    @property
    def id(self) -> str:
        """As users see it."""
        return f"{self.number}.{SERVER}"

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self.state in ("F", "C")


def end_state() -> str:
    """The letter of a job that has ended."""
    return "C" if FLAVOUR == "torque" else "F"


@contextmanager
def locked() -> Iterator[None]:
    """One process at a time reads and writes records."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def save(job: Job) -> None:
    """Write a record; the caller holds the lock."""
    path = FOLDER / f"{job.number}.json"
    staged = path.with_suffix(".new")
    staged.write_text(json.dumps(asdict(job)))
    staged.replace(path)


def load(job_id: str) -> Job | None:
    """A job by its id, with or without the server's name."""
    try:
        record = json.loads((FOLDER / f"{job_id.partition('.')[0]}.json").read_text())
    except OSError:
        return None
    return Job(**{**record, "chunks": [Chunk(**chunk) for chunk in record["chunks"]]})


def change(job: Job, **values: object) -> Job:
    """Change a record, and give the new one."""
    with locked():
        job = replace(load(job.id) or job, **values)  # type: ignore[arg-type]
        save(job)
    return job


def all_jobs() -> list[Job]:
    """Every job, the oldest first."""
    names = [p.stem for p in FOLDER.glob("*.json") if p.stem.isdigit()]
    return [job for name in sorted(names, key=int) if (job := load(name))]


class RequestError(Exception):
    """A resource request that this flavour refuses: (text, exit status of qsub)."""


def read_request(options: list[str]) -> tuple[list[Chunk], int]:
    """What all `-l` ask for: the nodes, and the wall time in seconds (0: no limit).

    Raises:
        RequestError: as the real qsub words it; Torque's words are not compared with a real one.
    """
    asked: dict[str, str] = {}
    for option in options:
        for part in re.split(r",(?=[a-z_]+=)", option):
            key, _, value = part.partition("=")
            asked[key] = value
    if FLAVOUR == "openpbs" and "nodes" in asked and ("select" in asked or "place" in asked):
        raise RequestError("qsub: Cannot be used with select or place: nodes", 1)
    if FLAVOUR == "torque" and "select" in asked:
        raise RequestError(
            "qsub: submit error (Undefined attribute  MSG=select is not a Torque resource)", 177
        )
    chunks = [Chunk()]
    if "select" in asked:
        chunks = [_select_chunk(text) for text in asked["select"].split("+")]
    elif "nodes" in asked:
        chunks = [_nodes_chunk(text) for text in asked["nodes"].split("+")]
    return chunks, _seconds(asked["walltime"]) if "walltime" in asked else 0


def _select_chunk(text: str) -> Chunk:
    count, values = _parts(text)
    return Chunk(
        count=int(count) if count.isdigit() else 1,
        lines=int(values.get("mpiprocs", 1)),
        cpus=int(values.get("ncpus", 1)),
        gpus=int(values.get("ngpus", 0)),
        host=values.get("host"),
    )


def _nodes_chunk(text: str) -> Chunk:
    count, values = _parts(text)
    if FLAVOUR == "openpbs" and "gpus" in values:
        raise RequestError("qsub: node(s) specification error", 1)
    lines = int(values.get("ppn", 1))
    return Chunk(
        count=int(count) if count.isdigit() else 1,
        lines=lines,
        cpus=lines,
        gpus=int(values.get("gpus", 0)),
        host=None if count.isdigit() else count,
    )


def _parts(text: str) -> tuple[str, dict[str, str]]:
    count, *rest = text.split(":")
    return count, dict(part.split("=", 1) for part in rest if "=" in part)


def _seconds(text: str) -> int:
    seconds = 0
    for part in text.split(":"):
        seconds = seconds * 60 + int(part)
    return seconds
