"""Verbs on a run as it is now: top, dashboard, status --check, report."""

# As in `isles.cli`, only what parsing needs is imported here.
from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from isles.errors import ExitCode, PreflightError, UserError
from isles.monitor.verbs import RUNS, Run, RunsDir, end_with_stdin, note, print_line

if TYPE_CHECKING:
    from isles.monitor.live.model import Snapshot
    from isles.monitor.live.source import Found
    from isles.monitor.live.well import CheckLine

_CHECK_EVERY_S, _SILENT_S = 1.0, 20.0


def register(app: App) -> None:
    for verb in (top, dashboard, report):
        app.command(verb)
    app.command(rank_stack, show=False)


def top(
    run: Run = None,
    /,
    *,
    json: bool = False,
    every: float | None = None,
    stdin: Annotated[bool, Parameter(show=False)] = False,
    output_dir: RunsDir = RUNS,
) -> int:
    """Show what every rank, host, link and cluster of a run does now, wherever it runs.

    In a terminal it is live; else it prints lines of text, once.

    Args:
        json: Print JSON; with --every one line each time, until nobody reads it.
        every: Seconds between two looks; left out: 2.
        stdin: End with the end of stdin; for isles on another machine.
    """
    from isles.monitor.live.plain import plain_lines
    from isles.monitor.live.source import Watch, snapshot
    from isles.monitor.table import console

    if every is not None and not 0.2 <= every <= 3600:
        raise UserError(f"{every:g} is not between 0.2 and 3600", where="--every", fix="--every 2")
    found = _watched(run, output_dir)
    if stdin:
        end_with_stdin()
    screen = console()
    is_live = screen.is_terminal and not screen.is_dumb_terminal and sys.stdin.isatty()
    if json and every is not None:
        with Watch(found, output_dir, every) as watch:
            at, error = 0.0, ""
            while True:
                if (shown := watch.wait(at, every)) is not None:
                    at = shown.at
                    print_line(shown.model_dump_json())
                if watch.error != error and (error := watch.error):
                    note(f"error: {error}")
    if json:
        print_line(snapshot(found).model_dump_json())
        return ExitCode.OK
    if not is_live:
        for line in plain_lines(snapshot(found)):
            print_line(line)
        return ExitCode.OK
    from isles.monitor.live.top import run_top

    with Watch(found, output_dir, every or 2.0) as watch:
        return run_top(watch)


def dashboard(
    *runs: str,
    port: int = 0,
    export: Path | None = None,
    output_dir: RunsDir = RUNS,
) -> int:
    """Serve one page on this machine that shows a run live, and compares it with others.

    Args:
        runs: Names or directories of runs, or NAME@HOST of ones on other machines: the first is
            shown in full, the others are compared with it; left out: the one that was started
            last.
        port: Of the page; 0: any.
        export: Write the page as one file that opens anywhere, and serve nothing.
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


def check_run(
    run: str | None, output_dir: Path, *, wait: tuple[str, ...] | None, json: bool
) -> int:
    """`isles status --check`.

    Args:
        wait: what stands after --wait; None: it is not there.
    """
    from json import dumps

    from isles.facts.units import parse_duration_s
    from isles.launch.remote.login import pass_on
    from isles.monitor.hub import find_hub
    from isles.monitor.live.source import Watch, snapshot
    from isles.monitor.live.well import check_lines, is_over, record_of, text_lines, wait_until_well
    from isles.run.find import find_any, typed_name
    from isles.run.paths import RunDir
    from isles.run.remote import RemoteRun
    from isles.run.state import script_of

    try:
        wait_s = parse_duration_s(*(wait or ("5m",)))
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{' '.join(wait or ())} is no duration",
            where="--wait",
            fix="name the run first: isles status RUN --check --wait 5m",
        ) from error
    if find_hub(run, output_dir) is not None:
        raise UserError(
            f"{run} is a hub, and has no ranks",
            where="--check",
            fix="name the run of a cluster; `isles top` shows the hub",
            id="run.unknown",
        )
    found = find_any(run, output_dir)
    if isinstance(found, RemoteRun):
        words = ["status", found.path, "--check", *(["--json"] if json else [])]
        return pass_on(found, [*words, *(["--wait", *wait] if wait is not None else [])])
    typed, is_script = typed_name(found), isinstance(found, RunDir) and bool(script_of(found))

    def lines_of(shown: Snapshot) -> list[CheckLine]:
        return [] if is_over(shown) else check_lines(shown, typed, is_script=is_script)

    if wait is None:
        shown = snapshot(found)
        lines = lines_of(shown)
    else:
        with Watch(found, output_dir, _CHECK_EVERY_S) as watch:
            at = 0.0

            def look() -> Snapshot:
                nonlocal at
                if (shown := watch.wait(at, _SILENT_S)) is None:
                    what = watch.error or f"nothing was heard of it for {_SILENT_S:.0f} s"
                    fix = "`isles status` shows what was last known of it"
                    raise PreflightError(what, where=watch.typed, fix=fix, id="host.answers")
                at = shown.at
                return shown

            shown, lines = wait_until_well(look, lines_of, wait_s, note)
    is_well = shown.run.state == "finished" or (bool(lines) and all(x.state == "ok" for x in lines))
    if json:
        print_line(dumps(record_of(shown, lines, is_well=is_well), indent=1))
    else:
        print_line("\n".join(text_lines(shown, lines, typed)))
    return ExitCode.OK if is_well else ExitCode.PREFLIGHT


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
    """Write one file with everything for a bug report: run file, versions, ends of logs, findings,
    stacks, telemetry; secrets are taken out, and it lists what is in it.

    Args:
        output: The file; left out: report-TIME.zip in the run directory.
        yes: Do not ask before it is written outside of the run directory.
        print_: Print it; for isles on another machine.
        most_bytes: Of its files together, unpacked.
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
            "this is not in the run directory, and nobody can be asked whether to write it",
            where=str(path),
            fix="add --yes",
        )
    gathered = bundle.gather(found, output_dir)
    if must_ask and not bundle.ask_whether(gathered, path, input):
        print_line("nothing was written")
        return ExitCode.USER
    size = bundle.write_report(path, gathered)
    for line in [*bundle.contents(gathered), *(f"not in it: {t}" for t in gathered.left_out)]:
        print_line(f"  {line}")
    print_line(f"wrote {path}: {len(gathered.files)} files, {format_bytes(size)}")
    return ExitCode.OK


def rank_stack(run: Path, rank: int, /) -> int:
    """Print where a rank stands now, for isles on another machine.

    Args:
        run: Run directory.
        rank: Its number.
    """
    from isles.monitor.live.source import stack_of
    from isles.run.paths import RunDir

    print_line(stack_of(RunDir(run), rank))
    return ExitCode.OK


def _watched(run: str | None, output_dir: Path) -> Found:
    from isles.monitor.hub import find_hub
    from isles.run.find import find_any

    return find_hub(run, output_dir) or find_any(run, output_dir)
