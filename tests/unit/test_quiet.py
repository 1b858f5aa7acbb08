"""What other libraries print, and what of it reaches a user."""

from __future__ import annotations

import subprocess
import sys

from tests.deadline import DEADLINE_S

PROGRAM = """
import logging
from isles.train.logs import silence_libraries

logging.basicConfig(level=logging.INFO, format="%(name)s %(message)s")
silence_libraries()
logging.getLogger("DeepSpeed").setLevel(logging.INFO)  # as DeepSpeed does when it is imported
for name in ("torchao.kernel.intmm", "torch.utils._pytree", "DeepSpeed", "isles"):
    logging.getLogger(name).warning("warns")
    logging.getLogger(name).error("fails")
"""


def test_libraries_are_silent_but_for_errors() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    )
    assert done.stderr.splitlines() == [
        "torchao.kernel.intmm fails",
        "torch.utils._pytree fails",
        "DeepSpeed fails",
        "isles warns",
        "isles fails",
    ]
