"""The command line of `isles train`: as people type it, and as isles shows it to them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path


def normalise_overrides(tokens: Sequence[str]) -> list[str]:
    """Write `--training.max-steps 5` as `training.max_steps=5`, the one form of an override."""
    verbs = (["train"], ["check"], ["render"], ["hub"], ["rendezvous"], ["join"])
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


def train_command(run_file: Path, overrides: Sequence[str], resume: str) -> str:
    """The command that goes on with a run, from what was typed to start it.

    Args:
        run_file: the run file.
        overrides: as `key.path=value`.
        resume: what followed `--resume`; of a checkpoint the run is taken, which has newer ones.
    """
    words = ["isles", "train", str(run_file), *overrides]
    if resume not in ("auto", "no"):
        path = Path(resume)
        is_checkpoint = path.parent.name == "checkpoints"
        words += ["--resume", str(path.parent.parent if is_checkpoint else path)]
    return shlex.join(words)
