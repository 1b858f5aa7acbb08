"""Read an export in a separate process: `python -m isles.checkpoint.reread FOLDER LOGITS`.

A file may lack something that the run still has in memory. So a new process loads the folder as a
user would, and computes the logits of a test text. The run compares them with its own logits.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from isles.config.foreign import read_json
from isles.config.scratch import ScratchError, scratch_folder
from isles.errors import TrainingError
from isles.facts.units import format_bytes
from isles.run.limits import memory

log = logging.getLogger(__name__)

PROBE = (2, 16)
"""Rows and tokens of the probe."""

_ANSWER = "logits"


@torch.no_grad()
def answer(model: Any, *, autocast: torch.dtype | None = None) -> Tensor:
    """Logits of a model for the same few tokens every time, [B, T, V] in fp32 on the CPU.

    A model with flash attention has eager attention afterwards.
    """
    if model.config._attn_implementation == "flash_attention_2":
        # It computes in 16 bits and on a GPU only. Some of its models have no sdpa.
        model.set_attn_implementation("eager")
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    vocab_size = int(model.config.get_text_config().vocab_size)
    tokens = torch.randint(vocab_size, PROBE, generator=generator).to(device)
    with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
        logits: Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits.float().cpu()


def read_again(folder: Path, wanted: Tensor | None, *, least_s: float = 600.0) -> None:
    """Load an exported model in a fresh process, and try it.

    If this machine has too little memory for the process, or is too slow, isles logs a warning and
    keeps the export.

    Args:
        folder: the export.
        wanted: what the trained model answers, see `answer`; None: it is not in memory. Then the
            export must load whole and give numbers.
        least_s: time for an export without weights; larger exports have more.

    Raises:
        TrainingError: it cannot be loaded, or answers otherwise.
    """
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    free = memory().available
    why = ""
    if size * 1.2 > free:
        why = f"it has {format_bytes(size)}, and {format_bytes(free)} of memory is free"
    elif "auto_map" in read_json(folder / "config.json"):
        why = "its code is not part of transformers"
    if why:
        log.warning("the export is not read again: %s", why)
        return
    timeout_s = least_s + size / 5e7
    try:
        with scratch_folder("isles-export-") as place:
            found = _answer_of(folder, place / "answer.safetensors", timeout_s)
    except ScratchError as error:
        log.warning("the export is not read again: %s", error.what)
        return
    if found is None:
        return
    if not bool(torch.isfinite(found).all()):
        raise _unread(folder, "it gives no numbers")
    if wanted is None:
        return
    # bf16 has three digits, and another device adds them up in another order.
    is_short = any("32" not in str(dtype) for dtype in _types(folder))
    tolerance = (0.05 if is_short else 1e-3) * float(wanted.abs().max())
    if (apart := float((found - wanted).abs().max())) > tolerance:
        raise _unread(folder, f"its logits differ from the trained model by up to {apart:.3g}")


def _answer_of(folder: Path, file: Path, timeout_s: float) -> Tensor | None:
    # What the export answers in a fresh process; None: the process says nothing about the export.
    command = [sys.executable, "-m", "isles.checkpoint.reread", str(folder), str(file)]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    try:
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        log.warning("the export is not read again: it takes more than %.0f s", timeout_s)
        return None
    if done.returncode < 0:
        # Most often the kernel, for memory: it says nothing about the export.
        number = -done.returncode
        log.warning("the export is not read again: signal %d ended the process", number)
        return None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise _unread(folder, lines[-1][:500])
    return load_file(file)[_ANSWER]


def _unread(folder: Path, why: str) -> TrainingError:
    return TrainingError(
        f"the export differs from the trained model: {why}",
        where=str(folder),
        fix="the checkpoints are untouched; look at the base model's config.json",
    )


def _types(folder: Path) -> set[str]:
    from safetensors import safe_open

    found = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as reader:
            found |= {reader.get_slice(name).get_dtype() for name in reader.keys()}  # noqa: SIM118  # no dict
    return found


def main() -> int:
    """Load a folder, and write its answer into a file; returns the exit code."""
    from transformers import AutoModelForCausalLM

    folder, file = sys.argv[1:]
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", use_safetensors=True, output_loading_info=True
    )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if names := sorted(map(str, report.get(kind) or ())):
            sys.stderr.write(f"{kind}: {len(names)}, the first {names[0]}\n")
            return 1
    save_file({_ANSWER: answer(model.eval()).contiguous()}, file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
