"""One log for each node, its agent's and its ranks' lines together, for `tail -f` and for people.

RUN_DIR/logs/distributed_training/cluster_train_<time>_node<K>.log; latest_node<K>.log leads to the
newest.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from isles.run.paths import RunDir


def node_log_folder(run_dir: RunDir) -> Path:
    """Where the logs of the nodes lie."""
    return run_dir.path / "logs" / "distributed_training"


def latest_node_log(run_dir: RunDir, node: int) -> Path | None:
    """The newest log of a node; None where it is not here."""
    path = node_log_folder(run_dir) / f"latest_node{node}.log"
    return path if path.is_file() else None


def new_node_log(run_dir: RunDir, node: int) -> Path:
    """Begin a node's log, and lead `latest_node<K>.log` to it.

    Raises:
        OSError: it cannot be written.
    """
    folder = node_log_folder(run_dir)
    folder.parent.mkdir(exist_ok=True)
    folder.mkdir(exist_ok=True)
    path = folder / f"cluster_train_{time.strftime('%Y%m%d_%H%M%S')}_node{node}.log"
    path.touch()
    staged = folder / f".latest_node{node}.{os.getpid()}"
    with suppress(FileNotFoundError):
        staged.unlink()
    staged.symlink_to(path.name)
    staged.replace(folder / f"latest_node{node}.log")
    return path
