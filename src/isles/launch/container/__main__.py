"""Runs a module in a container: `python -m isles.launch.container RECORD MODULE [WORDS]`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from isles.errors import PreflightError
from isles.facts.terminal import show_streams
from isles.launch.container.enter import Container, enter
from isles.launch.container.failure import refusal_line
from isles.run.env import settle_home


def main(argv: Sequence[str]) -> int:
    settle_home()
    record, module, *words = argv
    try:
        container = Container.of(json.loads(record))
        enter(container, ["-m", module, *words], [Path.cwd()])
    except PreflightError as error:
        sys.stderr.write(refusal_line(error))
        return int(error.exit_code)


if __name__ == "__main__":
    show_streams()
    sys.exit(main(sys.argv[1:]))
