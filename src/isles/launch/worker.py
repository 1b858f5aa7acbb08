"""Commands that need the worker packages, each run in a separate process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from isles import __version__
from isles.errors import ExitCode, MissingDependencyError, UserError
from isles.run.env import is_in_container
from isles.run.nodes import read_own_fleet
from isles.run.owner import not_own
from isles.run.paths import RunDir
from isles.run.state import script_of

NEEDED_TO_TRAIN = ("torch", "transformers", "tokenizers", "safetensors", "numpy")


_ENDING_S = 5.0


def require_train() -> None:
    """Check that this installation can train.

    Raises:
        MissingDependencyError: a package is missing; the message has the install command.
    """
    missing = [name for name in NEEDED_TO_TRAIN if find_spec(name) is None]
    if missing:
        raise MissingDependencyError(
            f"this command needs packages that are not installed: {', '.join(missing)}",
            where=sys.executable,
            fix="run pip install 'isles[train]', or in a clone pip install -e '.[train]'",
        )


def version_lines() -> list[str]:
    """Versions of isles and of the libraries it uses."""
    lines = [f"isles {__version__}", f"python {sys.version.split()[0]}"]
    for name in NEEDED_TO_TRAIN:
        try:
            lines.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            lines.append(f"{name} is not installed")
    return lines


def run_verb(verb: str, run_dir: RunDir, options: Mapping[str, object]) -> int:
    """Run a command of the worker packages on this terminal; returns its exit code.

    Raises:
        UserError: it is a run of the user's own script.
        MissingDependencyError: this installation cannot train.
    """
    if (script := script_of(run_dir)) is not None:
        raise UserError(
            f"{run_dir.name} runs {script}, your own script, so isles does not know its model",
            where=str(run_dir.path),
            fix=f"use isles {verb} only for runs of the built-in trainer; your script must do it "
            "itself",
        )
    module, words = "isles.train.verbs", [verb, str(run_dir.path), *option_words(options)]
    if (owner := run_dir.owner) and verb == "export" and not options.get("output"):
        raise not_own("write into another user's run: give --output", owner, run_dir.path)
    offline = False
    if owner:
        sys.stderr.write(
            f"{run_dir.name} belongs to {owner}, so isles uses no code, container, file or "
            "repository named in it\n"
        )
        # Its files must not make the Hugging Face libraries connect, with this user's token.
        offline = not options.get("push-to-hub")
    attempt = run_dir.last_attempt()
    fleet = read_own_fleet(attempt) if attempt else None
    container = fleet.container if fleet else None
    if container is not None and not is_in_container():
        return run_module("isles.launch.container", json.dumps(container), module, *words)
    require_train()
    return run_module(module, *words, offline=offline)


def option_words(options: Mapping[str, object]) -> list[str]:
    """Options as command-line words, without options that are None or False."""
    return [
        f"--{name}" if value is True else f"--{name}={value}"
        for name, value in options.items()
        if value is not None and value is not False
    ]


def run_module(module: str, *arguments: str, offline: bool = False) -> int:
    """Run a module on this terminal; returns its exit code.

    Args:
        offline: the Hugging Face libraries use only files of this machine.
    """
    environ = {**os.environ, **({"HF_HUB_OFFLINE": "1"} if offline else {})}
    with subprocess.Popen([sys.executable, "-m", module, *arguments], env=environ) as child:
        try:
            code = child.wait()
        except KeyboardInterrupt:
            # Ctrl+C on the terminal has reached it too; inside a library it may not respond.
            try:
                child.wait(_ENDING_S)
            except (subprocess.TimeoutExpired, KeyboardInterrupt):
                child.kill()
            return ExitCode.INTERRUPTED
    return code if code >= 0 else 128 - code
