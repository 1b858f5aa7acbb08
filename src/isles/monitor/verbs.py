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

if TYPE_CHECKING:
    from isles.launch.base import StartOptions
    from isles.monitor.follow import Follower
    from isles.monitor.stop import Signals
    from isles.run.paths import RunDir
    from isles.run.remote import RemoteRun

Run = Annotated[
    str | None,
    Parameter(
        help="Name or directory of a run, or NAME@HOST of one on another machine; left out: the "
        "one that was started last."
    ),
]
Cluster = Annotated[
    str | None, Parameter(help="Of a run on several clusters only this one; left out: all.")
]
RunsDir = Annotated[Path, Parameter(name="--output-dir", help="Folder of the run directories.")]
RUNS = Path("runs")

hub_app = App(
    name="hub",
    alias="rendezvous",
    help="Open the hub through which clusters of one run average, and print how they join.",
)
join_app = App(
    name="join", help="Take part, with the GPUs of this site, in a run that others have begun."
)


def register(app: App) -> None:
    for verb in (status, logs, stop):
        app.command(verb)
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
    """Show the status of runs: all of them, or one in full, wherever they run.

    Args:
        run: Name or directory of a run, or NAME@HOST; left out: all of them, and with --check the
            one that was started last.
        check: Whether it is well: a process on every GPU, memory in use, loss falling, ranks in
            step, records arriving. Exit code 0, or 2.
        wait: With --check: until all five are so, or for so long (5m), or until the run ends.
        json: Print JSON.
    """
    if check or wait is not None:
        from isles.monitor.live.well import check_run

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
            print_line(f"there is no run in {output_dir}/; start one with `isles train run.yaml`")
        for state in hubs:
            how = "runs" if hub_process(state) is not None else f"is {resting_state(state)}"
            print_line(f"{state.name} is a hub, which {how}: isles status {state.name}")
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
    """End this process once the other end of its stdin is closed: nobody reads any more."""

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
    """Show what the ranks of a run printed, on all its nodes.

    Args:
        follow: Go on until the run ends.
        lines: How many lines of each rank; with --by-node of each node.
        rank: Only this rank; left out: all, each line with its rank.
        node: Only the ranks of this node; left out: all, each line with its node.
        by_node: One node after the other, each below a headline.
        attempt: Which start of the run; left out: the last.
        here: Only what this machine has; for isles on another one.
    """
    from isles.monitor.logs import LogChoice
    from isles.monitor.stream import shown_lines
    from isles.run.find import find_any, find_cluster

    if by_node and (follow or rank is not None):
        raise UserError(
            "--by-node shows one node after the other", fix="leave out --follow and --rank"
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
    """Let a run save a checkpoint and stop, and wait until it has.

    Args:
        now: End it at once, without saving.
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
    """Follow a run, for isles on another machine, or as one cluster of a multi-cluster run.

    Args:
        run: The run directory, or HOST:PATH.
        attempt: Which start of it; left out: the last.
        stdin: Read interrupt and requeue, one a line, from stdin; its end leaves the run.
        begun: It has been followed before: show what is new.
        width: Columns of the terminal that this draws on from afar; left out: no terminal.
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
    """Open the hub through which clusters of one run average, print the line by which they join,
    and show which join and leave. Typed again it goes on where it was: same line, same state.

    Args:
        run_file: The run file, with outer: {kind: diloco}. Clusters elsewhere get from here what
            all must have alike: model, data, training, outer.
        overrides: Values that replace those in the file, such as outer.sync_every=100.
        public: HOST:PORT that clusters dial: a name, a VPN's address, or a router's that passes it
            on. Left out: outer.public of the run file, or clusters of this machine only.
        listen: HOST:PORT of this machine, if it is not what --public says.
        detach: Return as soon as it is open.
        new: Begin with an empty state and another line.
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
        how = "ends it; typed again it goes on" if meeting.is_new else "leaves it running"
        print_line(f"Ctrl+C {how}; closing this terminal leaves it running\n")
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
    """Train as one more cluster of a run, by the line that `isles hub` has printed.

    Model, data, training and outer are the run's own, and come from there. Typed again it goes on
    where the last start ended.

    Args:
        line: A file with the join line; or - to read it from stdin; or the line itself, which the
            shell's history keeps then.
        words: A run file of this site, of which the section clusters is enough; and values such as
            launcher.partition=gpu, nodes=4, gpus_per_node=8 of this site's cluster, or
            data.sources.0.path=/scratch/text where the same data lies elsewhere.
        name: Of this cluster. Left out: as the run file says, or the name of this machine.
        on: How ranks are started. Left out: as the run file says, or on this machine.
        resume: As in isles train.
        dry_run: Show what would be started; start nothing.
        detach: Return as soon as it is started.
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
