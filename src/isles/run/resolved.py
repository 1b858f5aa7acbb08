"""Read resolved.yaml of a run, to show the run or to use its checkpoints."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any, Literal, get_args, get_origin

from isles.config.resolve import Resolved, load_resolved
from isles.config.sections.base import Section
from isles.config.sections.run import RunConfig
from isles.errors import ConfigError
from isles.facts.models import shape_names
from isles.run.owner import not_own, read_text
from isles.run.paths import RunDir

_TEXTS = frozenset(
    (
        *("name", "clusters.name", "training.script"),
        *("adapter.target_modules", "adapter.modules_to_save"),
    )
)
"""Texts to keep from another user's run: isles shows them, or they name a part of the model."""

_SWITCHES = frozenset(("model.trust_remote_code",))
"""Switches with side effects."""


def read_resolved(run_dir: RunDir) -> Resolved:
    """Read `resolved.yaml`. From another user's file, keep only the values that describe the run.

    These are its numbers, its switches and its choices from a fixed list. A text may name a file of
    the viewer, a repository, an address or a program. So isles replaces a text by its default, or
    by an empty text if it has no default (`model.name_or_path`). See `needs_own`.

    Raises:
        OSError: it is not readable.
        ConfigError: another version of isles wrote it, or it is not a resolved.yaml.
    """
    try:
        text, owner = read_text(run_dir.resolved)
    except ValueError as error:
        raise ConfigError(
            f"this file is not a valid resolved.yaml: {error}",
            where=f"{run_dir.resolved}:1",
            fix="restore the file that isles wrote, or start a new run",
        ) from error
    resolved = load_resolved(text)
    if not owner:
        return resolved
    return replace(resolved, config=_described(resolved.config), owner=owner)


def needs_own(resolved: Resolved, run_dir: RunDir, what: str) -> None:
    """Refuse an act that would use a name from another user's run.

    Args:
        what: the act, as a verb after "isles does not".

    Raises:
        PreflightError: the run belongs to another user.
    """
    if resolved.owner:
        raise not_own(what, resolved.owner, run_dir.resolved)


def _described(config: RunConfig) -> RunConfig:
    kept: RunConfig = _without_texts(config, "")
    name = config.model.name_or_path
    if name in shape_names():  # isles ships it, and it has no weights
        model = kept.model.model_copy(update={"name_or_path": name, "init": "scratch"})
        kept = kept.model_copy(update={"model": model})
    return kept


def _without_texts(section: Any, prefix: str) -> Any:
    update: dict[str, Any] = {}
    for name, field in type(section).model_fields.items():
        key, value = f"{prefix}{name}", getattr(section, name)
        if key in _SWITCHES:
            update[name] = False
        elif key not in _TEXTS and not _is_kept(value, choices := {*_choices(field.annotation)}):
            if isinstance(value, Section):
                update[name] = _without_texts(value, f"{key}.")
            elif isinstance(value, tuple):
                update[name] = tuple(
                    _without_texts(part, f"{key}.") if isinstance(part, Section) else part
                    for part in value
                    if isinstance(part, Section) or _is_kept(part, choices)
                )
            elif field.is_required():
                update[name] = type(value)()
            else:
                update[name] = field.get_default(call_default_factory=True)
    return section.model_copy(update=update)


def _is_kept(value: object, choices: Collection[object]) -> bool:
    is_choice = isinstance(value, str) and value in choices
    return value is None or isinstance(value, int | float) or is_choice


def _choices(annotation: Any) -> Iterator[object]:
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
    else:
        for part in get_args(annotation):
            yield from _choices(part)
