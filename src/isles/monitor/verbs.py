"""Verbs on a run, here or on another machine: status, logs, stop, and what is typed after them."""

# As in `isles.cli`, only what parsing needs is imported here.
from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from isles.errors import ExitCode, UserError

if TYPE_CHECKING:
    from isles.run.paths import RunDir
    from isles.run.remote import RemoteRun

checkpoint = App(name="checkpoint", help="List, verify and export checkpoints.")

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
Step = Annotated[int | None, Parameter(help="Checkpoint of this step; left out: the newest.")]
OneStep = Annotated[int | None, Parameter(name="--step", help="Only this one; left out: all.")]
_RUNS = Path("runs")


def register(app: App) -> None:
    """Give the command its verbs on runs."""
    app.command(checkpoint)
    for verb in (status, logs, stop, generate):
        app.command(verb)
    app.command(evaluate, name="eval")
    app.command(attend, show=False)
    app.command(report, show=False)


def status(run: str | None = None, /, *, json: bool = False, output_dir: RunsDir = _RUNS) -> int:
    """Show how runs stand: all of them, or one in full, wherever they run.

    Args:
        run: Name or directory of a run, or NAME@HOST; left out: all of them.
        json: Print JSON.
    """
    from json import dumps

    from isles.monitor.everywhere import report_of, reports_of_all
    from isles.monitor.meeting.state import (
        find_meeting,
        meeting_lines,
        meeting_record,
        running_meetings,
    )
    from isles.monitor.multi_cluster.report import several_lines, several_report, with_several
    from isles.monitor.table import report_lines, runs_table
    from isles.run.find import find_any
    from isles.run.several import SeveralRun

    if (meeting := find_meeting(run, output_dir)) is not None:
        record = meeting_record(meeting)
        _say(dumps(record, indent=1) if json else "\n".join(meeting_lines(meeting, record)))
        return ExitCode.OK
    if run is not None:
        found = find_any(run, output_dir)
        if isinstance(found, SeveralRun):
            whole = several_report(found)
            _say(dumps(whole.record(), indent=1) if json else "\n".join(several_lines(whole)))
            return ExitCode.OK
        report = report_of(found, output_dir)
        _say(dumps(report.record(), indent=1) if json else "\n".join(report_lines(report)))
        return ExitCode.OK
    reports, meetings = reports_of_all(output_dir), running_meetings(output_dir)
    if json:
        _say(dumps([entry.record() for entry in reports], indent=1))
        return ExitCode.OK
    if reports:
        from isles.monitor.consoles import console

        console().print(runs_table(with_several(reports, output_dir)))
    elif not meetings:
        _say(f"there is no run in {output_dir}/; start one with `isles train run.yaml`")
    for state in meetings:
        _say(f"{state.name} is a rendezvous, which runs: isles status {state.name}")
    return ExitCode.OK


def report(*paths: Path) -> int:
    """Print how these run directories stand, for isles on another machine.

    Args:
        paths: Run directories.
    """
    from isles.monitor.everywhere import records_of

    _say(records_of(paths))
    return ExitCode.OK


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
    output_dir: RunsDir = _RUNS,
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
    from isles.monitor.multi_cluster.logs import several_lines
    from isles.monitor.stream import shown_lines
    from isles.run.find import find_any, find_cluster
    from isles.run.several import SeveralRun

    if by_node and (follow or rank is not None):
        raise UserError(
            "--by-node shows one node after the other", fix="leave out --follow and --rank"
        )
    choice = LogChoice(rank, node, max(0, lines), follow, attempt, here)
    if here and follow:
        _end_with_stdin()
    found = find_any(run, output_dir)
    if isinstance(found, SeveralRun) and cluster is None:
        lines_of_all = several_lines(found, choice, by_node=by_node, note=_note)
    else:
        one = find_cluster(run, output_dir, cluster)
        lines_of_all = shown_lines(one, choice, by_node=by_node, note=_note)
    for line in lines_of_all:
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
    here: Annotated[bool, Parameter(show=False)] = False,
    output_dir: RunsDir = _RUNS,
) -> int:
    """Let a run save a checkpoint and stop, and wait until it has.

    Args:
        now: End it at once, without saving.
        timeout: Longest wait.
        here: Kill its processes of this machine, and nothing else.
    """
    from isles.facts.units import parse_duration_s
    from isles.monitor.meeting.state import find_meeting
    from isles.monitor.stop import end_here, stop_run
    from isles.run.find import find_any, find_cluster
    from isles.run.remote import RemoteRun
    from isles.run.several import SeveralRun

    try:
        timeout_s = parse_duration_s(timeout)
    except ValueError as error:
        raise UserError(str(error), where="--timeout", fix="for example --timeout 5m") from error
    if (meeting := find_meeting(run, output_dir)) is not None:
        from isles.monitor.meeting.state import stop_meeting

        return stop_meeting(meeting, say=_say)
    whole = find_any(run, output_dir)
    if isinstance(whole, SeveralRun) and cluster is None:
        from isles.monitor.multi_cluster.stop import stop_several

        return stop_several(whole, now=now, timeout=timeout, say=_say, warn=_note)
    found = find_cluster(run, output_dir, cluster)
    if isinstance(found, RemoteRun):
        from isles.monitor.stop_remote import stop_remote

        return stop_remote(found, now=now, timeout=timeout, say=_say)
    if here:
        return end_here(found, say=_say)
    return stop_run(found, now=now, timeout_s=timeout_s, say=_say)


def attend(
    run: str,
    /,
    *,
    attempt: int | None = None,
    orders: bool = False,
    begun: bool = False,
    output_dir: RunsDir = _RUNS,
) -> int:
    """Follow a run on the machine that has its directory, for isles on another one; or a run of
    another machine from here, as one cluster of several.

    Args:
        run: The run directory, or HOST:PATH.
        attempt: Which start of it; left out: the last.
        orders: Take interrupt and requeue, one a line, from stdin; its end leaves the run.
        begun: It has been followed before: show what is new.
    """
    from isles.monitor.foreground import attend_here, attend_there
    from isles.run.find import find_cluster
    from isles.run.remote import RemoteRun

    found = find_cluster(run, output_dir)
    if isinstance(found, RemoteRun):
        return attend_there(found, attempt or 1, is_begun=begun)
    return attend_here(found, attempt, takes_orders=orders, is_begun=begun)


@checkpoint.command(name="list")
def list_(run: Run = None, /, *, output_dir: RunsDir = _RUNS) -> int:
    """List the checkpoints of a run."""
    from isles.monitor.checkpoints import checkpoint_lines
    from isles.run.remote import RemoteRun

    found = _whose_weights(run, output_dir)
    if isinstance(found, RemoteRun):
        return _pass_on(found, ["checkpoint", "list"], [])
    _say("\n".join(checkpoint_lines(found)))
    return ExitCode.OK


@checkpoint.command
def verify(run: Run = None, /, *, step: OneStep = None, output_dir: RunsDir = _RUNS) -> int:
    """Read checkpoints back and compare every byte with its recorded hash."""
    from isles.monitor.checkpoints import verify_lines
    from isles.run.remote import RemoteRun

    found = _whose_weights(run, output_dir)
    if isinstance(found, RemoteRun):
        options = [f"--step={step}"] if step is not None else []
        return _pass_on(found, ["checkpoint", "verify"], options)
    is_whole = True
    for line, is_good in verify_lines(found, step):
        _say(line)
        is_whole = is_whole and is_good
    return ExitCode.OK if is_whole else ExitCode.TRAINING


@checkpoint.command
def export(
    run: Run = None,
    /,
    *,
    step: Step = None,
    output: Path | None = None,
    merge_adapter: bool = False,
    push_to_hub: str | None = None,
    output_dir: RunsDir = _RUNS,
) -> int:
    """Write a Hugging Face folder that from_pretrained loads; of an adapter, that peft loads.

    Args:
        output: Where it is written, on the machine of the run; left out: RUN/model.
        merge_adapter: Merge the adapter into its model, and write that.
        push_to_hub: Upload it to this repository of the hub, owner/name; made private if it is
            not there.
    """
    options: dict[str, object] = {"step": step, "output": output, "push-to-hub": push_to_hub}
    options["merge-adapter"] = merge_adapter
    return _worker_verb("export", run, output_dir, options)


def generate(
    run: Run = None,
    /,
    *,
    prompt: str = "",
    chat: bool = False,
    max_new_tokens: int | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    step: Step = None,
    output_dir: RunsDir = _RUNS,
) -> int:
    """Let the trained model continue a text, or answer a message.

    Args:
        prompt: The text that it continues; left out: it begins by itself.
        chat: The prompt is a message of the user, which the model answers by its chat template.
        max_new_tokens: How many tokens at most.
        temperature: 0 takes the likeliest token; higher is more varied.
        top_p: Choose among the likeliest tokens that together have this probability.
        seed: The same seed gives the same text.
    """
    options = {
        "prompt": prompt,
        "chat": chat,
        "max-new-tokens": max_new_tokens,
        "temperature": temperature,
        "top-p": top_p,
        "seed": seed,
        "step": step,
    }
    return _worker_verb("generate", run, output_dir, options)


def evaluate(
    run: Run = None,
    /,
    *,
    step: Step = None,
    samples: int | None = None,
    output_dir: RunsDir = _RUNS,
) -> int:
    """Measure loss and perplexity on the validation data.

    Args:
        samples: How many validation sequences; left out: as in the run file.
    """
    return _worker_verb("eval", run, output_dir, {"step": step, "samples": samples})


def _worker_verb(
    verb: str, run: str | None, output_dir: Path, options: Mapping[str, object]
) -> int:
    from isles.launch.verbs import option_words, run_verb
    from isles.run.remote import RemoteRun

    found = _whose_weights(run, output_dir)
    if isinstance(found, RemoteRun):
        words = ["checkpoint", verb] if verb == "export" else [verb]
        return _pass_on(found, words, option_words(options))
    return run_verb(verb, found, options)


def _whose_weights(run: str | None, output_dir: Path) -> RunDir | RemoteRun:
    """The run that is meant; of one on several clusters that of the cluster that is furthest."""
    from isles.monitor.multi_cluster.state import furthest
    from isles.run.find import find_any, find_cluster
    from isles.run.several import SeveralRun

    found = find_any(run, output_dir)
    if not isinstance(found, SeveralRun):
        return found
    cluster = furthest(found)
    if cluster is not None:
        _note(f"the checkpoints of cluster {cluster}, which has taken in the most turns")
    return find_cluster(str(found.path), output_dir, cluster)


def _end_with_stdin() -> None:
    """Nobody reads any more once the other end of stdin is closed, even if no line comes."""

    def wait() -> None:
        sys.stdin.read()
        os._exit(ExitCode.OK)

    threading.Thread(target=wait, daemon=True).start()


def _pass_on(run: RemoteRun, verb: Sequence[str], options: Sequence[str]) -> int:
    from isles.launch.remote.passing import pass_on

    return pass_on(run, [*verb, run.path, *options])


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _note(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
