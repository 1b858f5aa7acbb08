"""The run's tokenizer: kept in the run directory, so that every restart has the same one."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

from isles.config.run import RunConfig
from isles.data.build import documents_for_tokenizer
from isles.data.tokenizer import load_tokenizer, train_tokenizer
from isles.dist.world import World
from isles.rundir.paths import RunDir

log = logging.getLogger(__name__)


def make_tokenizer(config: RunConfig, run_dir: RunDir, world: World) -> Any:
    """Load or train the tokenizer; None for fake data. All ranks must call this."""
    if all(source.type == "fake" for source in config.data.sources):
        return None
    world.main_first(lambda: _make(config, run_dir.tokenizer), group=world.work)
    return load_tokenizer(str(run_dir.tokenizer), trust_remote_code=config.model.trust_remote_code)


def _make(config: RunConfig, folder: Path) -> None:
    if folder.is_dir():
        return
    wanted = config.tokenizer
    if wanted.train_vocab_size is not None:
        tokenizer = train_tokenizer(documents_for_tokenizer(config.data), wanted.train_vocab_size)
    else:
        tokenizer = load_tokenizer(
            wanted.name_or_path or config.model.name_or_path,
            trust_remote_code=config.model.trust_remote_code,
        )
    partial = folder.with_name(f".partial-{folder.name}")
    shutil.rmtree(partial, ignore_errors=True)
    tokenizer.save_pretrained(partial)
    partial.replace(folder)
    log.info("tokenizer vocabulary=%d folder=%s", len(tokenizer), folder)
