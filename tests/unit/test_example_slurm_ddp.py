"""examples/slurm_ddp: where a rank stands under each way to start it."""

from __future__ import annotations

import json
import sys

import pytest

from tests.deadline import run_program
from tests.documents import ROOT

TASK = {
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}
# What the document's job script exports: the same in all tasks.
EXPORTED = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4"}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
# rank, world size, local rank
PLACES = {
    "srun": (TASK, "(3, 4, 1)"),
    "srun in a script with RANK": (TASK | EXPORTED, "(3, 4, 1)"),
    "torchrun in srun": (TASK | TORCHRUN, "(5, 8, 1)"),
    "torchrun": (TORCHRUN, "(5, 8, 1)"),
    "batch": ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, "(0, 1, 0)"),
    "alone": ({}, "(0, 1, 0)"),
}


@pytest.mark.long
def test_its_place() -> None:
    code = "import json, sys; from setup_distributed import place\n"
    code += "for environ in json.load(sys.stdin): print(place(environ))"
    environs = json.dumps([environ for environ, _ in PLACES.values()])
    folder = ROOT / "examples" / "slurm_ddp"
    done = run_program([sys.executable, "-c", code], folder, input=environs)
    assert done.returncode == 0, done.stderr
    found = dict(zip(PLACES, done.stdout.splitlines(), strict=True))
    assert found == {name: place for name, (_, place) in PLACES.items()}
