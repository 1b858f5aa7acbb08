"""A run on several clusters from one place: started, followed and stopped.

It is a parent with children: each cluster is started, followed and stopped by an isles command of
its own, as a process, so that launchers that need the terminal's signals or the working directory
do not meet.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Literal

from rich.console import Console

from isles.config.clusters import keys_of_cluster, named_cluster, shared_text
from isles.config.load import Loaded
from isles.config.sections.cluster import ManualLauncherConfig, QueueSection
from isles.config.sections.outer import DiLoCoConfig
from isles.errors import ExitCode, UserError
from isles.launch.base import StartOptions
from isles.launch.hub import (
    end_rendezvous,
    open_rendezvous,
    rendezvous_process,
    reopen_rendezvous,
)
from isles.launch.multi_cluster import is_elsewhere, local_environs, meeting_place, refuse_peers
from isles.launch.remote.login import STARTED
from isles.launch.ssh.start import interruptible
from isles.monitor.children import Children, Ended, Line, isles_argv, run_all
from isles.monitor.choice import choose
from isles.monitor.clusters import ALIVE, cluster_reports, end_lines, hub_line
from isles.monitor.follow import Follower
from isles.monitor.hub import HubNews
from isles.monitor.signals import WORDS
from isles.monitor.table import print_lines
from isles.run.find import typed_name
from isles.run.join_line import JoinLine
from isles.run.records import read_record, write_secret, write_text_atomic
from isles.run.refusals import clear_errors
from isles.run.several import ClusterRun, SeveralRun

_ASK_S = 1.0
_SILENT = ("started", "turn")
"""News of the hub that are none beside what the clusters report."""

Say = Callable[[str], object]


class StartError(UserError):
    """What the starts of clusters have printed, each in its own words."""

    def __str__(self) -> str:
        return self.what


class SeveralStart:
    """One start of a run on several clusters.

    Args:
        loaded: the run file.
        options: how `isles train` was typed.
    """

    def __init__(self, loaded: Loaded, options: StartOptions) -> None:
        assert loaded.config.diloco is not None, "config/rules: several clusters average"
        self._loaded, self._options = loaded, options
        self._outer: DiLoCoConfig = loaded.config.diloco
        refuse_peers(loaded)
        for cluster in loaded.config.clusters:
            named_cluster(loaded, cluster.name)  # its name may be too long
        self._environs = local_environs(loaded)
        self.choice = choose(loaded, options.resume)
        self.run = self.choice.run
        self._line = self._line_elsewhere()
        self._begun: set[str] = set()
        """Clusters that this start has started."""
        self._is_opened = False
        """Whether this start has opened the hub."""

    def look(self) -> dict[str, str]:
        """Look at everything and start nothing; what each start would do.

        Raises:
            UserError: the run cannot be begun, or clusters cannot be started: all of them.
        """
        commands = {name: self._words(name, "--dry-run") for name in self.choice.todo}
        with interruptible():  # there is nothing yet that Ctrl+C could be for
            ended = run_all(
                commands,
                doing="looking",
                say=self._options.say,
                environs=self._environs,
            )
        self._part_with(ended, "cannot be started")
        return {name: "\n".join(end.out) for name, end in ended.items() if not end.code}

    def dry_run_text(self, texts: dict[str, str]) -> str:
        """What would be started, with the answers of `look`."""
        if self._outer.hivemind is not None:
            peers = ", ".join(self._outer.hivemind.initial_peers)
            place = f"find one another by {peers}"
        elif self._outer.rendezvous is not None:
            place = f"meet at {self._outer.rendezvous}"
        else:
            listen, announce = meeting_place(self._loaded)
            place = f"meet at {announce or listen.removesuffix(':0')}, on this machine"
        lines = [self.choice.note or f"this would be a new run: {self.run.name}"]
        lines.append(f"the clusters would {place}")
        for name, text in texts.items():
            lines += ["", f"=== cluster {name} ===", text]
        return "\n".join(lines)

    def start(self) -> SeveralRun:
        """Start what is to be started; all of it, or nothing is left running of it.

        Raises:
            UserError: clusters cannot be started.
        """
        say = self._options.say
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
                    show=self._take,
                    stdin=line.secret_text() if line is not None else "",
                    environs=self._environs,
                )
                hand_back()
                self._part_with(ended, "could not be started")
            except BaseException:
                self._undo()
                raise
        return self.run

    def _part_with(self, ended: dict[str, Ended], what: str) -> None:
        """Go on without clusters that cannot take part, where the user has allowed it by word.

        Raises:
            StartError: he has not.
        """
        refused = {name: end for name, end in ended.items() if end.code}
        if not refused:
            return
        lines = [f"{len(refused)} of {len(self.run.clusters)} clusters {what}:"]
        for name, end in refused.items():
            del self.choice.todo[name]
            texts = [self._with_keys(name, text) for text in end.err]
            words = [text for text in texts if not text.startswith("warning: ")]
            first, *rest = words or [f"exit code {end.code}"]
            lines.append(f"{name}: {first.removeprefix('error: ')}")
            lines += [f"  {line.removeprefix('error: ')}" for line in rest]
        error = StartError("\n".join(lines))
        error.exit_code = ExitCode(max(end.code for end in refused.values()))
        there = len(self.choice.todo) + len(self.choice.running)
        has_said = "outer.min_clusters" in self._loaded.origins
        if not has_said or there < max(1, self._outer.min_clusters):
            raise error
        self._options.warn(f"{error}\n  the others go on, as outer.min_clusters allows")

    def _with_keys(self, name: str, text: str) -> str:
        """What a cluster has printed, with its keys as the run file of all has them."""
        order = [cluster.name for cluster in self._loaded.config.clusters]
        return keys_of_cluster(text, order.index(name))

    def _words(self, name: str, how: str) -> list[str]:
        options = self._options
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
                write_text_atomic(self.run.run_file, self._loaded.text)
        self.run = replace(self.run, started_at=time.time(), typed=self._options.typed)
        self.run.write()

    def _open(self) -> JoinLine:
        if self._line is not None:
            with clear_errors(self.run.join_file):
                write_secret(self.run.join_file, self._line.secret_text())
            return self._line
        listen, announce = meeting_place(self._loaded)
        line, self._is_opened = open_rendezvous(
            self.run.state,
            run=self.run.name,
            settings=self._settings(),
            listen=listen,
            announce=announce,
            run_file=shared_text(self._loaded.config),
            until_finished=True,
        )
        self._options.say(f"the clusters meet at {line.address}, on this machine")
        if any(is_elsewhere(cluster) for cluster in self._loaded.config.clusters):
            self._options.warn(
                "clusters elsewhere meet on this machine: should it go to sleep or offline, they "
                "train on, each alone, until it is back. `isles rendezvous` on a machine that "
                "stays on, and outer.rendezvous with its address, need this one no more"
            )
        return line

    def _settings(self) -> dict[str, str | int | float]:
        """Settings of the hub: clusters that start together also average together, from the first
        round on; only those in a queue may take hours to come."""
        if rendezvous_process(self.run.state) is not None:  # they have begun
            record = read_record(self.run.state / "process.json") or {}
            had = {k: v for k, v in record["settings"].items() if k.startswith("gather")}
            return {**self._outer.rendezvous_settings, **had}
        names = [*self.choice.todo, *self.choice.running]
        waits = (QueueSection, ManualLauncherConfig)
        soon = [
            cluster.name
            for cluster in self._loaded.config.clusters
            if cluster.name in names and not isinstance(cluster.launcher, waits)
        ]
        gather = {"gather": max(1, len(soon)), "gather_s": self._outer.deadline}
        return {**self._outer.rendezvous_settings, **gather}

    def _line_elsewhere(self) -> JoinLine | None:
        """The join line of a rendezvous that was started by itself; None: there is none.

        Raises:
            UserError: it is not known here, or is another's.
        """
        file, address = self.run.join_file, self._outer.rendezvous
        where = self._loaded.where("outer.rendezvous")
        if address is None:
            if not self._options.join:
                return None
            raise UserError(
                "a join line is given, and the run file starts a rendezvous of its own",
                where=where,
                fix=f"outer.rendezvous={JoinLine.parse(self._options.join).address}",
                id="join.line",
            )
        if self._options.join:
            line = JoinLine.parse(self._options.join)
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

    def _take(self, line: Line) -> None:
        """Show what a start prints, and put on record what it has started."""
        if line.kind == "out" and line.text.startswith(STARTED):
            told = json.loads(line.text.removeprefix(STARTED))
            old = self.run.cluster(line.child)
            new = replace(
                old, path=told["path"], ssh=told.get("ssh", ""), attempt=int(told["attempt"])
            )
            self.run = self.run.having(new)
            self.run.write()
            self._begun.add(line.child)
        elif line.kind == "out":
            self._options.say(f"{line.child} | {line.text}")
        elif line.kind == "err" and line.text.startswith("warning: "):
            text = self._with_keys(line.child, line.text.removeprefix("warning: "))
            self._options.warn(f"{line.child}: {text}")

    def _undo(self) -> None:
        """End again what this start has started."""
        if self._begun:
            self._options.say(f"ending again: {', '.join(sorted(self._begun))}")
            places = {name: place_of(self.run.cluster(name)) for name in self._begun}
            more = ["--now", f"--output-dir={self.run.path.parent}"]
            commands = {name: ["stop", place, *more] for name, place in places.items()}
            for name, end in run_all(commands, doing="ending", say=self._options.say).items():
                if end.code:
                    words = " ".join(end.err).removeprefix("error: ")
                    self._options.warn(f"{name} still runs ({places[name]}): {words}")
        if self._is_opened:
            end_rendezvous(self.run.state)


def place_of(cluster: ClusterRun) -> str:
    """What is typed to mean the run of a cluster, from anywhere on this machine."""
    return f"{cluster.ssh}:{cluster.path}" if cluster.ssh else cluster.path


class ClustersFollower(Follower):
    """Follows all clusters of a run until they end: one stream, each line with its cluster's name.

    Of clusters that were `running` before only what is new is shown.
    """

    def __init__(
        self, run: SeveralRun, running: Iterable[str], console: Console, errors: Console
    ) -> None:
        super().__init__(run.name, typed_name(run), console, errors)
        self._run = run
        self._codes: dict[str, int] = {}
        self._is_interrupted = False
        self._is_over = threading.Event()
        self._width = max(len(name) for name in [*(c.name for c in run.clusters), "turns"])
        self._children = Children()
        begun = set(running)
        for cluster in run.clusters:
            if cluster.path and cluster.launcher != "manual":
                words = ["attend", place_of(cluster), "--attempt", str(cluster.attempt)]
                words += ["--orders", f"--output-dir={run.path.parent}"]
                words += ["--begun"] if cluster.name in begun else []
                self._children.start(cluster.name, isles_argv(words))
        if run.meets:
            # Beside the following: a hub that hangs must not hold up Ctrl+C.
            threading.Thread(target=self._ask_hub, daemon=True).start()

    def look(self) -> int | None:
        """Show what the clusters and their hub report; see `Follower.look`."""
        order = [cluster.name for cluster in self._run.clusters]
        while self._children.left and (line := self._children.next(0)) is not None:
            if line.kind == "end":
                self._codes[line.child] = line.code
                continue
            text = line.text
            if line.kind == "err" and line.child in order:
                text = keys_of_cluster(text, order.index(line.child))
            where = self.errors if line.kind == "err" else self.console
            print_lines(where, [f"{line.child.ljust(self._width)} | {text}"])
        if self._children.left:
            return None
        self._is_over.set()
        reports = cluster_reports(self._run).values()
        is_alive = any(report.state in ALIVE for report in reports)
        if not is_alive and self._run.meets and not self._run.rendezvous:
            end_rendezvous(self._run.state)
        lines, code = end_lines(self._run, self._codes)
        print_lines(self.console, lines)
        return code

    def handle(self, number: signal.Signals) -> int | None:
        """Pass it on to all clusters."""
        if number == signal.SIGINT and not self._is_interrupted:
            self._is_interrupted = True
            self.say("stopping all clusters; Ctrl+C again stops them now")
        self._children.send(WORDS[number])
        return None

    def close(self) -> None:
        """See `Follower.close`."""
        self._is_over.set()
        self._children.hang_up()

    def _ask_hub(self) -> None:
        """Put what happens between the clusters into the stream, as the hub has it."""
        news = HubNews(lambda: hub_line(self._run), self._run.started_at)
        silent_since: float | None = None
        while not self._is_over.wait(_ASK_S):
            try:
                found = news.look()
            except UserError as error:
                # Once all have finished, it ends.
                if silent_since is None and not news.is_over and not self._is_over.is_set():
                    silent_since = time.monotonic()
                    self._tell(f"the rendezvous does not answer: {error.what}", "err")
                    self._reopen()
                continue
            if silent_since is not None:
                self._tell(f"the rendezvous is back after {time.monotonic() - silent_since:.0f}s")
                silent_since = None
            for _, kind, text in found:
                if kind not in _SILENT:
                    self._tell(text)

    def _reopen(self) -> None:
        """Start the run's own hub again, once for each time that it has died."""
        if self._run.rendezvous:
            self._tell(f"open it again at {self._run.rendezvous}: isles rendezvous", "err")
            return
        try:
            if reopen_rendezvous(self._run.state):
                self._tell("it had died, and is started again")
        except UserError as error:
            self._tell(f"it does not start again: {error}", "err")

    def _tell(self, text: str, kind: Literal["out", "err"] = "out") -> None:
        self._children.put(Line("turns", kind, text))


def stop_several(run: SeveralRun, *, now: bool, timeout: str, say: Say, warn: Say) -> int:
    """Stop all clusters of a run at once, then their hub.

    Returns:
        0 where nothing of it runs any more; else the worst exit code of the clusters' stops.
    """
    words = ["--now"] if now else []
    words += [f"--timeout={timeout}", f"--output-dir={run.path.parent}"]
    width = max(len(cluster.name) for cluster in run.clusters)

    def show(line: Line) -> None:
        if line.kind != "end":
            (say if line.kind == "out" else warn)(f"{line.child.ljust(width)} | {line.text}")

    commands = {c.name: ["stop", place_of(c), *words] for c in run.clusters if c.path}
    ended = run_all(commands, doing="stopping", say=say, show=show)
    code = max((end.code for end in ended.values()), default=ExitCode.OK)
    if code and run.meets:
        say("the rendezvous goes on for those that run")
    elif run.meets and not run.rendezvous and end_rendezvous(run.state):
        say(f"{run.name} has stopped, and its rendezvous has ended")
    elif not code:
        say(f"{run.name} has stopped")
    return code
