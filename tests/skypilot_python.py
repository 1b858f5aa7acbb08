"""A Python with the real SkyPilot, in an environment of its own, away from isles' packages."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path

_VERSION = "0.14.1"
# The second extra is what SkyPilot installs on nodes.
_WANTED = f"skypilot[slurm,remote]=={_VERSION}"


def skypilot_python() -> Path:
    """The Python; the first time its environment is made, which takes minutes and the registry."""
    # Not below XDG_CACHE_HOME, which each test has for itself.
    cache = Path.home() / ".cache" / "isles-tests"
    folder = cache / f"skypilot-slurm-{_VERSION}"
    cache.mkdir(parents=True, exist_ok=True)
    python, done = folder / "bin" / "python", folder / "done"
    with (cache / f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several tests at once make it once
        if not done.exists():
            subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
            pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            subprocess.run([*pip, _WANTED], check=True)
            done.touch()
    return python
