"""Files of this machine in a run file: the model's config.json, data, DeepSpeed's JSON."""

from __future__ import annotations

import difflib
import glob
import itertools
import os
import re
import shlex
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from isles.config.endings import ending_of, unread_issue
from isles.config.foreign import model_config
from isles.config.interop.deepspeed import deepspeed_file_issues
from isles.config.links import LinkRefused, broken_link, check_found
from isles.config.load import Loaded
from isles.config.rules.shape import check_shape
from isles.config.sections.cluster import SshLauncherConfig
from isles.config.sections.data import SourceConfig
from isles.config.sections.model import ModelConfig
from isles.config.sections.strategy import DeepSpeedStrategyConfig
from isles.errors import ConfigError, DataError
from isles.facts.models import load_shape, shape_names

BUILT_IN = ("python-docs", "python-stdlib")
"""Sources that come with Python."""

CHATML = "chatml"
"""The built-in chat template."""

GLOB_FIX = "try the glob with ls. ** matches folders of any depth, and * skips hidden files"

_SAVED = ("dataset_dict.json", "state.json")
"""One of them is in a folder that `save_to_disk` of the datasets library wrote."""

_LOOKED_AT = 1000
"""Number of names to read in a folder, to detect its file type."""

_MOST_NAMES = 5_000_000
"""Limit for the names in all folders of `**`. A local disk needs ten seconds for this number."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")

_FILE_ENDING = re.compile(r"\.[A-Za-z]\w*$")


def shape_issues(loaded: Loaded, huggingface_cache: Path) -> list[ConfigError]:
    """Every broken rule between the run file and the model's shape. See `find_shape`."""
    try:
        shape = find_shape(loaded.config.model, huggingface_cache)
    except ConfigError as error:
        return [error]
    return loaded.errors(check_shape(loaded.config, shape)) if shape is not None else []


def find_shape(model: ModelConfig, huggingface_cache: Path) -> dict[str, Any] | None:
    """The model's Hugging Face config, if it is on this machine: shipped, in a folder, or
    downloaded.

    None if it is missing or not readable. The ranks try again, and report the reason.
    ConfigError: it is not a config.json, or has invalid sizes.
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
            cached = huggingface_cache / f"models--{name.replace('/', '--')}"
            commit = (cached / "refs" / "main").read_text(encoding="utf-8").strip()
            file = cached / "snapshots" / commit / "config.json"
        return model_config(file)
    except (OSError, ValueError):
        return None


def deepspeed_issues(loaded: Loaded) -> list[ConfigError]:
    """Every contradiction between the run file and its DeepSpeed file."""
    strategy = loaded.config.strategy
    if not isinstance(strategy, DeepSpeedStrategyConfig) or strategy.config_file is None:
        return []
    return loaded.errors(deepspeed_file_issues(Path(strategy.config_file), loaded.config))


def data_issues(loaded: Loaded) -> list[ConfigError]:
    """Every missing script, model, source or chat template, except ids at Hugging Face."""
    return list(_missing(loaded))


def _missing(loaded: Loaded) -> Iterator[ConfigError]:
    config = loaded.config

    def missing(id: str, key: str, what: str, fix: str) -> ConfigError:
        return ConfigError(what, where=loaded.where(key), fix=fix, id=id)

    if config.training.script is not None:
        path = Path(config.training.script)
        if not path.is_file():
            what = f"script not found: {path.absolute()}"
            what += " is a folder" if path.is_dir() else ""
            fix, cluster = how_to_find(path), config.clusters[0]
            if isinstance(cluster.launcher, SshLauncherConfig) and cluster.sync is None:
                fix = f"set clusters.0.sync, so that isles copies its folder to the hosts; or {fix}"
            yield missing("files.script", "training.script", what, fix)
    for key in ("model.name_or_path", "tokenizer.name_or_path"):
        name = config.at(key)
        # A name of two parts may be an id at Hugging Face, whatever folders exist.
        if name is not None and not _HUB_ID.fullmatch(name):
            path = Path(name).expanduser()
            if not _exists(path):
                what, fix = f"folder not found: {path.absolute()}", how_to_find(path)
                yield missing("files.model", key, what, fix)
    for index, source in enumerate(config.data.sources):
        try:
            found = _missing_source(source)
        except DataError as error:
            found = error.what, error.fix
        except OSError:
            continue  # the rank that reads it reports the error
        if found:
            yield missing("files.data", f"data.sources.{index}.path", *found)
    template = config.tokenizer.chat_template
    if template not in (None, CHATML) and not (path := Path(template).expanduser()).is_file():
        what, fix = f"chat template not found: {path.absolute()}", f"{how_to_find(path)}; or use "
        yield missing("data.template", "tokenizer.chat_template", what, f"{fix}{CHATML}")


def _missing_source(source: SourceConfig) -> tuple[str, str] | None:
    name = source.path
    if source.type == "fake" or name is None or name in BUILT_IN:
        return None
    path = Path(name).expanduser()
    if found := folder_issue(path, source.type):
        return found
    if _exists(path) or named_files(name):
        return _odd_file(path)
    if glob.has_magic(name):
        return f"no file in {Path.cwd()} matches the glob {name}", GLOB_FIX
    if may_be_huggingface_id(name):
        return None
    return f"file not found: {path.absolute()}", how_to_find(path)


def _odd_file(path: Path) -> tuple[str, str] | None:
    try:
        if path.is_file() and (found := unread_issue(path.name)):
            return f"{found[0]}: {path.absolute()}", found[1]
        if path.is_dir() or path.is_file() or not path.exists():
            return None
    except OSError:
        return None  # the rank that reads it says more
    what = f"it is not a regular file: {path.absolute()}"
    return what, "give a regular file, as isles does not read pipes, sockets or devices"


def folder_issue(path: Path, type: str) -> tuple[str, str] | None:
    """The reason why this folder is not a source and a fix, or None if it may be one.

    Args:
        type: type of the source. Only `text` reads files of text.
    """
    try:
        if not path.is_dir() or any((path / name).is_file() for name in _SAVED):
            return None
        below = itertools.islice(path.rglob("*"), _LOOKED_AT)
        kinds = Counter(
            "".join(file.suffixes[-2 if ending_of(file.name).packing else -1 :]) for file in below
        )
    except OSError:
        return None  # the rank that reads it says more
    # isles does not read all files of a folder, which may also have readmes, archives and caches.
    formats = {kind: ending_of(f"a{kind}").format for kind in kinds}
    by_count = sorted(kinds, key=lambda kind: (-kinds[kind], formats[kind] == "text"))
    wanted = (*([] if type == "text" else ["text"]), None)
    read = [kind for kind in by_count if formats[kind] not in wanted]
    what = f"{path.absolute()} is a folder that save_to_disk of datasets did not write"
    glob_of_all = f"{path}/**/*{read[0] if read else '.jsonl'}"
    return what, f"give its files with a glob, such as {glob_of_all}"


def named_files(name: str) -> list[Path]:
    """The files of a source on this machine: one file, a folder, or the matches of a glob.

    A file that a glob also matches through links is among them once, without links if possible.

    DataError: a glob finds a private file over a link (see `check_found`), a link to nothing, or
    too many names.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return sorted(file for file in path.rglob("*") if file.is_file())
    if path.exists():
        return [path]
    if not glob.has_magic(name):
        _refuse_broken([path], name)
        return []
    matches = sorted(set(_matches(str(path), itertools.count(), str(path))))
    found = [(file, file.is_file()) for file in map(Path, matches)]
    _refuse_broken([file for file, is_file in found if not is_file], name)
    files = _once([file for file, is_file in found if is_file])
    plain = itertools.takewhile(lambda part: not glob.has_magic(part), path.parts)
    try:
        check_found(files, Path(*plain))
    except LinkRefused as error:
        raise DataError(
            str(error),
            where=name,
            fix="if the file is not data, remove the link. If it is, write a glob over the folder "
            f"{Path(error.filename).parent} into data.sources, replace the links to files by a "
            "link to that folder, or let your group read the files (chmod g+r)",
            id="files.data",
        ) from None
    return files


def _once(files: list[Path]) -> list[Path]:
    # Names of one file by the numbers that they share, which some network disks repeat.
    same: dict[object, list[Path]] = {}
    for file in files:
        facts = file.stat()
        same.setdefault((facts.st_dev, facts.st_ino), []).append(file)
    extra = set[Path]()
    for names in same.values():
        if len(names) > 1:
            real = {name: os.path.realpath(name) for name in names}
            names.sort(key=lambda name: sum(part.is_symlink() for part in (name, *name.parents)))
            kept = {real[name]: name for name in reversed(names)}
            extra |= {*names} - {*kept.values()}
    return [file for file in files if file not in extra]


def _refuse_broken(paths: list[Path], name: str) -> None:
    # Else isles would train without the data that a link once led to.
    broken = [(path, target) for path in paths if (target := broken_link(path)) is not None]
    if broken:
        (path, target), more = broken[0], len(broken) - 1
        others = f" ({more:,} more such links)" if more else ""
        raise DataError(
            f"the link {path} points to {target}, which does not exist{others}",
            where=name,
            fix=f"restore that file, or delete the link: rm {shlex.quote(str(path))}",
            id="files.data",
        )


def _matches(pattern: str, looked_at: Iterator[int], name: str) -> Iterator[str]:
    # As glob.glob, which follows folder links in a circle without end if ** is in the pattern.
    parts = pattern.split("/")
    if "**" not in parts:
        yield from glob.glob(pattern)  # noqa: PTH207, Path.glob takes no absolute patterns
        for count in range(1, len(parts)):
            if glob.has_magic(parts[count - 1]):
                yield from filter(_is_lost_folder, glob.glob("/".join(parts[:count])))  # noqa: PTH207
        return
    at = parts.index("**")
    top = "/".join(parts[:at]) or "/" * pattern.startswith("/")
    tail = "/".join(itertools.dropwhile(lambda part: part == "**", parts[at:])) or "*"
    tops = glob.glob(top) if glob.has_magic(top) else [top]  # noqa: PTH207
    for folder in _folders(tops, looked_at, name):
        if _is_lost_folder(folder):
            yield folder
            continue
        below = os.path.join(glob.escape(folder), tail)  # noqa: PTH118, may begin with ""
        yield from _matches(below, looked_at, name)


def _folders(tops: list[str], looked_at: Iterator[int], name: str) -> Iterator[str]:
    # These folders and all below them, but no hidden ones. A link comes after all real folders, and
    # is followed only to a folder that was not visited before.
    ahead, links, seen, is_linked = sorted(tops, reverse=True), deque[str](), set[object](), False
    while ahead or links:
        is_linked = is_linked or not ahead
        folder = ahead.pop() if ahead else links.popleft()
        try:
            facts = Path(folder).stat()
            identity = facts.st_dev, facts.st_ino
            if is_linked and identity in seen:
                continue
            with os.scandir(folder or ".") as entries:
                inner = [entry for entry in entries if _is_folder(entry, looked_at, name)]
        except OSError:
            if _is_lost_folder(folder):
                yield folder
            continue
        seen.add(identity)
        yield folder
        for entry in sorted(inner, key=lambda entry: entry.name, reverse=True):
            below = os.path.join(folder, entry.name)  # noqa: PTH118, folder may be ""
            (links if entry.is_symlink() else ahead).append(below)


def _is_folder(entry: os.DirEntry[str], looked_at: Iterator[int], name: str) -> bool:
    if next(looked_at) >= _MOST_NAMES:
        raise DataError(
            f"the glob searches more than {_MOST_NAMES:,} files and folders",
            where=name,
            fix="use a glob for a smaller folder, and check the folder for links to other folders",
            id="files.data",
        )
    try:
        if entry.name.startswith("."):
            return False
        return (entry.is_symlink() and _is_lost_folder(entry.path)) or entry.is_dir()
    except OSError:
        return False


def _is_lost_folder(path: str) -> bool:
    # A link that leads nowhere, whose name has no ending of a file: `v1.0` has none.
    return not _FILE_ENDING.search(path) and broken_link(Path(path)) is not None


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return True  # the rank that reads it says more


def may_be_huggingface_id(name: str) -> bool:
    """True if a source may be a dataset at Hugging Face, by its name."""
    ending = ending_of(name)
    if not _HUB_ID.fullmatch(name) or ending.format or ending.packing:
        return False
    folder, slash, _ = name.partition("/")
    return not (slash and Path(folder).is_dir())


def how_to_find(path: Path) -> str:
    """A fix for a missing path: the nearest name, or the last existing folder."""
    folder = path.parent
    if not folder.is_dir():
        while not folder.is_dir():
            folder = folder.parent
        return f"check the path, whose last existing folder is {folder.absolute()}"
    try:
        near = difflib.get_close_matches(path.name, [e.name for e in folder.iterdir()], n=3)
    except OSError:
        near = []
    return f"did you mean {' or '.join(near)}?" if near else f"look in ls {folder.absolute()}"
