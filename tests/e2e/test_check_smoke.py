"""`isles check --smoke`: a small training on this machine, as a part of the check."""

from __future__ import annotations

import json
import tempfile

import pytest

from isles.check.checks.ranks import smoke
from isles.check.plan import NodePlan
from tests.e2e.typed import isles
from tests.runs import assert_ended

pytestmark = pytest.mark.long


def test_three_steps_are_trained_and_nothing_stays(tmp_path):
    (tmp_path / "tmp").mkdir()
    env = {"TMPDIR": str(tmp_path / "tmp"), "OMP_NUM_THREADS": "1"}
    command = isles("check", "--smoke", "--no-net", "--json", cwd=tmp_path, env=env, expected=None)
    found = {finding["id"]: finding for finding in json.loads(command.out)["findings"]}[
        "train.smoke"
    ]
    assert (found["level"], found["text"]) == ("ok", "three steps trained"), found
    assert float(found["measured"].split()[0]) > 0
    assert not list((tmp_path / "tmp").glob("isles-smoke-*")) and not list(tmp_path.glob("runs*"))


def test_a_training_that_takes_too_long_is_ended_and_said(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (finding,) = smoke(NodePlan("a"), timeout_s=3.0)
    assert finding.level == "error" and "three steps not done in 3 s" in finding.text
    assert_ended(tmp_path)
