"""Errors that a user can mend, and the exit codes of every isles command."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum


class ExitCode(IntEnum):
    """What a command's exit status says; the same for the command line and for every rank."""

    OK = 0
    USER = 1
    """A fault in the run file, the command line, the data, or the installation."""
    PREFLIGHT = 2
    TRAINING = 3
    OUT_OF_MEMORY = 4
    COMMUNICATION = 5
    HANDOVER = 84
    """From rank to agent only: saved, to go on at once with other nodes."""
    REQUEUE = 85
    """Stopped before the end with a checkpoint saved: start again to go on."""
    INTERRUPTED = 130


class UserError(Exception):
    """An error that the user can mend; printed without a traceback.

    Args:
        what: what is wrong, with the value.
        where: file:line, key, host or rank.
        fix: what to do about it.
    """

    exit_code = ExitCode.USER

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.fix = fix

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        return f"{text}\n  fix: {self.fix}" if self.fix else text


class ConfigError(UserError):
    """One fault in a run file or in an override."""


class ConfigErrors(UserError):
    """Every fault found in a run file, together."""

    def __init__(self, faults: Sequence[ConfigError]) -> None:
        assert faults
        super().__init__("\n".join(str(fault) for fault in faults))
        self.faults = tuple(faults)


class DataError(UserError):
    """A data source cannot be read or holds nothing to train on."""


class MissingDependencyError(UserError):
    """A package that this command needs is not installed."""


class PreflightError(UserError):
    """A machine is not fit for the run."""

    exit_code = ExitCode.PREFLIGHT


class TrainingError(UserError):
    """Training cannot go on: a loss that is not finite, a checkpoint that is not whole."""

    exit_code = ExitCode.TRAINING


class OutOfMemoryError(UserError):
    """A GPU or the machine has too little memory."""

    exit_code = ExitCode.OUT_OF_MEMORY


class CommunicationError(UserError):
    """Ranks or machines cannot reach one another in time."""

    exit_code = ExitCode.COMMUNICATION
