"""From the shares that a run file names to the share of each rank."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TypeVar

from isles.errors import ConfigError

log = logging.getLogger(__name__)

Number = TypeVar("Number", int, float)


def rank_shares(
    shares: Mapping[str, float], hosts: Sequence[str], *, may_miss: bool
) -> list[float]:
    """The share of each rank.

    A rank that is named has its own share. A host's share is divided over its other ranks. Where no
    host is named, every other rank has share 1; else every other host has.

    Args:
        shares: by host or rank number.
        hosts: of each rank.
        may_miss: whether hosts may come and go in this run, so that a name may be of one that is
            away.

    Raises:
        ConfigError: an unknown host or rank, or nothing but shares of 0.
    """
    _check_names(shares, hosts, "balance", may_miss=may_miss)
    has_hosts = any(name in hosts for name in shares)
    found = []
    for rank, host in enumerate(hosts):
        if str(rank) in shares and str(rank) not in hosts:
            found.append(shares[str(rank)])
        elif has_hosts:
            others = [r for r, other in enumerate(hosts) if other == host and str(r) not in shares]
            found.append(shares.get(host, 1.0) / len(others))
        else:
            found.append(1.0)
    if not any(found):
        raise ConfigError(
            "every rank has share 0",
            where="balance",
            fix="give at least one rank a share above 0",
            id="config.batch",
        )
    return found


def rank_sizes(
    sizes: Mapping[str, int], hosts: Sequence[str], *, may_miss: bool
) -> list[int | None]:
    """The micro-batch size of each rank by its host's name; None where the host is not named.

    Raises:
        ConfigError: an unknown host.
    """
    _check_names(sizes, hosts, "training.micro_batch_size", may_miss=may_miss, ranks=False)
    return [sizes.get(host) for host in hosts]


def _check_names(
    named: Mapping[str, Number],
    hosts: Sequence[str],
    key: str,
    *,
    may_miss: bool,
    ranks: bool = True,
) -> None:
    known = set(hosts) | ({str(rank) for rank in range(len(hosts))} if ranks else set())
    unknown = [name for name in named if name not in known]
    if not unknown:
        return
    what = f"{', '.join(unknown)}: no such host{' or rank' if ranks else ''} in this run"
    if may_miss:
        log.info("%s at present: %s", key, what)
        return
    there = f"hosts: {', '.join(dict.fromkeys(hosts))}"
    if ranks:
        there += f"; ranks: 0 to {len(hosts) - 1}"
    raise ConfigError(what, where=f"{key}.{unknown[0]}", fix=f"use one of these: {there}")
