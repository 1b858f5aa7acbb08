"""The command `isles`: its verbs, its errors and its exit codes."""

# Only what parsing needs is imported here: `isles --help` answers at once, and every verb works
# where torch is not installed, up to the moment that it starts ranks.
from __future__ import annotations

import errno
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, CycloptsError, Parameter

from isles import __version__
from isles.errors import ConfigErrors, ExitCode, UserError
from isles.launch.arguments import normalise_overrides
from isles.launch.file_verbs import config, data

if TYPE_CHECKING:
    from rich.console import Console

app = App(
    name="isles",
    help="Train or fine-tune one language model on whatever GPUs you have.",
    help_format="plaintext",
    version=__version__,
    default_parameter=Parameter(negative=()),
)
checkpoint = App(name="checkpoint", help="List, verify and export checkpoints.")
app.command(checkpoint)
app.command(config)
app.command(data)

Run = Annotated[
    str | None,
    Parameter(help="Name or directory of a run; left out: the one that was started last."),
]
RunsDir = Annotated[Path, Parameter(name="--output-dir", help="Folder of the run directories.")]
Step = Annotated[int | None, Parameter(help="Checkpoint of this step; left out: the newest.")]
_RUNS = Path("runs")


@app.command
def init(
    *, template: str = "quickstart", output: Path = Path("run.yaml"), force: bool = False
) -> int:
    """Write a small commented run file.

    Args:
        template: What it is for: quickstart, pretrain, finetune, chat, lora, qlora or dpo.
        output: Where it is written.
        force: Replace the file if it is there.
    """
    from isles.config.template import template as template_text
    from isles.rundir.records import write_text_atomic

    text = template_text(template)
    if output.exists() and not force:
        raise UserError(
            "the file is there already", where=str(output), fix="give --output or --force"
        )
    try:
        write_text_atomic(output, text)
    except OSError as error:
        raise UserError(
            f"cannot be written: {error.strerror}", where=str(output), fix="give another --output"
        ) from error
    print(f"wrote {output}; look at it, then: isles train {output}")
    return ExitCode.OK


@app.command
def train(
    run_file: Path,
    /,
    *overrides: str,
    resume: str = "auto",
    dry_run: bool = False,
    detach: bool = False,
) -> int:
    """Train: start the ranks, follow them, and go on where the last start ended.

    Args:
        run_file: The run file.
        overrides: Values that replace those in the file, such as training.max_steps=5.
        resume: auto: go on with the newest unfinished run of this name. no: a new run.
            Or the path of a run directory, or of a checkpoint in one.
        dry_run: Show the resolved values and the exact command; start nothing.
        detach: Return as soon as the run is started.
    """
    from isles.launch.start import StartOptions, start
    from isles.monitor.inbox import caught_signals

    options = StartOptions(run_file, overrides, resume, dry_run, _say, _warn)
    with caught_signals() as inbox:
        started = start(options)
        if isinstance(started, str):
            print(started)
            return ExitCode.OK
        if started.text:
            print(started.text)
            return ExitCode.OK
        name = started.run_dir.name
        if detach:
            _say(f"  isles status {name} · isles logs -f {name} · isles stop {name}")
            return ExitCode.OK
        _say("Ctrl+C saves and stops; closing this terminal leaves it running")
        # The ranks are on their way: what draws their progress is loaded beside them.
        from isles.monitor.foreground import attend

        return attend(started, inbox=inbox, console=_console(), errors=_console(stderr=True))


@app.command
def status(run: str | None = None, /, *, json: bool = False, output_dir: RunsDir = _RUNS) -> int:
    """Show how runs stand: all of them, or one in full.

    Args:
        run: Name or directory of a run; left out: all of them.
        json: Print JSON.
    """
    from json import dumps

    from isles.monitor.collect import collect
    from isles.monitor.table import report_lines, runs_table
    from isles.rundir.find import find_run, list_runs

    if run is not None:
        report = collect(find_run(run, output_dir))
        print(dumps(report.record(), indent=1) if json else "\n".join(report_lines(report)))
        return ExitCode.OK
    reports = [collect(run_dir) for run_dir in reversed(list_runs(output_dir))]
    if json:
        print(dumps([report.record() for report in reports], indent=1))
    elif reports:
        _console().print(runs_table(reports))
    else:
        print(f"there is no run in {output_dir}/; start one with `isles train run.yaml`")
    return ExitCode.OK


@app.command
def logs(
    run: Run = None,
    /,
    *,
    follow: Annotated[bool, Parameter(name=("--follow", "-f"))] = False,
    lines: Annotated[int, Parameter(name=("--lines", "-n"))] = 100,
    rank: int | None = None,
    attempt: int | None = None,
    output_dir: RunsDir = _RUNS,
) -> int:
    """Show what the ranks printed.

    Args:
        follow: Go on until the run ends.
        lines: How many lines of each rank.
        rank: Only this rank; left out: all, each line with its rank.
        attempt: Which start of the run; left out: the last.
    """
    from isles.monitor.logs import choose_attempt, log_lines
    from isles.rundir.find import find_run

    run_dir = find_run(run, output_dir)
    chosen = choose_attempt(run_dir, attempt)
    for line in log_lines(run_dir, chosen, rank=rank, last=max(0, lines), follow=follow):
        print(line, flush=follow)
    return ExitCode.OK


@app.command
def stop(
    run: Run = None, /, *, now: bool = False, timeout: str = "10m", output_dir: RunsDir = _RUNS
) -> int:
    """Let a run save a checkpoint and stop, and wait until it has.

    Args:
        now: End it at once, without saving.
        timeout: Longest wait.
    """
    from isles.facts.units import parse_duration_s
    from isles.monitor.stop import stop_run
    from isles.rundir.find import find_run

    try:
        timeout_s = parse_duration_s(timeout)
    except ValueError as error:
        raise UserError(str(error), where="--timeout", fix="for example --timeout 5m") from error
    return stop_run(find_run(run, output_dir), now=now, timeout_s=timeout_s, say=_say)


@checkpoint.command(name="list")
def list_(run: Run = None, /, *, output_dir: RunsDir = _RUNS) -> int:
    """List the checkpoints of a run."""
    from isles.monitor.checkpoints import checkpoint_lines
    from isles.rundir.find import find_run

    print("\n".join(checkpoint_lines(find_run(run, output_dir))))
    return ExitCode.OK


@checkpoint.command
def verify(run: Run = None, /, *, step: Step = None, output_dir: RunsDir = _RUNS) -> int:
    """Read checkpoints back and compare every byte with its recorded hash.

    Args:
        step: Only the checkpoint of this step; left out: all of them.
    """
    from isles.monitor.checkpoints import verify_lines
    from isles.rundir.find import find_run

    is_whole = True
    for line, is_good in verify_lines(find_run(run, output_dir), step):
        print(line, flush=True)
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
        output: Where it is written; left out: RUN/model.
        merge_adapter: Merge the adapter into its model, and write that.
        push_to_hub: Upload it to this repository of the hub, owner/name; made private if it is
            not there.
    """
    options: dict[str, object] = {"step": step, "output": output, "push-to-hub": push_to_hub}
    options["merge-adapter"] = merge_adapter
    return _worker_verb("export", run, output_dir, options)


@app.command
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


@app.command(name="eval")
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


@app.command
def version() -> int:
    """Print the versions of isles and of what it builds on."""
    from isles.launch.verbs import version_lines

    print("\n".join(version_lines()))
    return ExitCode.OK


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    tokens = normalise_overrides(sys.argv[1:] if argv is None else argv)
    try:
        code = app(tokens, exit_on_error=False, print_error=False, result_action="return_value")
        sys.stdout.flush()
    except Exception as error:
        return _report(error)
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    return int(code or 0)


def _report(error: Exception) -> int:
    """Print an error as far as the user needs it, and give its exit code."""
    code = ExitCode.USER
    match error:
        case OSError(errno=errno.EPIPE | errno.EIO):
            # The reader (head, less) has seen enough, or the terminal is closed. Python flushes
            # stdout once more at its end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return ExitCode.OK
        case CycloptsError():
            text = f"error: {error}\n  fix: `isles --help` shows what there is"
        case ConfigErrors():
            text = "\n".join(f"error: {fault}" for fault in error.faults)
        case UserError():
            text, code = f"error: {error}", error.exit_code
        case _:
            import traceback

            text = "".join(traceback.format_exception(error)) + (
                "this is a fault in isles itself: please report it with the lines above"
            )
    with suppress(BrokenPipeError):
        sys.stdout.flush()
    print(text, file=sys.stderr, flush=True)
    return code


def _say(line: str) -> None:
    print(line, flush=True)


def _warn(line: str) -> None:
    print(f"warning: {line}", file=sys.stderr)


def _console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    console = Console(stderr=stderr, highlight=False)
    # A pipe has no width: nothing is cut there.
    return console if console.is_terminal else Console(stderr=stderr, highlight=False, width=200)


def _worker_verb(
    verb: str, run: str | None, output_dir: Path, options: Mapping[str, object]
) -> int:
    from isles.launch.verbs import run_verb
    from isles.rundir.find import find_run

    return run_verb(verb, find_run(run, output_dir), options)
