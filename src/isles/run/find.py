"""Find runs by the names that users type."""

from __future__ import annotations

import difflib
import re
import shlex
from pathlib import Path

from isles.errors import UserError
from isles.run.env import named_elsewhere
from isles.run.paths import RunDir
from isles.run.process import ProcessId
from isles.run.records import read_record
from isles.run.remote import (
    RUNS,
    ClusterRun,
    MultiClusterRun,
    RemoteRun,
    is_multi_cluster,
    list_multi_cluster,
    list_remotes,
    owner_of,
    read_multi_cluster,
)
from isles.run.state import QUEUES

_NUMBERED = re.compile(r"(?P<name>.+)-(?P<number>\d+)")
_LISTED = 8


def is_run_dir(path: Path) -> bool:
    return RunDir(path).resolved.is_file()


def list_runs(output_dir: Path) -> list[RunDir]:
    """The runs in a folder, the one that was started last at the end."""
    if not output_dir.is_dir():
        return []
    runs = [RunDir(path) for path in output_dir.iterdir() if is_run_dir(path)]
    return sorted(runs, key=lambda run: (_started_at(run), run.name))


def numbered_runs(output_dir: Path, name: str) -> list[tuple[int, RunDir]]:
    """Every entry NAME-N of a folder with its N, in order; some may be no runs."""
    if not output_dir.is_dir():
        return []
    found = []
    for path in output_dir.iterdir():
        match = _NUMBERED.fullmatch(path.name)
        if match and match["name"] == name:
            found.append((int(match["number"]), RunDir(path)))
    return sorted(found, key=lambda entry: entry[0])


def find_run(name_or_path: str | None, output_dir: Path) -> RunDir:
    """The run that a command means.

    Args:
        name_or_path: a path, a full name (`quickstart-1`), the name in the run file
            (`quickstart`: its newest run), or None: the run that was started last.
        output_dir: where runs are looked for by name.

    Raises:
        UserError: there is none; the message names those there are.
    """
    runs = list_runs(output_dir)
    if name_or_path is None:
        if runs:
            return runs[-1]
        raise UserError(
            f"there is no run in {output_dir}/",
            fix="start one with `isles train run.yaml`, or say where they are: --output-dir",
            id="run.unknown",
        )
    for path in (Path(name_or_path).expanduser(), output_dir / name_or_path):
        if is_run_dir(path):
            return RunDir(path)
    named = [run for _, run in numbered_runs(output_dir, name_or_path) if is_run_dir(run.path)]
    if named:
        return named[-1]
    raise _not_found(name_or_path, output_dir, runs)


def find_any(given: str | None, output_dir: Path) -> RunDir | RemoteRun | MultiClusterRun:
    """The run that a command means, here or on another machine, or on several clusters.

    Args:
        given: as in `find_run`; also NAME@HOST, a run whose directory is on another machine, or
            HOST:PATH, its directory there.
        output_dir: where runs are looked for by name, and remembered.

    Raises:
        UserError: there is none, or there are several of this name.
    """
    if given is not None:
        return _find_multi_cluster(given, output_dir) or _find_one(given, output_dir)
    runs = list_multi_cluster(output_dir)
    try:
        found = _find_one(None, output_dir)
    except UserError:
        if not runs:
            raise
        return runs[-1]
    ssh = found.ssh if isinstance(found, RemoteRun) else ""
    path = found.path if isinstance(found, RemoteRun) else found.path.absolute()
    owner = owner_of(runs, path, ssh)
    return owner[0] if owner is not None else found


def find_cluster(
    given: str | None, output_dir: Path, cluster: str | None = None
) -> RunDir | RemoteRun:
    """As `find_any`; of a run on several clusters, the run of one of them.

    Args:
        given, output_dir: as in `find_any`.
        cluster: its name; None: the first that was started.

    Raises:
        UserError: as in `find_any`, or there is no such cluster, or it has no run yet.
    """
    found = find_any(given, output_dir)
    if not isinstance(found, MultiClusterRun):
        if cluster is None:
            return found
        raise UserError(
            f"{given or found.name} is a run on one cluster",
            where="--cluster",
            fix="leave it out",
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
        fix=f"`isles status {typed_name(found)}` shows how they stand",
        id="run.unknown",
    )


def run_of(run: MultiClusterRun, cluster: ClusterRun) -> RunDir | RemoteRun | None:
    """The run of one cluster; None where it was never started, or its directory is gone."""
    if not cluster.path:
        return None
    if not cluster.ssh:
        return RunDir(Path(cluster.path)) if is_run_dir(Path(cluster.path)) else None
    for remote in list_remotes(run.path.parent):
        if (remote.ssh, remote.path) == (cluster.ssh, cluster.path):
            return remote
    return None


def _find_multi_cluster(given: str, output_dir: Path) -> MultiClusterRun | None:
    # By path, full name, or name in the run file.
    for path in (Path(given).expanduser(), output_dir / given):
        if is_multi_cluster(path):
            return read_multi_cluster(path)
    named = [run.path for _, run in numbered_runs(output_dir, given)]
    named = [path for path in named if is_multi_cluster(path) or is_run_dir(path)]
    return read_multi_cluster(named[-1]) if named and is_multi_cluster(named[-1]) else None


def _find_one(given: str | None, output_dir: Path) -> RunDir | RemoteRun:
    remotes = remote_runs(output_dir)
    if given is None:
        started = list_runs(output_dir)
        if remotes and not (started and _started_at(started[-1]) > remotes[-1].started_at):
            return remotes[-1]
        return find_run(None, output_dir)
    if is_run_dir(Path(given).expanduser()):
        return RunDir(Path(given).expanduser())
    exact = [run for run in remotes if given in _names(run)]
    exact = exact or [run for run in list_remotes(output_dir) if given == run.place]
    here = [RunDir(output_dir / given)] if is_run_dir(output_dir / given) else []
    if not exact and not here:  # NAME@HOST of a run whose folder that host shares with this one
        same = (run for run in list_remotes(output_dir) if given in _names(run))
        here = [RunDir(output_dir / run.name) for run in same if _is_in(output_dir, run)][-1:]
    if len(exact) + len(here) > 1:
        raise _ambiguous(given, here, exact)
    stems = [run for run in remotes if given in (_stem(run.name), _stem(run.label))]
    found = exact or here or _by_stem(given, output_dir, stems)
    return found[-1]


def typed_name(run_dir: RunDir | MultiClusterRun) -> str:
    """What a user types after a verb to mean a run of this machine."""
    if (behind := named_elsewhere()) is not None:
        return f"{run_dir.name}{behind}"
    if run_dir.path.absolute().parent == RUNS.absolute():
        return run_dir.name
    return shlex.quote(str(run_dir.path))


def typed_command(run_dir: RunDir) -> str:
    """The command of the last start of a run, which goes on with it; empty: not recorded."""
    attempt = run_dir.last_attempt()
    return str((read_record(attempt.launch) or {}).get("typed") or "") if attempt else ""


def _names(run: RemoteRun) -> tuple[str, ...]:
    # All but the last two may mean other runs of the same name as well.
    return run.name, run.label, f"{run.name}@{run.ssh}", run.place, run.path


def _by_stem(given: str, output_dir: Path, stems: list[RemoteRun]) -> list[RunDir | RemoteRun]:
    # The newest run of a name in a run file, at the end.
    try:
        found = find_run(given, output_dir)
    except UserError as error:
        if stems:
            return [stems[-1]]
        others = ", ".join(run.label for run in reversed(remote_runs(output_dir)[-_LISTED:]))
        more = f"; on other machines: {others}" if others else ""
        raise UserError(error.what, where=error.where, fix=error.fix + more, id=error.id) from None
    if stems and stems[-1].started_at > _started_at(found):
        return [stems[-1]]
    return [found]


def remote_runs(output_dir: Path) -> list[RemoteRun]:
    """Remembered runs whose directory is not in the folder itself, the oldest first."""
    return [run for run in list_remotes(output_dir) if not _is_in(output_dir, run)]


def _is_in(output_dir: Path, run: RemoteRun) -> bool:
    # Whether the folder is shared with the run's machine, so that the run is found in it anyhow. A
    # run of this machine may have the same path, but was launched here.
    path = output_dir / run.name
    attempt = RunDir(path).last_attempt() if is_run_dir(path) else None
    launch = read_record(attempt.launch) if attempt else None
    if launch is None or path.absolute() != Path(run.path):
        return False
    process = ProcessId.from_record(launch)
    return launch.get("launcher") in QUEUES or (process is not None and not process.is_here())


def _stem(label: str) -> str:
    # `quickstart` of `quickstart-3`, and `quickstart@a1` of `quickstart-3@a1`.
    name, at, host = label.partition("@")
    match = _NUMBERED.fullmatch(name)
    return f"{match['name']}{at}{host}" if match else label


def _ambiguous(given: str, here: list[RunDir], remotes: list[RemoteRun]) -> UserError:
    labels = [run.label for run in remotes]
    ways = [f"{run.path} (here)" for run in here]
    ways += [run.label if labels.count(run.label) == 1 else run.place for run in remotes]
    return UserError(
        f"{given} may mean {len(ways)} runs", fix=f"say which: {', '.join(ways)}", id="run.unknown"
    )


def _not_found(given: str, output_dir: Path, runs: list[RunDir]) -> UserError:
    if given.endswith((".yaml", ".yml")):
        what = f"{given} is a run file; this command takes the name of a run"
    elif Path(given).is_dir():
        what = f"{given} is not a run directory: it holds no resolved.yaml"
    else:
        what = f"there is no run {given!r} in {output_dir}/"
    names = [run.name for run in reversed(runs)]
    stems = {name: name.rpartition("-")[0] for name in names}
    if not names:
        return UserError(
            what,
            fix="start one with `isles train run.yaml`, or give --output-dir",
            id="run.unknown",
        )
    close = difflib.get_close_matches(given, [*names, *stems.values()], n=1)
    if close:
        return UserError(what, fix=f"did you mean {close[0]}?", id="run.unknown")
    more = f" and {len(names) - _LISTED} older ones" if len(names) > _LISTED else ""
    return UserError(
        what, fix=f"the runs there are: {', '.join(names[:_LISTED])}{more}", id="run.unknown"
    )


def _started_at(run: RunDir) -> float:
    attempt = run.last_attempt()
    record = read_record(attempt.launch) if attempt else None
    begun_at = (record or {}).get("begun_at")
    return float(begun_at) if isinstance(begun_at, int | float) else run.path.stat().st_mtime
