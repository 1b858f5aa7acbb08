"""What a run file says about files of this machine: the model's config.json, data, DeepSpeed's."""

from __future__ import annotations

import difflib
import glob
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from isles.config.issues import Issue
from isles.config.load import Loaded
from isles.config.rules.deepspeed import deepspeed_file_issues
from isles.config.rules.shape import check_shape
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


def shape_faults(loaded: Loaded, hub_cache: Path) -> list[ConfigError]:
    """Every rule between the run file and the model's shape that is broken.

    Args:
        loaded: the run file.
        hub_cache: where huggingface_hub keeps what it has downloaded.
    """
    shape = find_shape(loaded.config.model, hub_cache)
    issues = check_shape(loaded.config, shape) if shape is not None else []
    return [ConfigError(v.what, where=loaded.where(*v.keys), fix=v.fix) for v in issues]


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


def data_faults(loaded: Loaded) -> list[ConfigError]:
    """Every script, model, source or chat template that is not here, nor can be on the hub."""
    found = {
        "files.script": _missing_script(loaded),
        "files.model": _missing_model(loaded),
        "files.data": _missing_sources(loaded),
        "data.template": _missing_template(loaded),
    }
    return [
        ConfigError(v.what, where=loaded.where(*v.keys), fix=v.fix, id=id)
        for id, issues in found.items()
        for v in issues
    ]


def deepspeed_faults(loaded: Loaded) -> list[ConfigError]:
    """Every contradiction between the run file and the DeepSpeed file that it names."""
    strategy = loaded.config.strategy
    if not isinstance(strategy, DeepSpeedStrategyConfig) or strategy.config_file is None:
        return []
    issues = deepspeed_file_issues(Path(strategy.config_file), loaded.config)
    return [ConfigError(v.what, where=loaded.where(*v.keys), fix=v.fix) for v in issues]


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


def _missing_script(loaded: Loaded) -> Iterator[Issue]:
    script = loaded.config.training.script
    if script is None:
        return
    path = Path(script)
    if path.is_dir():
        yield Issue(("training.script",), f"{path.absolute()} is a folder", "name a file in it")
    elif not path.exists():
        what = f"there is no such script: {path.absolute()}"
        yield Issue(("training.script",), what, how_to_find(path))


def _missing_model(loaded: Loaded) -> Iterator[Issue]:
    config = loaded.config
    names = {
        "model.name_or_path": config.model.name_or_path,
        "tokenizer.name_or_path": config.tokenizer.name_or_path,
    }
    for key, name in names.items():
        # A name of two parts may be on the hub, whatever folders are here.
        if name is None or _HUB_ID.fullmatch(name):
            continue
        path = Path(name).expanduser()
        try:
            if not path.exists():
                yield Issue(
                    (key,), f"there is no such folder: {path.absolute()}", how_to_find(path)
                )
        except OSError:
            continue  # the rank that reads it says more


def _missing_sources(loaded: Loaded) -> Iterator[Issue]:
    for index, source in enumerate(loaded.config.data.sources):
        name = source.path
        if source.type == "fake" or name is None or name in BUILT_IN:
            continue
        path, key = Path(name).expanduser(), f"data.sources.{index}.path"
        try:
            if path.exists():
                continue
            if glob.has_magic(name):
                # Path.glob takes no absolute patterns.
                if not any(Path(f).is_file() for f in glob.iglob(str(path), recursive=True)):  # noqa: PTH207
                    yield Issue(
                        (key,),
                        f"the glob {name} matches no file from {Path.cwd()}",
                        "try it with ls; ** stands for folders of any depth, and * skips hidden "
                        "files",
                    )
            elif not may_be_hub_id(name):
                yield Issue((key,), f"there is no such file: {path.absolute()}", how_to_find(path))
        except OSError:
            continue  # the rank that reads it says more


def _missing_template(loaded: Loaded) -> Iterator[Issue]:
    name = loaded.config.tokenizer.chat_template
    if name is None or name == CHATML:
        return
    path = Path(name).expanduser()
    if not path.is_file():
        near = difflib.get_close_matches(name, [CHATML], n=1, cutoff=0.5)
        yield Issue(
            ("tokenizer.chat_template",),
            f"there is no chat template {path.absolute()}",
            "did you mean chatml?" if near else f"{how_to_find(path)}; or use chatml",
        )
