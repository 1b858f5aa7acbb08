"""What a node says of files: folders of the run, its model and data, and the hub."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from isles.config.files import data_faults, deepspeed_faults, shape_faults
from isles.config.load import Loaded
from isles.config.sections.run import RunConfig
from isles.errors import UserError
from isles.launch.hub import ask_hub
from isles.run.env import cache_home, hub_cache
from isles.run.refusals import NOT_A_FOLDER, refusal


def files(args: dict[str, Any]) -> dict[str, Any]:
    """The folders of a run, seen from here.

    Args:
        args: `workdir`: where it should run; `output_dir`; `loaded`: config, origins, text and
            path of the run file (optional).

    Returns:
        workdir_is_there; output, cache and hub_cache (what `_folder` says); faults of the run
        file that this machine finds: what, where, fix of each.
    """
    workdir = Path(args["workdir"]).expanduser()
    facts: dict[str, Any] = {
        "workdir_is_there": workdir.is_dir(),
        "output": _folder(Path(args["output_dir"]).expanduser()),
        "cache": _folder(cache_home()),
        "hub_cache": _folder(hub_cache()),
        "faults": [],
    }
    if args.get("loaded") is not None:
        loaded = _loaded(args["loaded"])
        found = [
            *data_faults(loaded),
            *shape_faults(loaded, hub_cache()),
            *deepspeed_faults(loaded),
        ]
        facts["faults"] = [{"what": f.what, "where": f.where, "fix": f.fix} for f in found]
    return facts


def hub(args: dict[str, Any]) -> dict[str, Any]:
    """Whether this machine can read repositories of the hub.

    Args:
        args: `repos`: pairs of kind (model or dataset) and id.

    Returns:
        answers: see `isles.launch.hub.ask_hub`.
    """
    return {"answers": ask_hub(args["repos"])}


def probe_write(args: dict[str, Any]) -> dict[str, Any]:
    """Leave a file with a random name where the run directory will be; its path and content,
    empty where it cannot be written."""
    folder = _existing(Path(args["output_dir"]).expanduser())
    word = os.urandom(8).hex()
    path = folder / f".isles-check-{word}"
    try:
        path.write_text(word, encoding="ascii")
    except OSError:
        path.unlink(missing_ok=True)
        return {"path": "", "word": ""}  # `files` says why
    return {"path": str(path.absolute()), "word": word}


def probe_read(args: dict[str, Any]) -> dict[str, Any]:
    """Whether that file is here too."""
    try:
        return {"is_shared": Path(args["path"]).read_text(encoding="ascii") == args["word"]}
    except OSError:
        return {"is_shared": False}


def probe_remove(args: dict[str, Any]) -> dict[str, Any]:
    """Take it away again."""
    path = Path(args["path"])
    if path.name.startswith(".isles-check-"):
        path.unlink(missing_ok=True)
    return {}


def _existing(path: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    path = path.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _folder(path: Path) -> dict[str, Any]:
    """Where a folder is or would be made: space, inodes, and whether it can be written."""
    folder = _existing(path)
    facts: dict[str, Any] = {"path": str(path.absolute()), "existing": str(folder), "fault": ""}
    try:
        usage, inodes = shutil.disk_usage(folder), os.statvfs(folder)
        facts |= {"free": usage.free, "total": usage.total}
        facts |= {"free_inodes": inodes.f_favail, "total_inodes": inodes.f_files}
        if not folder.is_dir():
            facts["fault"] = NOT_A_FOLDER
            return facts
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".isles-check-") as stream:
            stream.write(b"x" * 4096)
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        facts["fault"] = refusal(error)
    return facts


def _loaded(record: dict[str, Any]) -> Loaded:
    try:
        config = RunConfig.model_validate(record["config"])
    except ValueError as error:
        raise UserError(
            f"this isles refuses the run file: {_line(error)}",
            fix="install the same isles on all hosts: isles setup",
            id="version.isles",
        ) from None
    return Loaded(config, record["origins"], record["text"], Path(record["path"]))


def _line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")[:200]
