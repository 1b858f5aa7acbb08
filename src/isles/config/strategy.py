"""The section `strategy`: how a cluster holds the model."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from isles.config.section import Section


class AutoStrategy(Section):
    """isles chooses."""

    kind: Literal["auto"] = "auto"
    """Let isles choose; at present that is ddp."""


class DDPStrategyConfig(Section):
    """Every rank holds the whole model; gradients are averaged (DistributedDataParallel)."""

    kind: Literal["ddp"] = "ddp"
    """The whole model on every rank."""


StrategyConfig = Annotated[AutoStrategy | DDPStrategyConfig, Field(discriminator="kind")]
