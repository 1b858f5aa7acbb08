"""Run files to start from."""

from __future__ import annotations

import difflib
from importlib import resources

from isles.errors import ConfigError

TEMPLATES: dict[str, str] = {
    "quickstart": "a tiny model from scratch on the Python documentation, on any machine",
    "pretrain": "a model of 150 million parameters from scratch on your own text",
    "finetune": "all weights of a Hugging Face model on your own text",
    "chat": "all weights of a model on conversations",
    "lora": "an adapter beside a frozen model, on conversations",
    "qlora": "the same with the frozen model in 4 bits, for small GPUs",
    "dpo": "an adapter on preferences: a chosen and a rejected answer to each prompt",
}
"""What `template` takes, and what each is for."""


def template(kind: str) -> str:
    """A commented run file that loads as it is.

    Raises:
        ConfigError: there is no template of this name.
    """
    if kind not in TEMPLATES:
        near = difflib.get_close_matches(kind, TEMPLATES, n=1)
        raise ConfigError(
            f'there is no template "{kind}"',
            where="command line",
            fix=f"{f'did you mean {near[0]}? ' if near else ''}use one of: {', '.join(TEMPLATES)}",
        )
    entry = resources.files("isles.config") / "templates" / f"{kind}.yaml"
    return entry.read_text(encoding="utf-8")
