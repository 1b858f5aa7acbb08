"""`isles stop` of a run on several clusters: all of them at once, then what they meet at."""

from __future__ import annotations

from collections.abc import Callable

from isles.errors import ExitCode
from isles.launch.meeting import end_rendezvous
from isles.monitor.multi_cluster.child import Word, run_all
from isles.monitor.multi_cluster.state import place_of
from isles.run.several import SeveralRun


def stop_several(
    run: SeveralRun,
    *,
    now: bool,
    timeout: str,
    say: Callable[[str], object],
    warn: Callable[[str], object],
) -> int:
    """Stop all clusters of a run, and its rendezvous.

    Args:
        run: the run.
        now: end them without saving.
        timeout: longest wait, as it was typed.
        say, warn: take lines for the user.

    Returns:
        0 where nothing of it runs any more; else the worst exit code of the clusters' stops.
    """
    words = ["--now"] if now else []
    words += [f"--timeout={timeout}", f"--output-dir={run.path.parent}"]
    width = max(len(cluster.name) for cluster in run.clusters)

    def hear(word: Word) -> None:
        if word.kind != "end":
            (say if word.kind == "out" else warn)(f"{word.cluster.ljust(width)} | {word.text}")

    ended = run_all(
        {c.name: ["stop", place_of(c), *words] for c in run.clusters if c.path},
        doing="stopping",
        say=say,
        hear=hear,
    )
    code = max((end.code for end in ended.values()), default=ExitCode.OK)
    if code and run.meets:
        say("the rendezvous goes on for those that run")
    elif run.meets and not run.rendezvous and end_rendezvous(run.state):
        say(f"{run.name} has stopped, and its rendezvous has ended")
    elif not code:
        say(f"{run.name} has stopped")
    return code
