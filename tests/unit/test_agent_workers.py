"""Ranks as processes of a fork server: how each of them ends is seen, and none is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path

import psutil

from isles.agent.workers import RankProcesses
from isles.errors import ExitCode
from isles.run.live import Tell
from tests.deadline import DEADLINE_S, until
from tests.runs import nothing_left


def be_deaf(mark: Path) -> int:
    """A rank that does not hear SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    mark.touch()
    signal.pause()
    raise AssertionError


def test_a_rank_that_does_not_end_is_killed(tmp_path: Path) -> None:
    forkserver.set_forkserver_preload([])
    mark = tmp_path / "deaf"
    ranks = RankProcesses("tests.unit.test_agent_workers:be_deaf", {0: ({}, (mark,))})
    until(mark.exists)
    ranks.end(signal.SIGTERM, 0.2)
    assert ranks.look() == ({}, {0: -9}), "the number of its signal"


def talk(mark: Path, tell: Tell) -> int:
    """A rank that tells more than anybody has read, and something that is too long."""
    tell({"step": -1, "text": "x" * 5_000})
    for step in range(5_000):
        tell({"step": step, "text": "x" * 500})
    mark.touch()
    return int(ExitCode.REQUEUE)


def test_a_rank_tells_where_it_is_and_never_waits_for_the_agent(tmp_path: Path) -> None:
    forkserver.set_forkserver_preload([])
    mark = tmp_path / "done"
    ranks = RankProcesses("tests.unit.test_agent_workers:talk", {3: ({}, (mark,))}, hears=True)
    try:
        until(mark.exists)
        assert ranks.seen[3]["alive"] and "step" not in ranks.seen[3], "nobody has read yet"
        until(lambda: ranks.look() == ({3: 85}, {}))
        seen = ranks.seen[3]
        assert (seen["alive"], seen["exit"]) == (False, 85) and seen["pid"] and seen["at"]
        assert 10 < seen["step"] < 4_999, "the last that had room"
    finally:
        ranks.end(signal.SIGKILL, DEADLINE_S)


class Held:
    """An argument that holds a new rank back, before anything of isles runs there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Callable[[Path], int], tuple[Path]]:
        return hold, (self.folder,)


def hold(folder: Path) -> int:
    (folder / "forked").write_text(str(os.getpid()))
    return len((folder / "go").read_text())


def touch(path: Path, _: object) -> int:
    path.touch()
    return 0


AGENT = """
import multiprocessing, signal, sys
from pathlib import Path
from isles.agent.workers import RankProcesses
from tests.unit.test_agent_workers import Held
multiprocessing.set_forkserver_preload(["isles.train.preload"])
folder = Path(sys.argv[1])
args = (folder / "ran", Held(folder))
ranks = RankProcesses("tests.unit.test_agent_workers:touch", {0: ({}, args)})
signal.pause()
"""


def test_a_rank_that_is_forked_as_the_agent_dies_ends_too(tmp_path: Path) -> None:
    """The kernel ends the fork server with one thread of the agent; others may still hold open what
    the rank could know it by."""
    os.mkfifo(tmp_path / "go")
    with nothing_left(tmp_path):
        environ = os.environ | {"FOLDER": str(tmp_path)}  # by which all of them are found
        agent = subprocess.Popen([sys.executable, "-c", AGENT, str(tmp_path)], env=environ)
        forked = tmp_path / "forked"
        until(lambda: forked.exists() and forked.read_text() != "")
        rank = psutil.Process(int(forked.read_text()))
        server = rank.parent()
        server.kill()
        until(lambda: server.status() == psutil.STATUS_ZOMBIE)  # its parent, the agent, lives on
        (tmp_path / "go").write_text("go")
        assert psutil.wait_procs([rank], timeout=DEADLINE_S)[1] == []
        agent.kill()
        agent.wait(DEADLINE_S)
    assert not (tmp_path / "ran").exists()
