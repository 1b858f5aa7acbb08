"""Files of a checkpoint: who may read them, and how much work their index makes."""

from __future__ import annotations

import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from isles.checkpoint.load import rng_file, save_readable
from isles.cli import main
from isles.errors import ExitCode
from isles.run.checkpoints import hash_files
from isles.run.index import Index, IndexFault, index_from
from isles.run.manifest import MANIFEST
from isles.run.records import write_record
from tests.runs import bare_run


def peeled(edge: int) -> dict[str, Any]:
    """A cube that is cut into slabs, whose edges make a grid of far more cells."""
    low, high, pieces = [0, 0, 0], [edge, edge, edge], []
    while high[0] > low[0]:
        for dim in range(3):
            sizes = [h - at for at, h in zip(low, high, strict=True)]
            sizes[dim] = 1
            length = math.prod(sizes)
            place = {"file": "t.bin", "start": 0, "length": length}
            pieces += [{"offsets": list(low), "sizes": sizes, **place}] if length else []
            low[dim] += 1
    return {"dtype": "int8", "shape": [edge, edge, edge], "pieces": pieces}


def test_all_tensors_of_an_index_share_one_limit_of_work():
    sizes = {"t.bin": 1 << 20}

    def read(edges: list[int]) -> Index:
        tensors = {f"t{n}": peeled(edge) for n, edge in enumerate(edges)}
        data = json.dumps({"format": 1, "tensors": tensors}).encode()
        return index_from(data, sizes, is_old=False)

    assert len(read([40] * 50).tensors) == 50, "one layout is checked once"
    with pytest.raises(IndexFault, match="do not form grids"):
        read(list(range(36, 46)))


def test_any_file_of_a_checkpoint_and_of_an_export_has_the_permissions_of_its_neighbors(
    tmp_path: Path,
):
    (tmp_path / "other").write_text("")
    save_readable({"cpu": torch.zeros(2)}, rng_file(tmp_path, 0))
    assert rng_file(tmp_path, 0).stat().st_mode == (tmp_path / "other").stat().st_mode


def test_a_checkpoint_that_may_not_be_read_is_not_called_broken(capsys):
    user = os.geteuid()
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:  # not closed, as /tmp of tests is
        run = Path(name, "x-1")
        folder = bare_run(run).checkpoints / "step-00000004"
        folder.mkdir(parents=True)
        (folder / "tensors-00000.bin").write_bytes(b"1")
        manifest = {"version": 2, "step": 4, "files": hash_files(folder)}
        write_record(folder / MANIFEST, manifest)
        Path(name).chmod(0o755)
        (folder / "tensors-00000.bin").chmod(0)
        try:
            if user == 0:
                os.seteuid(5)  # root may read every file
            code = main(["checkpoint", "verify", str(run)])
        finally:
            os.seteuid(user)
    said = capsys.readouterr()
    assert code == ExitCode.TRAINING and "NOT whole" not in said.out, said
    assert "no permission to read tensors-00000.bin" in said.out and "chmod -R a+rX" in said.out
