"""Fetch the records of a run from its copy in object storage: all of them, checked, or none.

Other users may write to the bucket, so its records are foreign. isles fetches them into a separate
folder, checks them there, and then moves them to their places. So a kill at any moment leaves no
unchecked file in a place that isles reads. isles does not fetch `run.yaml` and `resolved.yaml`,
because they control the run: this machine writes its own.
"""

from __future__ import annotations

import json
import logging
from fnmatch import fnmatchcase
from pathlib import Path
from shutil import rmtree
from zipfile import BadZipFile, ZipFile

from isles.config.foreign import check_folder, is_plain, names_code, read_json
from isles.errors import ConfigError
from isles.facts.units import format_bytes
from isles.run.bucket import RunStore
from isles.run.checkpoints import PARTIAL_PREFIX
from isles.run.objects import StoreError
from isles.run.paths import RunDir

log = logging.getLogger(__name__)

_TAKEN = ("metrics.jsonl", "balance.json", "reference-*.npz", "track/*.json", "tokenizer/*")
_STAGED = f"{PARTIAL_PREFIX}records"
_FROM_BUCKET = "from-bucket.json"
_MOST_RECORDS, _LONGEST_BYTES = 200, 1 << 30
_SCORES = {"scores.npy", "content.npy"}


def bring_records(copy: RunStore, run_dir: RunDir) -> None:
    """Fetch the records into an existing run directory. `begin_run` calls this.

    isles skips an invalid record with a warning.

    Raises:
        StoreError: the bucket does not provide them all. The run directory is unchanged.
        OSError: isles cannot write them to this disk.
    """
    drop_staged(run_dir)
    staged = RunDir(run_dir.path / _STAGED)
    staged.path.mkdir()
    try:
        sound = [name for name in _fetched(copy, staged.path) if _is_sound(staged.path / name)]
        for name in sound:
            target = run_dir.path / name
            target.parent.mkdir(exist_ok=True)
            (staged.path / name).replace(target)
        if staged.tokenizer.is_dir() and _is_sound_tokenizer(staged.tokenizer, copy.url):
            if run_dir.tokenizer.exists():
                run_dir.tokenizer.replace(staged.path / "old")
            staged.tokenizer.replace(run_dir.tokenizer)
    finally:
        drop_staged(run_dir)


def drop_staged(run_dir: RunDir) -> None:
    """Delete unchecked records of a start that was killed."""
    rmtree(run_dir.path / _STAGED, ignore_errors=True)


def is_from_bucket(tokenizer: Path) -> bool:
    """True if the tokenizer in this folder of a run came from a bucket.

    `trust_remote_code` trusts the author of the model, not the writers of a bucket.
    """
    return (tokenizer / _FROM_BUCKET).exists()


def _fetched(copy: RunStore, folder: Path) -> list[str]:
    # Fetches all records, and returns the names of records outside the tokenizer.
    wanted = {name: size for name, size in copy.store.sizes("").items() if _is_taken(name)}
    if len(wanted) > _MOST_RECORDS:
        raise StoreError("odd", f"{len(wanted)} records; a run has about ten")
    fetched = []
    for name, size in sorted(wanted.items()):
        if size > _LONGEST_BYTES:
            log.warning(
                "%s/%s has %s, so isles does not fetch it", copy.url, name, format_bytes(size)
            )
            continue
        (folder / name).parent.mkdir(exist_ok=True)
        left = _LONGEST_BYTES

        def moved(num_bytes: int, name: str = name) -> None:
            nonlocal left
            left -= num_bytes
            if left < 0:
                raise StoreError("odd", f"{name} grows during the download")

        try:
            copy.store.fetch(name, folder / name, moved)
        except FileNotFoundError:  # deleted in the meantime
            (folder / name).unlink(missing_ok=True)
            continue
        if not name.startswith("tokenizer/"):
            fetched.append(name)
    return fetched


def _is_taken(name: str) -> bool:
    # Plain names only, as PurePath.match takes `tokenizer/..` for `tokenizer/*`.
    parts = name.split("/")
    patterns = (pattern.split("/") for pattern in _TAKEN)
    return all(map(is_plain, parts)) and any(
        len(parts) == len(pattern) and all(map(fnmatchcase, parts, pattern)) for pattern in patterns
    )


def _is_sound(path: Path) -> bool:
    # Readers of metrics.jsonl check its rows one by one.
    try:
        if path.suffix == ".npz":
            with ZipFile(path) as packed:
                parts = packed.infolist()
            if {part.filename for part in parts} != _SCORES:
                raise ValueError("it does not contain scores")
            if sum(part.file_size for part in parts) > _LONGEST_BYTES:
                raise ValueError("its scores are too large")
        elif path.suffix == ".json":
            record = read_json(path)
            if not isinstance(record, dict):
                raise ValueError("it is not a JSON object")
            # A tracker puts its id into addresses.
            if path.parent.name == "track" and not all(map(is_plain, record.values())):
                raise ValueError("it does not contain the ids of a tracker")
    except (ValueError, BadZipFile) as error:
        log.warning("isles does not use the bucket's %s: %s", path.name, error)
        return False
    return True


def _is_sound_tokenizer(folder: Path, url: str) -> bool:
    what = "refers to Python code"
    # Without it a library would use any text as a vocabulary.
    if not (folder / "tokenizer.json").is_file():
        what = "has no tokenizer.json"
    elif not names_code(folder):
        try:
            check_folder(folder)
        except ConfigError as error:
            what = f"is not valid ({Path(error.where).name}: {error.what})"
        else:
            record = json.dumps({"bucket": url})
            (folder / _FROM_BUCKET).write_text(record, encoding="utf-8")
            return True
    log.warning("the tokenizer of %s %s, so isles uses the tokenizer of the run file", url, what)
    return False
