"""A user's own script: what is made of its end, when it is taken for stuck, and its stacks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from isles.agent.hang import keep_hang_files, new_hang_files
from isles.agent.script.run import failed_record
from isles.agent.script.stacks import RUNNER, Answer, open_file, read_stacks
from isles.agent.script.watch import ScriptWatch, Signs, overdue, script_hang
from isles.config.sections.training import WatchdogConfig
from isles.errors import ExitCode
from isles.run.paths import Attempt, RunDir
from isles.run.records import read_record, write_record
from tests.deadline import DEADLINE_S
from tests.each import each
from tests.ranks import rank_env
from tests.runs import bare_run

CONFIG = WatchdogConfig(min_time=60.0, slow_factor=10.0, max_silence=1800.0)

SCRIPT = """\
import pickle, sys, threading
from multiprocessing import get_context

class Thing:
    pass

def hang(reader):
    reader.read(1)

if __name__ == "__main__":
    assert sys.argv[1:] == ["--x", "1"], sys.argv
    assert sys.path[0] == __file__.rpartition("/")[0], sys.path
    assert set(globals()) == set(KNOWN), sorted(globals())
    assert type(pickle.loads(pickle.dumps(Thing()))) is Thing
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    print("ready", flush=True)
    hang(sys.stdin)
    raise ValueError("odd")
"""

TRACEBACK = """\
sum 6
Traceback (most recent call last):
  File "/shared/mine.py", line 14, in <module>
    raise RuntimeError("no such shard")
RuntimeError: no such shard
terminate called after throwing an instance of 'std::system_error'
"""


def script_error(folder: Path, code: int, log: str) -> dict[str, Any]:
    attempt = Attempt(folder, 1)
    attempt.rank_log(0).write_text(log)
    env = rank_env(0, 1, folder / "store")
    return failed_record(attempt, env, Path("/shared/mine.py"), code, log_start=0, took_s=5.0)


@each(
    ("code", "log", "what"),
    [
        (1, TRACEBACK, "mine.py failed: RuntimeError: no such shard"),
        # torch takes the process down with it, as Python ends.
        (-signal.SIGABRT, TRACEBACK, "mine.py failed: RuntimeError: no such shard"),
        (-signal.SIGABRT, "sum 6\nterminate called\n", "rank 0 was killed by SIGABRT"),
        (-signal.SIGKILL, TRACEBACK, "rank 0 was killed by SIGKILL"),
        (3, "sum 6\n", "mine.py ended with exit code 3"),
    ],
)
def test_the_error_is_the_one_that_the_script_has_raised(
    tmp_path: Path, code: int, log: str, what: str
) -> None:
    error = script_error(tmp_path, code, log)
    assert error["what"] == what
    assert error["will_recur"] == (code > 0 or "failed" in what)
    assert ("mine.py:14" in error["where"]) == ("failed" in what)
    first = error["traceback"].splitlines()[0]
    assert first == (TRACEBACK if "failed" in what else log).splitlines()["failed" in what]


def test_the_errors_that_an_error_came_from_are_shown(tmp_path: Path) -> None:
    cause = "\nDuring handling of the above exception, another exception occurred:\n\n"
    one = TRACEBACK.partition("terminate")[0]
    trace = script_error(tmp_path, 1, one + "trying again\n" + one + cause + one)["traceback"]
    assert trace.startswith("Traceback") and trace.count("Traceback") == 2


def test_a_script_that_reports_steps_is_stuck_when_they_stop_coming() -> None:
    signs = Signs(steps=100.0, any=100.0, num_steps=50, longest_s=40.0, last=50)
    assert not overdue(signs, CONFIG, 499.0, None)
    said = overdue(signs, CONFIG, 501.0, None)
    assert said == "no step was reported for 6m 41s since step 50 (40s between two at most before)"
    assert not overdue(signs, CONFIG, 501.0, total_steps=50), "it may export what it has trained"
    few = Signs(steps=100.0, any=100.0, num_steps=2, longest_s=0.1, last=2)
    assert not overdue(few, CONFIG, 1000.0, None), "too few to know what is usual"


def test_a_script_that_reports_nothing_is_stuck_when_no_rank_prints() -> None:
    signs = Signs(steps=0.0, any=100.0)
    assert not overdue(signs, CONFIG, 1899.0, None)
    assert "no rank has printed or reported anything for 30m" in overdue(
        signs, CONFIG, 1901.0, None
    )
    never = CONFIG.model_copy(update={"max_silence": None})
    assert not overdue(signs, never, 1e6, None)


def test_who_is_frozen_or_does_not_answer_comes_first() -> None:
    waits = {"at": "at x.py:1 f()", "waits_in": "all_reduce", "stacks": "", "frozen": ""}
    busy = {**waits, "waits_in": "", "at": "at my.py:9 read()"}
    hosts = ["a", "b", "c"]
    assert script_hang({0: waits, 1: waits}, hosts, 5).root_causes == (2,)
    assert "rank 2 on c does not answer" in script_hang({0: waits, 1: waits}, hosts, 5).text
    frozen = script_hang({0: busy, 1: waits, 2: {**busy, "frozen": "it is frozen"}}, hosts, 5)
    assert frozen.root_causes == (2,)
    behind = script_hang({0: waits, 1: busy, 2: waits}, hosts, 5)
    assert behind.text == "rank 1 on b is behind: running, at my.py:9 read()"


def ask(pid: int, file: int) -> Answer:
    return read_stacks({0: (pid, file)})[0]


def test_stacks_are_had_from_outside_and_the_script_notices_nothing(tmp_path: Path) -> None:
    file, path = open_file(), tmp_path / "my.py"
    known = "KNOWN = [*globals(), 'KNOWN', 'pickle', 'sys', 'threading', 'get_context', 'Thing', "
    path.write_text(f"{known}'hang']\n{SCRIPT}")
    child = subprocess.Popen(
        [sys.executable, "-u", str(RUNNER), str(file), str(path), "--x", "1"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=[file],
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n", child.communicate()
    deadline = time.monotonic() + DEADLINE_S
    while "hang()" not in ask(child.pid, file)["at"]:  # it may still be at its print
        assert time.monotonic() < deadline
    for _ in range(2):
        answer = ask(child.pid, file)
        assert answer["at"].endswith("my.py:9 hang()"), answer
        assert answer["stacks"].count("hread 0x") == 2 and not answer["frozen"]
    os.kill(child.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
    assert "frozen" in ask(child.pid, file)["frozen"]
    os.kill(child.pid, signal.SIGCONT)
    _, errors = child.communicate(b"x", timeout=DEADLINE_S)
    text = errors.decode()
    assert child.returncode == 1 and text.endswith("ValueError: odd\n")
    assert "script/main.py" not in text and f'File "{tmp_path}/my.py", line 19' in text
    os.close(file)


def test_a_process_that_would_not_survive_the_question_is_not_asked(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    answer = ask(child.pid, 0)
    assert answer["stacks"] == "" and "gives no stacks" in answer["at"]
    child.communicate(b"\n", timeout=DEADLINE_S)
    assert child.returncode == 0


class Watched:
    """A script of one rank whose agent is played by the test."""

    def __init__(self, folder: Path, **config: Any) -> None:
        self.run_dir = bare_run(folder / "t-1")
        self.attempt = self.run_dir.attempt(1)
        self.attempt.path.mkdir(parents=True)
        updated = CONFIG.model_copy(update=config)
        self.watch = ScriptWatch(self.run_dir, self.attempt, "my.py", updated)
        self.watch.begin(0, ["here"], 0.0)

    def look(self, now_s: float, printed: int, at: str | None = None) -> Any:
        """The coordinator looks; `at`: the answer to its question."""
        report: dict[str, Any] = {"printed": printed}
        if at is not None:
            answer = {"at": at, "waits_in": "", "stacks": "stack", "frozen": ""}
            report["stacks"] = {"number": self.watch.question, "ranks": {"0": answer}}
        return self.watch.look({0: report}, now_s)


def test_a_last_word_while_the_ranks_are_asked_is_seen(tmp_path: Path) -> None:
    """The script prints, while it is asked, and then hangs elsewhere: that is told as well."""
    script = Watched(tmp_path, max_silence=10.0)
    script.look(1.0, printed=1)
    assert not script.watch.question
    script.look(12.0, printed=1)
    assert script.watch.question == 1
    script.look(13.0, printed=2, at="at my.py:1 f()")
    assert not script.watch.question
    script.look(14.0, printed=2)
    script.look(25.0, printed=2)
    script.look(26.0, printed=2, at="at my.py:2 f()")
    notes = (read_record(script.run_dir.status) or {})["notes"]
    assert "at my.py:1 f()" in notes[0] and "went on" in notes[1] and "at my.py:2" in notes[2]
    assert "my.py:2 f()" in (script.attempt.hangs / "silence-2-rank-0.txt").read_text()
    script.look(60.0, printed=2)
    assert not script.watch.question, "a hang is reported once"


def test_stacks_can_be_had_by_hand_and_a_hang_may_end_the_script(tmp_path: Path) -> None:
    script = Watched(tmp_path, max_silence=10.0, action="stop")
    script.look(1.0, printed=1)
    (script.attempt.path / "stacks").touch()
    script.look(2.0, printed=1)
    assert script.look(3.0, printed=1, at="at my.py:1 f()") is None
    assert (script.attempt.hangs / "asked-1-rank-0.txt").exists()
    script.look(12.0, printed=1)
    assert script.look(20.0, printed=1) is None, "the rank has some seconds to answer"
    error = script.look(33.0, printed=1)
    assert "rank 0 on here does not answer" in error["what"]
    assert (error["exit_code"], error["id"]) == (ExitCode.COMMUNICATION, "script.silent")


def test_hosts_without_a_common_disk_report_their_stacks(tmp_path: Path) -> None:
    first, far = (RunDir(tmp_path / name / "x-1") for name in ("first", "far"))
    here, there = first.attempt(1), far.attempt(1)
    there.hangs.mkdir(parents=True)
    here.path.mkdir(parents=True)
    write_record(there.hangs / "step-7.json", {"text": "rank 1 is behind"})
    (there.hangs / "step-7-rank-1.txt").write_text("stacks")
    (there.hangs / "other.txt").write_text("no stacks")
    files = new_hang_files(there)
    for _ in range(2):
        keep_hang_files(first, here, [{"hangs": {**files, "../step-7.txt": "evil"}}])
    assert sorted(path.name for path in here.hangs.iterdir()) == sorted(files)
    assert (here.hangs / "step-7-rank-1.txt").read_text() == "stacks"
    (note,) = (read_record(first.status) or {})["notes"]
    assert note.startswith("rank 1 is behind; stacks of the ranks")
    there.nodes.touch()
    assert new_hang_files(there) == {}, "the coordinator sees this folder"
