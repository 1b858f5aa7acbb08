"""Fixes for a bucket that clusters cannot use."""

from __future__ import annotations

FIXES: dict[str, str] = {
    "away": "check this machine's connection to the bucket, and the status page of the provider; "
    "a longer outer.deadline tolerates longer outages",
    "full": "free some space in the bucket; clusters retry automatically",
    "forbidden": "give this machine credentials that may read, write, list and delete, in a "
    "place that the provider's tools use (AWS_PROFILE, ~/.aws, gcloud, a role)",
    "missing": "create the bucket, or correct outer.url",
    "unconditional": "use a bucket with conditional writes (AWS S3, Google, R2, B2, MinIO), or "
    "engine hub",
    "odd": "isles did not write this object; delete it, and check who can write to the bucket",
}
"""The fix for each kind of `StoreError` (`isles.run.objects`) at outer.url."""
