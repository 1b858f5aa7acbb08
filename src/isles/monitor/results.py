"""Verbs on the results of a run: checkpoint, generate, eval."""

# As in `isles.cli`, only what parsing needs is imported here.
from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from isles.errors import ExitCode
from isles.monitor.verbs import RUNS, Run, RunsDir, note, print_line

if TYPE_CHECKING:
    from isles.run.paths import RunDir

checkpoint = App(name="checkpoint", help="List, verify and export checkpoints.")

Step = Annotated[int | None, Parameter(help="Checkpoint of this step; left out: the newest.")]
OneStep = Annotated[int | None, Parameter(name="--step", help="Only this one; left out: all.")]


def register(app: App) -> None:
    app.command(checkpoint)
    app.command(generate)
    app.command(evaluate, name="eval")


@checkpoint.command(name="list")
def list_(run: Run = None, /, *, output_dir: RunsDir = RUNS) -> int:
    """List the checkpoints of a run."""
    from isles.monitor.table import checkpoint_lines

    found = _run_here(run, output_dir, ["checkpoint", "list"])
    if isinstance(found, int):
        return found
    print_line("\n".join(checkpoint_lines(found)))
    return ExitCode.OK


@checkpoint.command
def verify(run: Run = None, /, *, step: OneStep = None, output_dir: RunsDir = RUNS) -> int:
    """Read checkpoints back and compare every byte with its recorded hash."""
    from isles.monitor.table import checkpoint_lines
    from isles.run.checkpoints import find_checkpoint, verify_checkpoint

    found = _run_here(run, output_dir, ["checkpoint", "verify"], {"step": step})
    if isinstance(found, int):
        return found
    if step is not None:
        folders = [find_checkpoint(found, step).path]
    else:
        folders = sorted(found.checkpoints.glob("step-*"))
    if not folders:
        print_line("\n".join(checkpoint_lines(found)))
    code = ExitCode.OK
    for folder in folders:
        damage = verify_checkpoint(folder)
        print_line(f"{folder.name}: {'NOT whole' if damage else 'whole'}")
        for line in damage:
            print_line(f"  {line}")
            code = ExitCode.TRAINING
    return code


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
    output_dir: RunsDir = RUNS,
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
    output_dir: RunsDir = RUNS,
) -> int:
    """Measure loss and perplexity on the validation data.

    Args:
        samples: How many validation sequences; left out: as in the run file.
    """
    return _worker_verb("eval", run, output_dir, {"step": step, "samples": samples})


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
    """The run that a verb means; of a multi-cluster run that of the cluster that is furthest.

    Where its directory is on another machine, isles there runs the verb: its exit code.
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
