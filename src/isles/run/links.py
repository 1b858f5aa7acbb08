"""What `isles check` has measured between hosts: `.links.json` in the output folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any

from isles.run.records import MAX_LIST_BYTES, read_record, write_record
from isles.run.state import number_of

_FILE = ".links.json"

Pairs = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""By host and host: bytes_per_s (None: not measured), rtt_s, at."""


@dataclass(frozen=True, slots=True)
class MeasuredLinks:
    """The slowest of the links between some hosts, and when the oldest of them was measured."""

    bytes_per_s: float
    rtt_s: float
    at: float


def keep_links(output_dir: Path, pairs: Pairs, names: Mapping[str, str], at: float) -> None:
    """Add pairs to those that were measured before.

    Args:
        pairs: by the names that the hosts give themselves.
        names: those names, by the names by which ssh reaches the hosts.
        at: now, seconds since the epoch.
    """
    older = read_record(output_dir / _FILE, MAX_LIST_BYTES) or {}
    merged = {host: dict(others) for host, others in read_links(output_dir).items()}
    for host, others in pairs.items():
        dated = {other: {**link, "at": at} for other, link in others.items()}
        merged[host] = merged.get(host, {}) | dated
    known = older.get("names")
    names = {**(known if isinstance(known, dict) else {}), **names}
    with suppress(OSError):  # without it a plan guesses, as before
        output_dir.mkdir(parents=True, exist_ok=True)
        record = {"at": at, "names": names, "pairs": merged}
        write_record(output_dir / _FILE, record, durable=False)


def read_links(output_dir: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """All pairs that were measured."""
    pairs = (read_record(output_dir / _FILE, MAX_LIST_BYTES) or {}).get("pairs")
    return pairs if isinstance(pairs, dict) else {}


def measured_links(output_dir: Path, hosts: Sequence[str]) -> MeasuredLinks | None:
    """What was measured between these hosts; None: nothing, or not to each of them.

    Args:
        hosts: as ssh reaches them, or as they name themselves.
    """
    names = (read_record(output_dir / _FILE, MAX_LIST_BYTES) or {}).get("names")
    known = names if isinstance(names, dict) else {}
    pairs, own = read_links(output_dir), [str(known.get(host, host)) for host in hosts]
    found = {
        (a, b): link
        for a, b in permutations(own, 2)
        if (link := pairs.get(a, {}).get(b)) and number_of(link, "bytes_per_s")
    }
    # Of many hosts only a ring is measured.
    if {a for a, _ in found} != set(own) or {b for _, b in found} != set(own):
        return None
    links = found.values()
    return MeasuredLinks(
        min(number_of(link, "bytes_per_s") or 0.0 for link in links),
        max(number_of(link, "rtt_s") or 0.0 for link in links),
        min(number_of(link, "at") or 0.0 for link in links),
    )
