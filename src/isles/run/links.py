"""Speeds that `isles check` has measured between hosts: a record in the output folder.

The record is `.links.json`. If another user has made that file, the record is `.links.UID.json`
with the id of this user. isles reads only records of this user, because a plan depends on them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any

from isles.run.entry import is_own
from isles.run.owner import OwnRecord
from isles.run.records import MAX_LIST_BYTES, read_own, write_record
from isles.run.state import number_of

_LATEST_S = 2.5e11
"""The year 9892. Python's calendar ends soon after it."""

Pairs = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""Values by pair of hosts: bytes_per_s (or None), rtt_s, at."""


@dataclass(frozen=True, slots=True)
class MeasuredLinks:
    """The slowest link between some hosts, and the time of the oldest measurement."""

    bytes_per_s: float
    rtt_s: float
    at: float


def keep_links(output_dir: Path, pairs: Pairs, names: Mapping[str, str], at: float) -> None:
    """Add measured pairs to the record.

    Args:
        pairs: measurements by the hosts' own names.
        names: own names of the hosts, by their ssh names.
        at: now, seconds since the epoch.
    """
    older = _read(output_dir)
    merged = {host: dict(others) for host, others in _pairs_of(older).items()}
    for host, others in pairs.items():
        dated = {other: {**link, "at": at} for other, link in others.items()}
        merged[host] = merged.get(host, {}) | dated
    record = {"at": at, "names": {**_names_of(older), **names}, "pairs": merged}
    with suppress(OSError):  # without it, a plan uses guesses
        output_dir.mkdir(parents=True, exist_ok=True)
        shared, own = _paths(output_dir)
        write_record(shared if is_own(shared) else own, record, durable=False)


def read_links(output_dir: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """All measured pairs of this user."""
    return _pairs_of(_read(output_dir))


def measured_links(output_dir: Path, hosts: Sequence[str]) -> MeasuredLinks | None:
    """Measurements between these hosts, or None if a host has no measurement.

    Args:
        hosts: ssh names or own names of the hosts.
    """
    record = _read(output_dir)
    pairs, names = _pairs_of(record), _names_of(record)
    own = [names.get(host, host) for host in hosts]
    found = {
        (a, b): link
        for a, b in permutations(own, 2)
        if (link := pairs.get(a, {}).get(b)) and number_of(link, "bytes_per_s")
    }
    # For many hosts, isles measures only a ring.
    if {a for a, _ in found} != set(own) or {b for _, b in found} != set(own):
        return None
    links = found.values()
    return MeasuredLinks(
        min(number_of(link, "bytes_per_s") or 0.0 for link in links),
        max(number_of(link, "rtt_s") or 0.0 for link in links),
        min(number_of(link, "at") or 0.0 for link in links),
    )


def _paths(output_dir: Path) -> tuple[Path, Path]:
    return output_dir / ".links.json", output_dir / f".links.{os.geteuid()}.json"


def _read(output_dir: Path) -> OwnRecord:
    shared, own = _paths(output_dir)
    return read_own(shared, MAX_LIST_BYTES) or read_own(own, MAX_LIST_BYTES) or OwnRecord()


def _names_of(record: OwnRecord) -> dict[str, str]:
    names = record.get("names")
    found = names.items() if isinstance(names, dict) else ()
    return {name: own for name, own in found if isinstance(own, str)}


def _pairs_of(record: OwnRecord) -> dict[str, dict[str, dict[str, Any]]]:
    # A damaged link counts as not measured.
    pairs = record.get("pairs")
    found = pairs.items() if isinstance(pairs, dict) else ()
    return {
        host: {other: link for other, link in others.items() if _is_link(link)}
        for host, others in found
        if isinstance(others, dict)
    }


def _is_link(link: object) -> bool:
    if not isinstance(link, dict):
        return False
    rate, rtt_s, at = (
        0.0 if link.get(key) is None else number_of(link, key)
        for key in ("bytes_per_s", "rtt_s", "at")
    )
    if rate is None or rtt_s is None or at is None:
        return False
    return (rate == 0 or rate >= 1) and rtt_s >= 0 and 0 <= at < _LATEST_S
