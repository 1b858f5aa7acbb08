"""Files of a checkpoint: who may read them, and how much work their index makes."""

from __future__ import annotations

import json
import logging
import math
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from isles.checkpoint import staging
from isles.checkpoint.load import rng_file, save_readable
from isles.checkpoint.staging import Buffers
from isles.cli import main
from isles.errors import ExitCode
from isles.run.index import Index, IndexFault, index_from
from isles.run.limits import MainMemory
from isles.run.manifest import MANIFEST
from isles.run.records import write_record
from tests.old_checkpoints import hash_files
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


def trained() -> dict[str, torch.Tensor]:
    """Tensors of each kind that a state may have."""
    return {
        "weight": torch.randn(33, 5).t(),  # not contiguous
        "half": torch.randn(7).bfloat16(),
        "step": torch.tensor(4.0),
        "mask": torch.tensor([True, False, True]),
        "count": torch.tensor([1, 2, 3]),
        "none": torch.empty(0, 4),
    }


def test_a_save_copies_into_the_memory_of_the_save_before() -> None:
    buffers, state = Buffers(torch.device("cpu"), 1), trained()
    first = buffers.copy(state)
    assert list(first) == list(state)
    before = {name: value.clone() for name, value in state.items()}
    places = {name: value.data_ptr() for name, value in first.items()}
    state["weight"].zero_()
    for name, value in first.items():
        assert value.is_contiguous() and value.dtype == before[name].dtype
        assert torch.equal(value, before[name]), name
    state["weight"].fill_(2.0)
    second = buffers.copy(state)
    assert {name: value.data_ptr() for name, value in second.items()} == places
    assert float(second["weight"].sum()) == 330.0
    more = buffers.copy(state | {"moment": torch.ones(10_000)})
    assert float(more["moment"].sum()) == 10_000.0 and torch.equal(more["half"], state["half"])


@pytest.mark.parametrize("available", [300, 10**9])
def test_memory_that_the_data_needs_is_not_kept(available: int, monkeypatch, caplog) -> None:
    monkeypatch.setattr(staging, "memory", lambda: MainMemory(10**10, available))
    caplog.set_level(logging.INFO)
    buffers, state = Buffers(torch.device("cpu"), 2), {"weight": torch.ones(100)}
    copies = [buffers.copy(state)["weight"] for _ in range(2)]
    is_kept = copies[0].data_ptr() == copies[1].data_ptr()
    assert is_kept == (available > 300)
    assert len(caplog.records) == (not is_kept), "said once"


@pytest.mark.parametrize("error", [0, 2])
def test_memory_is_pinned_once_where_the_driver_allows_it(error: int, monkeypatch, caplog) -> None:
    calls = list[tuple[str, Any]]()
    names = {"cudaHostRegister": error, "cudaHostUnregister": 0}

    def answer(name: str, code: int) -> Any:
        return lambda *given: calls.append((name, *given)) or code

    runtime = SimpleNamespace(**{name: answer(name, code) for name, code in names.items()})
    stream = SimpleNamespace(synchronize=lambda: calls.append(("synchronize",)))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    monkeypatch.setattr(torch, "ones", lambda *_, **__: None)
    buffers, state = Buffers(torch.device("cuda"), 1), trained()
    place = buffers.copy(state)["weight"].data_ptr()
    assert buffers.copy(state)["weight"].data_ptr() == place
    buffers.close()
    unpins = [("cudaHostUnregister", place)] if not error else []
    assert [name for name, *_ in calls[:3]] == ["cudaHostRegister", *["synchronize"] * 2]
    assert calls[0][1] == place and calls[3:] == unpins


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
