"""`isles train` and its companions as a user types them, with real ranks that really die."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import psutil
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from isles.checkpoint.load import load_tensors
from isles.errors import ExitCode
from isles.run.checkpoints import list_checkpoints
from isles.run.paths import RunDir
from isles.run.records import read_record, read_rows
from isles.run.restarts import current_restart
from tests.deadline import DEADLINE_S
from tests.e2e.typed import Command, at_one_instant, isles, the_run
from tests.lab.home import has_done
from tests.runs import assert_ended, files_with, losses_of, nothing_left, rows_of

TWO = ("clusters.0.gpus_per_node=2", "clusters.0.max_restarts=0")
LONG = ("training.max_steps=100000", "training.logging_steps=1", "checkpoint.every_steps=20")


def processes(run_dir: RunDir) -> list[psutil.Process]:
    """The two ranks of a run's last attempt, and its agent."""
    attempt = run_dir.last_attempt()
    paths = (attempt.rank_record(0), attempt.rank_record(1), attempt.launch)
    return [psutil.Process(read_record(path)["pid"]) for path in paths]


@pytest.fixture
def training(run_file: Path) -> Iterator[tuple[Command, RunDir]]:
    """A long run of two ranks that has made its first checkpoint."""
    run_dir = the_run(run_file)
    with nothing_left(run_file.parent):
        command = Command("train", str(run_file), *TWO, *LONG, cwd=run_file.parent)
        command.until(lambda: list_checkpoints(run_dir) and has_done(run_dir.attempt(1), 21))
        yield command, run_dir


@pytest.mark.long
def test_of_three_starts_at_one_instant_one_trains(run_file: Path) -> None:
    cwd = run_file.parent
    with nothing_left(cwd):
        words = ("train", str(run_file), TWO[1], *LONG, "--detach")
        ended = [(each.process.returncode, each.text) for each in at_one_instant(words, cwd)]
        assert sorted(code for code, _ in ended) == [0, 1, 1], ended
        refused = [text for code, text in ended if code]
        assert all("tiny-1 is running on " in text for text in refused), refused
        assert [path.name for path in (cwd / "runs").iterdir()] == ["tiny-1"]
        assert len(the_run(run_file).attempts()) == 1
        isles("stop", "--now", str(the_run(run_file).path), cwd=cwd)


def test_a_whole_run_and_what_it_leaves(run_file: Path) -> None:
    cwd, run_dir = run_file.parent, the_run(run_file)
    options = ("checkpoint.export_on_finish=true", "track=[jsonl, tensorboard]", TWO[0])
    secret = "hf_thisMustNotLeak"
    command = isles("train", str(run_file), *options, cwd=cwd, env={"HF_TOKEN": secret})
    assert "step 20/20" in command.out
    rows = rows_of(run_dir)
    assert [row["step"] for row in rows] == [1, 5, 10, 15, 20]
    parts = ("data_s", "forward_backward_s", "communication_s", "optimizer_s")
    for row in rows:
        assert row["loss"] > 0 and row["grad_norm"] > 0 and row["memory_bytes"] > 0
        assert row["mfu"] is None, "no GPU here: unknown, not a guess"
        assert 0 < sum(row[part] or 0 for part in parts) <= row["step_time_s"] * 1.5
    assert rows[-1]["communication_s"] > 0, "two ranks have waited for each other"
    summary = read_record(run_dir.summary) or {}
    assert summary["last_loss"] < summary["first_loss"]
    assert run_dir.loss_plot.read_bytes().startswith(b"\x89PNG")
    assert list(run_dir.tensorboard.glob("events.out.tfevents.*"))
    last = (read_record(run_dir.attempt(1).live) or {})["nodes"]["0"]
    assert last["state"] == "ended" and list(last["ranks"]) == ["0", "1"], "the last record stays"
    assert list(read_rows(run_dir.node_telemetry(0)))[-1]["ranks"].keys() == last["ranks"].keys()
    manifest = list_checkpoints(run_dir)[-1].manifest
    known = {"step", "tokens", "samples", "config_digest", "git_commit", "world_size"}
    assert known <= manifest.keys() and manifest["attempt"] == len(run_dir.attempts())

    # What is exported gives the logits of the checkpoint.
    exported = AutoModelForCausalLM.from_pretrained(run_dir.model).eval()
    again = AutoModelForCausalLM.from_config(exported.config).eval()
    state = {f"model.{name}": value for name, value in again.state_dict().items()}
    load_tensors(state, list_checkpoints(run_dir)[-1].path, alone=True)
    ids = torch.arange(24)[None]
    assert torch.equal(exported(ids).logits, again(ids).logits), "logits are those of training"
    assert AutoTokenizer.from_pretrained(run_dir.model)("abc def")["input_ids"]
    # Its card has the run's own figures, and its run file.
    card = (run_dir.model / "README.md").read_text()
    assert f"| last training loss | {summary['last_loss']:.4f} |" in card
    assert f"| validation loss | {summary['eval_loss']:.4f} |" in card
    for row in ("| steps | 20 |", "| devices | 2 x CPU |", "| strategy | ddp |"):
        assert row in card
    assert "`words.jsonl`, type text" in card and "base_model" not in card
    written = yaml.safe_load(card.split("```yaml\n")[1].split("```")[0])
    assert written["training"]["max_steps"] == 20

    assert "20" in isles("checkpoint", "list", "tiny", cwd=cwd).out
    isles("checkpoint", "verify", "tiny", cwd=cwd)
    isles("checkpoint", "export", "tiny", "--output", "elsewhere", cwd=cwd)
    weights = (run_dir.model / "model.safetensors").read_bytes()
    assert (cwd / "elsewhere" / "model.safetensors").read_bytes() == weights
    text = isles("generate", "tiny", "--prompt", "abc", "--max-new-tokens", "5", cwd=cwd).out
    assert text.startswith("abc") and len(text) > 4
    evaluated = isles("eval", "tiny", cwd=cwd).out
    assert f"validation loss {rows_of(run_dir, 'eval')[0]['loss']:.4f}" in evaluated
    assert "finished" in isles("status", "tiny", cwd=cwd).out
    assert "wrote page.html" in isles("dashboard", "tiny", "--export", "page.html", cwd=cwd).out
    assert '"tiny-1"' in (cwd / "page.html").read_text()
    page = Command("dashboard", "tiny", cwd=cwd, env={"PYTHONUNBUFFERED": "1"})
    page.until(lambda: "Ctrl+C closes" in page.out)
    link, port = re.findall(r"^open (http://127\.0\.0\.1:(\d+)/\S+)$", page.out, re.M)[0]
    assert f"ssh -L {port}:127.0.0.1:{port} " in page.out
    state = link.replace("?", "state.json?")  # null until it has looked for the first time
    page.until(lambda: b"tiny-1" in urlopen(state, timeout=DEADLINE_S).read())
    page.process.send_signal(signal.SIGINT)
    assert page.end() == 0, page.text
    assert files_with(secret, run_dir.path) == []


def test_stop_from_another_terminal_and_going_on(training: tuple[Command, RunDir]) -> None:
    command, run_dir = training
    cwd = run_dir.path.parents[1]
    assert "running" in isles("status", cwd=cwd).out
    command.until(lambda: any(row.get("cpu_use") for row in rows_of(run_dir)))
    stopped = isles("stop", "tiny", cwd=cwd).out
    assert command.end() == ExitCode.REQUEUE
    step = list_checkpoints(run_dir)[-1].step
    words = ["isles", "train", str(cwd / "run.yaml"), *TWO, *LONG]
    typed = f"`{shlex.join(words)}`"
    assert f"{typed} resumes from step {step}" in stopped
    assert f"  {typed} resumes from step {step}\n" in command.out

    # The same without the overrides would end it at once.
    plain = isles("train", words[2], cwd=cwd, expected=ExitCode.USER)
    assert "training.max_steps: 100000 -> 20" in plain.err and "the run ends there" in plain.err
    assert f"last started with {typed}" in plain.err
    assert f"from step {step}\n" in isles(*words[1:], "--dry-run", cwd=cwd).out

    shorter = (*TWO, f"training.max_steps={step + 5}", "--resume", str(run_dir.path))
    going_on = isles("train", words[2], *shorter, cwd=cwd)
    assert f"learning rate of step {step + 1}: " in going_on.out
    train = [row["step"] for row in rows_of(run_dir)]
    assert train[-1] == step + 5 and len(train) == len(set(train))
    assert len(run_dir.attempts()) == 2
    assert_ended(cwd)


@pytest.mark.long
def test_two_times_ctrl_c_stops_at_once(training: tuple[Command, RunDir]) -> None:
    command, run_dir = training
    for process in processes(run_dir)[:2]:
        process.suspend()  # they cannot save: only the second one helps
    command.process.send_signal(signal.SIGINT)
    command.until(lambda: "Ctrl+C again stops now" in command.err)
    command.process.send_signal(signal.SIGINT)
    assert command.end() == ExitCode.INTERRUPTED
    assert_ended(run_dir.path.parents[1])
    assert "stopped now" in command.text
    assert list_checkpoints(run_dir), "what was saved before stays"


def test_nothing_listens_but_on_loopback_and_a_killed_rank_is_named_first(training):
    command, run_dir = training
    for process in processes(run_dir):
        for port in process.net_connections("inet"):
            assert port.status != psutil.CONN_LISTEN or port.laddr.ip in ("127.0.0.1", "::1")
    processes(run_dir)[1].kill()
    assert command.end() == ExitCode.TRAINING
    assert_ended(run_dir.path.parents[1])
    assert "rank 1 was killed by SIGKILL" in command.err
    assert "Traceback" not in command.text
    assert "Connection closed" not in command.err, "the other's complaint is a consequence"


@pytest.mark.long
def test_a_killed_agent_takes_its_ranks_along_and_a_deleted_directory_ends_the_run(training):
    command, run_dir = training
    cwd = run_dir.path.parents[1]
    processes(run_dir)[2].kill()
    assert command.end() == ExitCode.TRAINING and "are gone" in command.text
    assert_ended(cwd)
    assert "killed" in isles("status", "tiny", cwd=cwd).out

    step = list_checkpoints(run_dir)[-1].step
    words = ("train", str(cwd / "run.yaml"), *TWO, *LONG, "--resume", str(run_dir.path))
    command = Command(*words, cwd=cwd)
    command.until(lambda: has_done(run_dir.attempt(2), step + 3))
    assert "resuming tiny-1" in command.out
    steps = [row["step"] for row in rows_of(run_dir)]
    assert steps == list(range(1, len(steps) + 1)), "each step once"
    host = read_record(run_dir.attempt(2).launch)["host"]
    while run_dir.path.exists():  # what a rank writes meanwhile may keep a folder
        shutil.rmtree(run_dir.path, ignore_errors=True)
    assert command.end() == ExitCode.TRAINING
    assert_ended(cwd)
    assert not run_dir.path.exists(), "nobody makes it again"
    gone = f"the run directory {run_dir.path} was deleted or moved"
    assert f"error: host {host}: {gone}" in command.err
    assert "isles explain run.gone" in command.err and "Traceback" not in command.err


@pytest.mark.long
def test_max_time_saves_and_asks_to_be_started_again_or_is_the_length(run_file: Path) -> None:
    cwd, run_dir = run_file.parent, the_run(run_file)
    limits = ("training.max_time=3s", *LONG)
    isles("train", str(run_file), *limits, cwd=cwd, expected=ExitCode.REQUEUE)
    first = list_checkpoints(run_dir)[-1].step
    isles("train", str(run_file), *limits, cwd=cwd, expected=ExitCode.REQUEUE)
    assert list_checkpoints(run_dir)[-1].step > first
    alone = ("training.max_steps=null", "training.max_time=4s", "name=alone")
    isles("train", str(run_file), *alone, "training.lr_scheduler_type=constant", cwd=cwd)
    assert (read_record(RunDir(cwd / "runs" / "alone-1").summary) or {})["steps"] > 0


@pytest.mark.long
def test_errors_of_the_data_reach_the_user_and_are_not_tried_again(run_file: Path) -> None:
    (run_file.parent / "words.jsonl").write_text(json.dumps({"txet": "misspelled"}) + "\n")
    command = isles("train", str(run_file), cwd=run_file.parent, expected=ExitCode.USER)
    assert "words.jsonl:1" in command.err and "txet" in command.err
    assert "Traceback" not in command.text
    assert current_restart(the_run(run_file).attempt(1)) == 0


@pytest.mark.long
def test_torch_compile_and_bf16(run_file: Path) -> None:
    options = ("training.torch_compile=true", "training.precision=bf16-true")
    short = ("training.max_steps=3", "training.warmup_steps=0", "data.validation_fraction=0")
    isles("train", str(run_file), *options, *short, cwd=run_file.parent)
    losses = losses_of(the_run(run_file))
    assert len(losses) >= 2 and all(loss > 0 for loss in losses)
