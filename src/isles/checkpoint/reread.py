"""Read an export in a separate process: `python -m isles.checkpoint.reread FOLDER ANSWER`.

A file may lack something that the run still has in memory. So a new process loads the folder as a
user would, and scores the rows of a probe from the logits. Each checkpoint has the scores that the
run itself gave to the same rows; see `isles.train.metrics.score_probe`.

B: rows of the probe. T: tokens of a row.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from isles.config.foreign import read_json
from isles.config.scratch import ScratchError, scratch_folder
from isles.errors import TrainingError
from isles.facts.units import format_bytes
from isles.run.limits import memory

log = logging.getLogger(__name__)

PROBE = (8, 16)
"""Rows and tokens of the probe."""

EXACT, ROUNDED, MERGED = 5e-3, 0.2, 0.4
"""Limits for the differences of the scores, as a share of the spread of the scores."""

_ANSWER, _IS_ROUNDED = "scores", "is_rounded"


def probe_tokens(vocab_size: int) -> Tensor:
    """The ids of the probe, int64 [B, T]: the same for one size of vocabulary."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocab_size, PROBE, generator=generator)


@torch.no_grad()
def scores(model: Any, *, autocast: torch.dtype | None = None) -> Tensor:
    """The log-probability that a Hugging Face model gives to each row of the probe, fp32 [B].

    Args:
        model: in eval mode. Flash attention is replaced by eager attention.
        autocast: the computing type of a model with weights of two types.
    """
    if model.config._attn_implementation == "flash_attention_2":
        # Flash attention needs 16 bits and a GPU. Some of its models do not support sdpa.
        model.set_attn_implementation("eager")
    device = next(model.parameters()).device
    tokens = probe_tokens(int(model.config.get_text_config().vocab_size)).to(device)
    with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
        logits: Tensor = model(input_ids=tokens, use_cache=False).logits
    losses = F.cross_entropy(logits[:, :-1].float().mT, tokens[:, 1:], reduction="none")
    return -losses.sum(1).cpu()


def difference(found: Tensor, wanted: Tensor) -> float:
    """The difference of two results, as a share of the spread of the wanted scores; see
    `scores`."""
    wanted, found = wanted.double(), found.double()
    # An untrained model gives nearly the same score to each row.
    spread = max(float(wanted.std()), 1e-3 * float(wanted.abs().mean()))
    return float((found - wanted).square().mean().sqrt()) / spread


def read_again(
    folder: Path,
    wanted: Tensor | None,
    *,
    is_rounded: bool = False,
    base_bytes: int = 0,
    least_s: float = 600.0,
) -> None:
    """Load an exported model in a new process, and compare its scores.

    If this machine has too little memory for the process, or is too slow, isles logs a warning and
    keeps the export.

    Args:
        folder: the export. An adapter is loaded with the base model that it names.
        wanted: the trained model's scores, see `scores`. Without them the export must only load
            completely and give finite numbers.
        is_rounded: whether the run computed in 16 bits.
        base_bytes: size of an adapter's base weights.
        least_s: seconds for an export without weights; larger exports get more.

    Raises:
        TrainingError: the export cannot be loaded, or its scores differ.
    """
    size = base_bytes + sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    free = memory().available
    config = folder / "config.json"
    why = ""
    if size * 1.2 > free:
        why = f"it needs {format_bytes(size)}, but only {format_bytes(free)} of memory is free"
    elif config.is_file() and "auto_map" in read_json(config):
        why = "its code is not part of transformers"
    if why:
        log.warning("the export was not checked: %s", why)
        return
    timeout_s = least_s + size / 5e7
    try:
        with scratch_folder("isles-export-") as place:
            answer = _answer_of(folder, place / "answer.safetensors", timeout_s)
    except ScratchError as error:
        log.warning("the export was not checked: %s", error.what)
        return
    if answer is None:
        return
    if not bool(torch.isfinite(answer[_ANSWER]).all()):
        raise _unread(folder, "its scores are not finite")
    if wanted is None:
        return
    limit = ROUNDED if is_rounded or bool(answer[_IS_ROUNDED]) else EXACT
    if (apart := difference(answer[_ANSWER], wanted)) > limit:
        what = f"the log-probabilities of a probe differ by {apart:.1%} of their spread"
        raise _unread(folder, f"{what}; the limit is {limit:.1%}")


def _answer_of(folder: Path, file: Path, timeout_s: float) -> dict[str, Tensor] | None:
    # The export's scores from a new process; None if the process failed for another reason.
    command = [sys.executable, "-m", "isles.checkpoint.reread", str(folder), str(file)]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    try:
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        log.warning("the export was not checked: loading took more than %.0f s", timeout_s)
        return None
    if done.returncode < 0:
        # Most often the kernel's out-of-memory killer, which is not the export's fault.
        number = -done.returncode
        log.warning("the export was not checked: signal %d killed the process", number)
        return None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise _unread(folder, lines[-1][:500])
    return load_file(file)


def _unread(folder: Path, why: str) -> TrainingError:
    return TrainingError(
        f"the export differs from the trained model: {why}",
        where=str(folder),
        fix="check the base model's config.json; the checkpoints are unchanged",
    )


def main() -> int:
    """Load a folder and write its scores into a file; returns the exit code."""
    folder, file = sys.argv[1:]
    model, report = _load(Path(folder))
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if names := sorted(map(str, report.get(kind) or ())):
            sys.stderr.write(f"{kind}: {len(names)}, the first {names[0]}\n")
            return 1
    is_rounded = any(p.is_floating_point() and p.itemsize < 4 for p in model.parameters())
    found = {_ANSWER: scores(model.eval()), _IS_ROUNDED: torch.tensor(is_rounded)}
    save_file({name: value.contiguous() for name, value in found.items()}, file)
    return 0


def _load(folder: Path) -> tuple[Any, dict[str, Any]]:
    # A model, or an adapter with its base model; and the names missing in its files.
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"dtype": "auto", "use_safetensors": True}
    adapter = folder / "adapter_config.json"
    if not adapter.is_file():
        return AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)  # type: ignore[no-any-return]
    from peft import PeftModel

    name = read_json(adapter)["base_model_name_or_path"]
    base = AutoModelForCausalLM.from_pretrained(name, **options)
    # A missing name gives a new adapter, and the scores show it.
    return PeftModel.from_pretrained(base, folder), {}


if __name__ == "__main__":
    sys.exit(main())
