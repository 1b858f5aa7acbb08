"""What the fork server imports before the ranks are forked from it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from isles.config.load import load_run_file
from isles.config.resolve import dump_resolved, resolve
from isles.run.env import RUN_DIR
from isles.run.paths import RunDir
from tests.deadline import DEADLINE_S

LOOK = """
import sys
import isles.train.preload
import transformers
assert "isles.train.worker" in sys.modules
assert any(name.startswith("transformers.models.llama.modeling") for name in sys.modules)
import importlib.util
assert importlib.util.find_spec("torchao"), "the ranks may have it"
"""


def test_it_never_asks_the_gpu(run_file: Path, tmp_path: Path) -> None:
    """A process that has asked cannot fork ranks that use the GPU. torchao asks when imported."""
    packages, asked = tmp_path / "packages", tmp_path / "asked"
    for folder in ("torchao", "torchao-9.9.dist-info"):
        (packages / folder).mkdir(parents=True)
    (packages / "torchao" / "__init__.py").write_text(f"open({str(asked)!r}, 'w').close()\n")
    (packages / "torchao-9.9.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torchao\nVersion: 9.9\n"
    )
    run_dir = RunDir(tmp_path / "run")
    run_dir.path.mkdir()
    resolved = resolve(load_run_file(run_file, []), num_gpus=0)
    run_dir.resolved.write_text(dump_resolved(resolved))
    path = os.pathsep.join([str(packages), os.environ.get("PYTHONPATH", "")])
    subprocess.run(
        [sys.executable, "-c", LOOK],
        env={**os.environ, "PYTHONPATH": path, RUN_DIR: str(run_dir.path)},
        check=True,
        timeout=DEADLINE_S,
    )
    assert not asked.exists()
