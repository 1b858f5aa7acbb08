"""Verbs on a run as it is now: top, dashboard, report."""

# As in `isles.cli`, only what parsing needs is imported here.
from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from isles.errors import ExitCode, UserError
from isles.facts.units import printable
from isles.launch.groups import TOOLS, WATCH
from isles.monitor.verbs import RUNS, Run, RunsDir, end_with_stdin, note, print_line

if TYPE_CHECKING:
    from isles.monitor.live.readers import Found


def register(app: App) -> None:
    app.command(top, group=WATCH)
    app.command(dashboard, group=WATCH)
    app.command(report, group=TOOLS)
    app.command(rank_stack, show=False)


def top(
    run: Run = None,
    /,
    *,
    json: bool = False,
    every: float | None = None,
    stdin: Annotated[bool, Parameter(show=False)] = False,
    own: Annotated[bool, Parameter(show=False)] = False,
    output_dir: RunsDir = RUNS,
) -> int:
    """Show every rank, host, link and cluster of a run, live in the terminal.

    If the output is not a terminal, isles prints the state once as text.

    Args:
        json: Print JSON. With --every, one line per refresh until the reader closes the pipe.
        every: Refresh interval in seconds. If omitted, 2.
        stdin: End when stdin ends, for isles on another machine.
        own: Show only this cluster of several, for isles on another machine.
    """
    from isles.monitor.live.cells import plain_lines
    from isles.monitor.live.source import Watch, snapshot
    from isles.monitor.table import console

    if every is not None and not 0.2 <= every <= 3600:
        raise UserError(f"{every:g} is not between 0.2 and 3600", where="--every", fix="--every 2")
    found = _watched(run, output_dir)
    if stdin:
        end_with_stdin()
    screen = console()
    # It is drawn on stderr.
    has_all = screen.is_terminal and sys.stdin.isatty() and sys.stderr.isatty()
    is_live = has_all and not screen.is_dumb_terminal
    if json and every is not None:
        with Watch(found, output_dir, every, is_own=own) as watch:
            at, error = 0.0, ""
            while True:
                if (shown := watch.wait(at, every)) is not None:
                    at = shown.at
                    print_line(shown.model_dump_json())
                if watch.error != error and (error := watch.error):
                    note(f"error: {error}")
    if json:
        print_line(snapshot(found, is_own=own).model_dump_json())
        return ExitCode.OK
    if not is_live:
        for line in plain_lines(snapshot(found)):
            print_line(line)
        return ExitCode.OK
    from isles.monitor.live.top import run_top

    with Watch(found, output_dir, every or 2.0, is_own=own) as watch:
        return run_top(watch)


def dashboard(
    *runs: str,
    port: int = 0,
    export: Path | None = None,
    output_dir: RunsDir = RUNS,
) -> int:
    """Show a run live in the browser, and compare runs.

    Args:
        runs: Names or directories of runs, or NAME@HOST for runs on other machines. The page
            shows the first run in full, and compares the others with it. If omitted, the run
            that was started last.
        port: Port of the page. 0 picks a free port.
        export: Write the page to this HTML file instead of serving it.
    """
    from contextlib import ExitStack

    from isles.monitor.live import server
    from isles.monitor.live.source import Watch, snapshot

    found = [_watched(run, output_dir) for run in runs or (None,)]
    if export is not None:
        server.export([snapshot(each) for each in found], export)
        print_line(f"wrote {export}")
        return ExitCode.OK
    with ExitStack() as stack:
        watches = [stack.enter_context(Watch(each, output_dir)) for each in found]
        return server.serve(watches, port=port, print_line=print_line)


def report(
    run: Run = None,
    /,
    *,
    output: Annotated[Path | None, Parameter(name=("--output", "-o"))] = None,
    yes: bool = False,
    print_: Annotated[bool, Parameter(name="--print", show=False)] = False,
    most_bytes: Annotated[int | None, Parameter(show=False)] = None,
    output_dir: RunsDir = RUNS,
) -> int:
    """Write a ZIP file for a bug report, without secrets.

    The file has the run file, versions, the ends of the logs, findings, stacks and telemetry.
    isles lists its contents.

    Args:
        output: The file. If omitted, report-TIME.zip in the run directory.
        yes: Write outside the run directory without asking.
        print_: Print the report, for isles on another machine.
        most_bytes: Largest sum of the unpacked files, in bytes.
    """
    from isles.facts.units import format_bytes
    from isles.monitor import bundle
    from isles.monitor.hub import find_hub
    from isles.run.find import find_any

    found = find_hub(run, output_dir) or find_any(run, output_dir)
    if print_:
        print_line(bundle.answer_line(bundle.gather(found, output_dir, most_bytes)))
        return ExitCode.OK
    path = output or bundle.default_place(found, output_dir)
    must_ask = not (yes or bundle.is_inside(found, path))
    if must_ask and not sys.stdin.isatty():
        raise UserError(
            "this is outside the run directory, and isles cannot ask without a terminal",
            where=str(path),
            fix="add --yes",
        )
    gathered = bundle.gather(found, output_dir)
    if must_ask and not bundle.ask_whether(gathered, path, _ask):
        print_line("nothing was written")
        return ExitCode.USER
    size = bundle.write_report(path, gathered)
    for line in [*bundle.contents(gathered), *(f"not in it: {t}" for t in gathered.left_out)]:
        print_line(f"  {line}")
    print_line(f"wrote {path}: {len(gathered.files)} files, {format_bytes(size)}")
    return ExitCode.OK


def rank_stack(run: Path, rank: int, /) -> int:
    """Print the stack of a rank, for isles on another machine.

    Args:
        run: Run directory.
        rank: Number of the rank.
    """
    from isles.monitor.live.source import stack_of
    from isles.run.paths import RunDir

    print_line(stack_of(RunDir(run), rank))
    return ExitCode.OK


def _ask(question: str) -> str:
    # A prompt goes to the terminal past sys.stdout.
    try:
        return input(printable(question))
    except EOFError:
        print_line("")  # the prompt is still on the line
        return ""


def _watched(run: str | None, output_dir: Path) -> Found:
    from isles.monitor.hub import find_hub
    from isles.run.find import find_any

    return find_hub(run, output_dir) or find_any(run, output_dir)
