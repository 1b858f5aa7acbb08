"""Verbs on the results of a run: checkpoint, generate, eval."""

# As in `isles.cli`, only what parsing needs is imported here.
from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from isles.errors import ConfigError, ExitCode, UserError
from isles.launch.groups import RESULTS
from isles.monitor.verbs import RUNS, Run, RunsDir, note, print_line

if TYPE_CHECKING:
    from isles.config.sections.run import RunConfig
    from isles.run.bucket import RunStore
    from isles.run.paths import RunDir

checkpoint = App(
    name="checkpoint", help="List, verify, export and push checkpoints.", group=RESULTS
)

Step = Annotated[int | None, Parameter(help="Step of the checkpoint. If omitted, the newest.")]
OneStep = Annotated[int | None, Parameter(name="--step", help="Only this step. If omitted, all.")]


def register(app: App) -> None:
    app.command(checkpoint)
    app.command(generate, group=RESULTS)
    app.command(evaluate, name="eval", group=RESULTS)


@checkpoint.command(name="list")
def list_(run: Run = None, /, *, output_dir: RunsDir = RUNS) -> int:
    """List the checkpoints of a run."""
    from isles.monitor.table import checkpoint_lines

    found = _run_here(run, output_dir, ["checkpoint", "list"])
    if isinstance(found, int):
        return found
    print_line("\n".join(checkpoint_lines(found)))
    if (copy := _copy_of(found)) is None:
        return ExitCode.OK
    from isles.monitor.table import copy_lines
    from isles.run.bucket import ANSWER_S, explain_bucket_errors
    from isles.run.objects import call_with_timeout

    with explain_bucket_errors(copy.url):
        print_line("\n".join(call_with_timeout(ANSWER_S, lambda: copy_lines(copy), "its answer")))
    return ExitCode.OK


@checkpoint.command
def verify(
    run: Run = None,
    /,
    *,
    step: OneStep = None,
    remote: bool = False,
    output_dir: RunsDir = RUNS,
) -> int:
    """Read checkpoints back and compare every byte with its recorded hash.

    Args:
        remote: Fetch and verify the checkpoints at checkpoint.remote instead.
    """
    from isles.monitor.table import checkpoint_lines
    from isles.run.checkpoints import find_checkpoint, verify_checkpoint

    options = {"step": step, "remote": remote}
    found = _run_here(run, output_dir, ["checkpoint", "verify"], options)
    if isinstance(found, int):
        return found
    if remote:
        return _verify_copy(found, step)
    if step is not None:
        folders = [find_checkpoint(found, step).path]
    else:
        folders = sorted(found.checkpoints.glob("step-*"))
    if not folders:
        print_line("\n".join(checkpoint_lines(found)))
    code = ExitCode.OK
    for folder in folders:
        try:
            damage = verify_checkpoint(folder)
        except UserError as error:  # the others are still to be verified
            print_line(f"{folder.name} cannot be verified: {error.what}")
            print_line(f"  {error.fix}")
            code = ExitCode.TRAINING
            continue
        print_line(f"{folder.name}: {'NOT whole' if damage else 'whole'}")
        for line in damage:
            print_line(f"  {line}")
            code = ExitCode.TRAINING
    return code


@checkpoint.command
def push(run: Run = None, /, *, output_dir: RunsDir = RUNS) -> int:
    """Upload the missing checkpoints of an ended run to checkpoint.remote."""
    from isles.run.bucket import explain_bucket_errors
    from isles.run.exported import unsent_reason
    from isles.run.find import typed_name
    from isles.run.state import run_state
    from isles.run.upload import Uploader

    found = _run_here(run, output_dir, ["checkpoint", "push"])
    if isinstance(found, int):
        return found
    if run_state(found).is_alive:
        print_line(f"{found.name} is running, and sends its checkpoints by itself")
        return ExitCode.OK
    copy, config = _needed_copy(found), _config_of(found)
    sender = Uploader(copy, found, keep=config.checkpoint.keep, note=note, typed=typed_name(found))
    with explain_bucket_errors(copy.url):
        sender.take(print_line)
    names = ["model", "loss.png", "summary.json"] if found.summary.is_file() else []
    unsent = unsent_reason(found) if found.model.exists() else ""
    if unsent:
        names = names[1:]
        again = f"`isles checkpoint export {typed_name(found)}` exports the last step"
        print_line(f"{found.model} is not sent: {unsent}. {again}")
    left = sender.finish(print_line, extra=tuple(n for n in names if (found.path / n).exists()))
    print_line("\n".join(left) or f"{copy.url} has {'all the rest' if unsent else 'everything'}")
    if left:
        return ExitCode.COMMUNICATION
    return ExitCode.TRAINING if unsent else ExitCode.OK


@checkpoint.command
def export(
    run: Run = None,
    /,
    *,
    step: Step = None,
    output: Path | None = None,
    merge_adapter: bool = False,
    push_to_hub: str | None = None,
    output_dir: RunsDir = RUNS,
) -> int:
    """Write the model as a Hugging Face folder that from_pretrained or peft loads.

    Args:
        output: Folder to write on the machine that has the run. If omitted, RUN/model.
        merge_adapter: Merge the adapter into its base model, and write the merged model.
        push_to_hub: Upload the model to this Hugging Face repository (owner/name). isles creates
            a missing repository as private.
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
    output_dir: RunsDir = RUNS,
) -> int:
    """Generate text with a trained model.

    Args:
        prompt: Text to continue. If omitted, the model starts a new text.
        chat: Treat the prompt as a user's message, in the model's chat template.
        max_new_tokens: Largest number of new tokens.
        temperature: 0 picks the most likely token. Higher values vary more.
        top_p: Sample from the most likely tokens whose probabilities add up to this.
        seed: Random seed. The same seed gives the same text.
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
    output_dir: RunsDir = RUNS,
) -> int:
    """Measure loss and perplexity on the validation data.

    Args:
        samples: Number of validation sequences. If omitted, the number in the run file.
    """
    return _worker_verb("eval", run, output_dir, {"step": step, "samples": samples})


def _config_of(run_dir: RunDir) -> RunConfig:
    from isles.run.resolved import read_resolved

    return read_resolved(run_dir).config


def _copy_of(run_dir: RunDir) -> RunStore | None:
    try:
        url = _config_of(run_dir).checkpoint.remote
    except (ConfigError, OSError):
        return None  # of another version, or not begun: its checkpoints can be listed all the same
    if url is None:
        return None
    from isles.run.bucket import RunStore

    return RunStore(url, run_dir.name)


def _needed_copy(run_dir: RunDir) -> RunStore:
    if (copy := _copy_of(run_dir)) is not None:
        return copy
    if owner := run_dir.owner:
        from isles.run.owner import not_own

        raise not_own("ask the bucket that it names", owner, run_dir.resolved)
    raise UserError(
        "its run file names no checkpoint.remote",
        where=str(run_dir.path),
        fix="`isles train run.yaml checkpoint.remote=URL` resumes the run and uploads them",
        id="run.checkpoint",
    )


def _verify_copy(run_dir: RunDir, step: int | None) -> int:
    from tempfile import TemporaryDirectory

    from isles.run.bucket import explain_bucket_errors
    from isles.run.paths import RunDir
    from isles.run.records import explain_write_errors

    copy, code = _needed_copy(run_dir), ExitCode.OK
    with explain_bucket_errors(copy.url), explain_write_errors(run_dir.path):
        steps = [each for each in copy.steps() if step in (None, each)]
        for each in steps:
            with TemporaryDirectory(prefix=".verify-", dir=run_dir.path) as folder:
                faults = copy.bring(each, RunDir(Path(folder)), lambda _: None)
            print_line(f"step {each} at {copy.url}: {'NOT whole' if faults else 'whole'}")
            for line in faults:
                print_line(f"  {line}")
                code = ExitCode.TRAINING
    if not steps:
        print_line(f"{copy.url} has {'no checkpoint' if step is None else f'no step {step}'}")
    return code


def _worker_verb(
    verb: str, run: str | None, output_dir: Path, options: Mapping[str, object]
) -> int:
    from isles.launch.worker import run_verb

    words = ["checkpoint", verb] if verb == "export" else [verb]
    found = _run_here(run, output_dir, words, options)
    return found if isinstance(found, int) else run_verb(verb, found, options)


def _run_here(
    given: str | None,
    output_dir: Path,
    verb: Sequence[str],
    options: Mapping[str, object] | None = None,
) -> RunDir | int:
    """The run that a command names. For a multi-cluster run, the run of the most advanced cluster.

    If the run is on another machine, isles on that machine runs the command. Then this returns
    the exit code.
    """
    from isles.launch.remote.login import pass_on
    from isles.launch.worker import option_words
    from isles.monitor.clusters import furthest
    from isles.run.find import find_any, find_cluster
    from isles.run.remote import MultiClusterRun, RemoteRun

    found = find_any(given, output_dir)
    if isinstance(found, MultiClusterRun):
        cluster = furthest(found)
        if cluster is not None:
            note(f"the checkpoints of cluster {cluster}, which has taken in the most averages")
        found = find_cluster(str(found.path), output_dir, cluster)
    if isinstance(found, RemoteRun):
        return pass_on(found, [*verb, found.path, *option_words(options or {})])
    return found
