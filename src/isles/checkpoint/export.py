"""A trained model as a Hugging Face folder, verified by loading it again."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from isles.errors import TrainingError, UserError

log = logging.getLogger(__name__)


def export_model(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write config, safetensors and tokenizer; load them again; compare every weight; rename.

    Args:
        model: a Hugging Face model.
        tokenizer: its tokenizer; None where the run had none (fake data).
        folder: the result; an earlier export there is replaced once the new one is verified.

    Raises:
        UserError: the folder holds something that is not an export.
        TrainingError: what was written does not load to the same weights.
    """
    is_file = folder.exists() and not folder.is_dir()
    if is_file or (folder.is_dir() and any(folder.iterdir()) and not _is_model(folder)):
        raise UserError(
            "this is a file" if is_file else "this folder is not empty and not a model",
            where=str(folder),
            fix="give another folder with --output",
        )
    partial = folder.with_name(f".partial-{folder.name}-{os.getpid()}")
    try:
        for left in folder.parent.glob(f".partial-*{folder.name}-*"):
            shutil.rmtree(left, ignore_errors=True)
        partial.mkdir(parents=True)
        _give_special_tokens(model, tokenizer)
        model.save_pretrained(partial)
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)
        _compare(model, partial)
        if folder.exists():
            old = folder.with_name(f".partial-old-{folder.name}-{os.getpid()}")
            folder.replace(old)
            partial.replace(folder)
            shutil.rmtree(old)
        else:
            partial.replace(folder)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"the model could not be written: {getattr(error, 'strerror', None) or error}",
            where=str(folder),
            fix="free some space or give another folder: `isles checkpoint export --output`",
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _is_model(folder: Path) -> bool:
    return (folder / "config.json").is_file()


def _give_special_tokens(model: Any, tokenizer: Any) -> None:
    """A model trained with its own tokenizer must know where a text ends."""
    if tokenizer is None:
        return
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        for holder in (model.config, model.generation_config):
            if getattr(holder, name, None) is None:
                setattr(holder, name, getattr(tokenizer, name, None))


def _compare(model: Any, folder: Path) -> None:
    again = type(model).from_pretrained(folder, dtype=model.dtype, use_safetensors=True)
    written, wanted = again.state_dict(), model.state_dict()
    for name, value in wanted.items():
        if name not in written or not torch.equal(written[name], value.cpu()):
            raise TrainingError(
                f"the exported weight {name!r} does not load to what was trained",
                where=str(folder),
                fix="this is a fault of isles or of the disk; the checkpoints are untouched",
            )
