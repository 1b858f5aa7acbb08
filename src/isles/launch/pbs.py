"""The launcher pbs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isles.config.launcher import PbsLauncherConfig
from isles.config.load import Loaded
from isles.errors import UserError

if TYPE_CHECKING:
    from isles.launch.start import Started, StartOptions


def start_pbs(loaded: Loaded, launcher: PbsLauncherConfig, options: StartOptions) -> Started | str:
    """Start a run, or say what would be done."""
    raise UserError("the launcher pbs is not there yet", where=str(options.path))
