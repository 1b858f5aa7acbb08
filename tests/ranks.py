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
DEADLINE_S = 300.0


def _prepare_child(log: str, environ: dict[str, str]) -> None:
    gc.freeze()
    gc.enable()
    # The fork server has what this process had when it began.
    os.environ.clear()
    os.environ.update(environ)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)


def _call(
    function: Callable[..., Any],
    env: RankEnv,
    args: tuple[Any, ...],
    log: str,
    environ: dict[str, str],
    pipe: Any,
) -> None:
    _prepare_child(log, environ)
    pipe.send(function(env, *args))


def rank_env(rank: int, world_size: int, store: Path) -> RankEnv:
    """The place of a rank on one machine."""
    return RankEnv(
        rank=rank,
        local_rank=rank,
        world_size=world_size,
        local_world_size=world_size,
        attempt=0,
        store=store,
    )


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

    def wait(self, deadline_s: float = DEADLINE_S) -> list[Any]:
        """What each rank returned; fails naming the rank that missed the deadline or died."""
        results = []
        end = time.monotonic() + deadline_s
        for rank, pipe in enumerate(self.pipes):
            try:
                if not pipe.poll(max(0.0, end - time.monotonic())):
                    raise AssertionError(f"rank {rank} is not done after {deadline_s} s")
                results.append(pipe.recv())
            except (EOFError, AssertionError) as error:
                self.kill()
                text = self.log.read_text(errors="replace")[-4000:]
                raise AssertionError(f"rank {rank}: {error!r}\n{text}") from error
        for process in self.processes:
            process.join(DEADLINE_S)
        return results

    def codes(self, deadline_s: float = DEADLINE_S) -> list[int | None]:
        """The exit codes of ranks that end themselves; None of one that did not end in time."""
        end = time.monotonic() + deadline_s
        for process in self.processes:
            process.join(max(0.0, end - time.monotonic()))
        pairs = zip(self.processes, self.pipes, strict=True)
        found = [self._returned(pipe, process.exitcode) for process, pipe in pairs]
        self.kill()
        return found

    @staticmethod
    def _returned(pipe: Any, code: int | None) -> int | None:
        try:
            return int(pipe.recv()) if code == 0 else code
        except EOFError:
            return code

    def wait_or_timeout(self, seconds: float) -> bool:
        """Wait for any rank's end, `seconds` at most; whether one has ended."""
        return bool(connection.wait([process.sentinel for process in self.processes], seconds))

    def until(self, condition: Callable[[], Any]) -> Any:
        """Wait until a record says so; fails where a rank ends first."""
        end = time.monotonic() + DEADLINE_S
        while not (found := condition()):
            if self.wait_or_timeout(0.05) or time.monotonic() > end:
                self.kill()
                raise AssertionError(self.log.read_text(errors="replace")[-4000:])
        return found


def start_ranks(function: Callable[..., Any], world_size: int, *args: Any) -> Gang:
    """Start `function(env, *args)` as so many ranks."""
    folder = Path(tempfile.mkdtemp(prefix="ranks-"))
    log = folder / "log"
    log.touch()
    processes, pipes = [], []
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for rank in range(world_size):
        ours, theirs = _CONTEXT.Pipe(duplex=False)
        env = rank_env(rank, world_size, folder / "store")
        process = _CONTEXT.Process(
            target=_call,
            args=(function, env, args, str(log), dict(os.environ), theirs),
            daemon=True,
        )
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(ours)
    return Gang(processes, pipes, log)


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Run `function(env, *args)` as so many ranks, and give what each returned."""
    return start_ranks(function, world_size, *args).wait()


def _rank(env: RankEnv, run: Path, attempt: int, resume_from: Path | None) -> int:
    from isles.train.worker import run_rank

    run_dir = RunDir(run)
    return run_rank(run_dir, run_dir.attempt(attempt), env, resume_from)


def start_training(
    run_file: Path,
    world_size: int,
    *overrides: str,
    resume: str = "auto",
    rank: Callable[..., Any] = _rank,
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
    codes = gang.wait()
    assert not any(codes), f"{world_size} ranks, {overrides}: {gang.log.read_text()[-3000:]}"
    return run_dir


def refusal(
    run_file: Path,
    world_size: int,
    *overrides: str,
    resume: str = "auto",
    code: ExitCode = ExitCode.USER,
) -> dict[str, Any]:
    """What rank 0 leaves of a start that every rank must refuse."""
    _, attempt, gang = start_training(run_file, world_size, *overrides, resume=resume)
    assert set(gang.wait()) == {code}
    return read_record(attempt.rank_error(0)) or {}
