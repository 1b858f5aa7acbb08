"""What a node is asked to do when a run is started on it: the operations beside its facts.

The first node of the list, the head, also looks for the files that the run file names, and makes
the run directory. What `start` starts lives in sessions of its own; until `keep` has come it ends
with the connection, so that a start is whole or leaves nothing behind.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from isles.errors import ExitCode, UserError
from isles.launch.ssh.environment import path_elsewhere
from isles.launch.ssh.node import make_place
from isles.run.nodes import Fleet
from isles.run.outcome import end, error_record
from isles.run.paths import Attempt, RunDir
from isles.run.process import ProcessId
from isles.run.records import clear_errors, read_record, write_record
from isles.run.stop import kill_now

FORGOTTEN_AFTER_S = 30.0
"""A start that has not been heard of for so long, and is not kept, is ended by its nodes."""

_LOOK_S = 0.05
_END_S = 10.0
_TAIL_LINES = 15


class NodeStart:
    """One node's part in the start of one run."""

    def __init__(self) -> None:
        """Nothing is started."""
        self._attempt: Attempt | None = None
        self._children: dict[str, tuple[subprocess.Popen[bytes], ProcessId, Path]] = {}
        self._is_head = False
        self._is_kept = False
        self._is_given_up = False
        self._heard_at = 0.0
        self._lock = threading.Lock()

    def operations(self) -> dict[str, Callable[[dict[str, Any]], dict[str, Any]]]:
        """By name, for `isles.launch.ssh.node.serve`."""
        return {
            "faults": faults,
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
        """Make or choose the run directory; only the head is asked.

        Args:
            args: `resolved` and `text`, both files word for word; `resume`; `join`, a secret for
                the run directory; `typed`, see `new_attempt`; `fleet`, a record; `dry_run`: only
                say what would be done.

        Returns:
            run_dir, elsewhere (the same on the other nodes), attempt (a number), note,
            resumed_from, begun_at, born_at (both together name the attempt and the run wherever
            they are), fleet; token, the secret of the attempt.
        """
        from isles.config.resolve import load_resolved
        from isles.run.begin import begin_run, choose_run, new_attempt

        resolved = load_resolved(args["resolved"])
        if args["dry_run"]:
            begun = choose_run(resolved, args["resume"])
            last = begun.run_dir.last_attempt()
            attempt = begun.run_dir.attempt(last.number + 1 if last else 1)
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
            self._attempt, self._is_head = attempt, True
            with clear_errors(attempt.path):
                fleet.write(attempt)
            first = read_record(begun.run_dir.attempts()[0].launch) or {}
            found["begun_at"] = (read_record(attempt.launch) or {}).get("begun_at")
            found["born_at"] = first.get("begun_at")
            found["token"] = attempt.token.read_text(encoding="utf-8").strip()
            self._watch()
        return {**found, "fleet": fleet.record()}

    def start(self, args: dict[str, Any]) -> dict[str, Any]:
        """Start this node's processes.

        Args:
            args: what `begin` has returned; `resolved` and `text` as there; `node`, its number;
                `variables` of the environment, which give way to those that are there.

        Returns:
            process: the record of the node's agent; `is_shared`: whether the run directory is
            the head's.
        """
        fleet, node = Fleet.of(args["fleet"]), int(args["node"])
        path = args["run_dir"] if self._is_head else args["elsewhere"]
        run_dir = RunDir(Path(path).expanduser())
        attempt = run_dir.attempt(args["attempt"])
        is_shared = self._is_head
        if not self._is_head:
            is_shared = make_place(run_dir, attempt, args)
        self._attempt = attempt
        environ = {**args["variables"], **os.environ}
        where = (str(run_dir.path), "--attempt", str(attempt.number))
        with self._lock:
            if self._is_given_up:
                raise UserError("the start was given up")
            # The first node's agent coordinates the run as well.
            words = () if self._is_head else ("--node", str(node))
            command = (sys.executable, "-m", "isles.agent", *where, *words)
            log = attempt.agent_log if self._is_head else attempt.node_log(node)
            agent = self._spawn("agent", command, log, environ)
            if self._is_head or not is_shared:
                self._write_launch(agent, fleet, command)
        self._watch()
        return {"process": agent.record(), "is_shared": is_shared}

    def wait(self, args: dict[str, Any]) -> dict[str, Any]:
        """Wait for a while until all ranks of this node have begun, or one of its processes ended.

        Args:
            args: `timeout_s`; `nproc`, the ranks of this node.

        Returns:
            `has_begun`: whether they have, or the run has ended already; `ended`: None, or what
            has ended here, with `code` and `tail`, its last words.
        """
        attempt = self._attempt
        assert attempt is not None
        self._heard_at = time.monotonic()
        deadline = self._heard_at + float(args["timeout_s"])
        while True:
            if attempt.outcome.exists() or _ranks_here(attempt) >= int(args["nproc"]):
                return {"has_begun": True, "ended": None}
            for name, (child, _, log) in list(self._children.items()):
                if child.poll() is not None:
                    last = {"code": child.returncode, "tail": _tail(log)}
                    return {"has_begun": False, "ended": name, **last}
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
        if self._is_head and record is not None:
            write_record(self._attempt.launch, {**record, "nodes": args["nodes"]})
        return {}

    def end(self, args: dict[str, Any]) -> dict[str, Any]:
        """End what was started here; on the head the attempt gets its outcome.

        Args:
            args: `what` went wrong, `where`, `fix`; `exit_code`.
        """
        with self._lock:
            self._is_given_up = True
            # All at once: an agent that outlives the coordinator would say how the run has ended.
            for _, process, _ in self._children.values():
                kill_now(process)
            attempt = self._attempt
            if self._is_head and attempt is not None:
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
                end(attempt, "failed", error["exit_code"], reason, error=error)
            for child, _, _ in self._children.values():
                # Killed it is; that it is seen to end late must not cost the record below.
                with suppress(subprocess.TimeoutExpired):
                    child.wait(timeout=_END_S)
            self._children.clear()
        return {}

    def _watch(self) -> None:
        """From now on somebody must be heard of now and then, until `keep`."""
        self._heard_at = time.monotonic()
        threading.Thread(target=self._end_if_forgotten, daemon=True).start()

    def _end_if_forgotten(self) -> None:
        """End what is not kept when nothing is heard: a dead line may take hours to be noticed.

        This process ends then in any case: it has nothing more to do.
        """
        while time.monotonic() - self._heard_at <= FORGOTTEN_AFTER_S:
            time.sleep(_LOOK_S)
        if not self._is_kept and not self._is_given_up:
            what = "the machine that started the run was not heard of any more"
            self.end({"what": f"{what} for {FORGOTTEN_AFTER_S:.0f} s, before all hosts had"})
        with self._lock:  # another thread may be at it
            os._exit(ExitCode.PREFLIGHT)

    def _spawn(
        self, name: str, command: tuple[str, ...], log: Path, environ: dict[str, str]
    ) -> ProcessId:
        with clear_errors(log), log.open("ab") as stream:
            child = subprocess.Popen(
                command,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        process = ProcessId.of(child.pid)
        self._children[name] = (child, process, log)
        return process

    def _write_launch(self, process: ProcessId, fleet: Fleet, command: tuple[str, ...]) -> None:
        assert self._attempt is not None
        from isles.run.begin import claim_of

        record = {
            "attempt": self._attempt.number,
            **process.record(),
            "world_size": fleet.world_size,
            "device": fleet.device,
            "command": list(command),
            **claim_of(self._attempt),  # its moment names the attempt
            "resumed_from": fleet.resume_from,
            "launcher": fleet.launcher,
            "hosts": [node.ssh for node in fleet.nodes],
        }
        with clear_errors(self._attempt.path):
            write_record(self._attempt.launch, record)


def faults(args: dict[str, Any]) -> dict[str, Any]:
    """What the head lacks that the run file names: files, packages, trackers' servers.

    Args:
        args: `config`, `origins`, `text` and `path` of a loaded run file.

    Returns:
        faults: what, where, fix and id of each.
    """
    from isles.config.files import data_faults, deepspeed_faults, shape_faults
    from isles.config.load import Loaded
    from isles.config.sections.model import missing_package
    from isles.config.sections.run import RunConfig
    from isles.launch.huggingface import hub_faults
    from isles.run.begin import require_packages
    from isles.run.env import hub_cache

    config = RunConfig.model_validate(args["config"])
    loaded = Loaded(config, args["origins"], args["text"], Path(args["path"]))
    found: list[UserError] = []
    try:
        require_packages(config)
    except UserError as error:
        found.append(error)
    if fault := missing_package(config.adapter):
        found.append(fault)
    found += [*data_faults(loaded), *deepspeed_faults(loaded)]
    found += shape_faults(loaded, hub_cache())
    found = found or [*hub_faults(loaded)]
    return {"faults": [_words(f) for f in found]}


def second(args: dict[str, Any]) -> dict[str, Any]:
    """Whether a start would be refused because the run is on its way already.

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
        return {"refusal": _words(error)}
    return {"refusal": None}


def _words(error: UserError) -> dict[str, str]:
    return {"what": error.what, "where": error.where, "fix": error.fix, "id": error.id}


def _ranks_here(attempt: Attempt) -> int:
    """Ranks on this host that have begun, by the records that they write first."""
    host = os.uname().nodename
    records = (read_record(path) or {} for path in attempt.path.glob("rank-*.json"))
    return sum(record.get("host") == host for record in records)


def _tail(log: Path) -> list[str]:
    try:
        return log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
    except OSError:
        return []
