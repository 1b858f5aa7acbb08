"""The optimizers of a run file."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from isles.config.sections.training import TrainingConfig, missing_torchao
from isles.train.optimizer.muon import Muon
from isles.train.optimizer.sgd import ShardedSGD


def make_optimizers(
    config: TrainingConfig, model: nn.Module, *, seed: int = 0
) -> Sequence[Optimizer]:
    """The run file's optimizers over a model's parameters.

    Weight decay applies to matrices only. Muon gets the matrices inside the blocks. Embeddings, the
    head, norms and biases go to AdamW with the same learning rate, because Muon's updates are
    scaled to AdamW's size.

    Args:
        model: its trained parameters must be allocated, whole or sharded.
        seed: of stochastic rounding; the same on all ranks.

    Raises:
        MissingDependencyError: torchao is needed and not installed.

    Source: Loshchilov and Hutter 2019 (arXiv:1711.05101); Liu et al. 2025 (arXiv:2502.16982) for
    Muon's scale.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        return []  # a pipeline stage without an adapter
    match config.optimizer:
        case "adamw" if not config.stochastic_rounding:
            return [_adamw(config, trained)]
        case "adamw" | "adamw_8bit":
            if error := missing_torchao(config):
                raise error
            from isles.train.optimizer.low_memory import LowMemoryAdamW

            low_memory = LowMemoryAdamW(
                _decay_groups(config, trained),
                lr=config.learning_rate,
                betas=(config.adam_beta1, config.adam_beta2),
                eps=config.adam_epsilon,
                eight_bit=config.optimizer == "adamw_8bit",
                rounds_at_random=config.stochastic_rounding,
                seed=seed,
            )
            return [low_memory]
        case "sgd":
            groups = _decay_groups(config, trained)
            is_sharded = any(isinstance(p, DTensor) for p in trained)
            sgd = (ShardedSGD if is_sharded else torch.optim.SGD)(
                groups, lr=config.learning_rate, momentum=config.momentum, fused=True
            )
            if config.momentum:
                _start_momentum(sgd)
            return [sgd]
        case "muon":
            head = model.get_output_embeddings()  # type: ignore[operator]
            outer: list[nn.Module] = [p for p in model.modules() if isinstance(p, nn.Embedding)]
            outer += [] if head is None else [head]
            ends = {id(p) for part in outer for p in part.parameters()}
            inner = [p for p in trained if p.ndim == 2 and id(p) not in ends]
            chosen = {id(p) for p in inner}
            rest = [p for p in trained if id(p) not in chosen]
            muon = Muon(
                inner,
                lr=config.learning_rate,
                momentum=config.momentum,
                weight_decay=config.weight_decay,
            )
            _start_momentum(muon)
            return [muon, _adamw(config, rest)] if rest else [muon]  # an adapter has no rest


def _start_momentum(optimizer: Optimizer) -> None:
    # Start with a momentum of zeros, which is the same mathematics. Without it, torch's fused SGD
    # leaves garbage in the buffer if its first step is skipped, and a checkpoint from before the
    # first step lacks the buffer.
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def _adamw(config: TrainingConfig, parameters: list[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW(
        _decay_groups(config, parameters),
        lr=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_epsilon,
        fused=True,
    )


def _decay_groups(
    config: TrainingConfig, parameters: list[nn.Parameter]
) -> list[dict[str, object]]:
    groups: list[dict[str, object]] = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
