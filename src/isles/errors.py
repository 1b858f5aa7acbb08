"""Errors that a user can fix, their ids, and the exit codes of every isles command."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Sequence
from enum import IntEnum

MORE = "  more: isles explain "
"""Start of the last line of a printed error, before its id."""
_ID = re.compile(r"[a-z]+(?:\.[a-z]+)*")


class ExitCode(IntEnum):
    """Exit codes of every command and every rank."""

    OK = 0
    USER = 1
    """An error in the run file, the command line, the data, or the installation."""
    PREFLIGHT = 2
    TRAINING = 3
    OUT_OF_MEMORY = 4
    COMMUNICATION = 5
    HANDOVER = 84
    """Only from a rank to its agent: saved, and ready to resume immediately with other nodes."""
    REQUEUE = 85
    """Stopped before the end with a saved checkpoint. Start again to resume."""
    INTERRUPTED = 130


class UserError(Exception):
    """An error that the user can fix. isles prints it without a traceback.

    Args:
        what: the problem, with the value.
        where: file:line, key, host or rank.
        fix: an instruction that solves the problem.
        id: id of its paragraph in docs/troubleshooting.md, for `isles explain`. None is the id of
            the class. An empty id has no paragraph.
    """

    exit_code = ExitCode.USER
    id = "usage"

    def __init__(self, what: str, *, where: str = "", fix: str = "", id: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.fix = fix
        if id is not None:
            self.id = id
        self.ids: tuple[str, ...] = (self.id,)
        """The ids of all errors, if this error collects several."""

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        return f"{text}\n  fix: {self.fix}" if self.fix else text


class ConfigError(UserError):
    """One issue in a run file or in an override."""

    id = "config"


class ConfigErrors(UserError):
    """Every issue found in a run file, together."""

    id = "config"

    def __init__(self, issues: Sequence[ConfigError]) -> None:
        assert issues
        super().__init__("\n".join(str(issue) for issue in issues))
        self.issues = tuple(issues)
        self.ids = ids_of(issues)


class DataError(UserError):
    """A data source is not readable, or has no training data."""

    id = "data"


class MissingDependencyError(UserError):
    """A package that this command needs is not installed."""

    id = "packages.missing"


def not_installed(package: str, user: str, key: str, extra: str) -> MissingDependencyError | None:
    """The error to raise if a required package is not installed. Imports nothing.

    Args:
        user: the feature that needs it, such as `strategy deepspeed`.
        key: the key of the run file for this feature.
        extra: the optional dependency of isles that installs it.
    """
    if importlib.util.find_spec(package) is not None:
        return None
    return MissingDependencyError(
        f"{user} needs the package {package}, which is not installed",
        where=key,
        fix=f"pip install 'isles[{extra}]'",
    )


class PreflightError(UserError):
    """A machine failed a check for the run."""

    exit_code = ExitCode.PREFLIGHT
    id = "machine"


class TrainingError(UserError):
    """Training cannot continue, for example after a loss that is not finite or a damaged
    checkpoint."""

    exit_code = ExitCode.TRAINING
    id = "training"


class OutOfMemoryError(UserError):
    """A GPU or the machine has too little memory."""

    exit_code = ExitCode.OUT_OF_MEMORY
    id = "memory"


class CommunicationError(UserError):
    """Ranks or machines cannot reach each other in time."""

    exit_code = ExitCode.COMMUNICATION
    id = "communication"


def ids_of(errors: Iterable[UserError]) -> tuple[str, ...]:
    """The ids of several errors, each once."""
    return tuple(dict.fromkeys(id for error in errors for id in error.ids))


def more_lines(ids: Iterable[object], printed: str = "") -> list[str]:
    """The last lines of a printed error: `isles explain` with each of its ids.

    Args:
        ids: ids of the error. Invalid ids, such as an empty id or data from another machine, have
            no line.
        printed: the text before them, which may already have such a line of another isles.
    """
    if MORE.strip() in printed:
        return []
    return [f"{MORE}{id}" for id in dict.fromkeys(ids) if isinstance(id, str) and _ID.fullmatch(id)]


def cut_more(text: str) -> tuple[str, str]:
    """Text of another isles without its `more_lines`, and the first id."""
    mark = MORE.strip()
    lines = text.splitlines()
    ids = [line.partition(mark)[2].strip() for line in lines if mark in line]
    return "\n".join(line for line in lines if mark not in line), ids[0] if ids else ""
