"""Train as config.yaml says: the guide's own entry point, under any launcher or alone.

    torchrun --nproc_per_node=4 src/train.py --config config.yaml
    deepspeed --num_gpus=4 src/train.py --config config.yaml --deepspeed config/ds_config.json
    srun python src/train.py --config config.yaml
    python src/train.py --config config.yaml

Each turns config.yaml into a run file and hands it to isles' own trainer.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from pathlib import Path

from finetune_config import Mapped, map_config
from finetune_errors import told
from finetune_ranks import find_place, speaks_for_node

from isles.config.load import load_run_file
from isles.errors import ConfigError
from isles.run.records import write_text_atomic


def main() -> int:
    """Write the run file, and become isles' trainer; with --show only print it."""
    parser = argparse.ArgumentParser(description="Train as config.yaml says.")
    parser.add_argument("--config", type=Path, default=Path("config.yaml"), help="config.yaml")
    parser.add_argument("--deepspeed", type=Path, metavar="JSON", help="DeepSpeed's settings")
    parser.add_argument("--resume", default="auto", help="auto, no, or the path of a run")
    parser.add_argument("--show", action="store_true", help="print the run file, and end")
    # DeepSpeed's launcher adds it; the same is in the environment.
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    place = find_place(os.environ)
    mapped = map_config(options.config, options.deepspeed, place.world_size)
    if place.rank == 0:
        sys.stderr.write("".join(f"note: {line}\n" for line in mapped.said))
    if options.show:
        sys.stdout.write(mapped.text)
        return 0
    run_file = write_run_file(mapped, options.config)
    os.environ.update(place.variables)
    trainer = ["isles", "train"] if place.world_size is None else ["isles.train"]
    command = [sys.executable, "-m", *trainer, str(run_file), "--resume", options.resume]
    sys.stderr.flush()
    # The launcher watches this process: it stays the same one.
    os.execv(sys.executable, command)
    raise AssertionError("execv does not return")


def write_run_file(mapped: Mapped, config: Path) -> Path:
    """Where the run file lies; its name follows from what it says, so that ranks and jobs that
    write at the same time do not disturb each other."""
    text = mapped.text
    loaded = load_run_file(config, text=text)
    folder = Path(loaded.config.output_dir).expanduser() / ".run-files"
    path = folder / f"{config.stem}-{hashlib.sha256(text.encode()).hexdigest()[:8]}.yaml"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_text_atomic(path, text)
    except OSError as error:
        raise ConfigError(
            f"cannot be written: {error.strerror}",
            where=str(path),
            fix="name another folder in config.yaml: output_dir",
        ) from None
    return path


if __name__ == "__main__":
    sys.exit(told(main, speaks=speaks_for_node(os.environ)))
