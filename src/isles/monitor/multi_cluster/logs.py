"""`isles logs` of a run on several clusters: each line with its cluster's name."""

from __future__ import annotations

from collections.abc import Iterator

from isles.errors import UserError
from isles.monitor.logs import LogChoice
from isles.monitor.stream import Note, merged, shown_lines
from isles.run.find import run_of
from isles.run.paths import RunDir
from isles.run.remote import RemoteRun
from isles.run.several import SeveralRun


def several_lines(
    run: SeveralRun, choice: LogChoice, *, by_node: bool, note: Note
) -> Iterator[str]:
    """The lines that `isles logs` prints; as they come where they are followed.

    Args:
        run: the run.
        choice: which lines of each cluster.
        by_node: of each cluster one node after the other.
        note: takes what is to be said beside them.
    """
    width = max(len(cluster.name) for cluster in run.clusters)

    def of(name: str, found: RunDir | RemoteRun) -> Iterator[str]:
        try:
            for line in shown_lines(found, choice, by_node=by_node, note=note):
                yield f"{name.ljust(width)} | {line}"
        except UserError as error:
            note(f"{name}: {error.what}")

    streams = []
    for cluster in run.clusters:
        found = run_of(run, cluster)
        if found is None:
            note(f"{cluster.name} was never started")
        else:
            streams.append(of(cluster.name, found))
    return merged(streams, follow=choice.follow, note=note)
