"""A training of three steps on this machine alone: whatever a check of parts would miss."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_RUN_FILE = """\
name: smoke
output_dir: {folder}/runs
model: {{name_or_path: llama-2m, init: scratch}}
data:
  sources: [{{type: fake}}]
  seq_length: 64
  validation_fraction: 0
training:
  max_steps: 3
  global_batch_size: {rows}
  learning_rate: 1e-3
  logging_steps: 1
checkpoint: {{every_steps: null, every_minutes: null, export_on_finish: false}}
track: [jsonl]
"""


def smoke(args: dict[str, Any]) -> dict[str, Any]:
    """Train a small model for three steps with every rank that this machine has.

    Args:
        args: `nproc`: ranks; `timeout_s`.

    Returns:
        fault (empty where all is well), the last lines that were printed, seconds.
    """
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="isles-smoke-") as folder:
        path = Path(folder) / "run.yaml"
        path.write_text(_RUN_FILE.format(folder=folder, rows=4 * int(args["nproc"])))
        command = [sys.executable, "-m", "isles", "train", str(path)]
        try:
            done = subprocess.run(
                [*command, f"clusters.0.gpus_per_node={args['nproc']}"]
                if args["nproc"] > 1
                else command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=float(args["timeout_s"]),
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            subprocess.run(
                [*command[:3], "stop", "--now", "--output-dir", f"{folder}/runs"],
                capture_output=True,
                timeout=30,
                check=False,
            )
            said = error.stdout.decode(errors="replace") if error.stdout else ""
            return {
                "fault": f"not done in {args['timeout_s']:.0f} s",
                "said": _tail(said),
                "seconds": args["timeout_s"],
            }
    fault = f"ended with exit code {done.returncode}" if done.returncode else ""
    return {"fault": fault, "said": _tail(done.stdout), "seconds": time.monotonic() - begin}


def _tail(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-6:])
