"""torch.compile of a model's blocks."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from isles.config.compilation import compiles
from isles.config.sections.run import RunConfig
from isles.data.mix import Dataset
from isles.dist.world import World
from isles.errors import UserError
from isles.strategies.fsdp import find_blocks

log = logging.getLogger(__name__)


def resolve_compile(
    config: RunConfig, world: World, steps: int | None, datasets: Sequence[Dataset | None]
) -> RunConfig:
    """The run with `training.torch_compile` true or false. All ranks must call this.

    The oldest GPU decides for all ranks.

    Args:
        steps: length of the run; None: unknown.
        datasets: if blocks are compiled, they will have rows of one length.
    """
    own = None
    if world.device.type == "cuda" and torch.version.hip is None:
        own = torch.cuda.get_device_capability(world.device)
    known = [capability for capability in world.gather(own) if capability is not None]
    oldest = min(known) if len(known) == world.world_size else None
    is_compiled = compiles(config, oldest, steps)
    if is_compiled and config.training.torch_compile == "auto":
        log.info("torch_compile=true, chosen by auto: the blocks are compiled in the first steps")
    for dataset in datasets if is_compiled else ():
        if dataset is not None:
            dataset.pad_to_length()
    training = config.training.model_copy(update={"torch_compile": is_compiled})
    return config.model_copy(update={"training": training})


def compile_blocks(model: nn.Module, class_names: tuple[str, ...] = ()) -> None:
    """Compile a model in place, block by block.

    The blocks share their graphs, so that a start takes seconds. A block that cannot be compiled
    runs uncompiled, and the log has one line about it.

    Args:
        class_names: class names of the blocks; if empty, see `find_blocks`.
    """
    from torch._dynamo import config as dynamo
    from torch._functorch import config as autograd

    # DDP's own compiler would split a block's graph at the borders of buckets.
    dynamo.optimize_ddp = False
    dynamo.suppress_errors = True
    # With the forward pass: an error in the backward pass could not be suppressed.
    autograd.force_non_lazy_backward_lowering = True
    logging.getLogger("torch._dynamo.convert_frame").addFilter(_FallbackLine())
    try:
        blocks = find_blocks(model, class_names)
    except UserError:  # a model without blocks
        blocks = [model]
    for block in blocks:
        block.compile()


class _FallbackLine(logging.Filter):
    # One line of our own instead of a traceback per frame that torch runs uncompiled.

    def __init__(self) -> None:
        super().__init__()
        self._was_said = False

    def filter(self, record: logging.LogRecord) -> bool:
        error: Any = record.exc_info[1] if record.exc_info else None
        if record.levelno < logging.WARNING or error is None:
            return True
        if not self._was_said:
            self._was_said = True
            error = getattr(error, "inner_exception", error)
            why = next(iter(str(error).strip().splitlines()), type(error).__name__)
            log.warning(
                "a part of the model runs uncompiled, because torch.compile failed: %s", why
            )
        return False
