"""The check as a step of a job: `python -m isles.check.step`, one task on every node.

The first node asks the others, each over a connection that it opens to the first.
docs/check.md says more.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from isles.check.conduct import check_hosts
from isles.check.course import Extent
from isles.check.finding import Finding, exit_code, record
from isles.check.link import Link, join, meet
from isles.check.node.operations import check_operations
from isles.check.node.ranks import Ranks
from isles.check.panel import Place
from isles.check.report import report_lines
from isles.check.subject import Subject
from isles.config.load import Loaded
from isles.config.resolve import digest, load_resolved
from isles.errors import ExitCode, UserError
from isles.launch.node.operations import serve
from isles.launch.ssh.channel import open_channel
from isles.launch.ssh.shell import Shell
from isles.run.paths import RunDir
from isles.run.records import write_record

_FINISH_S = 5.0


def main(argv: Sequence[str] | None = None) -> int:
    """Check the nodes of a job, and give the exit code: 0 or 2."""
    parser = argparse.ArgumentParser(prog="isles.check.step")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--node", type=int, default=0, help="number of this node, from 0")
    parser.add_argument("--hosts", required=True, help="names of all nodes, with commas")
    parser.add_argument("--master", help="ADDRESS:PORT of node 0")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds")
    options = parser.parse_args(argv)
    try:
        return _run(options)
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return ExitCode.PREFLIGHT


def _run(options: argparse.Namespace) -> int:
    subject = _subject(RunDir(options.run_dir))
    assert subject.config is not None
    names, mark = options.hosts.split(","), digest(subject.config)
    if options.node:
        return _answer(_address(options), options.node, mark, options.timeout)
    begin = time.monotonic()
    findings = _ask(subject, names, mark, options)
    seconds = time.monotonic() - begin
    attempt = RunDir(options.run_dir).attempt(options.attempt)
    found = {**record(findings, seconds=seconds), "hosts": names}
    write_record(attempt.findings, found)
    lines = report_lines(findings, names, seconds=seconds, is_terminal=False)
    sys.stdout.write("\n".join(lines) + "\n")
    return exit_code(findings)


def _subject(run_dir: RunDir) -> Subject:
    try:
        resolved = load_resolved(run_dir.resolved.read_text(encoding="utf-8"))
        text = run_dir.run_file.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"the run directory cannot be read here: {error.strerror}",
            where=f"host {socket.gethostname()}: {run_dir.path}",
            fix="is it on a file system that every node has? set output_dir to one that is",
        ) from error
    cluster = resolved.config.clusters[0].model_copy(update={"device": resolved.device})
    loaded = Loaded(resolved.config, resolved.origins, text, run_dir.run_file)
    subject = Subject.of(loaded)
    return Subject(cluster, str(Path.cwd()), loaded, subject.num_params)


def _address(options: argparse.Namespace) -> tuple[str, int]:
    host, _, port = (options.master or "").rpartition(":")
    if not host or not port.isdigit():
        raise UserError(
            f"--master is {options.master}",
            where="command line",
            fix="the address of node 0 and a port that is free there, such as 10.0.0.1:29500",
        )
    return host, int(port)


def _ask(
    subject: Subject, names: list[str], mark: str, options: argparse.Namespace
) -> list[Finding]:
    """What the first node does."""
    own = open_channel(
        Shell(), python=sys.executable, module="isles.check.node.operations", name=names[0]
    )
    links: dict[int, Link] = {}
    try:
        if len(names) > 1:
            host, port = _address(options)
            links = _meet(host, port, names, mark, options.timeout)
        missing = [f"{name} (node {i})" for i, name in enumerate(names) if i and i not in links]
        if missing:
            return [_missing(missing, len(names), options.timeout)]
        places: list[Place] = [own, *(links[node] for node in sorted(links))]
        extent = Extent(timeout_s=options.timeout, compare_here=False)
        findings = check_hosts(subject, places, extent, lambda _: None)
        code = int(exit_code(findings))
        with suppress(UserError, TimeoutError):
            for told in [link.ask("finish", code=code) for link in links.values()]:
                told.result(timeout=_FINISH_S)
        return findings
    finally:
        own.close()
        for link in links.values():
            link.close()


def _meet(host: str, port: int, names: list[str], mark: str, timeout_s: float) -> dict[int, Link]:
    try:
        with socket.create_server((host, port), backlog=128) as server:
            return meet(server, names, mark, timeout_s)
    except OSError as error:
        raise UserError(
            f"node 0 cannot listen at {host} port {port}: {error.strerror}",
            where=f"host {socket.gethostname()}",
            fix="--master must be an address of this host, and a port that is free",
            id="port.taken",
        ) from error


def _missing(missing: list[str], num: int, timeout_s: float) -> Finding:
    return Finding(
        "step.nodes",
        "error",
        ", ".join(name.partition(" ")[0] for name in missing),
        f"{len(missing)} of {num} nodes did not come within {timeout_s:.0f} s: "
        + ", ".join(missing),
        measured=f"{num - len(missing)} nodes",
        limit=f"{num} nodes",
        fix="see their tasks' output; leave them out (exclude) and tell the administrator",
    )


def _answer(address: tuple[str, int], node: int, mark: str, timeout_s: float) -> int:
    """What every other node does: answer until the first one has done."""
    connection = join(address, node, mark, timeout_s)
    ranks, codes = Ranks(), [int(ExitCode.PREFLIGHT)]

    def finish(args: dict[str, Any]) -> dict[str, Any]:
        codes.append(int(args["code"]))
        return {}

    # `serve` talks over stdin and stdout: from here on these are the connection.
    for number in (0, 1):
        os.dup2(connection.fileno(), number)
    serve({**check_operations(ranks), "finish": finish})
    ranks.kill()
    return codes[-1]


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
