"""What status, logs, stop, checkpoint and follow print, word for word: tests/golden/monitor-*.txt.

The records are written by hand. `ssh` is a program that runs its last argument on this machine.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from isles.cli import main
from isles.run.records import write_record
from isles.run.remote import ClusterRun, MultiClusterRun, RemoteRun, write_remote
from tests.golden import check_golden
from tests.programs import write_ssh
from tests.run_records import FAR, GONE, rank_error, recorded_run, two_hosts
from tests.runs import bare_run
from tests.unit.test_begin import add_checkpoint


def finished(path: Path) -> None:
    launch = {**GONE, "world_size": 2, "device": "cuda"}
    steps = {"step": 60, "total_steps": 60, "loss": 3.25, "eval_loss": 3.5}
    run_dir, attempt = recorded_run(path, launch, {"state": "finished", "step": 60}, status=steps)
    summary = {"first_loss": 7.6, "last_loss": 3.25, "steps": 60, "elapsed_s": 65.0}
    write_record(run_dir.summary, {**summary, "tokens": 1e6, "tokens_per_second": 15e3})
    add_checkpoint(run_dir, 60)
    run_dir.model.mkdir()
    attempt.agent_log.write_text("ranks are started\n")
    for rank in range(2):
        attempt.rank_log(rank).write_text(f"one of {rank}\ntwo of {rank}\nthe end of {rank}")


def of_a_chat_model(path: Path) -> None:
    finished(path)
    (path / "tokenizer").mkdir()
    (path / "tokenizer" / "chat_template.jinja").write_text("{{ messages }}")


def failed(path: Path) -> None:
    launch = {**FAR, "world_size": 2, "device": "cuda"}
    end = {"state": "failed", "exit_code": 4, "reason": "rank 1 failed", "step": 7}
    steps = {"step": 7, "total_steps": 60}
    _, attempt = recorded_run(path, launch, end, status=steps)
    rank_error(attempt, 1, "the GPU is full", id="memory", where="batch 5", fix="a smaller batch")
    attempt.rank_log(1).write_text("x\n")


def killed(path: Path) -> None:
    _, attempt = recorded_run(path, {**GONE, "world_size": 1, "device": "cpu"})
    attempt.agent_log.write_text("agent is ready\n")


def on_two_hosts(path: Path) -> None:
    status = {"phase": "training", "step": 30, "total_steps": 60, "loss": 4.5, "eta_s": 65.0}
    status |= {"tokens_per_second": 5e3}
    launch = {**FAR, "launcher": "ssh", "world_size": 3, "device": "cuda"}
    _, attempt = recorded_run(path, launch, status=status)
    two_hosts(attempt, "ssh", "me@down")
    node = {"address": "10.0.0.1", "ranks": 2, "host": "far", "pid": 5, "started": 1.0, "why": ""}
    there = {**node, "node": 0, "name": "h0", "first_rank": 0, "state": "there"}
    lost = {**node, "node": 1, "name": "h1", "first_rank": 2, "ranks": 1, "state": "lost"}
    lost |= {"address": "10.0.0.2", "why": "silent"}
    write_record(attempt.nodes, {"nodes": [{**there, "last_seen_at": time.time()}, lost]})
    found = [{"level": "warning", "text": "slow link", "where": "h1"}]
    write_record(attempt.findings, {"findings": found})
    attempt.hangs.mkdir()
    for step, went_on_after_s in ((120, 75.0), (130, None)):
        held_up = {"step": step, "text": "rank 2 is behind", "went_on_after_s": went_on_after_s}
        write_record(attempt.hangs / f"step-{step}.json", held_up)
    write_record(attempt.hangs / "step-130-rank-2.nccl.json", {"text": "no record of a step"})
    attempt.agent_log.write_text("the supervisor\n")


def on_hosts_that_have_not_come(path: Path) -> None:
    launch = {**FAR, "launcher": "manual", "world_size": 3, "device": "cuda"}
    _, attempt = recorded_run(path, launch, status={"phase": "starting"}, began_s_ago=0.0)
    two_hosts(attempt, "manual")


def in_a_queue(path: Path) -> None:
    launch = {"launcher": "slurm", "job_id": "4711", "bin_path": "/nowhere"}
    _, attempt = recorded_run(path, {**launch, "world_size": 8, "device": "cuda"})
    job = {"state": "pending", "reason": "waiting for free nodes", "job_id": "4711"}
    write_record(attempt.job, {**job, "at": time.time() - 60})


def of_clusters(folder: Path) -> None:
    outer: dict[str, Any] = {"outer_step": 7, "sent_bytes": 2048, "received_bytes": 4096}
    outer |= {"exposed_s": 30.0, "hidden_s": 90.0, "hidden_share": 0.75}
    outer |= {"last_outer_step": {"outer_step": 7, "digest": "d", "weights": {"a": 300, "b": 100}}}
    last = {"step": 8, "total_steps": 8, "loss": 2.0, "outer": {**outer, "is_averaged": True}}
    clusters = []
    for name, end in (("a", {"state": "finished", "step": 8}), ("b", {"state": "stopped"})):
        launch = {**FAR, "world_size": 1, "device": "cpu"}
        run_dir, attempt = recorded_run(folder / f"t-{name}-1", launch, end, status=last)
        attempt.rank_log(0).write_text(f"one of {name}\ntwo of {name}\n")
        clusters.append(ClusterRun(name, "local", str(run_dir.path), "", 1))
    clusters.append(ClusterRun("centre", "pbs"))
    path = folder / "t-1"
    path.mkdir()
    config = {"outer": {"kind": "diloco"}}
    typed = "isles train t.yaml"
    MultiClusterRun(path, tuple(clusters), 1.0, time.time() - 50, config, typed=typed).write()


def remembered(folder: Path, name: str, host: str, path: Path) -> None:
    lines, hosts = (f"cd {path.parent}",), (host,)
    run = RemoteRun(name, host, str(path), lines, sys.executable, "ssh", hosts, time.time() - 30)
    write_remote(folder, run)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Runs of every kind, and the only ssh there is."""
    programs, folder = tmp_path / "bin", tmp_path / "runs"
    write_ssh(programs)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    finished(folder / "plain-1")
    failed(folder / "failed-1")
    killed(folder / "killed-1")
    on_two_hosts(folder / "two-1")
    in_a_queue(folder / "queue-1")
    bare_run(folder / "new-1")
    of_clusters(folder)
    on_hosts_that_have_not_come(folder / "late-1")
    of_a_chat_model(tmp_path / "far" / "far-1")
    remembered(folder, "far-1", "me@far", tmp_path / "far" / "far-1")
    remembered(folder, "lost-1", "me@down", tmp_path / "far" / "lost-1")
    return folder


Said = Callable[..., str]


@pytest.fixture
def said(folder: Path, capfd: pytest.CaptureFixture[str]) -> Said:
    """What commands print, without times, ages and names of this machine."""

    def one(line: str) -> str:
        for status in folder.glob("*/status.json"):
            os.utime(status)  # a heartbeat, however long the commands before have taken
        code = main(line.split())
        out, err = capfd.readouterr()
        err = "".join(f"! {line}\n" for line in err.splitlines())
        text = f"$ isles {line}\n{out}{err}({code})\n"
        text = text.replace(str(folder.parent), "/T").replace(socket.gethostname(), "HERE")
        text = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "DATE TIME", text)
        text = re.sub(r"\d[\dhms ]* ago", "AGE ago", text)
        text = re.sub(r" +\n", "\n", text)
        return re.sub(r'("\w+_(?:at|s)": )[\d.]{3,}', r"\g<1>0", text)

    return lambda *lines: "\n".join(one(line) for line in lines)


def test_status(said: Said) -> None:
    here = ["plain", "failed", "killed", "two", "late", "queue", "new", "t"]
    commands = ["status", *(f"status {run}" for run in (*here, "far", "lost", "nothing"))]
    check_golden("monitor-status.txt", said(*commands, "status two --json", "status t --json"))


def test_logs(said: Said) -> None:
    commands = [
        "logs plain",
        "logs plain -n 1",
        "logs plain --rank 1",
        "logs plain --rank 5",
        "logs plain --attempt 5",
        "logs plain -f",
        "logs plain --by-node -n 1",
        "logs plain --by-node -f",
        "logs two",
        "logs two --node 1",
        "logs two --node 3",
        "logs two --rank 2",
        "logs two --by-node",
        "logs new",
        "logs far --rank 0 -n 2",
        "logs lost",
        "logs t -n 1",
        "logs t --cluster b",
        "logs t --cluster centre",
        "logs t --cluster c",
        "logs plain --cluster b",
    ]
    check_golden("monitor-logs.txt", said(*commands))


def test_stop_and_follow(said: Said) -> None:
    commands = [
        "stop plain",
        "stop killed",
        "stop new",
        "stop two --timeout 1s",
        "stop two --timeout soon",
        "stop far",
        "stop far --now",
        "stop lost",
        "stop t --cluster a",
        "checkpoint list plain",
        "checkpoint list far",
        "checkpoint list new",
        "checkpoint verify far --step 60",
        "checkpoint list t",
        "follow plain",
        "follow failed",
        "follow killed",
        "follow t-b-1",
        "follow two --attempt 3",
    ]
    check_golden("monitor-stop.txt", said(*commands))


def test_stop_of_all_clusters(said: Said) -> None:
    """They are stopped at once, so that their lines come as they come."""
    head, *lines, code = said("stop t").splitlines()
    check_golden("monitor-stop-clusters.txt", "\n".join([head, *sorted(lines), code, ""]))
