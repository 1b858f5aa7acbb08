"""The launcher manual."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isles.config.launcher import ManualLauncherConfig
from isles.config.load import Loaded
from isles.errors import UserError

if TYPE_CHECKING:
    from isles.launch.start import Started, StartOptions


def start_manual(
    loaded: Loaded, launcher: ManualLauncherConfig, options: StartOptions
) -> Started | str:
    """Start a run, or say what would be done."""
    raise UserError("the launcher manual is not there yet", where=str(options.path))
