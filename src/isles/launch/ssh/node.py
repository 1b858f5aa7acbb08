"""What a node does while a run is started on it, asked over a channel: `python -m` this module.

The first node of the list also looks for the files that the run file names, and makes the run
directory. What `start` starts lives in sessions of its own; until `keep` has come it ends with the
connection, so that a start is whole or leaves nothing behind. Needs no torch.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from errno import EEXIST, ENOENT, ENOTEMPTY
from pathlib import Path
from typing import Any

from isles.errors import ExitCode, UserError
from isles.launch.ssh.channel import Operation, error_words, serve
from isles.launch.ssh.environment import path_elsewhere
from isles.launch.ssh.facts import node_facts
from isles.launch.ssh.shell import start_detached
from isles.run.nodes import Fleet
from isles.run.outcome import end, error_record
from isles.run.paths import Attempt, RunDir
from isles.run.process import ProcessId
from isles.run.records import (
    clear_errors,
    read_record,
    write_record,
    write_secret,
    write_text_atomic,
)
from isles.run.stop import kill_now

FORGOTTEN_AFTER_S = 30.0
"""A node ends a start that is not kept when it has not been asked anything for so long."""

_LOOK_S = 0.05
_END_S = 10.0
_TAIL_LINES = 15
_TRIES = 20


class NodeStart:
    """One node's part in the start of one run."""

    def __init__(self) -> None:
        self._attempt: Attempt | None = None
        self._agent: tuple[subprocess.Popen[bytes], ProcessId, Path] | None = None
        self._is_first = False
        self._is_kept = False
        self._is_given_up = False
        self._asked_at = 0.0
        self._lock = threading.Lock()

    def operations(self) -> dict[str, Operation]:
        """By name, for `serve`."""
        return {
            "facts": node_facts,
            "issues": issues,
            "second": second,
            "begin": self.begin,
            "start": self.start,
            "wait": self.wait,
            "keep": self.keep,
            "end": self.end,
        }

    def close(self) -> None:
        """The connection is gone: what was not kept ends."""
        if not self._is_kept:
            self.end({"what": "the machine that started the run was lost before all hosts had"})

    def begin(self, args: dict[str, Any]) -> dict[str, Any]:
        """Make or choose the run directory; only the first node is asked.

        Args:
            args: `resolved` and `text`, the texts of both files; `resume`; `join`, a secret for
                the run directory; `typed`, see `new_attempt`; `fleet`, a record; `dry_run`: only
                say what would be done.

        Returns:
            run_dir, elsewhere (the same on the other nodes), attempt (a number), note,
            resumed_from, begun_at, born_at (both together name the attempt and the run wherever
            they are), fleet; token, the secret of the attempt.
        """
        from isles.config.resolve import load_resolved
        from isles.launch.base import next_attempt
        from isles.run.begin import begin_run, choose_run, new_attempt

        resolved = load_resolved(args["resolved"])
        if args["dry_run"]:
            begun = choose_run(resolved, args["resume"])
            attempt = next_attempt(begun.run_dir)
        else:
            begun = begin_run(resolved, args["text"], args["resume"], join=args.get("join", ""))
            attempt = new_attempt(begun.run_dir, args["text"], typed=args.get("typed", ""))
        found = {
            "run_dir": str(begun.run_dir.path.absolute()),
            "elsewhere": path_elsewhere(begun.run_dir.path.absolute(), resolved.config),
            "attempt": attempt.number,
            "note": begun.note,
            "resumed_from": str(begun.resume_from.absolute()) if begun.resume_from else None,
        }
        fleet = Fleet.of({**args["fleet"], "resume_from": found["resumed_from"]})
        if not args["dry_run"]:
            self._attempt, self._is_first = attempt, True
            with clear_errors(attempt.path):
                fleet.write(attempt)
            first = read_record(begun.run_dir.attempts()[0].launch) or {}
            found["begun_at"] = (read_record(attempt.launch) or {}).get("begun_at")
            found["born_at"] = first.get("begun_at")
            found["token"] = attempt.token.read_text(encoding="utf-8").strip()
            self._watch()
        return {**found, "fleet": fleet.record()}

    def start(self, args: dict[str, Any]) -> dict[str, Any]:
        """Start this node's agent; the first node's coordinates the run as well.

        Args:
            args: what `begin` has returned; `resolved` and `text` as there; `node`, its number;
                `variables` of the environment, which give way to those that are there.

        Returns:
            process: the record of the agent.
        """
        fleet, node = Fleet.of(args["fleet"]), int(args["node"])
        path = args["run_dir"] if self._is_first else args["elsewhere"]
        run_dir = RunDir(Path(path).expanduser())
        attempt = run_dir.attempt(args["attempt"])
        is_shared = self._is_first or make_place(run_dir, attempt, args)
        self._attempt = attempt
        command = [sys.executable, "-m", "isles.agent", str(run_dir.path)]
        command += ["--attempt", str(attempt.number)]
        command += [] if self._is_first else ["--node", str(node)]
        log = attempt.agent_log if self._is_first else attempt.node_log(node)
        with self._lock:
            if self._is_given_up:
                raise UserError("the start was given up")
            with clear_errors(log), log.open("ab") as stream:
                environ = {**args["variables"], **os.environ}
                child = start_detached(command, environ, stream, attempt.path)
            process = ProcessId.of(child.pid)
            self._agent = (child, process, log)
            if self._is_first or not is_shared:
                self._write_launch(attempt, process, fleet, command)
        self._watch()
        return {"process": process.record()}

    def wait(self, args: dict[str, Any]) -> dict[str, Any]:
        """Wait for a while until all ranks of this node have begun, or its agent has ended.

        Args:
            args: `timeout_s`; `nproc`, the ranks of this node.

        Returns:
            `has_begun`: whether they have, or the run has ended already; `ended`: None, or what
            has ended here, with `code` and `tail`, its last words.
        """
        attempt = self._attempt
        assert attempt is not None
        self._asked_at = time.monotonic()
        deadline = self._asked_at + float(args["timeout_s"])
        while True:
            if attempt.outcome.exists() or _ranks_here(attempt) >= int(args["nproc"]):
                return {"has_begun": True, "ended": None}
            if self._agent is not None and (code := self._agent[0].poll()) is not None:
                tail: list[str] = []
                with suppress(OSError):
                    text = self._agent[2].read_text(encoding="utf-8", errors="replace")
                    tail = text.splitlines()[-_TAIL_LINES:]
                return {"has_begun": False, "ended": "agent", "code": code, "tail": tail}
            if time.monotonic() > deadline:
                return {"has_begun": False, "ended": None}
            time.sleep(_LOOK_S)

    def keep(self, args: dict[str, Any]) -> dict[str, Any]:
        """All nodes have started: the run goes on without this process.

        Args:
            args: `nodes`, the records of all agents.
        """
        assert self._attempt is not None
        self._is_kept = True
        record = read_record(self._attempt.launch)
        if self._is_first and record is not None:
            write_record(self._attempt.launch, {**record, "nodes": args["nodes"]})
        return {}

    def end(self, args: dict[str, Any]) -> dict[str, Any]:
        """End what was started here; on the first node the attempt gets its outcome.

        Args:
            args: `what` went wrong, `where`, `fix`; `exit_code`.
        """
        with self._lock:
            self._is_given_up = True
            if self._agent is not None:
                kill_now(self._agent[1])
            if self._is_first and self._attempt is not None:
                error = error_record(
                    args["what"],
                    id=args.get("id", "start.failed"),
                    kind="StartFailed",
                    code=ExitCode(int(args.get("exit_code", ExitCode.PREFLIGHT))),
                    where=args.get("where", ""),
                    fix=args.get("fix", "`isles train` starts it again"),
                    is_communication=False,
                )
                reason = f"it was not started: {args['what']}"
                end(self._attempt, "failed", error["exit_code"], reason, error=error)
            if self._agent is not None:
                # It is killed already; waiting only reaps it.
                with suppress(subprocess.TimeoutExpired):
                    self._agent[0].wait(timeout=_END_S)
                self._agent = None
        return {}

    def _watch(self) -> None:
        self._asked_at = time.monotonic()
        threading.Thread(target=self._end_if_forgotten, daemon=True).start()

    def _end_if_forgotten(self) -> None:
        # A dead connection may take hours to be noticed. This process ends then in any case.
        while time.monotonic() - self._asked_at <= FORGOTTEN_AFTER_S:
            time.sleep(_LOOK_S)
        if not self._is_kept and not self._is_given_up:
            what = "the machine that started the run was not heard of any more"
            self.end({"what": f"{what} for {FORGOTTEN_AFTER_S:.0f} s, before all hosts had"})
        with self._lock:  # another thread may be in `end`
            os._exit(ExitCode.PREFLIGHT)

    def _write_launch(
        self, attempt: Attempt, process: ProcessId, fleet: Fleet, command: list[str]
    ) -> None:
        from isles.run.begin import claim_of

        record = {
            "attempt": attempt.number,
            **process.record(),
            "world_size": fleet.world_size,
            "device": fleet.device,
            "command": command,
            **claim_of(attempt),  # its moment names the attempt
            "resumed_from": fleet.resume_from,
            "launcher": fleet.launcher,
            "hosts": [node.ssh for node in fleet.nodes],
        }
        with clear_errors(attempt.path):
            write_record(attempt.launch, record)


def issues(args: dict[str, Any]) -> dict[str, Any]:
    """What the first node lacks that the run file names: files, packages, trackers' servers.

    Args:
        args: `config`, `origins`, `text` and `path` of a loaded run file.

    Returns:
        issues: what, where, fix and id of each.
    """
    from isles.config.files import data_issues, deepspeed_issues, shape_issues
    from isles.config.load import Loaded
    from isles.config.sections.model import missing_package
    from isles.config.sections.run import RunConfig
    from isles.launch.huggingface import huggingface_issues
    from isles.run.begin import require_packages
    from isles.run.env import hub_cache

    config = RunConfig.model_validate(args["config"])
    loaded = Loaded(config, args["origins"], args["text"], Path(args["path"]))
    found: list[UserError] = []
    try:
        require_packages(config)
    except UserError as error:
        found.append(error)
    if issue := missing_package(config.adapter):
        found.append(issue)
    found += [*data_issues(loaded), *deepspeed_issues(loaded)]
    found += shape_issues(loaded, hub_cache())
    return {"issues": [error_words(issue) for issue in found or huggingface_issues(loaded)]}


def second(args: dict[str, Any]) -> dict[str, Any]:
    """Whether a start would be refused because the run is going on already.

    Args:
        args: `output_dir`, `name` and `resume`.

    Returns:
        refusal: its what, where, fix and id; None: it would not.
    """
    from isles.run.begin import refuse_second

    folder = Path(args["output_dir"]).expanduser()
    try:
        refuse_second(folder, args["name"], args["resume"])
    except UserError as error:
        return {"refusal": error_words(error)}
    return {"refusal": None}


def _ranks_here(attempt: Attempt) -> int:
    # Ranks on this host that have begun, by the records that they write first.
    host = os.uname().nodename
    records = (read_record(path) or {} for path in attempt.path.glob("rank-*.json"))
    return sum(record.get("host") == host for record in records)


def make_place(run_dir: RunDir, attempt: Attempt, args: dict[str, Any]) -> bool:
    """Make the folder of an attempt ready on a node other than the first.

    Args:
        run_dir: the run directory, where this node has it.
        args: `begun_at` and `born_at` of the attempt and the run; `fleet`, `resolved`, `text`;
            `token`, the secret of the attempt.

    Returns:
        Whether the first node's own folder is here, on a file system that they share.

    Raises:
        UserError: a run of this node's own is there, or the folder cannot be written.
    """
    with clear_errors(run_dir.path):
        for left in reversed(range(_TRIES)):
            launch = read_record(attempt.launch)
            if launch is not None and launch.get("begun_at") == args["begun_at"]:
                return True
            try:
                _make(run_dir, attempt, args)
            except OSError as error:
                # Another process makes it at this moment: here, or on a host that has this disk.
                if not left or error.errno not in (ENOENT, EEXIST, ENOTEMPTY):
                    raise
            else:
                return False
    raise AssertionError("the last try has raised")


def _make(run_dir: RunDir, attempt: Attempt, args: dict[str, Any]) -> None:
    # Each step is whole or not done; the folder of the attempt comes last, with all that it has.
    mark = {"first_node": args["fleet"]["nodes"][0]["name"], "born_at": args["born_at"]}
    _make_way(run_dir, mark)
    run_dir.path.mkdir(parents=True, exist_ok=True)
    write_record(run_dir.node_of, mark)
    attempt.path.parent.mkdir(exist_ok=True)
    if attempt.path.exists():  # an older attempt of this number
        place = _aside(attempt.path)
        attempt.path.rename(place)
        moved = read_record(Attempt(place, attempt.number).launch) or {}
        if moved.get("begun_at") == args["begun_at"]:
            # Another process has just made the one that is wanted, between two looks.
            place.rename(attempt.path)
    write_text_atomic(run_dir.resolved, args["resolved"])
    write_text_atomic(run_dir.run_file, args["text"])
    folder = tempfile.mkdtemp(prefix=f".{attempt.path.name}-", dir=attempt.path.parent)
    staged = Attempt(Path(folder), attempt.number)
    try:
        staged.path.chmod(0o755)
        Fleet.of(args["fleet"]).write(staged)
        write_secret(staged.token, args["token"])
        write_record(staged.launch, {"attempt": attempt.number, "begun_at": args["begun_at"]})
        staged.path.rename(attempt.path)
    except BaseException:
        shutil.rmtree(staged.path, ignore_errors=True)
        raise


def _make_way(run_dir: RunDir, mark: dict[str, Any]) -> None:
    # What another run of a first node has left goes aside, never a run of this node's own.
    if not run_dir.path.exists():
        return
    # Hidden: a record of another process that does the same at this moment.
    if all(entry.name.startswith(".") for entry in run_dir.path.iterdir()):
        return
    left = read_record(run_dir.node_of)
    if left == mark:
        return
    if left is None:
        raise UserError(
            "this host has a run of its own in this folder, which the run would write into",
            where=str(run_dir.path),
            fix="move it away, or give the run file another name or output_dir",
            id="run.elsewhere",
        )
    run_dir.path.rename(_aside(run_dir.path))


def _aside(path: Path) -> Path:
    folder = path.parent / ".old"
    folder.mkdir(exist_ok=True)
    return folder / f"{path.name}-{time.time_ns()}"


def main() -> int:
    start = NodeStart()
    try:
        return serve(start.operations())
    finally:
        start.close()


if __name__ == "__main__":
    code = main()
    os._exit(code)
