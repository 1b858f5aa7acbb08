"""GPUs of this machine, from nvidia-smi; without torch."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from isles.run.env import visible_devices

GPU_QUERY = ("nvidia-smi", "--query-gpu=index,name,uuid,memory.total", "--format=csv,noheader")
"""Query whose output `read_gpus` parses."""

_FREE_QUERY = ("--query-gpu=uuid,memory.free", "--format=csv,noheader,nounits")


@dataclass(frozen=True, slots=True)
class LocalGpu:
    """One GPU that a rank could use; memory is None if the driver does not report it."""

    name: str
    uuid: str
    memory_bytes: int | None


@dataclass(frozen=True, slots=True)
class GpuFinding:
    """The visible GPUs, in the order of local ranks, and a warning if there may be more."""

    gpus: tuple[LocalGpu, ...]
    warning: str = ""


def find_gpus(environ: Mapping[str, str] = os.environ, timeout_s: float = 20.0) -> GpuFinding:
    """The GPUs visible to children of this process, by CUDA_VISIBLE_DEVICES and nvidia-smi.

    If nvidia-smi does not exist, there is no GPU. If nvidia-smi fails or hangs, as a driver may,
    the result has a warning, because GPUs may exist.
    """
    wanted = visible_devices(environ)
    if wanted == []:
        return GpuFinding(())
    try:
        answer = subprocess.run(
            GPU_QUERY,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except FileNotFoundError:
        return GpuFinding(())
    except subprocess.TimeoutExpired:
        return _unknown(f"nvidia-smi did not answer within {timeout_s:g} s")
    except OSError as error:
        return _unknown(f"cannot run nvidia-smi: {error.strerror}")
    return read_gpus(answer.returncode, answer.stdout, answer.stderr, wanted)


def free_bytes() -> dict[str, int]:
    """Free memory of the GPUs of this machine, by uuid; empty if unknown."""
    rows = [line.split(",") for line in ask_driver(*_FREE_QUERY).splitlines()]
    return {
        row[0].strip(): int(row[1]) * 2**20
        for row in rows
        if len(row) == 2 and row[1].strip().isdecimal()
    }


def ask_driver(*words: str, timeout_s: float = 20.0) -> str:
    """Output of nvidia-smi; empty if it fails, does not answer or does not exist."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "" if done.returncode else done.stdout


def read_gpus(code: int, stdout: str, stderr: str, wanted: list[str] | None) -> GpuFinding:
    """Parse the answer to `GPU_QUERY`, from this or another machine.

    Args:
        code, stdout, stderr: result of nvidia-smi.
        wanted: entries of CUDA_VISIBLE_DEVICES; None: all.
    """
    lines = (stdout.strip() or stderr.strip()).splitlines()
    if lines and lines[0].lower().startswith("no devices were found"):
        return GpuFinding(())
    if code:
        cause = lines[0] if lines else "no message"
        return _unknown(f"nvidia-smi failed with exit code {code}: {cause}")
    present: list[LocalGpu] = []
    for line in stdout.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) >= 4:
            memory = parts[-1].removesuffix("MiB").strip()
            size = int(memory) * 2**20 if memory.isdecimal() else None
            # A name may contain a comma; the other three fields cannot.
            present.append(LocalGpu(", ".join(parts[1:-2]), parts[-2], size))
    return GpuFinding(tuple(present)) if wanted is None else _select(present, wanted)


def _unknown(cause: str) -> GpuFinding:
    return GpuFinding(
        (), f"{cause}; isles assumes that this machine has no GPU. If it has one, check the driver."
    )


def _select(present: list[LocalGpu], wanted: list[str]) -> GpuFinding:
    # As CUDA reads CUDA_VISIBLE_DEVICES: it stops at the first invalid entry.
    chosen: list[LocalGpu] = []
    for entry in wanted:
        if entry.isdecimal():
            gpu = present[int(entry)] if int(entry) < len(present) else None
        elif entry.startswith("MIG-"):
            gpu = LocalGpu("MIG device", entry, None)  # nvidia-smi's query does not list them
        else:
            gpu = next((gpu for gpu in present if gpu.uuid.startswith(entry)), None)
        if gpu is None:
            return GpuFinding(
                tuple(chosen),
                f"CUDA_VISIBLE_DEVICES contains {entry}, which this machine does not have "
                f"(it has {len(present)}); CUDA ignores this entry and all entries after it.",
            )
        chosen.append(gpu)
    return GpuFinding(tuple(chosen))
