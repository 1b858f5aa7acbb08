"""Logging of a rank and of a verb, without warnings of libraries on which no user can act."""

from __future__ import annotations

import faulthandler
import logging
import sys
import warnings

_NOISY = (
    *("torch", "transformers", "datasets", "httpx", "httpx2", "urllib3", "filelock"),
    "matplotlib",
)


def log_of_rank(rank: int) -> None:
    """INFO from rank 0, WARNING from all, each line with its rank; a crash leaves its stack."""
    from transformers.utils import logging as transformers_logging

    faulthandler.enable()
    level = logging.INFO if rank == 0 else logging.WARNING
    form = f"%(asctime)s %(levelname)s [rank {rank}] %(name)s: %(message)s"
    logging.basicConfig(level=level, format=form, stream=sys.stderr, force=True)
    silence_libraries()
    transformers_logging.disable_progress_bar()


def log_of_verb(*, level: int = logging.INFO, form: str = "%(message)s") -> None:
    """The log of a verb whose result goes to stdout: no library says anything but errors."""
    from transformers.utils import logging as transformers_logging

    warnings.simplefilter("ignore")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.basicConfig(level=level, format=form, stream=sys.stderr)
    logging.getLogger("isles.data").setLevel(logging.WARNING)
    silence_libraries()


def silence_libraries() -> None:
    """Let nothing below a warning through from libraries, and nothing below an error from torchao,
    torch's pytrees and DeepSpeed.

    transformers and peft import the three where they are installed, whether a run uses them or
    not: they name each CUDA library that they cannot load, and a device that they have not found.
    """
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.WARNING)
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # DeepSpeed sets the level of its own logger as it is imported; a filter stays.
    logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)
