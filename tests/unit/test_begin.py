"""Beginning a run: new, gone on with, or refused."""

from __future__ import annotations

import errno
import os
import sys
import tempfile
import time
from pathlib import Path

import pytest

from isles.config.load import load_run_file
from isles.config.resolve import Resolved, load_resolved, resolve
from isles.errors import UserError
from isles.monitor.status import collect
from isles.run.begin import begin_run, new_attempt, write_launch
from isles.run.choose import Begun, choose_run, refuse_second
from isles.run.find import find_any, list_runs
from isles.run.paths import Attempt, RunDir
from isles.run.process import ProcessId
from isles.run.records import explain_write_errors, write_record
from tests.deadline import at_once, run_program
from tests.disks import closed
from tests.each import each
from tests.runs import bare_run, running_agent


def resolved_from(run_file: Path, *overrides: str) -> Resolved:
    return resolve(load_run_file(run_file, overrides), num_gpus=0)


def begin(run_file: Path, *overrides: str, resume: str = "auto") -> Begun:
    return begin_run(resolved_from(run_file, *overrides), run_file.read_text(), resume)


def launched(run_dir: RunDir, process: ProcessId) -> Attempt:
    """A start of a run whose agent is this process."""
    attempt = new_attempt(run_dir, typed="isles train run.yaml seed=3")
    write_launch(attempt, process, world_size=1, device="cpu", command=("x",))
    return attempt


def end_attempt(run_dir: RunDir, state: str | None) -> Attempt:
    """One attempt that has ended with this outcome; None: killed, and its pid is another's now."""
    this = ProcessId.of(os.getpid())
    attempt = launched(run_dir, ProcessId(this.host, this.pid, this.started - 100))
    if state:
        write_record(attempt.outcome, {"state": state, "exit_code": 0, "at": time.time()})
    return attempt


def add_checkpoint(run_dir: RunDir, step: int, **more: object) -> Path:
    folder = run_dir.checkpoints / f"step-{step:08d}"
    folder.mkdir(parents=True)
    manifest = {"version": 1, "step": step, "files": {}, "created_at": 1.0, **more}
    write_record(folder / "manifest.json", manifest)
    return folder


def test_a_new_run_has_the_number_after_the_highest(run_file: Path, tmp_path: Path) -> None:
    names: list[str] = []
    at_once(8, lambda: names.append(begin(run_file).run_dir.name))
    assert sorted(names) == [f"tiny-{number}" for number in range(1, 9)]
    end_attempt(RunDir(tmp_path / "runs" / "tiny-8"), "stopped")
    assert begin(run_file, resume="no").run_dir.name == "tiny-9"
    for name in ("tiny-12", "tiny-x", "tiny", "tiny-2-7"):
        (tmp_path / "runs" / name).mkdir()
    assert begin(run_file, resume="no").run_dir.name == "tiny-13"


@each("stopped", "failed", None)
def test_an_unfinished_run_is_gone_on_with(state: str | None, *, run_file, tmp_path):
    folder = f"output_dir={tmp_path}"
    run_dir = begin(run_file, folder).run_dir
    end_attempt(run_dir, state)
    add_checkpoint(run_dir, 8)
    again = begin(run_file, folder, "training.max_time=1h", "checkpoint.keep=1")
    assert (again.resumed, again.run_dir.path) == (True, run_dir.path)
    assert again.resume_from is None
    assert "tiny-1 from step 8" in again.note
    config = load_resolved(again.run_dir.resolved.read_text()).config
    assert config.training.max_time == 3600
    attempt = new_attempt(run_dir, "name: other\n")
    assert (attempt.path / "run.yaml").read_text() == "name: other\n"
    assert run_dir.run_file.read_text() == run_file.read_text(), "the first one stays"


def test_a_finished_run_is_followed_by_a_new_one_unless_it_is_named(run_file: Path) -> None:
    run_dir = begin(run_file).run_dir
    end_attempt(run_dir, "finished")
    checkpoint = add_checkpoint(run_dir, 20)
    assert begin(run_file).note == "tiny-1 is finished. Starting a new run, tiny-2"
    longer = choose_run(resolved_from(run_file, "training.max_steps=30"), "auto")
    assert f"resume tiny-1 with `--resume {run_dir.path}`" in longer.note
    other = choose_run(resolved_from(run_file, "training.max_steps=30", "seed=3"), "auto")
    assert "--resume" not in other.note
    begun = begin(run_file, resume=str(checkpoint))
    assert (begun.resume_from, begun.run_dir.path) == (checkpoint, run_dir.path)
    absent = str(checkpoint.with_name("step-00000009"))
    for given, words in ((absent, "checkpoint not found: step-00000009"), ("nowhere", "no run")):
        with pytest.raises(UserError, match=words):
            begin(run_file, resume=given)


def test_a_node_s_logs_of_another_host_s_run_are_no_run_of_its_own(run_file: Path) -> None:
    # The list of hosts has another order now, or the run file is started on a node by itself.
    run_dir = begin(run_file).run_dir
    end_attempt(run_dir, None)
    write_record(run_dir.node_of, {"first_node": "a1", "born_at": 1.0})
    begun = begin(run_file)
    assert (begun.run_dir.name, begun.resumed) == ("tiny-2", False)
    assert begun.note == "tiny-1 is on a1, its first host. Starting a new run, tiny-2"
    report = collect(run_dir)
    assert report.state == "unknown" and "a1, its first host" in report.hint
    for given in ("tiny-1", str(run_dir.path)):
        with pytest.raises(UserError, match="is on a1") as error:
            begin(run_file, resume=given)
        assert error.value.where == str(run_dir.path) and "put a1 first" in error.value.fix


def test_changed_mathematics_are_refused_with_every_value(run_file: Path) -> None:
    run_dir = begin(run_file).run_dir
    end_attempt(run_dir, "failed")
    early = choose_run(resolved_from(run_file, "seed=3"), "auto")
    assert early.run_dir.name == "tiny-2" and "before its first checkpoint" in early.note
    add_checkpoint(run_dir, 8)
    with pytest.raises(UserError) as caught:
        begin(run_file, "training.learning_rate=0.002", "seed=3")
    text = str(caught.value)
    for words in ("training.learning_rate: 0.001 -> 0.002", "seed: 0 -> 3", "--resume no"):
        assert words in text
    assert f"--resume {run_dir.path}" in text
    # and the path goes on with the new values, naming them
    begun = begin(run_file, "seed=3", resume=str(run_dir.path))
    assert begun.resumed and "seed: 0 -> 3" in begun.note
    assert load_resolved(run_dir.resolved.read_text()).config.seed == 3


CONSTANT = ("training.lr_scheduler_type=constant",)
WSD = ("training.lr_scheduler_type=wsd", "training.decay_steps=4")
EPOCHS = ("training.max_steps=null", "training.num_train_epochs=6")
ONE_HOUR = (*CONSTANT, "training.max_steps=null", "training.max_time=1h")


@each(
    ((), "max_steps=30", "learning rate of step 9: 8.01e-04 -> 9.18e-04"),
    ((), "max_steps=8", "steps left after step 8: 12 -> 0: the run ends there"),
    (CONSTANT, "max_steps=19", "training.max_steps: 20 -> 19"),
    (CONSTANT, "max_steps=21", None),
    (WSD, "max_steps=11", "learning rate of step 9: 1.00e-03 -> 7.50e-04"),
    (EPOCHS, "num_train_epochs=2", "steps left after step 8: 22 -> 2"),
    (ONE_HOUR, "max_time=30m", "time left after step 8: 40m 00s -> 10m 00s"),
    (ONE_HOUR, "max_time=2h", None),
)
def test_another_length_is_asked_for_where_it_matters(before, after, words, *, run_file, tmp_path):
    before, changed = (f"output_dir={tmp_path}", *before), f"training.{after}"
    run_dir = begin(run_file, *before).run_dir
    end_attempt(run_dir, "stopped")
    # Epochs of 60 samples: 5 steps of 12.
    add_checkpoint(run_dir, 8, samples_per_epoch=60, elapsed_s=1200)
    if words is None:
        begun = begin(run_file, *before, changed)
        assert begun.resumed and "tiny-1 from step 8, with these new values" in begun.note
        return
    with pytest.raises(UserError, match="not finished") as caught:
        begin(run_file, *before, changed)
    assert words in caught.value.what and "isles train run.yaml seed=3" in caught.value.fix
    assert begin(run_file, *before).note == "resuming tiny-1 from step 8"
    begun = begin(run_file, *before, changed, resume=str(run_dir.path))
    assert begun.resumed and words in begun.note


def test_a_running_run_is_never_started_twice(run_file: Path) -> None:
    run_dir = begin(run_file).run_dir
    with running_agent(run_dir) as agent:
        for resume in (str(run_dir.path), "auto"):
            with pytest.raises(UserError, match=agent.process.host) as caught:
                begin(run_file, resume=resume)
            with pytest.raises(UserError, match="is running"):
                refuse_second(run_dir.path.parent, "tiny", resume)
        text = str(caught.value)
        assert f"pid {agent.process.pid}" in text and "--resume no" in text
        assert f"isles stop {run_dir.path}" in text, "it is not in ./runs"
        with pytest.raises(UserError, match="is running"):
            new_attempt(run_dir)
        refuse_second(run_dir.path.parent, "tiny", "no")
        assert begin(run_file, resume="no").run_dir.name == "tiny-2"


def test_a_run_on_another_host_counts_while_its_status_is_fresh(run_file: Path) -> None:
    run_dir = begin(run_file).run_dir
    launched(run_dir, ProcessId("elsewhere", 1, 1.0))
    resolved, begun_at = resolved_from(run_file), time.time()
    with pytest.raises(UserError, match="running on elsewhere"):
        choose_run(resolved, "auto", lambda: begun_at + 30)
    write_record(run_dir.status, {"updated_at": begun_at + 500})
    with pytest.raises(UserError, match="running on elsewhere"):
        choose_run(resolved, "auto", lambda: begun_at + 530)
    assert choose_run(resolved, "auto", lambda: begun_at + 600).resumed


def test_of_several_starts_of_one_run_only_one_wins(run_file: Path) -> None:
    run_dir = begin(run_file).run_dir
    end_attempt(run_dir, "stopped")
    won, refused = list[int](), list[str]()

    def start() -> None:
        try:
            won.append(new_attempt(run_dir).number)
        except UserError as error:
            refused.append(error.what)

    at_once(4, start)
    assert won == [2]
    assert len(refused) == 3 and all("is running" in what for what in refused)
    assert {path.name for path in (run_dir.path / "attempts").iterdir()} == {"001", "002"}


def test_an_output_dir_that_cannot_be_used_is_named(run_file: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    for name in ("taken", "taken/deeper"):
        with pytest.raises(UserError, match="a file is in the place of a folder"):
            begin(run_file, f"output_dir={tmp_path / name}")
    with pytest.raises(UserError) as caught:
        begin(run_file, "output_dir=/proc/isles")
    assert "/proc/isles" in caught.value.where and "output_dir" in caught.value.fix
    refused = pytest.raises(UserError, match="cannot write: Read-only file system")
    with refused as caught, explain_write_errors(Path("/proc/runs")):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), "/proc/runs/tiny-1")
    assert "see findmnt -T /proc" in caught.value.fix and caught.value.id == "files.output"


def test_a_limit_of_writing_leaves_no_run_behind(run_file: Path, tmp_path: Path) -> None:
    code = """
import resource, signal, sys
from isles.cli import main
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
sys.exit(main(["train", sys.argv[1]]))
"""
    done = run_program([sys.executable, "-B", "-c", code, run_file])
    assert done.returncode == 1 and "larger than allowed" in done.stderr, done.stderr
    assert list((tmp_path / "runs").iterdir()) == []


def test_the_run_of_another_user_is_left_out() -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:  # not closed, as /tmp of tests is
        Path(name).chmod(0o755)
        theirs, mine = (bare_run(Path(name) / run) for run in ("theirs-1", "mine-1"))
        mine.path.chmod(0o755)
        with closed(theirs.path):
            assert [run.name for run in list_runs(Path(name))] == ["mine-1"]
            assert theirs.attempts() == []


def test_runs_are_found_by_name_path_or_newest(run_file: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    with pytest.raises(UserError, match="no run found in"):
        find_any(None, runs)
    for _ in range(2):
        end_attempt(begin(run_file).run_dir, "finished")
    end_attempt(bare_run(runs / "other-1"), "finished")
    end_attempt(RunDir(runs / "tiny-1"), "finished")
    assert find_any("tiny", runs).name == "tiny-2"
    assert find_any("tiny-1", runs).name == "tiny-1"
    assert find_any(str(runs / "other-1"), Path("nowhere")).name == "other-1"
    assert find_any(None, runs).name == "tiny-1", "the one that was started last"
    assert [run.name for run in list_runs(runs)] == ["tiny-2", "other-1", "tiny-1"]
    for given, words in (
        ("tiny_1", "did you mean tiny-1"),
        ("run.yaml", "is a run file"),
        ("zzz", "tiny-1, other-1, tiny-2"),
    ):
        with pytest.raises(UserError, match=words):
            find_any(given, runs)
