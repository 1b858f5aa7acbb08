"""Overrides as people type them on a command line."""

from __future__ import annotations

from collections.abc import Sequence


def normalise_overrides(tokens: Sequence[str]) -> list[str]:
    """Write `--training.max-steps 5` as `training.max_steps=5`, the one form of an override."""
    verbs = (["train"], ["check"], ["render"], ["rendezvous"], ["join"])
    if list(tokens[:1]) not in verbs and list(tokens[:2]) != ["config", "show"]:
        return list(tokens)
    result: list[str] = []
    rest = list(tokens)
    while rest:
        token = rest.pop(0)
        if token == "--":
            return [*result, token, *rest]
        flag, has_value, value = token.partition("=")
        if not flag.startswith("--") or "." not in flag:
            result.append(token)
            continue
        if not has_value:
            # A flag without a value switches something on.
            value = rest.pop(0) if rest and not rest[0].startswith("--") else "true"
        result.append(f"{flag[2:].replace('-', '_')}={value}")
    return result
