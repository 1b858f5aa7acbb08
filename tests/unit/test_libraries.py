"""What a rank's libraries do as they are imported, and what of their words reaches a user."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from isles.config.load import load_run_file
from isles.config.resolve import dump_resolved, resolve
from isles.run.env import RUN_DIR
from isles.run.paths import RunDir
from tests.deadline import run_program


def words_of(program: str, **env: str) -> list[str]:
    """What a Python program says on stderr."""
    done = run_program([sys.executable, "-c", program], env=os.environ | env)
    assert done.returncode == 0, done.stderr
    return done.stderr.splitlines()


TALK = """
import logging
from isles.train.logs import silence_libraries

logging.basicConfig(level=logging.INFO, format="%(name)s %(message)s")
silence_libraries()
logging.getLogger("DeepSpeed").setLevel(logging.INFO)  # as DeepSpeed does when it is imported
for name in ("torchao.kernel.intmm", "torch.utils._pytree", "DeepSpeed", "isles"):
    logging.getLogger(name).warning("warns")
    logging.getLogger(name).error("fails")
"""


def test_libraries_are_silent_but_for_errors() -> None:
    assert words_of(TALK) == [
        "torchao.kernel.intmm fails",
        "torch.utils._pytree fails",
        "DeepSpeed fails",
        "isles warns",
        "isles fails",
    ]


LOOK = """
import sys
import isles.train.preload
import transformers
assert "isles.train.worker" in sys.modules
assert any(name.startswith("transformers.models.llama.modeling") for name in sys.modules)
import importlib.util
assert importlib.util.find_spec("torchao"), "the ranks may have it"
"""


def test_the_fork_server_never_asks_the_gpu(run_file: Path, tmp_path: Path) -> None:
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
    run_dir.resolved.write_text(dump_resolved(resolve(load_run_file(run_file, []), num_gpus=0)))
    path = os.pathsep.join([str(packages), os.environ.get("PYTHONPATH", "")])
    words_of(LOOK, **{"PYTHONPATH": path, RUN_DIR: str(run_dir.path)})
    assert not asked.exists()


LOOK_ON_A_CPU = """
import sys
import isles.train.preload
assert "peft" in sys.modules and "bitsandbytes" in sys.modules
"""


def test_the_ranks_of_a_cpu_share_the_packages_of_an_adapter(
    run_file: Path, tmp_path: Path
) -> None:
    run_dir = RunDir(tmp_path / "run")
    run_dir.path.mkdir()
    changes = ["model.init=pretrained", "tokenizer={}", "adapter={type: qlora}"]
    resolved = resolve(load_run_file(run_file, changes), num_gpus=0)
    run_dir.resolved.write_text(dump_resolved(resolved))
    words_of(LOOK_ON_A_CPU, **{RUN_DIR: str(run_dir.path)})
