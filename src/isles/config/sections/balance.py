"""The key `balance`: how many rows each rank takes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

Share = Annotated[float, Field(ge=0, le=10**6)]

BalanceConfig = Literal["auto", "even"] | Annotated[dict[str, Share], Field(min_length=1)]
"""auto, even, or the share of each host (divided over its ranks) or rank number; a host or rank
that is not named has share 1."""
