"""What torchrun starts on every node: the tail of its command line."""

from __future__ import annotations

from isles.config.sections.run import RunConfig


def rank_command(
    config: RunConfig, run_dir: str, attempt: int, *, resume_from: str | None = None
) -> list[str]:
    """What follows torchrun's own options, where isles keeps the run directory.

    Args:
        config: the run file.
        run_dir: the run directory, as the nodes see it.
        attempt: the number of this start.
        resume_from: a checkpoint that was asked for by name; a script looks for its own.
    """
    is_script = config.training.script is not None
    command = ["-m", "isles.agent.script.run" if is_script else "isles.train", run_dir]
    command += ["--attempt", str(attempt)]
    if resume_from is not None and not is_script:
        command += ["--resume-from", resume_from]
    return command


def script_command(config: RunConfig) -> list[str]:
    """What follows torchrun's own options, where a script runs without isles."""
    assert config.training.script is not None
    return [config.training.script, *map(str, config.training.script_args)]
