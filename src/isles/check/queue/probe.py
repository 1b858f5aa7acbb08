"""The run directory of a job that only looks at its nodes, and what it has found."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from isles.check.finding import Finding
from isles.check.subject import Subject
from isles.config.resolve import Resolved, dump_resolved
from isles.run.paths import RunDir
from isles.run.records import read_record


@contextmanager
def probe_run(subject: Subject, resolved: Resolved) -> Iterator[Path]:
    """A folder beside the run directories, as `isles.check.step` takes it, for a while.

    Args:
        subject: what is checked, with its run file.
        resolved: the run with its ranks.
    """
    assert subject.loaded is not None
    above = Path(subject.output_dir).expanduser().absolute()
    while not above.exists():
        above = above.parent
    folder = Path(tempfile.mkdtemp(prefix=".isles-check-", dir=above))
    try:
        run_dir = RunDir(folder)
        run_dir.attempt(1).path.mkdir(parents=True)
        run_dir.resolved.write_text(dump_resolved(resolved), encoding="utf-8")
        run_dir.run_file.write_text(subject.loaded.text, encoding="utf-8")
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def findings_of(folder: Path, said: Sequence[str]) -> tuple[list[Finding], list[str]]:
    """What the job has found, and the names of its nodes.

    Args:
        folder: of `probe_run`.
        said: lines that say why there is nothing, where there is nothing.
    """
    record: dict[str, Any] | None = read_record(RunDir(folder).attempt(1).findings)
    if record is not None:
        return [Finding(**finding) for finding in record["findings"]], record["hosts"]
    finding = Finding(
        "step.nodes",
        "error",
        "the job",
        f"no node has answered: {'; '.join(said[-3:])}",
        measured="no answer",
        fix="are nodes free? isles check without --in-job says which are; --timeout 10m waits "
        "longer for them",
    )
    return [finding], ["the job"]
