"""Texts word for word."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from isles import __version__


def check_golden(name: str, text: str) -> None:
    """Compare a script with a file beside this one, and see that bash reads it.

    ISLES_WRITE_GOLDEN=1 writes it anew, to be reviewed.
    """
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    path = Path(__file__).with_name(name)
    text = text.replace(f"isles {__version__}", "isles VERSION")
    if os.environ.get("ISLES_WRITE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")
