"""torchrun in a container, for scripts of `isles render`, which know no node."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import PurePosixPath

from isles.config.sections.cluster import Runtime
from isles.config.sections.run import RunConfig
from isles.launch.container.enter import Container, command_line, container_record, wanted_runtimes

_CACHE = '"${HF_HOME:-$HOME/.cache/huggingface}"'
_NAMES = ("CUDA_VISIBLE_DEVICES", "GLOO_*", "HF_*", "MASTER_*", "NCCL_*", "OMP_*", "TORCH_*")
"""Variables that podman passes on if they are set; the other runtimes pass on all."""


def torchrun_words(config: RunConfig, workdir: str, device: str, launcher: str) -> tuple[str, str]:
    """The replacement of `torchrun` in a script, in bash, and options of srun.

    Args:
        launcher: kind of the script: slurm, pbs, or another kind for a script that people start.
    """
    record = container_record(config.clusters[0], config, device)
    if record is None:
        return "torchrun", ""
    container = replace(Container.of(record), launcher=launcher)
    # A script must name the runtime: in Slurm, apptainer runs every image.
    runtime: Runtime = wanted_runtimes(container)[-1 if launcher == "slurm" else 0]
    folders = dict.fromkeys([workdir, *(p for p in container.paths if p.startswith("/"))])
    outer = [PurePosixPath(folder) for folder in folders]
    shown = [str(p) for p in outer if not any(p.is_relative_to(o) for o in outer if o != p)]
    binds = [bind if ":" in bind else f"{bind}:{bind}" for bind in container.binds]
    line = command_line(
        container,
        runtime,
        "srun" if runtime == "pyxis" else runtime,
        [] if runtime == "pyxis" else [container.python, "-m", "torch.distributed.run"],
        [*(f"{folder}:{folder}" for folder in shown), "CACHE", *binds],
        (*_NAMES, *container.variables),
        workdir,
        [] if device == "cpu" else ["nvidia"],
    )
    text = shlex.join(line).replace("CACHE", f"{_CACHE}:{_CACHE}")
    if runtime == "pyxis":
        return f"{shlex.quote(container.python)} -m torch.distributed.run", text
    return text, ""
