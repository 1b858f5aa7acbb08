"""One rank under a torchrun typed by hand: `torchrun --nproc-per-node=2 -m isles.train run.yaml`.

Takes a run file with overrides; rank 0 makes or chooses the run directory.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from isles.config.load import load_run_file
from isles.run.env import read_rank_env
from isles.train.by_hand import leave, train_by_hand


def main() -> int:
    """Train as the rank that the environment names; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m isles.train")
    parser.add_argument("run_file", type=Path)
    parser.add_argument("overrides", nargs="*", help="key.path=value")
    parser.add_argument("--resume", default="auto", help="auto, no, or a path")
    options = parser.parse_args()
    path, overrides = options.run_file, options.overrides
    return train_by_hand(lambda: load_run_file(path, overrides), options.resume, read_rank_env())


if __name__ == "__main__":
    leave(main())
