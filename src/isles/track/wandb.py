"""Weights & Biases tracker, online or offline, with its files in RUN/wandb."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from isles.config.sections.output import WandbConfig
from isles.errors import UserError
from isles.run.records import read_record
from isles.track.base import Row, RunFacts, keep_id, numbers

WandbMode = Literal["online", "offline", "disabled"]

_INIT_S = 25.0
_FINISH_S = 25.0
_FLUSH_S = 0.5
"""wandb flushes its file every 15 s; a killed rank would lose the rows since the last flush."""
_DEFAULT_PROJECT = "isles"


class WandbTracker:
    """One run on Weights & Biases. A restarted run continues under the same id.

    The step axis is the inner step. wandb accepts only increasing steps, so when a restart repeats
    steps, wandb keeps the earlier numbers.

    Args:
        run: facts about the run, shown next to the curves.
        mode: online, offline or disabled; see `resolve_mode`.
    """

    def __init__(self, config: WandbConfig, run: RunFacts, *, mode: WandbMode) -> None:
        import wandb

        if wandb.run is not None:  # left by a failed attempt to open it
            wandb.teardown()
        run_id = (read_record(run.record) or {}).get("id")
        if run_id is None:
            run_id = secrets.token_hex(5)
            keep_id(run, id=run_id)  # before init: an attempt killed here must not fork the curve
        self._run = wandb.init(
            dir=run.folder,
            project=config.project or wandb.setup().settings.project or _DEFAULT_PROJECT,
            entity=config.entity,
            group=config.group,
            tags=config.tags or None,
            name=run.name,
            id=run_id,
            resume="allow",  # needed by `wandb sync` too, which joins files with one id
            config={**run.config, "isles": run.about},
            allow_val_change=True,
            settings=wandb.Settings(
                mode=mode,
                silent=True,
                console="off",
                disable_code=True,
                disable_git=True,  # a remote's address may hold credentials
                disable_job_creation=True,
                x_disable_stats=True,
                x_transaction_log_flush_interval=_FLUSH_S,
                init_timeout=_INIT_S,
                finish_timeout=_FINISH_S,
                finish_timeout_raises=True,
            ),
        )

    def log(self, rows: Sequence[Row]) -> None:
        """Pass rows to wandb's own process, which merges rows of the same step."""
        for row in rows:
            values = {f"{row['kind']}/{name}": value for name, value in numbers(row)}
            self._run.log({**values, "_timestamp": row["at"]}, step=row["step"])

    def close(self, summary: dict[str, Any] | None) -> None:
        """Send the final figures; wait at most 25 s until wandb has sent everything."""
        import wandb

        if summary is not None:
            self._run.summary.update({f"final/{name}": value for name, value in summary.items()})
        self._run.finish(exit_code=0)
        wandb.teardown()  # ends wandb's own process


def resolve_mode(config: WandbConfig, folder: Path) -> tuple[WandbMode, str]:
    """The mode in which wandb will run, and a line for the user if it differs from the config.

    Imports wandb; needs no network and never prompts. Call this before `WandbTracker`.

    Args:
        config: the tracker's section.
        folder: the run directory.

    Raises:
        UserError: mode is online and there is no API key.
    """
    # wandb reads these on import or when its process starts; the user's own values win.
    os.environ.setdefault("WANDB_CACHE_DIR", str(folder / "wandb" / "cache"))
    os.environ.setdefault("WANDB_DATA_DIR", str(folder / "wandb" / "data"))
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    os.environ.setdefault("WANDB_SILENT", "true")
    import wandb

    wanted = config.mode or wandb.setup().settings.mode
    if wanted in ("offline", "dryrun"):
        return "offline", ""
    if wanted == "disabled":
        return "disabled", ""
    if wandb.login(prompt=False, verify=False):
        return "online", ""
    how = "run `wandb login`, or set WANDB_API_KEY"
    if config.mode == "online":
        raise UserError(
            "wandb has no API key, and mode is online",
            where="track: {kind: wandb, mode: online}",
            fix=f"{how}, or set mode to offline and run `wandb sync` later",
            id="track.account",
        )
    return "offline", (
        f"wandb has no API key, so it records offline in {folder / 'wandb'}. To upload, {how}, and "
        f"then run `wandb sync {folder / 'wandb'}/offline-run-*`"
    )
