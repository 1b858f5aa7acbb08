"""`isles check` over three hosts: all well, and one fault after another; each names its host."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
import yaml

from isles.errors import ExitCode
from tests.deadline import DEADLINE_S
from tests.lab.home import HOSTS, ISLES, sh, until
from tests.lab.hosts import Lab, hosts
from tests.lab.slurm import slurm

SITE = Path(str(distribution("torch").locate_file("")))
FAKETIME = "/usr/lib/*/faketime/libfaketime.so.1"


@dataclass(frozen=True)
class Report:
    """What `isles check --json` has said."""

    code: int
    findings: list[dict[str, Any]]
    seconds: float

    def bad(self, finding_id: str) -> dict[str, dict[str, Any]]:
        """Warnings and errors of one id, by where."""
        found = [f for f in self.findings if f["id"] == finding_id and f["level"] != "ok"]
        return {finding["where"]: finding for finding in found}

    def errors(self) -> set[tuple[str, str]]:
        """Every error: id and where."""
        return {(f["id"], f["where"]) for f in self.findings if f["level"] == "error"}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with hosts(tmp_path_factory.mktemp("check"), 3) as lab:
        yield lab


def write_run(lab: Lab, **cluster: Any) -> str:
    """A run file for the three hosts, as they see it."""
    launcher = cluster.pop("launcher", {})
    if "kind" not in launcher:
        launcher = {"kind": "ssh", "hosts": list(HOSTS), **launcher}
    content = {
        "name": "checked",
        "output_dir": "/root/out",
        "model": {"name_or_path": "llama-2m", "init": "scratch"},
        "tokenizer": {"train_vocab_size": 300},
        "data": {"sources": [{"path": "/shared/words.txt"}], "seq_length": 64},
        "training": {"max_steps": 3, "global_batch_size": 6, "learning_rate": 0.001},
        "clusters": [{"launcher": launcher, "workdir": "/root", **cluster}],
    }
    (lab.shared / "words.txt").write_text("a few words\n")
    (lab.shared / "run.yaml").write_text(yaml.safe_dump(content))
    return "/shared/run.yaml"


def check(lab: Lab, *args: str, deadline_s: float = DEADLINE_S) -> Report:
    """Run the command on the laptop."""
    done = lab.run("ctl", [ISLES, "check", *args, "--json"], timeout_s=deadline_s)
    assert done.stdout, done.stderr
    answer = json.loads(done.stdout)
    return Report(done.returncode, answer["findings"], answer["summary"]["seconds"])


def left(lab: Lab) -> Sequence[str]:
    """Processes of isles that are still on a host."""
    found = []
    for host in HOSTS:
        text = lab.run(host, ["pgrep", "-af", "isles[.]|check_rank"]).stdout
        found += [f"{host}: {line}" for line in text.splitlines()]
    return found


def test_all_is_well(lab: Lab) -> None:
    report = check(lab, write_run(lab))
    assert report.code == ExitCode.OK, report.findings
    assert not report.errors()
    seen = {finding["id"]: finding for finding in report.findings}
    assert {"reduce.works", "reduce.speed", "net.connect", "version.torch"} <= set(seen)
    assert seen["reduce.works"]["measured"] == "3 ranks"
    assert seen["files.shared"]["measured"] == "not shared"
    assert seen["files.data"]["where"] == "a1"
    assert not left(lab)


@pytest.mark.long
def test_hosts_that_cannot_be_asked(lab: Lab) -> None:
    """Key refused, switched off, named twice: each by name, and the others are still checked."""
    keys = "/root/.ssh/authorized_keys"
    sh(lab, "a2", f"mv {keys} {keys}.away")
    lab.link("a3", "cut")
    try:
        # ~/.ssh/config of the laptop has a ConnectTimeout of its own; the command line wins.
        names = ["a1", "10.77.1.1", "a2", "a3"]
        path = write_run(lab, launcher={"hosts": names, "connect_timeout": "2s"})
        report = check(lab, path, "--no-net")
    finally:
        lab.link("a3", "restore")
        sh(lab, "a2", f"mv {keys}.away {keys}")
    assert report.code == ExitCode.PREFLIGHT
    refused, silent = report.bad("ssh.connect")["a2"], report.bad("ssh.connect")["a3"]
    assert refused["fix"] == "ssh-copy-id a2"
    assert "refuses the key" in refused["text"]
    assert "ping a3" in silent["fix"]
    assert any(f["where"] == "a1" and f["id"] == "memory.free" for f in report.findings)
    twice = report.bad("host.duplicate")["10.77.1.1"]
    assert "a1 and 10.77.1.1 are one machine" in twice["text"]
    assert not left(lab)


@pytest.mark.long
def test_python_without_isles_and_a_host_that_hangs(lab: Lab) -> None:
    setup = ["case $(hostname) in a1) export PYTHONPATH=/nowhere;; a3) kill -STOP $$;; esac"]
    python = "/usr/bin/python3"
    path = write_run(
        lab,
        environment={"setup": setup, "python": python},
        launcher={"connect_timeout": "2s"},
    )
    report = check(lab, path, "--timeout", "10s")
    assert report.code == ExitCode.PREFLIGHT
    assert "isles setup" in report.bad("isles.installed")["a1"]["fix"]
    assert python in report.bad("isles.installed")["a2"]["text"]
    assert "12 s" in report.bad("host.answers")["a3"]["text"]
    sh(lab, "a3", "kill -KILL $(pgrep -f isles[.]check)")  # what is stopped cannot end itself


def test_what_is_wrong_on_single_hosts(lab: Lab) -> None:
    """A full disk, little /dev/shm, another torch, a clock an hour ahead, a leased address."""
    sh(lab, "a1", "mkdir -p /root/out && mount -t tmpfs -o size=4m tmpfs /root/out")
    sh(lab, "a1", "head -c 4m /dev/zero > /root/out/fill || true")
    sh(lab, "a3", "mount -o remount,size=16m /dev/shm")
    sh(lab, "a3", "ip addr change 10.77.1.3/16 dev eth0 valid_lft 3600 preferred_lft 3600")
    metadata = next(SITE.glob("torch-*.dist-info")) / "METADATA"
    sh(lab, "a2", f"sed -i.kept 's/^Version: .*/Version: 2.11.0/' {metadata}")
    clock = f"case $(hostname) in a2) export LD_PRELOAD=$(echo {FAKETIME}) FAKETIME=+1h "
    clock += "FAKETIME_DONT_FAKE_MONOTONIC=1;; esac"
    try:
        report = check(lab, write_run(lab, environment={"setup": [clock]}), "--no-net")
    finally:
        sh(lab, "a1", "umount /root/out")
        sh(lab, "a3", "mount -o remount,size=1g /dev/shm")
        sh(
            lab,
            "a3",
            "ip addr change 10.77.1.3/16 dev eth0 valid_lft forever preferred_lft forever",
        )
        sh(lab, "a2", f"mv {metadata}.kept {metadata}")
    assert report.code == ExitCode.PREFLIGHT
    assert report.errors() == {
        ("disk.free", "a1"),
        ("shm.size", "a3"),
        ("version.torch", "a2"),
        ("clock.skew", "a2"),
    }
    assert report.bad("disk.free")["a1"]["measured"] == "0 B"
    assert "remount" in report.bad("shm.size")["a3"]["fix"]
    assert abs(float(report.bad("clock.skew")["a2"]["measured"].split()[0]) - 3600) < 5
    torch = [f for f in report.findings if f["id"] == "version.torch" and f["where"] == "a2"]
    assert torch[0]["measured"] == "2.11.0" and "on a1, a3" in torch[0]["text"]
    assert "isles setup" in torch[0]["fix"]
    assert "netplan" in report.bad("address.dhcp")["a3"]["fix"]


@pytest.mark.long
def test_ports_that_are_blocked_one_way(lab: Lab) -> None:
    """a2 drops what a1 opens, a1 rejects what a3 opens; a smaller MTU."""
    table = "nft add table inet check && nft add chain inet check in "
    table += "'{ type filter hook input priority 0; }' && nft add rule inet check in ip saddr "
    opens = " tcp dport != 22 tcp flags '&' '(syn|ack)' == syn "
    sh(lab, "a2", f"{table} 10.77.1.1 {opens} drop")
    sh(lab, "a1", f"{table} 10.77.1.3 {opens} reject with tcp reset")
    sh(lab, "a3", "ip link set eth0 mtu 1300")
    try:
        report = check(lab, write_run(lab))
    finally:
        for host in ("a1", "a2"):
            sh(lab, host, "nft delete table inet check")
        sh(lab, "a3", "ip link set eth0 mtu 1500")
    assert report.errors() == {("net.connect", "a1 -> a2"), ("net.connect", "a3 -> a1")}
    dropped = report.bad("net.connect")["a1 -> a2"]
    assert "packets are dropped" in dropped["text"]
    assert "the firewall of a2" in dropped["text"]
    assert "on a2: sudo nft" in dropped["fix"] and "10.77.0.0/16" in dropped["fix"]
    assert "refused" in report.bad("net.connect")["a3 -> a1"]["text"]
    assert "was not tried" in report.bad("reduce.works")["all hosts"]["text"]
    assert "1300" in report.bad("net.mtu")["a3"]["text"]
    assert not left(lab)


@pytest.mark.long
def test_a_laptop_that_dies_leaves_nothing_behind(lab: Lab) -> None:
    process = lab.popen("ctl", [ISLES, "check", write_run(lab)])
    until(lambda: any("check_rank" in line for line in left(lab)), "ranks of the check")
    sh(lab, "ctl", "kill -KILL $(pgrep -f 'isles chec[k]')")
    process.communicate(timeout=DEADLINE_S)
    until(lambda: not left(lab), "the end of every process of the check")


@pytest.mark.long
def test_the_step_of_a_job(lab: Lab) -> None:
    """Nodes that can reach one another only over TCP; then one of them does not come."""
    run_dir = lab.shared / "out" / "checked-1"
    attempt = run_dir / "attempts" / "001"
    attempt.mkdir(parents=True)
    path = write_run(lab, device="cpu")
    resolving = "import sys; from pathlib import Path; from isles.config.load import *; "
    resolving += "from isles.config.resolve import *; l = load_run_file(Path(sys.argv[1]), "
    resolving += "['output_dir=/shared/out']); Path(sys.argv[2]).write_text(dump_resolved("
    resolving += "resolve(l, nproc=(1, 1), device='cpu')))"
    resolved = "/shared/out/checked-1/resolved.yaml"
    assert lab.run("ctl", [sys.executable, "-c", resolving, path, resolved]).returncode == 0
    (run_dir / "run.yaml").write_text((lab.shared / "run.yaml").read_text())

    def step(node: int, *more: str) -> list[str]:
        base = [sys.executable, "-m", "isles.check.step", "/shared/out/checked-1"]
        return [*base, "--attempt", "1", "--node", str(node), "--hosts", "a1,a2", *more]

    master = ("--master", "10.77.1.1:29500")
    other = lab.popen("a2", step(1, *master))
    done = lab.run("a1", step(0, *master), timeout_s=DEADLINE_S)
    out, _ = other.communicate(timeout=DEADLINE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert other.returncode == 0, out
    record = json.loads((attempt / "check.json").read_text())
    assert record["summary"]["errors"] == 0
    ids = {finding["id"] for finding in record["findings"]}
    assert {"reduce.works", "net.connect", "files.shared"} <= ids

    alone = lab.run("a1", step(0, *master, "--timeout", "1"), timeout_s=DEADLINE_S)
    assert alone.returncode == ExitCode.PREFLIGHT
    assert "a2 (node 1)" in alone.stdout
    lost = lab.run("a2", step(1, *master, "--timeout", "1"), timeout_s=DEADLINE_S)
    assert lost.returncode == ExitCode.PREFLIGHT
    assert "first node was not reached within 1 s" in lost.stderr
    assert not left(lab)


@pytest.mark.long
def test_slurm_by_its_login_node(lab: Lab) -> None:
    """A drained node by name and reason, too long a time, and GPUs that no node has."""
    launcher = {"kind": "slurm", "partition": "main", "login": "a1", "time": "1h"}
    more = {"nodes": 3, "gpus_per_node": 1}
    path = write_run(lab, launcher=launcher, **more)
    with slurm(lab):
        well = check(lab, path)
        sh(lab, "ctl", "scontrol update NodeName=a3 State=DRAIN Reason=fan")
        sh(lab, "ctl", "scontrol update PartitionName=main MaxTime=30")
        report = check(lab, path, "clusters.0.gpus_per_node=9")
        here = ["clusters.0.launcher.login=null", "clusters.0.device=cpu", "clusters.0.nodes=2"]
        here += ["clusters.0.launcher.time=20m", "output_dir=/shared", "clusters.0.workdir=/shared"]
        inside = check(lab, path, *here, "--in-job")
    assert well.code == ExitCode.OK, well.findings
    assert {"queue.nodes", "queue.gres", "files.output", "version.torch"} <= {
        finding["id"] for finding in well.findings
    }
    assert {where for _, where in report.errors()} == {"a1"}
    assert {"queue.nodes", "queue.time", "queue.gres"} <= set(dict(report.errors()))
    assert inside.code == ExitCode.OK, inside.findings
    whole = {f["id"]: f for f in inside.findings}["reduce.works"]
    assert whole["measured"] == "2 ranks"
    assert not list(lab.shared.glob(".isles-check-*"))
    assert "a3 is drained (fan)" in report.bad("queue.nodes")["a1"]["text"]
