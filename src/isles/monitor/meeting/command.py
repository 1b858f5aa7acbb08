"""The verb `isles rendezvous`: the point where clusters of one run meet."""

from __future__ import annotations

import sys
from pathlib import Path

from cyclopts import App

from isles.errors import ExitCode

rendezvous_app = App(
    name="rendezvous", help="Open the point where clusters of one run meet, and say how they join."
)


@rendezvous_app.default
def rendezvous(
    run_file: Path,
    /,
    *overrides: str,
    public: str = "",
    listen: str = "",
    detach: bool = False,
    new: bool = False,
) -> int:
    """Open the point where clusters of one run meet, print the line by which they join, and show
    who comes and goes. Typed again it goes on where it was: same line, same memory.

    Args:
        run_file: The run file, with outer: {kind: diloco}. Clusters elsewhere get from here what
            all must have alike: model, data, training, outer.
        overrides: Values that replace those in the file, such as outer.sync_every=100.
        public: HOST:PORT that clusters dial: a name, a VPN's address, or a router's that passes it
            on. Left out: outer.public of the run file, or clusters of this machine only.
        listen: HOST:PORT of this machine, if it is not what --public says.
        detach: Return as soon as it is open.
        new: Begin with an empty memory and another line.
    """
    from isles.launch.meeting_run import start_meeting
    from isles.monitor.inbox import caught_signals
    from isles.monitor.meeting.follow import Follower, opening

    with caught_signals() as inbox:
        meeting = start_meeting(run_file, overrides, public=public, listen=listen, is_anew=new)
        _say("\n".join(opening(meeting, shows_line=sys.stdout.isatty())))
        if detach:
            return ExitCode.OK
        how = "ends it; typed again it goes on" if meeting.is_new else "leaves it running"
        _say(f"Ctrl+C {how}; closing this terminal leaves it running\n")
        return Follower(meeting, inbox, _say).follow()


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
