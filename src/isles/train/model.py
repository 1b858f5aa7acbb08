"""The model of a run file: empty, or whole on a device; and the base model of an adapter."""

from __future__ import annotations

import math
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from isles.config.foreign import model_config
from isles.config.sections.model import ModelConfig
from isles.config.sections.run import RunConfig
from isles.config.sections.training import Precision
from isles.dist.world import World
from isles.errors import UserError
from isles.facts.cost import train_flops_per_token
from isles.facts.memory.architecture import Architecture, UnknownShapeError
from isles.facts.models import load_shape, shape_names
from isles.models.adapter import base_name, frozen_dtype
from isles.models.build import build_empty_model, build_model, keep_files, load_model_config
from isles.models.fill import base_fingerprint, weights_folder, with_home
from isles.models.four_bit import num_numbers
from isles.run.checkpoints import CheckpointInfo
from isles.run.paths import RunDir
from isles.run.records import read_record, write_record

_FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Types of weights by their names in safetensors."""

_TYPES = {str(dtype): dtype for dtype in _FLOATS.values()}

_WEIGHTS = "isles-weights.json"
"""File with the type of a model's weights, next to the model files in a run directory."""

Base = dict[str, str]
"""Key of the frozen model in a checkpoint's manifest: its `name` and `fingerprint`."""


def weights_dtype(precision: Precision) -> torch.dtype:
    """Type of the trained weights."""
    return torch.bfloat16 if precision == "bf16-true" else torch.float32


def empty_model(config: RunConfig, tokenizer: Any) -> nn.Module:
    """The run's model on the meta device, with its adapter; see `build_empty_model`."""
    precision = config.training.precision
    return build_empty_model(
        config.model,
        dtype=weights_dtype(precision),
        vocab_size=_vocab_size(config, tokenizer),
        adapter=config.adapter,
        frozen_dtype=frozen_dtype(precision, config.adapter),
    )


def whole_model(
    config: RunConfig,
    tokenizer: Any,
    device: torch.device,
    *,
    frozen: torch.dtype | None = None,
) -> nn.Module:
    """The run's model before the first step, with its adapter; see `build_model`.

    Args:
        tokenizer: of the run; None if it has none.
        frozen: type of an adapter's frozen base weights. Default: as in training.
    """
    precision = config.training.precision
    return build_model(
        config.model,
        device=device,
        dtype=weights_dtype(precision),
        seed=config.seed,
        vocab_size=_vocab_size(config, tokenizer),
        adapter=config.adapter,
        frozen_dtype=frozen or frozen_dtype(precision, config.adapter),
    )


def count_parameters(model: nn.Module, *, trained: bool = False) -> int:
    """Number of parameters, all or trained; see `num_numbers`."""
    return sum(num_numbers(p) for p in model.parameters() if p.requires_grad or not trained)


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The architecture and the FLOPs of a run's model; see `architecture_of` and
    `flops_per_token`."""

    known: Architecture
    flops_per_token: float
    vocab_size: int

    @classmethod
    def of(cls, model: Any, seq_length: int) -> ModelSize:
        """The cost of a model that is not sharded yet."""
        vocab_size = int(model.config.get_text_config().vocab_size)
        return cls(architecture_of(model), flops_per_token(model, seq_length), vocab_size)


def architecture_of(model: Any) -> Architecture:
    """The architecture by the model's config, or by its parameters if the config is incomplete."""
    base = [p for name, p in model.named_parameters() if base_name(name) is not None]
    params = sum(map(num_numbers, base))
    try:
        return Architecture.of(model.config.to_dict()).with_params(params)
    except UnknownShapeError:
        return Architecture.opaque(params)


def flops_per_token(model: Any, seq_length: int) -> float:
    """Training FLOPs for one token of a model that is not sharded yet; see
    `train_flops_per_token`."""
    shape = model.config.get_text_config()  # for a multimodal model, its text part
    # A fully trained module has a frozen copy in the base model, which does not compute.
    at_work = {n: p for n, p in model.named_parameters() if ".original_module." not in n}
    if not getattr(shape, "tie_word_embeddings", False):
        looked_up = {id(p) for p in model.get_input_embeddings().parameters()}
        at_work = {n: p for n, p in at_work.items() if id(p) not in looked_up}
    return train_flops_per_token(
        matmul_params=sum(num_numbers(p) for p in at_work.values()),
        frozen_params=sum(num_numbers(p) for p in at_work.values() if not p.requires_grad),
        num_layers=int(getattr(shape, "num_hidden_layers", 0)),
        hidden_size=int(getattr(shape, "hidden_size", 0)),
        seq_length=seq_length,
    )


def agree_on_base(
    config: RunConfig, world: World, resume_from: CheckpointInfo | None
) -> Base | None:
    """The base model of a run with an adapter; None without one. All ranks must call this.

    Raises:
        UserError: its files cannot be read or differ between machines, or the checkpoint was saved
        with another model.
    """
    if config.adapter.type == "none":
        return None
    mine = base_of(config) if world.local_rank == 0 else None
    found = [(host, base) for host, base in world.gather((world.host, mine)) if base is not None]
    first_host, first = found[0]
    for host, base in found:
        if base["fingerprint"] != first["fingerprint"]:
            raise UserError(
                f"{config.model.name_or_path} differs between {host} and {first_host}",
                where=f"model.name_or_path on host {host}",
                fix="copy the same files to every machine",
            )
    if resume_from is not None:
        check_base(first, resume_from)
    return first


def base_of(config: RunConfig) -> Base:
    """The base model on this machine of a run with an adapter."""
    name = config.model.name_or_path
    folder = Path(name).expanduser()
    return {
        "name": str(folder.absolute()) if folder.exists() else name,
        "fingerprint": base_fingerprint(config.model),
    }


def keep_base(config: RunConfig, run_dir: RunDir) -> None:
    """Copy the model files that an export needs into the run directory, unless they exist.

    The model's folder or the Hugging Face cache may be deleted before an export. The code of a
    model is not copied, and an adapter needs the weights of its model anyway.
    """
    model = config.model
    needs_more = config.adapter.type != "none" or model.trust_remote_code
    if run_dir.base.is_dir() or needs_more or model.name_or_path in shape_names():
        return
    _, dtype = base_files(model)
    partial = run_dir.base.with_name(f".partial-{run_dir.base.name}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        keep_files(model, partial)
        write_record(partial / _WEIGHTS, {"dtype": None if dtype is None else str(dtype)})
        partial.replace(run_dir.base)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def kept_base(config: RunConfig, run_dir: RunDir) -> RunConfig:
    """The run file with the model files in the run directory, if the run directory has any.

    These files do not contain weights.
    """
    if config.adapter.type != "none" or not run_dir.base.is_dir():
        return config
    model = config.model.model_copy(update={"name_or_path": str(run_dir.base)})
    return config.model_copy(update={"model": model})


def base_files(config: ModelConfig) -> tuple[dict[str, Any], torch.dtype | None]:
    """The config.json that a run starts with, and the type of the weights in its files.

    Returns:
        The config, and the type of most numbers in the files. If this machine does not have the
        files, the type in the config. None for a model from scratch.

    Raises:
        UserError: the files cannot be found or read.
    """
    from transformers.utils.hub import cached_file

    name = with_home(config.name_or_path)
    found = load_model_config(config)
    if name in shape_names():
        return dict(load_shape(name)), None
    file = Path(name) if Path(name).is_file() else Path(str(cached_file(name, "config.json")))
    if config.init == "scratch":
        return model_config(file), None
    if (kept := read_record(file.with_name(_WEIGHTS))) is not None:
        return model_config(file), _TYPES.get(str(kept.get("dtype")))
    try:  # some tools write another type into the config
        folder, where = weights_folder(name, fetches=False)
    except UserError:
        return model_config(file), found.dtype
    sizes: Counter[torch.dtype] = Counter()
    for held_in in set(where.values()):
        with safe_open(folder / held_in, "pt") as reader:
            for weight in reader.keys():  # noqa: SIM118  # no dict
                header = reader.get_slice(weight)
                if dtype := _FLOATS.get(header.get_dtype()):
                    sizes[dtype] += math.prod(header.get_shape())
    return model_config(file), max(sizes, key=sizes.__getitem__, default=None)


def with_base(config: RunConfig, checkpoint: CheckpointInfo) -> RunConfig:
    """The run file of an adapter, with its base model found and checked. Works in any folder.

    Raises:
        UserError: the files are missing or unreadable, or differ from the files that the checkpoint
        was saved with.
    """
    name = config.model.name_or_path
    recorded = str((checkpoint.manifest.get("base") or {}).get("name", name))
    # The checkpoint may come from a bucket, and trust in model code applies to one folder only.
    may_move = not config.model.trust_remote_code
    if may_move and not Path(name).expanduser().exists() and Path(recorded).exists():
        config = config.model_copy(
            update={"model": config.model.model_copy(update={"name_or_path": recorded})}
        )
    check_base(base_of(config), checkpoint)
    return config


def check_base(base: Base, checkpoint: CheckpointInfo) -> None:
    """Check that an adapter's base weights are the weights that it was trained with.

    Raises:
        UserError: the checkpoint was saved with other weights.
    """
    before = checkpoint.manifest.get("base")
    if before is None or before.get("fingerprint") == base["fingerprint"]:
        return
    named = "" if before.get("name") == base["name"] else f", which was {before.get('name')}"
    raise UserError(
        f"this adapter was trained with other weights than those in {base['name']}{named}",
        where=str(checkpoint.path),
        fix="restore the model that the run started with, or start a new run with `--resume no`",
    )


def _vocab_size(config: RunConfig, tokenizer: Any) -> int | None:
    # A tokenizer that was trained for the run sets the model's vocabulary size.
    trained = tokenizer is not None and config.tokenizer.train_vocab_size is not None
    return len(tokenizer) if trained else None
