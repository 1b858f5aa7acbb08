"""Runs a rendezvous: `python -m isles.outer.rendezvous STATE_DIR --run NAME --listen HOST:PORT`."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import logging
import signal
import sys
from pathlib import Path

from pydantic import ValidationError

from isles.errors import ConfigError, ExitCode, MissingDependencyError, UserError
from isles.outer.join_line import NAME
from isles.outer.rendezvous.settings import Settings


def main(arguments: list[str] | None = None) -> int:
    """Run until SIGTERM or Ctrl+C; the exit code."""
    parser = argparse.ArgumentParser(prog="isles rendezvous", description=__doc__)
    parser.add_argument("folder", type=Path, help="state directory: kept over restarts")
    parser.add_argument("--run", required=True, help="name of the run")
    parser.add_argument("--listen", default="127.0.0.1:0", help="HOST:PORT; port 0: any")
    parser.add_argument("--announce", default="", help="host that clusters dial, if another")
    parser.add_argument("--settings", type=Path, help="JSON file with the rules of the run")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        asyncio.run(_serve(options))
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return int(error.exit_code)
    except KeyboardInterrupt:
        return int(ExitCode.INTERRUPTED)
    return int(ExitCode.OK)


async def _serve(options: argparse.Namespace) -> None:
    for package in ("aiohttp", "torch"):
        if importlib.util.find_spec(package) is None:
            raise MissingDependencyError(
                f"the rendezvous needs the package {package}, which is not installed",
                where=sys.executable,
                fix="pip install 'isles[train]'",
            )
    from isles.outer.rendezvous.server import Server, load_averager

    host, port = _address(options.listen)
    if not NAME.fullmatch(options.run):
        raise ConfigError(
            f"{options.run!r} is no name of a run",
            where="--run",
            fix="use letters, digits, dots, dashes",
        )
    server = Server(options.folder, _settings(options.settings), load_averager)
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    line = await server.start(host, port, options.run, options.announce)
    sys.stdout.write(f"{line} is open; the join line stands in {options.folder / 'join'}\n")
    sys.stdout.flush()
    waiting = asyncio.create_task(stopped.wait())
    done, _ = await asyncio.wait({waiting, server.ticking}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    await server.stop()
    if server.ticking in done:
        server.ticking.result()  # its state directory cannot be written: better to end than to lie


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) >= 2**16:
        raise ConfigError(
            f"{text!r} is no address", where="--listen", fix="write HOST:PORT, as 127.0.0.1:0"
        )
    return host.strip("[]"), int(port)


def _settings(path: Path | None) -> Settings:
    if path is None:
        return Settings()
    try:
        return Settings.model_validate_json(path.read_text(encoding="utf-8"))
    except ValidationError as error:
        faults = [
            f"{'.'.join(str(part) for part in fault['loc'])}: {fault['msg']}"
            for fault in error.errors(include_url=False)
        ]
        known = ", ".join(Settings.model_fields)
        raise ConfigError("; ".join(faults), where=str(path), fix=f"the keys are {known}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the settings cannot be read: {error}", where=str(path), fix="give a JSON file"
        ) from error


if __name__ == "__main__":
    sys.exit(main())
