"""Optimizers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from isles.config.sections.training import TrainingConfig
from isles.train.small_adamw import SmallAdamW


def make_optimizers(
    config: TrainingConfig, model: nn.Module, *, seed: int = 0
) -> Sequence[Optimizer]:
    """The optimizers of the run file over a model's parameters.

    Weight decay falls on matrices only. Muon takes the matrices inside the blocks; embeddings,
    the head, norms and biases go to AdamW, with the same learning rate (Muon's updates are scaled
    to AdamW's size).

    Args:
        config: the run file's section.
        model: whose trained parameters have their memory, whole or sharded.
        seed: of stochastic rounding; the same on all ranks.

    Source: Loshchilov and Hutter 2019 (arXiv:1711.05101); Liu et al. 2025 (arXiv:2502.16982) for
    Muon's scale.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    match config.optimizer:
        case "adamw" if not config.stochastic_rounding:
            return [_adamw(config, [p for _, p in named])]
        case "adamw" | "adamw_8bit":
            return [_small_adamw(config, [p for _, p in named], seed)]
        case "sgd":
            groups = _decay_groups(config, [p for _, p in named])
            # The fused kernel does not know shards; without it a step waits for the GPU.
            is_whole = not any(isinstance(p, DTensor) for _, p in named)
            sgd = torch.optim.SGD(
                groups, lr=config.learning_rate, momentum=config.momentum, fused=is_whole
            )
            if config.momentum:
                _start_momentum(sgd)
            return [sgd]
        case "muon":
            ends = {id(p) for part in _ends(model) for p in part.parameters()}
            inner = [p for _, p in named if p.ndim == 2 and id(p) not in ends]
            chosen = {id(p) for p in inner}
            rest = [p for _, p in named if id(p) not in chosen]
            is_cpu = any(p.device.type == "cpu" for p in inner)
            muon = (MuonFp32 if is_cpu else torch.optim.Muon)(
                inner,
                lr=config.learning_rate,
                momentum=config.momentum,
                weight_decay=config.weight_decay,
                adjust_lr_fn="match_rms_adamw",
            )
            _start_momentum(muon)
            return [muon, _adamw(config, rest)] if rest else [muon]  # adapters have none


class MuonFp32(torch.optim.Muon):
    """torch's Muon with its iterations in fp32, for parameters on a CPU.

    Source: torch/optim/_muon.py, with Nesterov momentum and `match_rms_adamw`.
    """

    # torch's own iterates in bf16, which a CPU without AVX-512 emulates eight times slower.
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take a step; see `torch.optim.Muon`."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                buffer = self.state[parameter]["momentum_buffer"]
                buffer.lerp_(parameter.grad, 1 - group["momentum"])
                update = parameter.grad.lerp(buffer, group["momentum"]).float()
                update = _orthogonalised(update, group)
                scale = 0.2 * max(parameter.shape) ** 0.5
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-group["lr"] * scale)
        return loss


def _orthogonalised(matrix: Tensor, group: dict[str, Any]) -> Tensor:
    """The nearest matrix whose singular values are about 1, by Newton-Schulz iterations."""
    a, b, c = group["ns_coefficients"]
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=group["eps"])
    for _ in range(group["ns_steps"]):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def _start_momentum(optimizer: Optimizer) -> None:
    """Begin with a momentum of zeros, which is the same mathematics.

    Left to themselves, torch's fused SGD leaves garbage in the buffer when its first step is
    skipped, and a checkpoint taken before the first step lacks it.
    """
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


def _small_adamw(config: TrainingConfig, parameters: list[nn.Parameter], seed: int) -> Optimizer:
    return SmallAdamW(
        _decay_groups(config, parameters),
        lr=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_epsilon,
        eight_bit=config.optimizer == "adamw_8bit",
        rounds_at_random=config.stochastic_rounding,
        seed=seed,
    )


def _decay_groups(
    config: TrainingConfig, parameters: list[nn.Parameter]
) -> list[dict[str, object]]:
    groups: list[dict[str, object]] = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _ends(model: nn.Module) -> list[nn.Module]:
    """Embeddings of tokens and positions, and the head."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    ends: list[nn.Module] = [part for part in model.modules() if isinstance(part, nn.Embedding)]
    return ends if head is None else [*ends, head]
