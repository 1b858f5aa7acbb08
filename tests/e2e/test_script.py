"""A script of the user's own in place of the trainer: started, followed, stopped, judged."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch

from isles.errors import ExitCode
from isles.run.paths import RunDir
from isles.run.records import read_record, read_rows
from tests.deadline import DEADLINE_S
from tests.e2e.test_train import Command
from tests.runs import nothing_left, processes_of

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
EXAMPLE = Path(__file__).parents[2] / "examples" / "own_script"

# Each rank leaves its variables and arguments; then it does what its argument says.
PROBE = """\
import json, os, signal, sys, time
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
        fail()
    case "obey":
        signal.signal(signal.SIGTERM, obey)
    case "fail-alone" if rank == "1":
        (here / "go").read_text()
        fail()
    case "refuse" | "fail-alone":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
leave("began")
if sys.argv[1] != "end" and restart == "0":
    signal.pause()
    while True:
        signal.pause()
"""


def write_probe(folder: Path, *arguments: str) -> Path:
    """A run file of two ranks that run the probe."""
    (folder / "probe.py").write_text(PROBE)
    file = folder / "run.yaml"
    file.write_text(
        "name: own\n"
        f"training: {{script: probe.py, script_args: {json.dumps(arguments)}}}\n"
        "clusters: [{gpus_per_node: 2}]\n"
    )
    return file


def began(folder: Path, restart: int = 0) -> bool:
    return all((folder / f"began-{rank}-{restart}").exists() for rank in range(2))


def script_pid(run_dir: RunDir, rank: int) -> int:
    return int((read_record(run_dir.attempt(1).rank_record(rank)) or {})["script_pid"])


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunDir]:
    monkeypatch.setenv("PROBE_DIR", str(tmp_path))
    with nothing_left(tmp_path):
        yield RunDir(tmp_path / "runs" / "own-1")


def test_the_example_trains_on_two_ranks(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLE, tmp_path / "examples" / "own_script")
    command = Command("train", "examples/own_script/run.yaml", cwd=tmp_path)
    assert command.end() == ExitCode.OK, command.err
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
    status = Command("status", "own-script-1", "--json", cwd=tmp_path)
    assert status.end() == ExitCode.OK
    report = json.loads(status.out)
    assert (report["state"], report["step"], report["total_steps"]) == ("finished", 10, 10)
    logs = Command("logs", "own-script-1", "--rank", "1", cwd=tmp_path)
    assert logs.end() == ExitCode.OK
    assert "Rank: 1" in logs.out


def test_its_environment_is_that_of_torchrun(tmp_path: Path, own: RunDir) -> None:
    file = write_probe(tmp_path, "end", "--lr", "4e-4")
    command = Command("train", str(file), cwd=tmp_path)
    assert command.end() == ExitCode.OK, command.err
    ours = [json.loads((tmp_path / f"began-{rank}-0").read_text()) for rank in range(2)]
    subprocess.run(
        [*TORCHRUN, "--max_restarts=3", "probe.py", "end", "--lr", "4e-4"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": ours[0]["env"]["OMP_NUM_THREADS"]},
        check=True,
        capture_output=True,
        timeout=DEADLINE_S,
    )
    theirs = [json.loads((tmp_path / f"began-{rank}-0").read_text()) for rank in range(2)]
    own_values = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"}
    own_values |= {"TORCHELASTIC_USE_AGENT_STORE", "_"}
    for mine, real in zip(ours, theirs, strict=True):
        assert mine["argv"] == real["argv"] == ["probe.py", "end", "--lr", "4e-4"]
        assert mine["cwd"] == real["cwd"] == str(tmp_path)
        added = set(mine["env"]) - set(real["env"])
        assert added <= {"ISLES_RUN_DIR", "ISLES_ATTEMPT", "GLOO_SOCKET_IFNAME"} | {
            "NCCL_SOCKET_IFNAME"
        }
        assert set(real["env"]) - set(mine["env"]) == set()
        differ = {k for k, v in real["env"].items() if mine["env"][k] != v} - own_values
        assert differ == set()
        assert mine["env"]["ISLES_RUN_DIR"] == str(own.path)
    assert (read_record(own.attempt(1).outcome) or {})["state"] == "finished"


def test_an_error_names_the_rank_and_the_line(tmp_path: Path, own: RunDir) -> None:
    command = Command("train", str(write_probe(tmp_path, "fail")), cwd=tmp_path)
    assert command.end() == ExitCode.TRAINING
    line = PROBE.splitlines().index('    raise ValueError("the data is odd")') + 1
    assert "error: probe.py failed: ValueError: the data is odd" in command.err
    assert f"{tmp_path}/probe.py:{line}, rank 1 on" in command.err
    assert "in fail" in command.err  # the end of its traceback
    # So soon after its start it would only come again.
    assert not (tmp_path / "began-0-1").exists()
    assert not Path(f"/proc/{script_pid(own, 0)}").exists()


@pytest.mark.long
def test_an_error_is_told_while_another_rank_still_takes_its_time(
    tmp_path: Path, own: RunDir
) -> None:
    file = write_probe(tmp_path, "fail-alone")
    os.mkfifo(tmp_path / "go")
    command = Command("train", str(file), "checkpoint.timeout=60s", cwd=tmp_path)
    command.until((tmp_path / "began-0-0").exists)
    (tmp_path / "go").write_text("it refuses to end from now on")
    command.until(own.attempt(1).outcome.exists)
    slow = script_pid(own, 0)
    assert Path(f"/proc/{slow}").exists(), "it refuses to end"
    error = (read_record(own.attempt(1).outcome) or {})["error"]
    assert error["rank"] == 1 and "the data is odd" in error["what"]
    os.kill(slow, signal.SIGKILL)
    assert command.end() == ExitCode.TRAINING


def test_a_killed_rank_is_started_again(tmp_path: Path, own: RunDir) -> None:
    command = Command("train", str(write_probe(tmp_path, "wait")), cwd=tmp_path)
    command.until(lambda: began(tmp_path))
    os.kill(script_pid(own, 1), signal.SIGKILL)
    assert command.end() == ExitCode.OK, command.err
    assert began(tmp_path, restart=1)
    restart = read_record(own.attempt(1).restart(1)) or {}
    assert "rank 1 on" in restart["text"]
    assert "was killed by SIGKILL" in restart["text"]
    assert "restart 1 of 3" in restart["text"]
    assert "---- restart 1 ----" in own.attempt(1).rank_log(0).read_text()


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("obey", "asked to stop; the script ended with exit code 0"),
        ("wait", "the script does not handle SIGTERM, and saved nothing for it"),
        ("refuse", "had not ended 1 s after SIGTERM, and was killed"),
    ],
)
def test_stop_is_a_sigterm(tmp_path: Path, own: RunDir, how: str, reason: str) -> None:
    file = write_probe(tmp_path, how)
    command = Command("train", str(file), "checkpoint.timeout=1s", cwd=tmp_path)
    command.until(lambda: began(tmp_path))
    pids = [script_pid(own, rank) for rank in range(2)]
    stop = Command("stop", "own-1", cwd=tmp_path)
    assert stop.end() == ExitCode.OK, stop.err
    assert command.end() == ExitCode.REQUEUE
    assert (tmp_path / "saved-1-0").exists() == (how == "obey")
    outcome = read_record(own.attempt(1).outcome) or {}
    assert outcome["state"] == "stopped"
    assert reason in outcome["reason"]
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def agent_pid(run_dir: RunDir) -> int:
    return int((read_record(run_dir.attempt(1).launch) or {}).get("pid", 0))


def starts(folder: Path) -> bool:
    """Whether the first process of a script is there; not that it runs, or is on record."""
    return any("probe.py" in process.info["cmdline"] for process in processes_of(folder))


@pytest.mark.parametrize("moment", [starts, began])
def test_nothing_is_left_when_the_agent_is_killed(
    tmp_path: Path, own: RunDir, moment: Callable[[Path], bool]
) -> None:
    command = Command("train", str(write_probe(tmp_path, "refuse")), cwd=tmp_path)
    # Before the agent's record there is the claim of the command that starts it.
    command.until(lambda: agent_pid(own) not in (0, command.process.pid))
    command.until(lambda: moment(tmp_path))
    if moment is began:  # whoever sees a script's work finds it on record
        assert all(psutil.pid_exists(script_pid(own, rank)) for rank in range(2))
    os.kill(agent_pid(own), signal.SIGKILL)
    assert command.end() == ExitCode.TRAINING
    left = processes_of(tmp_path)
    assert psutil.wait_procs(left, timeout=DEADLINE_S)[1] == []
    assert processes_of(tmp_path) == []


def test_a_script_that_is_not_there(tmp_path: Path, own: RunDir) -> None:
    file = write_probe(tmp_path, "end")
    (tmp_path / "probe.py").rename(tmp_path / "prode.py")
    command = Command("train", str(file), cwd=tmp_path)
    assert command.end() == ExitCode.USER
    assert (
        f"run.yaml:2 training.script: there is no such script: {tmp_path}/probe.py" in command.err
    )
    assert "did you mean prode.py?" in command.err
    assert not own.path.exists()


MEETING = """\
import os
from pathlib import Path

import torch
import torch.distributed as dist

Path(os.environ["PROBE_DIR"], f"port-{os.environ['RANK']}").write_text(os.environ["MASTER_PORT"])
dist.init_process_group("gloo")
ranks = torch.tensor([1 + dist.get_rank()])
dist.all_reduce(ranks)
print("together", ranks.item())
dist.destroy_process_group()
"""


@pytest.mark.long
def test_on_two_nodes_its_ranks_meet_at_the_first_try(tmp_path: Path, own: RunDir) -> None:
    (tmp_path / "meet.py").write_text(MEETING)
    file = tmp_path / "run.yaml"
    file.write_text(
        "name: own\ntraining: {script: meet.py}\nclusters: [{nodes: 2, gpus_per_node: 1}]\n"
    )
    command = Command("train", str(file), cwd=tmp_path)
    assert command.end() == ExitCode.OK, command.err
    attempt = own.attempt(1)
    assert (read_record(attempt.outcome) or {})["state"] == "finished"
    assert not attempt.restart(1).exists()
    ports = {(tmp_path / f"port-{rank}").read_text() for rank in range(2)}
    assert len(ports) == 1 and ports != {"0"}
    assert all("together 3" in attempt.rank_log(rank).read_text() for rank in range(2))


@pytest.mark.long
def test_what_it_has_started_ends_with_it_when_it_is_stopped_now(
    tmp_path: Path, own: RunDir
) -> None:
    (tmp_path / "busy.py").write_text(
        "import os, subprocess, signal\nfrom pathlib import Path\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        "part = Path(os.environ['PROBE_DIR'], 'part')\npart.write_text(str(child.pid))\n"
        "part.rename(part.with_name('child'))\nsignal.pause()\n"
    )
    file = tmp_path / "run.yaml"
    file.write_text("name: own\ntraining: {script: busy.py}\nclusters: [{gpus_per_node: 1}]\n")
    command = Command("train", str(file), cwd=tmp_path)
    command.until((tmp_path / "child").exists)
    child = psutil.Process(int((tmp_path / "child").read_text()))
    stop = Command("stop", "own-1", "--now", cwd=tmp_path)
    assert stop.end() == ExitCode.OK, stop.err
    child.wait(DEADLINE_S)
    command.end()


@pytest.mark.long
def test_a_script_that_hangs_is_found_out(tmp_path: Path, own: RunDir) -> None:
    """Stacks can be had at any time; a frozen rank is named, and ends the run if that is asked."""
    file = write_probe(tmp_path, "wait")
    attempt = own.attempt(1)
    command = Command("train", str(file), "watchdog.max_silence=6s", cwd=tmp_path)
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
    status = Command("status", "own-1", cwd=tmp_path)
    assert status.end() == ExitCode.OK
    assert "no rank has printed or reported anything" in " ".join(status.out.split())
    (attempt.path / "stacks").touch()
    command.until((attempt.hangs / "asked-1-rank-1.txt").exists)
    stop = Command("stop", "own-1", "--now", cwd=tmp_path)
    assert stop.end() == ExitCode.OK, stop.err
    command.end()
    assert "note: no rank has printed" in command.out

    overrides = ("watchdog.max_silence=6s", "watchdog.action=stop", "clusters.0.max_restarts=0")
    for path in tmp_path.glob("began-*"):
        path.unlink()
    command = Command("train", str(file), *overrides, "name=frozen", cwd=tmp_path)
    command.until(lambda: began(tmp_path))
    frozen = RunDir(tmp_path / "runs" / "frozen-1")
    scripts = [psutil.Process(script_pid(frozen, rank)) for rank in range(2)]
    scripts[1].suspend()
    assert command.end() == ExitCode.COMMUNICATION, command.err
    assert f"rank 1 on {os.uname().nodename}: it is frozen" in command.err
    assert psutil.wait_procs(scripts, timeout=DEADLINE_S)[1] == []
