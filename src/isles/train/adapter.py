"""A run with an adapter: the base model that it belongs to, and what it leaves."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from isles.checkpoint.adapter import export_adapter, export_merged, read_trained
from isles.checkpoint.card import ExportKind
from isles.config.resolve import Resolved
from isles.config.sections.run import RunConfig
from isles.dist.world import World
from isles.errors import UserError
from isles.models.build import load_model_config
from isles.models.identity import base_fingerprint
from isles.run.manifest import CheckpointInfo
from isles.run.paths import RunDir
from isles.train.card import card_text
from isles.train.model import empty_model, whole_model

log = logging.getLogger(__name__)

Base = dict[str, str]
"""What a checkpoint's manifest says of the frozen model: `name` and `fingerprint`."""


def agree_on_base(
    config: RunConfig, world: World, resume_from: CheckpointInfo | None
) -> Base | None:
    """The base model of a run with an adapter. All ranks must call this.

    Args:
        config: the run file.
        world: all ranks.
        resume_from: the checkpoint that the run goes on from; None: it begins.

    Returns:
        None for a run without an adapter.

    Raises:
        UserError: its files cannot be read, or are not the same on every machine, or the checkpoint
            was taken with another model.
    """
    if config.adapter.type == "none":
        return None
    mine = base_of(config) if world.local_rank == 0 else None
    found = [(host, base) for host, base in world.gather((world.host, mine)) if base is not None]
    first_host, first = found[0]
    for host, base in found:
        if base["fingerprint"] != first["fingerprint"]:
            raise UserError(
                f"{config.model.name_or_path} is another model on {host} than on {first_host}",
                where=f"model.name_or_path on host {host}",
                fix="give every machine the same files",
            )
    if resume_from is not None:
        check_base(first, resume_from)
    return first


def base_of(config: RunConfig) -> Base:
    """The base model of a run with an adapter, as it lies here."""
    name = config.model.name_or_path
    folder = Path(name).expanduser()
    return {
        "name": str(folder.absolute()) if folder.exists() else name,
        "fingerprint": base_fingerprint(config.model),
    }


def with_base(config: RunConfig, checkpoint: CheckpointInfo) -> RunConfig:
    """The run file of an adapter with its base model found, and checked, from any folder.

    Raises:
        UserError: its files are not there, or cannot be read, or are not those that the checkpoint
            was taken with.
    """
    name = config.model.name_or_path
    recorded = (checkpoint.manifest.get("base") or {}).get("name", name)
    if not Path(name).expanduser().exists() and Path(recorded).exists():
        config = config.model_copy(
            update={"model": config.model.model_copy(update={"name_or_path": recorded})}
        )
    check_base(base_of(config), checkpoint)
    return config


def check_base(base: Base, checkpoint: CheckpointInfo) -> None:
    """An adapter means something only beside the weights that it was trained with.

    Raises:
        UserError: the checkpoint was taken with others.
    """
    before = checkpoint.manifest.get("base")
    if before is None or before["fingerprint"] == base["fingerprint"]:
        return
    named = "" if before["name"] == base["name"] else f", which was {before['name']}"
    raise UserError(
        f"the weights of {base['name']} are not those that this adapter was trained beside{named}",
        where=str(checkpoint.path),
        fix="put the model back that the run began with, or start a new run with `--resume no`",
    )


def export_adapted(
    run_dir: RunDir,
    resolved: Resolved,
    tokenizer: Any,
    checkpoint: CheckpointInfo,
    folder: Path,
    *,
    merge: bool,
    repo: str | None = None,
) -> None:
    """Export a checkpoint of a run with an adapter, in one process.

    Args:
        run_dir: whose checkpoint.
        resolved: its run file.
        tokenizer: of the run; None where it had none.
        checkpoint: which one.
        folder: the result.
        merge: a whole model, not the adapter alone; it must fit into this machine's memory.
        repo: where it will lie on the hub, for the model card; None: as the run file says.

    Raises:
        UserError, TrainingError: see `export_adapter` and `export_merged`.
    """
    config = with_base(resolved.config, checkpoint)
    kind: ExportKind = "model" if merge else "adapter"
    card = card_text(run_dir, resolved, checkpoint, tokenizer, kind=kind, repo=repo)
    if merge:
        model = _unquantized(config, tokenizer)
        read_trained(model, checkpoint.path)
        max_shard_bytes = int(config.checkpoint.max_shard_gb * 10**9)
        export_merged(model, tokenizer, folder, max_shard_bytes=max_shard_bytes, card=card)
        return
    export_adapter(
        checkpoint.path,
        empty_model(config, tokenizer),
        tokenizer,
        folder,
        base=base_of(config)["name"],
        card=card,
    )


def _unquantized(config: RunConfig, tokenizer: Any) -> Any:
    """The whole model on the CPU; one that is trained in 4 bits in its own type instead."""
    device = torch.device("cpu")
    if config.adapter.type == "qlora":
        own = load_model_config(config.model).dtype or torch.float32
        log.info("merging into the model as it was before it was quantised, in %s", own)
        plain = config.adapter.model_copy(update={"type": "lora"})
        config = config.model_copy(update={"adapter": plain})
        return whole_model(config, tokenizer, device, frozen=own)
    return whole_model(config, tokenizer, device)
