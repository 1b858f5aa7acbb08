"""Why a PBS job waits, or how it ended, in words, and what can be done about it."""

from __future__ import annotations

import re
from collections.abc import Mapping

_LETTERS = {
    "H": ("it is held", "qrls {job} lets it go, if the hold is yours: qstat -f {job}"),
    "W": ("it waits for its start time, or for files that are copied for it", ""),
    "T": ("it is being moved to another server", ""),
    "M": ("it was moved to another server", ""),
}

# What a scheduler writes into the comment of a job: OpenPBS, and Torque under Maui or Moab.
_COMMENTS = (
    (
        r"can never run",
        "it can never run: the cluster has no nodes of this kind",
        "compare nodes, gpus_per_node, cpus_per_node and memory_per_node with `pbsnodes -a`; then "
        "isles stop, correct the run file, start again",
    ),
    (
        r"insufficient amount of (queue|server) resource",
        "a limit of the queue or the server is reached",
        "wait, or ask for less",
    ),
    (r"insufficient amount of resource", "nodes of this kind are taken", ""),
    (r"not enough (free )?(total )?nodes", "there are not enough free nodes", ""),
    (r"no available resources on nodes|nodes? (are )?unavailable", "nodes are taken or down", ""),
    (
        r"would exceed .*limit|job limit|has reached .*limit|maximum number of (running )?jobs|"
        r"exceeds .*limit",
        "a limit of the user, group or project is reached",
        "wait for other jobs of yours to end",
    ),
    (r"queue not started|queue .*stopped", "its queue is stopped by the administrator", ""),
    (
        r"dedicated time|cross (dedicated|reservation)|reservation|conflict with",
        "it would run into a reservation, such as one for maintenance",
        "a shorter launcher.time may fit before it",
    ),
    (r"prime ?time", "jobs of its queue run at certain hours only", ""),
    (r"depend", "it waits for another job", ""),
    (r"higher priority|strict order|fair ?share", "other jobs come first", ""),
    (r"held|system hold", "it is held", "qrls {job} lets it go, if the hold is yours"),
    (
        r"license",
        "it waits for a licence",
        "",
    ),
)

# From PBS's own header: what a negative exit status stands for.
_ENDINGS = {
    -1: "it could not be started, before its files were in place",
    -2: "it could not be started, after its files were in place",
    -3: "it could not be started, and is tried again",
    -4: "its node was started anew while it ran",
    -5: "its node was started anew while it ran, and it is tried again",
    -6: "its node was started anew while it ran",
    -10: "one of its nodes refused it",
    -11: "it was ended to be run again",
    -12: "it ended, and is run again from a checkpoint",
    -20: "the prologue of one of its nodes failed",
}

_LIMITS = {
    -24: "file size",
    -25: "CPU time",
    -26: "CPU use",
    -27: "memory",
    -28: "virtual memory",
    -29: "time",
}

_DELETED = (271, 143)
"""256 + TERM; and 128 + TERM where the script's shell has ended of it."""


def pending_reason(letter: str, attributes: Mapping[str, str], job_id: str) -> tuple[str, str]:
    """Why a job waits, and what can be done.

    Args:
        letter: its job_state.
        attributes: of `qstat -f`.
        job_id: its id.
    """
    comment = attributes.get("comment", "").strip()
    said = f" ({comment})" if comment else ""
    for pattern, meaning, fix in _COMMENTS:
        if comment and re.search(pattern, comment, re.IGNORECASE):
            return f"{meaning}{said}", fix.format(job=job_id)
    if letter in _LETTERS:
        meaning, fix = _LETTERS[letter]
        return f"{meaning}{said}", fix.format(job=job_id)
    if comment:
        return f"it waits: {comment}", ""
    return "it waits for its turn: the scheduler has not said why", ""


def ended_reason(status: str, attributes: Mapping[str, str]) -> tuple[str, str]:
    """How a job ended that is over, and what can be done.

    Args:
        status: its Exit_status; empty where it never ran.
        attributes: of `qstat -f`.
    """
    if not re.fullmatch(r"-?\d+", status):
        comment = attributes.get("comment", "")
        return f"it was deleted before it ran{f' ({comment})' if comment else ''}", ""
    code = int(status)
    if code in _LIMITS:
        return _over_limit(_LIMITS[code])
    if code in _ENDINGS:
        return _ENDINGS[code], _AGAIN
    if code in _DELETED:
        return "it was deleted (qdel)", ""
    if code > 128:
        return f"its script was killed by signal {code - (256 if code > 256 else 128)}", _AGAIN
    return ("its script ended" if code == 0 else f"its script ended with exit status {code}"), ""


_AGAIN = "`isles train` again goes on from the last checkpoint"


def _over_limit(what: str) -> tuple[str, str]:
    if what == "time":
        fix = "a longer launcher.time; or a longer launcher.save_before, if saving took too long"
    elif "memory" in what:
        fix = "a larger launcher.memory_per_node, or a smaller training.micro_batch_size"
    else:
        fix = "ask the administrator about this limit"
    return f"it was killed: it went over its limit of {what}", fix
