"""Resolved run files and the order of data are what they were; see tests/recorded.py."""

from __future__ import annotations

import json

import pytest

from tests import recorded

_KEPT = json.loads(recorded.HASHES.read_text(encoding="utf-8"))
_HOW = (
    "compare `python -m tests.recorded DIR` here and in a checkout from before; "
    "if the difference is meant: `python -m tests.recorded --write`"
)


def test_resolved_run_files_are_what_they_were():
    kept = _KEPT["resolved"]
    found = recorded.resolved_digests(dict(recorded.resolved_texts()))
    other = [name for name in kept | found if kept.get(name) != found.get(name)]
    assert not other, f"{other}: {_HOW}"


@pytest.mark.long
@pytest.mark.parametrize("setting", list(recorded.SETTINGS))
def test_the_first_ten_thousand_batches_are_what_they_were(tmp_path, setting):
    recorded.write_data(tmp_path)
    assert recorded.data_digest(tmp_path, setting) == _KEPT["data"][setting], _HOW
