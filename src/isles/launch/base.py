"""What every launcher is given, and what it can do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from isles.rundir.paths import Attempt, RunDir
from isles.rundir.process import ProcessId

JobId = ProcessId
"""With a launcher that has a queue this becomes a union."""

JobState = Literal["running", "ended"]


@dataclass(frozen=True, slots=True)
class Job:
    """One start of a run, ready to be launched.

    Args:
        run_dir: the run directory.
        attempt: the folder of this start.
        world_size: number of ranks.
        device: cpu or cuda.
        command: the command line that runs until the ranks have ended.
        resumed_from: the checkpoint that was asked for by name.
        variables: of the environment, that the run file sets.
    """

    run_dir: RunDir
    attempt: Attempt
    world_size: int
    device: str
    command: tuple[str, ...]
    resumed_from: Path | None = None
    variables: Mapping[str, str] = field(default_factory=dict)


class Launcher(Protocol):
    """Starts a job somewhere."""

    def render(self, job: Job) -> str:
        """Exactly what `submit` would run, as text."""
        ...

    def submit(self, job: Job) -> JobId:
        """Start it, and record it as the attempt's launch."""
        ...

    def state(self, job_id: JobId) -> JobState:
        """Whether it still runs."""
        ...

    def cancel(self, job_id: JobId) -> None:
        """End it now, without saving."""
        ...
