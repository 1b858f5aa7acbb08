"""Check inside a job: `python -m isles.check.step`, one task on every node.

Nodes of a job may not allow ssh between each other. So each node connects to the first node, which
queries them over these connections. See docs/check.md.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from isles.check.finding import Finding, exit_code, record, report_lines
from isles.check.node import IDLE_S, answer
from isles.check.plan import CheckedRun, Extent
from isles.check.verb import check_hosts
from isles.config.load import Loaded
from isles.config.resolve import digest, load_resolved
from isles.errors import CommunicationError, ExitCode, UserError
from isles.facts.terminal import show_streams
from isles.launch.ssh.channel import Channel, open_channel
from isles.launch.ssh.shell import Shell
from isles.run.env import settle_home
from isles.run.paths import RunDir
from isles.run.records import write_record

_POLL_S, _GREETING_S, _FINISH_S = 0.2, 5.0, 5.0
_GREETING_BYTES = 1000


def main(argv: Sequence[str] | None = None) -> int:
    """Check the nodes of a job, and return the exit code: 0 or 2."""
    parser = argparse.ArgumentParser(prog="isles.check.step")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--node", type=int, default=0, help="number of this node, from 0")
    parser.add_argument("--hosts", required=True, help="names of all nodes, separated by commas")
    parser.add_argument("--master", default="", help="ADDRESS:PORT of node 0")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds")
    options = parser.parse_args(argv)
    settle_home()
    names, limit_s = options.hosts.split(","), options.timeout
    try:
        run_dir = RunDir(options.run_dir)
        run = _run_facts(run_dir)
        assert run.config is not None
        mark = digest(run.config)
        address = _address(options.master) if len(names) > 1 else ("", 0)
        if options.node:
            return _serve(join(address, options.node, mark, limit_s), limit_s)
        begin = time.monotonic()
        findings = _ask(run, names, address, mark, limit_s)
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return ExitCode.PREFLIGHT
    seconds = time.monotonic() - begin
    found = {**record(findings, seconds=seconds), "hosts": names}
    write_record(run_dir.attempt(options.attempt).findings, found)
    lines = report_lines(findings, names, seconds=seconds, is_terminal=False)
    sys.stdout.write("\n".join(map(str, lines)) + "\n")
    return exit_code(findings)


def _run_facts(run_dir: RunDir) -> CheckedRun:
    try:
        resolved = load_resolved(run_dir.resolved.read_text(encoding="utf-8"))
        text = run_dir.run_file.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"this node cannot read the run directory: {error.strerror}",
            where=f"host {socket.gethostname()}: {run_dir.path}",
            fix="set output_dir to a folder on a file system that every node has",
        ) from error
    run = CheckedRun.of(Loaded(resolved.config, resolved.origins, text, run_dir.run_file))
    cluster = run.cluster.model_copy(update={"device": resolved.device})
    return replace(run, cluster=cluster, workdir=str(Path.cwd()))


def _address(master: str) -> tuple[str, int]:
    host, _, port = master.rpartition(":")
    if not host or not port.isdecimal():
        raise UserError(
            f"--master is {master or 'not given'}",
            where="command line",
            fix="pass the address of node 0 and a free port on it, such as 10.0.0.1:29500",
        )
    return host, int(port)


def _ask(
    run: CheckedRun, names: list[str], address: tuple[str, int], mark: str, timeout_s: float
) -> list[Finding]:
    # On the first node.
    own = open_channel(Shell(), python=sys.executable, module="isles.check.node", name=names[0])
    others: dict[int, Channel] = {}
    try:
        if len(names) > 1:
            try:
                with socket.create_server(address, backlog=128) as server:
                    others = meet(server, names, mark, timeout_s)
            except OSError as error:
                raise UserError(
                    f"node 0 cannot listen at {address[0]} port {address[1]}: {error.strerror}",
                    where=f"host {socket.gethostname()}",
                    fix="set --master to an address of this host with a free port",
                    id="port.taken",
                ) from error
        missing = [node for node in range(1, len(names)) if node not in others]
        if missing:
            where = ", ".join(names[node] for node in missing)
            text = f"{len(missing)} of {len(names)} nodes did not connect in {timeout_s:.0f} s: "
            text += ", ".join(f"{names[node]} (node {node})" for node in missing)
            fix = "see their tasks' output; skip these nodes (exclude) and tell the administrator"
            came, wanted = f"{len(names) - len(missing)} nodes", f"{len(names)} nodes"
            return [Finding("step.nodes", "error", where, text, came, wanted, fix)]
        channels = [own, *(others[node] for node in sorted(others))]
        extent = Extent(rows=False, timeout_s=timeout_s)
        findings = check_hosts(run, channels, extent, lambda _: None)
        code = int(exit_code(findings))
        with suppress(UserError, TimeoutError):
            for finished in [channel.ask("finish", code=code) for channel in others.values()]:
                finished.result(timeout=_FINISH_S)
        return findings
    finally:
        own.close()
        for channel in list(others.values()):  # a node may connect late
            channel.close()


def meet(
    server: socket.socket, names: list[str], mark: str, timeout_s: float
) -> dict[int, Channel]:
    """Wait for the other nodes of a job. Only the first node calls this.

    Args:
        names: names of all nodes, in the order of their numbers.
        mark: digest of the run, so that nodes of another run are refused.

    Returns:
        Channels to the connected nodes, by their numbers.
    """
    channels: dict[int, Channel] = {}
    lock = threading.Lock()

    def greet(connection: socket.socket) -> None:
        with suppress(OSError, ValueError, KeyError, TypeError):
            connection.settimeout(_GREETING_S)
            reader = connection.makefile("rb")
            greeting = json.loads(reader.readline(_GREETING_BYTES))
            node = int(greeting["node"])
            with lock:
                if greeting["digest"] == mark and 0 < node < len(names) and node not in channels:
                    connection.sendall(f"{mark}\n".encode())
                    channels[node] = _channel(names[node], connection, reader)
                    return
        connection.close()

    end = time.monotonic() + timeout_s
    while len(channels) < len(names) - 1 and (left := end - time.monotonic()) > 0:
        server.settimeout(min(left, _POLL_S))
        with suppress(TimeoutError):
            connection, _ = server.accept()
            # One thread per connection, so that a silent connection does not delay the others.
            threading.Thread(target=greet, args=(connection,), daemon=True).start()
    return channels


def _channel(name: str, connection: socket.socket, reader: IO[bytes]) -> Channel:
    connection.settimeout(None)

    def lost(_: bool) -> UserError:
        return CommunicationError(
            "no answer to any query: its process has ended, or the connection is lost",
            where=f"host {name}",
            fix="see the output of this task, and check whether the node is up",
            id="host.answers",
        )

    def end() -> None:
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        connection.close()

    return Channel(name, reader, connection.makefile("wb"), lost=lost, end=end)


def join(address: tuple[str, int], node: int, mark: str, timeout_s: float) -> socket.socket:
    """Connect to the first node of a job. Every other node calls this.

    Raises:
        CommunicationError: the first node does not respond in time, or has another run.
    """
    end, failure = time.monotonic() + timeout_s, "no answer"
    while (left := end - time.monotonic()) > 0:
        try:
            connection = socket.create_connection(address, timeout=min(left, _GREETING_S))
            connection.sendall(json.dumps({"node": node, "digest": mark}).encode() + b"\n")
            # Read without a buffer, so that only the line is consumed: `serve` reads the rest.
            line = connection.makefile("rb", buffering=0).readline(_GREETING_BYTES)
            if line.decode(errors="replace").strip() == mark:
                connection.settimeout(None)
                return connection
            failure = "another run uses this address, or this node's number is taken"
            connection.close()
        except OSError as error:
            failure = str(error) or type(error).__name__
        time.sleep(_POLL_S)  # the first node may not listen yet
    raise CommunicationError(
        f"the first node was not reached within {timeout_s:.0f} s: {failure}",
        where=f"node {node}, host {os.uname().nodename}",
        fix=f"check that its task has started, and that {address[0]} port {address[1]} is open",
        id="net.connect",
    )


def _serve(connection: socket.socket, timeout_s: float) -> int:
    # On every other node. The exit code is the first node's.
    codes = [int(ExitCode.PREFLIGHT)]

    def finish(code: int) -> dict[str, Any]:
        codes.append(code)
        return {}

    # `answer` reads stdin and writes stdout, so connect both to the socket.
    for number in (0, 1):
        os.dup2(connection.fileno(), number)
    answer({"finish": finish}, idle_s=timeout_s + IDLE_S)
    return codes[-1]


if __name__ == "__main__":
    show_streams()
    code = main()
    sys.stdout.flush()
    os._exit(code)
