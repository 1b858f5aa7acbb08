"""Engine bucket: clusters that meet in object storage, where no hub runs.

The hub's rules (`hub/core.py`) are applied by every cluster to one memory that lies in the bucket
(`isles.run.objects`). `chain.py` keeps the memory, `replica.py` does what a hub would do by itself,
`api.py` is what rank 0's client asks (as `client/api.py` asks a hub). Open `chain.py` first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class BucketSettings:
    """Where the clusters of a run meet.

    Args:
        url: as `s3://bucket/prefix`.
        rules: of the run, as a hub is told (`isles.outer.hub.rules.Settings`).
    """

    url: str
    rules: Mapping[str, Any]
