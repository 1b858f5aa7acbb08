"""Phase 2 in plain PyTorch DDP, tiny: a small language model learns to tell what an image shows.

Started by cluster_train.sh through torchrun, as a script of your own in its place would be:
`train_phase2.py --config config/train_config.yaml`. Nothing of isles trains here.
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from train.train_llm.train_llm_conf import Phase2Config, load_config

CLASSES, PIXELS, VOCAB, WORDS, WIDTH = 8, 32, 64, 12, 64


class ImageTeller(nn.Module):
    """A projector from images to the first embedding of a text, and a causal transformer."""

    def __init__(self, *, recomputes: bool) -> None:
        """With recomputes, activations inside the layers are not kept."""
        super().__init__()
        self.recomputes = recomputes
        self.projector = nn.Sequential(nn.Linear(PIXELS, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.position = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, images: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
        """The loss of the texts, each word from the image and the words before it."""
        words = self.embedding(texts[:, :-1])
        hidden = torch.cat([self.projector(images)[:, None], words], dim=1)
        hidden = hidden + self.position.weight
        mask = nn.Transformer.generate_square_subsequent_mask(WORDS, device=hidden.device)
        for layer in self.layers:
            if self.recomputes:
                hidden = checkpoint(layer, hidden, mask, use_reentrant=False)
            else:
                hidden = layer(hidden, mask)
        return cross_entropy(self.head(hidden).flatten(0, 1), texts.flatten())


def make_data(samples: int) -> TensorDataset:
    """Images of a few classes with noise, and the text of each class; the same on all ranks."""
    generator = torch.Generator().manual_seed(0)
    classes = torch.arange(samples) % CLASSES
    prototypes = torch.randn(CLASSES, PIXELS, generator=generator)
    images = prototypes[classes] + 0.1 * torch.randn(samples, PIXELS, generator=generator)
    texts = torch.randint(VOCAB, (CLASSES, WORDS), generator=generator)[classes]
    return TensorDataset(images, texts)


def main() -> int:
    """Train on all ranks; returns the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", default="config/train_config.yaml")
    options = parser.parse_args()
    try:
        config = load_config(options.config)
        trainer = choose_trainer(config)
    except ValueError as error:
        sys.stderr.write(f"error: {options.config}: {error}\n")
        return 1
    if trainer == "lightning":
        from phase2_lightning import fit

        fit(config)
        return 0
    train(config)
    return 0


def choose_trainer(config: Phase2Config) -> str:
    """lightning or torch; says so where auto has chosen."""
    from importlib.util import find_spec

    has_lightning = find_spec("lightning") is not None
    if config.trainer == "lightning" and not has_lightning:
        raise ValueError("trainer is lightning, which is not installed: pip install lightning")
    if config.trainer != "auto":
        return config.trainer
    if not has_lightning and os.environ.get("RANK", "0") == "0":
        print("lightning is not installed: training in plain torch", flush=True)
    return "lightning" if has_lightning else "torch"


def setup() -> torch.device:
    """Join the others, as torchrun's variables say; the device of this rank."""
    backend = os.environ.get("BACKEND") or ("nccl" if torch.cuda.is_available() else "gloo")
    if not torch.cuda.is_available():
        dist.init_process_group(backend)
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group(backend, device_id=device if backend == "nccl" else None)
    return device


def uses_bf16(config: Phase2Config) -> bool:
    """Whether to compute in bf16 where that is enough."""
    if config.precision == "auto":
        return torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    return config.precision == "bf16"


def train(config: Phase2Config) -> None:
    """Train from where the last checkpoint ends. All ranks must call this."""
    device = setup()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    dataset = make_data(config.samples)
    # What does not divide is left out, so that nobody sees a pair twice.
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, world_size, rank, drop_last=True)
    loader = DataLoader(dataset, config.batch_size, sampler=sampler)
    model = ImageTeller(recomputes=config.gradient_checkpointing).to(device)
    ddp = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=config.learning_rate)
    folder = Path(config.output_dir)
    done = resume(folder / "checkpoint.pt", model, optimizer, device)
    if rank == 0:
        rows = config.batch_size * config.gradient_accumulation * world_size
        precision = "bf16" if uses_bf16(config) else "fp32"
        print(f"{world_size} ranks on {device.type}, {rows} pairs a step, {precision}", flush=True)
        print(f"beginning with epoch {done + 1}", flush=True)
    for epoch in range(done + 1, config.epochs + 1):
        sampler.set_epoch(epoch)
        loss = train_epoch(config, ddp, loader, optimizer, device)
        dist.all_reduce(loss)
        if rank == 0:
            mean = loss.item() / len(sampler) / world_size
            print(f"epoch {epoch}/{config.epochs} loss {mean:.4f}", flush=True)
            if epoch % config.checkpoint_every == 0 or epoch == config.epochs:
                state = {"epoch": epoch, "model": model.state_dict()}
                save({**state, "optimizer": optimizer.state_dict()}, folder / "checkpoint.pt")
        dist.barrier()
    if rank == 0:
        save(model.state_dict(), folder / "model.pt")
        print(f"saved {folder / 'model.pt'}", flush=True)
    dist.destroy_process_group()


def train_epoch(
    config: Phase2Config,
    model: DistributedDataParallel,
    loader: DataLoader[Any],
    optimizer: torch.optim.Optimizer,
    device: torch.device,
) -> torch.Tensor:
    """One pass over this rank's data; the sum of its losses. All ranks must call this."""
    total, kept = torch.zeros((), device=device), config.gradient_accumulation
    mine, step_rows = len(loader.sampler), kept * config.batch_size  # type: ignore[arg-type]
    for batch, (images, texts) in enumerate(loader):
        is_last = (batch + 1) % kept == 0 or batch + 1 == len(loader)
        rows = min(step_rows, mine - batch // kept * step_rows)
        # Gradients are exchanged once a step, not once a batch.
        with nullcontext() if is_last else model.no_sync():
            with torch.autocast(device.type, torch.bfloat16, enabled=uses_bf16(config)):
                loss = model(images.to(device), texts.to(device))
            # The mean over the pairs of the step: the last batch may be smaller.
            (loss * len(images) / rows).backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
        total += loss.detach() * len(images)
    return total


def save(state: dict[str, Any], path: Path) -> None:
    """Whole or not at all: a process that is killed meanwhile leaves the file of before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def resume(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
) -> int:
    """Load rank 0's checkpoint everywhere; epochs that are done. All ranks must call this."""
    is_there = dist.get_rank() == 0 and path.exists()
    state = [torch.load(path, map_location="cpu") if is_there else None]
    # The folder of rank 0 need not be there on other nodes.
    dist.broadcast_object_list(state, device=device)
    if state[0] is None:
        return 0
    model.load_state_dict(state[0]["model"])
    optimizer.load_state_dict(state[0]["optimizer"])
    return int(state[0]["epoch"])


if __name__ == "__main__":
    exit_code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # All is saved: a thread of a backend that is still there must not abort Python's end.
    os._exit(exit_code)
