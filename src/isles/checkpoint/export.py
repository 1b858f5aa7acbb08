"""A trained model as a Hugging Face folder, verified by loading it again.

A whole model, file by file from a checkpoint or from memory; an adapter alone, in peft's own
format; or an adapter merged into its model.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import functools
import json
import os
import shutil
import stat
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from isles.checkpoint.load import load_tensors, save_readable
from isles.errors import DataError, TrainingError, UserError
from isles.run.env import hidden
from isles.run.records import NO_SPACE, refusal, used_up

_ADAPTER_WEIGHTS = "adapter_model.safetensors"
_PEFT_PREFIX = "base_model.model."
"""What peft's own models put before every name."""

_PROBE = (2, 16)
"""Rows and tokens that a merged model is tried with."""


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
        model: the Hugging Face model on the meta device: names, shapes, types and config.
        max_shard_bytes: weights in one file, and so in memory; a larger tensor has its own.

    Raises:
        UserError: the folder holds something that is not an export.
        TrainingError: the checkpoint lacks a weight, or what was written does not read back.
    """
    with _whole_folder(folder, card) as partial:
        _give_special_tokens(model, tokenizer)
        model.config.architectures = [type(model).__name__]
        model.config.dtype = model.dtype
        model.config.save_pretrained(partial)
        _save_generation_config(model, partial)
        if tokenizer is not None:
            save_tokenizer(tokenizer, partial)
        shards = _plan_shards(model, max_shard_bytes)
        where: dict[str, str] = {}
        for number, names in enumerate(shards, 1):
            file = (
                "model.safetensors"
                if len(shards) == 1
                else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            )
            _write_verified(functools.partial(_read_shard, checkpoint, names), partial / file)
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
        folder: the result; an earlier export there is replaced once the new one is verified.
        max_shard_bytes: weights in one file; a larger tensor has its own.

    Raises:
        UserError: the folder holds something that is not an export.
        TrainingError: what was written does not load to the same weights.
    """
    with _whole_folder(folder, card) as partial:
        _give_special_tokens(model, tokenizer)
        # accelerate looks whether this is DeepSpeed's engine, and imports all of it, with MLflow.
        settings, model.generation_config = model.generation_config, type(model.generation_config)()
        try:
            with hidden("deepspeed"):
                model.save_pretrained(partial, max_shard_size=max_shard_bytes)
        finally:
            model.generation_config = settings
        mode = stat.S_IMODE((partial / "config.json").stat().st_mode)
        for file in partial.glob("*.safetensors"):
            file.chmod(mode)  # see `save_readable`
        _save_generation_config(model, partial)
        if tokenizer is not None:
            save_tokenizer(tokenizer, partial)
        again = type(model).from_pretrained(partial, dtype=model.dtype, use_safetensors=True)
        written = again.state_dict()
        for name, value in model.state_dict().items():
            if name not in written or not torch.equal(written[name], value.cpu()):
                what = f"the exported weight {name!r} does not load to what was trained"
                raise _differs(what, folder)


def read_trained(model: nn.Module, checkpoint: Path) -> None:
    """Take over the weights of a checkpoint into the trained parameters of a whole model.

    Raises:
        TrainingError: the checkpoint lacks one, or holds it in another shape.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    load_tensors({f"model.{name}": p.data for name, p in trained.items()}, checkpoint, alone=True)


def export_adapter(
    checkpoint: Path, model: Any, tokenizer: Any, folder: Path, *, base: str, card: str | None
) -> None:
    """Write an adapter as `PeftModel.from_pretrained` loads it, and read it back.

    Args:
        model: the model with its adapter, which may lie on the meta device: names and shapes.
        folder: the result; an earlier export there is replaced once the new one is verified.
        base: the model that it belongs to, a hub id or a folder, for adapter_config.json.

    Raises:
        UserError: the folder holds something that is not an export.
        TrainingError: the checkpoint lacks a weight, or what was written does not read back.
    """
    with _whole_folder(folder, card) as partial:
        [config] = model.peft_config.values()
        config = copy.copy(config)
        config.base_model_name_or_path = base
        config.inference_mode = True
        config.save_pretrained(partial)
        if tokenizer is not None:
            save_tokenizer(tokenizer, partial)
        read = functools.partial(_named_by_peft, model, checkpoint)
        _write_verified(read, partial / _ADAPTER_WEIGHTS)


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write a tokenizer's files into a folder.

    Raises:
        OSError: the disk does not take them.
        DataError: a value in the files that it was loaded from cannot be written.
    """
    try:
        tokenizer.save_pretrained(folder)
    except OSError:
        raise
    # Its values come from elsewhere, and may have any type.
    except Exception as error:
        raise DataError(
            f"the tokenizer cannot be written: {type(error).__name__}: {str(error)[:300]}",
            where=str(tokenizer.name_or_path or type(tokenizer).__name__),
            fix="repair its tokenizer_config.json, or name another in tokenizer.name_or_path",
            id="data.tokenizer",
        ) from error


def export_merged(
    model: Any, tokenizer: Any, folder: Path, *, max_shard_bytes: int, card: str | None
) -> None:
    """Merge a model's adapter into its weights, and export it as one whole model.

    Args:
        model: a Hugging Face model with a trained adapter, whole on one device, not quantised;
            afterwards it is the merged model.
        folder, max_shard_bytes, card: as for `export_model`.

    Raises:
        UserError: the folder holds something that is not an export.
        TrainingError: the merged model does not answer as the model with the adapter does.
    """
    model.eval()
    dtype = next(p.dtype for p in model.parameters() if not p.requires_grad)
    wanted = _logits(model, dtype)
    _merge(model)
    model.to(dtype)
    found = _logits(model, dtype)
    # Merged weights are rounded once more: in bf16 to three digits.
    tolerance = (1e-3 if dtype == torch.float32 else 0.1) * float(wanted.abs().max())
    if not bool(torch.isfinite(found).all()) or float((found - wanted).abs().max()) > tolerance:
        raise _differs("the merged model does not answer as the model with the adapter", folder)
    export_model(model, tokenizer, folder, max_shard_bytes=max_shard_bytes, card=card)


@contextlib.contextmanager
def _whole_folder(folder: Path, card: str | None) -> Iterator[Path]:
    # A new folder beside another, which takes its place at the end if nothing was raised.
    is_file = folder.exists() and not folder.is_dir()
    # An earlier export is a model, or an adapter alone.
    is_export = any((folder / f).is_file() for f in ("config.json", "adapter_config.json"))
    if is_file or (folder.is_dir() and any(folder.iterdir()) and not is_export):
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
        if card is not None:
            (partial / "README.md").write_text(card, encoding="utf-8")
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
        limit = used_up(error, folder)
        room = limit[1] if limit else "free some space"
        raise UserError(
            f"the model could not be written: {reason}",
            where=str(folder),
            fix=f"{room} or give another folder: `isles checkpoint export --output`",
            id="files.output",
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


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


def _write_verified(read: Callable[[], dict[str, Tensor]], file: Path) -> None:
    # The tensors are read twice, and are never in memory twice.
    save_readable(read(), file)
    with safe_open(file, "pt") as written:
        for name, value in read().items():
            if not torch.equal(written.get_tensor(name), value):
                what = f"the exported weight {name!r} does not read back"
                raise _differs(what, file.parent)


def _read_shard(checkpoint: Path, names: dict[str, Tensor]) -> dict[str, Tensor]:
    state = {
        f"model.{name}": torch.empty(meta.shape, dtype=meta.dtype) for name, meta in names.items()
    }
    load_tensors(state, checkpoint, alone=True)
    return {name.removeprefix("model."): value for name, value in state.items()}


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
    # Generation stops at the tokenizer's end too: it may be that of a turn, learnt just now.
    known = model.generation_config.eos_token_id
    ids = known if isinstance(known, list) else [known]
    if tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in ids:
        kept = [i for i in ids if i is not None]
        model.generation_config.eos_token_id = [*kept, tokenizer.eos_token_id]


def _save_generation_config(model: Any, folder: Path) -> None:
    # Not save_pretrained: it refuses settings that many published models have, such as a
    # temperature without do_sample, once anything else of them was changed.
    if model.can_generate():
        path = folder / "generation_config.json"
        model.generation_config.to_json_file(path, keys_to_pop=["compile_config"])


def _named_by_peft(model: Any, checkpoint: Path) -> dict[str, Tensor]:
    # The trained tensors of a checkpoint, under the names of peft's files.
    from peft import get_peft_model_state_dict

    own = _read_shard(checkpoint, {n: p for n, p in model.named_parameters() if p.requires_grad})
    # Embeddings that are trained are among `modules_to_save`; without asking the hub for others.
    named = get_peft_model_state_dict(model, own, save_embedding_layers=False)
    assert len(named) == len(own), sorted(own)
    return {f"{_PEFT_PREFIX}{name}": value for name, value in named.items()}


@torch.no_grad()
def _logits(model: Any, dtype: torch.dtype) -> Tensor:
    # Of the same few tokens every time, [B, T, V] in fp32.
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    vocab_size = int(model.config.get_text_config().vocab_size)
    tokens = torch.randint(vocab_size, _PROBE, generator=generator).to(device)
    is_mixed = dtype != torch.float32
    with torch.autocast(device.type, dtype=dtype if is_mixed else None, enabled=is_mixed):
        logits: Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits.float()


@torch.no_grad()
def _merge(model: nn.Module) -> None:
    # In place: each matrix with what its adapter adds, rounded once; then the adapters go.
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    for name, module in list(model.named_modules()):
        if isinstance(module, BaseTunerLayer):
            base: Any = module.get_base_layer()
            dtype = base.weight.dtype
            base.weight.data = base.weight.data.float()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                module.merge(safe_merge=True)
            base.weight.data = base.weight.data.to(dtype)
            replacement = base
        elif isinstance(module, ModulesToSaveWrapper):
            [replacement] = module.modules_to_save.values()
        else:
            continue
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, replacement)
    del model.peft_config


def _differs(what: str, folder: Path) -> TrainingError:
    return TrainingError(
        what,
        where=str(folder),
        fix="this is a bug of isles or of the disk; the checkpoints are untouched",
    )
