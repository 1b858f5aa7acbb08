"""Libraries that warn of what no user of isles can act on, silenced by name."""

from __future__ import annotations

import logging
import sys
import warnings

_NOISY = ("torch", "transformers", "datasets", "httpx", "httpx2", "isles.data")


def silence_libraries() -> None:
    """Let nothing below an error through from torchao, torch's pytrees and DeepSpeed.

    transformers and peft import the three where they are installed, whether a run uses them or
    not: they name each CUDA library that they cannot load, and a device that they have not found.
    """
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # DeepSpeed sets the level of its own logger as it is imported; a filter stays.
    logging.getLogger("DeepSpeed").addFilter(_is_error)


def log_of_verb(*, level: int = logging.INFO, form: str = "%(message)s") -> None:
    """The log of a verb whose result goes to stdout: nothing that a library says on its way."""
    from transformers.utils import logging as transformers_logging

    warnings.simplefilter("ignore")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.basicConfig(level=level, format=form, stream=sys.stderr)
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.WARNING)
    silence_libraries()


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR
