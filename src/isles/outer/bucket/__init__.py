"""Engine bucket: clusters that meet in object storage, without a hub.

Every cluster applies the hub's rules (`hub/core.py`) to one memory in the bucket
(`isles.run.objects`). `chain.py` keeps the memory, `replica.py` does the hub's own work, and
`api.py` has the requests of rank 0's client (a `Meeting` of `client/meeting.py`). Open `chain.py`
first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class BucketSettings:
    """Meeting place of the clusters of a run.

    Args:
        url: such as `s3://bucket/prefix`.
        rules: settings of the run (`isles.outer.hub.rules.Settings`).
    """

    url: str
    rules: Mapping[str, Any]
