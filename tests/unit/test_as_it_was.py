"""What a test leaves behind in its process is named, and fails that test."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from tests.as_it_was import State, changes


def test_each_change_of_the_process_is_named(tmp_path: Path) -> None:
    def set_handler() -> Callable[[], object]:
        before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return lambda: signal.signal(signal.SIGTERM, before)

    def block() -> Callable[[], object]:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
        return lambda: signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def set_variable() -> Callable[[], object]:
        os.environ["OF_A_TEST"] = "secret"
        return lambda: os.environ.pop("OF_A_TEST")

    def move() -> Callable[[], object]:
        before = Path.cwd()
        os.chdir(tmp_path)
        return lambda: os.chdir(before)

    def set_umask() -> Callable[[], object]:
        before = os.umask(0o027)
        return lambda: os.umask(before)

    def add_path() -> Callable[[], object]:
        sys.path.append(str(tmp_path))
        return sys.path.pop

    def open_file() -> Callable[[], object]:
        stream = (tmp_path / "left open").open("w")
        return stream.close

    wrong = []
    for change, words in (
        (set_handler, "handler of signal 15"),
        (block, "blocked signals"),
        (set_variable, "variable OF_A_TEST of the environment"),
        (move, "working folder"),
        (set_umask, "umask: 0o"),
        (add_path, "sys.path"),
        (open_file, "left open"),
    ):
        before = State.now()
        undo = change()
        found = changes(before)
        undo()
        if len(found) != 1 or words not in found[0] or "secret" in found[0] or changes(before):
            wrong.append((words, found, changes(before)))
    assert wrong == []


def test_a_thread_of_ours_must_end_and_one_of_a_library_may_stay() -> None:
    go = threading.Event()

    def ours() -> None:
        go.wait()

    def theirs() -> None:
        go.wait()

    theirs.__module__ = "fsspec.asyn"
    threads = [threading.Thread(target=target) for target in (ours, theirs)]
    before = State.now()
    for thread in threads:
        thread.start()
    (line,) = changes(before, end_s=0.01)
    go.set()
    for thread in threads:
        thread.join()
    assert "ours runs on" in line and changes(before) == []
