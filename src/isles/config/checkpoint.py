"""The section `checkpoint`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from isles.config.section import DurationS, Section


class CheckpointConfig(Section):
    """When to save, and how many to keep."""

    every_steps: Annotated[int, Field(ge=1)] | None = 200
    """Save every so many steps. null: only by time, on a stop and at the end."""

    every_minutes: Annotated[float, Field(gt=0)] | None = 20.0
    """Save when this many minutes have passed since the last save. null: never by time."""

    keep: Annotated[int, Field(ge=1)] = 3
    """Newest checkpoints that are kept; an older one goes only when a newer one is verified."""

    async_save: bool = True
    """Write in the background while training goes on."""

    export_on_finish: bool = True
    """At the end, write RUN/model: a Hugging Face folder that from_pretrained loads."""

    merge_adapter: bool = False
    """Export a whole model with the adapter merged into it. false: the adapter alone."""

    push_to_hub: Annotated[str, Field(pattern=r"^[\w.-]+/[\w.-]+$")] | None = None
    """Upload the export to this private repository of the Hugging Face hub, owner/name."""

    timeout: DurationS = 1800.0
    """Longest wait for one checkpoint to be written, before the run stops with an error."""
