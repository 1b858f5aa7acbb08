"""examples/slurm_ddp: where a rank stands, and what its options refuse."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deadline import DEADLINE_S
from tests.each import each

EXAMPLE = Path(__file__).parents[2] / "examples" / "slurm_ddp"

TASK = {
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}
# What the document's job script exports: the same in all tasks.
EXPORTED = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4"}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}


@pytest.fixture(scope="module")
def places() -> list[str]:
    """What `place` says of several environments: one import of torch for all."""
    code = "import json, sys; from setup_distributed import place\n"
    code += "[print(place(environ)) for environ in json.load(sys.stdin)]"
    environs = [
        TASK,
        TASK | EXPORTED,
        TASK | TORCHRUN,
        TORCHRUN,
        {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
        {},
    ]
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(environs),
        cwd=EXAMPLE,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@each(
    ("number", "expected"),
    [
        (0, "(3, 4, 1)"),
        (1, "(3, 4, 1)"),
        (2, "(5, 8, 1)"),
        (3, "(5, 8, 1)"),
        (4, "(0, 1, 0)"),
        (5, "(0, 1, 0)"),
    ],
    ids=["srun", "srun in a script with RANK", "torchrun in srun", "torchrun", "batch", "alone"],
)
def test_its_place(places: list[str], number: int, expected: str) -> None:
    assert places[number] == expected
