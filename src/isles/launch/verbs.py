"""The commands `isles config`, `data`, `render` and `setup`, and the command line of `isles train`.

Imported by every command: the modules of a command are imported when it is called.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter

from isles.config.scratch import scratch_folder
from isles.errors import ConfigError, ConfigErrors, ExitCode, UserError
from isles.launch.groups import START, TOOLS

if TYPE_CHECKING:
    from isles.run.prepared import Prepared

config = App(name="config", help="Show the resolved run file, or its JSON schema.", group=TOOLS)
data = App(name="data", help="Show the data as the model sees it.", group=START)
setup_app = App(
    name="setup", help="Install the same Python environment on every host.", group=START
)


def normalize_overrides(tokens: Sequence[str]) -> list[str]:
    """Write `--training.max-steps 5` as `training.max_steps=5`, the one form of an override."""
    verbs = ("train", "check", "plan", "render", "hub", "rendezvous", "join", "setup")
    groups = (["config", "show"], ["data", "show"], ["data", "prune"])
    if tuple(tokens[:1]) not in [(verb,) for verb in verbs] and list(tokens[:2]) not in groups:
        return list(tokens)
    result: list[str] = []
    rest = list(tokens)
    while rest:
        token = rest.pop(0)
        if token == "--":
            return [*result, token, *rest]
        flag, has_value, value = token.partition("=")
        if not flag.startswith("--") or "." not in flag:
            result.append(token)
            continue
        if not has_value:
            # A flag without a value means true.
            value = rest.pop(0) if rest and not rest[0].startswith("--") else "true"
        result.append(f"{flag[2:].replace('-', '_')}={value}")
    return result


def train_command(run_file: Path, overrides: Sequence[str], resume: str) -> str:
    """The command that resumes a run, from the command that started it. For `--resume CHECKPOINT`
    it names the run, which has newer checkpoints."""
    words = ["isles", "train", str(run_file), *overrides]
    if resume not in ("auto", "no"):
        path = Path(resume)
        is_checkpoint = path.parent.name == "checkpoints"
        words += ["--resume", str(path.parent.parent if is_checkpoint else path)]
    return shlex.join(words)


@config.command(name="show")
def show_config(run_file: Path, /, *overrides: str) -> int:
    """Print every value of the resolved run file, and where it came from.

    Args:
        run_file: The run file.
        overrides: Values that replace those in the file, such as training.max_steps=5.
    """
    from isles.config.clusters import named_cluster
    from isles.config.interop.deepspeed import deepspeed_notes
    from isles.config.load import load_run_file
    from isles.config.show import show
    from isles.launch.base import resolve_here

    loaded = load_run_file(run_file, overrides)
    names = [cluster.name for cluster in loaded.config.clusters]
    for name in names:
        own = named_cluster(loaded, name) if len(names) > 1 else loaded
        head = f"# === cluster {name} ===\n" if len(names) > 1 else ""
        for note in deepspeed_notes(own.config):
            _warn(note)
        sys.stdout.write(head + show(resolve_here(own, _warn, needs_data=False)) + "\n")
    return ExitCode.OK


@config.command
def schema() -> int:
    """Print the JSON schema of run files, for editors."""
    from json import dumps

    from isles.config.show import json_schema

    sys.stdout.write(dumps(json_schema(), indent=2) + "\n")
    return ExitCode.OK


@data.command(name="show")
def show_data(run_file: Path, /, *overrides: str, samples: int = 3) -> int:
    """Print a few samples of each source with the trained tokens marked, and counts.

    The data is prepared as for training, so that a training that follows finds it ready. On a
    terminal the trained tokens are green, elsewhere they are between ⟦ and ⟧.

    Args:
        run_file: The run file.
        overrides: Values that replace those in the file, such as data.seq_length=512.
        samples: How many documents of each source.
    """
    from isles.config.clusters import of_cluster
    from isles.config.load import load_run_file
    from isles.config.resolve import dump_resolved
    from isles.launch.base import resolve_here
    from isles.launch.huggingface import huggingface_issues
    from isles.launch.worker import require_train, run_module
    from isles.run.paths import RunDir

    if samples < 1:
        raise ConfigError(
            f"cannot show {samples} samples",
            where="--samples",
            fix="use a positive number, such as --samples 3",
        )
    # All clusters of a run have the same data.
    loaded = of_cluster(load_run_file(run_file, overrides), 0)
    resolved = resolve_here(loaded, _warn, needs_data=True)
    if all(source.type == "fake" for source in resolved.config.data.sources):
        raise ConfigError(
            "the source is fake, with random token ids and no text to show",
            where=loaded.where("data.sources"),
            fix="set data.sources to real data",
        )
    require_train()
    if issues := huggingface_issues(loaded):
        raise ConfigErrors(issues)
    with scratch_folder("isles-data-") as folder:
        RunDir(folder).resolved.write_text(dump_resolved(resolved), encoding="utf-8")
        return run_module("isles.train.data_show", str(folder), f"--samples={samples}")


def _folders(found: Sequence[Prepared]) -> str:
    from isles.facts.units import format_bytes

    size = format_bytes(sum(each.size_bytes for each in found))
    return f"{len(found)} folder{'s' * (len(found) != 1)} ({size})"


@data.command(name="prune")
def prune_data(
    run_file: Path | None = None,
    /,
    *overrides: str,
    unused_for: str = "30d",
    max_size: str = "",
    yes: bool = False,
) -> int:
    """List prepared tokens that have not been used for a long time; delete them with --yes.

    Tokens that a running process uses stay. If a run needs deleted tokens, it prepares them again.

    Args:
        run_file: A run file with a data.cache_dir. Default: the cache of this user.
        overrides: Values that replace those in the file, such as data.cache_dir=/scratch/tokens.
        unused_for: How long nothing has used them, such as 12h or 90d.
        max_size: Delete more, the longest unused tokens first, until this size is left: 50GB.
        yes: Delete them.
    """
    from isles.config.load import load_run_file
    from isles.facts.units import format_bytes, format_duration, parse_bytes, parse_duration_s
    from isles.run import prepared
    from isles.run.env import cache_home

    where = "--unused-for"
    try:
        unused_s = parse_duration_s(unused_for)
        where = "--max-size"
        max_bytes = parse_bytes(max_size) if max_size else None
    except ValueError as error:
        example = "12h" if where == "--unused-for" else "50GB"
        raise UserError(str(error), where=where, fix=f"for example {where} {example}") from error
    named = load_run_file(run_file, overrides).config.data.cache_dir if run_file else None
    cache = Path(named).expanduser() if named else cache_home() / "data"
    now, found = time.time(), prepared.prepared_in(cache)
    chosen = prepared.doomed(found, unused_s, max_bytes, now)
    gone, lines = [], []
    for each in chosen:
        if not (why := prepared.remove(each.folder) if yes else ""):
            gone.append(each)
        unused = format_duration(max(now - each.used_at, 0))
        line = f"{format_bytes(each.size_bytes):>10}  unused for {unused:>7}  {each.name}"
        lines.append(f"{line}  {each.folder.name}" + (f"  stays: {why}" if why else ""))
    if yes:
        prepared.sweep(cache)
    lines.append(f"{cache}: {_folders(found)} of prepared tokens")
    if kept := [each for each in found if each.kept]:
        reasons = ", ".join(sorted({each.kept for each in kept}))
        lines.append(f"{_folders(kept)} must stay: {reasons}")
    if yes:
        lines.append(f"deleted {_folders(gone)}")
    elif chosen:
        lines.append(f"{_folders(chosen)} would be deleted; add --yes to delete them")
    else:
        lines.append(
            f"nothing has been unused for {unused_for}; `--unused-for 1d` or `--max-size 10GB` "
            "selects more"
        )
    sys.stdout.write("\n".join(lines) + "\n")
    return ExitCode.OK


def render(
    run_file: Path,
    /,
    *overrides: str,
    to: Literal[
        "torchrun", "sbatch", "pbs", "skypilot", "kubernetes", "deepspeed-json", "fsdp-json"
    ],
    output: Annotated[Path | None, Parameter(name=("--output", "-o"))] = None,
    force: bool = False,
) -> int:
    """Convert a run file to a script or settings that run without isles.

    Args:
        run_file: The run file.
        overrides: Values that replace those in the file, such as training.max_steps=5.
        to: A script for torchrun, sbatch or qsub, a task of SkyPilot, objects for
            kubectl, the JSON of DeepSpeed, or the Trainer's fsdp_config.
        output: The file to write. Default: stdout.
        force: Replace an existing file.
    """
    from isles.config.load import load_run_file
    from isles.launch.render import render as rendered_from
    from isles.run.records import write_new

    loaded = load_run_file(run_file, overrides)
    rendered = rendered_from(loaded, to, overrides=overrides, output=output)
    for note in rendered.notes:
        sys.stderr.write(f"note: {note}\n")
    if output is None:
        sys.stdout.write(rendered.text)
        return ExitCode.OK
    write_new(output, rendered.text, force=force)
    if rendered.text.startswith("#!"):
        output.chmod(0o755)
    path = shlex.quote(str(output))
    use = {
        "torchrun": f"start it: bash {path}",
        "sbatch": f"submit it: sbatch {path}",
        "pbs": f"submit it: qsub {path}",
        "deepspeed-json": f"set strategy: {{kind: deepspeed, config_file: {output}}}",
        "fsdp-json": f"use it with TrainingArguments(fsdp=True, fsdp_config={str(output)!r})",
        "skypilot": f"see its first lines for the start command: head {path}",
        "kubernetes": f"start it: kubectl apply -f {path}",
    }[to]
    sys.stderr.write(f"wrote {output}; {use}\n")
    return ExitCode.OK


@setup_app.default
def setup(run_file: Path, /, *overrides: str, check: bool = False) -> int:
    """Install isles and its packages on every host of a run file, in parallel, and compare.

    Args:
        run_file: The run file.
        overrides: Values that replace those in the file.
        check: Install nothing; only compare.
    """
    from isles.config.load import load_run_file
    from isles.launch.remote.setup import setup as set_up

    def print_line(line: str) -> None:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()

    is_equal = set_up(load_run_file(run_file, overrides), check=check, print_line=print_line)
    return ExitCode.OK if is_equal else ExitCode.PREFLIGHT


def _warn(line: str) -> None:
    sys.stderr.write(f"warning: {line}\n")
