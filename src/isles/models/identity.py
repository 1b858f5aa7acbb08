"""Which weights a run begins with: what tells one base model from another of its shape."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from isles.config.sections.model import ModelConfig
from isles.errors import UserError
from isles.models.fill import weights_folder

_SAMPLES = 32
_SAMPLE_BYTES = 16 * 1024
_HEADER_BYTES = 64 * 1024
_VOLATILE = ("_name_or_path", "transformers_version")


def base_fingerprint(config: ModelConfig) -> str:
    """A hash of a base model's config, of the names, shapes and sizes of its weights, and of a
    little of each of their files: models of one shape differ there.

    Args:
        config: the run file's section, with init: pretrained.

    Raises:
        UserError: the files cannot be read.
    """
    folder, where = weights_folder(config.name_or_path)
    digest = hashlib.blake2b(digest_size=16)
    try:
        described = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        kept = {key: value for key, value in described.items() if key not in _VOLATILE}
        digest.update(json.dumps(kept, sort_keys=True).encode())
        for name in sorted(set(where.values())):
            _add_file(digest, folder / name)
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(
            f"the files of {config.name_or_path} cannot be read: {error}",
            where="model.name_or_path",
            fix="look at config.json and the *.safetensors files of this folder",
            id="model.load",
        ) from error
    return digest.hexdigest()


def _add_file(digest: hashlib.blake2b, path: Path) -> None:
    """Its size, its first bytes, where the names and shapes stand, and samples of the rest."""
    size = path.stat().st_size
    digest.update(f"{size}".encode())
    with path.open("rb") as stream:
        digest.update(stream.read(_HEADER_BYTES))
        for number in range(1, _SAMPLES + 1):
            stream.seek(max(0, (size - _SAMPLE_BYTES) * number // _SAMPLES))
            digest.update(stream.read(_SAMPLE_BYTES))
