"""What every section of a run file shares: frozen, strict, no unknown keys."""

from __future__ import annotations

from typing import Annotated

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    WithJsonSchema,
)

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

    def is_default(self, key: str) -> bool:
        """Whether a key has its default: a file that `isles config show` wrote names every key."""
        return bool(getattr(self, key) == type(self).model_fields[key].default)


def _seconds(value: object, info: ValidationInfo) -> object:
    is_run_file = bool(info.context and info.context.get("is_run_file"))
    if isinstance(value, str):
        if len(value) > 40:
            raise ValueError("that is no duration: write 90s, 20m, 23h30m, 2d or 12:30:00")
        try:
            return parse_duration_s(value)
        except OverflowError:
            raise ValueError(f"{value} is too long a time") from None
    if isinstance(value, int | float) and not isinstance(value, bool):
        if isinstance(value, int) or is_run_file:
            raise ValueError(f"{value} has no unit: write {value}s, {value}m or {value}h")
        return value  # seconds, as a resolved file and Python code hold them
    return value  # pydantic refuses it


def own_type(kind: str, *examples: str) -> WithJsonSchema:
    """The schema of a text of isles' own; what it may hold says `config/keys.py`, by its kind."""
    return WithJsonSchema({"type": "string", "examples": list(examples), "x-isles-type": kind})


DurationS = Annotated[
    float,
    BeforeValidator(_seconds),
    own_type("duration", "90s", "20m", "23h30m", "12:30:00"),
]
"""Seconds, written in the run file as `90s`, `20m`, `23h30m`, `2d` or `12:30:00`."""

Text = Annotated[
    str,
    Field(min_length=1, pattern=r"^[^\n\r\x00]*$", json_schema_extra={"x-isles-type": "one-line"}),
]
"""One line of text."""

Name = Annotated[str, Field(min_length=1)]
"""Text that is not empty."""
