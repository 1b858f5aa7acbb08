"""What a rendezvous is told: when a turn is closed, and its limits."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Settings(BaseModel):
    """The rules of one run; the same for all clusters."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    wait: Literal["all", "time_boxed", "quorum"] = "all"
    """all: every living cluster. time_boxed: `time_box_s` after the first contribution without
    the missing. quorum: `grace_s` after the `quorum`-th contribution."""
    min_clusters: Annotated[int, Field(ge=1)] = 1
    """A turn has at least so many contributions."""
    gather: Annotated[int, Field(ge=1)] = 1
    """So many clusters begin together: before that, no turn is decided for `gather_s` after the
    first has come, nor again after a restart."""
    gather_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 60.0
    max_clusters: Annotated[int, Field(ge=1, le=4096)] = 64
    time_box_s: Seconds = 120.0
    quorum: Annotated[int, Field(ge=1)] = 2
    grace_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 30.0
    dead_after_s: Seconds = 10.0
    """A cluster not heard for so long is dropped."""
    stalled_after_s: Seconds = 900.0
    """A turn no longer waits for a cluster that lives, but has done no inner step for so long."""
    outlier: Annotated[float, Field(gt=1, allow_inf_nan=False)] = 10.0
    """A contribution is refused whose norm is so many times the median of those before it."""
    keep_averages: Annotated[int, Field(ge=1)] = 8
    """So many averages stay on the disk for clusters that missed them."""
    open_turns: Annotated[int, Field(ge=1)] = 8
    """Contributions are taken for so many turns from the next one to be committed on."""
    donor_s: Seconds = 60.0
    """Another donor is asked where one has sent nothing of its state for so long."""
