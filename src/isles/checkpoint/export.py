"""A trained model as a Hugging Face folder, verified by loading it again.

The folder holds a whole model (written file by file from a checkpoint, or from memory), an adapter
in peft's own format, or a model with its adapter merged in.
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
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from isles.checkpoint.load import load_tensors, save_readable
from isles.checkpoint.readable import save_config, save_tokenizer
from isles.checkpoint.reread import EXACT, MERGED, difference, read_again, scores
from isles.errors import TrainingError, UserError
from isles.facts.models import TOKEN_IDS, known_ids
from isles.run.env import hidden
from isles.run.records import NO_SPACE, refusal, used_up

_ADAPTER_WEIGHTS = "adapter_model.safetensors"
_PEFT_PREFIX = "base_model.model."
"""Prefix of every name in peft's own models."""

_CARD_BYTES = 4096
_NOTHING: Mapping[str, Any] = {}

Verify = Callable[[Path, Tensor | None], None]
"""Function that checks a written folder before it becomes the export; see `read_again`."""


def export_checkpoint(
    checkpoint: Path,
    model: Any,
    tokenizer: Any,
    folder: Path,
    *,
    max_shard_bytes: int,
    base: Mapping[str, Any] = _NOTHING,
    dtype: torch.dtype | None = None,
    card: str | None = None,
    trained: Tensor | None = None,
    verify: Verify = read_again,
) -> None:
    """Export a checkpoint file by file, so that the whole model is never in memory.

    Args:
        model: the Hugging Face model on the meta device: names, shapes, types and config.
        max_shard_bytes: weights per file, and so in memory; a larger tensor of the model has its
            own file.
        base: the config.json that the run started with.
        dtype: of the weights in the files. Default: as they were trained.
        trained: the run's scores of the probe; None if the checkpoint has none.
        verify: checks the folder before it takes its place.

    Raises:
        UserError: the folder holds files that are not an export.
        TrainingError: the checkpoint lacks a weight, or a written weight does not read back.
    """
    with _whole_folder(folder, card) as partial:
        _give_special_tokens(model, tokenizer)
        _cast(model, dtype)  # on the meta device, so without memory
        model.config.architectures = [type(model).__name__]
        _save_files(model, tokenizer, partial, base)
        shards = _plan_shards(model, max_shard_bytes)
        where: dict[str, str] = {}
        for number, names in enumerate(shards, 1):
            file = (
                "model.safetensors"
                if len(shards) == 1
                else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            )
            read = functools.partial(_read_as_saved, checkpoint, model, names)
            where |= dict.fromkeys(_write_verified(read, partial / file), file)
        if len(shards) > 1:
            size = sum(t.numel() * t.element_size() for names in shards for t in names.values())
            index = {"metadata": {"total_size": size}, "weight_map": where}
            text = json.dumps(index, indent=2, sort_keys=True)
            (partial / "model.safetensors.index.json").write_text(text + "\n", encoding="utf-8")
        verify(partial, trained)


def export_model(
    model: Any,
    tokenizer: Any,
    folder: Path,
    *,
    max_shard_bytes: int,
    base: Mapping[str, Any] = _NOTHING,
    dtype: torch.dtype | None = None,
    card: str | None = None,
    trained: Tensor | None = None,
    verify: Verify = read_again,
) -> None:
    """Write config, safetensors and tokenizer, read them back, compare every weight, and rename.

    Args:
        model: converted to the type of the export.
        folder: the result. An earlier export there is replaced after the new export is verified.
        max_shard_bytes: weights per file; a larger tensor has its own file.
        trained: as for `export_checkpoint`. Default: the scores of the model.
        base, dtype, verify: as for `export_checkpoint`.

    Raises:
        UserError: the folder holds files that are not an export.
        TrainingError: a written weight differs from the model's weight.
    """
    with _whole_folder(folder, card) as partial:
        _give_special_tokens(model, tokenizer)
        _cast(model, dtype)
        # accelerate tests for DeepSpeed's engine, which would import DeepSpeed and MLflow.
        settings, model.generation_config = model.generation_config, type(model.generation_config)()
        try:
            with hidden("deepspeed"):
                model.save_pretrained(partial, max_shard_size=max_shard_bytes)
        finally:
            model.generation_config = settings
        mode = stat.S_IMODE((partial / "config.json").stat().st_mode)
        for file in partial.glob("*.safetensors"):
            file.chmod(mode)  # see `save_readable`
        _save_files(model, tokenizer, partial, base)
        again = type(model).from_pretrained(partial, dtype=model.dtype, use_safetensors=True)
        written = again.state_dict()
        for name, value in model.state_dict().items():
            if name not in written or not torch.equal(written[name], value.cpu()):
                what = f"the exported weight {name!r} differs from the trained weight"
                raise _differs(what, folder)
        del again, written
        verify(partial, scores(model.eval()) if trained is None else trained)


def _save_files(model: Any, tokenizer: Any, folder: Path, base: Mapping[str, Any]) -> None:
    # All files next to the weights.
    model.config.dtype = model.dtype
    save_config(model.config, folder, base)
    # Not save_pretrained: after any change it refuses settings that many published models have,
    # such as a temperature without do_sample.
    if model.can_generate():
        path = folder / "generation_config.json"
        model.generation_config.to_json_file(path, keys_to_pop=["compile_config"])
    if tokenizer is not None:
        save_tokenizer(_padded_within(model, tokenizer), folder)


def _padded_within(model: Any, tokenizer: Any) -> Any:
    # The model cannot compute a batch that is padded with an id outside its vocabulary.
    size = model.config.get_text_config().vocab_size
    pad, end = tokenizer.pad_token_id, known_ids(tokenizer.eos_token_id, size)
    if pad is not None and pad >= size:
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.pad_token = None if end is None else tokenizer.eos_token
    return tokenizer


@torch.no_grad()
def _cast(model: Any, dtype: torch.dtype | None) -> None:
    # In place, weight by weight. Weights that a model always holds in 32 bits stay in 32 bits.
    kept = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        kept |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    for name, weight in model.named_parameters():
        if dtype is not None and weight.is_floating_point() and kept.isdisjoint(name.split(".")):
            weight.data = weight.data.to(dtype)
            if not weight.is_meta:
                _check_range(name, weight)


def _check_range(name: str, weight: Tensor) -> None:
    if weight.dtype == torch.float16 and not bool(torch.isfinite(weight).all()):
        raise TrainingError(
            f"the trained weight {name!r} has numbers too large for float16, the type of the base "
            f"model",
            where="checkpoint.export_dtype",
            fix="set checkpoint.export_dtype: bfloat16 (or float32)",
        )


def read_trained(model: nn.Module, checkpoint: Path) -> None:
    """Load the weights of a checkpoint into the trained parameters of a whole model.

    Raises:
        TrainingError: the checkpoint lacks a weight, or holds it in another shape.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    load_tensors({f"model.{name}": p.data for name, p in trained.items()}, checkpoint, alone=True)


def export_adapter(
    checkpoint: Path,
    model: Any,
    tokenizer: Any,
    folder: Path,
    *,
    base: str,
    card: str | None,
    trained: Tensor | None = None,
    verify: Verify = read_again,
) -> None:
    """Write an adapter for `PeftModel.from_pretrained`, and read it back.

    Args:
        model: the model with its adapter: names and shapes. The meta device is enough.
        folder: the result. An earlier export there is replaced after the new export is verified.
        base: the adapter's base model, a Hugging Face id or a folder, for adapter_config.json.
        trained, verify: as for `export_checkpoint`.

    Raises:
        UserError: the folder holds files that are not an export.
        TrainingError: the checkpoint lacks a weight, or a written weight does not read back.
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
        verify(partial, trained)


def export_merged(
    model: Any,
    tokenizer: Any,
    folder: Path,
    *,
    max_shard_bytes: int,
    base: Mapping[str, Any] = _NOTHING,
    dtype: torch.dtype | None = None,
    card: str | None,
    trained: Tensor | None = None,
    verify: Verify = read_again,
) -> None:
    """Merge a model's adapter into its weights, and export the result as a whole model.

    Args:
        model: a Hugging Face model with a trained adapter, whole on one device, not quantized. This
            function changes it into the merged model.
        folder, max_shard_bytes, base, dtype, card, trained, verify: as for `export_model`.

    Raises:
        UserError: the folder holds files that are not an export.
        TrainingError: the merged model scores the probe differently than the model with its
            adapter.
    """
    model.eval()
    held = next(p.dtype for p in model.parameters() if not p.requires_grad)
    mixed = held if held != torch.float32 else None
    wanted = scores(model, autocast=mixed)
    _merge(model)
    model.to(held)
    found = scores(model, autocast=mixed)
    # Merging rounds the weights once more, in bf16 to three digits.
    limit = EXACT if held == torch.float32 else MERGED
    if not bool(torch.isfinite(found).all()) or difference(found, wanted) > limit:
        raise _differs("the merged model differs from the model with its adapter", folder)
    export_model(
        model,
        tokenizer,
        folder,
        max_shard_bytes=max_shard_bytes,
        base=base,
        dtype=dtype,
        card=card,
        trained=trained,
        verify=verify,
    )


def _is_export(folder: Path) -> bool:
    # Whether all files of a folder are from isles. The model card is the sign of an export, but
    # other files may have been added since.
    with contextlib.suppress(OSError):
        card = (folder / "README.md").read_bytes()[:_CARD_BYTES]
        return b"\n- isles\n" in card and all(map(_is_of_export, folder.iterdir()))
    return False


def _is_of_export(path: Path) -> bool:
    known = (".json", ".jinja", ".md", ".model", ".safetensors")
    names = ("additional_chat_templates", "merges.txt", "tokenizer_of_file.py", "vocab.txt")
    return path.suffix in known or path.name in names


@contextlib.contextmanager
def _whole_folder(folder: Path, card: str | None) -> Iterator[Path]:
    # A temporary folder that replaces the target at the end, unless an error is raised.
    is_file = folder.exists() and not folder.is_dir()
    if is_file or (folder.is_dir() and any(folder.iterdir()) and not _is_export(folder)):
        raise UserError(
            "this is a file" if is_file else "this folder is not empty and is not an isles export",
            where=str(folder),
            fix="pass another folder with --output",
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
        # safetensors reports the text of a system error, but not its number.
        is_full = f"(os error {errno.ENOSPC})" in str(error)
        reason = refusal(error) if isinstance(error, OSError) else NO_SPACE if is_full else error
        limit = used_up(error, folder)
        room = limit[1] if limit else "free some space"
        raise UserError(
            f"cannot write the model: {reason}",
            where=str(folder),
            fix=f"{room} or pass another folder: `isles checkpoint export --output`",
            id="files.output",
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _plan_shards(model: Any, max_shard_bytes: int) -> list[dict[str, Tensor]]:
    # Names and empty tensors of each file; a weight that two modules share appears once.
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for group in _converted_together(model):
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in group.values())
        if shards[-1] and size + num_bytes > max_shard_bytes:
            shards.append({})
            size = 0
        shards[-1] |= group
        size += num_bytes
    return shards


def _converted_together(model: Any) -> Iterable[dict[str, Tensor]]:
    # Most weights are alone. Some files hold one tensor for several weights of the model.
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    mapping = get_model_conversion_mapping(model, add_legacy=False)
    converters = [m.reverse_transform() for m in mapping[::-1] if isinstance(m, WeightConverter)]
    groups: dict[str, dict[str, Tensor]] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            renamed = (c.rename_source_key(name) for c in converters)
            first = next((to for to, pattern in renamed if pattern is not None), name)
            groups.setdefault(first, {})[name] = tensor
    return groups.values()


def _write_verified(read: Callable[[], dict[str, Tensor]], file: Path) -> list[str]:
    # Each tensor is read twice, but is never in memory twice. The result is the names.
    save_readable(read(), file)
    with safe_open(file, "pt") as written:
        for name, value in (expected := read()).items():
            _check_range(name, value)
            if not torch.equal(written.get_tensor(name), value):
                what = f"the exported weight {name!r} does not read back unchanged"
                raise _differs(what, file.parent)
    return list(expected)


def _read_as_saved(checkpoint: Path, model: Any, names: dict[str, Tensor]) -> dict[str, Tensor]:
    # By the names of the Hugging Face Hub, which every version of transformers reads: one tensor
    # for each expert, where the model holds the experts of a layer in one tensor.
    from transformers.core_model_loading import revert_weight_conversion

    saved = revert_weight_conversion(model, _read_shard(checkpoint, names))
    return {name: value.contiguous() for name, value in saved.items()}


def _read_shard(checkpoint: Path, names: dict[str, Tensor]) -> dict[str, Tensor]:
    state = {
        f"model.{name}": torch.empty(meta.shape, dtype=meta.dtype) for name, meta in names.items()
    }
    load_tensors(state, checkpoint, alone=True)
    return {name.removeprefix("model."): value for name, value in state.items()}


def _give_special_tokens(model: Any, tokenizer: Any) -> None:
    # A model trained with its own tokenizer must know where a text ends.
    # Special ids of the tokenizer stay. Other ids belong to another tokenizer, such as the default
    # ids of a model class. A model with an id outside its vocabulary does not load.
    text = model.config.get_text_config()
    for holder in (model.config, text, model.generation_config):
        for name in TOKEN_IDS:
            setattr(holder, name, known_ids(getattr(holder, name, None), text.vocab_size))
    if tokenizer is None:
        return
    special = set(tokenizer.all_special_ids)
    special |= {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    for name in TOKEN_IDS:
        own = known_ids(getattr(tokenizer, name, None), text.vocab_size)
        for holder in (model.config, model.generation_config):
            if name == "pad_token_id" and holder is model.config:
                continue  # as in training: this embedding row gets no gradient
            ids = getattr(holder, name, None)
            has_own = not special.isdisjoint(ids if isinstance(ids, list) else [ids])
            if ids is None or (own is not None and not has_own):
                setattr(holder, name, own)
    # Generation also stops at the tokenizer's end token, which may be a newly learned end of turn.
    known = model.generation_config.eos_token_id
    ids = known if isinstance(known, list) else [known]
    end = known_ids(tokenizer.eos_token_id, text.vocab_size)
    if end is not None and end not in ids:
        model.generation_config.eos_token_id = [*(i for i in ids if i is not None), end]


def _named_by_peft(model: Any, checkpoint: Path) -> dict[str, Tensor]:
    # The trained tensors of a checkpoint, by their names in peft's files.
    from peft import get_peft_model_state_dict

    own = _read_shard(checkpoint, {n: p for n, p in model.named_parameters() if p.requires_grad})
    # `modules_to_save` lists trained embeddings, so peft need not ask Hugging Face for others.
    named = get_peft_model_state_dict(model, own, save_embedding_layers=False)
    assert len(named) == len(own), sorted(own)
    return {f"{_PEFT_PREFIX}{name}": value for name, value in named.items()}


@torch.no_grad()
def _merge(model: nn.Module) -> None:
    # In place: add each adapter to its matrix, round once, then remove the adapters.
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    inner: set[nn.Module] = set()  # a module with two adapted stacks of experts has two layers
    for name, module in list(model.named_modules()):
        if module in inner:
            continue
        if isinstance(module, BaseTunerLayer):
            base: Any = module.get_base_layer()
            layer: Any = module
            while isinstance(layer, BaseTunerLayer):
                inner.add(layer)
                weight = getattr(base, getattr(layer, "parameter_name", "weight"))
                dtype = weight.dtype
                weight.data = weight.data.float()
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    layer.merge(safe_merge=True)
                weight.data = weight.data.to(dtype)
                layer = layer.base_layer
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
        fix="this is a bug in isles or a disk error; the checkpoints are unchanged",
    )
