"""Texts word for word."""

from __future__ import annotations

import difflib
import os
import subprocess
from pathlib import Path

from isles import __version__


def check_golden(name: str, text: str) -> None:
    """Compare a text with a file beside this one; a script is read by bash as well.

    ISLES_WRITE_GOLDEN=1 writes it anew, to be reviewed.
    """
    if name.endswith(".sh"):
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    path = Path(__file__).with_name(name)
    text = text.replace(f"isles {__version__}", "isles VERSION")
    if os.environ.get("ISLES_WRITE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    kept = path.read_text(encoding="utf-8")
    changes = difflib.unified_diff(kept.splitlines(), text.splitlines(), name, "now", lineterm="")
    assert text == kept, "\n".join(changes)
