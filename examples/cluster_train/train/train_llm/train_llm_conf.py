"""The configuration of train_phase2.py: every key, and how a file of them is read."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from isles.config.yaml import parse_yaml
from isles.errors import UserError


class Phase2Config(BaseModel):
    """What train_phase2.py trains; keys that it does not know are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    samples: int = Field(default=512, ge=1)
    """Made-up pairs of an image and a text."""
    epochs: int = Field(default=3, ge=1)
    """Times that all pairs are seen."""
    batch_size: int = Field(default=8, ge=1)
    """Pairs of each process in one forward pass."""
    gradient_accumulation: int = Field(default=1, ge=1)
    """Forward passes for each step of the optimizer."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass instead of keeping them."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """auto: bf16 where the GPU has it, else fp32."""
    learning_rate: float = Field(default=2e-3, gt=0)
    """Of AdamW."""
    trainer: Literal["auto", "torch", "lightning"] = "auto"
    """auto: lightning where it is installed, else torch."""
    checkpoint_every: int = Field(default=1, ge=1)
    """Epochs between two checkpoints."""
    output_dir: str = Field(default="outputs/phase2", min_length=1)
    """Folder of the checkpoint and of the finished model."""


def load_config(path: str | Path) -> Phase2Config:
    """Read a configuration.

    Raises:
        ValueError: all that is wrong with it, in one line.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        return Phase2Config.model_validate(parse_yaml(text, str(path)).value or {})
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from None
    except UserError as error:
        raise ValueError(" ".join(str(error).split())) from None
    except ValidationError as error:
        issues = (f"{issue['loc'][0]}: {issue['msg'].lower()}" for issue in error.errors())
        raise ValueError("; ".join(issues)) from None
