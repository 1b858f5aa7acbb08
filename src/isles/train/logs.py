"""Logging of a rank and of a command, without library warnings that a user cannot act on."""

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
    """Log INFO from rank 0 and WARNING from all ranks, with the rank; print the stack on a
    crash."""
    from transformers.utils import logging as transformers_logging

    faulthandler.enable()
    level = logging.INFO if rank == 0 else logging.WARNING
    form = f"%(asctime)s %(levelname)s [rank {rank}] %(name)s: %(message)s"
    logging.basicConfig(level=level, format=form, stream=sys.stderr, force=True)
    silence_libraries()
    transformers_logging.disable_progress_bar()


def log_of_verb(*, level: int = logging.INFO, form: str = "%(message)s") -> None:
    """Set up the log of a command that prints its result to stdout: libraries only log errors."""
    from transformers.utils import logging as transformers_logging

    warnings.simplefilter("ignore")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.basicConfig(level=level, format=form, stream=sys.stderr)
    logging.getLogger("isles.data").setLevel(logging.WARNING)
    silence_libraries()


def silence_libraries() -> None:
    """Hide the libraries' messages below WARNING, and below ERROR for torchao, torch's pytrees and
    DeepSpeed.

    transformers and peft import these three if they are installed, even if a run does not use them.
    Then they list each CUDA library that they cannot load, and each device that they do not find.
    """
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.WARNING)
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # DeepSpeed sets its logger's level during its import, but a filter stays.
    logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)
