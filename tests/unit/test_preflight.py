"""Findings from measured values: the right level, the odd one out by name, the line to type."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from isles.check.finding import Finding, exit_code, ordered, record
from isles.check.ids import MEANINGS
from isles.check.judge.files import judge_files, judge_hub, judge_shared
from isles.check.judge.gpus import judge_gpus, judge_ranks
from isles.check.judge.machine import judge_clocks
from isles.check.judge.network import judge_bandwidth, judge_reduce
from isles.check.judge.versions import judge_versions
from isles.check.report import report_lines
from isles.check.subject import Subject
from isles.config.load import load_run_file
from isles.config.sections.cluster import ClusterConfig
from isles.facts.units import format_bytes
from isles.launch.ssh.addresses import Reach
from tests.each import each

ROOT = Path(__file__).parents[2]


def facts(**own: Any) -> dict[str, Any]:
    """What a node would say of itself."""
    packages = {"torch": "2.13.0", "transformers": "5.23.0"}
    base = {"python": "3.11.7", "isles": "1.0", "missing": [], "executable": "python"}
    return {**base, "packages": {**packages, **own.pop("packages", {})}, **own}


def bad(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.level != "ok"]


def test_every_finding_has_a_row_in_the_documentation() -> None:
    page = (ROOT / "docs" / "check.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w.]+)` \| (.+?) \| (.+?) \|$", page, re.M)
    assert [row[0] for row in rows] == list(MEANINGS)
    files = [*(ROOT / "src/isles/check").rglob("*.py"), ROOT / "src/isles/launch/hub.py"]
    source = "".join(path.read_text() for path in files)
    for finding_id in MEANINGS:
        prefix, _, name = finding_id.partition(".")
        used = source.count(f'"{finding_id}"') > 1 or f'f"{prefix}.{{' in source
        assert used, f"{finding_id} is never found"
        assert name


def test_the_exit_code_and_the_order() -> None:
    warning = Finding("shm.size", "warning", "a", "small")
    error = Finding("disk.free", "error", "a", "full", fix="make room")
    fine = Finding("os.kernel", "ok", "a", "Linux")
    assert exit_code([fine, warning]) == 0
    assert exit_code([fine, warning, error]) == 2
    assert ordered([fine, warning, error]) == [error, warning, fine]
    saved = record([fine, warning, error], seconds=1.26)
    assert saved["summary"] == {"ok": 1, "warnings": 1, "errors": 1, "seconds": 1.3}
    lines = report_lines([fine, warning, error], ["a"], seconds=1.0, is_terminal=False)
    assert "\n".join(lines).isascii()
    assert lines[-1] == "a: 1 error, 1 warning, 1 ok, in 1.0 s"
    assert lines.index("    fix: make room") < next(
        n for n, line in enumerate(lines) if "small" in line
    )


def test_the_table_is_as_wide_as_its_values() -> None:
    system = "Debian GNU/Linux 12 (bookworm), Linux 6.1.0"

    def table(*hosts: str) -> str:
        found = [Finding("os.kernel", "ok", host, "Linux", system) for host in hosts]
        return "\n".join(report_lines(found, hosts, seconds=1.0, is_terminal=False))

    assert table("a").count(system) == 1
    assert table("a", "b").count(f"{system[:15]}... ") == 1, "one beside the other"
    assert "Debian" not in table(*"abcdef")


@each(
    ("own", "finding_id", "level"),
    [
        ({"python": "3.11.9"}, "version.python", "warning"),
        ({"python": "3.12.1"}, "version.python", "error"),
        ({"isles": "0.9"}, "version.isles", "error"),
        ({"packages": {"torch": "2.12.0"}}, "version.torch", "error"),
        ({"packages": {"transformers": "5.22.0"}}, "version.transformers", "warning"),
        ({"packages": {"peft": "0.21"}}, "version.packages", "warning"),
        ({"missing": ["torch"]}, "packages.missing", "error"),
    ],
)
def test_the_odd_one_out_is_named(own: dict[str, Any], finding_id: str, level: str) -> None:
    hosts = {"a": facts(), "b": facts(**own), "c": facts()}
    (found,) = bad(judge_versions(hosts, {}, {}, "1.0"))
    assert (found.id, found.level) == (finding_id, level)
    assert found.where == "b" and found.fix
    if own.get("packages"):
        assert "on a, c" in found.text  # both values, and who has the other


def test_two_installations_of_torch_and_other_libraries() -> None:
    ranks = {
        "a": {"ranks": [{"torch": "2.13.0+cu128", "cuda": "12.8", "nccl": "2.27.3"}]},
        "b": {"ranks": [{"torch": "2.9.0", "cuda": "12.6", "nccl": "2.26.2"}]},
    }
    gpus = {name: {"gpus": [{"driver": driver}]} for name, driver in (("a", "570"), ("b", "550"))}
    found = bad(judge_versions({"a": facts(), "b": facts()}, ranks, gpus, None))
    assert [(f.id, f.where) for f in found] == [
        ("version.torch", "b"),
        ("version.cuda", "b"),
        ("version.nccl", "b"),
        ("version.driver", "b"),
    ]
    assert "two are installed" in found[0].text


def test_the_clock_of_the_laptop_is_not_blamed_on_the_hosts() -> None:
    ahead = {"a": (3600.0, 0.01), "b": (0.001, 0.01), "c": (0.0, 0.01)}
    (found,) = bad(judge_clocks(ahead))
    assert (found.where, found.level) == ("a", "error")
    # All hosts agree with one another: it is this machine's clock that is wrong.
    assert not bad(judge_clocks(dict.fromkeys("abc", (3600.0, 0.01))))
    # A slow round trip proves nothing.
    assert not bad(judge_clocks({"a": (4.0, 8.0), "b": (0.0, 0.1)}))


CARD = {
    "index": 0,
    "name": "RTX 5070 Ti",
    "uuid": "GPU-1",
    "driver": "570",
    "memory_bytes": 16 << 30,
    "used_bytes": 0,
    "temperature": 50,
    "uncorrected": 0,
    "throttle": "",
    "failed_rows": 0,
    "users": [],
}


@each(
    ("own", "finding_id", "words"),
    [
        ({"uncorrected": 3}, "gpu.errors", "3 uncorrected"),
        ({"failed_rows": 1}, "gpu.errors", "cannot be mended"),
        ({"throttle": "heat", "temperature": 94}, "gpu.throttle", "94 degrees"),
        ({"used_bytes": 4 << 30}, "gpu.busy", "does not name"),
        (
            {"used_bytes": 1, "users": [{"pid": 7, "name": "/usr/bin/python", "bytes": 1}]},
            "gpu.busy",
            "python (pid 7)",
        ),
    ],
)
def test_troubles_of_a_gpu(own: dict[str, Any], finding_id: str, words: str) -> None:
    cards = {"a": {"warning": "", "gpus": [{**CARD, **own}]}}
    (found,) = bad(judge_gpus(cards, {"a": 1}, "cuda"))
    assert found.id == finding_id
    assert words in found.text and found.fix
    assert not bad(judge_gpus({"a": {"warning": "", "gpus": [CARD]}}, {"a": 1}, "cuda"))


def test_a_wheel_without_kernels_for_the_card() -> None:
    rank = {
        "torch": "2.5.1+cu121",
        "cuda": "12.1",
        "stage": "kernel",
        "fault": "RuntimeError: CUDA error: no kernel image is available for execution",
        "gpu": "RTX 5070 Ti",
        "capability": [12, 0],
        "archs": ["sm_80", "sm_90"],
    }
    (found,) = judge_ranks({"a": {"ranks": [rank]}}, "cuda")
    assert found.id == "gpu.kernel"
    assert found.measured == "sm_120" and found.limit == "sm_80 sm_90"
    assert "/whl/cu128" in found.fix
    old = {**rank, "capability": [6, 1]}
    assert "/whl/cu126" in judge_ranks({"a": {"ranks": [old]}}, "cuda")[0].fix


def test_faults_of_torch_are_told_once_for_all_ranks() -> None:
    rank = {"torch": "2.13.0+cpu", "cuda": None, "stage": "visible", "fault": "without CUDA"}
    (found,) = judge_ranks({"a": {"ranks": [rank] * 8}}, "cuda")
    assert found.id == "gpu.visible" and "pip install" in found.fix
    killed = {"stage": "died", "fault": "ended by SIGILL"}
    (found,) = judge_ranks({"a": {"ranks": [killed]}}, "cpu")
    assert found.id == "torch.imports" and "SIGILL" in found.text


def test_space_for_the_checkpoints_of_the_run(run_file: Path) -> None:
    subject = Subject.of(load_run_file(run_file, ["checkpoint.keep=2"]))
    assert subject.num_params
    needed = subject.checkpoint_bytes()
    # fp32 weights and two states of adamw, for two checkpoints and one on its way.
    assert needed == subject.num_params * 12 * 3
    big = Subject(subject.cluster, subject.workdir, subject.loaded, 1_000_000_000)
    folder = {
        "path": "/out",
        "existing": "/out",
        "fault": "",
        "free": 20 << 30,
        "total": 1 << 40,
        "free_inodes": 10**6,
        "total_inodes": 10**6,
    }
    own = {"workdir_is_there": True, "faults": []}
    own |= dict.fromkeys(("output", "cache", "hub_cache"), folder)
    (found,) = bad(judge_files(big, {"a": own, "b": own}, ["a", "b"]))
    assert (found.id, found.where, found.level) == ("disk.free", "a", "error")
    assert found.limit == format_bytes(36_000_000_000)
    advice = {
        "Permission denied": "sudo chown $USER /out",
        "Read-only file system": "findmnt -T /out",
    }
    for fault, words in advice.items():
        host = {**own, "output": {**folder, "fault": fault}}
        (found,) = bad(judge_files(subject, {"a": host}, ["a"]))
        assert fault in found.text and words in found.fix


def test_data_that_only_the_first_host_needs(run_file: Path) -> None:
    subject = Subject.of(load_run_file(run_file))
    folder = {"path": "/o", "existing": "/o", "fault": "", "free": 1 << 40, "total": 1 << 40}
    folder |= {"free_inodes": 0, "total_inodes": 0}
    faults = [
        {"what": "no file", "where": "run.yaml:9 data.sources.0.path", "fix": "x"},
        {"what": "no folder", "where": "run.yaml:3 model.name_or_path", "fix": "y"},
    ]
    own = {"workdir_is_there": True, "faults": faults}
    own |= dict.fromkeys(("output", "cache", "hub_cache"), folder)
    found = bad(judge_files(subject, {"a": own, "b": own}, ["a", "b"]))
    assert [(f.id, f.where) for f in found] == [
        ("files.data", "a"),
        ("files.model", "a"),
        ("files.model", "b"),
    ]
    assert "run.yaml:3" in found[1].text


def test_a_mount_that_one_host_lacks() -> None:
    seen = {"b": {"is_shared": True}, "c": {"is_shared": False}}
    (found,) = judge_shared("a", seen)
    assert (found.level, found.where) == ("warning", "c")
    assert judge_shared("a", {"b": {"is_shared": False}})[0].level == "ok"


@each(
    ("state", "finding_id", "level", "words"),
    [
        ("ok", "hub.access", "ok", ""),
        ("cached", "hub.access", "ok", ""),
        ("licence", "hub.licence", "error", "https://huggingface.co/o/m"),
        ("missing", "hub.access", "error", "hf auth login"),
        ("offline", "hub.access", "error", "HF_HUB_OFFLINE"),
        ("unreachable", "hub.access", "error", "HTTPS_PROXY"),
    ],
)
def test_what_the_hub_says(state: str, finding_id: str, level: str, words: str) -> None:
    row = {"kind": "model", "name": "o/m", "said": "", "page": "huggingface.co/o/m"}
    answers = {name: {"answers": [{**row, "state": state}]} for name in ("a", "b")}
    (found,) = judge_hub(answers)
    assert (found.id, found.level, found.where) == (finding_id, level, "a, b")
    assert words in found.fix


def test_links_against_what_a_step_sends(run_file: Path) -> None:
    loaded = load_run_file(run_file)
    subject = Subject(ClusterConfig(), "/", loaded, 7_000_000_000)
    rates = {("a", "b"): 117e6, ("b", "a"): 117e6}
    (found, _) = bad(judge_bandwidth(rates, subject, 2))
    assert "4m 0" in found.text or "3m 5" in found.text  # 28 GB over a gigabit
    assert judge_bandwidth(rates, Subject(ClusterConfig(), "/"), 2)[0].level == "ok"
    stuck = judge_bandwidth({("a", "b"): 0.0}, subject, 2)
    assert stuck[0].level == "error" and "mtu" in stuck[0].fix


def test_an_all_reduce_that_failed_names_the_culprit() -> None:
    orders = {
        name: [{"rank": rank, "backend": "gloo"}] for rank, name in enumerate(("a", "b", "c"))
    }
    answers = {
        "a": {"ranks": [{"stage": "store", "fault": "not all ranks came", "missing": [2]}]},
        "b": {"ranks": [{"stage": "store", "fault": "not all ranks came", "missing": [2]}]},
        "c": {"ranks": [{"stage": "died", "fault": "ended by SIGSEGV"}]},
    }
    found = judge_reduce(answers, orders, Subject(ClusterConfig(), "/"))
    assert {f.where for f in found} == {"a rank 0", "b rank 1", "c rank 2"}
    assert "ranks 2 on c did not come" in found[0].text
    assert "SIGSEGV" in found[2].text
    assert Reach("10.0.0.1", None, None).address
