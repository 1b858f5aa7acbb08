"""Starts and follows a multi-cluster run.

A separate isles process starts, follows and stops each cluster. So launchers that need the
terminal's signals or the working directory do not get in each other's way.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from isles.config.clusters import keys_of_cluster, named_cluster, shared_text
from isles.config.load import Loaded
from isles.config.resume import change_lines, changed_error, changed_length, changed_mathematics
from isles.config.sections.cluster import ManualLauncherConfig, QueueSection, SkypilotLauncherConfig
from isles.config.sections.outer import DiLoCoConfig
from isles.config.sections.run import RunConfig
from isles.errors import ExitCode, UserError
from isles.facts.console import Console
from isles.launch.answers import STARTED, read_started
from isles.launch.base import StartOptions
from isles.launch.hub import end_hub, open_hub, reopen_hub, running_settings
from isles.launch.multi_cluster import hub_place, local_environs, refuse_peers
from isles.launch.remote.login import LoginError
from isles.launch.ssh.start import interruptible
from isles.monitor.children import ChildLine, Children, Ended, isles_argv, run_all
from isles.monitor.clusters import ALIVE, cluster_reports, hub_line, outcome_lines, place_of
from isles.monitor.follow import Follower
from isles.monitor.hub import HubNews
from isles.monitor.stop import WORDS
from isles.run.claim import claimed
from isles.run.entry import make_own_folder
from isles.run.find import NUMBERED, next_run, numbered_runs, typed_name
from isles.run.join_line import JoinLine
from isles.run.records import explain_write_errors, write_secret, write_text_atomic
from isles.run.remote import ClusterRun, MultiClusterRun, read_multi_cluster

_HUB_POLL_S = 1.0
_QUIET_NEWS = ("started", "round")
"""News of the hub that the clusters report themselves."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Plan of a start.

    Args:
        is_resumed: whether the folder of the run exists.
        todo: clusters to start, and the `--resume` of each.
        running: clusters that run already, which isles only follows.
        note: lines for the user.
    """

    run: MultiClusterRun
    is_resumed: bool
    todo: dict[str, str]
    running: tuple[str, ...] = ()
    note: str = ""


def choose(loaded: Loaded, resume: str) -> Choice:
    """Choose the run to begin or to resume, and its clusters to start.

    Args:
        resume: `auto`, `no`, or the folder of a multi-cluster run.

    Raises:
        UserError: there is no such run, or its values have changed.
    """
    config = loaded.config
    assert config.diloco is not None
    output_dir = Path(config.output_dir).expanduser()
    path, now = next_run(output_dir, config.name).absolute(), time.time()
    clusters = tuple(ClusterRun(c.name, c.launcher.kind) for c in config.clusters)
    values, hub = config.model_dump(mode="json"), config.diloco.hub or ""
    run = MultiClusterRun(path, clusters, now, now, values, hub)
    fresh = Choice(run, False, {cluster.name: "no" for cluster in clusters})
    if resume == "no":
        return fresh
    if resume == "auto":
        places = [run.path for _, run in numbered_runs(output_dir, config.name)]
    else:
        places = [Path(resume).expanduser(), output_dir / resume]
    found = [old for place in places if (old := read_multi_cluster(place.absolute())) is not None]
    if resume == "auto":
        found = [old for old in found if not old.owner][-1:]
    if not found and resume != "auto":
        raise UserError(
            f"{resume} is not a multi-cluster run",
            where="--resume",
            fix="give the folder that has clusters.json, or `--resume no` for a new run",
            id="run.unknown",
        )
    if not found:
        return fresh
    found[0].require_own("resume another user's run")
    choice = _go_on(loaded, found[0], run, may_change=resume != "auto")
    if choice.todo or choice.running or resume != "auto":
        return choice
    return replace(fresh, note=f"{found[0].name} is finished, so this is a new run: {run.name}")


def _go_on(
    loaded: Loaded, old: MultiClusterRun, new: MultiClusterRun, *, may_change: bool
) -> Choice:
    # Started again are clusters that do not run, and have not finished.
    reports = cluster_reports(old)
    known = {cluster.name: cluster for cluster in old.clusters}
    names = [cluster.name for cluster in new.clusters]
    states = {name: reports[name].state for name in names if name in reports}
    running = [name for name, state in states.items() if state in ALIVE]
    length, is_over = loaded.config.training.max_steps or 0, set(states.values()) == {"finished"}
    is_longer = is_over and may_change and all((r.step or 0) < length for r in reports.values())
    todo = {name: known[name].path for name in names if is_longer and name in known}
    if not is_over:
        for name in names:
            state = states.get(name, "new")
            if state in ("gone", "new"):
                todo[name] = "no"
            elif state not in (*ALIVE, "finished"):
                todo[name] = known[name].path
    run = replace(
        old,
        path=old.path.absolute(),
        clusters=tuple(replace(known.get(c.name, c), launcher=c.launcher) for c in new.clusters),
        config=new.config,
        hub=new.hub,
    )
    if not todo and not running:  # no cluster is left from which a new one could take the weights
        return Choice(run, True, {})
    lines = [f"resuming {run.name}"]
    if running:
        are = "run" if len(running) > 1 else "runs"
        lines.append(f"  {', '.join(running)} {are} already: followed, not started")
    added = [name for name, resume in todo.items() if resume == "no"]
    if added:
        lines.append(f"  {', '.join(added)} {'are' if len(added) > 1 else 'is'} new in it")
    over = [n for n, report in reports.items() if report.state == "finished" and n not in todo]
    if over:
        lines.append(f"  {', '.join(over)} {'have' if len(over) > 1 else 'has'} finished")
    for name in [name for name in known if name not in names]:
        text = f"  {name} is no longer in the run file, and is not waited for"
        if name in reports and reports[name].state in ALIVE:
            text += f". It still runs (isles stop {reports[name].name})"
        lines.append(text)
    saved = [r.checkpoint_step for r in reports.values() if r.checkpoint_step is not None]
    lines += _changes(loaded, old, max(saved, default=None), may_change=may_change)
    return Choice(run, True, todo, tuple(running), "\n".join(lines))


def _changes(
    loaded: Loaded, old: MultiClusterRun, saved: int | None, *, may_change: bool
) -> list[str]:
    # Lines about values that have changed; `saved`: the step of the newest checkpoint.
    try:
        before = RunConfig.model_validate(old.config)
    except ValueError:
        return [f"  the old values of {old.name}, of another isles, could not be compared"]
    changes = changed_mathematics(before, loaded.config)
    if saved is not None:
        changes += changed_length(before, loaded.config, {"step": saved})
    if not changes:
        return []
    if may_change or saved is None or all(change.is_free for change in changes):
        return ["  with these new values:", change_lines(changes)]
    raise changed_error(old.path, typed_name(old), old.typed, changes)


class MultiClusterStart:
    """One start of a multi-cluster run."""

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
        self._given_line = self._read_join_line()
        self._begun: set[str] = set()
        """Clusters that this start has started."""
        self._opened_hub = False

    def look(self) -> dict[str, str]:
        """Start nothing; the text that a dry run of each cluster prints.

        Raises:
            UserError: the run cannot be begun, or clusters cannot be started: all of them.
        """
        commands = {name: self._words(name, "--dry-run") for name in self.choice.todo}
        with interruptible():  # there is nothing yet that Ctrl+C could be for
            ended = run_all(
                commands,
                doing="looking",
                print_line=self._options.print_line,
                environs=self._environs,
            )
        self._drop_refused(ended, "cannot be started")
        return {name: "\n".join(end.out) for name, end in ended.items() if not end.code}

    def dry_run_text(self, texts: dict[str, str]) -> str:
        """Description of the start, with the texts of `look`."""
        if self._outer.hivemind is not None:
            peers = ", ".join(self._outer.hivemind.initial_peers)
            place = f"find one another by {peers}"
        elif self._outer.url is not None:
            place = f"meet at {self._outer.url}"
        elif self._outer.hub is not None:
            place = f"meet at {self._outer.hub}"
        else:
            listen, announce = hub_place(self._loaded)
            place = f"meet at {announce or listen.removesuffix(':0')}, on this machine"
        lines = [self.choice.note or f"this would be a new run: {self.run.name}"]
        lines.append(f"the clusters would {place}")
        for name, text in texts.items():
            lines += ["", f"=== cluster {name} ===", text]
        return "\n".join(lines)

    def start(self) -> MultiClusterRun:
        """Start the clusters. If one cluster cannot start, stop the others.

        Raises:
            UserError: clusters cannot be started.
        """
        print_line = self._options.print_line
        numbered = NUMBERED.fullmatch(self.run.name)
        name = numbered["name"] if numbered else self.run.name
        with claimed(self.run.path.parent, name), interruptible() as hand_back:
            self._choose_again()
            if self.choice.note:
                print_line(self.choice.note)
            try:
                self._make_folder()
                line = self._open_hub() if self.run.meets else None
                ended = run_all(
                    {name: self._words(name, "--announce") for name in self.choice.todo},
                    doing="starting",
                    print_line=print_line,
                    show=self._take,
                    stdin=line.secret_text() if line is not None else "",
                    environs=self._environs,
                )
                hand_back()
                self._drop_refused(ended, "could not be started")
            except BaseException:
                self._undo()
                raise
        return self.run

    def _words(self, name: str, how: str) -> list[str]:
        options = self._options
        words = ["train", str(options.path), *options.overrides, "--cluster", name]
        words += [f"--resume={self.choice.todo[name]}", how]
        words += [f"--typed={options.typed}"] if options.typed else []
        has_line = how == "--announce" and self.run.meets
        return words + (["--join-file=/dev/stdin"] if has_line else [])

    def _drop_refused(self, ended: dict[str, Ended], what: str) -> None:
        # Clusters that cannot be started end the start, unless the user has set min_clusters.
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
        error = LoginError("\n".join(lines))  # as isles has printed it
        code = max(end.code for end in refused.values())
        # A start that a signal has ended has another.
        error.exit_code = ExitCode(code) if code in tuple(ExitCode) else ExitCode.TRAINING
        there = len(self.choice.todo) + len(self.choice.running)
        is_set = "outer.min_clusters" in self._loaded.origins
        if not is_set or there < max(1, self._outer.min_clusters):
            raise error
        self._options.warn(f"{error}\n  the others continue, as outer.min_clusters allows")

    def _with_keys(self, name: str, text: str) -> str:
        # To itself each cluster is the only one: its keys are those of the run file of all.
        order = [cluster.name for cluster in self._loaded.config.clusters]
        return keys_of_cluster(text, order.index(name))

    def _choose_again(self) -> None:
        # Another start may have begun the run while this one looked at its clusters.
        now, before = choose(self._loaded, self._options.resume), self.choice
        if self._options.resume == "no":
            self.run, self.choice = now.run, replace(now, todo=before.todo)
        elif now.is_resumed != before.is_resumed or before.todo.keys() - now.todo.keys():
            raise UserError(
                f"another start of {now.run.name} has just begun",
                where=str(now.run.path),
                fix=f"`isles status {typed_name(now.run)}` shows how it stands",
                id="run.running",
            )

    def _make_folder(self) -> None:
        path = self.run.path
        with explain_write_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            if self.choice.is_resumed:
                make_own_folder(path)
            else:
                path.mkdir()
            if not self.choice.is_resumed:
                write_text_atomic(self.run.run_file, self._loaded.text)
        self.run = replace(self.run, started_at=time.time(), typed=self._options.typed)
        self.run.write()

    def _open_hub(self) -> JoinLine:
        if self._given_line is not None:
            with explain_write_errors(self.run.join_file):
                write_secret(self.run.join_file, self._given_line.secret_text())
            return self._given_line
        listen, announce = hub_place(self._loaded)
        line, self._opened_hub = open_hub(
            self.run.state,
            run=self.run.name,
            settings=self._hub_settings(),
            listen=listen,
            announce=announce,
            run_file=shared_text(self._loaded.config),
            until_finished=True,
        )
        self._options.print_line(f"the clusters meet at {line.address}, on this machine")
        if not all(cluster.is_here for cluster in self._loaded.config.clusters):
            self._options.warn(
                "clusters elsewhere meet on this machine: should it go to sleep or offline, they "
                "train on, each alone, until it is back. `isles hub` on a machine that stays on, "
                "and outer.hub with its address, need this one no more"
            )
        return line

    def _hub_settings(self) -> dict[str, str | int | float]:
        # Clusters that start together also average together from the first round on; only those
        # in a queue may take hours to come.
        begun = running_settings(self.run.state, typed_name(self.run))
        if begun is not None:
            had = {key: value for key, value in begun.items() if key.startswith("gather")}
            return {**self._outer.hub_settings, **had}
        names = [*self.choice.todo, *self.choice.running]
        waits = (QueueSection, ManualLauncherConfig, SkypilotLauncherConfig)
        soon = [
            cluster.name
            for cluster in self._loaded.config.clusters
            if cluster.name in names and not isinstance(cluster.launcher, waits)
        ]
        gather = {"gather": max(1, len(soon)), "gather_s": self._outer.deadline}
        return {**self._outer.hub_settings, **gather}

    def _read_join_line(self) -> JoinLine | None:
        # Of a hub that was opened by itself; None: this run opens its own.
        file, address = self.run.join_file, self._outer.hub
        line = None
        if self._options.join:
            line = JoinLine.parse(self._options.join)
        elif address is not None and file.exists():
            line = JoinLine.read(file)
        if address is None:
            if line is None:
                return None
            what = "a join line is given, but the run file also opens a hub"
            fix = f"outer.hub={line.address}"
        elif line is None:
            what = f"the hub is at {address}, and its join line is not known here"
            fix = "--join-file FILE, with the line that `isles hub` has written there"
        elif line.address != address:
            what = f"the join line is of {line.address}, and the run file names {address}"
            fix = "write the address of the line, or give --join-file with its line"
        else:
            return line
        where = self._loaded.where("outer.hub")
        raise UserError(what, where=where, fix=fix, id="join.line")

    def _take(self, line: ChildLine) -> None:
        # Show what a start prints, and record what it has started.
        if line.kind == "out" and line.text.startswith(STARTED):
            begun = read_started(
                line.text,
                where=f"cluster {line.child}",
                fix="see whether its run has started (isles status), and try it alone: "
                f"isles train --cluster {line.child}",
            )
            old = self.run.cluster(line.child)
            new = replace(old, path=begun.path, ssh=begun.ssh, attempt=begun.attempt)
            self.run = self.run.having(new)
            self.run.write()
            self._begun.add(line.child)
        elif line.kind == "out":
            self._options.print_line(f"{line.child} | {line.text}")
        elif line.kind == "err" and line.text.startswith("warning: "):
            text = self._with_keys(line.child, line.text.removeprefix("warning: "))
            self._options.warn(f"{line.child}: {text}")

    def _undo(self) -> None:
        if self._begun:
            self._options.print_line(f"ending again: {', '.join(sorted(self._begun))}")
            places = {name: place_of(self.run.cluster(name)) for name in self._begun}
            more = ["--now", f"--output-dir={self.run.path.parent}"]
            commands = {name: ["stop", place, *more] for name, place in places.items()}
            for name, end in run_all(
                commands, doing="ending", print_line=self._options.print_line
            ).items():
                if end.code:
                    words = " ".join(end.err).removeprefix("error: ")
                    self._options.warn(f"{name} still runs ({places[name]}): {words}")
        if self._opened_hub:
            end_hub(self.run.state)


class ClustersFollower(Follower):
    """Follows all clusters of a run until they end: one stream, each line with its cluster's name.

    Args:
        running: clusters that ran before. Only their new output is shown.
    """

    def __init__(
        self, run: MultiClusterRun, running: Iterable[str], console: Console, errors: Console
    ) -> None:
        super().__init__(run.name, typed_name(run), console, errors)
        self._run = run
        self._codes: dict[str, int] = {}
        self._was_interrupted = False
        self._is_over = threading.Event()
        self._width = max(len(name) for name in [*(c.name for c in run.clusters), "hub"])
        self._children = Children()
        begun = set(running)
        for cluster in run.clusters:
            if cluster.path and cluster.launcher != "manual":
                words = ["follow", place_of(cluster), "--attempt", str(cluster.attempt)]
                words += ["--stdin", f"--output-dir={run.path.parent}"]
                words += ["--begun"] if cluster.name in begun else []
                self._children.start(cluster.name, isles_argv(words))
        if run.meets:
            # In a thread: a hub that hangs must not hold up Ctrl+C.
            threading.Thread(target=self._ask_hub, daemon=True).start()

    def look(self) -> int | None:
        order = [cluster.name for cluster in self._run.clusters]
        while self._children.left and (line := self._children.next(0)) is not None:
            if line.kind == "end":
                self._codes[line.child] = line.code
                continue
            text = line.text
            if line.kind == "err" and line.child in order:
                text = keys_of_cluster(text, order.index(line.child))
            console = self.errors if line.kind == "err" else self.console
            console.print_lines([f"{line.child.ljust(self._width)} | {text}"])
        if self._children.left:
            return None
        self._is_over.set()
        states = {report.state for report in cluster_reports(self._run).values()}
        # "new": of launcher manual, whose commands are still to be typed.
        if states.isdisjoint({*ALIVE, "new"}) and self._run.meets and not self._run.hub:
            end_hub(self._run.state)
        lines, code = outcome_lines(self._run, self._codes)
        self.console.print_lines(lines)
        return code

    def handle(self, number: signal.Signals) -> int | None:
        if number == signal.SIGINT and not self._was_interrupted:
            self._was_interrupted = True
            self.print_line("stopping all clusters; Ctrl+C again stops them now")
        self._children.send(f"{WORDS[number]}\n")
        return None

    def close(self) -> None:
        self._is_over.set()
        self._children.send("", is_last=True)

    def _ask_hub(self) -> None:
        news = HubNews(lambda: hub_line(self._run), self._run.started_at)
        while not self._is_over.wait(_HUB_POLL_S):
            for _, kind, text in news.look():
                # Once all clusters have finished, the hub ends by itself.
                is_end = kind == "silent" and (news.is_over or self._is_over.is_set())
                if kind not in _QUIET_NEWS and not is_end:
                    self._children.put(ChildLine("hub", "err" if kind == "silent" else "out", text))
                if kind == "silent" and not is_end:
                    self._children.put(ChildLine("hub", "err", self._reopen_hub()))

    def _reopen_hub(self) -> str:
        if self._run.hub:
            return f"open it again at {self._run.hub}: isles hub"
        try:
            is_new = reopen_hub(self._run.state)
        except UserError as error:
            return f"it does not start again: {error}"
        return "it had died, and is started again" if is_new else "it runs; waiting for it"
