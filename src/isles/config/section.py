"""What every section of a run file shares: frozen, strict, no unknown keys."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, WithJsonSchema

from isles.facts.units import parse_duration_s


class Section(BaseModel):
    """A frozen section of the run file. The text below each field is its documentation."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )


def _seconds(value: object) -> object:
    if isinstance(value, str):
        return parse_duration_s(value)
    if isinstance(value, int) and not isinstance(value, bool):
        raise ValueError(f"{value} has no unit: write {value}s, {value}m or {value}h")
    return value  # a float is what a resolved file holds; anything else pydantic refuses


DurationS = Annotated[
    float,
    BeforeValidator(_seconds),
    WithJsonSchema({"type": "string", "examples": ["90s", "20m", "23h30m", "12:30:00"]}),
]
"""Seconds, written in the run file as `90s`, `20m`, `23h30m`, `2d` or `12:30:00`."""
