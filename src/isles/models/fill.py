"""Weights for a model that was built empty, piece by piece, whole or sharded over ranks.

A rank never holds more than one module's parameters whole. New weights depend only on the seed and
the module's name, not on the number of ranks, the strategy, or the kind of GPU.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from isles.config.files import may_be_huggingface_id
from isles.config.foreign import read_json, weight_files
from isles.config.sections.model import ModelConfig
from isles.errors import UserError
from isles.models.adapter import (
    base_name,
    is_fresh,
    lengths,
    magnitudes,
)
from isles.models.four_bit import FourBitLinear, Read, four_bit_layers
from isles.models.pieces import StoredWeight, pieces_of

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_REOPEN_BYTES = 64 * 2**20

# Bytes per file that distinguish base models of the same shape.
_SAMPLES = 32
_SAMPLE_BYTES = 16 * 1024
_HEADER_BYTES = 64 * 1024
_VOLATILE = ("_name_or_path", "transformers_version")


class NotCoveredError(Exception):
    """A parameter or buffer that the model's own initialization does not set; the text is its
    name."""


@torch.no_grad()
def fill_fresh(model: Any, seed: int) -> None:
    """Initialize weights in place with the model's own method. All ranks fill their own part.

    Raises:
        NotCoveredError: the model initializes a weight outside `_init_weights`.
    """
    filled: set[int] = set()
    with torch.random.fork_rng(devices=[]):
        for name, module in model.named_modules():
            own = _own_parameters(module, filled)
            if not own and not module._buffers:
                continue
            torch.manual_seed(_module_seed(seed, name))
            shadow = _shadow(module, own)
            _forget_buffers(shadow)
            model._init_weights(shadow)
            _check_buffers(shadow, name)
            for key, parameter in own.items():
                value = shadow._parameters[key]
                assert value is not None
                if not bool(torch.isfinite(value).all()):
                    raise NotCoveredError(f"{name}.{key}")
                _copy_part(parameter, value)
                filled.add(id(parameter))
        for name, module in model.named_modules():
            _fill_children(model, module, _module_seed(seed, name))


@torch.no_grad()
def fill_pretrained(model: Any, config: ModelConfig, whole: Callable[[], Any]) -> None:
    """Load weights from safetensors in place. Each rank reads the bytes of its own part.

    For an adapter, this sets the values derived from the model's weights; see `fill_adapter`.

    Args:
        whole: makes the whole model without memory; used if the names in the files are not the
            names of this part.

    Raises:
        UserError: the files cannot be read, lack a weight, have a weight with another shape, or
        have a weight that the model lacks.
    """
    folder, where = weights_folder(config.name_or_path)
    places = _places(where, model, whole)
    # Such as the scales of quantized weights, which the codes need.
    if _without_place(where, model, places):
        all_of_it = whole()
        if left := _without_place(where, all_of_it, _places(where, all_of_it, whole)):
            raise _misfit(
                config, f"the model has no place for {len(left)} of them: {left[0]!r}, ..."
            )
    _fill_buffers(model)
    files = _Files(config, folder, where)
    kept = model.state_dict().keys()
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in kept]
    names: dict[int, list[str]] = {}  # a head tied to the embedding has two names
    for name, parameter in chain(model.named_parameters(remove_duplicate=False), buffers):
        if (own := base_name(name)) is not None:  # not an adapter's, which is not in the files
            names.setdefault(id(parameter), []).append(own)
    in_four_bits = four_bit_layers(model)
    for _, parameter in chain(model.named_parameters(), buffers):
        if id(parameter) not in names:
            continue
        known = [own for own in names[id(parameter)] if own in places]
        if not known:
            raise _misfit(config, f"the weights lack {names[id(parameter)][0]!r}")
        if layer := in_four_bits.get(id(parameter)):
            layer.fill(functools.partial(files.read, known[0], places[known[0]]))
            continue
        part = files.read(known[0], places[known[0]], parameter.shape, _part(parameter))
        for other in known[1:]:
            if not torch.equal(
                part, files.read(other, places[other], parameter.shape, _part(parameter))
            ):
                raise untied(config, known[0], other)
        _local(parameter).copy_(part)
    for vector, own, base, axis in magnitudes(model):
        read = functools.partial(files.read, own, places[own])
        _copy_part(vector, lengths(_as_trained(base, read), axis))


@torch.no_grad()
def fill_adapter(model: nn.Module, seed: int) -> None:
    """Initialize low-rank matrices in place, by seed and name. All ranks fill their own part.

    One of the two matrices is zero, so the model starts unchanged.

    Source: Hu et al. 2021 (arXiv:2106.09685), section 4.1; peft's choice of distributions.
    """
    generator = torch.Generator()
    for name, parameter in model.named_parameters():
        if is_fresh(name):
            generator.manual_seed(_module_seed(seed, name))
            value = torch.zeros(parameter.shape)
            if ".lora_A." in name:
                nn.init.kaiming_uniform_(value, a=math.sqrt(5), generator=generator)
            elif ".lora_embedding_B." in name:
                nn.init.normal_(value, generator=generator)
            _copy_part(parameter, value)


@torch.no_grad()
def fill_magnitudes(model: nn.Module) -> None:
    """Set DoRA's vectors in place from the weights of a model that this rank holds whole."""
    from peft.utils.integrations import dequantize_module_weight

    for vector, _, base, axis in magnitudes(model):
        vector.copy_(lengths(dequantize_module_weight(base).detach(), axis))


class _Files:
    # Reads pieces of safetensors files, one file open at a time.
    def __init__(self, config: ModelConfig, folder: Path, where: Mapping[str, str]) -> None:
        self._config = config
        self._folder = folder
        self._where = where
        self._reader: Any = None
        self._opened, self._size = "", 0

    def read(
        self, own: str, pieces: StoredWeight, shape: tuple[int, ...], part: tuple[slice, ...]
    ) -> Tensor:
        # A part of the model's weight `own`.
        found = pieces.read(shape, part, self._read)
        if found is None:
            names = f"{pieces.names[0]!r} and {len(pieces.names) - 1} others"
            raise _misfit(self._config, f"{names} do not make {own!r} with shape {tuple(shape)}")
        return found

    def _read(self, name: str, shape: tuple[int, ...], part: tuple[slice, ...]) -> Tensor:
        file = self._where[name]
        try:
            if self._reader is None or file != self._opened or self._size > _REOPEN_BYTES:
                # A file is mapped, and its read pages count as memory until it is closed.
                self._reader = safe_open(self._folder / file, "pt")
                self._opened, self._size = file, 0
            saved = self._reader.get_slice(name)
            if list(saved.get_shape()) != list(shape):
                raise _misfit(
                    self._config,
                    f"{name!r} has shape {tuple(saved.get_shape())} in {file} but "
                    f"{tuple(shape)} in the model",
                )
            value: Tensor = saved[part]
        except (OSError, SafetensorError) as error:
            raise _misfit(self._config, f"{file} cannot be read: {error}") from error
        self._size += math.prod(shape) * value.element_size()  # with the pages around it
        return value


def _as_trained(base: nn.Module, read: Read) -> Tensor:
    # The whole matrix below an adapter, from the files.
    if isinstance(base, FourBitLinear):
        return base.as_held(read)
    weight: Any = base.weight
    return read(weight.shape, tuple(slice(0, size) for size in weight.shape)).to(weight.dtype)


def _fill_buffers(model: Any) -> None:
    # Constants that are not in the files, such as the frequencies of rotary embeddings.
    for name, module in model.named_modules():
        if module._buffers:
            shadow = _shadow(module, {})
            shadow.__dict__["_parameters"] = {
                # Without memory but with the right shape, because some modules set one row to zero.
                key: None if p is None else nn.Parameter(torch.empty(p.shape, device="meta"))
                for key, p in module._parameters.items()
            }
            _forget_buffers(shadow)
            model._init_weights(shadow)
            _check_buffers(shadow, name)


def _fill_children(model: Any, module: nn.Module, seed: int) -> None:
    # Values that a block sets in its children, such as GPT-2's smaller residual projections.
    children = {
        key: _shadow(child, _own_parameters(child, set()))
        for key, child in module._modules.items()
        if child is not None and any(p is not None for p in child._parameters.values())
    }
    if not children or module is model:
        return
    shadow = _shadow(module, _own_parameters(module, set()))
    shadow.__dict__["_modules"] = {**module._modules, **children}
    torch.manual_seed(seed)
    model._init_weights(shadow)
    for key, child in children.items():
        real = module._modules[key]
        assert real is not None
        for name, value in child._parameters.items():
            parameter = real._parameters[name]
            if value is not None and parameter is not None and not bool(value.isnan().any()):
                _copy_part(parameter, value)


def _own_parameters(module: nn.Module, filled: set[int]) -> dict[str, nn.Parameter]:
    return {
        key: parameter
        for key, parameter in module._parameters.items()
        if parameter is not None and id(parameter) not in filled
    }


def _shadow(module: nn.Module, own: dict[str, nn.Parameter]) -> nn.Module:
    # A copy of the module with whole fp32 parameters on the CPU and the same buffers.
    shadow: nn.Module = object.__new__(type(module))  # copying a sharded module builds another
    shadow.__dict__.update(module.__dict__)
    shadow.__dict__["_parameters"] = {
        key: nn.Parameter(torch.full(own[key].shape, torch.nan)) if key in own else None
        for key in module._parameters
    }
    return shadow


def _forget_buffers(module: nn.Module) -> None:
    for buffer in module._buffers.values():
        if buffer is not None and buffer.is_floating_point():
            buffer.fill_(torch.nan)


def _check_buffers(module: nn.Module, name: str) -> None:
    for key, buffer in module._buffers.items():
        if buffer is not None and buffer.is_floating_point() and bool(buffer.isnan().any()):
            raise NotCoveredError(f"{name}.{key}")


def _module_seed(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _copy_part(parameter: Tensor, value: Tensor) -> None:
    _local(parameter).copy_(value[_part(parameter)])


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _part(tensor: Tensor) -> tuple[slice, ...]:
    # The position of this rank's part in the whole tensor.
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def _places(
    names: Collection[str], model: Any, whole: Callable[[], Any]
) -> dict[str, StoredWeight]:
    # The names in the files of each weight of a model, by its name in the base model.
    prefix = f"{model.base_model_prefix}."
    own = [name for each in model.state_dict() if (name := base_name(each)) is not None]
    found = {}
    for name in own:
        # A checkpoint of the bare model lacks the prefix, one of a model with a head has it.
        known = next((n for n in (name, name.removeprefix(prefix)) if n in names), None)
        if known is not None:
            found[name] = StoredWeight(((known,),), are_stacked=False)
    left = set(names).difference(*(each.names for each in found.values()))
    missing = [name for name in own if name not in found]
    # transformers finds the names by the model's class, and sharding changes the class.
    return found | pieces_of(whole(), missing, left) if missing and left else found


def _without_place(
    names: Iterable[str], model: Any, places: Mapping[str, StoredWeight]
) -> list[str]:
    # Weights that a model lacks, except weights that it is known to ignore.
    placed = {name for each in places.values() for name in each.names}
    # Buffers in old files that models now create themselves, by transformers' list.
    ignored = [r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$"]
    ignored += model._keys_to_ignore_on_load_unexpected or ()
    pattern = re.compile("|".join(f"(?:{each})" for each in ignored))
    return sorted(name for name in names if name not in placed and not pattern.search(name))


def with_home(name: str) -> str:
    """A model's folder or Hugging Face id for transformers, which does not expand `~`."""
    return os.path.expanduser(name)  # noqa: PTH111  # a Path would change some ids


def weights_folder(name: str, *, fetches: bool = True) -> tuple[Path, dict[str, str]]:
    """The folder of a model's safetensors, and the file of each weight.

    Args:
        name: a local folder, or a Hugging Face id, whose files are downloaded if they are missing.
        fetches: whether to download; if not, only files on this machine count.

    Raises:
        UserError: there are no weights, or they cannot be read.
    """
    from transformers.utils.hub import cached_file

    name, options = with_home(name), {"local_files_only": not fetches}
    try:
        found = cached_file(name, _INDEX, _raise_exceptions_for_missing_entries=False, **options)
        if found is not None:
            index = Path(found)
            where = weight_files(index)
            for file in sorted(set(where.values())):
                cached_file(name, file, **options)
            return index.parent, where
        single = Path(str(cached_file(name, _SINGLE, **options)))
        with safe_open(single, "pt") as reader:
            return single.parent, dict.fromkeys(reader.keys(), _SINGLE)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        if not may_be_huggingface_id(name) and not Path(name).exists():
            raise UserError(
                f"folder not found: {Path(name).absolute()}",
                where="model.name_or_path",
                fix="restore the model there, or change to the folder that the run was started in",
                id="files.model",
            ) from error
        raise UserError(
            f"cannot load the weights of {name!r}: {str(error).strip().splitlines()[0]}",
            where="model.name_or_path",
            fix="put model.safetensors, or its index and files, into the folder or repository; "
            "`save_pretrained` writes them",
            id="model.load",
        ) from error


def check_files(name: str) -> None:
    """Refuse a model's files if they would make transformers read files outside the folder.

    Raises:
        OSError: the files cannot be downloaded.
        ValueError: the index names files outside its folder, or the folder also holds an adapter.
    """
    from transformers.utils.hub import cached_file

    if index := cached_file(name, _INDEX, _raise_exceptions_for_missing_entries=False):
        weight_files(Path(index))
    options = {"_raise_exceptions_for_connection_errors": False}
    options["_raise_exceptions_for_missing_entries"] = False
    if cached_file(name, "adapter_config.json", **options):
        raise ValueError(
            "the folder also holds an adapter (adapter_config.json), which names another base model"
        )


def _misfit(config: ModelConfig, what: str) -> UserError:
    return UserError(
        f"the weights of {config.name_or_path} do not fit its config.json: {what}",
        where="model.name_or_path",
        fix="use a folder that holds one whole model. If transformers converts the weights of this "
        "model while it loads them, set strategy to {kind: ddp}, which loads with transformers",
        id="model.load",
    )


def untied(config: ModelConfig, name: str, other: str) -> UserError:
    """The error for a model whose config ties two weights that differ in its files."""
    return UserError(
        f"config.json of {config.name_or_path} sets tie_word_embeddings, which ties {other!r} to "
        f"{name!r}, but the files hold two different weights",
        where="model.name_or_path",
        fix="set tie_word_embeddings: false in its config.json to train with both, or delete "
        f"{other!r} from its files",
        id="model.load",
    )


def base_fingerprint(config: ModelConfig) -> str:
    """A hash of a base model: its config, the names, shapes and sizes of its weights, and samples
    of each weight file, which distinguish models of the same shape.

    Raises:
        UserError: the files cannot be read.
    """
    folder, where = weights_folder(config.name_or_path)
    digest = hashlib.blake2b(digest_size=16)
    try:
        described = read_json(folder / "config.json")
        kept = {key: value for key, value in described.items() if key not in _VOLATILE}
        digest.update(json.dumps(kept, sort_keys=True).encode())
        for name in sorted(set(where.values())):
            # Its size, its first bytes (with names and shapes), and samples of the rest.
            size = (folder / name).stat().st_size
            digest.update(f"{size}".encode())
            with (folder / name).open("rb") as stream:
                digest.update(stream.read(_HEADER_BYTES))
                for number in range(1, _SAMPLES + 1):
                    stream.seek(max(0, (size - _SAMPLE_BYTES) * number // _SAMPLES))
                    digest.update(stream.read(_SAMPLE_BYTES))
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(
            f"cannot read the files of {config.name_or_path}: {error}",
            where="model.name_or_path",
            fix="check config.json and the *.safetensors files of this folder",
            id="model.load",
        ) from error
    return digest.hexdigest()
