"""What the benchmarks share: the command line, the last line, missing packages, and bare loops.

Every benchmark imports this before anything that may be missing. It needs the standard library
alone, so that it can name a missing package, be it isles itself.

Chunks of isles' loop and of two bare loops, A and B, take turns in the same processes, so that
whatever else the machine does falls on all of them: isles A B isles B A isles … The part of this
that runs in the ranks is in `ranks.py`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

if TYPE_CHECKING:
    from isles.run.paths import RunDir

T = TypeVar("T")

ROOT = Path(__file__).resolve().parents[1]
_PROJECTS = {"boto3": "moto", "yaml": "pyyaml"}
"""Projects that bring a module of another name."""


# ---- The command line, and its last line. ----


def make_parser(doc: str | None, quick: str = "") -> argparse.ArgumentParser:
    """A parser with `--smoke`, and with `--quick` if there is a help text for it.

    From here on SIGTERM ends the script as Ctrl+C does: with all that it has started.

    Args:
        doc: the benchmark's docstring, whose first line describes it.
        quick: the help text of `--quick`.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--smoke", action="store_true", help="seconds: shows that it runs")
    if quick:
        sizes.add_argument("--quick", action="store_true", help=quick)
    return parser


def pick(options: argparse.Namespace, *, full: T, quick: T, smoke: T) -> T:
    """The value for the size of run that the user asked for."""
    if options.smoke:
        return smoke
    return quick if options.quick else full


def print_figures(figures: Mapping[str, Any], digits: int = 4) -> None:
    """Print the last line, JSON; floats are rounded."""
    print(json.dumps({key: _rounded(value, digits) for key, value in figures.items()}), flush=True)


def _rounded(value: Any, digits: int) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(each, digits) for key, each in value.items()}
    return round(value, digits) if isinstance(value, float) and math.isfinite(value) else value


def need(*modules: str) -> None:
    """Exit with code 1 and one line if a module that only a child process imports is missing."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            _exit_without(module)


def need_root(why: str = "its hosts are network namespaces of this machine") -> None:
    """Exit with code 1 and one line for everyone but root."""
    if os.geteuid() != 0:
        sys.exit(f"{_script()} needs root: {why}")


def _script() -> str:
    return Path(sys.argv[0]).name


def _exit_without(module: str) -> NoReturn:
    sys.exit(_words_without(module))


def _words_without(module: str) -> str:
    name = module.partition(".")[0]
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    project = tomllib.loads(text)["project"]
    extras = {"": project["dependencies"], **project["optional-dependencies"]}
    wanted = _PROJECTS.get(name, name).replace("_", "-")
    found = [extra for extra, needs in extras.items() if wanted in map(_project_of, needs)]
    what = name
    if name == "isles":
        what = "isles[train]"
    elif found:
        what = f"isles[{found[0]}]" if found[0] else "isles"
    return f"{_script()} needs the package {name}, which is not installed: pip install '{what}'"


def _project_of(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower()


def _say_missing(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    if isinstance(error, ModuleNotFoundError) and error.name:
        print(_words_without(error.name), file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


# Set by the import, as benchmarks import other packages next. Python then exits with code 1.
sys.excepthook = _say_missing


# ---- Comparisons with bare loops. ----

SEQ_LENGTH, MICRO_BATCH = 128, 8
PROCESS_DEADLINE_S = 300.0
"""Longer than any process takes, also where other work takes most of the processor."""

RUN_FILE = """\
name: {name}
output_dir: {inputs.folder}/runs
model: {{name_or_path: {inputs.model}, init: scratch}}
tokenizer: {{{inputs.tokenizer}}}
data:
  sources: [{{path: python-docs}}]
  seq_length: {seq_length}
  validation_fraction: 0
  cache_dir: {inputs.folder}/cache
training:
  max_steps: {max_steps}
  global_batch_size: {batch}
  micro_batch_size: {micro_batch}
  learning_rate: 1e-3
  lr_scheduler_type: cosine
  optimizer: adamw
  max_grad_norm: 1.0
  precision: 32-true
  logging_steps: 10
  eval_steps: null
checkpoint: {{every_steps: null, every_minutes: null}}
track: [jsonl, tensorboard]
clusters: [{{gpus_per_node: {world_size}, comm_timeout: 60s}}]
"""

EVEN_ROWS = "balance: even\n"
"""For chunks that are compared: a start that measures the ranks may give them unequal rows."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """What isles and the bare loops train on; `model` and `tokenizer` as in a run file."""

    folder: Path
    model: str
    tokenizer: str
    tokens: Path | None = None

    def run_file(
        self,
        name: str,
        *,
        world_size: int = 1,
        max_steps: int = 1,
        micro_batch: int = MICRO_BATCH,
        more: str = "",
    ) -> Path:
        """A run file for isles; `more` is added to it."""
        path = self.folder / f"{name}.yaml"
        text = RUN_FILE.format(
            name=name,
            inputs=self,
            seq_length=SEQ_LENGTH,
            batch=micro_batch * world_size,
            micro_batch=micro_batch,
            world_size=world_size,
            max_steps=max_steps,
        )
        path.write_text(text + more, encoding="utf-8")
        return path


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured; a round is one chunk of isles and two bare ones."""

    rounds: int
    chunk_steps: int
    warmup_rounds: int = 2

    @property
    def max_steps(self) -> int:
        """Of a run of isles: one step more, at whose beginning the last chunk ends."""
        return (self.warmup_rounds + self.rounds) * self.chunk_steps + 1


@dataclass(frozen=True, slots=True)
class Turns:
    """What was measured in the ranks, as rank 0 saw it."""

    chunks: list[tuple[str, float, float]]
    """Who ran (isles, A or B), the seconds it took, and those of rank 0's CPU, in order."""

    rows: list[dict[str, Any]]
    """What isles recorded of its training steps."""

    losses: list[list[float]]
    """What A and B recorded at the same steps."""

    tokens: list[list[int]]
    """Trained tokens of each chunk of A and B, of loops that count them."""


# ---- What follows starts processes and compares their figures. ----


def environment(**added: str) -> dict[str, str]:
    """For every process here: one thread, the loopback interface, no GPU, compiled modules."""
    fixed = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    # With this set, isles would be compiled at every start, and the packages that bare imports not.
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, **fixed, **added}


def run_processes(
    commands: Sequence[Sequence[str]],
    environments: Sequence[dict[str, str]],
    deadline_s: float = PROCESS_DEADLINE_S,
) -> str:
    """Run processes side by side to their end; returns what the first one printed.

    Raises:
        RuntimeError: one failed, or they were not over in time; all have been ended then.
    """
    end = time.monotonic() + deadline_s
    processes = []
    with tempfile.TemporaryFile("w+") as output:
        try:
            for command, env in zip(commands, environments, strict=True):
                child = subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT)
                processes.append(child)
            codes = [child.wait(max(0.0, end - time.monotonic())) for child in processes]
            problem = f"exit codes {codes}" if any(codes) else ""
        except subprocess.TimeoutExpired:
            problem = f"not over after {deadline_s:.0f} s"
        finally:
            end_processes(processes)
        output.seek(0)
        text = output.read()
    if problem:
        raise RuntimeError(f"{text[-4000:].rstrip()}\n{' '.join(commands[0])}: {problem}")
    return text


def end_processes(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Kill what still runs, with all that it has started."""
    import psutil

    for child in processes:
        if child.poll() is None:
            for descendant in psutil.Process(child.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    descendant.kill()
            child.kill()
            child.wait(PROCESS_DEADLINE_S)


def train_with_isles(run_file: Path) -> RunDir:
    """`isles train`, to its end."""
    from isles.run.paths import RunDir

    train = [sys.executable, "-m", "isles", "train", str(run_file), "--resume", "no"]
    run_processes([train], [environment()])
    runs = (run_file.parent / "runs").glob(f"{run_file.stem}-*")
    return RunDir(max(runs, key=lambda path: int(path.name.rpartition("-")[2])))


def prepare(folder: Path) -> Inputs:
    """Train a tokenizer and prepare the tokens with one short run of isles."""
    fresh = Inputs(folder, model="llama-2m", tokenizer="train_vocab_size: 2048")
    first = train_with_isles(fresh.run_file("prepare"))
    tokens = max((folder / "cache").rglob("tokens.bin"), key=lambda path: path.stat().st_mtime)
    manifest = json.loads(tokens.with_name("manifest.json").read_text(encoding="utf-8"))
    assert manifest["dtype"].endswith(("uint16", "u2")), manifest["dtype"]
    return Inputs(folder, str(first.model), f"name_or_path: {first.tokenizer}", tokens)


def take_turns(
    script: Path,
    run_file: Path,
    world_size: int,
    effort: Effort,
    *arguments: str,
    step_deadline_s: float = 2.0,
) -> Turns:
    """What the ranks of a run measure: each is `script --rank RUN_DIR CHUNK_STEPS ARGUMENTS`."""
    from isles.config.load import load_run_file
    from isles.config.resolve import resolve
    from isles.run.begin import begin_run

    loaded = load_run_file(run_file)
    run_dir = begin_run(resolve(loaded, num_gpus=0), loaded.text, "no").run_dir
    command = [sys.executable, str(script), "--rank", str(run_dir.path), str(effort.chunk_steps)]
    environments = [
        environment(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
        for rank in range(world_size)
    ]
    deadline_s = PROCESS_DEADLINE_S + step_deadline_s * effort.max_steps
    run_processes([[*command, *arguments]] * world_size, environments, deadline_s)
    return Turns(**json.loads((run_dir.path / "turns.json").read_text(encoding="utf-8")))


def ratios_of(chunks: Sequence[tuple[str, float]]) -> tuple[list[float], list[float]]:
    """Ratios of speed: isles over each neighbor, and B over A."""
    isles, noise = [], []
    for (name, seconds), (next_name, next_seconds) in pairwise(chunks):
        if "isles" not in (name, next_name):
            by_name = {name: seconds, next_name: next_seconds}
            noise.append(by_name["A"] / by_name["B"])
        elif name == "isles":
            isles.append(next_seconds / seconds)
        else:
            isles.append(seconds / next_seconds)
    return isles, noise


def print_header() -> None:
    """The names of the table's columns."""
    names = f"{'isles':>10}{'bare':>10}{'ratio':>9}{'min':>9}{'max':>9}{'n':>5}"
    print(f"{'':<36}{names}", flush=True)


def print_row(name: str, isles: float, bare: float, ratios: Sequence[float]) -> float:
    """One line of the table; returns the median ratio."""
    middle = statistics.median(ratios)
    numbers = f"{isles:>10.2f}{bare:>10.2f}{middle:>9.3f}{min(ratios):>9.3f}{max(ratios):>9.3f}"
    print(f"{name:<36}{numbers}{len(ratios):>5}", flush=True)
    return middle


def print_speeds(label: str, turns: Turns, effort: Effort, step_tokens: int) -> tuple[float, float]:
    """Lines of the table; the median ratio of speeds, and that of bare against itself.

    Tokens per second of CPU time say less, as nothing waits in them, but hold up on a busy machine.
    """
    kept = turns.chunks[3 * effort.warmup_rounds :]
    figures, chunk_tokens = [], effort.chunk_steps * step_tokens
    for unit, column in (("s", 1), ("CPU s", 2)):
        chunks = [(chunk[0], float(chunk[column])) for chunk in kept]
        isles, noise = ratios_of(chunks)
        speed = {
            name: chunk_tokens / statistics.median(spent for who, spent in chunks if who == name)
            for name in ("isles", "A", "B")
        }
        ratio = print_row(f"{label}, tokens/{unit}", speed["isles"], speed["A"], isles)
        floor = print_row(f"{label}, bare B against A", speed["B"], speed["A"], noise)
        figures.append((ratio, floor))
    return figures[0]
