"""`training.torch_compile: auto`: on if compiling pays for its start."""

from __future__ import annotations

from isles.config.sections.run import RunConfig
from isles.config.sections.strategy import AutoStrategy, DeepSpeedStrategyConfig, MeshSection

COMPILES_FROM = (8, 0)
"""`auto` compiles from this compute capability on, as older GPUs do not compute in bf16."""

_LEAST_STEPS = 300
"""Steps of the shortest run that `auto` compiles. The start takes up to a minute longer."""


def compiles(
    config: RunConfig, capability: tuple[int, int] | None, steps: int | None = None
) -> bool:
    """True if the blocks of this run's model are compiled.

    `auto` compiles if the rows of a batch have one length anyway, because each new length would be
    compiled again. It always compiles fp8-mixed, which is slower than bf16-mixed uncompiled.

    Args:
        capability: compute capability of the oldest GPU of all ranks; None: not all have an NVIDIA
            GPU.
        steps: length of the run; None: unknown, as it is given as a time.
    """
    wanted = config.training.torch_compile
    if wanted != "auto":
        return wanted
    if config.training.precision == "fp8-mixed":
        return True
    if capability is None or capability < COMPILES_FROM:
        return False
    if steps is not None and steps < _LEAST_STEPS:
        return False
    return has_one_length(config) and _can_compile(config)


def has_one_length(config: RunConfig) -> bool:
    """True if every row of the data is filled: text, and other documents that are packed."""
    sources = config.data.sources
    return config.data.packing and all(source.type != "preference" for source in sources)


def _can_compile(config: RunConfig) -> bool:
    strategy = config.strategy
    if isinstance(strategy, DeepSpeedStrategyConfig):
        return False
    is_cut = isinstance(strategy, MeshSection) and strategy.pp_size > 1
    is_cut = is_cut or (isinstance(strategy, AutoStrategy) and strategy.pp_size != 1)
    # 4-bit products and DoRA's norms would break each block into many graphs.
    breaks = config.adapter.type == "qlora" or config.adapter.use_dora
    moves = config.training.gradient_checkpointing == "offload"
    return not (is_cut or breaks or moves)
