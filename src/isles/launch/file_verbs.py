"""Verbs that read a run file and train nothing: `isles config` and `isles data`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from cyclopts import App

from isles.errors import ConfigError, ConfigErrors, ExitCode

config = App(name="config", help="Show the resolved run file, or its JSON schema.")
data = App(name="data", help="Show the data as the model sees it.")


@config.command(name="show")
def show_config(run_file: Path, /, *overrides: str) -> int:
    """Print every value of the resolved run file, and where it came from.

    Args:
        run_file: The run file.
        overrides: Values that replace those in the file, such as training.max_steps=5.
    """
    from isles.config.clusters import named_cluster
    from isles.config.load import load_run_file
    from isles.config.show import show
    from isles.launch.base import settle_here

    loaded = load_run_file(run_file, overrides)
    names = [cluster.name for cluster in loaded.config.clusters]
    for name in names:
        own = named_cluster(loaded, name) if len(names) > 1 else loaded
        head = f"# === cluster {name} ===\n" if len(names) > 1 else ""
        sys.stdout.write(head + show(settle_here(own, _warn, needs_data=False)[1]) + "\n")
    return ExitCode.OK


@config.command
def schema() -> int:
    """Print the JSON schema of run files, for editors."""
    from json import dumps

    from isles.config.show import json_schema

    sys.stdout.write(dumps(json_schema(), indent=2) + "\n")
    return ExitCode.OK


@data.command(name="show")
def show_data(run_file: Path, /, *overrides: str, samples: int = 3) -> int:
    """Print a few samples of each source with the trained tokens marked, and counts.

    The data is prepared as for training, so that a training that follows finds it ready. On a
    terminal the trained tokens are green, elsewhere they stand between ⟦ and ⟧.

    Args:
        run_file: The run file.
        overrides: Values that replace those in the file, such as data.seq_length=512.
        samples: How many documents of each source.
    """
    from isles.config.clusters import of_cluster
    from isles.config.load import load_run_file
    from isles.config.resolve import dump_resolved
    from isles.launch.base import settle_here
    from isles.launch.huggingface import hub_faults
    from isles.launch.worker import require_train, run_module
    from isles.run.paths import RunDir

    if samples < 1:
        raise ConfigError(
            f"{samples} samples are none", where="--samples", fix="for example --samples 3"
        )
    # The clusters of a run share its data.
    own = of_cluster(load_run_file(run_file, overrides), 0)
    loaded, resolved = settle_here(own, _warn, needs_data=True)
    if all(source.type == "fake" for source in resolved.config.data.sources):
        raise ConfigError(
            "the source is fake: random token ids, of which there is nothing to show",
            where=loaded.where("data.sources"),
            fix="name real data",
        )
    require_train()
    if faults := hub_faults(loaded):
        raise ConfigErrors(faults)
    with tempfile.TemporaryDirectory(prefix="isles-data-") as folder:
        RunDir(Path(folder)).resolved.write_text(dump_resolved(resolved), encoding="utf-8")
        return run_module("isles.train.data_show", folder, f"--samples={samples}")


def _warn(line: str) -> None:
    sys.stderr.write(f"warning: {line}\n")
