"""Files that run without isles' control wing: what `isles render` writes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, assert_never

from isles.config.files import deepspeed_faults
from isles.config.interop.export import deepspeed_json, fsdp_json
from isles.config.load import Loaded
from isles.config.sections.cluster import PbsLauncherConfig, QueueSection, SlurmLauncherConfig
from isles.errors import ConfigErrors
from isles.launch.queue.pbs import Dialect
from isles.launch.queue.script import JobText, pbs_script, sbatch_script
from isles.launch.render import alone_command
from isles.launch.render.size import Size, settle_size
from isles.launch.render.torchrun import torchrun_script

Kind = Literal["torchrun", "sbatch", "pbs", "deepspeed-json", "fsdp-json"]

_QUEUES = {"slurm": "Slurm", "pbs": "PBS"}
_SHARED_KEYS = tuple(key for key in QueueSection.model_fields if key not in ("login", "bin_path"))


@dataclass(frozen=True, slots=True)
class Rendered:
    """A file.

    Args:
        text: all of it.
        notes: what its reader should know, where the file has no room for comments.
    """

    text: str
    notes: tuple[str, ...] = ()


def render(
    loaded: Loaded, to: Kind, *, overrides: tuple[str, ...] = (), output: Path | None = None
) -> Rendered:
    """What a run file says, as another tool's file.

    Args:
        loaded: the run file.
        to: which kind of file.
        overrides: of the command line, which the file hands on to the trainer.
        output: where it will be written; None: not known.

    Raises:
        ConfigError: the run file's strategy is not of that kind, or its ranks do not fit.
        ConfigErrors: every fault in the DeepSpeed JSON that the run file names.
    """
    size = settle_size(loaded)
    match to:
        case "torchrun":
            return Rendered(torchrun_script(loaded, size, overrides))
        case "sbatch":
            return Rendered(_sbatch(loaded, size, overrides))
        case "pbs":
            return Rendered(_pbs(loaded, size, overrides, output))
        case "deepspeed-json":
            if faults := deepspeed_faults(loaded):
                raise ConfigErrors(faults)
            data, notes = deepspeed_json(loaded, size.world_size)
        case "fsdp-json":
            data, notes = fsdp_json(loaded)
        case _:
            assert_never(to)
    return Rendered(json.dumps(data, indent=2) + "\n", tuple(notes))


def _sbatch(loaded: Loaded, size: Size, overrides: tuple[str, ...]) -> str:
    launcher = loaded.config.clusters[0].launcher
    notes = [*size.notes]
    if not isinstance(launcher, SlurmLauncherConfig):
        notes.append(_other_launcher(launcher.kind, "slurm"))
        launcher = SlurmLauncherConfig.model_validate(_shared(launcher))
    job = JobText(
        launcher=launcher,
        nodes=size.nodes,
        nproc=size.equal(loaded),
        device=size.device,
        workdir=size.workdir,
        command=alone_command(loaded, overrides),
        notes=notes,
    )
    return sbatch_script(loaded.config, job)


def _pbs(loaded: Loaded, size: Size, overrides: tuple[str, ...], output: Path | None) -> str:
    launcher = loaded.config.clusters[0].launcher
    notes = [*size.notes]
    if not isinstance(launcher, PbsLauncherConfig):
        notes.append(_other_launcher(launcher.kind, "pbs"))
        launcher = PbsLauncherConfig.model_validate(_shared(launcher))
    dialect: Dialect = "torque" if launcher.dialect == "torque" else "openpbs"
    if launcher.dialect == "auto":
        notes.append("for OpenPBS; for Torque: clusters.0.launcher.dialect=torque")
    return pbs_script(
        loaded.config,
        launcher,
        dialect,
        alone_command(loaded, overrides),
        str(output.absolute()) if output else None,
        workdir=size.workdir,
        num_ranks=size.equal(loaded),
        device=size.device,
        notes=tuple(notes),
    )


def _shared(launcher: object) -> dict[str, object]:
    """What the launcher of the one queue says that the other's knows too."""
    if not isinstance(launcher, QueueSection):
        return {}
    keys = [key for key in _SHARED_KEYS if key != "extra"]
    return {key: getattr(launcher, key) for key in keys}


def _other_launcher(kind: str, wanted: str) -> str:
    words = "its account, time, cores and memory are taken over; " if kind in _QUEUES else ""
    return f"the run file's launcher is {kind}: {words}look at the {_QUEUES[wanted]} options"
