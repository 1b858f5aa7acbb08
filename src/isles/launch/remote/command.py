"""The verb `isles setup`."""

from __future__ import annotations

import sys
from pathlib import Path

from cyclopts import App

from isles.errors import ExitCode

setup_app = App(name="setup", help="Make the Python environments of all hosts equal.")


@setup_app.default
def setup(run_file: Path, /, *overrides: str, check: bool = False) -> int:
    """Install isles and its packages on every host of a run file, in parallel, and compare.

    Args:
        run_file: The run file.
        overrides: Values that replace those in the file.
        check: Install nothing; only compare.
    """
    from isles.config.load import load_run_file
    from isles.launch.remote.setup import setup as set_up

    def say(line: str) -> None:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()

    is_equal = set_up(load_run_file(run_file, overrides), check=check, say=say)
    return ExitCode.OK if is_equal else ExitCode.PREFLIGHT
