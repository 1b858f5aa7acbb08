"""Fixes for a bucket that clusters cannot use."""

from __future__ import annotations

FIXES: dict[str, str] = {
    "away": "look whether this machine reaches the bucket, and at the provider's state page; "
    "outer.deadline waits longer",
    "full": "free some space there; clusters try again by themselves",
    "forbidden": "give this machine credentials that may read, write, list and delete there, as "
    "the tools of your provider find them (AWS_PROFILE, ~/.aws, gcloud, a role)",
    "missing": "make the bucket, or correct outer.url",
    "unconditional": "use a bucket with conditional writes (AWS S3, Google, R2, B2, MinIO), or "
    "engine hub",
    "odd": "isles did not write this object; delete it, and check who can write to the bucket",
}
"""The fix for each kind of `StoreError` (`isles.run.objects`) at outer.url."""
