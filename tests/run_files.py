"""Run files: written, loaded, and refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from isles.config.load import Loaded, load_run_file
from isles.errors import ConfigError, ConfigErrors


def load(folder: Path, text: str, *overrides: str) -> Loaded:
    """A run file of this text, with what a command line says."""
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return load_run_file(path, overrides)


def faults(folder: Path, text: str, *overrides: str) -> tuple[ConfigError, ...]:
    """All that is found wrong with it."""
    with pytest.raises((ConfigError, ConfigErrors)) as raised:
        load(folder, text, *overrides)
    return getattr(raised.value, "issues", (raised.value,))


def issues(folder: Path, text: str, *overrides: str) -> list[str]:
    """Each as `run.yaml:3 key | what | fix`."""
    found = faults(folder, text, *overrides)
    assert "Input should" not in str(found), "pydantic's own words"
    return [f"{f.where} | {f.what} | {f.fix}".replace(f"{folder}/", "") for f in found]
