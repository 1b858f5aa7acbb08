"""A trained adapter as a folder: alone, in peft's own format, or merged into the whole model."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from isles.checkpoint.export import export_model, whole_folder, write_card
from isles.checkpoint.store import load_tensors
from isles.errors import TrainingError

_WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
"""What peft's own models put before every name."""

_PROBE = (2, 16)
"""Rows and tokens that a merged model is tried with."""


def read_trained(model: nn.Module, checkpoint: Path) -> None:
    """Take over the weights of a checkpoint into the trained parameters of a whole model.

    Args:
        model: with an adapter, on one device.
        checkpoint: its folder.

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
        checkpoint: its folder.
        model: the model with its adapter, which may lie on the meta device: names and shapes.
        tokenizer: of the run; None where it had none.
        folder: the result; an earlier export there is replaced once the new one is verified.
        base: the model that it belongs to, a hub id or a folder, for adapter_config.json.
        card: the text of README.md; None: none.

    Raises:
        UserError: the folder holds something that is not an export.
        TrainingError: the checkpoint lacks a weight, or what was written does not read back.
    """
    with whole_folder(folder) as partial:
        write_card(card, partial)
        [config] = model.peft_config.values()
        config = copy.copy(config)
        config.base_model_name_or_path = base
        config.inference_mode = True
        config.save_pretrained(partial)
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)
        tensors = _named_by_peft(model, checkpoint)
        save_file(tensors, partial / _WEIGHTS, metadata={"format": "pt"})
        again = _named_by_peft(model, checkpoint)
        with safe_open(partial / _WEIGHTS, "pt") as written:
            for name, value in again.items():
                if not torch.equal(written.get_tensor(name), value):
                    raise _differs(f"the exported weight {name!r} does not read back", folder)


def export_merged(
    model: Any, tokenizer: Any, folder: Path, *, max_shard_bytes: int, card: str | None
) -> None:
    """Merge a model's adapter into its weights, and export it as one whole model.

    Args:
        model: a Hugging Face model with a trained adapter, whole on one device, not quantised;
            afterwards it is the merged model.
        tokenizer: of the run; None where it had none.
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


def _named_by_peft(model: Any, checkpoint: Path) -> dict[str, Tensor]:
    # The trained tensors of a checkpoint, under the names of peft's files.
    from peft import get_peft_model_state_dict

    state = {
        f"model.{name}": torch.empty(p.shape, dtype=p.dtype)
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    load_tensors(state, checkpoint, alone=True)
    own = {name.removeprefix("model."): value for name, value in state.items()}
    # Embeddings that are trained are among `modules_to_save`; without asking the hub for others.
    named = get_peft_model_state_dict(model, own, save_embedding_layers=False)
    assert len(named) == len(own), sorted(own)
    return {f"{_PREFIX}{name}": value for name, value in named.items()}


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
            _put(model, name, base)
        elif isinstance(module, ModulesToSaveWrapper):
            [trained] = module.modules_to_save.values()
            _put(model, name, trained)
    del model.peft_config


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def _differs(what: str, folder: Path) -> TrainingError:
    return TrainingError(
        what,
        where=str(folder),
        fix="this is a fault of isles or of the disk; the checkpoints are untouched",
    )
