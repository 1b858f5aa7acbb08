"""Runs a hub: `python -m isles.outer.hub STATE_DIR --run NAME --listen HOST:PORT`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sqlite3
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from isles.errors import ConfigError, ExitCode, UserError
from isles.facts.terminal import show_streams
from isles.outer.hub.rules import Settings
from isles.outer.hub.server import Server
from isles.run.env import usable_cores
from isles.run.join_line import ENDED, NAME
from isles.run.records import write_record
from isles.run.repeats import FewLines

_LINES = 60
"""Per minute, of each kind: a member may cause any number of them."""
_MOST_THREADS = 16
"""Each takes some megabytes, and the disk is not faster than these."""
_GRACE_S = 30.0
"""Seconds that a hub which stops with its run waits for a cluster that rejoins."""


def main(arguments: list[str] | None = None) -> int:
    """Run until SIGTERM or Ctrl+C; returns the exit code."""
    parser = argparse.ArgumentParser(prog="isles hub", description=__doc__)
    parser.add_argument("folder", type=Path, help="state directory, kept over restarts")
    parser.add_argument("--run", required=True, help="name of the run")
    parser.add_argument(
        "--listen", default="127.0.0.1:0", help="HOST:PORT; port 0 means any free port"
    )
    parser.add_argument("--announce", default="", help="HOST[:PORT] for the clusters")
    parser.add_argument("--settings", type=Path, help="JSON file with the rules of the run")
    parser.add_argument(
        "--until-finished", action="store_true", help="stop when all clusters have finished"
    )
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    for handler in logging.getLogger().handlers:
        handler.addFilter(FewLines(_LINES))
    os.umask(0o077)  # only this user may read the hub's files
    try:
        asyncio.run(_serve(options))
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return int(error.exit_code)
    except KeyboardInterrupt:
        return int(ExitCode.INTERRUPTED)
    return int(ExitCode.OK)


async def _serve(options: argparse.Namespace) -> None:
    host, port = _address(options.listen)
    if not NAME.fullmatch(options.run):
        raise ConfigError(
            f"{options.run!r} is not a valid run name",
            where="--run",
            fix="use letters, digits, dots and dashes",
        )
    threads = min(usable_cores(), _MOST_THREADS)
    server = Server(options.folder, _settings(options.settings), threads=threads)
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    try:
        line = await server.start(host, port, options.run, options.announce)
    except UserError:
        server.release()
        raise
    (options.folder / ENDED).unlink(missing_ok=True)
    sys.stdout.write(f"{line} is open; the join line is in {options.folder / 'join'}\n")
    sys.stdout.flush()
    ticking = server.work.ticking
    waiting: list[asyncio.Future[Any]] = [ticking, asyncio.create_task(stopped.wait())]
    if options.until_finished:
        waiting.append(asyncio.create_task(server.work.finished(_GRACE_S)))
    done, pending = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    is_over = False
    if ticking not in done:
        with suppress(OSError, sqlite3.Error):
            is_over = await server.work.ask(server.work.core.membership.end_kind) == "over"
    await server.stop()
    if ticking not in done:
        # A hub that is killed writes nothing.
        ended = {"state": "finished" if is_over else "stopped", "at": time.time()}
        with suppress(OSError):  # the disk is full
            write_record(options.folder / ENDED, ended)
    if ticking in done:
        ticking.result()  # its memory is unreliable: better to stop than to give wrong answers


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) >= 2**16:
        raise ConfigError(
            f"{text!r} is not a valid address",
            where="--listen",
            fix="write HOST:PORT, such as 127.0.0.1:0",
        )
    return host.strip("[]"), int(port)


def _settings(path: Path | None) -> Settings:
    try:
        return Settings() if path is None else Settings.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise ConfigError(
            f"cannot read the settings: {error}",
            where=str(path),
            fix=f"use the keys {', '.join(Settings.model_fields)}",
        ) from None


if __name__ == "__main__":
    # Threads of the hub share the work by pieces. torch reads this when it is imported.
    os.environ["OMP_NUM_THREADS"] = "1"
    show_streams()
    sys.exit(main())
