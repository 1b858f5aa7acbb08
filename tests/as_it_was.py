"""What a test must leave as it was: the settings of the process that runs all tests of a worker.

`State.now()` is taken before and after each test, in 0.05 ms; `changes` names the differences.
"""

from __future__ import annotations

import _signal
import gc
import os
import resource
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SIGNALS = sorted(signal.valid_signals())
_LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
_BY_PYTEST = ("PYTEST_CURRENT_TEST",)
_BY_LIBRARIES = (
    "KMP_DUPLICATE_LIB_OK",  # datasets, as it makes a torch dataset
    "PYTORCH_NVML_BASED_CUDA_CHECK",  # DeepSpeed and accelerate, as they look for GPUs
    "TORCHINDUCTOR_CACHE_DIR",  # torch.compile
)
"""What libraries put into the environment as they are used, and would be inherited by what later
tests start: it is taken out again."""
_END_S = 60.0
"""What a test has told to end may take so long on a busy machine."""
_EVENT_LOOP_OF_FSSPEC = "fsspecIO", "asyncio_"
"""fsspec's own threads, by how their names begin: they run code of the standard library."""


@dataclass(frozen=True, slots=True)
class State:
    """The settings of this process, its threads and its open files."""

    settings: Mapping[str, Any]
    handlers: Mapping[int, Any]
    environ: Mapping[str, str]
    threads: frozenset[threading.Thread]
    files: frozenset[str]

    @classmethod
    def now(cls) -> State:
        """The state of this process. Main thread only."""
        return cls(
            dict(_settings()),
            # Not `signal.getsignal`, which takes 25 times as long.
            {number: _signal.getsignal(number) for number in _SIGNALS},
            os.environ.copy(),
            frozenset(threading.enumerate()),
            _open_files(),
        )


def changes(before: State, end_s: float = _END_S) -> list[str]:
    """A line for each difference; `end_s`: for how long threads are waited for."""
    for name in _BY_LIBRARIES:
        if name not in before.environ:
            os.environ.pop(name, None)
    after = State.now()
    found = [
        f"{name}: {value} before, {after.settings.get(name)} after"
        for name, value in before.settings.items()
        if after.settings.get(name, value) != value
    ]
    for number, handler in before.handlers.items():
        if (now := after.handlers[number]) != handler:
            found.append(f"handler of signal {number}: {handler} before, {now} after")
    # Not the values, which may be secrets.
    names = (before.environ.keys() | after.environ.keys()) - set(_BY_PYTEST)
    wrong = sorted(n for n in names if before.environ.get(n) != after.environ.get(n))
    found += [f"variable {name} of the environment" for name in wrong]
    for thread in after.threads - before.threads:
        if not _is_of_a_library(thread):
            thread.join(end_s)
            if thread.is_alive():
                found.append(f"thread {thread.name} of {_code_of(thread)} runs on")
    if _left_open(after.files - before.files):
        gc.collect()
        found += _left_open(after.files - before.files)
    return found


def _open_files() -> frozenset[str]:
    numbers = os.listdir("/proc/self/fd")  # noqa: PTH208  # a tenth of the time
    own = os.dup(2)  # the first free number, which listdir has had
    os.close(own)
    return frozenset(numbers) - {str(own)}


def _settings() -> Iterator[tuple[str, Any]]:
    yield "blocked signals", signal.pthread_sigmask(signal.SIG_BLOCK, ())
    wakeup = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup)
    yield "signal.set_wakeup_fd", wakeup
    with suppress(FileNotFoundError):
        yield "working folder", os.getcwd()  # noqa: PTH109
    umask = os.umask(0o077)
    os.umask(umask)
    yield "umask", oct(umask)
    yield "limits of setrlimit", [resource.getrlimit(number) for number in _LIMITS]
    yield "sys.path", [*sys.path]
    yield "recursion limit", sys.getrecursionlimit()
    yield "socket.getdefaulttimeout", socket.getdefaulttimeout()
    yield "gc.isenabled", gc.isenabled()
    if torch := sys.modules.get("torch"):
        with suppress(AttributeError):  # another thread is importing it
            yield "process group of torch", torch.distributed.is_initialized()
            yield "dtype of torch", torch.get_default_dtype()
            yield "threads of torch", torch.get_num_threads()
            yield "deterministic algorithms", torch.are_deterministic_algorithms_enabled()
            yield "gradients", torch.is_grad_enabled()
            yield "float32 matmul precision", torch.get_float32_matmul_precision()


def _is_of_a_library(thread: threading.Thread) -> bool:
    """Whether a library has started it for itself: fsspec its event loop, tqdm its monitor.

    A library starts such a thread once, for the rest of the process. Threads of ours, and those
    that run code of the standard library for somebody (servers, executors), must end.
    """
    if thread.name.startswith(_EVENT_LOOP_OF_FSSPEC):
        return True
    package = _code_of(thread).partition(".")[0]
    return package not in ("isles", "tests", "__main__") and package not in sys.stdlib_module_names


def _code_of(thread: threading.Thread) -> str:
    # Of a subclass with a `run` of its own there is no target.
    target = getattr(thread, "_target", None)
    target = getattr(target, "func", target)  # functools.partial
    owner = target if hasattr(target, "__module__") else type(thread)
    return f"{owner.__module__}.{getattr(owner, '__qualname__', owner)}"


def _left_open(numbers: frozenset[str]) -> list[str]:
    # Only files in the folder for temporary files: libraries keep others, such as /dev/urandom. A
    # file without a name leaves nothing, and goes with the object that a fixture still returns.
    found = []
    for number in numbers:
        with suppress(OSError):
            path = str(Path(f"/proc/self/fd/{number}").readlink())
            is_named = not path.endswith(" (deleted)")
            if is_named and path.startswith(f"{tempfile.gettempdir()}/"):
                found.append(f"open file {path}")
    return found
