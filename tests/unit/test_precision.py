"""A precision that a device lacks is refused before the start; TF32 is used only if set."""

from __future__ import annotations

import re
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from isles.config.sections.training import TrainingConfig
from isles.errors import UserError
from isles.facts.gpus import GPUS, lacking
from isles.train.products import fp32_products, keep_angles_exact, products_note
from isles.train.strategy import check_precision
from tests.each import each
from tests.small_models import small_model


def world_of(
    precision: str, ranks: list[tuple[str, tuple[int, int] | None]], own: int, monkeypatch: Any
) -> Any:
    """The world of one rank; the other ranks are only told. Without a capability: on a CPU."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: ranks[own][1])
    told = [
        (f"rank {rank} on {host} (GPU)", lacking(precision, capability))
        for rank, (host, capability) in enumerate(ranks)
    ]

    def gather(given: Any) -> list[Any]:
        assert given == told[own]
        return told

    device = torch.device("cuda", 0) if ranks[own][1] else torch.device("cpu")
    return SimpleNamespace(
        rank=own, host=ranks[own][0], device=device, device_name="GPU", gather=gather
    )


@each(0, 1, 2)
def test_the_oldest_gpu_decides_for_all_ranks(own, *, monkeypatch):
    ranks = [("desk", (12, 0)), ("tower", (7, 5)), ("laptop", (8, 9))]
    for precision in ("bf16-mixed", "bf16-true"):
        world = world_of(precision, ranks, own, monkeypatch)
        with pytest.raises(UserError, match="rank 1 on tower") as caught:
            check_precision(precision, world)
        error = caught.value
        assert error.where == "training.precision" and "fp16-mixed" in error.fix
        assert "missing on rank 1 on tower (GPU). torch" in error.what
        assert "rank 0" not in error.what and "rank 2" not in error.what


@each(
    (3, "a (GPU), rank 1 on b (GPU) and rank 2 on c (GPU)."),
    (4, "c (GPU) and rank 3 on d (GPU)."),
    (6, "c (GPU) and 3 other ranks."),
)
def test_several_devices_without_bf16_are_listed_in_a_sentence(count, end, *, monkeypatch):
    ranks = [(host, (7, 0)) for host in "abcdef"[:count]]
    world = world_of("bf16-mixed", ranks, 0, monkeypatch)
    with pytest.raises(UserError) as caught:
        check_precision("bf16-mixed", world)
    assert f"{end} torch emulates" in caught.value.what


FP8_RANKS = [
    ([("desk", (8, 9)), ("tower", (8, 6)), ("cube", None)], "use training.precision: bf16-mixed"),
    ([("desk", (9, 0)), ("tower", (8, 6)), ("cube", (7, 5))], "use training.precision: fp16-mixed"),
]


@each(*FP8_RANKS)
def test_fp8_is_refused_below_ada_and_on_a_cpu_with_a_precision_that_all_have(
    ranks, fix, *, monkeypatch
):
    for own in range(3):
        world = world_of("fp8-mixed", ranks, own, monkeypatch)
        with pytest.raises(
            UserError, match="needs fp8, which is missing on rank 1 on tower"
        ) as caught:
            check_precision("fp8-mixed", world)
        error = caught.value
        assert (error.where, error.fix, error.id) == ("training.precision", fix, "gpu.precision")
        assert "(GPU) and rank 2 on cube (GPU)." in error.what and "rank 0" not in error.what
        assert "8.9" in error.what


def test_fp8_is_refused_on_amd_for_another_reason(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4.1")
    with pytest.raises(UserError, match="was never tried on AMD GPUs, such as rank 0"):
        check_precision("fp8-mixed", _quiet_world((9, 4), monkeypatch))
    check_precision("bf16-mixed", _quiet_world((9, 4), monkeypatch))


def test_the_table_of_gpus_knows_which_have_fp8():
    sources = ("Ada", "Blackwell", "B200", "H100/H200", "L40S", "L4 ")
    for gpu in GPUS:
        mobile = "mobile workstations" in gpu.source
        expected = "Ada" in gpu.name if mobile else any(word in gpu.source for word in sources)
        assert gpu.has_fp8 == (expected or gpu.name == "L40"), gpu.name


@each("fp16-mixed", "32-true")
def test_other_precisions_train_on_any_gpu(precision, *, monkeypatch):
    check_precision(precision, _quiet_world((7, 5), monkeypatch))


def test_a_precision_trains_where_all_gpus_have_it(monkeypatch):
    check_precision("bf16-mixed", _quiet_world((8, 0), monkeypatch))
    check_precision("fp8-mixed", _quiet_world((8, 9), monkeypatch))


def _quiet_world(capability: tuple[int, int], monkeypatch: Any) -> Any:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    device = torch.device("cuda", 0)
    return SimpleNamespace(rank=0, host="a", device=device, device_name="GPU", gather=lambda x: [x])


def config_of(precision: str = "32-true", *, tf32: bool = True) -> TrainingConfig:
    return TrainingConfig(max_steps=1, precision=precision, tf32=tf32)  # type: ignore[arg-type]


@pytest.mark.parametrize("fails", [False, True])
def test_tf32_is_set_for_a_run_and_put_back(fails):
    assert torch.get_float32_matmul_precision() == "highest"
    for tf32, device, during in ((True, "cuda", "high"), (False, "cuda", "highest")):
        error = pytest.raises(ZeroDivisionError) if fails else nullcontext()
        with error, fp32_products(config_of(tf32=tf32), device):
            assert torch.get_float32_matmul_precision() == during
            assert 1 / (not fails)
        assert torch.get_float32_matmul_precision() == "highest"
    with fp32_products(config_of(), "cpu"):
        assert torch.get_float32_matmul_precision() == "highest", "a CPU has no TF32"


def test_positions_are_not_rounded_to_tf32():
    """TF32 has no odd number above 2,048."""
    model = small_model(num_hidden_layers=1)
    keep_angles_exact(model)
    seen: dict[str, str] = {}
    for name, module in model.named_modules():
        module.register_forward_pre_hook(
            lambda *_, name=name: seen.update({name: torch.get_float32_matmul_precision()})
        )
    with fp32_products(config_of(), "cuda"):
        model(input_ids=torch.zeros(1, 4, dtype=torch.int64), use_cache=False)
        assert torch.get_float32_matmul_precision() == "high", "again, after the angles"
    exact = {name for name, precision in seen.items() if precision == "highest"}
    assert exact == {"model.rotary_emb"} and len(seen) > 10


NOTES = [
    ("NVIDIA A100-SXM4-80GB", (8, 0), "32-true", False, "8.0 times.*16.0 times"),
    ("NVIDIA GeForce RTX 4090", (8, 9), "32-true", False, "; training.precision.*2.0 times"),
    ("NVIDIA X9000", (8, 9), "32-true", False, "tf32: true and .* may be several times faster"),
    ("NVIDIA A100-SXM4-80GB", (8, 0), "32-true", True, "^$"),
    ("NVIDIA A100-SXM4-80GB", (8, 0), "bf16-mixed", False, "^$"),
    ("Tesla T4", (7, 5), "32-true", False, "^$"),
    ("Tesla T4", (7, 5), "32-true", True, "has no effect on Tesla T4"),
    ("CPU", None, "32-true", False, "^$"),
    ("CPU", None, "32-true", True, "has no effect on CPU"),
]


def test_a_run_in_fp32_says_what_is_faster_on_its_gpu(monkeypatch):
    for name, capability, precision, tf32, wanted in NOTES:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        device = torch.device("cuda", 0) if capability else torch.device("cpu")
        world: Any = SimpleNamespace(device=device, device_name=name)
        note = products_note(config_of(precision, tf32=tf32), world)
        assert re.search(wanted, note), (name, precision, tf32, note)
