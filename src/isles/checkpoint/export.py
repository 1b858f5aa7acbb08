"""A trained model as a Hugging Face folder, verified by loading it again."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from isles.checkpoint.store import load_tensors
from isles.errors import TrainingError, UserError
from isles.run.env import hidden
from isles.run.records import NO_SPACE, refusal

log = logging.getLogger(__name__)


def export_checkpoint(
    checkpoint: Path,
    model: Any,
    tokenizer: Any,
    folder: Path,
    *,
    max_shard_bytes: int,
    card: str | None = None,
) -> None:
    """Export a checkpoint file by file, so that the model is never in memory as a whole.

    Args:
        checkpoint: its folder.
        model: the Hugging Face model on the meta device: names, shapes, types and config.
        tokenizer: its tokenizer; None where the run had none (fake data).
        folder: the result, as for `export_model`.
        max_shard_bytes: weights in one file, and so in memory; a larger tensor has its own.
        card: the text of README.md; None: none.

    Raises:
        UserError: the folder holds something that is not an export.
        TrainingError: the checkpoint lacks a weight, or what was written does not read back.
    """
    with whole_folder(folder) as partial:
        write_card(card, partial)
        _give_special_tokens(model, tokenizer)
        model.config.architectures = [type(model).__name__]
        model.config.dtype = model.dtype
        model.config.save_pretrained(partial)
        if model.can_generate():
            model.generation_config.save_pretrained(partial)
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)
        shards = _plan_shards(model, max_shard_bytes)
        where: dict[str, str] = {}
        for number, names in enumerate(shards, 1):
            file = (
                "model.safetensors"
                if len(shards) == 1
                else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            )
            _write_shard(checkpoint, names, partial / file)
            where |= dict.fromkeys(names, file)
        if len(shards) > 1:
            size = sum(t.numel() * t.element_size() for names in shards for t in names.values())
            index = {"metadata": {"total_size": size}, "weight_map": where}
            text = json.dumps(index, indent=2, sort_keys=True)
            (partial / "model.safetensors.index.json").write_text(text + "\n", encoding="utf-8")


def export_model(
    model: Any,
    tokenizer: Any,
    folder: Path,
    *,
    max_shard_bytes: int,
    card: str | None = None,
) -> None:
    """Write config, safetensors and tokenizer; load them again; compare every weight; rename.

    Args:
        model: a Hugging Face model.
        tokenizer: its tokenizer; None where the run had none (fake data).
        folder: the result; an earlier export there is replaced once the new one is verified.
        max_shard_bytes: weights in one file; a larger tensor has its own.
        card: the text of README.md; None: none.

    Raises:
        UserError: the folder holds something that is not an export.
        TrainingError: what was written does not load to the same weights.
    """
    with whole_folder(folder) as partial:
        write_card(card, partial)
        _give_special_tokens(model, tokenizer)
        # accelerate looks whether this is DeepSpeed's engine, and imports all of it, with MLflow.
        with hidden("deepspeed"):
            model.save_pretrained(partial, max_shard_size=max_shard_bytes)
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)
        _compare(model, partial)


@contextlib.contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A new folder beside another, which takes its place at the end if nothing was raised.

    Raises:
        UserError: the folder holds something that is not an export, or cannot be written.
    """
    is_file = folder.exists() and not folder.is_dir()
    if is_file or (folder.is_dir() and any(folder.iterdir()) and not _is_model(folder)):
        raise UserError(
            "this is a file" if is_file else "this folder is not empty and not a model",
            where=str(folder),
            fix="give another folder with --output",
            id="file.exists",
        )
    folder = folder.absolute()  # `.` has no name
    partial = folder.with_name(f".partial-{folder.name}-{os.getpid()}")
    try:
        for left in folder.parent.glob(f".partial-*{folder.name}-*"):
            shutil.rmtree(left, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        if folder.exists():
            old = folder.with_name(f".partial-old-{folder.name}-{os.getpid()}")
            folder.replace(old)
            partial.replace(folder)
            shutil.rmtree(old)
        else:
            partial.replace(folder)
    except (OSError, SafetensorError) as error:
        # safetensors has no number of the system's error, only its words.
        is_full = f"(os error {errno.ENOSPC})" in str(error)
        reason = refusal(error) if isinstance(error, OSError) else NO_SPACE if is_full else error
        raise UserError(
            f"the model could not be written: {reason}",
            where=str(folder),
            fix="free some space or give another folder: `isles checkpoint export --output`",
            id="files.output",
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_card(card: str | None, folder: Path) -> None:
    """Write README.md."""
    if card is not None:
        (folder / "README.md").write_text(card, encoding="utf-8")


def _plan_shards(model: Any, max_shard_bytes: int) -> list[dict[str, Tensor]]:
    # Names and empty tensors of each file; a weight that two modules share stands once.
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        num_bytes = tensor.numel() * tensor.element_size()
        if shards[-1] and size + num_bytes > max_shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += num_bytes
    return shards


def _write_shard(checkpoint: Path, names: dict[str, Tensor], file: Path) -> None:
    def read() -> dict[str, Tensor]:
        state = {
            f"model.{name}": torch.empty(meta.shape, dtype=meta.dtype)
            for name, meta in names.items()
        }
        load_tensors(state, checkpoint, alone=True)
        return state

    save_file(
        {name.removeprefix("model."): value for name, value in read().items()},
        file,
        metadata={"format": "pt"},
    )
    with safe_open(file, "pt") as written:
        for name, value in read().items():
            if not torch.equal(written.get_tensor(name.removeprefix("model.")), value):
                raise _not_the_same(name.removeprefix("model."), file.parent)


def _is_model(folder: Path) -> bool:
    # Whether a folder is an earlier export: a model, or an adapter alone.
    return any((folder / name).is_file() for name in ("config.json", "adapter_config.json"))


def _give_special_tokens(model: Any, tokenizer: Any) -> None:
    # A model trained with its own tokenizer must know where a text ends.
    # Ids that are special to the tokenizer stay; others are those of another tokenizer, such as the
    # ones that a class of models has by default.
    if tokenizer is None:
        return
    special = set(tokenizer.all_special_ids)
    special |= {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        own = getattr(tokenizer, name, None)
        for holder in (model.config, model.generation_config):
            ids = getattr(holder, name, None)
            has_own = not special.isdisjoint(ids if isinstance(ids, list) else [ids])
            if ids is None or (own is not None and not has_own):
                setattr(holder, name, own)
    _stop_at(model.generation_config, tokenizer.eos_token_id)


def _stop_at(generation_config: Any, token_id: int | None) -> None:
    # Let generation stop at the tokenizer's end too: it may be that of a turn, learnt just now.
    known = generation_config.eos_token_id
    ids = known if isinstance(known, list) else [known]
    if token_id is not None and token_id not in ids:
        generation_config.eos_token_id = [*(i for i in ids if i is not None), token_id]


def _compare(model: Any, folder: Path) -> None:
    again = type(model).from_pretrained(folder, dtype=model.dtype, use_safetensors=True)
    written, wanted = again.state_dict(), model.state_dict()
    for name, value in wanted.items():
        if name not in written or not torch.equal(written[name], value.cpu()):
            raise _not_the_same(name, folder)


def _not_the_same(name: str, folder: Path) -> TrainingError:
    return TrainingError(
        f"the exported weight {name!r} does not load to what was trained",
        where=str(folder),
        fix="this is a fault of isles or of the disk; the checkpoints are untouched",
    )
