"""Findings from measured values and from what schedulers say: level, place, the line to type."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from isles.check.checks import network
from isles.check.checks.files import shared_findings
from isles.check.checks.links import bandwidth_findings
from isles.check.checks.machine import clock_skew
from isles.check.checks.network import bucket_finding, dial, dial_bucket, hub_finding
from isles.check.checks.ranks import reduce_findings, torch_findings
from isles.check.checks.versions import compare_versions
from isles.check.finding import IDS, Finding, exit_code, record, report_lines
from isles.check.plan import CheckedRun, Extent, NodePlan, error_finding
from isles.check.scheduler import queue_findings
from isles.check.verb import merge_equal, run_check
from isles.config.load import load_run_file
from isles.config.sections import cluster as sections
from isles.config.sections.outer import DiLoCoConfig
from isles.errors import PreflightError, UserError
from isles.facts.memory.architecture import Architecture
from isles.launch.ssh.shell import Shell
from tests.deadline import DEADLINE_S
from tests.documents import ROOT
from tests.each import each
from tests.programs import program


def facts(**own: Any) -> dict[str, Any]:
    """What a node would say of itself."""
    packages = {"torch": "2.13.0", "transformers": "5.23.0"}
    base = {"python": "3.11.7", "isles": "1.0", "missing": [], "executable": "python"}
    return {**base, "packages": packages | own.pop("packages", {}), **own}


def bad(findings: Iterable[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.level != "ok"]


def test_every_finding_has_a_row_in_the_documentation() -> None:
    page = (ROOT / "docs" / "checks.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `([\w.]+)` \| .+? \|$", page, re.M) == list(IDS)
    launch = ROOT / "src/isles/launch"
    files = [*(ROOT / "src/isles/check").rglob("*.py"), launch / "huggingface.py"]
    files += [launch / "ssh/channel.py", launch / "ssh/shell.py"]
    source = "".join(path.read_text() for path in files)
    dynamic = tuple(re.findall(r'f"(\w+\.)\{', source))
    unused = [id for id in IDS if source.count(f'"{id}"') < 2 and not id.startswith(dynamic)]
    assert unused == [], "never found"


def test_the_report_has_the_worst_first_and_its_fix() -> None:
    warning = Finding("shm.size", "warning", "a", "small")
    error = Finding("disk.free", "error", "a", "full", fix="make room")
    fine = Finding("os.kernel", "ok", "a", "Linux")
    assert (exit_code([fine, warning]), exit_code([fine, warning, error])) == (0, 2)
    saved = record([fine, warning, error], seconds=1.26)
    assert saved["summary"] == {"ok": 1, "warnings": 1, "errors": 1, "seconds": 1.3}
    lines = report_lines([fine, warning, error], ["a"], seconds=1.0, is_terminal=False)
    assert "\n".join(map(str, lines)).isascii()
    assert [str(line) for line in lines[-5:]] == [
        "XX disk.free  a: full",
        "    fix: make room",
        "!! shm.size  a: small",
        "",
        "a: 1 error, 1 warning, 1 ok, in 1.0 s",
    ]


def test_the_table_is_as_wide_as_its_values() -> None:
    system = "Debian GNU/Linux 12 (bookworm), Linux 6.1.0"

    def table(*hosts: str) -> str:
        found = [Finding("os.kernel", "ok", host, "Linux", system) for host in hosts]
        return "\n".join(map(str, report_lines(found, hosts, seconds=1.0, is_terminal=False)))

    assert table("a").count(system) == 1
    assert table("a", "b").count(f"{system[:15]}... ") == 1, "one beside the other"
    assert "Debian" not in table(*"abcdef")


@each(
    ({"python": "3.11.9"}, "version.python", "warning"),
    ({"python": "3.12.1"}, "version.python", "error"),
    ({"isles": "0.9"}, "version.isles", "error"),
    ({"packages": {"torch": "2.12.0"}}, "version.torch", "error"),
    ({"packages": {"transformers": "5.22.0"}}, "version.transformers", "warning"),
    ({"packages": {"peft": "0.21"}}, "version.packages", "warning"),
    ({"missing": ["torch"]}, "packages.missing", "error"),
)
def test_the_odd_one_out_is_named(own: dict[str, Any], finding_id: str, level: str):
    hosts = {"a": facts(), "b": facts(**own), "c": facts()}
    (found,) = bad(compare_versions(hosts, {}, {}, "1.0"))
    assert (found.id, found.level, found.where) == (finding_id, level, "b")
    assert found.fix
    if own.get("packages"):
        assert "on a, c" in found.text  # both values, and who has the other


def test_two_installations_of_torch_and_other_libraries() -> None:
    imported = {
        "a": {"torch": "2.13.0+cu128", "cuda": "12.8", "nccl": "2.27.3"},
        "b": {"torch": "2.9.0", "cuda": "12.6", "nccl": "2.26.2"},
    }
    hosts, drivers = {"a": facts(), "b": facts()}, {"a": "570", "b": "550"}
    found = bad(compare_versions(hosts, imported, drivers, "1.0"))
    ids = ["version.cuda", "version.nccl", "version.driver", "version.torch"]
    assert [f.id for f in found if f.where == "b"] == ids and len(found) == 4
    assert "two versions are installed" in found[-1].text
    drivers = {"a": "470.256.02", "b": "550.54.15"}
    found = bad(compare_versions(hosts, imported, drivers, "1.0"))
    (old,) = [f for f in found if f.level == "error" and f.id == "version.driver"]
    assert old.where == "a" and "needs driver 525" in old.text


def test_the_clock_of_the_laptop_is_not_blamed_on_the_hosts() -> None:
    ahead = {"a": (3600.0, 0.01), "b": (0.001, 0.01), "c": (0.0, 0.01)}
    (found,) = bad(clock_skew(ahead))
    assert (found.where, found.level) == ("a", "error")
    all_ahead = dict.fromkeys("abc", (3600.0, 0.01))
    assert not bad(clock_skew(all_ahead)), "it is this machine's clock that is wrong"
    assert not bad(clock_skew({"a": (4.0, 8.0), "b": (0.0, 0.1)})), "a slow trip proves nothing"


def test_a_wheel_without_kernels_for_the_card() -> None:
    said = "RuntimeError: CUDA error: no kernel image is available for execution"
    rank = {"torch": "2.5.1+cu121", "cuda": "12.1", "stage": "kernel", "failure": said}
    rank |= {"gpu": "RTX 5070 Ti", "capability": [12, 0], "archs": ["sm_80", "sm_90"]}
    plan = NodePlan("a", device="cuda")
    (found,) = torch_findings(plan, [rank])
    assert (found.id, found.measured, found.limit) == ("gpu.kernel", "sm_120", "sm_80 sm_90")
    assert "/whl/cu128" in found.fix
    assert "/whl/cu126" in next(torch_findings(plan, [{**rank, "capability": [6, 1]}])).fix


def test_gpus_that_only_emulate_bf16_are_named() -> None:
    new = {"torch": "2.13.0", "seconds": 1.0, "gpu": "RTX 3090", "capability": [8, 6]}
    old = {**new, "gpu": "Tesla T4", "capability": [7, 5]}
    for precision, error in (("bf16-mixed", 1), ("bf16-true", 1), ("fp16-mixed", 0)):
        run = {"config": {"training": {"precision": precision}}}
        plan = NodePlan("a", device="cuda", nproc=2, run=run)
        found = bad(torch_findings(plan, [new, old]))
        assert len(found) == error
        for finding in found:
            assert (finding.id, finding.measured, finding.limit) == (
                "gpu.precision",
                "sm_75",
                "sm_80",
            )
            assert "GPU 1 (Tesla T4)" in finding.text and "fp16-mixed" in finding.fix
    run = {"config": {"training": {"precision": "fp8-mixed"}}}
    ada = {**new, "gpu": "RTX 4090", "capability": [8, 9]}
    plan = NodePlan("a", device="cuda", nproc=2, run=run)
    (finding,) = bad(torch_findings(plan, [ada, new]))
    assert (finding.id, finding.measured, finding.limit) == ("gpu.precision", "sm_86", "sm_89")
    assert (
        "fp8, which is missing on GPU 1 (RTX 3090)" in finding.text and "bf16-mixed" in finding.fix
    )
    cpu = {"torch": "2.13.0", "seconds": 1.0}
    (finding,) = bad(torch_findings(NodePlan("a", device="cpu", nproc=2, run=run), [cpu, cpu]))
    assert (finding.id, finding.measured) == ("gpu.precision", "a CPU")
    run["config"]["training"]["precision"] = "fp16-mixed"
    amd = {**old, "is_nvidia": False, "cuda": "6.4.1"}
    (finding,) = bad(torch_findings(NodePlan("a", device="cuda", run=run), [amd]))
    assert (finding.id, finding.level, finding.measured) == ("gpu.visible", "warning", "ROCm")
    assert "never run on an AMD GPU" in finding.text and "--smoke" in finding.fix


def test_faults_of_torch_are_told_once_for_all_ranks() -> None:
    rank = {"torch": "2.13.0+cpu", "cuda": None, "stage": "visible", "failure": "without CUDA"}
    (found,) = torch_findings(NodePlan("a", device="cuda", nproc=8), [rank] * 8)
    assert found.id == "gpu.visible" and "pip install" in found.fix
    (found,) = torch_findings(NodePlan("a"), [{"stage": "died", "failure": "ended by SIGILL"}])
    assert found.id == "torch.imports" and "SIGILL" in found.text


def test_an_error_of_a_host_is_the_finding_that_it_names() -> None:
    found = error_finding("a", PreflightError("no conda", id="python.runs"))
    assert (found.id, found.level, found.where) == ("python.runs", "error", "a")
    assert error_finding("a", UserError("ssh is not installed")).id == "ssh.connect"


def test_a_mount_that_one_host_lacks() -> None:
    (found,) = shared_findings("a", {"b": {"is_shared": True}, "c": {"is_shared": False}})
    assert (found.level, found.where) == ("warning", "c")


def test_what_hosts_agree_on_is_said_once() -> None:
    found = [
        Finding("huggingface.access", "ok", name, "model o/m can be read", "ok") for name in "ab"
    ]
    other = Finding("huggingface.access", "error", "c", "cannot reach Hugging Face for model o/m")
    assert merge_equal([found[0], other, found[1]]) == [replace(found[0], where="a, b"), other]


def test_links_against_what_a_step_sends(run_file: Path) -> None:
    loaded = load_run_file(run_file)
    sent = replace(CheckedRun.of(loaded), model=Architecture.opaque(7_000_000_000)).gradient_bytes()
    rates = {("a", "b"): 117e6, ("b", "a"): 117e6}
    (found, _) = bad(bandwidth_findings(rates, sent, 2))
    assert "4m 0" in found.text or "3m 5" in found.text  # 28 GB over a gigabit
    assert not bad(bandwidth_findings(rates, 0, 2)), "a model of unknown size"
    (stuck,) = bandwidth_findings({("a", "b"): 0.0}, sent, 2)
    assert stuck.level == "error" and "mtu" in stuck.fix


def test_an_all_reduce_that_failed_names_the_culprit() -> None:
    commands = {name: [{"rank": rank, "backend": "gloo"}] for rank, name in enumerate("abcd")}
    waited = {"stage": "store", "failure": "not all ranks connected", "missing": [2]}
    died = {"stage": "died", "failure": "ended by SIGSEGV"}
    said = {"a": waited, "b": waited, "c": died, "d": {"stage": "group", "failure": "closed"}}
    answers = {name: {"ranks": [one]} for name, one in said.items()}
    found = list(reduce_findings(answers, commands, sections.NetworkConfig()))
    assert [f.where for f in found] == ["a rank 0", "b rank 1", "c rank 2"], "d only waited"
    assert "ranks 2 on c did not connect" in found[0].text
    assert "SIGSEGV" in found[2].text


def test_a_hub_is_reached_or_the_way_to_it_is_named() -> None:
    def found(hub: str) -> Finding:
        host, _, port = hub.rpartition(":")
        return hub_finding("a1", DiLoCoConfig(hub=hub), dial(host, int(port), 2.0))

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        finding = found(f"127.0.0.1:{port}")
    assert (finding.level, finding.where) == ("ok", "a1")
    assert f"127.0.0.1:{port}" in finding.text
    finding = found(f"127.0.0.1:{port}")
    assert finding.level == "error" and "the hub is not running" in finding.text
    assert f"open port {port} on this machine" in finding.fix
    finding = found("nowhere.invalid:29400")
    assert finding.level == "error" and "nowhere.invalid:29400" in finding.text
    assert "check the address nowhere.invalid" in finding.fix


def test_what_is_wrong_with_a_cluster_names_its_own_keys(run_file: Path) -> None:
    launcher = "launcher: {kind: slurm, bin_path: /nowhere}, gpus_per_node: 1"
    clusters = f"clusters=[{{name: x1, {launcher}}}, {{name: x2, {launcher}}}]"
    outer = "outer={kind: diloco, sync_every: 5, public: '127.0.0.1:0'}"
    texts: list[object] = []
    extent = Extent(net=False, timeout_s=30.0)
    assert run_check(run_file, (outer, clusters), (), extent, texts.append) == 2
    assert len(texts) == 2
    for index, text in enumerate(map(str, texts)):
        assert f"fix: set clusters.{index}.launcher.login to a login node" in text, text
        assert f"clusters.{1 - index}." not in text


PARTITIONS = """\
PartitionName=gpu AllowAccounts=ALL Default=YES MaxTime=1-00:00:00 State=UP Nodes=n[1-4]
PartitionName=old AllowAccounts=lab Default=NO MaxTime=UNLIMITED State=DOWN Nodes=n9
"""
NODES = """\
n1|idle|gpu:a100:4(S:0-1)|a100,ib|none
n2|mixed|gpu:a100:4|a100,ib|none
n3|drained|gpu:a100:4|a100|bad fan
n4|idle*|gpu:2|v100|Not responding
"""
QUEUES = """\
Queue: gpuq
    queue_type = Execution
    resources_max.walltime = 1440:00:00
    enabled = True
    started = True

Queue: shut
    enabled = False
    started = True
"""
PBS_NODES = """\
n1
     Mom = n1
     state = free
     resources_available.ngpus = 4

n2
     state = offline,down
     comment = disk
     resources_available.ngpus = 4
"""


@pytest.fixture
def slurm(tmp_path: Path) -> Path:
    program(tmp_path, "scontrol", {"show partition": PARTITIONS})
    program(tmp_path, "sinfo", {"-p gpu": NODES})
    return tmp_path


def ask_slurm(slurm: Path, nodes: int = 2, gpus: int = 4, **launcher: Any) -> list[Finding]:
    cluster = sections.ClusterConfig(nodes=nodes, gpus_per_node=gpus)
    section = sections.SlurmLauncherConfig(bin_path=str(slurm), **launcher)
    return queue_findings(cluster, section, Shell())


def levels(findings: list[Finding]) -> dict[str, str]:
    return {finding.id: finding.level for finding in findings}


def of(findings: list[Finding], finding_id: str) -> Finding:
    return next(finding for finding in findings if finding.id == finding_id)


def test_slurm_has_room(slurm: Path) -> None:
    found = ask_slurm(slurm, time=3600.0)
    well = {"queue.commands", "queue.partition", "queue.gres", "queue.time"}
    assert levels(found) == {**dict.fromkeys(well, "ok"), "queue.nodes": "warning"}
    nodes = of(found, "queue.nodes")
    assert "n3 is drained (bad fan)" in nodes.text and "n4 is idle*" in nodes.text
    assert "State=RESUME" in nodes.fix


@each(
    ({"nodes": 3}, "queue.nodes", "2 of 4 nodes"),
    ({"gpus": 8}, "queue.gres", "the largest node has 4"),
    ({"constraint": "v100", "nodes": 1, "gpus": 1}, "queue.nodes", "0 of 1"),
    ({"partition": "gpuu"}, "queue.partition", "partition gpuu not found"),
    ({"partition": "old"}, "queue.partition", "old is DOWN"),
    ({"time": 172_800.0}, "queue.time", "2d 00h"),
)
def test_slurm_would_refuse(asked: dict[str, Any], finding_id: str, words: str, *, slurm):
    found = of(ask_slurm(slurm, **asked), finding_id)
    assert found.level == "error"
    assert words in found.text and found.fix


def test_slurm_that_is_not_there_or_does_not_answer(tmp_path: Path) -> None:
    (found,) = ask_slurm(tmp_path)
    assert found.id == "queue.commands" and "bin_path" in found.fix
    program(tmp_path, "scontrol", {})
    (found,) = ask_slurm(tmp_path)
    assert "not known" in found.text and "scontrol ping" in found.fix


@each(
    (1, {}, {"queue.nodes": "warning", "queue.gres": "ok", "queue.partition": "ok"}),
    (2, {}, {"queue.nodes": "error", "queue.gres": "error"}),
    (1, {"time": 1440 * 3600.0}, {"queue.time": "ok"}),
    (1, {"time": 1441 * 3600.0}, {"queue.time": "error"}),
    (1, {"queue": "none"}, {"queue.partition": "error"}),
    (1, {"queue": "shut"}, {"queue.partition": "error"}),
)
def test_pbs(nodes: int, launcher: dict[str, Any], expected: dict[str, str], *, tmp_path):
    server = "Server: head\n    default_queue = gpuq\n"
    program(tmp_path, "qstat", {"-Qf": QUEUES, "-Bf": server})
    program(tmp_path, "pbsnodes", {"-a": PBS_NODES})
    cluster = sections.ClusterConfig(nodes=nodes, gpus_per_node=4)
    section = sections.PbsLauncherConfig(bin_path=str(tmp_path), **launcher)
    found = queue_findings(cluster, section, Shell())
    assert expected.items() <= levels(found).items()
    if "queue.nodes" in expected:
        assert "n2 is offline,down (disk)" in of(found, "queue.nodes").text
        assert "pbsnodes -r n2" in of(found, "queue.nodes").fix


def test_a_bucket_is_asked_as_a_run_asks_it(tmp_path, monkeypatch):
    def found(url: str) -> Finding:
        return bucket_finding("a1", url, dial_bucket(url))

    place = tmp_path / "shared" / "run"
    fresh = found(f"file://{place}")
    assert fresh.level == "ok" and "already has a run" not in fresh.text
    assert not [path for path in place.rglob("*") if path.is_file()], "nothing is left there"
    (place / "journal").mkdir(parents=True, exist_ok=True)
    (place / "journal" / "00000001").write_bytes(b"x")
    assert "already has a run" in found(f"file://{place}").text
    (tmp_path / "file").write_text("")
    bad = found(f"file://{tmp_path}/file/run")
    assert bad.level == "error" and bad.id == "net.hub" and bad.fix
    silent = threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(network, "probe", lambda _: silent.wait(DEADLINE_S))
        patch.setattr(network, "_BUCKET_S", 0.1)
        away = found(f"file://{place}")
    silent.set()
    assert away.level == "error" and "no response" in away.text and away.fix
    assert "installed" in bucket_finding("a1", "x9://b/p", dial_bucket("x9://b/p")).text
