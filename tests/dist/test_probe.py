"""The scores of a probe, by which each export is compared with the run, under every strategy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from isles.checkpoint.reread import difference, probe_tokens, scores
from isles.config.layout import Strategy
from isles.config.sections.strategy import (
    DDPStrategyConfig,
    DeepSpeedStrategyConfig,
    FSDPStrategyConfig,
)
from isles.dist.world import join_world, leave_world
from isles.models.build import build_model
from isles.run.env import RankEnv
from isles.train.metrics import score_probe
from isles.train.strategy import resolve_mesh
from tests.engines import engine_of, fake_run
from tests.ranks import run_ranks

PLAIN: dict[str, Strategy] = {
    "ddp": DDPStrategyConfig(),
    "fsdp": FSDPStrategyConfig(),
    "tp": DDPStrategyConfig(tp_size=2),
    "pp": FSDPStrategyConfig(pp_size=2),
}
DEEPSPEED: dict[str, Strategy] = {"zero3": DeepSpeedStrategyConfig(zero_stage=3)}


def scored(env: RankEnv, model: Path, strategies: dict[str, Strategy]) -> dict[str, list[float]]:
    """What each strategy gives on this rank."""
    world = join_world(env, device="cpu", timeout_s=60)
    found = {}
    for name, strategy in strategies.items():
        engine = engine_of(fake_run(model, precision="32-true"), strategy, world)
        size = json.loads((model / "config.json").read_text())["vocab_size"]
        values = score_probe(engine, resolve_mesh(strategy, world), world, size)
        assert values is not None
        assert engine.model.training, "it trains on"
        found[name] = values
    leave_world()
    return found


@pytest.mark.parametrize("strategies", [PLAIN, DEEPSPEED], ids=["plain", "deepspeed"])
def test_every_strategy_scores_the_probe_as_a_loaded_model_does(tiny_model, strategies):
    config = fake_run(tiny_model).model
    options = {"device": torch.device("cpu"), "dtype": torch.float32, "vocab_size": None}
    wanted = scores(build_model(config, seed=0, **options).eval())
    every = run_ranks(scored, 2, tiny_model, strategies)
    for name, rank in ((n, r) for r in every for n in strategies):
        assert difference(torch.tensor(rank[name]), wanted) < 1e-4, name


def test_the_difference_of_scores_is_a_share_of_their_spread():
    wanted = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert difference(wanted, wanted) == 0.0
    assert difference(wanted + 0.1, wanted) == pytest.approx(0.1 / float(wanted.std()))
    level = torch.full((8,), -60.0)
    assert difference(level + 1e-4, level) < 5e-3, "a model that was never trained"
    assert torch.equal(probe_tokens(50), probe_tokens(50))
