"""Starting a run on several clusters: all are looked at, then a rendezvous, then each cluster.

Each cluster is started by an `isles train` of its own, as a process, so that launchers that need
the terminal's signals or the working directory do not meet.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from isles.config.clusters import named_cluster, shared_text
from isles.config.load import Loaded
from isles.config.sections.cluster import ManualLauncherConfig, QueueSection
from isles.config.sections.outer import DiLoCoConfig
from isles.errors import ExitCode, UserError
from isles.launch.base import StartOptions
from isles.launch.meeting import end_rendezvous, open_rendezvous, rendezvous_process
from isles.launch.multi_cluster import is_elsewhere, local_environs, meeting_place, refuse_peers
from isles.launch.remote.passing import STARTED
from isles.launch.ssh.start import interruptible
from isles.monitor.multi_cluster.child import Ended, Word, run_all
from isles.monitor.multi_cluster.choice import Choice, choose
from isles.monitor.multi_cluster.state import place_of
from isles.run.join_line import JoinLine
from isles.run.records import read_record, write_secret, write_text_atomic
from isles.run.refusals import clear_errors
from isles.run.several import SeveralRun

Say = Callable[[str], object]


class StartError(UserError):
    """What the starts of clusters have said, each in its own words."""

    def __str__(self) -> str:
        return self.what


@dataclass(slots=True)
class SeveralStart:
    """One start of a run on several clusters.

    Args:
        loaded: the run file.
        options: how `isles train` was typed.
    """

    loaded: Loaded
    options: StartOptions
    choice: Choice = field(init=False)
    environs: dict[str, dict[str, str]] = field(init=False)
    run: SeveralRun = field(init=False)
    line: JoinLine | None = field(init=False)
    """Of a rendezvous elsewhere."""
    begun: set[str] = field(default_factory=set)
    """Clusters that this start has started."""
    is_opened: bool = False
    """Whether this start has opened the rendezvous."""

    def look(self) -> dict[str, str]:
        """Look at everything and start nothing; what each start would do.

        Raises:
            UserError: the run cannot be begun, or clusters cannot be started: all of them.
        """
        refuse_peers(self.loaded)
        for cluster in self.loaded.config.clusters:
            named_cluster(self.loaded, cluster.name)  # its name may be too long
        self.environs = local_environs(self.loaded)
        self.choice = choose(self.loaded, self.options.resume)
        self.run = self.choice.run
        self.line = self._line_elsewhere()
        commands = {name: self._words(name, "--dry-run") for name in self.choice.todo}
        with interruptible():  # there is nothing yet that Ctrl+C could be for
            say, environs = self.options.say, self.environs
            ended = run_all(
                commands, doing="looking", say=say, environs=environs, order=self._order()
            )
        self._part_with({name: end for name, end in ended.items() if end.code}, "cannot be started")
        return {name: "\n".join(end.out) for name, end in ended.items() if not end.code}

    def start(self) -> SeveralRun:
        """Start what is to be started; all of it, or nothing is left running of it.

        Raises:
            UserError: clusters cannot be started.
        """
        say = self.options.say
        if self.choice.note:
            say(self.choice.note)
        with interruptible() as hand_back:
            try:
                self._make_folder()
                line = self._open() if self.run.meets else None
                ended = run_all(
                    {name: self._words(name, "--announce") for name in self.choice.todo},
                    doing="starting",
                    say=say,
                    hear=self._hear,
                    given=line.secret_text() if line is not None else "",
                    environs=self.environs,
                    order=self._order(),
                )
                hand_back()
            except BaseException:
                self._undo()
                raise
        refused = {name: end for name, end in ended.items() if end.code}
        try:
            self._part_with(refused, "could not be started")
        except UserError:
            self._undo()
            raise
        return self.run

    def _order(self) -> list[str]:
        return [cluster.name for cluster in self.loaded.config.clusters]

    def _part_with(self, refused: dict[str, Ended], what: str) -> None:
        """Go on without clusters that cannot take part, where the user has allowed it by word.

        Raises:
            StartError: he has not.
        """
        if not refused:
            return
        outer = self.loaded.config.diloco
        assert outer is not None
        for name in refused:
            del self.choice.todo[name]
        there = len(self.choice.todo) + len(self.choice.running)
        error = _refusal(refused, len(self.run.clusters), what)
        has_said = "outer.min_clusters" in self.loaded.origins
        if not has_said or there < max(1, outer.min_clusters):
            raise error
        self.options.warn(f"{error}\n  the others go on, as outer.min_clusters allows")

    def _words(self, name: str, how: str) -> list[str]:
        options = self.options
        words = ["train", str(options.path), *options.overrides, "--cluster", name]
        words += [f"--resume={self.choice.todo[name]}", how]
        words += [f"--typed={options.typed}"] if options.typed else []
        has_line = how == "--announce" and self.run.meets
        return words + (["--join-file=/dev/stdin"] if has_line else [])

    def _make_folder(self) -> None:
        path = self.run.path
        with clear_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir(exist_ok=self.choice.is_resumed)
            if not self.choice.is_resumed:
                write_text_atomic(self.run.run_file, self.loaded.text)
        self.run = replace(self.run, started_at=time.time(), typed=self.options.typed)
        self.run.write()

    def _open(self) -> JoinLine:
        outer = self.loaded.config.diloco
        assert outer is not None
        if self.line is not None:
            with clear_errors(self.run.join_file):
                write_secret(self.run.join_file, self.line.secret_text())
            return self.line
        listen, announce = meeting_place(self.loaded)
        line, self.is_opened = open_rendezvous(
            self.run.state,
            run=self.run.name,
            settings=self._settings(outer),
            listen=listen,
            announce=announce,
            run_file=shared_text(self.loaded.config),
            until_finished=True,
        )
        self.options.say(f"the clusters meet at {line.address}, on this machine")
        if any(is_elsewhere(cluster) for cluster in self.loaded.config.clusters):
            self.options.warn(
                "clusters elsewhere meet on this machine: should it go to sleep or offline, they "
                "train on, each alone, until it is back. `isles rendezvous` on a machine that "
                "stays on, and outer.rendezvous with its address, need this one no more"
            )
        return line

    def _settings(self, outer: DiLoCoConfig) -> dict[str, str | int | float]:
        """The rules of the rendezvous: clusters that start together also average together, from
        the first turn on; only those in a queue may take hours to come."""
        if rendezvous_process(self.run.state) is not None:  # they have begun
            record = read_record(self.run.state / "process.json") or {}
            had = {k: v for k, v in record["settings"].items() if k.startswith("gather")}
            return {**outer.rendezvous_settings, **had}
        names = [*self.choice.todo, *self.choice.running]
        waits = (QueueSection, ManualLauncherConfig)
        soon = [
            cluster.name
            for cluster in self.loaded.config.clusters
            if cluster.name in names and not isinstance(cluster.launcher, waits)
        ]
        gather = {"gather": max(1, len(soon)), "gather_s": outer.deadline}
        return {**outer.rendezvous_settings, **gather}

    def meeting_text(self) -> str:
        """Where the clusters would meet."""
        outer = self.loaded.config.diloco
        assert outer is not None
        if outer.hivemind is not None:
            return (
                f"the clusters would find one another by {', '.join(outer.hivemind.initial_peers)}"
            )
        if outer.rendezvous is not None:
            return f"the clusters would meet at {outer.rendezvous}"
        listen, announce = meeting_place(self.loaded)
        place = announce or listen.removesuffix(":0")
        return f"the clusters would meet at {place}, on this machine"

    def _line_elsewhere(self) -> JoinLine | None:
        """The join line of a rendezvous that was started by itself; None: there is none.

        Raises:
            UserError: it is not known here, or is another's.
        """
        outer = self.loaded.config.diloco
        assert outer is not None
        file, address = self.run.join_file, outer.rendezvous
        where = self.loaded.where("outer.rendezvous")
        if address is None:
            if not self.options.join:
                return None
            raise UserError(
                "a join line is given, and the run file starts a rendezvous of its own",
                where=where,
                fix=f"outer.rendezvous={JoinLine.parse(self.options.join).address}",
                id="join.line",
            )
        if self.options.join:
            line = JoinLine.parse(self.options.join)
        elif file.exists():
            line = JoinLine.read(file)
        else:
            raise UserError(
                f"the rendezvous is at {address}, and its join line is not known here",
                where=where,
                fix="--join-file FILE, with the line that `isles rendezvous` has written there",
                id="join.line",
            )
        if line.address != address:
            raise UserError(
                f"the join line is of {line.address}, and the run file names {address}",
                where=where,
                fix="write the address of the line, or give --join-file with its line",
                id="join.line",
            )
        return line

    def _hear(self, word: Word) -> None:
        """Show what a start says, and put on record what it has started."""
        if word.kind == "out" and word.text.startswith(STARTED):
            told = json.loads(word.text.removeprefix(STARTED))
            old = self.run.cluster(word.cluster)
            new = replace(
                old, path=told["path"], ssh=told.get("ssh", ""), attempt=int(told["attempt"])
            )
            self.run = self.run.having(new)
            self.run.write()
            self.begun.add(word.cluster)
        elif word.kind == "out":
            self.options.say(f"{word.cluster} | {word.text}")
        elif word.kind == "err" and word.text.startswith("warning: "):
            self.options.warn(f"{word.cluster}: {word.text.removeprefix('warning: ')}")

    def _undo(self) -> None:
        """End again what this start has started."""
        if self.begun:
            self.options.say(f"ending again: {', '.join(sorted(self.begun))}")
            places = {name: place_of(self.run.cluster(name)) for name in self.begun}
            output_dir = str(self.run.path.parent)
            ended = run_all(
                {
                    name: ["stop", place, "--now", f"--output-dir={output_dir}"]
                    for name, place in places.items()
                },
                doing="ending",
                say=self.options.say,
            )
            for name, end in ended.items():
                if end.code:
                    words = " ".join(end.err).removeprefix("error: ")
                    self.options.warn(f"{name} still runs ({places[name]}): {words}")
        if self.is_opened:
            end_rendezvous(self.run.state)


def _refusal(refused: dict[str, Ended], among: int, what: str) -> StartError:
    """The words of all clusters that were refused."""
    lines = [f"{len(refused)} of {among} clusters {what}:"]
    for name, end in refused.items():
        words = [line for line in end.err if not line.startswith("warning: ")] or [
            f"exit code {end.code}"
        ]
        first, *rest = words
        lines.append(f"{name}: {first.removeprefix('error: ')}")
        lines += [f"  {line.removeprefix('error: ')}" for line in rest]
    error = StartError("\n".join(lines))
    error.exit_code = ExitCode(max(end.code for end in refused.values()))
    return error
