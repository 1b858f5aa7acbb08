"""Real processes for tests: ranks forked from a server that has imported torch once."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from isles.config.load import load_run_file
from isles.config.resolve import resolve
from isles.errors import ExitCode
from isles.run.begin import begin_run, new_attempt
from isles.run.env import RankEnv
from isles.run.paths import Attempt, RunDir
from isles.run.records import read_record
from tests.deadline import DEADLINE_S

_CONTEXT = multiprocessing.get_context("forkserver")
# What every rank would import for itself, a second or more each time.
_CONTEXT.set_forkserver_preload(
    [
        "tests.no_gc",
        "isles.train.worker",
        "transformers.models.llama.modeling_llama",
        "torch.distributed.checkpoint._fsspec_filesystem",
        "torch.distributed.checkpoint.state_dict",
        "isles.strategies.fsdp",
        "matplotlib.backends.backend_agg",
        "matplotlib.figure",
        "deepspeed",
        "peft",
        "tests.ranks",
    ]
)


def _call(
    function: Callable[..., Any],
    env: RankEnv,
    args: tuple[Any, ...],
    log: Path,
    environ: dict[str, str],
    pipe: Any,
) -> None:
    gc.freeze()
    gc.enable()
    # The fork server has what this process had when it began.
    os.environ.clear()
    os.environ.update(environ, GLOO_SOCKET_IFNAME="lo")
    handle = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    pipe.send(function(env, *args))


def rank_env(rank: int, world_size: int, store: Path) -> RankEnv:
    """The place of a rank on one machine."""
    sizes = {"world_size": world_size, "local_world_size": world_size}
    return RankEnv(rank=rank, local_rank=rank, attempt=0, store=store, **sizes)


@dataclass
class Gang:
    """Some ranks that run now."""

    processes: Sequence[BaseProcess]
    pipes: Sequence[Any]
    log: Path

    def kill(self) -> None:
        """SIGKILL to every rank, and wait until the kernel has taken them."""
        self.signal(signal.SIGKILL)
        for process in self.processes:
            process.join(DEADLINE_S)

    def signal(self, number: int) -> None:
        """A signal to every rank that lives."""
        for process in self.processes:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, number)

    def said(self) -> str:
        """The end of what the ranks have written."""
        return self.log.read_text(errors="replace")[-4000:]

    def wait(self) -> list[Any]:
        """What each rank returned; fails naming the rank that missed the deadline or died."""
        results = []
        end = time.monotonic() + DEADLINE_S
        for rank, pipe in enumerate(self.pipes):
            try:
                assert pipe.poll(max(0.0, end - time.monotonic())), "not done in time"
                results.append(pipe.recv())
            except (EOFError, AssertionError) as error:
                self.kill()
                raise AssertionError(f"rank {rank}: {error!r}\n{self.said()}") from error
        for process in self.processes:
            process.join(DEADLINE_S)
        return results

    def code(self, rank: int) -> int | None:
        """What a rank returns, or how its process ends; None: not in time."""
        self.processes[rank].join(DEADLINE_S)
        code = self.processes[rank].exitcode
        return int(self.pipes[rank].recv()) if code == 0 else code

    def wait_or_timeout(self, seconds: float) -> bool:
        """Wait for any rank's end, `seconds` at most; whether one has ended."""
        return bool(connection.wait([process.sentinel for process in self.processes], seconds))

    def until(self, condition: Callable[[], Any], every_s: float = 0.01) -> Any:
        """Wait until a record says so; fails where a rank ends first."""
        return until(condition, "", self, every_s=every_s)


def until(condition: Callable[[], Any], what: str, *gangs: Gang, every_s: float = 0.01) -> Any:
    """Look again and again, for as long as a deadline, and as all of these ranks live."""
    end = time.monotonic() + DEADLINE_S
    sentinels = [process.sentinel for gang in gangs for process in gang.processes]
    while not (found := condition()):
        has_ended = bool(connection.wait(sentinels, every_s))
        if (has_ended and not condition()) or time.monotonic() > end:
            for gang in gangs:
                gang.kill()
            raise AssertionError("\n\n".join([what, *(gang.said() for gang in gangs)]))
    return found


def start_ranks(function: Callable[..., Any], world_size: int, *args: Any) -> Gang:
    """Start `function(env, *args)` as so many ranks."""
    folder = Path(tempfile.mkdtemp(prefix="ranks-"))
    log = folder / "log"
    log.touch()
    processes, pipes = [], []
    for rank in range(world_size):
        ours, theirs = _CONTEXT.Pipe(duplex=False)
        env = rank_env(rank, world_size, folder / "store")
        given = (function, env, args, log, dict(os.environ), theirs)
        process = _CONTEXT.Process(target=_call, args=given, daemon=True)
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(ours)
    return Gang(processes, pipes, log)


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Run `function(env, *args)` as so many ranks, and give what each returned."""
    return start_ranks(function, world_size, *args).wait()


def one_rank(env: RankEnv, run: Path, attempt: int, resume_from: Path | None) -> int:
    """A rank of training, as it is started by `start_training`."""
    from isles.train.worker import run_rank

    run_dir = RunDir(run)
    return run_rank(run_dir, run_dir.attempt(attempt), env, resume_from)


def start_training(
    run_file: Path,
    world_size: int,
    *overrides: str,
    resume: str = "auto",
    rank: Callable[..., Any] = one_rank,
) -> tuple[RunDir, Attempt, Gang]:
    """Begin or resume a run as the launcher does, and start its ranks, as `rank` if it is given."""
    loaded = load_run_file(run_file, overrides)
    resolved = resolve(loaded, num_gpus=0, world_size=world_size)
    begun = begin_run(resolved, loaded.text, resume)
    attempt = new_attempt(begun.run_dir, loaded.text)
    # The claim names this process, which goes on living when the ranks are killed.
    attempt.launch.unlink()
    arguments = (begun.run_dir.path, attempt.number, begun.resume_from)
    gang = start_ranks(rank, world_size, *arguments)
    return begun.run_dir, attempt, gang


def train_to_end(
    run_file: Path, world_size: int, *overrides: str, resume: str = "auto"
) -> tuple[RunDir, int]:
    """Train; the run directory and the largest exit code of its ranks."""
    run_dir, _, gang = start_training(run_file, world_size, *overrides, resume=resume)
    return run_dir, max(gang.wait())


def train(run_file: Path, world_size: int, *overrides: str, resume: str = "auto") -> RunDir:
    """Train to the end, which every rank must reach."""
    run_dir, _, gang = start_training(run_file, world_size, *overrides, resume=resume)
    assert not any(gang.wait()), f"{world_size} ranks, {overrides}: {gang.said()}"
    return run_dir


def refusal(
    run_file: Path, world_size: int, *overrides: str, code: ExitCode = ExitCode.USER, **how: Any
) -> dict[str, Any]:
    """What rank 0 leaves of a start that every rank must refuse."""
    _, attempt, gang = start_training(run_file, world_size, *overrides, **how)
    assert set(gang.wait()) == {code}
    return read_record(attempt.rank_error(0)) or {}
