"""`training.precision: fp8-mixed`: the linear layers of a model's blocks multiply in fp8."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn

from isles.config.sections.training import TrainingConfig, missing_torchao
from isles.errors import UserError
from isles.models.adapter import quiet_imports
from isles.strategies.fsdp import find_blocks

log = logging.getLogger(__name__)

_UNIT = 16
"""Both sides of a matrix must be multiples of it for the fp8 kernels of cuBLAS."""


def use_fp8(model: nn.Module, training: TrainingConfig, class_names: tuple[str, ...] = ()) -> None:
    """Replace the linear layers of a model's blocks with torchao's Float8Linear, in place.

    A layer casts its input, its weight and the gradient of its output to fp8 for each product, each
    with one scale for the whole tensor. Weights keep their names and types, so that strategies,
    optimizers, checkpoints and exports do not differ from bf16-mixed. Embedding, norms and head
    stay in bf16. Call this before the blocks are compiled and sharded.

    Args:
        class_names: class names of the blocks; if empty, see `find_blocks`.

    Raises:
        MissingDependencyError: torchao is not installed.
        UserError: the blocks cannot be found, or have no linear layer with suitable sizes.

    Source: Micikevicius et al. 2022 (arXiv:2209.05433); torchao/float8/README.md.
    """
    if error := missing_torchao(training):
        raise error
    with quiet_imports():
        from torchao.float8 import convert_to_float8_training
    modules = {m: None for block in find_blocks(model, class_names) for m in block.modules()}
    layers = [module for module in modules if isinstance(module, nn.Linear)]
    fitting = {id(layer) for layer in layers if _fits(layer)}
    if not fitting:
        reason = "no linear layer in its blocks whose two sizes are multiples of "
        reason += f"{_UNIT}, which fp8 needs"
        if not layers:
            # Layers that multiply by a matrix, but are of another class, such as GPT-2's Conv1D.
            matrices = [m for m in modules if getattr(getattr(m, "weight", None), "ndim", 0) == 2]
            own = ", ".join(sorted({type(module).__name__ for module in matrices}))
            reason = f"no torch.nn.Linear in its blocks{own and f', but {own}'}, and torchao "
            reason += "multiplies only torch.nn.Linear in fp8"
        raise UserError(
            f"{type(model).__name__} has {reason}",
            where="training.precision",
            fix="use training.precision: bf16-mixed",
            id="gpu.precision",
        )
    convert_to_float8_training(
        model, module_filter_fn=lambda layer, _: id(layer) in fitting, config=_settings()
    )
    log.info("fp8=%d of %d linear layers of the blocks", len(fitting), len(layers))


def _fits(layer: nn.Linear) -> bool:
    return layer.in_features % _UNIT == 0 and layer.out_features % _UNIT == 0


def _settings() -> Any:
    # torchao's default recipe: one scale per tensor, found anew in each product, which is the
    # fastest. fp8 gathers of FSDP2 would need a tensor subclass as weight, which checkpoints and
    # the optimizer would see.
    from torchao.float8 import Float8LinearConfig

    return Float8LinearConfig()
