"""Base of every section of a run file: frozen, strict, no unknown keys."""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
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
        allow_inf_nan=False,
        protected_namespaces=(),
    )

    @classmethod
    def __get_pydantic_json_schema__(cls, core: Any, handler: GetJsonSchemaHandler) -> Any:
        # Here, not by `use_attribute_docstrings`: reading all sources is a quarter of the time in
        # which this package is imported, and few commands ask for the schema.
        schema = handler(core)
        properties = handler.resolve_ref_schema(schema)["properties"]
        for key, text in _docs(cls).items():
            # A section may have said so itself.
            if handler.resolve_ref_schema(properties[key]).get("description") != text:
                properties[key].setdefault("description", text)
        return schema

    def is_default(self, key: str) -> bool:
        """True if a key has its default: a file that `isles config show` wrote names every key."""
        return bool(getattr(self, key) == type(self).model_fields[key].default)


def _docs(section: type[Section]) -> dict[str, str]:
    # The texts below the fields, of this class and of those that it is made of.
    found: dict[str, str] = {}
    for own in reversed(section.__mro__[: section.__mro__.index(Section)]):
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(own))).body
        assert isinstance(tree, ast.ClassDef)
        for field, below in zip(tree.body, tree.body[1:], strict=False):
            match field, below:
                case (
                    ast.AnnAssign(target=ast.Name(id=key)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    found[key] = inspect.cleandoc(text)
    return found


def _seconds(value: object, info: ValidationInfo) -> object:
    is_run_file = bool(info.context and info.context.get("is_run_file"))
    if isinstance(value, str):
        if len(value) > 40:
            raise ValueError("this is not a valid duration: write 90s, 20m, 23h30m, 2d or 12:30:00")
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
    """The schema of a text type of isles. `config/keys.py` describes its values, by kind."""
    return WithJsonSchema({"type": "string", "examples": list(examples), "x-isles-type": kind})


DurationS = Annotated[
    float,
    BeforeValidator(_seconds),
    own_type("duration", "90s", "20m", "23h30m", "12:30:00"),
]
"""Seconds, written in the run file as `90s`, `20m`, `23h30m`, `2d` or `12:30:00`."""

NO_CONTROL = r"\x00-\x08\x0a-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069"
"""Part of a pattern: line ends, and characters that affect a terminal or a script."""

Text = Annotated[
    str,
    Field(
        min_length=1,
        pattern=f"^[^{NO_CONTROL}]*$",
        json_schema_extra={"x-isles-type": "one-line"},
    ),
]
"""One line of text without control characters. Every text without a narrower type has this type,
because isles may write any of them into scripts, comments of scripts, and tables."""
