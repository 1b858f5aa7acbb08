"""`isles train` and its companions as a user types them, with real ranks that really die."""

from __future__ import annotations

import json
import os
import select
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from isles.errors import ExitCode
from isles.monitor.stop import wait_for_end
from isles.run.checkpoints import list_checkpoints
from isles.run.paths import RunDir
from isles.run.process import ProcessId
from isles.run.records import read_record, read_rows
from tests.deadline import DEADLINE_S

ISLES = (sys.executable, "-m", "isles")
TWO = ("clusters.0.gpus_per_node=2", "clusters.0.max_restarts=0")
LONG = ("training.max_steps=100000", "training.logging_steps=1", "checkpoint.every_steps=20")


class Command:
    """One isles command as a process of its own."""

    def __init__(self, *arguments: str, cwd: Path, env: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [*ISLES, *arguments],
            cwd=cwd,
            env={**os.environ, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.out = self.err = ""

    def end(self) -> int:
        """Wait for its end; its exit code."""
        self.out, self.err = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode

    def until(self, condition: Callable[[], Any]) -> Any:
        """Wait until a record says so; fails when the command ends first."""
        for _ in range(int(DEADLINE_S / 0.05)):
            if found := condition():
                return found
            try:
                self.process.wait(0.05)
            except subprocess.TimeoutExpired:
                continue
            raise AssertionError(f"ended with {self.end()}\n{self.out}\n{self.err}")
        raise AssertionError(f"not within {DEADLINE_S} s: {condition}")


def isles(*arguments: str, cwd: Path, expected: int = 0) -> Command:
    """Run one command to its end."""
    command = Command(*arguments, cwd=cwd)
    code = command.end()
    assert code == expected, f"ended with {code}\n{command.out}\n{command.err}"
    return command


def the_run(run_file: Path) -> RunDir:
    return RunDir(run_file.parent / "runs" / "tiny-1")


def trained_steps(run_dir: RunDir) -> int:
    return len(read_rows(run_dir.metrics))


def rank_processes(run_dir: RunDir) -> list[ProcessId]:
    attempt = run_dir.last_attempt()
    assert attempt is not None
    records = [read_record(attempt.rank_record(rank)) for rank in range(2)]
    return [p for record in records if record and (p := ProcessId.from_record(record))]


def agent_process(run_dir: RunDir) -> ProcessId:
    attempt = run_dir.last_attempt()
    assert attempt is not None
    process = ProcessId.from_record(read_record(attempt.launch) or {})
    assert process is not None
    return process


@pytest.fixture
def training(run_file: Path) -> Iterator[tuple[Command, RunDir]]:
    """A long run of two ranks that has made its first checkpoint."""
    run_dir = the_run(run_file)
    command = Command("train", str(run_file), *TWO, *LONG, cwd=run_file.parent)
    command.until(lambda: list_checkpoints(run_dir) and trained_steps(run_dir) > 20)
    ranks = [*rank_processes(run_dir), agent_process(run_dir)]
    yield command, run_dir
    # A process of a gigabyte that was killed is there for a moment yet.
    left = [process for process in ranks if not wait_for_end(process, DEADLINE_S)]
    for process in left:
        os.kill(process.pid, signal.SIGKILL)
    command.process.kill()
    assert not left, f"still running after the test: {left}"


def test_a_whole_run_and_what_it_leaves(run_file: Path) -> None:
    cwd, run_dir = run_file.parent, the_run(run_file)
    options = ("checkpoint.export_on_finish=true", "track=[jsonl, tensorboard]")
    two = "clusters.0.gpus_per_node=2"
    secret = "hf_thisMustNotLeak"
    command = Command("train", str(run_file), *options, two, cwd=cwd, env={"HF_TOKEN": secret})
    assert command.end() == 0, command.err
    assert "step 20/20" in command.out
    rows = [row for row in read_rows(run_dir.metrics) if row["kind"] == "train"]
    assert [row["step"] for row in rows] == [1, 5, 10, 15, 20]
    for row in rows:
        assert row["loss"] > 0 and row["grad_norm"] > 0 and row["memory_bytes"] > 0
        assert row["mfu"] is None, "no GPU here: unknown, not a guess"
        parts = ("data_s", "forward_backward_s", "communication_s", "optimizer_s")
        assert 0 < sum(row[part] or 0 for part in parts) <= row["step_time_s"] * 1.5
    assert rows[-1]["communication_s"] > 0, "two ranks have waited for each other"
    summary = read_record(run_dir.summary) or {}
    assert summary["last_loss"] < summary["first_loss"]
    assert run_dir.loss_plot.read_bytes().startswith(b"\x89PNG")
    assert list(run_dir.tensorboard.glob("events.out.tfevents.*"))
    manifest = list_checkpoints(run_dir)[-1].manifest
    assert {"step", "tokens", "samples", "config_digest", "git_commit", "world_size"} <= set(
        manifest
    )
    assert manifest["attempt"] == len(run_dir.attempts())

    from transformers import AutoModelForCausalLM, AutoTokenizer

    from isles.checkpoint.load import load_tensors

    exported = AutoModelForCausalLM.from_pretrained(run_dir.model).eval()
    again = AutoModelForCausalLM.from_config(exported.config).eval()
    state = {f"model.{name}": value for name, value in again.state_dict().items()}
    load_tensors(state, list_checkpoints(run_dir)[-1].path, alone=True)
    ids = torch.arange(24)[None]
    assert torch.equal(exported(ids).logits, again(ids).logits), "logits are those of training"
    assert AutoTokenizer.from_pretrained(run_dir.model)("abc def")["input_ids"]

    listed = isles("checkpoint", "list", "tiny", cwd=cwd).out
    assert "20" in listed
    isles("checkpoint", "verify", "tiny", cwd=cwd)
    isles("checkpoint", "export", "tiny", "--output", "elsewhere", cwd=cwd)
    assert (cwd / "elsewhere" / "model.safetensors").read_bytes() == (
        run_dir.model / "model.safetensors"
    ).read_bytes()
    text = isles("generate", "tiny", "--prompt", "abc", "--max-new-tokens", "5", cwd=cwd).out
    assert text.startswith("abc") and len(text) > 4
    evaluated = isles("eval", "tiny", cwd=cwd).out
    eval_loss = next(r for r in read_rows(run_dir.metrics) if r["kind"] == "eval")["loss"]
    assert f"validation loss {eval_loss:.4f}" in evaluated
    assert "finished" in isles("status", "tiny", cwd=cwd).out
    for path in run_dir.path.rglob("*"):
        assert not path.is_file() or secret.encode() not in path.read_bytes(), path


def test_stop_from_another_terminal_and_going_on(training: tuple[Command, RunDir]) -> None:
    command, run_dir = training
    cwd = run_dir.path.parents[1]
    assert "running" in isles("status", cwd=cwd).out
    stopped = isles("stop", "tiny", cwd=cwd).out
    assert command.end() == ExitCode.REQUEUE
    step = list_checkpoints(run_dir)[-1].step
    words = ["isles", "train", str(cwd / "run.yaml"), *TWO, *LONG]
    typed = f"`{shlex.join(words)}`"
    assert f"{typed} goes on from step {step}" in stopped
    assert f"  {typed} goes on from step {step}\n" in command.out

    # The same without the overrides would end it at once.
    plain = isles("train", words[2], cwd=cwd, expected=ExitCode.USER)
    assert "training.max_steps: 100000 -> 20" in plain.err and "the run ends there" in plain.err
    assert f"it was started by {typed}" in plain.err
    assert f"from step {step}\n" in isles(*words[1:], "--dry-run", cwd=cwd).out

    shorter = (*TWO, f"training.max_steps={step + 5}", "--resume", str(run_dir.path))
    going_on = isles("train", words[2], *shorter, cwd=cwd)
    assert f"learning rate of step {step + 1}: " in going_on.out
    train = [row["step"] for row in read_rows(run_dir.metrics) if row["kind"] == "train"]
    assert train[-1] == step + 5
    assert len(train) == len(set(train))
    assert len(run_dir.attempts()) == 2


@pytest.mark.long
def test_two_times_ctrl_c_stops_at_once(training: tuple[Command, RunDir]) -> None:
    command, run_dir = training
    for process in rank_processes(run_dir):
        os.kill(process.pid, signal.SIGSTOP)  # they cannot save: only the second one helps
    command.process.send_signal(signal.SIGINT)
    assert "again" in next_line_of_errors(command)
    command.process.send_signal(signal.SIGINT)
    assert command.end() == ExitCode.INTERRUPTED
    assert list_checkpoints(run_dir), "what was saved before stays"


def next_line_of_errors(command: Command) -> str:
    """The next line on stderr, within the deadline."""
    stream = command.process.stderr
    assert stream is not None
    ready, _, _ = select.select([stream], [], [], DEADLINE_S)
    assert ready, "nothing on stderr in time"
    return str(stream.readline())


def test_nothing_listens_but_on_loopback_and_a_killed_rank_is_named_first(
    training: tuple[Command, RunDir],
) -> None:
    command, run_dir = training
    listening = [
        connection.laddr.ip
        for process in (*rank_processes(run_dir), agent_process(run_dir))
        for connection in psutil.Process(process.pid).net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert set(listening) <= {"127.0.0.1", "::1"}
    os.kill(rank_processes(run_dir)[1].pid, signal.SIGKILL)
    assert command.end() == ExitCode.TRAINING
    assert "rank 1 was killed by SIGKILL" in command.err
    assert "Traceback" not in command.err + command.out
    assert "Connection closed" not in command.err, "the other's complaint is a consequence"


@pytest.mark.long
def test_ranks_die_with_their_agent_and_the_run_goes_on(training: tuple[Command, RunDir]) -> None:
    command, run_dir = training
    ranks, agent = rank_processes(run_dir), agent_process(run_dir)
    os.kill(agent.pid, signal.SIGKILL)
    for process in ranks:
        psutil.Process(process.pid).wait(DEADLINE_S) if process.is_alive() else None
    assert command.end() == ExitCode.TRAINING
    cwd = run_dir.path.parents[1]
    assert "killed" in isles("status", "tiny", cwd=cwd).out
    step = list_checkpoints(run_dir)[-1].step
    shorter = (*TWO, f"training.max_steps={step + 3}", "--resume", str(run_dir.path))
    assert f"step {step}" in isles("train", str(cwd / "run.yaml"), *shorter, cwd=cwd).out


@pytest.mark.long
def test_a_run_whose_directory_is_deleted_ends_at_once(training: tuple[Command, RunDir]) -> None:
    command, run_dir = training
    ranks, agent = rank_processes(run_dir), agent_process(run_dir)
    while run_dir.path.exists():  # what a rank writes meanwhile may keep a folder
        shutil.rmtree(run_dir.path, ignore_errors=True)
    assert command.end() == ExitCode.TRAINING
    assert not [process for process in (*ranks, agent) if process.is_alive()]
    assert not run_dir.path.exists(), "nobody makes it again"
    gone = f"the run directory {run_dir.path} is not there any more"
    assert f"error: host {agent.host}: {gone}" in command.err
    assert "isles explain run.gone" in command.err and "Traceback" not in command.err


@pytest.mark.long
def test_max_time_saves_and_asks_to_be_started_again(run_file: Path) -> None:
    limits = ("training.max_time=3s", *LONG)
    isles("train", str(run_file), *limits, cwd=run_file.parent, expected=ExitCode.REQUEUE)
    run_dir = the_run(run_file)
    first = list_checkpoints(run_dir)[-1].step
    isles("train", str(run_file), *limits, cwd=run_file.parent, expected=ExitCode.REQUEUE)
    assert list_checkpoints(run_dir)[-1].step > first


@pytest.mark.long
def test_max_time_alone_is_the_length_of_the_run(run_file: Path) -> None:
    alone = ("training.max_steps=null", "training.max_time=4s")
    constant = "training.lr_scheduler_type=constant"
    isles("train", str(run_file), *alone, constant, cwd=run_file.parent)
    assert (read_record(the_run(run_file).summary) or {})["steps"] > 0


@pytest.mark.long
def test_torchrun_typed_by_hand(run_file: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc-per-node=2", "-m", "isles.train", str(run_file)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for steps in (10, 20):
        result = subprocess.run(
            [
                *command,
                f"training.max_steps={steps}",
                "--resume",
                "auto" if steps == 10 else the_run(run_file).path,
            ],
            cwd=run_file.parent,
            env=environment,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        assert result.returncode == 0, result.stderr
    run_dir = the_run(run_file)
    assert list_checkpoints(run_dir)[-1].step == 20
    assert len(run_dir.attempts()) == 2
    assert "finished" in isles("status", cwd=run_file.parent).out


@pytest.mark.long
def test_errors_of_the_data_reach_the_user_without_a_traceback(run_file: Path) -> None:
    bad = run_file.parent / "words.jsonl"
    bad.write_text(json.dumps({"txet": "misspelt"}) + "\n")
    command = isles("train", str(run_file), cwd=run_file.parent, expected=ExitCode.USER)
    assert "words.jsonl:1" in command.err and "txet" in command.err
    assert "Traceback" not in command.err + command.out


@pytest.mark.long
def test_torch_compile_and_bf16(run_file: Path) -> None:
    options = (
        "training.torch_compile=true",
        "training.precision=bf16-true",
        "data.validation_fraction=0",
    )
    isles(
        "train",
        str(run_file),
        *options,
        "training.max_steps=3",
        "training.warmup_steps=0",
        cwd=run_file.parent,
    )
    losses = [r["loss"] for r in read_rows(the_run(run_file).metrics) if r["kind"] == "train"]
    assert len(losses) >= 2 and all(loss > 0 for loss in losses)


@pytest.mark.long
def test_fine_tuning_starts_from_what_was_trained(run_file: Path) -> None:
    cwd = run_file.parent
    isles("train", str(run_file), "checkpoint.export_on_finish=true", cwd=cwd)
    before = read_record(the_run(run_file).summary) or {}
    isles(
        "train",
        str(run_file),
        "name=tuned",
        f"model.name_or_path={the_run(run_file).model}",
        "model.init=pretrained",
        "tokenizer.train_vocab_size=null",
        "training.learning_rate=1e-5",
        cwd=cwd,
    )
    after = read_record(cwd / "runs" / "tuned-1" / "summary.json") or {}
    assert abs(after["first_loss"] - before["last_loss"]) < 0.2
    assert before["first_loss"] - after["first_loss"] > 0.3
    assert after["eval_loss"] <= before["eval_loss"] + 0.01
