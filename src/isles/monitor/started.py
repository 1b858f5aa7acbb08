"""From a typed command to a followed run: what `isles train` and `isles join` have in common."""

from __future__ import annotations

import sys

from isles.config.load import Loaded
from isles.errors import ExitCode
from isles.launch.base import StartOptions
from isles.launch.start import start
from isles.monitor.inbox import caught_signals
from isles.run.find import typed_name
from isles.run.state import script_of


def start_and_follow(options: StartOptions, *, detach: bool = False, announce: bool = False) -> int:
    """Start a run as it was asked for, and follow it to its end.

    Args:
        options: what is to be started.
        detach: return as soon as it is.
        announce: the same, and say which run it is; for isles on another machine.

    Returns:
        The exit code.

    Raises:
        UserError: it cannot be started.
    """
    with caught_signals() as inbox:
        started = start(options)
        if isinstance(started, str):
            return _print(started)
        if isinstance(started, Loaded):
            from isles.monitor.multi_cluster.train import train_several

            return train_several(started, options, detach=detach, inbox=inbox)
        if started.text:
            _print(started.text)
        if announce:
            from isles.launch.remote.login import started_line

            options.say(started_line(started))
        if started.text or announce:
            return ExitCode.OK
        if detach:
            name = started.remote.typed if started.remote else typed_name(started.run_dir)
            options.say(f"  isles status {name} · isles logs -f {name} · isles stop {name}")
            return ExitCode.OK
        is_script = started.remote is None and script_of(started.run_dir) is not None
        does = "lets the script stop" if is_script else "saves and stops"
        options.say(f"Ctrl+C {does}; closing this terminal leaves it running")
        # The ranks are on their way: what draws their progress is loaded beside them.
        from isles.monitor.consoles import console
        from isles.monitor.foreground import attend

        return attend(started, inbox=inbox, console=console(), errors=console(stderr=True))


def _print(text: str) -> int:
    sys.stdout.write(f"{text}\n")
    return ExitCode.OK
