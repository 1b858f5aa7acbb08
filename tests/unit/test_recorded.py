"""Resolved run files and the order of data are what they were; see tests/recorded.py."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from tests.recorded import HASHES, SETTINGS, data_digest, resolved_texts, write_data

_HOW = (
    "compare `python -m tests.recorded DIR` here and in a checkout from before; "
    "if the difference is meant: `python -m tests.recorded --write`"
)


def test_resolved_run_files_are_what_they_were() -> None:
    recorded = json.loads(HASHES.read_text(encoding="utf-8"))["resolved"]
    found = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in resolved_texts()}
    other = [name for name in {**recorded, **found} if recorded.get(name) != found.get(name)]
    assert not other, f"{other}: {_HOW}"


@pytest.mark.long
@pytest.mark.parametrize("setting", list(SETTINGS))
def test_the_first_ten_thousand_batches_are_what_they_were(tmp_path: Path, setting: str) -> None:
    recorded = json.loads(HASHES.read_text(encoding="utf-8"))["data"]
    write_data(tmp_path)
    assert data_digest(tmp_path, setting, 10_000) == recorded[setting], _HOW
