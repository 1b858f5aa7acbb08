"""Operations on a node during a start, requested over a channel: `python -m` this module.

The first node of the list also checks the files of the run file, and makes the run directory.
Processes that `start` starts are in separate sessions; until `keep` has come, they end with the
connection, so that a start is complete or leaves nothing behind. Needs no torch.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from isles.errors import ExitCode, PreflightError, UserError
from isles.facts.terminal import show_streams
from isles.launch.ssh.channel import Channel, Operation, error_words, serve
from isles.launch.ssh.environment import path_elsewhere
from isles.launch.ssh.facts import node_facts
from isles.launch.ssh.shell import start_detached
from isles.run.entry import make_own_folder, open_own_file, require_own
from isles.run.env import settle_home
from isles.run.nodes import Fleet
from isles.run.outcome import end, error_record
from isles.run.paths import Attempt, RunDir
from isles.run.process import ProcessId
from isles.run.records import (
    explain_write_errors,
    read_record,
    write_record,
    write_secret,
    write_text_atomic,
)
from isles.run.stop import kill_now

FORGOTTEN_AFTER_S = 30.0
"""Seconds without a request after which a node ends a start that is not kept."""

_LOOK_S = 0.05
_END_S = 10.0
_TAIL_LINES = 15


class NodeStart:
    """One node's part in the start of a run."""

    def __init__(self) -> None:
        self._attempt: Attempt | None = None
        self._agent: tuple[subprocess.Popen[bytes], ProcessId] | None = None
        self._is_first = False
        self._is_kept = False
        self._is_given_up = False
        self._asked_at = 0.0
        self._image: Channel | None = None
        self._image_lock = threading.Lock()
        self._lock = threading.Lock()

    def operations(self) -> dict[str, Operation]:
        """Operations by name, for `serve`."""
        return {
            "facts": self._inside("facts", node_facts),
            "issues": self._inside("issues", issues),
            "second": second,
            "begin": self.begin,
            "start": self.start,
            "ping": self.ping,
            "keep": self.keep,
            "end": self.end,
        }

    def _inside(self, name: str, work: Operation) -> Operation:
        # If the node has a container, requests for Python go to the container's Python.
        def answer(args: dict[str, Any]) -> dict[str, Any]:
            from isles.launch.container.image import ANSWER_S, open_image

            container = args.pop("container", None)
            if container is None:
                return work(args)
            with self._image_lock:
                self._image = self._image or open_image(container)
            return {
                **self._image.call(name, timeout_s=ANSWER_S, **args),
                "image": container["image"],
            }

        return answer

    def close(self) -> None:
        """End everything that was not kept, after the connection has ended."""
        if self._image is not None:
            self._image.close()
        if not self._is_kept:
            self.end(
                {
                    "what": "the machine that starts the run disconnected before all hosts had "
                    "started"
                }
            )

    def begin(self, args: dict[str, Any]) -> dict[str, Any]:
        """Make or choose the run directory; called only on the first node.

        Args:
            args: `resolved` and `text`, the texts of both files; `resume`; `join`, a secret for
                the run directory; `typed`, see `new_attempt`; `fleet`, a record; `dry_run`: only
                describe the start.

        Returns:
            run_dir, elsewhere (the same on the other nodes), attempt (a number), note,
            resumed_from, begun_at, born_at (both together identify the attempt and the run on every
            node), fleet; token, the secret of the attempt.
        """
        from isles.config.resolve import load_resolved
        from isles.launch.base import next_attempt
        from isles.run.begin import begin_attempt
        from isles.run.choose import choose_run

        resolved = load_resolved(args["resolved"])
        if args["dry_run"]:
            begun = choose_run(resolved, args["resume"])
            attempt = next_attempt(begun.run_dir)
        else:
            begun, attempt = begin_attempt(
                resolved, args["text"], args["resume"], join=args["join"], typed=args["typed"]
            )
        path = begun.run_dir.path.absolute()
        found = {
            "run_dir": str(path),
            "elsewhere": path_elsewhere(path, resolved.config),
            "attempt": attempt.number,
            "note": begun.note,
            "resumed_from": str(begun.resume_from.absolute()) if begun.resume_from else None,
        }
        fleet = Fleet.of({**args["fleet"], "resume_from": found["resumed_from"]})
        if not args["dry_run"]:
            self._attempt, self._is_first = attempt, True
            with explain_write_errors(attempt.path):
                fleet.write(attempt)
            first = read_record(begun.run_dir.attempts()[0].launch) or {}
            found["begun_at"] = (read_record(attempt.launch) or {}).get("begun_at")
            found["born_at"] = first.get("begun_at")
            found["token"] = attempt.token.read_text(encoding="utf-8").strip()
            self._watch()
        return {**found, "fleet": fleet.record()}

    def start(self, args: dict[str, Any]) -> dict[str, Any]:
        """Start this node's agent, and wait until all its ranks have started, or start_timeout is
        over. In the latter case the agents themselves report the missing nodes.

        Args:
            args: the result of `begin`; `resolved` and `text` as there; `node`, its number;
                `variables` of the environment, which do not override existing ones.

        Returns:
            process: the record of the agent.
        """
        fleet, node = Fleet.of(args["fleet"]), int(args["node"])
        path = args["run_dir"] if self._is_first else args["elsewhere"]
        run_dir = RunDir(Path(path).expanduser())
        self._attempt = attempt = run_dir.attempt(args["attempt"])
        is_shared = self._is_first or make_place(run_dir, attempt, args)
        command = [sys.executable, "-m", "isles.agent", str(run_dir.path)]
        command += ["--attempt", str(attempt.number)]
        command += [] if self._is_first else ["--node", str(node)]
        log = attempt.agent_log if self._is_first else attempt.node_log(node)
        with self._lock:
            if self._is_given_up:
                raise UserError("the start was given up")
            with explain_write_errors(log), log.open("ab") as stream:
                environ = {**args["variables"], **os.environ}
                child = start_detached(command, environ, stream, attempt.path)
            process = ProcessId.of(child.pid)
            self._agent = (child, process)
            if self._is_first or not is_shared:
                _write_launch(attempt, process, fleet, command)
        self._watch()
        deadline = time.monotonic() + fleet.start_timeout_s
        while not attempt.outcome.exists() and time.monotonic() < deadline:
            if _ranks_here(attempt) >= fleet[node].nproc:
                break
            if (code := child.poll()) is not None:
                tail = log.read_text(encoding="utf-8", errors="replace").splitlines()
                words = [f"    {line}" for line in tail[-_TAIL_LINES:] or ["(no output)"]]
                raise PreflightError(
                    f"the agent exited with code {code} before its ranks had started; its last "
                    "output was:\n" + "\n".join(words),
                    fix="fix the error above; isles check finds more problems",
                    id="start.failed",
                )
            time.sleep(_LOOK_S)
        return {"process": process.record()}

    def ping(self, args: dict[str, Any]) -> dict[str, Any]:
        """Heartbeat of the machine that starts the run."""
        self._asked_at = time.monotonic()
        return {}

    def keep(self, args: dict[str, Any]) -> dict[str, Any]:
        """Confirm that all nodes have started: the run continues without this process.

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
        """End everything that was started on this node; on the first node the attempt gets its
        outcome.

        Args:
            args: `what`, `where` and `fix` of the error; `exit_code`.
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
                    fix=args.get("fix", "start it again with `isles train`"),
                    is_communication=False,
                )
                reason = f"the run was not started: {args['what']}"
                end(self._attempt, "failed", error["exit_code"], reason, error=error)
            if self._agent is not None:
                # It was killed already; waiting only reaps it.
                with suppress(subprocess.TimeoutExpired):
                    self._agent[0].wait(timeout=_END_S)
                self._agent = None
        return {}

    def _watch(self) -> None:
        self._asked_at = time.monotonic()
        threading.Thread(target=self._end_if_forgotten, daemon=True).start()

    def _end_if_forgotten(self) -> None:
        # A dead connection may be noticed after hours. This process ends then in any case.
        while (left := self._asked_at + FORGOTTEN_AFTER_S - time.monotonic()) > 0:
            time.sleep(left)
        if not self._is_kept and not self._is_given_up:
            what = "no message from the machine that starts the run"
            self.end(
                {"what": f"{what} for {FORGOTTEN_AFTER_S:.0f} s, before all hosts had started"}
            )
        with self._lock:  # another thread may be in `end`
            os._exit(ExitCode.PREFLIGHT)


def issues(args: dict[str, Any]) -> dict[str, Any]:
    """Files, packages and servers of trackers in the run file that the first node lacks.

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
    from isles.run.env import huggingface_cache
    from isles.run.packages import require_packages

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
    found += shape_issues(loaded, huggingface_cache())
    return {"issues": [error_words(issue) for issue in found or huggingface_issues(loaded)]}


def second(args: dict[str, Any]) -> dict[str, Any]:
    """Refuse a start, with a UserError, if the run is already running.

    Args:
        args: `output_dir`, `name` and `resume`.
    """
    from isles.run.choose import refuse_second

    refuse_second(Path(args["output_dir"]).expanduser(), args["name"], args["resume"])
    return {}


def _write_launch(attempt: Attempt, process: ProcessId, fleet: Fleet, command: list[str]) -> None:
    from isles.run.begin import claim_of

    record = {
        "attempt": attempt.number,
        **process.record(),
        "world_size": fleet.world_size,
        "device": fleet.device,
        "command": command,
        **claim_of(attempt),  # its time identifies the attempt
        "resumed_from": fleet.resume_from,
        "launcher": fleet.launcher,
        "hosts": [node.ssh for node in fleet.nodes],
    }
    with explain_write_errors(attempt.path):
        write_record(attempt.launch, record)


def _ranks_here(attempt: Attempt) -> int:
    # Ranks on this host that have started, by the records that they write first.
    host = os.uname().nodename
    records = (read_record(path) or {} for path in attempt.path.glob("rank-*.json"))
    return sum(record.get("host") == host for record in records)


def make_place(run_dir: RunDir, attempt: Attempt, args: dict[str, Any]) -> bool:
    """Make the folder of an attempt on a node other than the first.

    Args:
        run_dir: the run directory on this node.
        attempt: the attempt.
        args: `begun_at` and `born_at` of the attempt and the run; `fleet`, `resolved`, `text`;
            `token`, the secret of the attempt.

    Returns:
        Whether it existed: the first node's own folder, on a shared file system, or the folder of
        another node, on a disk that both nodes share.

    Raises:
        UserError: the folder belongs to another run of this node, or cannot be written.
    """
    path = run_dir.path
    mark = {"first_node": args["fleet"]["nodes"][0]["name"], "born_at": args["born_at"]}
    with explain_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Only nodes of the same user share a lock, so another user cannot block it.
        lock_file = path.with_name(f".{path.name}.{os.geteuid()}.lock")
        with open_own_file(lock_file, os.O_WRONLY | os.O_CREAT) as lock:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(lock, fcntl.LOCK_EX)
            require_own(path)
            # This record is written last: if it exists, the folder is complete.
            if (read_record(attempt.launch) or {}).get("begun_at") == args["begun_at"]:
                return True
            left = read_record(run_dir.node_of)
            there = path.iterdir() if path.exists() else ()
            # Hidden: the unfinished folder of a process that was killed here.
            if left is None and not all(entry.name.startswith(".") for entry in there):
                raise UserError(
                    "this folder belongs to another run on this host",
                    where=str(path),
                    fix="move it away, or change name or output_dir in the run file",
                    id="run.elsewhere",
                )
            # Left by another run of a first node, or by an older attempt with this number.
            for old, is_old in ((path, left not in (None, mark)), (attempt.path, True)):
                if is_old and old.exists():
                    aside = old.with_name(f".old.{os.geteuid()}")
                    make_own_folder(aside)
                    old.rename(aside / f"{old.name}-{time.time_ns()}")
            make_own_folder(path)
            write_record(run_dir.node_of, mark)
            write_text_atomic(run_dir.resolved, args["resolved"])
            write_text_atomic(run_dir.run_file, args["text"])
            attempt.path.mkdir(parents=True)
            Fleet.of(args["fleet"]).write(attempt)
            write_secret(attempt.token, args["token"])
            write_record(attempt.launch, {"attempt": attempt.number, "begun_at": args["begun_at"]})
    return False


def main() -> int:
    settle_home()
    start = NodeStart()
    try:
        return serve(start.operations())
    finally:
        start.close()


if __name__ == "__main__":
    show_streams()
    code = main()
    os._exit(code)
