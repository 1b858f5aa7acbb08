"""Find runs by the names that users type."""

from __future__ import annotations

import difflib
import itertools
import os
import re
import shlex
from contextlib import suppress
from pathlib import Path

from isles.errors import UserError
from isles.run.entry import is_own, require_own, shows_owner
from isles.run.env import named_elsewhere
from isles.run.owner import not_own, read_text
from isles.run.paths import Attempt, RunDir, is_file
from isles.run.process import ProcessId
from isles.run.records import read_own, read_record
from isles.run.remote import (
    RUNS,
    ClusterRun,
    MultiClusterRun,
    RemoteRun,
    is_multi_cluster,
    list_multi_cluster,
    list_remotes,
    parent_of,
    read_multi_cluster,
)
from isles.run.state import QUEUES, number_of

NUMBERED = re.compile(r"(?P<name>.+)-(?P<number>[0-9]{1,18})")
"""The name of a run. isles ignores longer numbers, as other users and buckets may have any name."""
_LISTED = 8

Run = RunDir | RemoteRun | MultiClusterRun


def is_run_dir(path: Path) -> bool:
    return is_file(RunDir(path).resolved)


def list_runs(output_dir: Path) -> list[RunDir]:
    """The runs in a folder, by start time. The newest run is the last."""
    if not output_dir.is_dir():
        return []
    runs = [RunDir(path) for path in output_dir.iterdir() if is_run_dir(path)]
    return sorted(runs, key=lambda run: (_started_at(run), run.name))


def numbered_runs(output_dir: Path, name: str) -> list[tuple[int, RunDir]]:
    """Every entry NAME-N of a folder with its N, in order. Some may not be runs."""
    if not output_dir.is_dir():
        return []
    found = []
    for path in output_dir.iterdir():
        match = NUMBERED.fullmatch(path.name)
        if match and match["name"] == name:
            found.append((int(match["number"]), RunDir(path)))
    return sorted(found, key=lambda entry: entry[0])


def next_run(output_dir: Path, name: str, above: int = 0) -> Path:
    """The path of a new run NAME-N, with the first free N above all runs of this user.

    isles ignores the runs of other users for this. Otherwise another user could use up the numbers.

    Args:
        above: the number of a run in another place, such as a bucket. N is greater.
    """
    for number, run in reversed(numbered_runs(output_dir, name)):
        if number <= above:
            break
        # Several users may start a run in turn, so the owner of the folder alone does not decide.
        if is_own(run.path) or (run.attempts() and not run.owner):
            above = number
    paths = (output_dir / f"{name}-{number}" for number in itertools.count(above + 1))
    return next(path for path in paths if not os.path.lexists(path))


def own_runs(output_dir: Path, name: str) -> list[RunDir]:
    """Started runs NAME-N of this user, in order of N."""
    runs = (run for _, run in numbered_runs(output_dir, name) if is_run_dir(run.path))
    return [run for run in runs if run.attempts() and not other_owner(run)]


def refuse_others(run_dir: RunDir) -> None:
    """Raise a UserError if isles must not write to a run directory: it belongs to another user, or
    is missing and another user has put a link in its place."""
    require_own(run_dir.path)
    if owner := other_owner(run_dir):
        raise not_own(f"train in the directory of {run_dir.name}", owner, run_dir.path)


def other_owner(run_dir: RunDir) -> str:
    """The other user who owns the run, whose directory isles does not write to, or empty."""
    owner = run_dir.owner
    return "" if owner and shows_owner(run_dir.path.parent, owner) else owner


def find_attempt(output_dir: Path, name: str, token: str) -> tuple[RunDir, Attempt] | None:
    """The newest attempt with this token, or None."""
    for run_dir in reversed(own_runs(output_dir, name)):
        for attempt in reversed(run_dir.attempts()):
            with suppress(OSError, ValueError):
                if read_text(attempt.token)[0].strip() == token:
                    return run_dir, attempt
    return None


def find_any(given: str | None, output_dir: Path) -> Run:
    """The run for a name, on this machine, on another machine, or on several clusters.

    Runs of this user come first, because another user may start a run of the same name, with a
    higher number or a later time.

    Args:
        given: a path, a full name (`quickstart-1`), the name in the run file (`quickstart`, for its
            newest run), or None for the run that started last. Also NAME@HOST or HOST:PATH, for a
            run whose directory is on another machine.
        output_dir: folder of the runs and of the records of remote runs.

    Raises:
        UserError: no run matches, or several runs match.
    """
    remotes = remote_runs(output_dir)
    if given is None:
        return _newest(output_dir, remotes)
    if (here := _run_at(Path(given).expanduser())) is not None:
        return here
    exact: list[Run] = [here] if (here := _run_at(output_dir / given)) is not None else []
    for remote in list_remotes(output_dir):
        names = remote.name, remote.label, f"{remote.name}@{remote.ssh}", remote.place, remote.path
        if given in names:
            # This machine sees a folder that it shares with the other machine.
            run = remote if remote in remotes else RunDir(output_dir / remote.name)
            exact += [run] if run not in exact else []
    # The newest run of a name in a run file.
    numbered = (_run_at(run.path) for _, run in numbered_runs(output_dir, given))
    far = (run for run in remotes if given in (_stem(run.name), _stem(run.label)))
    named: list[Run] = []
    named += sorted((run for run in numbered if run is not None), key=_is_own)[-1:]
    named += sorted(far, key=_is_own)[-1:]
    named = sorted(named, key=_rank)[-1:]
    for runs in ([*filter(_is_own, exact)], [*filter(_is_own, named)], exact, named):
        if len(runs) > 1:
            raise _ambiguous(given, runs)
        if runs:
            return runs[0]
    raise _not_found(given, output_dir, remotes)


def find_cluster(
    given: str | None, output_dir: Path, cluster: str | None = None
) -> RunDir | RemoteRun:
    """Like `find_any`, but for a run on several clusters, return the run of one cluster.

    Args:
        given, output_dir: see `find_any`.
        cluster: name of the cluster, or None for the first started cluster.

    Raises:
        UserError: see `find_any`. Also if the cluster does not exist, or has no run yet.
    """
    found = find_any(given, output_dir)
    if not isinstance(found, MultiClusterRun):
        if cluster is None:
            return found
        raise UserError(
            f"{given or found.name} is a run on one cluster",
            where="--cluster",
            fix="omit the cluster",
            id="run.unknown",
        )
    wanted = found.clusters if cluster is None else (found.cluster(cluster),)
    runs = [run for each in wanted if (run := run_of(found, each)) is not None]
    if runs:
        return runs[0]
    raise UserError(
        f"{cluster or 'no cluster'} of {found.name} has "
        + ("no run yet" if cluster else "a run yet"),
        where=str(found.path),
        fix=f"check the clusters with `isles status {typed_name(found)}`",
        id="run.unknown",
    )


def run_of(run: MultiClusterRun, cluster: ClusterRun) -> RunDir | RemoteRun | None:
    """The run of one cluster, or None if it never started or its directory is gone."""
    if not cluster.path:
        return None
    if not cluster.ssh:
        return RunDir(Path(cluster.path)) if is_run_dir(Path(cluster.path)) else None
    remotes = list_remotes(run.path.parent)
    return next((r for r in remotes if (r.ssh, r.path) == (cluster.ssh, cluster.path)), None)


def remote_runs(output_dir: Path) -> list[RemoteRun]:
    """Recorded runs whose directory is outside of the folder, oldest first."""
    return [run for run in list_remotes(output_dir) if not _is_in(output_dir, run)]


def typed_name(run_dir: RunDir | MultiClusterRun) -> str:
    """The name of a run of this machine for a command."""
    if (behind := named_elsewhere()) is not None:
        return f"{run_dir.name}{behind}"
    if run_dir.path.absolute().parent == RUNS.absolute():
        return run_dir.name
    return shlex.quote(str(run_dir.path))


def typed_command(run_dir: RunDir) -> str:
    """The command of the last attempt, which resumes the run. Empty if it is not recorded, or if
    another user has recorded it."""
    attempt = run_dir.last_attempt()
    launch = read_own(attempt.launch) if attempt else None
    return str(launch.get("typed") or "") if launch else ""


def _newest(output_dir: Path, remotes: list[RemoteRun]) -> Run:
    runs: list[RunDir | RemoteRun] = [*list_runs(output_dir), *remotes]
    runs.sort(key=_rank)
    several = sorted(list_multi_cluster(output_dir), key=_is_own)
    if not runs and not several:
        raise UserError(
            f"no run found in {output_dir}/",
            fix="start a run with `isles train run.yaml`, or give the folder of the runs with "
            "--output-dir",
            id="run.unknown",
        )
    if not runs or (several and _is_own(several[-1]) > _is_own(runs[-1])):
        return several[-1]
    parent = parent_of(several, runs[-1])
    return parent[0] if parent is not None else runs[-1]


def _run_at(path: Path) -> RunDir | MultiClusterRun | None:
    if is_multi_cluster(path):
        return read_multi_cluster(path)
    return RunDir(path) if is_run_dir(path) else None


def _is_in(output_dir: Path, run: RemoteRun) -> bool:
    # Whether the run's machine shares the folder, so that isles finds the run in it anyway. A run
    # of this machine may have the same path, but this machine launched it.
    path = output_dir / run.name
    attempt = RunDir(path).last_attempt() if is_run_dir(path) else None
    launch = read_record(attempt.launch) if attempt else None
    if launch is None or path.absolute() != Path(run.path):
        return False
    if not run.owner and not _is_own(RunDir(path)):  # of another user, with the path of this run
        return False
    process = ProcessId.from_record(launch)
    return launch.get("launcher") in QUEUES or (process is not None and not process.is_here())


def _stem(label: str) -> str:
    # `quickstart` of `quickstart-3`, and `quickstart@a1` of `quickstart-3@a1`.
    name, at, host = label.partition("@")
    match = NUMBERED.fullmatch(name)
    return f"{match['name']}{at}{host}" if match else label


def _is_own(run: Run) -> bool:
    # A link of another user may lead to a run of this user that has another name.
    path = Path(run.path)
    is_linked = not isinstance(run, RemoteRun) and path.is_symlink()
    return not run.owner and (not is_linked or is_own(path))


def _rank(run: Run) -> tuple[bool, float]:
    return _is_own(run), _started_at(run)


def _started_at(run: Run) -> float:
    if not isinstance(run, RunDir):
        return run.started_at
    attempt = run.last_attempt()
    begun_at = number_of(read_record(attempt.launch), "begun_at") if attempt else None
    return begun_at if begun_at is not None else run.path.stat().st_mtime


def _ambiguous(given: str, runs: list[Run]) -> UserError:
    labels = [run.label for run in runs if isinstance(run, RemoteRun)]
    ways = [
        (run.label if labels.count(run.label) == 1 else run.place)
        if isinstance(run, RemoteRun)
        else f"{run.path} (here)"
        for run in runs
    ]
    fix = f"use one of: {', '.join(ways)}"
    return UserError(f"{given} matches {len(ways)} runs", fix=fix, id="run.unknown")


def _not_found(given: str, output_dir: Path, remotes: list[RemoteRun]) -> UserError:
    if given.endswith((".yaml", ".yml")):
        what = f"{given} is a run file, and this command needs the name of a run"
    elif Path(given).is_dir():
        what = f"{given} is not a run directory, as it has no resolved.yaml"
    else:
        what = f"no run {given!r} found in {output_dir}/"
    names = [run.name for run in reversed(list_runs(output_dir))]
    close = difflib.get_close_matches(given, [*names, *(_stem(name) for name in names)], n=1)
    if not names:
        fix = "start a run with `isles train run.yaml`, or give --output-dir"
    elif close:
        fix = f"did you mean {close[0]}?"
    else:
        older = f" and {len(names) - _LISTED} older ones" if len(names) > _LISTED else ""
        fix = f"use one of: {', '.join(names[:_LISTED])}{older}"
    others = ", ".join(run.label for run in reversed(remotes[-_LISTED:]))
    fix += f", or on other machines {others}" if others else ""
    return UserError(what, fix=fix, id="run.unknown")
