"""The verb `isles render`: files for torchrun, Slurm, PBS, DeepSpeed and FSDP."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from isles.errors import ExitCode, UserError


def render(
    run_file: Path,
    /,
    *overrides: str,
    to: Literal["torchrun", "sbatch", "pbs", "deepspeed-json", "fsdp-json"],
    output: Annotated[Path | None, Parameter(name=("--output", "-o"))] = None,
    force: bool = False,
) -> int:
    """Write a run file as a script or settings that run without the command isles.

    Args:
        run_file: The run file.
        overrides: Values that replace those in the file, such as training.max_steps=5.
        to: What is written: a torchrun script, a job script for sbatch or PBS's qsub, the JSON of
            DeepSpeed, or the fsdp_config of the Hugging Face Trainer.
        output: Where it is written; left out: to stdout.
        force: Replace the file if it is there.
    """
    from isles.config.load import load_run_file
    from isles.launch.render import render as rendered_from
    from isles.run.records import write_text_atomic

    rendered = rendered_from(
        load_run_file(run_file, overrides), to, overrides=overrides, output=output
    )
    for note in rendered.notes:
        sys.stderr.write(f"note: {note}\n")
    if output is None:
        sys.stdout.write(rendered.text)
        return ExitCode.OK
    if output.exists() and not force:
        raise UserError(
            "the file is there already",
            where=str(output),
            fix="add --force, or another --output",
            id="file.exists",
        )
    try:
        write_text_atomic(output, rendered.text)
        if rendered.text.startswith("#!"):
            output.chmod(0o755)
    except OSError as error:
        raise UserError(
            f"cannot be written: {error.strerror}", where=str(output), fix="another --output"
        ) from error
    sys.stderr.write(f"wrote {output}; {_next(to, output)}\n")
    return ExitCode.OK


def _next(to: str, output: Path) -> str:
    path = shlex.quote(str(output))
    return {
        "torchrun": f"start it: bash {path}",
        "sbatch": f"submit it: sbatch {path}",
        "pbs": f"submit it: qsub {path}",
        "deepspeed-json": f"strategy: {{kind: deepspeed, config_file: {output}}} uses it here",
        "fsdp-json": f"TrainingArguments(fsdp=True, fsdp_config={str(output)!r}) uses it",
    }[to]
