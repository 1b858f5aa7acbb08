"""The random state of one rank, as a file without pickles."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def rng_file(folder: Path, rank: int) -> Path:
    """Where a rank's random state lies in a checkpoint."""
    return folder / f"rng-{rank:05d}.safetensors"


def save_rng(folder: Path, rank: int) -> None:
    """Write this rank's random state: PyTorch's, of the CPU and of this rank's GPU."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    save_file(state, rng_file(folder, rank))


def restore_rng(folder: Path, rank: int, *, saved_world_size: int, world_size: int) -> bool:
    """Take the random state back; only where the number of ranks is the same.

    Returns:
        Whether it was restored; otherwise the caller seeds afresh.
    """
    file = rng_file(folder, rank)
    if saved_world_size != world_size or not file.is_file():
        return False
    state = load_file(file)
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    return True
