"""The copy of a run in `checkpoint.remote`: rank 0 uploads to it and resumes from it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from isles.checkpoint.load import latest_good, sound_checkpoint
from isles.config.sections.output import CheckpointConfig
from isles.dist.world import World, work_together
from isles.errors import ExitCode, TrainingError, UserError
from isles.run.bucket import RunStore, bring_asked, bring_newer, explain_bucket_errors
from isles.run.checkpoints import CheckpointInfo, list_checkpoints
from isles.run.find import typed_name
from isles.run.paths import RunDir
from isles.run.upload import Uploader
from isles.train.record import Recorder

_NO_PROGRESS_S = 180.0

Report = Callable[[str], None]


def find_checkpoint_to_load(
    config: CheckpointConfig,
    run_dir: RunDir,
    asked: Path | None,
    world: World,
    recorder: Recorder,
) -> tuple[CheckpointInfo | None, Uploader | None]:
    """The newest intact checkpoint, from this disk or from `checkpoint.remote`, on rank 0's disk.
    Also the uploader of later checkpoints, on rank 0. All ranks must call this.

    Args:
        asked: a checkpoint that the user named. Default: the newest.

    Raises:
        UserError: another machine trains the run; or the bucket does not answer and this disk has
        no checkpoint.
        TrainingError: as `latest_good` and `sound_checkpoint`.
    """
    url, kept = config.remote, list[Uploader]()
    if url is None:
        return world.main_first(lambda: _load(run_dir, asked), group=world.work), None

    def work(report: Report) -> CheckpointInfo | None:
        report(f"asking {url}")
        copy = RunStore(url, run_dir.name)
        name = typed_name(run_dir)
        kept.append(Uploader(copy, run_dir, keep=config.keep, note=recorder.note, typed=name))
        try:
            with explain_bucket_errors(copy.url):
                kept[0].take(report)
            if asked is not None:
                bring_asked(copy, run_dir, asked, report)
            else:
                _bring_newest(copy, run_dir, report, recorder.note)
        except UserError as error:
            # Hours are spent already: a bucket that is unreachable for a moment must not end the
            # run.
            is_here = list_checkpoints(run_dir) if asked is None else asked.is_dir()
            if error.id != "checkpoint.bucket" or not is_here:
                raise
            recorder.note(f"{error.what}; resuming from the checkpoints on this disk")
        report("reading it back")
        return _load(run_dir, asked)

    found = work_together(
        work if world.is_main else None,
        world,
        progress=lambda line: recorder.phase("bringing checkpoint", line),
        no_progress_s=max(_NO_PROGRESS_S, config.timeout),
        doing="fetch a checkpoint",
    )
    for uploader in kept:
        uploader.start()
    return found[0], kept[0] if kept else None


def _load(run_dir: RunDir, asked: Path | None) -> CheckpointInfo | None:
    return sound_checkpoint(asked) if asked is not None else latest_good(run_dir)


def _bring_newest(
    copy: RunStore, run_dir: RunDir, report: Report, note: Callable[[str], object]
) -> None:
    here = list_checkpoints(run_dir)
    bring_newer(copy, run_dir, report, note, than=here[-1].step if here else -1)
    if not here:
        return
    good = None
    try:
        good = latest_good(run_dir)
    except TrainingError as error:
        note(f"{error.what}; looking for one at {copy.url}")
    if good is None or good.step < here[-1].step:  # the local checkpoints are broken
        bring_newer(copy, run_dir, report, note, than=good.step if good is not None else -1)


def finish_copy(
    uploader: Uploader | None, code: ExitCode, recorder: Recorder, *, has_model: bool
) -> None:
    """Upload the remaining files and report failed uploads. Only rank 0 has an uploader."""
    if uploader is None:
        return
    if code is ExitCode.HANDOVER:
        uploader.close()
        return
    extra: tuple[str, ...] = ()
    if code is ExitCode.OK:
        extra = (*(("model",) if has_model else ()), "loss.png", "summary.json")
    left = uploader.finish(lambda line: recorder.phase("uploading", line), extra=extra)
    for line in left:
        recorder.note(line)
