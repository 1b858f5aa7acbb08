"""Weights & Biases, online or offline, with its files in RUN/wandb."""

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
"""wandb writes its file every 15 s; a rank that is killed would lose what came after."""
_DEFAULT_PROJECT = "isles"


class WandbTracker:
    """One run at Weights & Biases, which goes on under the same id after a restart.

    Its step axis is the inner step. wandb takes steps forward only: of steps that a restart does
    again it keeps the numbers that it has.

    Args:
        run: what is shown besides the curves.
        mode: online, offline or disabled; see `resolve_mode`.
    """

    def __init__(self, config: WandbConfig, run: RunFacts, *, mode: WandbMode) -> None:
        import wandb

        if wandb.run is not None:  # of a try that has failed
            wandb.teardown()
        run_id = (read_record(run.record) or {}).get("id")
        if run_id is None:
            run_id = secrets.token_hex(5)
            keep_id(run, id=run_id)  # first: a start that is killed here must not fork the curve
        self._run = wandb.init(
            dir=run.folder,
            project=config.project or wandb.setup().settings.project or _DEFAULT_PROJECT,
            entity=config.entity,
            group=config.group,
            tags=config.tags or None,
            name=run.name,
            id=run_id,
            resume="allow",  # also for `wandb sync`, which joins files of one id
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
        """Hand rows to wandb's own process, which joins those of one step."""
        for row in rows:
            values = {f"{row['kind']}/{name}": value for name, value in numbers(row)}
            self._run.log({**values, "_timestamp": row["at"]}, step=row["step"])

    def close(self, summary: dict[str, Any] | None) -> None:
        """Send the final figures; wait until wandb has everything, 25 s at most."""
        import wandb

        if summary is not None:
            self._run.summary.update({f"final/{name}": value for name, value in summary.items()})
        self._run.finish(exit_code=0)
        wandb.teardown()  # ends wandb's own process


def resolve_mode(config: WandbConfig, folder: Path) -> tuple[WandbMode, str]:
    """How wandb will work, and a line for the user if that was not asked for.

    Imports wandb, asks nobody anything, and needs no network. To be called before `WandbTracker`.

    Args:
        folder: the run directory.

    Raises:
        UserError: mode is online, and there is no key.
    """
    # wandb reads these as it is imported or starts its process; a user's own values win.
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
            fix=f"{how}; or use mode: offline, and `wandb sync` later",
            id="track.account",
        )
    return "offline", (
        f"wandb has no API key: it records offline in {folder / 'wandb'}; {how}, and then "
        f"`wandb sync {folder / 'wandb'}/offline-run-*` sends it"
    )
