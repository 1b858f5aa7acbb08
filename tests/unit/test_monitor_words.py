"""What is printed word for word: tests/golden/monitor-*.txt, and before a run terminal-*.txt.

The records are written by hand. `ssh` is a program that runs its last argument on this machine.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from isles.cli import app, main
from isles.monitor.status import collect
from isles.run.paths import RunDir
from isles.run.records import write_record
from isles.run.remote import (
    ClusterRun,
    MultiClusterRun,
    RemoteRun,
    keep_report,
    list_remotes,
    write_remote,
)
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


def failed(path: Path) -> None:
    launch = {**FAR, "world_size": 2, "device": "cuda"}
    end = {"state": "failed", "exit_code": 4, "reason": "rank 1 failed", "step": 7}
    _, attempt = recorded_run(path, launch, end, status={"step": 7, "total_steps": 60})
    rank_error(attempt, 1, "the GPU is full", id="memory", where="batch 5", fix="a smaller batch")
    attempt.rank_log(1).write_text("x\n")


def on_two_hosts(path: Path) -> None:
    status = {"phase": "training", "step": 30, "total_steps": 60, "loss": 4.5, "eta_s": 65.0}
    launch = {**FAR, "launcher": "ssh", "world_size": 3, "device": "cuda"}
    _, attempt = recorded_run(path, launch, status={**status, "tokens_per_second": 5e3})
    two_hosts(attempt, "ssh", "me@down")
    node = {"address": "10.0.0.1", "ranks": 2, "host": "far", "pid": 5, "started": 1.0, "why": ""}
    there = {**node, "node": 0, "name": "h0", "first_rank": 0, "state": "there"}
    there["last_seen_at"] = time.time()
    lost = {**node, "node": 1, "name": "h1", "first_rank": 2, "ranks": 1, "state": "lost"}
    lost |= {"address": "10.0.0.2", "why": "silent"}
    write_record(attempt.nodes, {"nodes": [there, lost]})
    found = [{"level": "warning", "text": "slow link", "where": "h1"}]
    write_record(attempt.findings, {"findings": found})
    attempt.hangs.mkdir()
    for step, went_on_after_s in ((120, 75.0), (130, None)):
        held_up = {"step": step, "text": "rank 2 is behind", "went_on_after_s": went_on_after_s}
        write_record(attempt.hangs / f"step-{step}.json", held_up)
    write_record(attempt.hangs / "step-130-rank-2.nccl.json", {"text": "no record of a step"})
    attempt.agent_log.write_text("the supervisor\n")


def of_clusters(folder: Path) -> None:
    last = {"outer_step": 7, "digest": "d", "weights": {"a": 300, "b": 100}}
    outer: dict[str, Any] = {"outer_step": 7, "sent_bytes": 2048, "received_bytes": 4096}
    outer |= {"exposed_s": 30.0, "hidden_s": 90.0, "hidden_share": 0.75, "last_outer_step": last}
    status = {"step": 8, "total_steps": 8, "loss": 2.0, "outer": {**outer, "is_averaged": True}}
    launch = {**FAR, "world_size": 1, "device": "cpu"}
    clusters = []
    for name, end in (("a", {"state": "finished", "step": 8}), ("b", {"state": "stopped"})):
        run_dir, attempt = recorded_run(folder / f"t-{name}-1", launch, end, status=status)
        attempt.rank_log(0).write_text(f"one of {name}\ntwo of {name}\n")
        clusters.append(ClusterRun(name, "local", str(run_dir.path), "", 1))
    clusters.append(ClusterRun("center", "pbs"))
    (folder / "t-1").mkdir()
    about = (1.0, time.time() - 50, {"outer": {"kind": "diloco"}})
    MultiClusterRun(folder / "t-1", tuple(clusters), *about, typed="isles train t.yaml").write()


def remembered(folder: Path, name: str, host: str, path: Path) -> None:
    lines, hosts = (f"cd {path.parent}",), (host,)
    run = RemoteRun(name, host, str(path), lines, sys.executable, "ssh", hosts, time.time() - 30)
    write_remote(folder, run)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch) -> Path:
    """Runs of every kind, and the only ssh there is."""
    programs, folder = tmp_path / "bin", tmp_path / "runs"
    write_ssh(programs)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    finished(folder / "plain-1")
    failed(folder / "failed-1")
    _, killed = recorded_run(folder / "killed-1", {**GONE, "world_size": 1, "device": "cpu"})
    killed.agent_log.write_text("agent is ready\n")
    on_two_hosts(folder / "two-1")
    launch = {"launcher": "slurm", "job_id": "4711", "bin_path": "/nowhere"}
    _, queued = recorded_run(folder / "queue-1", {**launch, "world_size": 8, "device": "cuda"})
    job = {"state": "pending", "reason": "waiting for free nodes", "job_id": "4711"}
    write_record(queued.job, {**job, "at": time.time() - 60})
    bare_run(folder / "new-1")
    of_clusters(folder)
    launch = {**FAR, "launcher": "manual", "world_size": 3, "device": "cuda"}
    starting = {"phase": "starting"}
    _, late = recorded_run(folder / "late-1", launch, status=starting, began_s_ago=0.0)
    two_hosts(late, "manual")
    far = tmp_path / "far" / "far-1"
    finished(far)
    (far / "tokenizer").mkdir()
    (far / "tokenizer" / "chat_template.jinja").write_text("{{ messages }}")
    remembered(folder, "far-1", "me@far", far)
    remembered(folder, "lost-1", "me@down", tmp_path / "far" / "lost-1")
    return folder


def printed(capfd, line: str) -> str:
    """A command with all that it prints."""
    code = main(line.split())
    out, err = capfd.readouterr()
    err = "".join(f"! {line}\n" for line in err.splitlines())
    text = f"$ isles {line}\n{out}{err}({int(code)})\n"
    return re.sub(r" +\n", "\n", text.replace(str(Path.cwd()), "/T"))


@pytest.fixture
def said(folder: Path, capfd) -> Callable[..., str]:
    """What a verb prints with each of some endings, without times, ages and this machine's name."""

    def one(line: str) -> str:
        for status in folder.glob("*/status.json"):
            os.utime(status)  # a heartbeat, however long the commands before have taken
        text = printed(capfd, line.strip()).replace(socket.gethostname(), "HERE")
        text = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "DATE TIME", text)
        text = re.sub(r"\d[\dhms ]* ago", "AGE ago", text)
        return re.sub(r'("\w+_(?:at|s)": )[\d.]{3,}', r"\g<1>0", text)

    return lambda verb, *endings: "\n".join(one(f"{verb} {ending}") for ending in endings)


def test_status(said) -> None:
    here = ("plain", "failed", "killed", "two", "late", "queue", "new", "t")
    as_json = ("two --json", "t --json")
    text = said("status", "", *here, "far", "lost", "nothing", *as_json)
    check_golden("monitor-status.txt", text)


def test_a_machine_that_is_down_is_shown_with_what_was_last_known(folder, capfd) -> None:
    (run,) = (run for run in list_remotes(folder) if run.name == "lost-1")
    keep_report(folder, run, collect(RunDir(folder / "two-1")).model_dump())
    (row,) = (row for row in printed(capfd, "status").splitlines() if "@down" in row)
    assert row.split()[1:3] == ["unreachable", "30/60"] and "down cannot be asked" in row
    assert "ago it was running; check that it is switched on: ping down" in printed(
        capfd, "status lost"
    )


def test_logs(said) -> None:
    whole = ("", "-n 1", "--rank 1", "--rank 5", "--attempt 5", "-f")
    texts = [
        said("logs plain", *whole, "--by-node -n 1", "--by-node -f"),
        said("logs two", "", "--node 1", "--node 3", "--rank 2", "--by-node"),
        said("logs", "new", "far --rank 0 -n 2", "lost"),
        said("logs t", "-n 1", "--cluster b", "--cluster center", "--cluster c"),
        said("logs plain", "--cluster b"),
    ]
    check_golden("monitor-logs.txt", "\n".join(texts))


def test_stop_and_follow(said) -> None:
    late = ("two --timeout 1s", "two --timeout soon")
    saved = ("list plain", "list far", "list new", "verify far --step 60", "list t")
    texts = [
        said("stop", "plain", "killed", "new", *late, "far", "far --now", "lost", "t --cluster a"),
        said("checkpoint", *saved),
        said("follow", "plain", "failed", "killed", "t-b-1", "two --attempt 3"),
    ]
    check_golden("monitor-stop.txt", "\n".join(texts))


def test_stop_of_all_clusters(said) -> None:
    """They are stopped at once, so that their lines come as they come."""
    head, *lines, code = said("stop", "t").splitlines()
    check_golden("monitor-stop-clusters.txt", "\n".join([head, *sorted(lines), code, ""]))


EXAMPLES = Path(__file__).parents[2] / "examples"
BAD = """\
name: bad run
model: {name_or_path: llama-2m, init: scrach}
tokenizer: {train_vocab_size: 2048}
data: {sources: [{path: missing.jsonl, colums: {text: body}}], seq_length: 12q}
training: {max_steps: 10, warmup_steps: 20, learning_rate: 3, precision: fp17, per_device_batch: 2}
clusters: [{launcher: {kind: slrum}, gpus_per_node: 0}]
"""


@pytest.fixture
def before_a_run(tmp_path: Path, monkeypatch, capfd) -> Callable[..., str]:
    """What commands print in a folder with the example and a bad run file, without a GPU."""
    shutil.copy(EXAMPLES / "quickstart.yaml", tmp_path / "run.yaml")
    (tmp_path / "bad.yaml").write_text(BAD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("COLUMNS", "100")
    # cyclopts keeps the console, and with it the width, of the first help that a process prints.
    monkeypatch.setattr(app, "console", Console(width=100))

    def said(*lines: str) -> str:
        text = "\n".join(printed(capfd, line) for line in lines)
        return re.sub(r"(?m)^env .*$", "env …", text)  # variables that depend on the machine

    return said


def test_help_of_every_verb(before_a_run) -> None:
    verbs = [name for name in app if not name.startswith("-")]
    under = [f"{verb} {name}" for verb in verbs for name in app[verb] if not name.startswith("-")]
    helps = ["--help", *(f"{words} --help" for words in (*verbs, *under))]
    check_golden("terminal-help.txt", before_a_run(*helps))


def test_what_is_said_before_a_run(before_a_run) -> None:
    commands = [
        "init --output new.yaml",
        "init",
        "init --template lora --output lora.yaml",
        "train run.yaml --dry-run",
        "train run.yaml training.max_step=10",
        "train bad.yaml",
        "train none.yaml",
        "render run.yaml --to slurm",
        "status",
        "checkpoint list none",
        "explain config.batch",
        "explain config.bath",
    ]
    check_golden("terminal-before.txt", before_a_run(*commands))
