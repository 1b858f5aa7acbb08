"""What a run file says about files of this machine: the model's config.json, data, DeepSpeed's."""

from __future__ import annotations

import difflib
import glob
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from isles.config.interop.deepspeed import deepspeed_file_issues
from isles.config.load import Loaded
from isles.config.rules.shape import check_shape
from isles.config.sections.data import SourceConfig
from isles.config.sections.model import ModelConfig
from isles.config.sections.strategy import DeepSpeedStrategyConfig
from isles.errors import ConfigError
from isles.facts.models import load_shape, shape_names

BUILT_IN = ("python-docs", "python-stdlib")
"""Sources that come with Python."""

CHATML = "chatml"
"""The chat template that is built in."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_TEXTS = (".txt", ".text", ".md", ".rst", ".py")
_TABLES = (".jsonl", ".json", ".ndjson", ".parquet", ".pq", ".csv", ".tsv", ".gz")


def shape_issues(loaded: Loaded, hub_cache: Path) -> list[ConfigError]:
    """Every rule between the run file and the model's shape that is broken; see `find_shape`."""
    shape = find_shape(loaded.config.model, hub_cache)
    return loaded.errors(check_shape(loaded.config, shape)) if shape is not None else []


def find_shape(model: ModelConfig, hub_cache: Path) -> dict[str, Any] | None:
    """The model's Hugging Face config, where it is here: shipped, in a folder, or downloaded.

    Args:
        model: the run file's section.
        hub_cache: where huggingface_hub keeps what it has downloaded.

    Returns:
        None where it is not here, or cannot be read: the ranks look again, and say why.
    """
    name = model.name_or_path
    if name in shape_names():
        return load_shape(name)
    path = Path(name).expanduser()
    try:
        if path.is_dir():
            file = path / "config.json"
        elif path.is_file():
            file = path
        else:
            cached = hub_cache / f"models--{name.replace('/', '--')}"
            commit = (cached / "refs" / "main").read_text(encoding="utf-8").strip()
            file = cached / "snapshots" / commit / "config.json"
        loaded = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return loaded if isinstance(loaded, dict) else None


def deepspeed_issues(loaded: Loaded) -> list[ConfigError]:
    """Every contradiction between the run file and the DeepSpeed file that it names."""
    strategy = loaded.config.strategy
    if not isinstance(strategy, DeepSpeedStrategyConfig) or strategy.config_file is None:
        return []
    return loaded.errors(deepspeed_file_issues(Path(strategy.config_file), loaded.config))


def data_issues(loaded: Loaded) -> list[ConfigError]:
    """Every script, model, source or chat template that is not here, nor can be on the hub."""
    return [
        ConfigError(what, where=loaded.where(key), fix=fix, id=id)
        for id, key, what, fix in _missing(loaded)
    ]


def _missing(loaded: Loaded) -> Iterator[tuple[str, str, str, str]]:
    # Id, key, what and fix of each.
    config = loaded.config
    if config.training.script is not None:
        path, key = Path(config.training.script), "training.script"
        if path.is_dir():
            yield "files.script", key, f"{path.absolute()} is a folder", "name a file in it"
        elif not path.exists():
            what = f"there is no such script: {path.absolute()}"
            yield "files.script", key, what, how_to_find(path)
    for key in ("model.name_or_path", "tokenizer.name_or_path"):
        name = config.at(key)
        # A name of two parts may be on the hub, whatever folders are here.
        if name is not None and not _HUB_ID.fullmatch(name):
            path = Path(name).expanduser()
            if not _exists(path):
                what = f"there is no such folder: {path.absolute()}"
                yield "files.model", key, what, how_to_find(path)
    for index, source in enumerate(config.data.sources):
        if found := _missing_source(source):
            yield "files.data", f"data.sources.{index}.path", *found
    template = config.tokenizer.chat_template
    if template not in (None, CHATML) and not (path := Path(template).expanduser()).is_file():
        is_near = difflib.get_close_matches(template, [CHATML], n=1, cutoff=0.5)
        fix = "did you mean chatml?" if is_near else f"{how_to_find(path)}; or use chatml"
        what = f"there is no chat template {path.absolute()}"
        yield "data.template", "tokenizer.chat_template", what, fix


def _missing_source(source: SourceConfig) -> tuple[str, str] | None:
    name = source.path
    if source.type == "fake" or name is None or name in BUILT_IN:
        return None
    path = Path(name).expanduser()
    if _exists(path):
        return None
    if glob.has_magic(name):
        # Path.glob takes no absolute patterns.
        if any(Path(f).is_file() for f in glob.iglob(str(path), recursive=True)):  # noqa: PTH207
            return None
        return (
            f"the glob {name} matches no file from {Path.cwd()}",
            "try it with ls; ** stands for folders of any depth, and * skips hidden files",
        )
    if may_be_hub_id(name):
        return None
    return f"there is no such file: {path.absolute()}", how_to_find(path)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return True  # the rank that reads it says more


def may_be_hub_id(name: str) -> bool:
    """Whether a source may be a dataset of the Hugging Face hub, by its name alone."""
    if not _HUB_ID.fullmatch(name) or name.endswith(_TEXTS + _TABLES):
        return False
    folder, slash, _ = name.partition("/")
    return not (slash and Path(folder).is_dir())


def how_to_find(path: Path) -> str:
    """A fix for a path where nothing is: the nearest name, or where the path ends."""
    folder = path.parent
    if not folder.is_dir():
        while not folder.is_dir():
            folder = folder.parent
        return f"the path ends at {folder.absolute()}"
    try:
        near = difflib.get_close_matches(path.name, [e.name for e in folder.iterdir()], n=3)
    except OSError:
        near = []
    return f"did you mean {' or '.join(near)}?" if near else f"see ls {folder.absolute()}"
