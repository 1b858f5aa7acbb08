"""A training loop in plain PyTorch and transformers, as one writes it by hand for one model.

`benchmarks/loop.py` compares isles with it. It knows nothing of isles and runs by itself:

    python benchmarks/bare_loop.py MODEL_DIR TOKENS_BIN --steps 100
    torchrun --standalone --nproc-per-node=2 benchmarks/bare_loop.py MODEL_DIR TOKENS_BIN

MODEL_DIR holds a Llama's config.json; TOKENS_BIN is a flat file of uint16 token ids. fp32, on the
CPU. B: rows, T: tokens in a row, V: vocabulary.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM


@dataclass(frozen=True, slots=True)
class Settings:
    """What the loop trains with; `micro_batch` is in rows per rank."""

    seq_length: int = 128
    micro_batch: int = 8
    max_steps: int = 1000
    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    max_norm: float = 1.0
    log_every: int = 10


def make_model(folder: Path) -> LlamaForCausalLM:
    """A Llama with fresh weights, with the attention of PyTorch and without a cache."""
    config = LlamaConfig.from_pretrained(folder)
    config.use_cache = False
    config._attn_implementation = "sdpa"
    return LlamaForCausalLM(config).train()


def make_optimizer(model: nn.Module, settings: Settings) -> torch.optim.AdamW:
    """Fused AdamW; weight decay on matrices only."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups, lr=settings.learning_rate, betas=settings.betas, eps=settings.eps, fused=True
    )


class Rows:
    """Random rows of a flat file of uint16 token ids, other ones on every rank."""

    def __init__(self, tokens: Path, settings: Settings, rank: int) -> None:
        self.settings = settings
        # A plain array over the mapped file: slicing a memmap object is slow.
        self.tokens = np.memmap(tokens, dtype=np.uint16, mode="r").view(np.ndarray)
        self.random = np.random.default_rng(1 + rank)
        self.offsets = np.arange(settings.seq_length + 1)

    def get_batch(self) -> tuple[Tensor, Tensor]:
        """Rows of the tokens, and the same rows shifted by one."""
        length, rows = self.settings.seq_length, self.settings.micro_batch
        starts = self.random.integers(len(self.tokens) - length, size=rows)
        rows_BT = self.tokens[starts[:, None] + self.offsets].astype(np.int64)
        return torch.from_numpy(rows_BT[:, :-1]), torch.from_numpy(rows_BT[:, 1:])


def learning_rate(settings: Settings, step: int) -> float:
    """Half a cosine from the peak down to zero; the first step is 0."""
    done = min(1.0, step / settings.max_steps)
    return settings.learning_rate * 0.5 * (1 + math.cos(math.pi * done))


class BareLoop:
    """Model, data and optimizer, and the loop over them. Every rank makes one.

    Args:
        model: the same weights on every rank.
        tokens: a flat file of uint16 token ids.
        settings: see there.
        rank, world_size: this rank, and how many there are; with more than one the default process
            group is there already.
    """

    def __init__(
        self, model: nn.Module, tokens: Path, settings: Settings, rank: int, world_size: int
    ) -> None:
        self.settings = settings
        self.model = (
            DistributedDataParallel(model, gradient_as_bucket_view=True)
            if (world_size > 1)
            else model
        )
        self.optimizer = make_optimizer(model, settings)
        self.rows = Rows(tokens, settings, rank)
        self.step = 0
        self.losses: list[float] = []

    def run(self, steps: int) -> None:
        """Train for so many steps. All ranks must call this."""
        for _ in range(steps):
            lr = learning_rate(self.settings, self.step)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            input_ids_BT, targets_BT = self.rows.get_batch()
            logits_BTV = self.model(input_ids=input_ids_BT).logits
            loss = F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.max_norm)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.step += 1
            if self.step % self.settings.log_every == 0 or self.step == 1:
                self.losses.append(loss.item())


def main() -> None:
    """Train; the last line is JSON with the time at the end of the last step."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("tokens", type=Path)
    parser.add_argument("--steps", type=int, default=1)
    options = parser.parse_args()
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = make_model(options.model)
    loop = BareLoop(model, options.tokens, Settings(), rank, world_size)
    loop.run(options.steps)
    if rank == 0:
        print(json.dumps({"loss": loop.losses[-1], "at": time.time()}), flush=True)
    if world_size > 1:
        # Not by way of gloo's own end, at which the two ranks were once seen to hang.
        dist.barrier()
        os._exit(0)


if __name__ == "__main__":
    main()
