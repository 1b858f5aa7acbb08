"""A user's own script that hangs: when it is taken for stuck, and what its stacks tell."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from isles.agent.hang import ASKED, PRINTED, HangFiles, HangReports
from isles.agent.script.watch import ScriptStacks, ScriptWatch, Signs, overdue, script_hang
from isles.config.sections.training import WatchdogConfig
from isles.run.paths import RunDir
from isles.run.records import read_record, write_record
from tests.deadline import DEADLINE_S
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


def begin_script(folder: Path, stacks: ScriptStacks) -> subprocess.Popen[bytes]:
    path = folder / "my.py"
    known = "KNOWN = [*globals(), 'KNOWN', 'pickle', 'sys', 'threading', 'get_context', 'Thing', "
    path.write_text(f"{known}'hang']\n{SCRIPT}")
    return subprocess.Popen(
        stacks.command(str(path), ["--x", "1"]),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=[stacks.fd, stacks.gate],
    )


def test_a_script_does_not_begin_where_its_starter_is_gone(tmp_path: Path) -> None:
    """Killed between the start of the script and of the guard over what the script starts."""
    stacks = ScriptStacks()
    child = begin_script(tmp_path, stacks)
    stacks.close()
    out, errors = child.communicate(timeout=DEADLINE_S)
    assert (child.returncode, out, errors) == (1, b"", b"")


def test_stacks_are_had_from_outside_and_the_script_notices_nothing(tmp_path: Path) -> None:
    stacks = ScriptStacks()
    child = begin_script(tmp_path, stacks)
    stacks.open_gate()
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n", child.communicate()
    deadline = time.monotonic() + DEADLINE_S
    while "hang()" not in stacks.ask(child.pid)["at"]:  # it may still be at its print
        assert time.monotonic() < deadline
    for _ in range(2):
        answer = stacks.ask(child.pid)
        assert answer["at"].endswith("my.py:9 hang()"), answer
        assert answer["stacks"].count("hread 0x") == 2 and not answer["frozen"]
    os.kill(child.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
    assert "frozen" in stacks.ask(child.pid)["frozen"]
    os.kill(child.pid, signal.SIGCONT)
    _, errors = child.communicate(b"x", timeout=DEADLINE_S)
    text = errors.decode()
    assert child.returncode == 1 and text.endswith("ValueError: odd\n")
    assert "script/main.py" not in text and f'File "{tmp_path}/my.py", line 19' in text
    stacks.close()


def test_a_process_that_would_not_survive_the_question_is_not_asked() -> None:
    stacks = ScriptStacks()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    answer = stacks.ask(child.pid)
    assert answer["stacks"] == "" and "gives no stacks" in answer["at"]
    child.communicate(b"\n", timeout=DEADLINE_S)
    assert child.returncode == 0
    stacks.close()


def test_hosts_without_a_common_disk_carry_questions_and_stacks(tmp_path: Path) -> None:
    there, here = (RunDir(tmp_path / name / "x-1").attempt(1) for name in ("head", "far"))
    for attempt in (there, here):
        attempt.path.mkdir(parents=True)
    head = HangFiles(RunDir(tmp_path / "head" / "x-1"), there)
    far = HangReports(here)
    far.is_script = True
    there.hangs.mkdir()
    write_record(there.hangs / ASKED, {"number": 7})
    head.look({}, 100.0)
    far.ask(head.asked)
    assert (read_record(here.hangs / ASKED) or {})["number"] == 7
    far.ask(6)
    assert (read_record(here.hangs / ASKED) or {})["number"] == 7, "an order that is late"
    write_record(here.hangs / "rank-1.json", {"number": 7})
    write_record(here.hangs / "step-3.json", {"text": "step 3 has taken long"})
    (here.hangs / "evil.sh").write_text("no")
    here.rank_log(1).write_text("hello")
    head.look({1: far.report((1,))}, 200.0)
    names = {path.name for path in there.hangs.iterdir()}
    assert names == {ASKED, "rank-1.json", "step-3.json"}
    assert (there.path / PRINTED).exists(), "that a rank there has printed is a sign of life"
    status = read_record(RunDir(tmp_path / "head" / "x-1").status) or {}
    assert "step 3 has taken long" in status["notes"][0]


def test_on_the_head_no_report_undoes_what_its_ranks_have_written(tmp_path: Path) -> None:
    attempt = RunDir(tmp_path / "x-1").attempt(1)
    attempt.hangs.mkdir(parents=True)
    write_record(attempt.nodes, {"nodes": []})  # only the head has it
    decision = attempt.hangs / "step-3.json"
    write_record(decision, {"text": "step 3 has taken long", "went_on_after_s": None})
    report = HangReports(attempt).report((0,))
    write_record(decision, {"text": "step 3 has taken long", "went_on_after_s": 9.0})
    HangFiles(RunDir(tmp_path / "x-1"), attempt).look({0: report}, 100.0)
    assert (read_record(decision) or {})["went_on_after_s"] == 9.0


def test_a_last_word_while_the_ranks_are_asked_is_seen(tmp_path: Path) -> None:
    """The script prints, while it is asked, and then hangs elsewhere: that is told as well."""
    run_dir = bare_run(tmp_path / "t-1")
    attempt = run_dir.attempt(1)
    attempt.path.mkdir(parents=True)
    log = attempt.rank_log(0)
    log.write_text("importing\n")

    class Stacks(ScriptStacks):
        asked = 0

        def ask(self, pid: int) -> dict[str, str]:
            self.asked += 1
            if self.asked == 1:
                log.write_text("importing\nsum 6\n")
            at = f"at my.py:{self.asked} f()"
            return {"at": at, "waits_in": "", "stacks": "", "frozen": ""}

    config = CONFIG.model_copy(update={"max_silence": 1.0})
    notes: list[str] = []
    env = rank_env(0, 1, tmp_path / "store")
    watch = ScriptWatch(run_dir, attempt, env, config, os.getpid(), Stacks(), notes.append)
    try:
        second = attempt.hangs / "silence-2-rank-0.txt"
        deadline = time.monotonic() + DEADLINE_S
        while not second.exists():
            assert time.monotonic() < deadline, notes
            time.sleep(0.05)
    finally:
        watch.close()
    assert "at my.py:2 f()" in second.read_text()
    assert "went on" in notes[1], notes
