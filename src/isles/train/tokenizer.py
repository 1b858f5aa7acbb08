"""The run's tokenizer: kept in the run directory, so that every restart has the same one."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

from isles.config.files import CHATML
from isles.config.sections.run import RunConfig
from isles.data.chat.template import stop_at_turns, use_template
from isles.data.mix import documents_for_tokenizer
from isles.data.tokens.encode import TEMPLATED
from isles.data.tokens.prepare import rank_with_data
from isles.data.tokens.tokenizer import load_tokenizer, train_tokenizer
from isles.dist.files import Disks, broadcast_folder
from isles.dist.world import World
from isles.run.paths import RunDir

log = logging.getLogger(__name__)


def make_tokenizer(config: RunConfig, run_dir: RunDir, world: World, disks: Disks) -> Any:
    """Load or train the tokenizer; None for fake data. All ranks must call this."""
    if all(source.type == "fake" for source in config.data.sources):
        return None
    trains = config.tokenizer.train_vocab_size is not None
    is_there = world.main_first(run_dir.tokenizer.is_dir)
    # Where the data lies on one machine only, a tokenizer is trained there.
    rank = rank_with_data(config.data, world) if trains and not is_there else 0

    def write() -> None:
        if disks.is_apart[rank]:  # another run's, or an earlier one's of this name
            shutil.rmtree(run_dir.tokenizer, ignore_errors=True)
        write_tokenizer(config, run_dir.tokenizer)

    world.main_first(write, group=world.work, rank=rank)
    keeper = disks.keeper(world.rank)
    needs = world.rank == keeper != disks.keeper(rank)
    broadcast_folder(run_dir.tokenizer, world, src=rank, needs=needs)
    return load_tokenizer(str(run_dir.tokenizer), trust_remote_code=config.model.trust_remote_code)


def write_tokenizer(config: RunConfig, folder: Path) -> None:
    """Load or train the tokenizer of a run into a folder, unless it is there.

    Its chat template is the one that the run trains with. Without one of its own, a tokenizer that
    is trained here gets chatml as soon as there are conversations.

    Raises:
        DataError: there is no such tokenizer or template, or the data cannot be read.
    """
    if folder.is_dir():
        return
    wanted = config.tokenizer
    is_chat = any(source.type in TEMPLATED for source in config.data.sources)
    template = wanted.chat_template
    if wanted.train_vocab_size is not None:
        template = template or (CHATML if is_chat else None)
        tokenizer = train_tokenizer(
            documents_for_tokenizer(config.data),
            wanted.train_vocab_size,
            is_chat=template == CHATML,
        )
    else:
        tokenizer = load_tokenizer(
            wanted.name_or_path or config.model.name_or_path,
            trust_remote_code=config.model.trust_remote_code,
        )
    if template is not None:
        use_template(tokenizer, template)
    if is_chat and tokenizer.chat_template is not None:
        stop_at_turns(tokenizer)
    partial = folder.with_name(f".partial-{folder.name}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()  # transformers would make the run directory again, were it deleted
    tokenizer.save_pretrained(partial)
    partial.replace(folder)
    log.info("tokenizer vocabulary=%d folder=%s", len(tokenizer), folder)
