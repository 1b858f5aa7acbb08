"""The command `isles`: its verbs, its errors and its exit codes."""

# Only what parsing needs is imported here: `isles --help` answers at once, and every verb works
# where torch is not installed, up to the moment that it starts ranks.
from __future__ import annotations

import difflib
import errno
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from cyclopts import App, CycloptsError, Group, Parameter, UnusedCliTokensError

from isles import __version__
from isles.errors import ConfigErrors, ExitCode, UserError, more_lines
from isles.facts.console import Console
from isles.facts.secrets import without_secrets
from isles.facts.terminal import shown_streams
from isles.launch.groups import START, TOOLS
from isles.launch.verbs import config, data, normalize_overrides, render, setup_app
from isles.monitor import results, verbs
from isles.monitor.live import verbs as live_verbs
from isles.run.env import settle_home

app = App(
    name="isles",
    help="Train or fine-tune one language model on whatever GPUs you have.",
    # Paragraphs are filled to the width of the terminal.
    help_format="markdown",
    version=__version__,
    console=Console(),
    default_parameter=Parameter(negative=(), show_default=lambda value: value or None),
)
app["--help"].group = app["--version"].group = Group("Options", sort_key=6)
app.command(config)
app.command(data)
app.command(render, group=TOOLS)
app.command(setup_app)
verbs.register(app)
live_verbs.register(app)
results.register(app)


@app.command(group=START)
def init(
    path: Path | None = None,
    /,
    *,
    template: str = "quickstart",
    output: Path | None = None,
    force: bool = False,
) -> int:
    """Write a commented run file to start from.

    Args:
        path: The file to write. [default: run.yaml]
        template: quickstart, pretrain, finetune, chat, lora, qlora, dpo or a cookbook recipe.
        output: The same as PATH.
        force: Overwrite an existing file.
    """
    from isles.config.show import template as template_text
    from isles.run.records import write_new

    if path is not None and output is not None and path != output:
        raise UserError(
            f"two files to write: {path} and {output}", where="--output", fix="give one of them"
        )
    chosen = path or output or Path("run.yaml")
    write_new(
        chosen, template_text(template).replace("run.yaml", shlex.quote(str(chosen))), force=force
    )
    print(f"wrote {chosen}. Read it, then run: {shlex.join(['isles', 'train', str(chosen)])}")
    return ExitCode.OK


@app.command(group=START)
def train(
    run_file: Path,
    /,
    *overrides: str,
    resume: str = "auto",
    dry_run: bool = False,
    detach: bool = False,
    announce: Annotated[bool, Parameter(show=False)] = False,
    join_file: Path | None = None,
    cluster: Annotated[str, Parameter(show=False)] = "",
    typed: Annotated[str, Parameter(show=False)] = "",
) -> int:
    """Start a run, or resume the unfinished run, and follow it.

    Args:
        run_file: The run file.
        overrides: Values that override the run file, such as training.max_steps=5.
        resume: `auto` resumes the newest unfinished run of this name. `no` starts a new run.
            Or give a run directory, or one of its checkpoints.
        dry_run: Print the resolved values and the exact command. Start nothing.
        detach: Return as soon as the run has started.
        announce: Detach, and print the name of the run for isles on another machine.
        join_file: File with the join line that connects this cluster to the other clusters.
        cluster: Start only this cluster of the run file.
        typed: The user's command that resumes this run, if isles on another machine starts it.
    """
    from isles.launch.base import StartOptions
    from isles.launch.verbs import train_command

    join = ""
    if join_file is not None:
        from isles.run.join_line import JoinLine

        join = JoinLine.given(join_file).secret_text()
    options = StartOptions(
        run_file,
        overrides,
        resume,
        dry_run,
        _print_line,
        _warn,
        cluster=cluster,
        join=join,
        typed=typed or train_command(run_file, overrides, resume),
    )
    return verbs.start_and_follow(options, detach=detach, announce=announce)


@app.command(group=START)
def check(
    run_file: Path | None = None,
    /,
    *overrides: str,
    hosts: Annotated[tuple[str, ...], Parameter(consume_multiple=True)] = (),
    json: bool = False,
    net: Annotated[bool, Parameter(negative="--no-net")] = True,
    smoke: bool = False,
    in_job: bool = False,
    timeout: str = "60s",
) -> int:
    """Check the machines before a run, and print a fix for each problem.

    Exit codes: 0 means ready, perhaps with warnings. 1 means a fault in the run file or the
    command line. 2 means that a check failed.

    Args:
        run_file: The run file. If omitted, isles checks only the machines.
        overrides: Values that override the run file, such as data.seq_length=512.
        hosts: Check these ssh hosts instead of the hosts in the run file.
        json: Print JSON.
        net: Test the links between hosts, and an all-reduce over all ranks.
        smoke: Train a small model for three steps on each machine.
        in_job: Run the checks on the allocated nodes, in a short Slurm job.
        timeout: Longest wait for an answer from a host.
    """
    from isles.check.plan import Extent
    from isles.check.verb import run_check
    from isles.facts.units import parse_duration_s

    try:
        timeout_s = parse_duration_s(timeout)
    except ValueError as error:
        raise UserError(str(error), where="--timeout", fix="for example --timeout 3m") from error
    if timeout_s < 10:
        raise UserError(
            f"{timeout} is less than importing torch takes",
            where="--timeout",
            fix="for example --timeout 30s",
        )
    extent = Extent(net=net, smoke=smoke, in_job=in_job, as_json=json, timeout_s=timeout_s)
    console = Console()
    return run_check(run_file, overrides, hosts, extent, lambda text: console.print_lines([text]))


@app.command(group=START)
def plan(
    run_file: Path,
    /,
    *overrides: str,
    gpus: str = "",
    nodes: int | None = None,
    link: str = "",
    hub_link: str = "",
    price: str = "",
    json: bool = False,
    apply: bool = False,
    details: bool = False,
    simulate: bool = False,
    fleet: Path | None = None,
    hours: float | None = None,
    seed: int | None = None,
    png: Path | None = None,
) -> int:
    """Estimate memory, speed and cost of a run before you start it.

    Exit codes: 0 means that the run fits, or that isles cannot tell. 1 means a fault in the run
    file or the command line. 2 means that the run does not fit.

    Args:
        run_file: The run file.
        overrides: Values that override the run file, such as data.seq_length=512.
        gpus: Plan for these GPUs instead, such as "2x4090,3070ti@1gbe".
        nodes: Number of machines, each with the GPUs of --gpus.
        link: Link of each cluster to the hub, such as 100mbit+25ms. Separate several with ";".
        hub_link: Link of the hub. If omitted, the link of the first cluster.
        price: Price of energy, such as 0.30/kWh, or of one GPU for an hour, such as 2.50/h.
        json: Print JSON.
        apply: Write the first change that makes the run fit into the run file.
        details: Show each phase, each memory-saving option and each strategy.
        simulate: Simulate the clusters: goodput, idle time and traffic.
        fleet: With --simulate, a file with other clusters, speeds, links and failures.
        hours: With --simulate, the longest simulated time. If omitted, to the last step or 24.
        seed: With --simulate, the random seed.
        png: With --simulate, draw the timeline into this file.
    """
    from isles.plan.verb import PlanOptions, check_options, planned_clusters, run_plan

    options = PlanOptions(gpus, nodes, link, hub_link, price, json, apply, details)
    played = {"--fleet": fleet, "--hours": hours, "--seed": seed, "--png": png}
    check_options(options, played, is_simulated=simulate)
    if not simulate:
        console = Console()
        return run_plan(run_file, overrides, options, lambda text: console.print_lines([text]))
    from isles.config.load import load_run_file
    from isles.plan.simulate.verb import simulate_run

    loaded = load_run_file(run_file, overrides)
    planned = planned_clusters(loaded, options) if fleet is None else {}
    return simulate_run(
        loaded, fleet, hours, seed or 0, planned, as_json=json, png=png, print_line=_print_line
    )


@app.command(group=TOOLS)
def explain(id: str = "", /) -> int:
    """Explain an error, a finding or an exit code.

    Args:
        id: ID in the last line of an error, such as data.rows, or an exit code. If omitted, list
            all IDs.
    """
    from isles.facts import troubleshooting as page

    width = min(100, shutil.get_terminal_size().columns)
    if not id:
        print(page.list_text(width))
    elif id in page.exit_codes():
        print(page.exit_code_text(id, width))
    elif id in page.by_id():
        print(page.by_id()[id].text(width))
    elif (new := page.RENAMED.get(id)) is not None:
        print(f"{id} is called {new}\n\n{page.by_id()[new].text(width)}")
    else:
        known = sorted(page.by_id())
        near = [name for name in known if name.startswith(f"{id}.")]
        near = near or difflib.get_close_matches(id, known, n=3, cutoff=0.5)
        meant = f"did you mean {', '.join(near)}? " if near else ""
        raise UserError(f"there is no id {id!r}", fix=f"{meant}`isles explain` lists them all")
    return ExitCode.OK


@app.command(group=TOOLS)
def version() -> int:
    """Print the versions of isles and of its libraries."""
    from isles.launch.worker import version_lines

    print("\n".join(version_lines()))
    return ExitCode.OK


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    with shown_streams():
        return _run(argv)


def _run(argv: Sequence[str] | None) -> int:
    tokens = normalize_overrides(sys.argv[1:] if argv is None else argv)
    try:
        if note := settle_home():
            print(f"note: {note}", file=sys.stderr)
        code = app(tokens, exit_on_error=False, print_error=False, result_action="return_value")
        sys.stdout.flush()
    except Exception as error:
        return _report(error)
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    return int(code or 0)


def _report(error: Exception) -> int:
    """Print an error as far as the user needs it, and give its exit code."""
    code, ids = ExitCode.USER, tuple[str, ...]()
    match error:
        case OSError(errno=errno.EPIPE | errno.EIO, filename=None):
            # The reader (head, less) has seen enough, or the terminal is closed. Python flushes
            # stdout once more at its end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return ExitCode.OK
        case CycloptsError():
            verb = " ".join(("isles", *(error.command_chain or ())))
            what, fix = str(error), f"`{verb} --help` shows what there is"
            if isinstance(error, UnusedCliTokensError):
                tokens = error.unused_tokens or []
                what = f"`{verb}` does not take {' '.join(tokens)}"
                fix = f"`{verb} --help` shows what it takes"
                if any("=" in token for token in tokens):
                    fix = f"a run keeps the values that `isles train` was given; {fix}"
            text, ids = f"error: {what}\n  fix: {fix}", (UserError.id,)
        case ConfigErrors():
            text, ids = "\n".join(f"error: {issue}" for issue in error.issues), error.ids
        case UserError():
            text, code, ids = f"error: {error}", error.exit_code, error.ids
        case _:
            import traceback

            text = "".join(traceback.format_exception(error)) + (
                "this is a bug in isles: please report it with the lines above"
            )
    with suppress(BrokenPipeError):
        sys.stdout.flush()
    # An older isles wrote the records of an old run without a search for secrets.
    text = without_secrets(text)
    print("\n".join([text, *more_lines(ids, text)]), file=sys.stderr, flush=True)
    return code


def _print_line(line: str) -> None:
    print(line, flush=True)


def _warn(line: str) -> None:
    print(f"warning: {line}", file=sys.stderr)
