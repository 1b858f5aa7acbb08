"""What users stumbled over: words, fixes and figures that were wrong in small places."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from isles.cli import main
from isles.config.files import data_issues
from isles.config.resolve import dump_resolved, resolve
from isles.errors import ExitCode
from isles.facts.gpus import GPUS, find_gpu, named_gpu
from isles.launch.queue.job import QueueJob
from isles.launch.queue.slurm import Slurm
from isles.launch.remote import install
from isles.launch.ssh.shell import python_failure
from isles.monitor.hub import resting_state
from isles.monitor.live.cells import plain_lines
from isles.monitor.live.health import check_lines, wait_until_healthy
from isles.monitor.live.model import Head, Snapshot
from isles.monitor.live.snapshot import RunReader
from isles.monitor.live.waits import Step, Waits
from isles.monitor.outcome import failure_lines
from isles.monitor.status import collect, next_start
from isles.monitor.table import report_lines
from isles.outer.client.http import HubRefusal
from isles.outer.hub.rules import FINISHED, FINISHED_FIX, FINISHED_WHAT
from isles.run.join_line import ENDED, apart
from isles.run.outcome import error_record
from isles.run.process import ProcessId
from isles.run.records import write_record
from isles.run.restarts import record_restart
from tests.programs import write_program
from tests.run_files import load
from tests.run_records import recorded_run

RUN = """\
name: small
model: {name_or_path: llama-2m, init: scratch}
tokenizer: {train_vocab_size: 300}
data: {sources: [{path: a.txt}]}
training: {max_steps: 4}
"""


def test_the_command_that_goes_on_names_the_run_if_it_is_not_the_newest(tmp_path: Path) -> None:
    launch = {"typed": "isles train run.yaml"}
    older, _ = recorded_run(tmp_path / "llama-1", launch, {"state": "stopped"})
    newer, _ = recorded_run(tmp_path / "llama-2", launch, {"state": "stopped"})
    other, _ = recorded_run(tmp_path / "llama-x-1", launch, {"state": "stopped"})
    assert f"`isles train run.yaml --resume {older.path}`" in next_start(older)
    assert f"--resume {older.path}" in collect(older).hint
    for run_dir in (newer, other):
        assert "--resume" not in next_start(run_dir)


def test_no_command_goes_on_where_nothing_is_left_to_train(tmp_path: Path, capsys: Any) -> None:
    """Neither after the refusal of a hub or bucket, nor after that of the loop."""
    refusal = HubRefusal(FINISHED, FINISHED_WHAT, where="outer", fix=FINISHED_FIX)
    late = HubRefusal("late", "the outer step is decided", where="outer")
    for number, (error, is_over) in enumerate({refusal: True, late: False}.items()):
        record = error_record(error.what, id=error.id, kind="x", code=1, fix=error.fix)
        outcome = {"state": "failed", "exit_code": 1, "error": record}
        run_dir, attempt = recorded_run(tmp_path / f"a{number}-1", {"typed": "isles x"}, outcome)
        text = "\n".join(failure_lines(attempt, [next_start(run_dir)]))
        assert ("`isles x` resumes" in text) == (not is_over)
        assert ("no step of the run left to train" in collect(run_dir).hint) == is_over
    assert main(["explain", refusal.id]) == ExitCode.OK
    assert "finished this run" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("output", "fix"),
    [
        ("bash: line 3: /home/me/venv/bin/activate: No such file or directory", "isles setup"),
        ("/x/job.sh: line 12: module: command not found", "environment.modules"),
        ("bash: module: not found", "environment.modules"),
        ("ERROR: Unable to locate a modulefile for 'cuda/99'", "module avail"),
        (
            'Lmod has detected the following error: The following module(s) are unknown: "x"',
            "avail",
        ),
        ("bash: line 1: conda: command not found", "environment.conda"),
        ("EnvironmentNameNotFound: Could not find conda environment: x", "conda env list"),
    ],
)
def test_an_environment_that_is_not_there_has_its_fix(
    tmp_path: Path, output: str, fix: str
) -> None:
    """The same over ssh, in a check, and in a job that never began a rank."""
    failure = python_failure("a1", "python", 1, f"noise\n{output}\n")
    assert failure is not None and fix in failure.fix and output[:40] in failure.what
    run_dir, attempt = recorded_run(tmp_path / "a-1", {"launcher": "slurm", "world_size": 2})
    job = QueueJob(run_dir, attempt, "7", Slurm(None))
    job.queue.output(attempt, "7").write_text(f"{output}\n")
    report = SimpleNamespace(reason="its script ended with exit code 1", fix="", at=time.time())
    report.word = "FAILED"
    job.write_outcome(report)  # type: ignore[arg-type]
    shown = "\n".join(failure_lines(attempt))
    assert output[:40] in shown and fix in shown
    assert "isles explain python.runs" in shown
    assert "stopped because of it" not in shown, "no rank has run"


def test_a_job_that_failed_for_another_reason_is_not_a_python_that_does_not_run(
    tmp_path: Path,
) -> None:
    run_dir, attempt = recorded_run(tmp_path / "a-1", {"launcher": "slurm"})
    job = QueueJob(run_dir, attempt, "7", Slurm(None))
    job.queue.output(attempt, "7").write_text("slurmstepd: error: Detected 1 oom_kill event\n")
    report = SimpleNamespace(reason="out of memory", fix="", at=time.time(), word="OUT_OF_MEMORY")
    job.write_outcome(report)  # type: ignore[arg-type]
    shown = "\n".join(failure_lines(attempt))
    assert "oom_kill" in shown and "python.runs" not in shown


def test_a_script_that_is_not_on_the_host_may_be_copied(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    text = "name: own\ntraining: {script: train_mlp.py}\n"
    ssh = "clusters=[{launcher: {kind: ssh, hosts: [a1]}, workdir: /x}]"
    (issue,) = data_issues(load(tmp_path, text, ssh))
    assert "clusters.0.sync" in issue.fix
    (issue,) = data_issues(load(tmp_path, text))
    assert "sync" not in issue.fix


def test_laptop_cards_are_known_by_their_names() -> None:
    for number, gib in (("4070", 8), ("4060", 8), ("4050", 6), ("5070 Ti", 12), ("3060", 6)):
        gpu = find_gpu(f"NVIDIA GeForce RTX {number} Laptop GPU")
        assert gpu is not None and gpu.memory_bytes == gib << 30
        short = number.lower().replace(" ", "")
        for word in (f"{short}-laptop", f"{short}m", f"RTX {number} Laptop GPU"):
            assert named_gpu(word) == gpu
    desktop = find_gpu("NVIDIA GeForce RTX 4070")
    assert desktop is not None and desktop.memory_bytes == 12 << 30
    assert len({gpu.name for gpu in GPUS}) == len(GPUS)


def test_an_unknown_card_is_answered_with_memory(tmp_path: Path, capsys: Any) -> None:
    load(tmp_path, RUN)
    assert main(["plan", str(tmp_path / "run.yaml"), "--gpus", "4070x"]) == ExitCode.USER
    assert "4070 (12 GB)" in capsys.readouterr().err


def test_a_price_is_not_dropped_in_silence(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    load(tmp_path, RUN.replace("max_steps: 4", "num_train_epochs: 1"))
    main(["plan", "run.yaml", "--gpus", "4090", "--price", "0.30/kWh"])
    assert "no price: the number of steps" in capsys.readouterr().out


def test_a_wait_is_told_beside_its_own_step() -> None:
    waits = Waits()
    slow = {0: Step(1.8, 2.0), 1: Step(0.05, 2.0)}
    for _ in range(12):
        waits.look(slow)
        slow = {0: Step(slow[0].communication_s + 1e-6, 2.0), 1: slow[1]}
    found = waits.look({0: Step(0.3, 0.65), 1: Step(0.02, 0.65)})
    for rank, waited_s in found.items():
        assert waited_s <= waits.step_s[rank]


def test_a_run_in_the_queue_is_not_well() -> None:
    shown = Snapshot(version="", at=0.0, run=Head(name="a", state="queued", reason="Priority"))
    (line,) = check_lines(shown)
    assert line.state == "not yet" and "queued: Priority" in line.text


def test_the_same_trouble_with_other_figures_is_said_once_in_a_while() -> None:
    figures, said, now = iter(range(1000)), list[str](), [0.0]
    shown = Snapshot(version="", at=0.0, run=Head(name="a", state="running"))

    def look() -> Snapshot:
        now[0] += 1.0
        return shown

    def lines(_: Snapshot) -> list[Any]:
        text = f"rank 1 is behind: {next(figures)}.5 s"
        return [SimpleNamespace(state="wrong", id="ranks", text=text)]

    wait_until_healthy(look, lines, 20.0, said.append, clock=lambda: now[0])
    assert len(said) == 2


def test_a_planned_restart_is_no_trouble(tmp_path: Path) -> None:
    me = ProcessId.of(os.getpid()).record()
    status = {"step": 3, "phase": "training", "updated_at": time.time()}
    run_dir, attempt = recorded_run(tmp_path / "a-1", me, status=status)
    record_restart(run_dir, attempt, 1, "b has come", max_restarts=3, is_planned=True)
    shown = RunReader(run_dir).look()
    assert shown.run.restarts == 1 and "b has come" in shown.run.last_restart
    assert not any("b has come" in note for note in shown.notes)
    record_restart(run_dir, attempt, 2, "c is gone", max_restarts=3)
    assert any("c is gone" in note for note in RunReader(run_dir).look().notes)


def test_a_finished_run_is_said_to_be_so_once(tmp_path: Path) -> None:
    run = Head(name="a", state="finished", phase="finished")
    text = "\n".join(plain_lines(Snapshot(version="", at=0.0, run=run)))
    assert "finished: finished" not in text and "finished" in text


def test_runs_are_compared_by_what_differs(tmp_path: Path) -> None:
    def values(name: str, *overrides: str) -> dict[str, str]:
        run_dir, _ = recorded_run(tmp_path / name, {}, status={"eval_loss": 3.25})
        resolved = resolve(load(tmp_path, RUN, *overrides), num_gpus=0)
        run_dir.resolved.write_text(dump_resolved(resolved))
        run = RunReader(run_dir).look().run
        assert run.eval_loss == 3.25
        return run.values

    one, other = values("a-1"), values("a-2", "training.max_steps=5")
    assert one["training.max_steps"] == "4"
    assert dict(other.items() - one.items()) == {"training.max_steps": "5"}
    assert one.keys() == other.keys()


def test_certificates_are_cut_where_they_differ() -> None:
    one, other = "ab" * 32, "ab" * 20 + "ff" * 12
    first, second = apart(one, other)
    assert first != second and len(first) < 20
    assert apart("a" * 64, "b" * 64) == ("a" * 16 + "…", "b" * 16 + "…")


def test_how_a_hub_has_ended(tmp_path: Path) -> None:
    gone = {**ProcessId.of(os.getpid()).record(), "pid": 2**22 - 7}
    write_record(tmp_path / "process.json", gone)
    assert resting_state(tmp_path) == "killed"
    write_record(tmp_path / ENDED, {"state": "finished"})
    assert resting_state(tmp_path) == "finished"
    (tmp_path / ENDED).unlink()
    write_record(tmp_path / "process.json", {**gone, "host": "elsewhere"})
    assert resting_state(tmp_path) == "unknown"


def test_a_hub_that_does_not_run_is_listed(tmp_path: Path, capsys: Any) -> None:
    hub = tmp_path / "t-hub-1"
    hub.mkdir()
    (hub / "settings.json").write_text("{}")
    write_record(
        hub / "process.json", {"host": os.uname().nodename, "pid": 2**22 - 7, "started": 1}
    )
    assert main(["status", "--output-dir", str(tmp_path)]) == ExitCode.OK
    assert "the hub t-hub-1 is killed" in capsys.readouterr().out


def test_pip_without_a_network_is_said_to_be_so(tmp_path: Path, monkeypatch: Any) -> None:
    noise = "WARNING: Retrying … NewConnectionError('…: Temporary failure in name resolution')\n"
    noise += "ERROR: Could not find a version that satisfies the requirement torch"
    done = SimpleNamespace(returncode=1, stderr=noise)
    monkeypatch.setattr(install, "_run", lambda _: done)
    asked = {
        "wheel_name": "w.whl",
        "wheel": "",
        "constraints": [],
        "extras": [],
        "requirements": [],
    }
    assert "cannot reach the package index" in install._install(asked, tmp_path)
    done.stderr = "ERROR: No matching distribution"
    assert "index" not in install._install(asked, tmp_path)


def test_slurm_holds_a_job_that_was_queued_again(tmp_path: Path) -> None:
    answer = (
        "JobId=7 JobState=PENDING Reason=BeginTime Requeue=1 Restarts=1 StartTime=Unknown NodeList="
    )
    write_program(tmp_path / "scontrol", f'case "$1" in show) echo "{answer}";; esac')
    run_dir, attempt = recorded_run(tmp_path / "a-1", {"launcher": "slurm"})
    job = QueueJob(run_dir, attempt, "7", Slurm(str(tmp_path)))
    report = job.look()
    assert report.state == "requeued" and "two minutes" in report.reason
    assert "asked Slurm to start it now" in job.queue.hasten(report)


def test_a_node_that_is_lost_is_not_last_seen_too(tmp_path: Path) -> None:
    run_dir, attempt = recorded_run(tmp_path / "a-1", {"launcher": "ssh"}, status={"step": 1})
    now = time.time()
    nodes = [
        {"node": 0, "name": "a", "first_rank": 0, "ranks": 1, "state": "there"},
        {"node": 1, "name": "b", "first_rank": 1, "ranks": 1, "state": "lost", "why": "not heard"},
    ]
    nodes = [{**node, "last_seen_at": now - 9.0} for node in nodes]
    write_record(attempt.nodes, {"at": now, "launcher": "ssh", "nodes": nodes})
    text = "\n".join(report_lines(collect(run_dir)))
    assert "is lost: not heard" in text and text.count("last seen") == 1


def test_the_dry_run_of_two_clusters_shows_their_threads(
    tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("some text\n" * 50)
    outer = "outer: {kind: diloco, sync_every: 2}\n"
    load(tmp_path, f"{RUN}{outer}clusters: [{{device: cpu}}]\n")
    assert main(["train", "run.yaml", "--dry-run"]) == ExitCode.OK
    assert "average alone" in capsys.readouterr().out
    load(tmp_path, f"{RUN}{outer}clusters: [{{name: a, device: cpu}}, {{name: b, device: cpu}}]\n")
    assert main(["train", "run.yaml", "--dry-run"]) == ExitCode.OK
    assert capsys.readouterr().out.count("OMP_NUM_THREADS=") == 2
