"""The verb `isles join`: this site's cluster takes part in a run that others have begun."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter

from isles.run.join_line import JoinLine

join_cluster_app = App(
    name="join", help="Take part, with the GPUs of this site, in a run that others have begun."
)


@join_cluster_app.default
def join(
    line: Annotated[str, Parameter(allow_leading_hyphen=True)],
    /,
    *words: str,
    name: str = "",
    on: Literal["local", "ssh", "slurm", "pbs", "manual"] | None = None,
    resume: str = "auto",
    dry_run: bool = False,
    detach: bool = False,
) -> int:
    """Train as one more cluster of a run, by the line that `isles rendezvous` has printed.

    Model, data, training and outer are the run's own, and come from there. Typed again it goes on
    where the last start ended.

    Args:
        line: A file with the join line; or - to read it from stdin; or the line itself, which the
            shell's history keeps then.
        words: A run file of this site, of which the section clusters is enough; and values such as
            launcher.partition=gpu, nodes=4, gpus_per_node=8 of this site's cluster, or
            data.sources.0.path=/scratch/text where the same data lies elsewhere.
        name: Of this cluster. Left out: as the run file says, or the name of this machine.
        on: How ranks are started. Left out: as the run file says, or on this machine.
        resume: As in isles train.
        dry_run: Show what would be started; start nothing.
        detach: Return as soon as it is started.
    """
    from isles.launch.base import StartOptions
    from isles.launch.join_cluster import Site, joining_run, read_join_line
    from isles.monitor.started import start_and_follow

    found = read_join_line(line)
    _hide(line, found)
    files = [word for word in words[:1] if "=" not in word]
    site = Site(Path(files[0]) if files else None, words[len(files) :], name, on or "")
    loaded = joining_run(found, site, _warn)
    options = StartOptions(
        loaded.path, (), resume, dry_run, _say, _warn, join=found.secret_text(), loaded=loaded
    )
    return start_and_follow(options, detach=detach)


def _hide(typed: str, line: JoinLine) -> None:
    """Begin again without the secret among the arguments, which other users of this machine see.

    It would stand there for as long as the run is followed.
    """
    if typed not in sys.argv or "#" not in typed:
        return
    reader, writer = os.pipe()
    os.write(writer, f"{line.secret_text()}\n".encode())
    os.close(writer)
    os.dup2(reader, 0)
    words = ["-" if word == typed else word for word in sys.argv[1:]]
    os.execv(sys.executable, [sys.executable, "-m", "isles", *words])


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _warn(line: str) -> None:
    sys.stderr.write(f"warning: {line}\n")
