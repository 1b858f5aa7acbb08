"""The quickstart, as one program: train, stop from "another terminal", go on, ask for text.

Run by `make quickstart`. Everything it does is an isles command that you can type yourself; each
is printed before it runs.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

from isles.launch.gpus import find_gpus

HERE = Path(__file__).parent
RUN_FILE = Path(os.path.relpath(HERE / "quickstart.yaml"))
ISLES = [sys.executable, "-m", "isles"]
STOP_AT = 100
DEADLINE_S = 600


def log(text: str) -> None:
    print(f"\n\033[1m{text}\033[0m" if sys.stdout.isatty() else f"\n{text}", flush=True)


def isles(*arguments: str, expected: int = 0) -> None:
    """Run one isles command in the foreground."""
    log(f"$ isles {shlex.join(arguments)}")
    code = subprocess.run([*ISLES, *arguments], check=False).returncode
    if code != expected:
        sys.exit(f"isles {arguments[0]} ended with {code}, expected {expected}")


def step() -> int:
    """The step of the newest quickstart run, from the record that `isles status` shows."""
    records = sorted(Path("runs").glob("quickstart-*/status.json"), key=lambda p: p.stat().st_mtime)
    return int(json.loads(records[-1].read_text()).get("step") or 0) if records else 0


def main() -> None:
    begun = time.monotonic()
    # The run file asks for two ranks; a machine with one GPU has place for one.
    ranks = ["clusters.0.gpus_per_node=1"] if len(find_gpus().gpus) == 1 else []
    train = ["train", str(RUN_FILE), *ranks]
    log("1. Train a small language model on Python's own reference manual, on two processes.")
    log(f"$ isles {shlex.join(train)}")
    training = subprocess.Popen([*ISLES, *train])
    before = step()  # of a run that is there already, and is not this one
    while training.poll() is None:
        if before != step() >= STOP_AT:
            break
        if time.monotonic() - begun > DEADLINE_S:
            training.terminate()
            sys.exit(f"no step {STOP_AT} after {DEADLINE_S} s; see `isles logs quickstart`")
        time.sleep(0.5)
    if training.poll() is None:
        log("2. Stop it, as if from another terminal: it saves first.")
        isles("stop", "quickstart")
    training.wait(60)

    log("3. The same command again goes on where it stopped.")
    isles(*train)

    log("4. Ask the model for text.")
    isles("generate", "quickstart", "--prompt", "The for statement", "--max-new-tokens", "80")

    log(f"Done in {time.monotonic() - begun:.0f} s. Three things to try next:")
    print(f"  (isles is {Path(sys.executable).with_name('isles')}; activate its environment first)")
    print("  isles eval quickstart                     loss and perplexity on held-out text")
    print("  isles train examples/quickstart.yaml name=longer training.max_steps=1000")
    print("  isles init --template finetune            a run file for your own model and data")


if __name__ == "__main__":
    main()
