"""What is found of GPUs, and of torch on each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from isles.check.finding import Finding
from isles.check.panel import Answers
from isles.facts.units import format_bytes

_GIB = 1 << 30
_WHEELS = (((12, 0), "cu128"), ((10, 0), "cu128"), ((7, 5), "cu126"))
"""The oldest CUDA of torch's wheels that has kernels for this capability and those above it.

Source: PyTorch's release compatibility matrix (RELEASE.md of pytorch/pytorch)."""


def judge_gpus(cards: Answers, nproc: Mapping[str, int], device: str) -> list[Finding]:
    """Findings of every GPU, as its driver tells it."""
    findings: list[Finding] = []
    for name, answer in cards.items():
        if answer["warning"]:
            findings.append(
                Finding(
                    "gpu.driver",
                    "error" if device == "cuda" else "warning",
                    name,
                    answer["warning"],
                    fix=f"on {name}: nvidia-smi; after an update of the driver: sudo reboot",
                )
            )
        gpus = answer["gpus"]
        if not gpus:
            continue
        names = ", ".join(dict.fromkeys(gpu["name"] for gpu in gpus))
        findings.append(
            Finding("gpu.driver", "ok", name, f"{len(gpus)} x {names}", gpus[0]["driver"])
        )
        if nproc.get(name, 0) <= len(gpus) and device == "cuda":
            findings.append(Finding("gpu.count", "ok", name, f"{len(gpus)} GPUs", str(len(gpus))))
        for finding_id, judge in (
            ("gpu.errors", _errors),
            ("gpu.throttle", _throttle),
            ("gpu.busy", _busy),
        ):
            bad = [found for gpu in gpus for found in judge(name, gpu)]
            findings += bad or [Finding(finding_id, "ok", name, _WELL[finding_id])]
    return findings


_WELL = {
    "gpu.errors": "no memory errors",
    "gpu.throttle": "none is slowed down",
    "gpu.busy": "nobody else uses them",
}


def _errors(name: str, gpu: dict[str, Any]) -> Iterator[Finding]:
    bad = gpu["uncorrected"]
    if not bad and not gpu["failed_rows"]:
        return
    what = f"{bad} uncorrected memory errors" if bad else "rows of its memory that cannot be mended"
    yield Finding(
        "gpu.errors",
        "error",
        name,
        f"GPU {gpu['index']} ({gpu['name']}) has {what}",
        measured=str(bad or "failed rows"),
        limit="0",
        fix=f"sudo nvidia-smi -r -i {gpu['index']}, or reboot; if they come back, leave it out "
        "(CUDA_VISIBLE_DEVICES) and have the card replaced",
    )


def _throttle(name: str, gpu: dict[str, Any]) -> Iterator[Finding]:
    if gpu["throttle"]:
        yield Finding(
            "gpu.throttle",
            "warning",
            name,
            f"GPU {gpu['index']} ({gpu['name']}) is slowed down by {gpu['throttle']}, at "
            f"{gpu['temperature']} degrees",
            measured=gpu["throttle"],
            fix="look at fans, dust, room and power supply; the run goes on, more slowly",
        )


def _busy(name: str, gpu: dict[str, Any]) -> Iterator[Finding]:
    used, total = gpu["used_bytes"], gpu["memory_bytes"]
    if not gpu["users"] and used < max(_GIB, total // 10):
        return
    who = ", ".join(
        f"{user['name'].rpartition('/')[2]} (pid {user['pid']})" for user in gpu["users"]
    )
    pids = " ".join(str(user["pid"]) for user in gpu["users"])
    yield Finding(
        "gpu.busy",
        "warning",
        name,
        f"GPU {gpu['index']} ({gpu['name']}): {format_bytes(used)} of {format_bytes(total)} are in "
        f"use by {who or 'a program that the driver does not name'}",
        measured=format_bytes(used),
        fix=f"if it is yours: isles stop, or on {name}: kill {pids}".rstrip()
        if pids
        else f"on {name}: sudo fuser -v /dev/nvidia*",
    )


def judge_ranks(ranks: Answers, device: str) -> list[Finding]:
    """Findings of torch and of a first kernel, on every device of every host."""
    findings: list[Finding] = []
    for name, answer in ranks.items():
        bad = [found for i, own in enumerate(answer["ranks"]) for found in _rank(name, i, own)]
        # What is wrong with the installation is wrong for every rank.
        once = {finding.text: finding for finding in bad}
        findings += once.values()
        if bad:
            continue
        own = answer["ranks"][0]
        count = len(answer["ranks"])
        where = "its GPU" if count == 1 else f"each of its {count} GPUs"
        findings.append(
            Finding("torch.imports", "ok", name, f"torch {own['torch']}", f"{own['seconds']:.1f} s")
        )
        if device == "cuda":
            text = f"a kernel ran on {where}, with the right result"
            findings += [
                Finding("gpu.visible", "ok", name, f"torch sees {where}"),
                Finding("gpu.kernel", "ok", name, text),
            ]
    return findings


def _rank(name: str, index: int, own: dict[str, Any]) -> Iterator[Finding]:
    if not own.get("fault"):
        return
    fault, stage = str(own["fault"]), own["stage"]
    if stage == "kernel":
        yield _kernel(name, index, own)
    elif stage == "visible":
        yield Finding(
            "gpu.visible",
            "error",
            name,
            f"torch cannot use the GPUs: {fault}",
            measured=f"torch {own['torch']}, CUDA {own['cuda'] or 'none'}",
            fix=_pip("cu128")
            if own["cuda"] is None
            else "compare the driver (nvidia-smi, top right: the newest CUDA that it knows) with "
            f"torch's CUDA {own['cuda']}: update the driver, or take torch for an older CUDA",
        )
    elif stage == "silent":
        yield Finding(
            "torch.imports",
            "error",
            name,
            "torch was not imported, or its first kernel not done, in time",
            fix=f"try it on {name}: time python -c 'import torch'; a slow network disk? "
            "--timeout 3m waits longer; a kernel that hangs: dmesg | grep -i -e nvrm -e xid",
        )
    else:
        yield Finding(
            "torch.imports",
            "error",
            name,
            f"torch cannot be used: {fault}",
            measured=fault,
            fix=f"try it on {name}: python -c 'import torch'; isles setup run.yaml installs it",
        )


def _kernel(name: str, index: int, own: dict[str, Any]) -> Finding:
    fault = str(own["fault"])
    if "no kernel image" not in fault:
        return Finding(
            "gpu.kernel",
            "error",
            name,
            f"a kernel failed on {'GPU ' + str(index) if own.get('gpu') else 'the CPU'}: {fault}",
            measured=fault,
            fix=f"on {name}: dmesg | grep -i -e nvrm -e xid; a fault that comes back is the card's "
            "or the driver's",
        )
    major, minor = own["capability"]
    return Finding(
        "gpu.kernel",
        "error",
        name,
        f"torch {own['torch']} has no kernels for GPU {index}, {own['gpu']} (sm_{major}{minor})",
        measured=f"sm_{major}{minor}",
        limit=" ".join(own["archs"]),
        fix=_pip(_wheel((major, minor))),
    )


def _wheel(capability: tuple[int, int]) -> str:
    return next((index for least, index in _WHEELS if capability >= least), "cu126")


def _pip(index: str) -> str:
    return (
        f"pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/{index}"
    )
