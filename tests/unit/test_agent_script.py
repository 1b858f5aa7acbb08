"""A user's own script: what it reports, how it ends, when it is taken for stuck, its stacks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import isles
from isles.agent.hang import keep_hang_files, new_hang_files
from isles.agent.script.run import failed_record
from isles.agent.script.stacks import RUNNER, Answer, open_file, read_stacks
from isles.agent.script.watch import ScriptWatch, Signs, overdue, script_hang
from isles.config.sections.training import WatchdogConfig
from isles.errors import UserError
from isles.launch.worker import run_verb
from isles.monitor.follow import row_text
from isles.monitor.table import checkpoint_lines
from isles.run.live import ask_for_stacks
from isles.run.paths import Attempt, RunDir
from isles.run.records import read_record, read_rows, write_record
from isles.run.restarts import read_last_step
from tests.deadline import DEADLINE_S, until
from tests.each import each
from tests.ranks import rank_env
from tests.runs import bare_run
from tests.unit.test_begin import begin, end_attempt

CONFIG = WatchdogConfig(min_time=60.0, slow_factor=10.0, max_silence=1800.0)
STEPS = Signs(steps=100.0, any=100.0, num_steps=50, longest_s=40.0, last=50)

TRACEBACK = """\
sum 6
Traceback (most recent call last):
  File "/shared/mine.py", line 14, in <module>
    raise RuntimeError("no such shard")
RuntimeError: no such shard
terminate called after throwing an instance of 'std::system_error'
"""


def test_rank_0_reports_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"ISLES_RUN_DIR": str(tmp_path), "ISLES_ATTEMPT": "2", "RANK": "0"}
    for name, value in {**environ, "TORCHELASTIC_RESTART_COUNT": "1"}.items():
        monkeypatch.setenv(name, value)
    run_dir = RunDir(tmp_path)
    run_dir.attempt(2).path.mkdir(parents=True)
    run_dir.metrics.symlink_to("/dev/full")
    isles.report(1, loss=1.0)  # a full disk does not end the script
    run_dir.metrics.unlink()
    isles.report(1)
    isles.report(3, total_steps=3, tokens_per_second=9, loss=float("nan"), own=torch.tensor(2.5))
    monkeypatch.setenv("RANK", "1")
    isles.report(4, loss=1.0)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("ISLES_RUN_DIR")  # not started by isles
    isles.report(4, loss=1.0)
    first, last = read_rows(run_dir.metrics)
    assert row_text(first, {}) == "step 1  loss -"
    assert (last["kind"], last["step"], last["loss"], last["own"]) == ("train", 3, None, 2.5)
    status = read_record(run_dir.status) or {}
    assert (status["step"], status["total_steps"], status["loss"]) == (3, 3, None)
    assert status["tokens_per_second"] == 9
    assert read_last_step(run_dir.attempt(2), 1) == 3


def test_a_script_is_spoken_of_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("name: own\ntraining: {script: mine.py}\n")

    def note(*overrides: str) -> str:
        begun = begin(Path("run.yaml"), *overrides)
        end_attempt(begun.run_dir, "stopped")
        return begun.note

    note()
    assert note() == "going on with own-1: its script is started again"
    other = "ended with other values; this is a new run: own-2 (`--resume runs/own-1` goes on with"
    assert other in note("training.script_args=[a]")
    (line,) = checkpoint_lines(RunDir(Path("runs/own-1")))
    assert line == "own-1 runs mine.py, a script of your own, which keeps checkpoints by itself"
    with pytest.raises(UserError, match="isles does not know its model"):
        run_verb("generate", RunDir(Path("runs/own-1")), {})


def script_error(folder: Path, code: int, log: str) -> dict[str, Any]:
    attempt = Attempt(folder, 1)
    attempt.rank_log(0).write_text(log)
    env = rank_env(0, 1, folder / "store")
    return failed_record(attempt, env, Path("/shared/mine.py"), code, log_start=0, took_s=5.0)


@each(
    (1, TRACEBACK, "mine.py failed: RuntimeError: no such shard"),
    # torch takes the process down with it, as Python ends.
    (-signal.SIGABRT, TRACEBACK, "mine.py failed: RuntimeError: no such shard"),
    (-signal.SIGABRT, "sum 6\nterminate called\n", "rank 0 was killed by SIGABRT"),
    (-signal.SIGKILL, TRACEBACK, "rank 0 was killed by SIGKILL"),
    (-40, "sum 6\n", "rank 0 was killed by signal 40"),  # one for real time
    (3, "sum 6\n", "mine.py ended with exit code 3"),
)
def test_the_error_is_the_one_that_the_script_has_raised(code, log, what, *, tmp_path):
    error, is_raised = script_error(tmp_path, code, log), "failed" in what
    assert error["what"] == what
    assert error["will_recur"] == (code > 0 or is_raised)
    assert ("mine.py:14" in error["where"]) == is_raised
    assert error["traceback"].startswith("Traceback" if is_raised else log.splitlines()[0])


def test_the_errors_that_an_error_came_from_are_shown(tmp_path: Path) -> None:
    cause = "\nDuring handling of the above exception, another exception occurred:\n\n"
    one = TRACEBACK.partition("terminate")[0]
    trace = script_error(tmp_path, 1, one + "trying again\n" + one + cause + one)["traceback"]
    assert trace.startswith("Traceback") and trace.count("Traceback") == 2


@each(
    (STEPS, 499.0, None, ""),
    (
        STEPS,
        501.0,
        None,
        "no step was reported for 6m 41s since step 50 (longest time between steps before: 40s",
    ),
    (STEPS, 501.0, 50, ""),  # it may export what it has trained
    (Signs(100.0, 100.0, num_steps=2, longest_s=0.1, last=2), 1000.0, None, ""),  # too few
    (Signs(0.0, 100.0), 1899.0, None, ""),
    (Signs(0.0, 100.0), 1901.0, None, "no rank has printed or reported anything for 30m"),
)
def test_a_script_is_stuck_when_no_step_comes_or_nothing_at_all(signs, now_s, total_steps, why):
    found = overdue(signs, CONFIG, now_s, total_steps)
    assert found.startswith(why) and bool(found) == bool(why)


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
    script = Watched(tmp_path, max_silence=10.0)
    script.look(1.0, printed=1)
    assert not script.watch.question
    script.look(12.0, printed=1)
    assert script.watch.question == 1
    # It prints while it is asked, and then hangs elsewhere: that is reported as well.
    script.look(13.0, printed=2, at="at my.py:1 f()")
    assert not script.watch.question
    script.look(14.0, printed=2)
    script.look(25.0, printed=2)
    script.look(26.0, printed=2, at="at my.py:2 f()")
    notes = (read_record(script.run_dir.status) or {})["notes"]
    assert (
        "at my.py:1 f()" in notes[0] and "continued after" in notes[1] and "at my.py:2" in notes[2]
    )
    assert "my.py:2 f()" in (script.attempt.hangs / "silence-2-rank-0.txt").read_text()
    script.look(60.0, printed=2)
    assert not script.watch.question, "a hang is reported once"


def test_a_watcher_gets_the_stacks_and_nobody_else_hears_of_it(tmp_path: Path) -> None:
    script = Watched(tmp_path)
    asked = ask_for_stacks(script.attempt)
    script.look(1.0, printed=1)
    assert script.look(2.0, printed=1, at="at my.py:1 f()") is None
    answer = read_record(script.attempt.stacks) or {}
    own = answer["ranks"]["0"]
    assert (answer["asked_at"], own["host"], own["at"]) == (asked, "here", "at my.py:1 f()")
    assert not script.attempt.hangs.exists()
    assert "notes" not in (read_record(script.run_dir.status) or {})
    script.look(3.0, printed=1)
    assert not script.watch.question, "one answer for each request"


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


SCRIPT = """\
KNOWN = [*globals(), "KNOWN", "pickle", "sys", "threading", "Thing", "hang"]
import pickle, sys, threading

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


def ask(pid: int, file: int) -> Answer:
    return read_stacks({0: (pid, file)})[0]


def test_stacks_are_had_from_outside_and_the_script_notices_nothing(tmp_path: Path) -> None:
    file, path = open_file(), tmp_path / "my.py"
    path.write_text(SCRIPT)
    command = [sys.executable, "-u", str(RUNNER), str(file), str(path), "--x", "1"]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    child: Any = subprocess.Popen(command, pass_fds=[file], **pipes)
    assert child.stdout.readline() == b"ready\n", child.communicate()
    until(lambda: "hang()" in ask(child.pid, file)["at"], "it is past its print")
    answer = ask(child.pid, file)
    assert answer["at"].endswith("my.py:8 hang()"), answer
    assert answer["stacks"].count("hread 0x") == 2 and not answer["frozen"]
    os.kill(child.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
    assert "frozen" in ask(child.pid, file)["frozen"]
    os.kill(child.pid, signal.SIGCONT)
    _, errors = child.communicate(b"x", timeout=DEADLINE_S)
    text = errors.decode()
    assert child.returncode == 1 and text.endswith("ValueError: odd\n")
    assert "script/main.py" not in text and f'File "{path}", line 18' in text
    os.close(file)

    # A process that would not survive the question is not asked.
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    answer = ask(child.pid, 0)
    assert answer["stacks"] == "" and "no stacks" in answer["at"]
    child.communicate(b"\n", timeout=DEADLINE_S)
    assert child.returncode == 0
    # Who has ended is not the one that is waited for.
    ended = ask(child.pid, 0)
    hang = script_hang({0: ended, 1: {**ended, "at": "at my.py:8 hang()"}}, ["a", "b"], 3)
    assert hang.root_causes == (1,) and "my.py:8" in hang.text
