"""`launcher: ssh` on hosts with a real sshd: one command, the same weights as on one machine."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from shlex import quote
from typing import Any

import pytest
import torch

from isles.errors import ExitCode
from isles.run.checkpoints import list_checkpoints
from isles.run.paths import RunDir
from isles.run.records import read_record
from isles.run.remote import list_remotes
from tests.dist.test_same_mathematics import weights_of
from tests.lab.home import (
    HOSTS,
    QUOTED_PYTHON,
    assert_nothing_left,
    end,
    isles,
    left,
    outcome_of,
    sh,
    signal_all,
    until,
    until_step,
    write_run,
)
from tests.lab.hosts import Lab
from tests.runs import losses_of

FAR = ("--output-dir", "/root/runs")

# A process that a run's record names, and nothing more.
SLEEPER = """
import os, signal
from pathlib import Path
from isles.run.begin import new_attempt, write_launch
from isles.run.process import ProcessId
from tests.runs import bare_run
me, attempt = ProcessId.of(os.getpid()), new_attempt(bare_run(Path("runs/sync-1")))
write_launch(attempt, me, world_size=1, device="cpu", command=())
print(me.pid, flush=True)
signal.pause()
"""


@pytest.fixture(scope="module")
def lab(lab: Lab) -> Lab:
    # a2 prints a banner and its .bashrc talks; a3 is behind a1, under a name of ~/.ssh/config.
    sh(lab, "a2", "echo 'Welcome to a2' > /etc/lab/banner; echo 'echo hello' > /root/.bashrc")
    sh(lab, "a2", "echo 'Banner /etc/lab/banner' >> /etc/lab/sshd_config; kill -HUP 1")
    jump = "Host attic\n  HostName a3\n  ProxyJump a1\n"
    sh(lab, "ctl", f"printf '{jump}' | cat - ~/.ssh/config > x && cat x > ~/.ssh/config")
    # Login shells of which none is bash.
    for host, shell in (("a1", "/bin/csh"), ("a3", "/usr/bin/fish")):
        sh(lab, host, f"usermod -s {shell} root")
    return lab


def test_three_hosts_train_as_one_machine(lab: Lab) -> None:
    """Ranks in the order of the list, unequal hosts, a run directory on the first one's own disk;
    nobody watches: the command has left."""
    three = ["a2", "attic", {"ssh": "a1", "gpus": 2}]
    write_run(lab, "three", hosts=three, output_dir="/root/runs")
    text = isles(lab, "train", "three.yaml", "--detach")
    assert "4 CPU processes on 3 hosts (a2: 10.77.1.2, 1 rank, attic: 10.77.1.3, 1 rank" in text
    run_dir = RunDir(lab.root("a2") / "root" / "runs" / "three-1")
    attempt = run_dir.attempt(1)
    assert outcome_of(attempt)["state"] == "finished"
    losses = losses_of(run_dir)
    assert len(losses) == 20 and losses[-1] < losses[0] - 0.2
    launch = read_record(attempt.launch) or {}
    assert launch["launcher"] == "ssh" and launch["hosts"] == ["a2", "attic", "a1"]
    assert [node["host"] for node in launch["nodes"]] == ["a2", "a3", "a1"]
    remotes = [(r.ssh, r.path) for r in list_remotes(lab.root("ctl") / "root" / "runs")]
    assert remotes.count(("a2", "/root/runs/three-1")) == 1
    assert_nothing_left(lab)

    alone = ("name=alone", "clusters=[{gpus_per_node: 4}]", "output_dir=/shared/runs")
    isles(lab, "train", "three.yaml", *alone, host="a1")
    ours, theirs = weights_of(run_dir), weights_of(RunDir(lab.shared / "runs" / "alone-1"))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_dry_run_names_the_commands_and_starts_nothing(lab: Lab) -> None:
    write_run(lab, "dry", environment={"variables": {"WORD": "a b"}}, network={"port": 29555})
    text = isles(lab, "train", "dry.yaml", "--dry-run")
    assert "this would be a new run: dry-1" in text
    assert "export WORD='a b'" in text and "cd /shared || exit 1" in text
    cores = len(os.sched_getaffinity(0))
    for node, host in enumerate(HOSTS):
        assert f"then on {host}: {lab.address(host)}, 1 rank" in text
        tail = "-m isles.agent /shared/runs/dry-1 --attempt 1" + f" --node {node}" * bool(node)
        variables = f"GLOO_SOCKET_IFNAME=eth0 OMP_NUM_THREADS={cores}"
        assert f"env {variables} {QUOTED_PYTHON} {tail}" in text
    fp8 = ("train", "dry.yaml", "--dry-run", "training.precision=fp8-mixed")
    assert "is missing on the CPUs of this run" in isles(lab, *fp8, expected=ExitCode.USER)
    assert not (lab.shared / "runs" / "dry-1").exists()
    assert not left(lab)


def test_a_taken_port_is_not_used(lab: Lab) -> None:
    listen = "import socket; s = socket.create_server(('', 29500)); print('taken', flush=True)"
    wait = "import sys; sys.stdin.read()"
    command = [sys.executable, "-c", f"{listen}; {wait}"]
    listener = lab.popen("a1", command, stdin=subprocess.PIPE)
    assert listener.stdout is not None and listener.stdout.readline() == b"taken\n"
    try:
        write_run(lab, "port")
        text = isles(lab, "train", "port.yaml", "--dry-run", expected=None)
        assert "with the coordinator at 10.77.1.1 port 29501" in text
    finally:
        end(listener)


@pytest.mark.long
def test_each_host_may_have_a_user_of_its_own(lab: Lab) -> None:
    """The run directory is in the home of each; a killed run goes on with other hosts."""
    python = Path(sys.executable)
    above = shlex.join(map(str, [*python.parents, *python.resolve().parents]))
    for host, user in (("a1", "ann"), ("a2", "bob")):
        # Others may pass the homes on the way to this Python.
        sh(lab, host, f'for d in {above}; do chmod o+x "$d"; done')
        sh(lab, host, f"useradd -m {user}; usermod -p '*' {user}; cd /home/{user}; mkdir .ssh w")
        sh(lab, host, f"cd /home/{user}; cp /root/.ssh/authorized_keys .ssh; chown -R {user}: .")
    files = {"data.sources.0.path": "/shared/words.jsonl", "model.name_or_path": "/shared/tiny"}
    values = [f"{key}={value}" for key, value in files.items()]
    more = {"workdir": "~/w", "output_dir": "runs", "training": {"max_steps": 100_000}}
    write_run(lab, "users", hosts=["ann@a1", "bob@a2"], **more)
    values.append("checkpoint.every_steps=2")
    isles(lab, "train", "users.yaml", "--detach", *values)
    run_dir = RunDir(lab.root("a1") / "home/ann/w/runs/users-1")
    until(lambda: list_checkpoints(run_dir), "a checkpoint")
    assert read_record(lab.root("a2") / "home/bob/w/runs/users-1/node-of.json")
    assert "[a2 rank 1]" in isles(lab, "logs", "users", "--node", "1")
    for host in ("a1", "a2"):
        signal_all(lab, host, signal.SIGKILL, "-m", "isles.agent")
    assert "killed" in isles(lab, "status", "users-1@ann@a1")

    hosts = "clusters.0.launcher.hosts="
    text = isles(lab, "train", "users.yaml", "--dry-run", *values, f"{hosts}[bob@a2]")
    assert "users-1 is on a1, its first host. Starting a new run, users-2" in text
    step = list_checkpoints(run_dir)[-1].step
    values += [f"{hosts}[ann@a1]", f"training.max_steps={step + 1}"]
    resume = ("train", "users.yaml", *values, "--resume")
    assert "no run 'w/runs/users-1'" in isles(lab, *resume, "w/runs/users-1", expected=1)
    text = isles(lab, *resume, "runs/users-1")
    assert f"step {step + 1}/{step + 1}" in text and f"step {step}/" not in text
    assert "  isles eval users-1@a1\n" in text


@pytest.mark.long
def test_files_travel_and_environments_are_compared(lab: Lab) -> None:
    """The hosts have no such folder, and no files: sync brings both."""
    sh(lab, "ctl", "mkdir -p /root/here/runs; cp -r /shared/tiny /shared/words.jsonl /root/here")
    write_run(lab, "sync", workdir="/root/there", sync={"paths": ["."]}, output_dir="runs")
    sh(lab, "ctl", "cp /shared/sync.yaml /root/here; touch /root/here/runs/mine")
    begin = f"cd /root/here && {QUOTED_PYTHON} -m isles"
    text = sh(lab, "ctl", f"{begin} train sync.yaml training.max_steps=0 2>&1 || true")
    assert "training.max_steps" in text and not left(lab), "nothing is copied for a wrong run file"
    text = sh(lab, "ctl", f"{begin} train sync.yaml --dry-run")
    assert (
        "would copy . to /root/there on every host; the folder does not exist yet on a1, a2, a3"
        in text
    )
    text = sh(lab, "ctl", f"{begin} setup sync.yaml clusters.0.workdir=/shared --check")
    assert "3 hosts are equal: python" in text
    command = f"{begin} train sync.yaml data.sources.0.path=no.jsonl 2>&1 || true"
    text = sh(lab, "ctl", command)
    assert "host a2: rsync does not work" in text and "make ~/.bashrc print only" in text
    sh(lab, "a2", "rm /root/.bashrc")
    text = sh(lab, "ctl", command)
    assert "copied to a2:/root/there: " in text
    assert "data.sources.0.path (on host a1): file not found: /root/there/no.jsonl" in text
    assert "did you mean words.jsonl?" in text
    assert sh(lab, "a3", "ls -A /root/there").split() == ["sync.yaml", "tiny", "words.jsonl"]
    # A run that is on its way keeps the files that it has.
    here = quote(str(Path(__file__).parents[2]))
    sleeper = f"PYTHONPATH={here} setsid {QUOTED_PYTHON} -c '{SLEEPER}'"
    sh(lab, "a1", f"cd /root/there; {sleeper} >/root/pid 2>&1 &")
    until(lambda: lab.root("a1").joinpath("root/pid").read_text(), "a run")
    sh(lab, "ctl", "touch /root/here/new")
    text = sh(lab, "ctl", f"{begin} train sync.yaml 2>&1 || true")
    assert "host a1: runs/sync-1: sync-1 is running on a1" in text and "isles stop sync-1" in text
    sh(lab, "a1", "kill $(cat /root/pid); [ ! -e /root/there/new ]")


@pytest.mark.long
def test_setup_installs_once_and_then_finds_it_ready(lab: Lab) -> None:
    """The packages that isles needs are there, by a .pth, as no host has a network to fetch them;
    isles itself is not."""
    write_run(lab, "fresh", hosts=["a3"], environment={"venv": "/root/fresh"})
    sh(lab, "a3", f"{QUOTED_PYTHON} -m venv --without-pip /root/fresh")
    where = "/root/fresh/bin/python -c 'import site; print(site.getsitepackages()[0])'"
    site = sh(lab, "a3", where)
    sh(lab, "a3", f"echo {Path(torch.__file__).parents[1]} > {site.strip()}/these.pth")
    text = isles(lab, "setup", "fresh.yaml", "--check", expected=ExitCode.PREFLIGHT)
    assert "host a3: isles is not installed for /root/fresh" in text
    text = isles(lab, "setup", "fresh.yaml")
    assert "a3: installing isles and its packages into /root/fresh" in text
    assert "a3: installed" in text and "ready: python 3." in text
    look = "cd / && /root/fresh/bin/python -c 'import isles; print(isles.__file__)'"
    assert sh(lab, "a3", look).startswith("/root/fresh/")
    text = isles(lab, "setup", "fresh.yaml")
    assert "installing" not in text and "a3: was ready" in text, text


@pytest.mark.long
def test_a_frozen_rank_is_named_with_its_host(lab: Lab) -> None:
    """No common disk: the decision and the stacks of all hosts lie on the head all the same, also
    where the head's own rank is the one that is frozen."""
    run_dir = RunDir(lab.root("a1") / "root/runs/frozen-1")
    write_run(lab, "frozen", output_dir="/root/runs", training={"max_steps": 1_000_000})
    quick = ("watchdog.min_time=3s", "watchdog.slow_factor=2")
    isles(lab, "train", "frozen.yaml", *quick, "--detach")
    attempt = run_dir.attempt(1)
    until_step(attempt, 6)

    def freeze(rank: int) -> tuple[dict[str, Any], str]:
        """Freeze one rank until a new decision is on the head; the decision and the pid."""
        host, before = HOSTS[rank], set(attempt.hangs.glob("step-?*.json"))
        record = RunDir(lab.root(host) / "root/runs/frozen-1").attempt(1).rank_record(rank)
        pid = str((read_record(record) or {})["pid"])
        sh(lab, host, f"kill -STOP {pid}")

        def decision() -> dict[str, Any] | None:
            paths = set(attempt.hangs.glob("step-?*.json")) - before
            found = (read_record(path) or {} for path in paths)
            return next((entry for entry in found if entry.get("root_causes") == [rank]), None)

        return until(decision, f"a decision on rank {rank}"), pid

    stall, pid = freeze(2)
    assert "no heartbeat from rank 2 on a3 for" in stall["text"]
    stacks = [attempt.hangs / f"step-{stall['step']}-rank-{rank}.txt" for rank in (0, 1)]
    until(lambda: all(path.exists() for path in stacks), "the stacks of a1 and a2")
    assert stacks[1].read_text().startswith("rank 1 on a2, step ")
    status = isles(lab, "status", "frozen-1", *FAR)
    assert "no heartbeat from rank 2 on a3 for" in " ".join(status.split())
    sh(lab, "a3", f"kill -CONT {pid}")
    went_on = attempt.hangs / f"step-{stall['step']}.json"
    until(lambda: (read_record(went_on) or {})["went_on_after_s"], "it goes on")

    stall, pid = freeze(0)
    assert "no heartbeat from rank 0 on a1 for" in stall["text"]
    until(lambda: "rank 0 on a1 has not" in run_dir.status.read_text(), "a note")
    sh(lab, "a1", f"kill -CONT {pid}")
    isles(lab, "stop", "frozen-1", "--now", *FAR)
    assert_nothing_left(lab)


SCRIPT = """\
import json, os, signal
from datetime import timedelta

import torch
import torch.distributed as dist

names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR")
print(json.dumps({name: os.environ[name] for name in names}))
dist.init_process_group("gloo", timeout=timedelta(seconds=200))
total = torch.tensor([1 + dist.get_rank()])
dist.all_reduce(total)
print("sum", total.item(), flush=True)
signal.signal(signal.SIGTERM, lambda *_: (print("saving", flush=True), os._exit(0)))
while True:  # the signal that asks for the stacks ends a pause
    signal.pause()
"""


@pytest.mark.long
def test_a_script_of_your_own_on_three_hosts_and_its_logs(lab: Lab) -> None:
    (lab.shared / "mine.py").write_text(SCRIPT)
    more = {"training": {"script": "mine.py"}, "watchdog": {"max_silence": "4s"}}
    write_run(lab, "mine", output_dir="/root/runs", **more)
    isles(lab, "train", "mine.yaml", "--detach")
    attempt = RunDir(lab.root("a1") / "root/runs/mine-1").attempt(1)
    hosts = list(enumerate(HOSTS))
    # The hosts share no disk: a1 asks the others, and their stacks travel.

    def decision() -> Path | None:
        """That on the script's last line; where torch takes long to import, there is one before."""
        for path in attempt.hangs.glob("silence-*.json"):
            files = [path.with_name(f"{path.stem}-rank-{rank}.txt") for rank in range(3)]
            texts = [file.read_text() for file in files if file.exists()]
            begun = [text.partition(":15")[0] for text in texts]
            if begun == [f"rank {rank} on {host}, at shared/mine.py" for rank, host in hosts]:
                return path
        return None

    path = until(decision, "a decision on the last line of every rank")
    assert "no rank has printed or reported anything" in path.read_text()
    # Their logs are one stream, though they share no directory.
    logs = isles(lab, "logs", "mine-1", *FAR)
    for rank, host in hosts:
        place = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "3", "GROUP_RANK": str(rank)}
        assert f"[{host} rank {rank}] {json.dumps({**place, 'MASTER_ADDR': '10.77.1.1'})}" in logs
        assert f"[{host} rank {rank}] sum 6" in logs
    # The first host itself has no key for the others: it shows what it has.
    own = isles(lab, "logs", "/root/runs/mine-1", host="a1")
    assert "[a1 rank 0] sum 6" in own and "[a2 rank" not in own
    assert "the logs of node 1 are on a2" in own
    assert "mine-1" in isles(lab, "status", *FAR)
    isles(lab, "stop", "mine-1", *FAR)
    outcome = outcome_of(attempt)
    assert (outcome["state"], outcome["exit_code"]) == ("stopped", ExitCode.REQUEUE)
    assert "the script ended with exit code 0" in outcome["reason"]
    assert "[a3 rank 2] saving" in isles(lab, "logs", "mine-1", *FAR)
    assert_nothing_left(lab)
