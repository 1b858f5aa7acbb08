"""Verbs on a run, here or on another machine: status, logs, stop; its hub, and joining it."""

# As in `isles.cli`, only what parsing needs is imported here.
from __future__ import annotations

import os
import shlex
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter

from isles.errors import ExitCode, UserError
from isles.launch.groups import CLUSTERS, WATCH

if TYPE_CHECKING:
    from isles.launch.base import StartOptions
    from isles.monitor.follow import Follower
    from isles.monitor.stop import Signals
    from isles.run.paths import RunDir
    from isles.run.remote import RemoteRun

Run = Annotated[
    str | None,
    Parameter(
        help="Name or directory of a run, or NAME@HOST for a run on another machine. "
        "If omitted, the run that was started last."
    ),
]
Cluster = Annotated[
    str | None, Parameter(help="Only this cluster of the run. If omitted, all clusters.")
]
RunsDir = Annotated[Path, Parameter(name="--output-dir", help="Folder with the run directories.")]
RUNS = Path("runs")

hub_app = App(
    name="hub",
    alias="rendezvous",
    help="Start the hub that averages the clusters of a run.",
    group=CLUSTERS,
)
join_app = App(
    name="join",
    help="Join a run of several clusters with the GPUs of this site.",
    group=CLUSTERS,
)


def register(app: App) -> None:
    for verb in (status, logs, stop):
        app.command(verb, group=WATCH)
    app.command(follow, show=False)
    app.command(status_records, show=False)
    app.command(hub_app)
    app.command(join_app)


def start_and_follow(options: StartOptions, *, detach: bool = False, announce: bool = False) -> int:
    """Start a run, and follow it to its end.

    Args:
        detach: return as soon as it is started.
        announce: the same, and print which run it is; for isles on another machine.

    Returns:
        The exit code; of several clusters the worst.

    Raises:
        UserError: it cannot be started; nothing is left running then.
    """
    from isles.launch.base import Started
    from isles.launch.remote.login import started_line
    from isles.launch.start import start
    from isles.monitor.stop import caught_signals
    from isles.run.find import typed_name
    from isles.run.state import script_of

    with caught_signals() as signals:
        started = start(options)
        if isinstance(started, str):
            print_line(started)
            return ExitCode.OK
        if not isinstance(started, Started):
            from isles.monitor.multi_cluster import ClustersFollower, MultiClusterStart

            clusters = MultiClusterStart(started, options)
            texts = clusters.look()
            if options.dry_run:
                print_line(clusters.dry_run_text(texts))
                return ExitCode.OK
            name, what, them = typed_name(clusters.start()), "saves and stops all clusters", "them"
        else:
            if started.text:
                print_line(started.text)
            if announce:
                print_line(started_line(started))
            if started.text or announce:
                return ExitCode.OK
            is_script = started.remote is None and script_of(started.run_dir) is not None
            what, them = "lets the script stop" if is_script else "saves and stops", "it"
            name = started.remote.typed if started.remote else typed_name(started.run_dir)
        if detach:
            print_line(f"  isles status {name} · isles logs -f {name} · isles stop {name}")
            return ExitCode.OK
        print_line(f"Ctrl+C {what}; closing this terminal leaves {them} running")
        if isinstance(started, Started):
            return _follow(started.remote or started.run_dir, started.attempt.number, signals)
        from isles.monitor.table import console

        consoles = console(), console(stderr=True)
        follower = ClustersFollower(clusters.run, clusters.choice.running, *consoles)
        return follower.follow(signals)


def _follow(
    found: RunDir | RemoteRun,
    attempt: int | None,
    signals: Signals,
    *,
    is_begun: bool = False,
    width: int | None = None,
) -> int:
    from isles.monitor.follow import RunFollower
    from isles.monitor.logs import choose_attempt
    from isles.monitor.remote import RemoteFollower
    from isles.monitor.table import console
    from isles.run.remote import RemoteRun

    consoles = console(width=width), console(stderr=True)
    follower: Follower
    if isinstance(found, RemoteRun):
        follower = RemoteFollower(found, attempt or 1, *consoles, is_begun=is_begun)
    else:
        start = choose_attempt(found, attempt)
        follower = RunFollower(found, start, *consoles, is_begun=is_begun)
    return follower.follow(signals)


def status(
    run: str | None = None,
    /,
    *,
    check: bool = False,
    wait: Annotated[tuple[str, ...] | None, Parameter(consume_multiple=True)] = None,
    json: bool = False,
    output_dir: RunsDir = RUNS,
) -> int:
    """Show the status of all runs, or of one run in full.

    Args:
        run: Name or directory of a run, or NAME@HOST. If omitted, all runs. With --check, the run
            that was started last.
        check: Check that every GPU has a process, memory is in use, the loss falls, ranks keep
            in step and records arrive. Exit code 0, or 2 if a check fails.
        wait: With --check, wait until all five hold, for at most this time (5m), or until the run
            ends.
        json: Print JSON.
    """
    if check or wait is not None:
        from isles.monitor.live.health import check_run

        return check_run(run, output_dir, wait=wait, json=json, print_line=print_line, note=note)
    from json import dumps

    from isles.launch.hub import hub_process
    from isles.monitor.clusters import group_by_run, multi_cluster_lines, multi_cluster_report
    from isles.monitor.hub import find_hub, hub_lines, hub_record, list_hubs, resting_state
    from isles.monitor.remote import report_of, reports_of_all
    from isles.monitor.table import console, report_lines, runs_table
    from isles.run.find import find_any
    from isles.run.remote import MultiClusterRun

    if (state := find_hub(run, output_dir)) is not None:
        record = hub_record(state)
        print_line(dumps(record, indent=1) if json else "\n".join(hub_lines(state, record)))
    elif run is None:
        reports = reports_of_all(output_dir)
        if json:
            print_line(dumps([entry.model_dump() for entry in reports], indent=1))
            return ExitCode.OK
        hubs = list_hubs(output_dir)
        if reports:
            console().print(runs_table(group_by_run(reports, output_dir)))
        elif not hubs:
            print_line(f"no run found in {output_dir}/. Start one with `isles train run.yaml`")
        for state in hubs:
            how = "runs" if hub_process(state) is not None else f"is {resting_state(state)}"
            print_line(f"the hub {state.name} {how}: isles status {state.name}")
    elif isinstance(found := find_any(run, output_dir), MultiClusterRun):
        whole = multi_cluster_report(found)
        print_line(
            dumps(whole.record(), indent=1) if json else "\n".join(multi_cluster_lines(whole))
        )
    else:
        entry = report_of(found, output_dir)
        print_line(dumps(entry.model_dump(), indent=1) if json else "\n".join(report_lines(entry)))
    return ExitCode.OK


def status_records(*paths: Path) -> int:
    """Print the status of run directories, for isles on another machine.

    Args:
        paths: Run directories.
    """
    from isles.monitor.remote import records_of

    print_line(records_of(paths))
    return ExitCode.OK


def end_with_stdin() -> None:
    """End this process once the other end of its stdin is closed."""

    def wait() -> None:
        sys.stdin.read()
        os._exit(ExitCode.OK)

    threading.Thread(target=wait, daemon=True).start()


def logs(
    run: Run = None,
    /,
    *,
    follow: Annotated[bool, Parameter(name=("--follow", "-f"))] = False,
    lines: Annotated[int, Parameter(name=("--lines", "-n"))] = 100,
    cluster: Cluster = None,
    rank: int | None = None,
    node: int | None = None,
    by_node: bool = False,
    attempt: int | None = None,
    here: Annotated[bool, Parameter(show=False)] = False,
    output_dir: RunsDir = RUNS,
) -> int:
    """Show the output of all ranks on all nodes.

    Args:
        follow: Keep printing until the run ends.
        lines: Number of lines per rank. With --by-node, per node.
        rank: Only this rank. If omitted, all ranks, with the rank before each line.
        node: Only the ranks of this node. If omitted, all nodes, with the node before each line.
        by_node: Print one node after the other, each below a heading.
        attempt: Number of the attempt. If omitted, the last attempt.
        here: Only the files of this machine, for isles on another machine.
    """
    from isles.monitor.logs import LogChoice
    from isles.monitor.stream import shown_lines
    from isles.run.find import find_any, find_cluster

    if by_node and (follow or rank is not None):
        raise UserError(
            "--by-node shows one node after the other", fix="remove --follow and --rank"
        )
    choice = LogChoice(rank, node, max(0, lines), follow, attempt, here, by_node)
    if here and follow:
        end_with_stdin()
    found = find_any(run, output_dir)
    if cluster is not None:
        found = find_cluster(run, output_dir, cluster)
    for line in shown_lines(found, choice, note):
        sys.stdout.write(f"{line}\n")
        if follow:
            sys.stdout.flush()
    return ExitCode.OK


def stop(
    run: Run = None,
    /,
    *,
    cluster: Cluster = None,
    now: bool = False,
    timeout: str = "10m",
    output_dir: RunsDir = RUNS,
) -> int:
    """Save a checkpoint, stop the run and wait for its end.

    Args:
        now: Stop immediately, without a checkpoint.
        timeout: Longest wait.
    """
    from isles.facts.units import parse_duration_s
    from isles.monitor.clusters import stop_clusters
    from isles.monitor.hub import find_hub, stop_hub
    from isles.monitor.remote import stop_remote
    from isles.monitor.stop import stop_run
    from isles.run.find import find_any, find_cluster
    from isles.run.remote import MultiClusterRun, RemoteRun

    try:
        timeout_s = parse_duration_s(timeout)
    except ValueError as error:
        raise UserError(str(error), where="--timeout", fix="for example --timeout 5m") from error
    if (state := find_hub(run, output_dir)) is not None:
        return stop_hub(state, print_line=print_line)
    found = find_any(run, output_dir)
    if cluster is not None:
        found = find_cluster(run, output_dir, cluster)
    if isinstance(found, MultiClusterRun):
        return stop_clusters(found, now=now, timeout=timeout, print_line=print_line, warn=note)
    if isinstance(found, RemoteRun):
        return stop_remote(found, now=now, timeout=timeout, print_line=print_line)
    return stop_run(found, now=now, timeout_s=timeout_s, print_line=print_line)


def follow(
    run: str,
    /,
    *,
    attempt: int | None = None,
    stdin: bool = False,
    begun: bool = False,
    width: int | None = None,
    output_dir: RunsDir = RUNS,
) -> int:
    """Follow a run for isles on another machine, or one cluster of a multi-cluster run.

    Args:
        run: The run directory, or HOST:PATH.
        attempt: Number of the attempt. If omitted, the last attempt.
        stdin: Read `interrupt` and `requeue` from stdin, one per line. The end of stdin detaches.
        begun: Show only new output, because somebody has followed the run before.
        width: Columns of the remote terminal. If omitted, the output is not a terminal.
    """
    from isles.monitor.stop import caught_signals
    from isles.run.find import find_cluster
    from isles.run.remote import RemoteRun

    found = find_cluster(run, output_dir)
    with caught_signals() as signals:
        if stdin or isinstance(found, RemoteRun):
            signals.read_stdin()
        return _follow(found, attempt, signals, is_begun=begun, width=width)


@hub_app.default
def hub(
    run_file: Path,
    /,
    *overrides: str,
    public: str = "",
    listen: str = "",
    detach: bool = False,
    new: bool = False,
) -> int:
    """Start the hub that averages the clusters of a run.

    isles prints the join line, and shows which clusters join and leave. The same command resumes
    the hub with the same join line and the same state.

    Args:
        run_file: The run file, with `outer: {kind: diloco}`. Every cluster gets its model, data,
            training and outer sections from the hub.
        overrides: Values that override the run file, such as outer.sync_every=100.
        public: HOST:PORT that clusters connect to: a host name, a VPN address, or a router that
            forwards the port. If omitted, outer.public, or clusters on this machine only.
        listen: HOST:PORT on this machine, if it differs from --public.
        detach: Return as soon as the hub is open.
        new: Start with an empty state and a new join line.
    """
    from isles.launch.hub import start_hub
    from isles.monitor.hub import HubFollower, opening_lines
    from isles.monitor.stop import caught_signals
    from isles.monitor.table import console

    with caught_signals() as signals:
        meeting = start_hub(run_file, overrides, public=public, listen=listen, is_anew=new)
        print_line("\n".join(opening_lines(meeting, shows_line=sys.stdout.isatty())))
        if detach:
            return ExitCode.OK
        how = (
            "ends the hub, and the same command resumes it"
            if meeting.is_new
            else "leaves the hub running"
        )
        print_line(f"Ctrl+C {how}. Closing this terminal leaves it running\n")
        return HubFollower(meeting, console(), console(stderr=True)).follow(signals)


@join_app.default
def join(
    line: Annotated[str, Parameter(allow_leading_hyphen=True)],
    /,
    *words: str,
    name: str = "",
    on: Literal["local", "ssh", "slurm", "pbs", "ray", "manual"] | None = None,
    resume: str = "auto",
    dry_run: bool = False,
    detach: bool = False,
) -> int:
    """Join a run of several clusters with the GPUs of this site.

    The sections model, data, training and outer come from the hub. The same command resumes this
    cluster.

    Args:
        line: File with the join line that `isles hub` printed. Use - for stdin. You can also give
            the line itself, but your shell's history keeps it.
        words: A run file of this site, whose clusters section is enough. Then values such as
            launcher.partition=gpu, nodes=4 or gpus_per_node=8 for this cluster, or
            data.sources.0.path=/scratch/text if the data has another path on this site.
        name: Name of this cluster. If omitted, the name in the run file or of this machine.
        on: Launcher of this cluster. If omitted, the launcher in the run file, or local.
        resume: As in `isles train`.
        dry_run: Show the command. Start nothing.
        detach: Return as soon as the cluster has started.
    """
    from isles.launch.base import StartOptions
    from isles.launch.join import Joiner, joining_run, read_join_line

    found = read_join_line(line)
    if line in sys.argv and "#" in line:
        # Begin again without the secret among the arguments, which other users of this machine
        # would see for as long as the run is followed.
        reader, writer = os.pipe()
        os.write(writer, f"{found.secret_text()}\n".encode())
        os.close(writer)
        os.dup2(reader, 0)
        typed = ["-" if word == line else word for word in sys.argv[1:]]
        os.execv(sys.executable, [sys.executable, "-m", "isles", *typed])

    def warn(text: str) -> None:
        note(f"warning: {text}")

    files = [word for word in words[:1] if "=" not in word]
    joiner = Joiner(Path(files[0]) if files else None, words[len(files) :], name, on or "")
    loaded = joining_run(found, joiner, warn)
    chosen = [*(["--name", name] if name else []), *(["--on", on] if on else [])]
    options = StartOptions(
        loaded.path,
        (),
        resume,
        dry_run,
        print_line,
        warn,
        join=found.secret_text(),
        loaded=loaded,
        typed=shlex.join(["isles", "join", line, *words, *chosen]),
    )
    return start_and_follow(options, detach=detach)


def print_line(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def note(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
