"""`isles train` with a run file of several clusters: looks, starts, follows."""

from __future__ import annotations

from isles.config.load import Loaded
from isles.errors import ExitCode
from isles.launch.base import StartOptions
from isles.monitor.inbox import Inbox
from isles.monitor.multi_cluster.start import SeveralStart
from isles.run.find import typed_name


def train_several(loaded: Loaded, options: StartOptions, *, detach: bool, inbox: Inbox) -> int:
    """Start all clusters of a run file that are to be started, and follow them.

    Args:
        loaded: the run file.
        options: how `isles train` was typed.
        detach: return as soon as they are started.
        inbox: where signals to this process arrive.

    Returns:
        The worst exit code of the clusters; 0 where they are not followed.

    Raises:
        UserError: they cannot be started; nothing is left running then.
    """
    start = SeveralStart(loaded, options)
    texts = start.look()
    if options.dry_run:
        options.say(_dry_run_text(start, texts))
        return ExitCode.OK
    run = start.start()
    name = typed_name(run)
    if detach:
        options.say(f"  isles status {name} · isles logs -f {name} · isles stop {name}")
        return ExitCode.OK
    options.say("Ctrl+C saves and stops all clusters; closing this terminal leaves them running")
    from isles.monitor.consoles import console
    from isles.monitor.multi_cluster.follow import SeveralAttendant

    consoles = console(), console(stderr=True)
    return SeveralAttendant(run, start.choice.running, inbox, *consoles).attend()


def _dry_run_text(start: SeveralStart, texts: dict[str, str]) -> str:
    choice = start.choice
    lines = [choice.note or f"this would be a new run: {choice.run.name}", start.meeting_text()]
    for name, text in texts.items():
        lines += ["", f"=== cluster {name} ===", text]
    return "\n".join(lines)
