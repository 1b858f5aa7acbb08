"""`isles check` over three hosts: all well, and one fault after another; each names its host."""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import dataclass
from typing import Any

import pytest

from isles.config.load import load_run_file
from isles.config.resolve import resolve
from isles.errors import ExitCode
from isles.run.begin import begin_run, new_attempt
from tests.deadline import DEADLINE_S
from tests.lab import home
from tests.lab.home import (
    HOSTS,
    ISLES,
    left,
    link_cut,
    other_torch,
    processes,
    sh,
    signal_all,
    undone,
    until,
)
from tests.lab.hosts import Lab
from tests.lab.slurm import slurm

SSH = {"kind": "ssh", "hosts": list(HOSTS), "connect_timeout": "2s"}
FAKETIME = "/usr/lib/*/faketime/libfaketime.so.1"


@dataclass(frozen=True)
class Report:
    """What `isles check --json` has said."""

    code: int
    findings: list[dict[str, Any]]

    def bad(self, finding_id: str) -> dict[str, dict[str, Any]]:
        """Warnings and errors of one id, by where; of several there the first, the worst."""
        found = [f for f in self.findings if f["id"] == finding_id and f["level"] != "ok"]
        return {finding["where"]: finding for finding in reversed(found)}

    def errors(self) -> set[tuple[str, str]]:
        """Every error: id and where."""
        return {(f["id"], f["where"]) for f in self.findings if f["level"] == "error"}


def write_run(lab: Lab, **cluster: Any) -> str:
    """A run file for the three hosts, as they see it."""
    training = {"max_steps": 3, "global_batch_size": 6}
    home.write_run(lab, "checked", output_dir="/root/out", training=training, **cluster)
    return "/shared/checked.yaml"


def check(lab: Lab, *args: str) -> Report:
    """Run the command on the laptop."""
    done = lab.run("ctl", [ISLES, "check", *args, "--json"])
    assert done.stdout, done.stderr
    return Report(done.returncode, json.loads(done.stdout)["findings"])


def test_all_is_well(lab: Lab) -> None:
    report = check(lab, write_run(lab))
    assert report.code == ExitCode.OK, report.findings
    assert not report.errors()
    seen = {finding["id"]: finding for finding in report.findings}
    assert {"reduce.works", "reduce.speed", "net.connect", "version.torch"} <= set(seen)
    assert seen["reduce.works"]["measured"] == "3 ranks"
    assert seen["files.shared"]["measured"] == "not shared"
    assert seen["files.data"]["where"] == "a1"
    for host in ("ctl", "a1"):  # for a plan here, and for who watches the run
        kept = json.loads(sh(lab, host, "cat /root/out/.links.json"))
        assert set(kept["pairs"]) == set(HOSTS) == set(kept["pairs"]["a1"]) | {"a1"}
        assert kept["pairs"]["a1"]["a2"]["bytes_per_s"] > 1e5
    assert not left(lab)


@pytest.mark.long
def test_hosts_that_cannot_be_asked(lab: Lab) -> None:
    """Key refused, switched off, named twice: each by name, and the others are still checked."""
    keys = "/root/.ssh/authorized_keys"
    # ~/.ssh/config of the laptop has a ConnectTimeout of its own; the command line wins.
    path = write_run(lab, launcher={**SSH, "hosts": ["a1", "10.77.1.1", "a2", "a3"]})
    with undone(lab, "a2", f"mv {keys} {keys}.away", f"mv {keys}.away {keys}"), link_cut(lab, "a3"):
        report = check(lab, path, "--no-net")
    assert report.code == ExitCode.PREFLIGHT
    refused, silent = report.bad("ssh.connect")["a2"], report.bad("ssh.connect")["a3"]
    assert refused["fix"] == "ssh-copy-id a2" and "refuses the key" in refused["text"]
    assert "ping a3" in silent["fix"]
    assert any(f["where"] == "a1" and f["id"] == "memory.free" for f in report.findings)
    twice = report.bad("host.duplicate")["10.77.1.1"]
    assert "a1 and 10.77.1.1 are one machine" in twice["text"]
    assert not left(lab)


@pytest.mark.long
def test_python_without_isles_and_a_host_that_hangs(lab: Lab) -> None:
    setup = ["case $(hostname) in a1) export PYTHONPATH=/nowhere;; a3) kill -STOP $$;; esac"]
    python = "/usr/bin/python3"
    path = write_run(lab, environment={"setup": setup, "python": python}, launcher=SSH)
    report = check(lab, path, "--timeout", "10s")
    assert report.code == ExitCode.PREFLIGHT
    assert "isles setup" in report.bad("isles.installed")["a1"]["fix"]
    assert python in report.bad("isles.installed")["a2"]["text"]
    assert "12 s" in report.bad("host.answers")["a3"]["text"]
    signal_all(lab, "a3", signal.SIGKILL)  # what is stopped cannot end itself


def test_what_is_wrong_on_single_hosts(lab: Lab) -> None:
    """A full disk, little /dev/shm, another torch, a clock an hour ahead, a leased address."""
    disk = "mkdir -p /root/out && mount -t tmpfs -o size=4m tmpfs /root/out && "
    disk += "head -c 4m /dev/zero > /root/out/fill || true"
    memory = "mount -o remount,size={} /dev/shm"
    lease = "ip addr change 10.77.1.3/16 dev eth0 valid_lft {0} preferred_lft {0}"
    clock = f"case $(hostname) in a2) export LD_PRELOAD=$(echo {FAKETIME}) FAKETIME=+1h "
    clock += "FAKETIME_DONT_FAKE_MONOTONIC=1;; esac"
    path = write_run(lab, environment={"setup": [clock]})
    with (
        undone(lab, "a1", disk, "umount /root/out"),
        undone(lab, "a3", memory.format("16m"), memory.format("1g")),
        undone(lab, "a3", lease.format(3600), lease.format("forever")),
        other_torch(lab, "a2"),
    ):
        report = check(lab, path, "--no-net")
    assert report.code == ExitCode.PREFLIGHT
    faults = {"disk.free": "a1", "shm.size": "a3", "version.torch": "a2", "clock.skew": "a2"}
    assert report.errors() == set(faults.items())
    assert report.bad("disk.free")["a1"]["measured"] == "0 B"
    assert "remount" in report.bad("shm.size")["a3"]["fix"]
    assert abs(float(report.bad("clock.skew")["a2"]["measured"].split()[0]) - 3600) < 5
    torch = report.bad("version.torch")["a2"]
    assert torch["measured"] == "2.11.0" and "on a1, a3" in torch["text"]
    assert "isles setup" in torch["fix"]
    assert "netplan" in report.bad("address.dhcp")["a3"]["fix"]


@pytest.mark.long
def test_ports_that_are_blocked_one_way(lab: Lab) -> None:
    """a2 drops what a1 opens, a1 rejects what a3 opens; a smaller MTU."""
    table = "nft add table inet check && nft add chain inet check in "
    table += "'{ type filter hook input priority 0; }' && nft add rule inet check in ip saddr "
    opens = " tcp dport != 22 tcp flags '&' '(syn|ack)' == syn "
    all_well = "nft delete table inet check"
    mtu = "ip link set eth0 mtu {}"
    with (
        undone(lab, "a2", f"{table} 10.77.1.1 {opens} drop", all_well),
        undone(lab, "a1", f"{table} 10.77.1.3 {opens} reject with tcp reset", all_well),
        undone(lab, "a3", mtu.format(1300), mtu.format(1500)),
    ):
        report = check(lab, write_run(lab))
    assert report.errors() == {("net.connect", "a1 -> a2"), ("net.connect", "a3 -> a1")}
    dropped = report.bad("net.connect")["a1 -> a2"]
    assert "drops packets" in dropped["text"] and "the firewall of a2" in dropped["text"]
    assert "on a2: sudo nft" in dropped["fix"] and "10.77.0.0/16" in dropped["fix"]
    assert "refused" in report.bad("net.connect")["a3 -> a1"]["text"]
    assert "was skipped" in report.bad("reduce.works")["all hosts"]["text"]
    assert "1300" in report.bad("net.mtu")["a3"]["text"]
    assert not left(lab)


@pytest.mark.long
def test_a_laptop_that_dies_leaves_nothing_behind(lab: Lab) -> None:
    process = lab.popen("ctl", [ISLES, "check", write_run(lab)])
    rank = ("-m", "isles.train.check_rank")
    until(lambda: any(processes(lab, host, *rank) for host in HOSTS), "ranks of the check")
    signal_all(lab, "ctl", signal.SIGKILL, ISLES, "check")
    process.communicate(timeout=DEADLINE_S)
    until(lambda: not left(lab), "the end of every process of the check")


@pytest.mark.long
def test_nodes_of_a_job_that_do_not_come_are_named(lab: Lab) -> None:
    """A check in a job of which all nodes come is in the tests of both queues."""
    write_run(lab, device="cpu")
    loaded = load_run_file(lab.shared / "checked.yaml", [f"output_dir={lab.shared / 'out'}"])
    new_attempt(begin_run(resolve(loaded, nproc=(1, 1), device="cpu"), loaded.text, "no").run_dir)
    step = [sys.executable, "-m", "isles.check.step", "/shared/out/checked-1", "--attempt", "1"]
    step += ["--hosts", "a1,a2", "--master", "10.77.1.1:29500", "--timeout", "1", "--node"]
    alone = lab.run("a1", [*step, "0"])
    assert alone.returncode == ExitCode.PREFLIGHT
    assert "a2 (node 1)" in alone.stdout
    lost = lab.run("a2", [*step, "1"])
    assert lost.returncode == ExitCode.PREFLIGHT
    assert "first node was not reached within 1 s" in lost.stderr
    assert not left(lab)


@pytest.mark.long
def test_slurm_by_its_login_node(lab: Lab) -> None:
    """A drained node by name and reason, too long a time, and GPUs that no node has."""
    launcher = {"kind": "slurm", "partition": "main", "login": "a1", "time": "1h"}
    path = write_run(lab, launcher=launcher, nodes=3, gpus_per_node=1)
    with slurm(lab):
        well = check(lab, path)
        sh(lab, "ctl", "scontrol update NodeName=a3 State=DRAIN Reason=fan")
        sh(lab, "ctl", "scontrol update PartitionName=main MaxTime=30")
        report = check(lab, path, "clusters.0.gpus_per_node=9")
        here = ["clusters.0.launcher.login=null", "clusters.0.device=cpu", "clusters.0.nodes=2"]
        here += ["clusters.0.launcher.time=20m", "output_dir=/shared", "clusters.0.workdir=/shared"]
        inside = check(lab, path, *here, "--in-job")
    assert well.code == ExitCode.OK, well.findings
    asked = {finding["id"] for finding in well.findings}
    assert {"queue.nodes", "queue.gres", "files.output", "version.torch"} <= asked
    assert {where for _, where in report.errors()} == {"a1"}
    assert {"queue.nodes", "queue.time", "queue.gres"} <= set(dict(report.errors()))
    assert inside.code == ExitCode.OK, inside.findings
    whole = {f["id"]: f for f in inside.findings}["reduce.works"]
    assert whole["measured"] == "2 ranks"
    assert not list(lab.shared.glob(".isles-check-*"))
    assert "a3 is drained (fan)" in report.bad("queue.nodes")["a1"]["text"]
