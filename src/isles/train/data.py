"""The data half of the assembler: tokenizer, training and validation data, and their checks."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from isles.checkpoint.readable import save_tokenizer
from isles.config.files import CHATML
from isles.config.rules.shape import check_shape
from isles.config.sections.data import DataConfig
from isles.config.sections.model import ModelConfig
from isles.config.sections.run import RunConfig
from isles.data.chat.template import describe_template, stop_at_turns, use_template
from isles.data.mix import Dataset, build_datasets, documents_for_tokenizer
from isles.data.show import field_notes
from isles.data.tokens.encode import TEMPLATED
from isles.data.tokens.prepare import rank_with_data
from isles.data.tokens.store import disk_errors
from isles.data.tokens.tokenizer import (
    OTHER_TOKENIZER,
    add_nothing,
    check_vocabulary,
    load_tokenizer,
    train_tokenizer,
)
from isles.dist.files import Disks, broadcast_folder
from isles.dist.world import World, on_every_rank, place_of
from isles.errors import ConfigError, ConfigErrors, DataError, UserError
from isles.facts.models import shape_names
from isles.models.build import load_model_config
from isles.run.bring import is_from_bucket
from isles.run.checkpoints import CheckpointInfo
from isles.run.env import cache_home
from isles.run.paths import RunDir
from isles.train.record import Recorder
from isles.train.strategy import needs_fixed_length

log = logging.getLogger(__name__)


def make_data(
    config: RunConfig,
    run_dir: RunDir,
    world: World,
    recorder: Recorder,
    resume_from: CheckpointInfo | None,
    disks: Disks,
) -> tuple[Any, Dataset, Dataset | None]:
    """The tokenizer, the training data and the validation data of a run. All ranks must call this.

    Raises:
        UserError: the model's folder, the tokenizer or the data is missing or broken on some rank,
        or they do not match. Every rank raises the same error.
    """
    recorder.phase("preparing data")
    # First, because its errors are clearer than those of the tokenizer.
    check_model_folder(config.model, world)
    hf_config = on_every_rank(world, lambda: load_model_config(config.model))
    tokenizer = _make_tokenizer(config, run_dir, world, disks)
    # The start could not check this if the model's config was on another machine.
    if issues := check_shape(config, hf_config.to_dict()):
        raise ConfigErrors([ConfigError(v.what, where=v.keys[0], fix=v.fix) for v in issues])
    # A tokenizer that is trained for the run sets the model's vocabulary size.
    trained = config.tokenizer.train_vocab_size is not None
    vocab_size = len(tokenizer) if trained else int(hf_config.get_text_config().vocab_size)
    if tokenizer is not None and (warning := check_vocabulary(tokenizer, vocab_size)):
        recorder.note(warning)
    training, validation = build_datasets(
        config.data,
        tokenizer,
        data_cache(config.data),
        seed=config.seed,
        vocab_size=vocab_size,
        progress=lambda text: recorder.phase("preparing data", text),
        world=world,
        pairs=config.training.method == "dpo",
        fixed_length=needs_fixed_length(config),
        stream_state=None if resume_from is None else resume_from.manifest.get("stream"),
    )
    _check_content(training, world, resume_from)
    if world.is_main:
        for number, (source, part) in enumerate(
            zip(config.data.sources, training.parts, strict=True)
        ):
            for note in field_notes(number, source, part.record):
                recorder.note(note)
    needed = max(part.vocab_size_needed for part in (training, validation) if part is not None)
    if needed > vocab_size:
        raise DataError(
            f"the data holds token {needed - 1}, the model knows {vocab_size} tokens",
            where="tokenizer.name_or_path",
            fix=OTHER_TOKENIZER,
            id="data.tokenizer",
        )
    return tokenizer, training, validation


def data_cache(data: DataConfig) -> Path:
    """The folder for prepared tokens; other users cannot read the default folder.

    The tokens may come from a file that only this user can read. The run file may name a
    folder that several users share, and its mode stays as it is.

    DataError: the folder cannot be created.
    """
    if data.cache_dir:
        return Path(data.cache_dir).expanduser()
    home = cache_home()
    with disk_errors(home):
        home.mkdir(parents=True, exist_ok=True)
        facts = home.stat()
        if facts.st_uid == os.geteuid() and facts.st_mode & 0o077:  # 0.1.0 left it open
            with suppress(PermissionError):  # some network disks have no modes
                home.chmod(0o700)
    return home / "data"


def _check_content(training: Dataset, world: World, resume_from: CheckpointInfo | None) -> None:
    # Every rank needs the same samples, and a checkpoint's cursor counts these samples.
    found = world.gather((world.host, training.content))
    odd = [
        f"{rank} on {host}" for rank, (host, content) in enumerate(found) if content != found[0][1]
    ]
    if odd:
        raise DataError(
            f"these ranks have other training data than rank 0 on {found[0][0]}: {', '.join(odd)}",
            where="data.sources",
            fix="copy the same files to every machine, or keep them on one machine only: isles "
            "sends "
            "its prepared data to the others",
            id="data.changed",
        )
    before = None if resume_from is None else resume_from.manifest.get("data")
    if resume_from is not None and before is not None and before != training.content:
        raise DataError(
            f"the training data has changed since step {resume_from.step} was saved",
            where="data.sources",
            fix="restore the old data to resume exactly, or start a new run with `--resume no` (to "
            "train these weights on other text: model.init: pretrained from this run's export)",
            id="data.changed",
        )


def check_model_folder(model: ModelConfig, world: World) -> None:
    """Check that every node has the model's folder, if the model is a folder. All ranks must call
    this.

    Raises:
        UserError: some nodes lack it. Every rank raises it, with the names of the nodes.
    """
    name = model.name_or_path
    if world.world_size == world.local_world_size or name in shape_names():
        return
    folder = Path(name).expanduser()
    me = place_of(world)
    found = world.gather((me, me.is_leader and folder.is_dir(), str(folder.absolute())))
    leaders = [(place, is_there, path) for place, is_there, path in found if place.is_leader]
    has = [(place, path) for place, is_there, path in leaders if is_there]
    lacks = [place for place, is_there, _ in leaders if not is_there]
    if not has or not lacks:
        return  # on Hugging Face, or nowhere: loading it tells
    owner, path = has[0]
    lines = [f"rsync -a --mkpath {path}/ {place.host}:{path}/" for place in lacks]
    raise UserError(
        f"the model {name!r} is a folder on {owner} that {', '.join(map(str, lacks))} "
        f"{'lack' if len(lacks) > 1 else 'lacks'}",
        where="model.name_or_path",
        fix=f"on {owner.host}: {'; '.join(lines)}; or put it on a disk that all hosts share",
        id="files.model",
    )


def _make_tokenizer(config: RunConfig, run_dir: RunDir, world: World, disks: Disks) -> Any:
    # Load or train it into the run directory, so that every restart has the same tokenizer. None
    # for fake data.
    if all(source.type == "fake" for source in config.data.sources):
        return None
    trains = config.tokenizer.train_vocab_size is not None
    is_there = world.main_first(run_dir.tokenizer.is_dir)
    # If only one machine has the data, that machine trains the tokenizer.
    rank = rank_with_data(config.data, world) if trains and not is_there else 0

    def write() -> None:
        if disks.is_apart[rank]:  # of another run, or of an earlier run with this name
            shutil.rmtree(run_dir.tokenizer, ignore_errors=True)
        write_tokenizer(config, run_dir.tokenizer)

    world.main_first(write, group=world.work, rank=rank)
    keeper = disks.keeper(world.rank)
    needs = world.rank == keeper != disks.keeper(rank)
    broadcast_folder(run_dir.tokenizer, world, src=rank, needs=needs)
    return run_tokenizer(config, run_dir)


def run_tokenizer(config: RunConfig, run_dir: RunDir) -> Any:
    """The tokenizer that a run keeps in its directory.

    DataError: it cannot be loaded or does not work.
    """
    trusted = config.model.trust_remote_code and not is_from_bucket(run_dir.tokenizer)
    tokenizer = load_tokenizer(str(run_dir.tokenizer), trust_remote_code=trusted)
    describe_tokenizer(config, tokenizer)
    return tokenizer


def describe_tokenizer(config: RunConfig, tokenizer: Any) -> None:
    """Record the run file's chat template next to the run's tokenizer."""
    wanted = config.tokenizer
    trained = None if wanted.train_vocab_size is None else CHATML
    given = wanted.name_or_path or config.model.name_or_path
    name = wanted.chat_template or trained or f"of {given}"
    describe_template(tokenizer, name, wanted.chat_template_kwargs)


def write_tokenizer(config: RunConfig, folder: Path) -> None:
    """Write the result of `make_tokenizer` into a folder, unless the folder exists."""
    if folder.is_dir():
        return
    tokenizer = make_tokenizer(config, documents_for_tokenizer(config.data))
    partial = folder.with_name(f".partial-{folder.name}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()  # if the run directory is deleted, transformers would create it again
    try:
        save_tokenizer(tokenizer, partial)
        partial.replace(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    log.info("tokenizer vocabulary=%d folder=%s", len(tokenizer), folder)


def make_tokenizer(config: RunConfig, documents: Iterable[str]) -> Any:
    """Load the tokenizer of a run, or train it on these documents.

    Its chat template is the run's template. A tokenizer that is trained here has no template, and
    gets chatml if there are conversations.

    Raises:
        DataError: the tokenizer or template does not exist, or the data cannot be read.
    """
    wanted = config.tokenizer
    is_chat = any(source.type in TEMPLATED for source in config.data.sources)
    template = wanted.chat_template
    if wanted.train_vocab_size is not None:
        template = template or (CHATML if is_chat else None)
        tokenizer = train_tokenizer(
            documents,
            wanted.train_vocab_size,
            is_chat=template == CHATML,
            model_type=str(load_model_config(config.model).model_type),
        )
    else:
        tokenizer = load_tokenizer(
            wanted.name_or_path or config.model.name_or_path,
            trust_remote_code=config.model.trust_remote_code,
        )
    if not wanted.add_special_tokens:
        add_nothing(tokenizer)
    if template is not None:
        use_template(tokenizer, template)
    if is_chat and tokenizer.chat_template is not None:
        stop_at_turns(tokenizer)
    return tokenizer
