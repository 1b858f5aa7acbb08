"""A script of the user's own in place of the trainer: started, followed, stopped, judged."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from isles.errors import ExitCode
from isles.run.paths import RunDir
from isles.run.records import read_record, read_rows
from tests.deadline import DEADLINE_S, run_program
from tests.e2e.typed import Command, isles
from tests.runs import assert_ended, nothing_left, processes_of

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
EXAMPLE = Path(__file__).parents[2] / "examples" / "own_script"

# Each rank leaves its variables and arguments; then it does what its argument says.
PROBE = """\
import json, os, signal, subprocess, sys
from pathlib import Path

rank, here = os.environ["RANK"], Path(os.environ["PROBE_DIR"])
restart = os.environ["TORCHELASTIC_RESTART_COUNT"]

def leave(name):
    part = here / f".{name}-{rank}-{restart}"
    part.write_text(json.dumps({"env": dict(os.environ), "argv": sys.argv, "cwd": os.getcwd()}))
    part.rename(here / f"{name}-{rank}-{restart}")

def fail():
    raise ValueError("the data is odd")

def obey(*_):
    leave("saved")
    sys.exit(0)

print("hello from", rank)
match sys.argv[1]:
    case "fail" if rank == "1":
        (here / "go").read_text()
        fail()
    case "obey":
        signal.signal(signal.SIGTERM, obey)
    case "refuse" | "fail":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    case "busy":
        subprocess.Popen(["sleep", "600"])
leave("began")
if sys.argv[1] != "end" and restart == "0":
    signal.pause()
    while True:
        signal.pause()
"""


def write_probe(folder: Path, *arguments: str) -> str:
    """A run file of two ranks that run the probe."""
    (folder / "probe.py").write_text(PROBE)
    (folder / "run.yaml").write_text(
        "name: own\n"
        f"training: {{script: probe.py, script_args: {json.dumps(arguments)}}}\n"
        "clusters: [{gpus_per_node: 2}]\n"
    )
    return "run.yaml"


def began(folder: Path, restart: int = 0) -> bool:
    return all((folder / f"began-{rank}-{restart}").exists() for rank in range(2))


def script_pid(run_dir: RunDir, rank: int) -> int:
    return int((read_record(run_dir.attempt(1).rank_record(rank)) or {})["script_pid"])


def outcome_of(run_dir: RunDir) -> dict[str, Any]:
    return read_record(run_dir.attempt(1).outcome) or {}


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunDir]:
    monkeypatch.setenv("PROBE_DIR", str(tmp_path))
    with nothing_left(tmp_path):
        yield RunDir(tmp_path / "runs" / "own-1")


def test_the_example_trains_on_two_ranks(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLE, tmp_path / "examples" / "own_script")
    command = isles("train", "examples/own_script/run.yaml", cwd=tmp_path)
    assert "own-script-1 is finished" in command.out
    assert "isles generate" not in command.out  # there is no model of ours to ask
    run_dir = RunDir(tmp_path / "runs" / "own-script-1")
    losses = [row["loss"] for row in read_rows(run_dir.metrics)]
    assert len(losses) == 10
    assert losses[-1] < losses[0] / 20
    log = run_dir.attempt(1).rank_log(0).read_text()
    assert "World size: 2, Rank: 0, Device: cpu" in log
    assert "Training completed successfully!" in log
    assert torch.load(tmp_path / "model_distributed.pt")["0.weight"].shape == (64, 10)
    report = json.loads(isles("status", "own-script-1", "--json", cwd=tmp_path).out)
    assert (report["state"], report["step"], report["total_steps"]) == ("finished", 10, 10)
    assert "Rank: 1" in isles("logs", "own-script-1", "--rank", "1", cwd=tmp_path).out


def test_its_environment_is_that_of_torchrun(tmp_path: Path, own: RunDir) -> None:
    isles("train", write_probe(tmp_path, "end", "--lr", "4e-4"), cwd=tmp_path)
    ours = [json.loads((tmp_path / f"began-{rank}-0").read_text()) for rank in range(2)]
    threads = {"OMP_NUM_THREADS": ours[0]["env"]["OMP_NUM_THREADS"]}
    words = (*TORCHRUN, "--max_restarts=3", "probe.py", "end", "--lr", "4e-4")
    assert run_program(words, tmp_path, {**os.environ, **threads}).returncode == 0
    theirs = [json.loads((tmp_path / f"began-{rank}-0").read_text()) for rank in range(2)]
    own_values = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"}
    own_values |= {"TORCHELASTIC_USE_AGENT_STORE", "_"}
    more = {"ISLES_RUN_DIR", "ISLES_ATTEMPT", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}
    for mine, real in zip(ours, theirs, strict=True):
        assert mine["argv"] == real["argv"] == ["probe.py", "end", "--lr", "4e-4"]
        assert mine["cwd"] == real["cwd"] == str(tmp_path)
        assert mine["env"].keys() - real["env"].keys() <= more
        assert not real["env"].keys() - mine["env"].keys()
        assert {k for k, v in real["env"].items() if mine["env"][k] != v} <= own_values
        assert mine["env"]["ISLES_RUN_DIR"] == str(own.path)
    assert outcome_of(own)["state"] == "finished"


def test_an_error_names_the_rank_and_the_line_and_is_told_at_once(tmp_path: Path, own: RunDir):
    """While another rank refuses to end."""
    os.mkfifo(tmp_path / "go")
    words = ("train", write_probe(tmp_path, "fail"), "checkpoint.timeout=60s")
    command = Command(*words, cwd=tmp_path)
    command.until((tmp_path / "began-0-0").exists)
    (tmp_path / "go").write_text("it refuses to end from now on")
    command.until(own.attempt(1).outcome.exists)
    slow = script_pid(own, 0)
    assert Path(f"/proc/{slow}").exists(), "it refuses to end"
    error = outcome_of(own)["error"]
    assert error["rank"] == 1 and "the data is odd" in error["what"]
    os.kill(slow, signal.SIGKILL)
    assert command.end() == ExitCode.TRAINING
    line = PROBE.splitlines().index('    raise ValueError("the data is odd")') + 1
    assert "error: probe.py failed: ValueError: the data is odd" in command.err
    assert f"{tmp_path}/probe.py:{line}, rank 1 on" in command.err
    assert "in fail" in command.err  # the end of its traceback
    # So soon after its start it would only come again.
    assert not list(tmp_path.glob("began-*-1"))


def test_a_killed_rank_is_started_again(tmp_path: Path, own: RunDir) -> None:
    command = Command("train", write_probe(tmp_path, "wait"), cwd=tmp_path)
    command.until(lambda: began(tmp_path))
    os.kill(script_pid(own, 1), signal.SIGKILL)
    assert command.end() == ExitCode.OK, command.err
    assert began(tmp_path, restart=1)
    restart = read_record(own.attempt(1).restart(1)) or {}
    for words in ("rank 1 on", "was killed by SIGKILL", "restart 1 of 3"):
        assert words in restart["text"]
    assert "---- restart 1 ----" in own.attempt(1).rank_log(0).read_text()


STOPS = {
    "obey": "asked to stop; the script ended with exit code 0",
    "wait": "the script does not handle SIGTERM, so it saved nothing",
    "refuse": "did not end within 1 s after SIGTERM, and was killed",
}


@pytest.mark.long
@pytest.mark.parametrize(("how", "reason"), STOPS.items())
def test_stop_is_a_sigterm(tmp_path: Path, own: RunDir, how: str, reason: str) -> None:
    command = Command("train", write_probe(tmp_path, how), "checkpoint.timeout=1s", cwd=tmp_path)
    command.until(lambda: began(tmp_path))
    pids = [script_pid(own, rank) for rank in range(2)]
    isles("stop", "own-1", cwd=tmp_path)
    assert command.end() == ExitCode.REQUEUE
    assert (tmp_path / "saved-1-0").exists() == (how == "obey")
    outcome = outcome_of(own)
    assert outcome["state"] == "stopped" and reason in outcome["reason"]
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def agent_pid(run_dir: RunDir) -> int:
    return int((read_record(run_dir.attempt(1).launch) or {}).get("pid", 0))


def starts(folder: Path) -> bool:
    """Whether the first process of a script is there; not that it runs, or is on record."""
    return any("probe.py" in process.info["cmdline"] for process in processes_of(folder))


@pytest.mark.parametrize("moment", [starts, began])
def test_nothing_is_left_when_the_agent_is_killed(tmp_path, own: RunDir, moment):
    command = Command("train", write_probe(tmp_path, "refuse"), cwd=tmp_path)
    # Before the agent's record there is the claim of the command that starts it.
    command.until(lambda: agent_pid(own) not in (0, command.process.pid))
    command.until(lambda: moment(tmp_path))
    if moment is began:  # whoever sees a script's work finds it on record
        assert all(psutil.pid_exists(script_pid(own, rank)) for rank in range(2))
    os.kill(agent_pid(own), signal.SIGKILL)
    assert command.end() == ExitCode.TRAINING
    assert_ended(tmp_path)
    assert processes_of(tmp_path) == []


@pytest.mark.long
def test_a_script_that_hangs_is_found_out(tmp_path: Path, own: RunDir) -> None:
    """Stacks can be had at any time; what is stopped now leaves nothing that it has started."""
    attempt = own.attempt(1)
    words = ("train", write_probe(tmp_path, "busy"), "watchdog.max_silence=6s")
    command = Command(*words, cwd=tmp_path)
    command.until(lambda: list(attempt.hangs.glob("silence-1.json")))
    stall = read_record(attempt.hangs / "silence-1.json") or {}
    assert stall["text"].startswith("no rank has printed or reported anything for ")
    assert "all ranks are busy; rank 0 on" in stall["text"]
    line = PROBE.splitlines().index("    signal.pause()") + 1
    for rank in range(2):
        stacks = (attempt.hangs / f"silence-1-rank-{rank}.txt").read_text()
        assert stacks.startswith(f"rank {rank} on {os.uname().nodename}, at ")
        assert f'probe.py", line {line} in <module>' in stacks
    assert stall["text"] in attempt.agent_log.read_text()
    status = isles("status", "own-1", cwd=tmp_path).out
    assert "no rank has printed or reported anything" in " ".join(status.split())
    (attempt.path / "stacks").touch()
    command.until((attempt.hangs / "asked-1-rank-1.txt").exists)
    assert any("sleep" in process.info["cmdline"] for process in processes_of(tmp_path))
    isles("stop", "own-1", "--now", cwd=tmp_path)
    command.end()
    assert_ended(tmp_path)
    assert "note: no rank has printed" in command.out


@pytest.mark.long
def test_a_frozen_rank_ends_the_script_where_that_is_asked(tmp_path: Path, own: RunDir) -> None:
    stops = ("watchdog.max_silence=6s", "watchdog.action=stop", "clusters.0.max_restarts=0")
    command = Command("train", write_probe(tmp_path, "wait"), *stops, cwd=tmp_path)
    command.until(lambda: began(tmp_path))
    scripts = [psutil.Process(script_pid(own, rank)) for rank in range(2)]
    scripts[1].suspend()
    assert command.end() == ExitCode.COMMUNICATION, command.err
    assert f"rank 1 on {os.uname().nodename}: it is frozen" in command.err
    assert psutil.wait_procs(scripts, timeout=DEADLINE_S)[1] == []
