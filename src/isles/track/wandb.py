"""Weights & Biases, online or offline, with its files in RUN/wandb."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from isles.config.sections.output import WandbConfig
from isles.errors import UserError
from isles.track.base import RunFacts
from isles.track.sent import Sent
from isles.track.wandb_log import last_step

log = logging.getLogger(__name__)

WandbMode = Literal["online", "offline", "disabled"]

_INIT_S = 25.0
_FINISH_S = 25.0
_FLUSH_S = 0.5
"""wandb writes its file every 15 s; a rank that is killed would lose what came after."""
_DEFAULT_PROJECT = "isles"


class WandbTracker:
    """One run at Weights & Biases, which goes on under the same id after a restart.

    Its step axis is the inner step. wandb takes a step once and forward only, so the rows of one
    step are sent together, when the next recorded step comes or at the end.

    Args:
        config: project, entity, group, tags, mode.
        run: what is shown besides the curves.
        sent: this tracker's record.
        mode: online, offline or disabled; see `settle_mode`.
    """

    def __init__(self, config: WandbConfig, run: RunFacts, sent: Sent, *, mode: WandbMode) -> None:
        import wandb

        self._sent = sent
        self._rows: list[dict[str, Any]] = []
        if wandb.run is not None:  # of a try that has failed
            wandb.teardown()
        run_id = sent.get("id")
        if run_id is None:
            run_id = secrets.token_hex(5)
            sent.keep(id=run_id)  # first: a start that is killed here must not fork the curve
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
        if mode == "disabled":
            return
        if mode == "online":
            sent.keep(url=str(self._run.url))
            last = self._run.step - 1  # the server's; a kill loses what was on its way
        else:
            last = _known_offline(run.folder / "wandb", run_id, sent)
            # As it is now: the file of this start is empty, and earlier ones may be deleted.
            sent.keep(file=str(self._run.settings.sync_file))
        sent.known_to(train=last, eval=last)

    def log(self, rows: Sequence[dict[str, Any]]) -> None:
        """Hand rows to wandb's own process, step by step."""
        for row in rows:
            if self._rows and self._rows[0]["step"] != row["step"]:
                self._commit()
            if not self._sent.has(row):
                self._rows.append(row)

    def close(self, summary: dict[str, Any] | None) -> None:
        """Send the last step and the final figures; wait until wandb has them, 25 s at most."""
        import wandb

        self._commit()
        if summary is not None:
            self._run.summary.update({f"final/{name}": value for name, value in summary.items()})
        self._run.finish(exit_code=0)
        wandb.teardown()  # ends wandb's own process

    def _commit(self) -> None:
        if not self._rows:
            return
        values = {
            f"{row['kind']}/{name}": value
            for row in self._rows
            for name, value in row.items()
            if name not in ("kind", "step", "at") and isinstance(value, int | float)
        }
        values["_timestamp"] = self._rows[-1]["at"]
        self._run.log(values, step=self._rows[0]["step"], commit=True)
        self._sent.add(*self._rows)
        self._rows = []


def _known_offline(folder: Path, run_id: str, sent: Sent) -> int:
    """The last step that is safe in wandb's files.

    A kill loses what wandb's own process had not written yet. Where the file is gone, because it
    was sent and cleaned away, our own record stands.
    """
    file = sent.get("file")
    if file is None or not Path(file).exists():
        return sent.last_step
    try:
        return max(last_step(folder, run_id), sent.known)
    except (OSError, ValueError, ImportError) as error:  # files of another version of wandb
        log.info("the files of wandb cannot be read back: %s", error)
        return sent.last_step


def settle_mode(config: WandbConfig, folder: Path) -> tuple[WandbMode, str]:
    """How wandb will work, and a line for the user if that was not asked for.

    Imports wandb, asks nobody anything, and needs no network. To be called before `WandbTracker`.

    Args:
        config: the tracker's section.
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
