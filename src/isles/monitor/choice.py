"""Which run on several clusters a start means, and which of its clusters are to be started."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

from isles.config.load import Loaded
from isles.config.resume import (
    change_lines,
    changed_error,
    changed_length,
    changed_mathematics,
)
from isles.config.sections.run import RunConfig
from isles.errors import UserError
from isles.monitor.clusters import ALIVE, cluster_reports
from isles.monitor.status import RunReport
from isles.run.find import numbered_runs, typed_name
from isles.run.remote import ClusterRun, SeveralRun, is_several, read_several


@dataclass(frozen=True, slots=True)
class Choice:
    """What a start will do.

    Args:
        run: the run, with the clusters of the run file.
        is_resumed: whether its folder is there.
        todo: clusters that are started, and the `--resume` of each.
        running: clusters that run already, and are only followed.
        note: lines for the user.
    """

    run: SeveralRun
    is_resumed: bool
    todo: dict[str, str]
    running: tuple[str, ...] = ()
    note: str = ""


def choose(loaded: Loaded, resume: str) -> Choice:
    """The run to begin, or to go on with.

    Args:
        loaded: the run file.
        resume: `auto`, `no`, or the folder of a run on several clusters.

    Raises:
        UserError: there is no such run, or its values have changed.
    """
    config = loaded.config
    assert config.diloco is not None
    output_dir = Path(config.output_dir).expanduser()
    numbered = numbered_runs(output_dir, config.name)
    number = numbered[-1][0] + 1 if numbered else 1
    path, now = (output_dir / f"{config.name}-{number}").absolute(), time.time()
    clusters = tuple(ClusterRun(c.name, c.launcher.kind) for c in config.clusters)
    values, rendezvous = config.model_dump(mode="json"), config.diloco.rendezvous or ""
    run = SeveralRun(path, clusters, now, now, values, rendezvous)
    fresh = Choice(run, False, {cluster.name: "no" for cluster in clusters})
    if resume == "no":
        return fresh
    if resume != "auto":
        return _go_on(loaded, _given(resume, output_dir), run, may_change=True)
    old = [run.path for _, run in numbered if is_several(run.path)]
    last = read_several(old[-1]) if old else None
    if last is None:
        return fresh
    choice = _go_on(loaded, last, run, may_change=False)
    if choice.todo or choice.running:
        return choice
    return replace(fresh, note=f"{last.name} is finished; this is a new run: {run.name}")


def _given(resume: str, output_dir: Path) -> SeveralRun:
    for path in (Path(resume).expanduser(), output_dir / resume):
        run = read_several(path)
        if run is not None:
            return replace(run, path=path.absolute())
    raise UserError(
        f"{resume} is no run on several clusters",
        where="--resume",
        fix="give the folder that has clusters.json, or `--resume no` for a new run",
        id="run.unknown",
    )


def _go_on(loaded: Loaded, old: SeveralRun, new: SeveralRun, *, may_change: bool) -> Choice:
    """Which clusters of a run are started again: those that do not run, and are not finished."""
    reports = cluster_reports(old)
    known = {cluster.name: cluster for cluster in old.clusters}
    names = [cluster.name for cluster in new.clusters]
    states = {name: reports[name].state for name in names if name in reports}
    running = [name for name, state in states.items() if state in ALIVE]
    todo = {}
    if not states or any(state != "finished" for state in states.values()):
        for name in names:
            state = states.get(name, "new")
            if state in ("gone", "new"):
                todo[name] = "no"
            elif state not in (*ALIVE, "finished"):
                todo[name] = known[name].path
    run = replace(
        old,
        path=old.path.absolute(),
        clusters=tuple(replace(known.get(c.name, c), launcher=c.launcher) for c in new.clusters),
        config=new.config,
        rendezvous=new.rendezvous,
    )
    notes: list[str] = []
    if todo or running:  # else nobody is left of whom a new cluster could take the weights
        saved = [r.checkpoint_step for r in reports.values() if r.checkpoint_step is not None]
        changes = _changes(loaded, old, max(saved, default=None), may_change=may_change)
        notes = [*_notes(run, old, todo, running, reports), *changes]
    return Choice(run, True, todo, tuple(running), "\n".join(notes))


def _notes(
    run: SeveralRun,
    old: SeveralRun,
    todo: dict[str, str],
    running: list[str],
    reports: dict[str, RunReport],
) -> list[str]:
    lines = [f"going on with {run.name}"]
    if running:
        are = "run" if len(running) > 1 else "runs"
        lines.append(f"  {', '.join(running)} {are} already: followed, not started")
    new = [name for name, resume in todo.items() if resume == "no"]
    if new:
        lines.append(f"  {', '.join(new)} {'are' if len(new) > 1 else 'is'} new in it")
    over = [name for name, report in reports.items() if report.state == "finished"]
    if over:
        lines.append(f"  {', '.join(over)} {'have' if len(over) > 1 else 'has'} finished")
    names = [cluster.name for cluster in run.clusters]
    for cluster in old.clusters:
        if cluster.name not in names:
            text = f"  {cluster.name} is no longer in the run file, and is not waited for"
            report = reports.get(cluster.name)
            if report is not None and report.state in ALIVE:
                text += f"; it still runs: isles stop {report.name}"
            lines.append(text)
    return lines


def _changes(loaded: Loaded, old: SeveralRun, saved: int | None, *, may_change: bool) -> list[str]:
    """Lines about values that have changed; `saved`: the step of the newest checkpoint."""
    try:
        before = RunConfig.model_validate(old.config)
    except ValueError:
        return [f"  the old values of {old.name}, of another isles, could not be compared"]
    changes = changed_mathematics(before, loaded.config)
    if saved is not None:
        changes += changed_length(before, loaded.config, {"step": saved})
    if not changes:
        return []
    if may_change or saved is None or all(change.is_free for change in changes):
        return ["  with these new values:", change_lines(changes)]
    raise changed_error(old.path, typed_name(old), old.typed, changes)
