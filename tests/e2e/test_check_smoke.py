"""`isles check --smoke`: a small training on this machine, as a part of the check."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from isles.check.checks.ranks import smoke
from isles.check.plan import NodePlan
from tests.deadline import DEADLINE_S
from tests.lab.home import until


@pytest.mark.long
def test_three_steps_are_trained_and_nothing_stays(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "isles", "check", "--smoke", "--no-net", "--json"],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path / "tmp"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    found = {finding["id"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert found["train.smoke"]["level"] == "ok", found["train.smoke"]
    assert found["train.smoke"]["text"] == "three steps trained"
    assert float(found["train.smoke"]["measured"].split()[0]) > 0
    assert not list((tmp_path / "tmp").glob("isles-smoke-*")) and not list(tmp_path.glob("runs*"))


@pytest.mark.long
def test_a_training_that_takes_too_long_is_ended_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (finding,) = smoke(NodePlan("a"), timeout_s=3.0)
    assert finding.level == "error" and "three steps not done in 3 s" in finding.text
    until(lambda: not _processes(str(tmp_path)), f"no process is left of {tmp_path}", DEADLINE_S)


def _processes(word: str) -> list[str]:
    """Command lines of this machine that have a word in them."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if word in line:
            found.append(line)
    return found
