"""What nodes measure: against real sockets, real programs on PATH and a real HTTP server."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from ipaddress import IPv4Network
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from isles.check import step
from isles.check.checks.files import files, probe_read, probe_remove, probe_write
from isles.check.checks.gpus import gpus
from isles.check.checks.links import LinkMeasurement, Listener, bandwidth, link_findings, reach
from isles.check.checks.machine import machine
from isles.check.checks.network import interfaces
from isles.check.checks.topology import topology
from isles.check.finding import Finding
from isles.check.plan import CheckedRun, Extent, Hosts, NodePlan
from isles.cli import main
from isles.config.load import load_run_file
from isles.config.sections.cluster import ClusterConfig
from isles.errors import UserError
from isles.facts.memory.architecture import Architecture
from isles.facts.units import format_bytes
from isles.launch.huggingface import huggingface_issues
from isles.launch.ssh.hosts import Reach
from tests.deadline import DEADLINE_S, run_program
from tests.each import each
from tests.model_hub import model_hub
from tests.programs import program

_ONE = {"--query-gpu=index": "0, NVIDIA RTX 5070 Ti, GPU-aa, 16303 MiB"}
_WELL = _ONE | {"--query-gpu=uuid,driver": "GPU-aa, 570.86.10, 90, 71"}
_BUSY = "GPU-aa, 570.86.10, 4900, 71"
_USER = "GPU-aa, 4242, 880, /usr/bin/python, with a comma"


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Finding]]:
    """What is found of the GPUs where nvidia-smi gives these answers."""

    def find(answers: dict[str, str], device: Literal["cpu", "cuda"] = "cuda") -> list[Finding]:
        program(tmp_path, "nvidia-smi", answers)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        return list(gpus(NodePlan("a", device=device)))

    return find


def test_gpus_as_the_driver_tells_them(found: Callable[..., list[Finding]]) -> None:
    """It does not know the other questions, and the card has no ECC."""
    well = found(_WELL)
    ids = ["gpu.driver", "gpu.count", "gpu.errors", "gpu.throttle", "gpu.busy"]
    assert [f.id for f in well if f.level == "ok"] == ids
    assert [f.measured for f in well] == ["570.86.10", "1", "", "", ""]
    assert found({}, "cpu")[0].level == "warning", "nvidia-smi that fails"
    assert found({})[0].level == "error"


@each(
    ({"--query-gpu=uuid,ecc": "GPU-aa, 3, 0x0"}, "gpu.errors", "3 uncorrected"),
    ({"--query-remapped-rows": "GPU-aa, Yes, No"}, "gpu.errors", "cannot be repaired"),
    ({"--query-gpu=uuid,ecc": "GPU-aa, [N/A], 0x20"}, "gpu.throttle", "heat, at 71 degrees"),
    ({"--query-gpu=uuid,driver": _BUSY}, "gpu.busy", "4.8 GiB of 15.9 GiB .* does not list"),
    ({"--query-compute-apps": _USER}, "gpu.busy", r"python, with a comma \(pid 4242\)"),
)
def test_troubles_of_a_gpu(answers: dict[str, str], finding_id: str, words: str, *, found):
    (bad,) = [finding for finding in found(_WELL | answers) if finding.level != "ok"]
    assert bad.id == finding_id and "GPU 0 (NVIDIA RTX 5070 Ti)" in bad.text
    assert re.search(words, bad.text) and bad.fix


_HGX = """\
\x1b[4m\tGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV12\tNV12\tNV12\tPXB\tSYS\t48-63,176-191\t3\t\tN/A
GPU1\tNV12\t X \tNV12\tNV12\tPXB\tSYS\t48-63,176-191\t3\t\tN/A
GPU2\tNV12\tNV12\t X \tNV12\tSYS\tPXB\t16-31,144-159\t1\t\tN/A
GPU3\tNV12\tNV12\tNV12\t X \tSYS\tPXB\t16-31,144-159\t1\t\tN/A
NIC0\tPXB\tPXB\tSYS\tSYS\t X \tSYS\t\t\t\t
NIC1\tSYS\tSYS\tPXB\tPXB\tSYS\t X \t\t\t\t

Legend:

  NV#  = Connection traversing a bonded set of # NVLinks
"""
"""As drivers of version 535 and later print it; before, the last columns were not there, network
cards stood with their names, and the head was underlined also where nobody could see that."""

_BRIDGED = """\
        GPU0    GPU1    GPU2    GPU3    mlx5_0  CPU Affinity    NUMA Affinity
GPU0     X      PHB     SYS     SYS     PHB     0-15    0
GPU1    PHB      X      SYS     SYS     PHB     0-15    0
GPU2    SYS     SYS      X      NV4     SYS     16-31   1
GPU3    SYS     SYS     NV4      X      SYS     16-31   1
mlx5_0  PHB     PHB     SYS     SYS      X
"""
"""Four cards on two processors, two of them with a bridge."""


def _nvlinks(*rates: list[float | None]) -> str:
    lines = []
    for index, own in enumerate(rates):
        lines.append(f"GPU {index}: NVIDIA GeForce RTX 3090 (UUID: GPU-{index})")
        texts = (f"{rate:g} GB/s" if rate else "<inactive>" for rate in own)
        lines += [f"\t Link {number}: {text}" for number, text in enumerate(texts)]
    return "\n".join(lines)


Linked = Callable[..., list[tuple[str, str, str]]]


@pytest.fixture
def linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Linked:
    """Level, measured and text of what is found between the GPUs of a stand-in for nvidia-smi."""

    def find(
        topo: str, nvlink: str, *slots: str, hosts: str = "", use: str | None = None
    ) -> list[tuple[str, str, str]]:
        numbers = range(len(slots))
        answers = {
            "--query-gpu=index": "\n".join(f"{n}, NVIDIA X, GPU-{n}, 24576 MiB" for n in numbers),
            "pcie.link.gen.max": "\n".join(f"GPU-{n}, {n}, {slots[n]}" for n in numbers),
            "topo -m": topo,
            "nvlink -s": nvlink,
        }
        if hosts:
            answers["pcie.link.gen.hostmax"] = "\n".join(f"GPU-{n}, {hosts}" for n in numbers)
        program(tmp_path, "nvidia-smi", answers)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", use or ",".join(map(str, numbers)))
        nproc = len((use or "x," * len(slots)).strip(",").split(","))
        found = list(topology(NodePlan("a", nproc=nproc, device="cuda")))
        assert {finding.id for finding in found} <= {"gpu.links"}
        assert all(finding.fix for finding in found if finding.level != "ok")
        return [(finding.level, finding.measured, finding.text) for finding in found]

    return find


def test_nvlink_is_told_from_pcie(linked: Linked) -> None:
    links = _nvlinks(*[[25.0] * 12] * 4)
    ((level, measured, text),) = linked(_HGX, links, *["4, 16, 16"] * 4, hosts="4, 4")
    assert (level, measured) == ("ok", "NV12")
    assert "NVLink (12 links of 25 GB/s) between all of GPUs 0 to 3" in text
    assert "PCIe gen 4 x16, 31.5 GB/s" in text and "300 GB/s in each direction" in text
    some: list[list[float | None]] = [[None] * 4, [None] * 4, [14.062] * 4, [14.062] * 4]
    ((level, measured, text),) = linked(_BRIDGED, _nvlinks(*some), *["3, 16, 16"] * 4)
    assert (level, measured) == ("ok", "NV4 + PHB + SYS"), "all are used: there is no better choice"
    assert "NVLink (4 links of 14.1 GB/s) between GPUs 2-3" in text
    assert "PCIe through the processor's PCIe bridge (PHB) between GPUs 0-1" in text
    assert "the link between processors (SYS) between GPUs 0-2, 0-3, 1-2, 1-3" in text
    assert "the slowest pair should reach 16 GB/s in each direction" in text
    ((level, measured, _),) = linked(_BRIDGED, "", "4, 16, 16")
    assert (level, measured) == ("ok", "PCIe gen 4 x16, 31.5 GB/s"), "a single card"
    ((_, measured, text),) = linked(_HGX, "all links are inActive", *["4, 16, 16"] * 4)
    assert measured == "NV12" and "should reach" not in text
    assert linked("", "", *["4, 16, 16"] * 2) == [], "a driver that says nothing of it"
    assert linked(_HGX, "", *["[N/A], [N/A], [N/A]"] * 4)[0][1] == "NV12", "nothing of the slots"
    for hosts in ("", "4, 3"):  # of an idle card, and of an old machine, which has no higher one
        ((level, measured, _),) = linked("", "", "3, 16, 16", hosts=hosts)
        assert (level, measured) == ("ok", "PCIe gen 3 x16, 15.8 GB/s")


_FULL = ["4, 16, 16"] * 3


@each(
    ({"slots": ["4, 16, 8", *_FULL]}, "x8", "GPU 0 uses 8 of the 16"),
    ({"slots": ["3, 16, 16", *_FULL], "hosts": "4, 4"}, "gen 3", "GPU 0 is limited to"),
    (
        {"slots": [_FULL[0], "4, 4, 4", *_FULL[1:]], "hosts": "4, 4"},
        *("PCIe gen 4 x4, 7.88 GB/s", "the other GPUs wait for it"),
    ),
    ({"use": "0,2"}, "SYS", "GPUs 2, 3 have faster links"),
    ({"use": "0,1"}, "PHB", "without NVLink .*GPUs 2, 3 have faster links"),
    (
        {"topo": _HGX, "nvlink": _nvlinks(*[[25.0] * 12] * 3, [25.0] * 11 + [None])},
        *("11 links", "GPU 3 has 11 active NVLinks, and another GPU has 12"),
    ),
)
def test_slots_and_links_that_give_less(given, measured, words, *, linked):
    slots, topo = given.pop("slots", ["4, 16, 16"] * 4), given.pop("topo", _BRIDGED)
    found = linked(topo, given.pop("nvlink", ""), *slots, **given)
    (bad,) = [finding for finding in found if finding[0] != "ok"]
    assert bad[:2] == ("warning", measured) and re.search(words, bad[2])
    assert found[-1][0] == "ok", "and what there is"


def test_ports_over_the_loopback() -> None:
    listener, second = Listener(), Listener()
    ports = listener.listen(29850)
    assert second.listen(29850)["run"] != ports["run"], "a port that is taken is not taken twice"
    second.unlisten()
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        peer = {"name": "b", "address": "127.0.0.1", "ports": ports}
        shut = {**ports, "any": closed.getsockname()[1]}
        answer = reach([peer, {**peer, "name": "c", "ports": shut}], timeout_s=3)
    links = {name: LinkMeasurement(**link) for name, link in json.loads(json.dumps(answer)).items()}
    assert links["b"].is_open and 0 < links["b"].rtt_s < 1
    assert links["b"].lost == 0 < links["b"].sent
    assert (links["c"].run, links["c"].free) == ("ok", "refused")
    hosts = Hosts([], CheckedRun(ClusterConfig(), "."), Extent(), print)
    hosts.facts = {name: {"firewalls": ["nft", "iptables"]} for name in "abc"}
    hosts.reach = {name: Reach("10.0.0.1", None, IPv4Network("10.0.0.0/8")) for name in "abc"}
    back = {"a": LinkMeasurement("ok", "ok")}
    bad, well, *_ = link_findings(hosts, {"a": links, "c": back}, dict.fromkeys("abc", shut))
    assert (bad.id, bad.where, bad.measured) == ("net.connect", "a -> c", "refused")
    assert "one open port is not enough" in bad.text and "the firewall of c" in bad.text
    assert "on c: sudo nft" in bad.fix and "10.0.0.0/8" in bad.fix
    assert (well.where, well.measured) == ("2 pairs", "2 of 3")
    assert bandwidth("127.0.0.1", ports["any"], seconds=0.1)["bytes_per_s"] > 1e6
    listener.unlisten()
    assert bandwidth("127.0.0.1", ports["any"], seconds=0.1)["bytes_per_s"] == 0


def test_a_hundred_taken_ports_are_an_error() -> None:
    with ExitStack() as taken:
        for port in range(29_700, 29_800):
            other = taken.enter_context(socket.socket())
            other.bind(("", port))
            other.listen()
        with pytest.raises(UserError, match="29700 to 29799"):
            Listener().listen(29_700)


def test_this_machine() -> None:
    own = {finding.id: finding for finding in machine(NodePlan("a"))}
    assert {"os.kernel", "memory.free", "cpu.cores", "shm.size"} <= set(own)
    assert {"limits.nofile", "limits.nproc"} <= set(own)
    huge = NodePlan("a", nproc=10_000, world_size=1 << 27, load_bytes=1 << 40)
    greedy = {f.id: f for f in machine(huge)}
    assert not greedy["limits.nofile"].fix.startswith("ulimit"), "it raises no hard limit"
    assert greedy["memory.free"].level == "error" and "10000 ranks" in greedy["memory.free"].text
    assert greedy["cpu.cores"].level == "warning"
    assert "lo" in {interface.name for interface in interfaces()}


def test_folders_of_a_run(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")

    def look(workdir: Path, output_dir: Path) -> dict[str, Finding]:
        plan = NodePlan("a", workdir=str(workdir), output_dir=str(output_dir))
        return {finding.id: finding for finding in files(plan)}

    found = look(tmp_path / "none", blocked / "runs")
    assert found["files.workdir"].level == found["files.output"].level == "error"
    assert "a file is in the place" in found["files.output"].text
    found = look(tmp_path, tmp_path / "a" / "b")
    assert "files.workdir" not in found and found["files.output"].level == "ok"
    assert f"to be created in {tmp_path}" in found["files.output"].text
    assert not (tmp_path / "a").exists(), "a check makes no folders"


def test_a_probe_shows_who_sees_the_folder_and_goes_again(tmp_path: Path) -> None:
    probe = probe_write(str(tmp_path / "a"))
    assert probe_read(**probe)["is_shared"]
    assert not probe_read(probe["path"], "other")["is_shared"]
    probe_remove(probe["path"])
    assert not probe_read(**probe)["is_shared"]
    (tmp_path / "file").write_text("")
    probe_remove(str(tmp_path / "file"))
    assert (tmp_path / "file").exists(), "only its own file is removed"


def test_space_for_the_checkpoints_of_the_run(
    run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = CheckedRun.of(load_run_file(run_file, ["checkpoint.keep=2"]))
    assert run.model is not None
    # fp32 weights and two states of adamw, for two checkpoints and one on its way.
    assert run.plan("a", {"a": 1}, "cpu").kept_bytes == run.model.params * 12 * 3
    big, nproc = replace(run, model=Architecture.opaque(10**15)), {"a": 1, "b": 1}
    a, b = ({f.id: f for f in files(big.plan(name, nproc, "cpu"))}["disk.free"] for name in nproc)
    assert a.level == "error" and "(2 kept, one being written)" in a.text
    assert a.limit == format_bytes(36 * 10**15)
    assert b.level == "ok"
    small = replace(run.plan("a", nproc, "cpu"), kept_bytes=1 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 10))
    text = next(f for f in files(small) if f.id == "disk.free").text
    assert "take 1.0 MiB" in text, "as `isles plan` shows it"


@each(
    ("cuda", (), 0.0),
    ("cuda", ("strategy={kind: ddp}",), 0.0),
    ("cuda", ("strategy={kind: fsdp}",), 0.0),
    ("cuda", ("strategy={kind: fsdp, cpu_offload: true}",), 16 / 8),
    ("cpu", ("strategy={kind: fsdp}",), 4 / 8),
    ("cpu", ("strategy={kind: ddp}",), 4.0),
)
def test_a_rank_needs_main_memory_only_for_its_part_of_a_model(
    device: Any, names: tuple[str, ...], each_weight: float, *, run_file: Path
) -> None:
    run = CheckedRun.of(load_run_file(run_file, names))
    assert run.model is not None
    found = run.plan("a", {"a": 8}, device).load_bytes
    assert found == pytest.approx(each_weight * run.model.params, rel=1e-6)


@each(
    (errno.EACCES, f"sudo chown {os.geteuid()} /"),
    (errno.EROFS, "findmnt -T"),
    (errno.ENOSPC, "free some space"),
)
def test_a_folder_that_refuses(number: int, words: str, *, tmp_path, monkeypatch):
    """As disks do; this test may write everywhere."""

    def refuse(**_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(tempfile, "NamedTemporaryFile", refuse)
    found = list(files(NodePlan("a", output_dir=str(tmp_path), workdir=str(tmp_path))))
    bad = [finding for finding in found if finding.level == "error"]
    assert len(bad) == 2, "the output folder, and the cache"
    assert words in bad[0].fix and bad[0].measured in ("0 B", os.strerror(number))


def test_data_that_only_the_first_host_needs(run_file: Path, tmp_path: Path) -> None:
    names = ["model.name_or_path=./none", f"data.sources=[{{path: {tmp_path}/none.jsonl}}]"]
    run = CheckedRun.of(load_run_file(run_file, names))
    plans = [run.plan(name, {"a": 1, "b": 1}, "cpu") for name in "ab"]
    sent = [NodePlan(**json.loads(json.dumps(asdict(plan)))) for plan in plans]
    absent = [f for plan in sent for f in files(plan) if f.id in ("files.data", "files.model")]
    found = [f"{f.id} {f.where}" for f in absent if f.measured == "absent"]
    assert found == ["files.model a", "files.data a", "files.model b"]
    copied = [f for f in files(replace(plans[0], is_copied=True)) if f.id == "files.model"]
    assert copied[0].level == "warning" and "sync" in copied[0].text


_GONE = "http://127.0.0.1:9"
_ASK = """\
import json
from isles.check.checks.files import huggingface
from isles.check.plan import NodePlan
found = huggingface(NodePlan("a", repos=[("model", n) for n in ("o/open", "o/gated", "o/none")]))
print(json.dumps([(f.id, f.level, f.measured, f.fix) for f in found]))
"""


def test_hugging_face_and_its_licenses(tmp_path: Path) -> None:
    def ask(endpoint: str, offline: str) -> list[list[str]]:
        # A process of its own: the library reads these once, when it is imported.
        own = {"HF_HOME": str(tmp_path), "HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": offline}
        done = run_program([sys.executable, "-c", _ASK], env={**os.environ, **own})
        return json.loads(done.stdout)

    with model_hub() as (url, _):
        well, license, missing = ask(url, "0")
    assert well == ["huggingface.access", "ok", "ok", ""]
    assert license[:3] == ["huggingface.license", "error", "license"]
    assert "https://huggingface.co/o/gated" in license[3]
    assert (
        missing[:3] == ["huggingface.access", "error", "missing"] and "hf auth login" in missing[3]
    )
    (tmp_path / "hub" / "models--o--open" / "snapshots" / "a").mkdir(parents=True)
    ways = (("0", "unreachable", "HTTPS_PROXY"), ("1", "offline", "HF_HUB_OFFLINE"))
    for offline, state, words in ways:
        cached, *others = ask(_GONE, offline)
        assert cached == ["huggingface.access", "ok", "cached", ""]
        assert [other[:3] for other in others] == [["huggingface.access", "error", state]] * 2
        assert all(words in other[3] for other in others)


def test_a_start_asks_the_hub_once_for_what_is_not_here(run_file: Path, tmp_path: Path) -> None:
    def issues(endpoint: str) -> list[str]:
        variables = {"HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path)}
        names = ("model.name_or_path=o/open", "data.sources=[{path: o/open-data}]", "tokenizer={}")
        own = f"clusters=[{{environment: {{variables: {json.dumps(variables)}}}}}]"
        loaded = load_run_file(run_file, [*names, own])
        return [f"{f.where} {f.what} {f.id}" for f in huggingface_issues(loaded)]

    with model_hub() as (url, _):
        (found,) = issues(url)
    assert "dataset o/open-data does not exist on Hugging Face, or" in found
    (found, _) = issues(_GONE)
    assert "command line model.name_or_path cannot reach Hugging Face for model o/open" in found
    (tmp_path / "hub" / "models--o--open" / "snapshots" / "a").mkdir(parents=True)
    (tmp_path / "datasets" / "o___open-data").mkdir(parents=True)
    assert issues(_GONE) == []


def test_a_node_that_nobody_asks_any_more_ends() -> None:
    """As when the laptop's network is gone: stdin stays open, and no question comes."""
    code = "from isles.check.node import answer; answer({}, idle_s=0.5)"
    words, pipe = [sys.executable, "-c", code], subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=subprocess.DEVNULL) as child:
        assert child.wait(timeout=DEADLINE_S) == 1


@each(
    (["no-such.yaml"], "the file does not exist"),
    (["--hosts", "a", "a"], "a appears twice"),
    (["--timeout", "1s"], "--timeout 30s"),
)
def test_faults_of_the_command_line(words: list[str], said: str, *, capsys):
    assert main(["check", *words]) == 1
    assert said in capsys.readouterr().err


def test_the_nodes_of_a_check_do_not_wait_for_a_stranger_who_never_ends_a_line() -> None:
    is_over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor() as pool:
        address = server.getsockname()
        unknown = socket.create_connection(address)

        def trickle() -> None:
            with suppress(OSError):
                while not is_over.wait(0.2):
                    unknown.sendall(b"x")

        pool.submit(trickle)
        node = pool.submit(step.join, address, 1, "d", DEADLINE_S)
        try:
            assert list(step.meet(server, ["a", "b"], "d", DEADLINE_S)) == [1]
        finally:
            is_over.set()
        node.result().close()
        unknown.close()
