"""Agent of one node; on the first node, also the coordinator of the run: `python -m isles.agent`.

    python -m isles.agent RUN_DIR              the coordinator: the first node, or a job's script
    python -m isles.agent RUN_DIR --node K     the agent of a node that has the run's files
    python -m isles.agent HOST:PORT --node K   an agent that fetches them from the coordinator
    python -m isles.agent -                    reads arguments, then a token, from standard input

Launchers start it. If the run has a container, the process enters the container first and keeps its
pid. The first node's process is also the coordinator. In a job of a queue, and if several nodes are
processes of one machine, the coordinator is a separate process that starts the agents. SIGINT and
SIGTERM save and stop on all nodes, whichever node receives them.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from isles.agent.agent import Agent, AgentSignals, NodeLog
from isles.agent.connection import Connection, ask_token, fetch_run, versions
from isles.agent.server import LocalLink
from isles.agent.telemetry import Telemetry
from isles.agent.workers import RankStore, WorkerGroup, redirect_output
from isles.errors import UserError
from isles.facts.terminal import show_streams
from isles.launch.container.enter import Container, end_with_host, enter
from isles.launch.ssh.facts import interface_of
from isles.run.env import (
    ATTEMPT,
    RUN_DIR,
    is_in_container,
    is_sampled,
    job_node,
    rank_defaults,
    settle_home,
)
from isles.run.limits import raise_open_files
from isles.run.nodes import Fleet, FleetNode, read_fleet, require_nodes
from isles.run.outcome import agent_error, end_failed
from isles.run.paths import Attempt, RunDir
from isles.run.process import ProcessId

_LONGEST_FOLDER = 70
"""Maximum length of a folder's path for a Unix socket: the whole path has at most 107 bytes."""


def main() -> int:
    """Run to the end of the attempt; returns the run's exit code."""
    parser = argparse.ArgumentParser(prog="python -m isles.agent")
    parser.add_argument("target", help="RUN_DIR, or HOST:PORT of the coordinator")
    parser.add_argument("--attempt", type=int, help="default: the newest")
    parser.add_argument("--node", type=int, help="default: the first, or the job's own number")
    parser.add_argument("--nodes-file", type=Path, help="file with the nodes of a job")
    parser.add_argument(
        "--address", help="address of this node for the other nodes (by default the run's)"
    )
    parser.add_argument("--log", help="file for the output; %%n: the node's number")
    parser.add_argument("--check", metavar="HOST:PORT", help="only check this node of a job")
    parser.add_argument("--output-dir", type=Path, help="folder for the run's files from HOST:PORT")
    # A launcher that does not know the arguments yet writes them to standard input later.
    is_told = sys.argv[1:] == ["-"]
    settle_home()
    raise_open_files()  # the coordinator, the store and the ranks hold connections of all ranks
    options = parser.parse_args(shlex.split(sys.stdin.readline()) if is_told else None)
    try:
        log = options.log
        is_fetched = ":" in options.target and not Path(options.target).exists()
        if is_fetched:
            token, folder = ask_token(), options.output_dir
            run_dir, attempt = fetch_run(options.target, token, options.node, folder)
        else:
            run_dir = RunDir(Path(options.target).absolute())
            attempt = _attempt(run_dir, options.attempt)
        end_with_host()
        _enter_container(run_dir, attempt, options)
        if options.nodes_file is None and options.node is None:
            return _lead(run_dir, attempt)
        nodes = require_nodes(attempt, options.nodes_file)
        node = _own_node(nodes, options.node, attempt)
        if options.address:
            node = replace(node, address=options.address)
        if is_fetched and nodes.is_shared:
            log = str(attempt.node_log(node.node))
        if log:
            redirect_output(log.replace("%n", str(node.node)))
        if options.check:
            # The check of this node replaces this process.
            words = [sys.executable, "-m", "isles.check.step", str(run_dir.path)]
            words += ["--attempt", str(attempt.number), "--node", str(node.node)]
            words += ["--hosts", ",".join(each.name for each in nodes), "--master", options.check]
            os.execv(sys.executable, words)
        return _run(run_dir, attempt, nodes, node)
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return int(error.exit_code)


def _enter_container(run_dir: RunDir, attempt: Attempt, options: argparse.Namespace) -> None:
    # If the nodes of the run have a container, this process continues in it. The coordinator of a
    # job stays outside, because the commands of the queue are there.
    nodes = read_fleet(attempt, options.nodes_file)
    is_job = nodes is not None and nodes.in_job and options.nodes_file is None
    if nodes is None or nodes.container is None or is_job or is_in_container():
        return
    words = ["-m", "isles.agent", str(run_dir.path), "--attempt", str(attempt.number)]
    if options.nodes_file is not None or options.node is not None:
        node = _own_node(nodes, options.node, attempt).node
        words += ["--node", str(node)]
        if options.log:
            redirect_output(options.log.replace("%n", str(node)))
    words += ["--nodes-file", str(options.nodes_file)] if options.nodes_file else []
    words += ["--check", options.check] if options.check else []
    enter(Container.of(nodes.container), words, [Path.cwd(), run_dir.path])


def _lead(run_dir: RunDir, attempt: Attempt) -> int:
    # The coordinator, with the agent of the first node in this process if it has one.
    signals = AgentSignals(attempt)
    signals.install()
    from isles.agent.lead import Lead  # a slow import: it loads the config classes

    lead = Lead(run_dir, attempt, signals)
    code = lead.open()
    if code is not None:
        return code
    if lead.nodes.has_own_node:
        node = lead.nodes.first
        store = None if len(lead.nodes) == 1 else _store(node)
        link = lead.server.add_own(store.port if store else 0)
        lead.start()
        _serve(run_dir, attempt, lead.nodes, node, signals, link, store)
    else:
        lead.start()
    return lead.join()


def _run(run_dir: RunDir, attempt: Attempt, nodes: Fleet, node: FleetNode) -> int:
    # The agent of a node whose coordinator is another process.
    signals = AgentSignals(attempt)
    signals.install()
    # If the coordinator runs on none of the nodes, any node can be the first to train.
    store = _store(node) if node.node == 0 or not nodes.has_own_node else None
    hello = {
        "run": run_dir.name,
        "attempt": attempt.number,
        "digest": hashlib.sha256(run_dir.resolved.read_bytes()).hexdigest(),
        "node": node.node,
        "address": node.address,
        "process": ProcessId.of(os.getpid()).record(),
        "versions": versions(),
        "python": sys.executable,
        "store": store.port if store else 0,
    }
    # First of all, so that the others wait for this node and not for its imports.
    connection = Connection(
        "" if nodes.coordinator else nodes.first.name,
        (nodes.meets_at, nodes.port),
        hello,
        attempt.token.read_text(encoding="utf-8").strip(),
        start_timeout_s=nodes.start_timeout_s,
        may_return=nodes.is_elastic or nodes.are_replaced,
    )
    code = _serve(run_dir, attempt, nodes, node, signals, connection, store)
    if connection.state == "cut off" and nodes.is_shared and not attempt.outcome.exists():
        # The coordinator is gone and cannot record the run's outcome.
        fix = "it was killed, or the machine ran out of memory; run `dmesg | tail` there"
        end_failed(attempt, agent_error(connection.why, fix, id="run.coordinator"))
    return code


def _serve(
    run_dir: RunDir,
    attempt: Attempt,
    nodes: Fleet,
    node: FleetNode,
    signals: AgentSignals,
    connection: Connection | LocalLink,
    store: RankStore | None,
) -> int:
    # Apply the commands of the coordinator until the run ends.
    interface = node.interface or interface_of(node.address)
    os.environ.update(rank_defaults(device=nodes.device, nproc=node.nproc, interface=interface))
    is_own = isinstance(connection, LocalLink)
    agent_log = attempt.agent_log if is_own else attempt.node_log(node.node)
    node_log = NodeLog(run_dir, attempt, node.node, signals, agent_log)
    with node_log, _fork_server(run_dir, attempt) as scratch, ExitStack() as stack:
        workers = WorkerGroup(
            run_dir,
            attempt,
            node.nproc,
            scratch,
            in_job=nodes.in_job,
            hears=is_sampled(),
            store=store,
        )
        telemetry = None
        if is_sampled():
            file, ranks = run_dir.node_telemetry(node.node), workers.seen
            telemetry = Telemetry(run_dir.path, file, interface, node.nproc, ranks)
            stack.enter_context(telemetry)
        try:
            is_shared = is_own or nodes.is_shared
            return Agent(
                attempt, connection, workers, signals, telemetry, is_shared=is_shared
            ).run()
        finally:
            if store is not None:
                store.close()


def _store(node: FleetNode) -> RankStore | None:
    try:
        return RankStore(node.address)
    except OSError:
        return None  # this machine has no such address: the coordinator reports it


@contextmanager
def _fork_server(run_dir: RunDir, attempt: Attempt) -> Iterator[Path]:
    """Start the server that forks the ranks; yields a folder for its files."""
    # multiprocessing's socket is in this folder; the kernel limits the length of its path.
    is_long = len(tempfile.gettempdir()) > _LONGEST_FOLDER
    with tempfile.TemporaryDirectory(prefix="isles-", dir="/tmp" if is_long else None) as scratch:
        process: Any = multiprocessing.current_process()
        process._config["tempdir"] = scratch
        os.environ[RUN_DIR] = str(run_dir.path)
        os.environ[ATTEMPT] = str(attempt.number)
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")  # as torchrun does
        # The fork server imports torch and the model's code once for all ranks, of all restarts;
        # this process never does.
        forkserver.set_forkserver_preload(["isles.train.preload"])
        forkserver.ensure_running()
        yield Path(scratch)


def _attempt(run_dir: RunDir, number: int | None) -> Attempt:
    attempt = run_dir.last_attempt() if number is None else run_dir.attempt(number)
    if attempt is None:
        raise UserError(
            "this run was never started", where=str(run_dir.path), fix="`isles train` starts it"
        )
    if not run_dir.resolved.exists():
        raise UserError(
            f"{os.uname().nodename} does not see the run directory {run_dir.path}",
            where=f"host {os.uname().nodename}",
            fix="set output_dir to a folder that all nodes share",
            id="files.output",
        )
    return attempt


def _own_node(nodes: Fleet, given: int | None, attempt: Attempt) -> FleetNode:
    number = given if given is not None else job_node([node.name for node in nodes])
    if number is None or not 0 <= number < len(nodes):
        raise UserError(
            f"this run has {len(nodes)} nodes, and none of them is "
            f"{os.uname().nodename if number is None else number}",
            where=str(attempt.fleet),
            fix=f"give --node, 0 to {len(nodes) - 1}",
            id="start.refused",
        )
    return nodes[number]


if __name__ == "__main__":
    show_streams()
    sys.exit(main())
