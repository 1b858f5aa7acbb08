"""Shares by name, revising the rows, calibrating on a real small model, the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from isles.balance.cache import curve_file, keep_curve, read_curve
from isles.balance.calibrate import Probe, calibrate, rows_that_fit
from isles.balance.meter import ComputeMeter
from isles.balance.revise import choose, revise
from isles.balance.shares import rank_shares, rank_sizes
from isles.config.curve import Curve, rank_seconds
from isles.config.load import load_run_file
from isles.config.split import even_split
from isles.errors import ConfigError
from isles.models.attention import use_maskless_attention
from isles.models.build import build_probe
from isles.train.probe import WithLoss

HOSTS = ["big", "big", "small", "old"]


def even_curves(*per_row: float) -> list[Curve]:
    return [Curve((1, 2), (seconds, 2 * seconds), 8) for seconds in per_row]


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ({"big": 3.0}, [1.5, 1.5, 1.0, 1.0]),
        ({"2": 3.0}, [1.0, 1.0, 3.0, 1.0]),
        ({"big": 3.0, "1": 0.5}, [3.0, 0.5, 1.0, 1.0]),
        ({"big": 4.0, "old": 0.0}, [2.0, 2.0, 1.0, 0.0]),
    ],
)
def test_shares(shares: dict[str, float], expected: list[float]) -> None:
    assert rank_shares(shares, HOSTS, may_miss=False) == expected


def test_unknown_names_are_refused_unless_hosts_come_and_go() -> None:
    with pytest.raises(ConfigError, match="bgi: no such host or rank") as caught:
        rank_shares({"bgi": 1.0}, HOSTS, may_miss=False)
    assert caught.value.where == "balance.bgi"
    assert "big, small, old; ranks: 0 to 3" in caught.value.fix
    assert rank_shares({"bgi": 2.0}, HOSTS, may_miss=True) == [1.0] * 4
    with pytest.raises(ConfigError, match="every rank has share 0"):
        rank_shares({str(rank): 0.0 for rank in range(4)}, HOSTS, may_miss=False)
    with pytest.raises(ConfigError, match="1: no such host in this run"):
        rank_sizes({"1": 4}, HOSTS, may_miss=False)
    assert rank_sizes({"big": 4}, HOSTS, may_miss=False) == [4, 4, None, None]


def test_equal_ranks_get_the_even_split() -> None:
    assert choose(even_curves(1.0, 1.05), 12, 6, in_step=False) == even_split(
        12, 2, 6, in_step=False
    )


def test_rows_are_dealt_anew_only_where_it_pays() -> None:
    curves = even_curves(1.0, 1.0, 1.0)
    split = even_split(66, 3, 8, in_step=False)
    as_expected = [rank_seconds(split, rank, curve) / 3 for rank, curve in enumerate(curves)]
    assert revise(split, curves, as_expected, 2) is None
    nearly = [seconds * factor for seconds, factor in zip(as_expected, (1, 1.08, 1), strict=True)]
    assert revise(split, curves, nearly, 2) is None
    slow = [seconds * factor for seconds, factor in zip(as_expected, (1, 1, 3), strict=True)]
    found = revise(split, curves, slow, 2)
    assert found is not None
    assert found.split.rows == (29, 28, 9)
    assert found.gain == pytest.approx(66 / 29)
    assert "data-parallel rank 2 is 3.00 times slower" in found.reason
    again = [rank_seconds(found.split, rank, curve) / 3 for rank, curve in enumerate(found.curves)]
    assert revise(found.split, found.curves, again, 2) is None, "it does not flap"


def test_a_rank_that_recovers_gets_its_rows_back() -> None:
    curves = even_curves(1.0, 3.0)
    split = choose(curves, 48, 8, in_step=True)
    assert split.rows == (36, 12)
    recovered = [rank_seconds(split, 0, curves[0]), rank_seconds(split, 1, curves[1]) / 3]
    found = revise(split, curves, recovered, 8)
    assert found is not None
    assert found.split.rows == (24, 24)


def test_a_model_is_measured_and_nothing_else_changes(run_file: Path) -> None:
    config = load_run_file(run_file).config
    made = []

    def make(layers: int) -> nn.Module:
        made.append(layers)
        model = build_probe(
            config.model,
            num_layers=layers,
            device=torch.device("cpu"),
            dtype=torch.float32,
            vocab_size=300,
        )
        return WithLoss(model, config)

    probe = Probe(make, 24, 300, 32, None, torch.device("cpu"), 1.0)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    curve = calibrate(probe, [1, 2, 4], free_bytes=None)
    assert torch.equal(torch.rand(3), expected), "the random state is as it was"
    assert made == [1, 2]
    assert curve.sizes == (1, 2, 4)
    assert curve.limit == 4


@pytest.mark.parametrize("isolates", ["false", "true"])
def test_what_is_measured_keeps_documents_apart_where_the_run_will(
    run_file: Path, isolates: str
) -> None:
    """A mask over all rows is memory that a micro-batch must have room for."""
    config = load_run_file(
        run_file, ["data.packing=true", f"data.isolate_documents={isolates}"]
    ).config
    model: Any = build_probe(
        config.model, num_layers=1, device=torch.device("cpu"), dtype=torch.float32, vocab_size=300
    )
    assert use_maskless_attention(model)
    seen: list[Any] = []
    model.register_forward_pre_hook(lambda _, args, given: seen.append(given), with_kwargs=True)
    WithLoss(model, config)(torch.zeros((2, 8), dtype=torch.int64))
    mask = seen[-1].get("attention_mask")
    if isolates == "false":
        assert mask is None
    else:
        assert mask.shape == (2, 1, 8, 8)
        assert not mask[0, 0, 7, 0], "two documents"


def test_rows_that_fit() -> None:
    used = {1: 20.0, 2: 30.0, 4: 50.0}
    assert rows_that_fit(used, 95.0, 100) == 8
    assert rows_that_fit(used, 95.0, 6) == 6
    assert rows_that_fit(used, 5.0, 100) == 0
    assert rows_that_fit({1: 20.0}, 10.0, 100) == 0


def test_the_cache_gives_back_what_was_kept(tmp_path: Path) -> None:
    file = curve_file(tmp_path, {"device": "x", "model": "y"})
    assert read_curve(file) is None
    curve = Curve((1, 8), (0.25, 1.0), 12)
    keep_curve(file, curve)
    assert read_curve(file) == curve
    assert curve_file(tmp_path, {"device": "x", "model": "z"}) != file
    file.write_text('{"sizes": []}')
    assert read_curve(file) is None


def test_the_meter_counts_training_and_not_evaluation() -> None:
    blocks = [nn.Linear(64, 64) for _ in range(3)]
    meter = ComputeMeter(list(blocks), torch.device("cpu"))
    for _ in range(4):
        for block in blocks:
            block(torch.ones(64, 64))
        meter.step_done()
    assert (meter.take() or 0) > 0
    assert meter.take() is None
    for block in blocks:
        block.eval()(torch.ones(64, 64))
    meter.step_done()
    assert meter.take() == 0.0
