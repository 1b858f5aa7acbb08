"""Libraries that warn of what no user of isles can act on, silenced by name."""

from __future__ import annotations

import logging


def hush_libraries() -> None:
    """Let nothing below an error through from torchao, torch's pytrees and DeepSpeed.

    transformers and peft import the three where they are installed, whether a run uses them or
    not: they name each CUDA library that they cannot load, and a device that they have not found.
    """
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # DeepSpeed sets the level of its own logger as it is imported; a filter stays.
    logging.getLogger("DeepSpeed").addFilter(_is_error)


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR
