"""The progress of a run."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any


class Progress:
    """Counts of the whole run, over all its attempts.

    Args:
        samples: the global cursor, which is the index of the next sample. In a cluster that shares
            samples with other clusters, it counts the cluster's own samples.
        tokens: read by the model, without padding, trained on or not.
        target_tokens: trained on.
        elapsed_s: seconds of training in earlier attempts.
    """

    def __init__(
        self, *, step: int, samples: int, tokens: int, target_tokens: int, elapsed_s: float
    ) -> None:
        self.step = step
        self.samples = samples
        self.tokens = tokens
        self.target_tokens = target_tokens
        self._elapsed_before_s = elapsed_s
        self._began = time.monotonic()
        self.steps_here = 0
        """Inner steps of this attempt."""
        self._step_before = step
        self._history: list[tuple[int, int, int, int]] = []

    @classmethod
    def fresh(cls) -> Progress:
        """The progress of a new run."""
        return cls(step=0, samples=0, tokens=0, target_tokens=0, elapsed_s=0.0)

    @classmethod
    def from_manifest(cls, manifest: Mapping[str, Any]) -> Progress:
        """The progress of a run that resumes from a checkpoint."""
        return cls(
            step=int(manifest["step"]),
            samples=int(manifest["samples"]),
            tokens=int(manifest["tokens"]),
            target_tokens=int(manifest.get("target_tokens", manifest["tokens"])),
            elapsed_s=float(manifest["elapsed_s"]),
        )

    @property
    def elapsed_s(self) -> float:
        """Seconds of training over all attempts."""
        return self._elapsed_before_s + time.monotonic() - self._began

    def advance(self, *, samples: int, tokens: int, target_tokens: int) -> None:
        """Count one inner step. `samples` is the new cursor; the token counts are for this step."""
        self._step_before = self.step
        self.steps_here += 1
        self._history.append((self.step, self.samples, self.tokens, self.target_tokens))
        self.step += 1
        self.samples = samples
        self.tokens += tokens
        self.target_tokens += target_tokens

    def forget_history(self) -> None:
        """Confirm that every step so far was good."""
        self._history.clear()

    def rewind_to(self, steps_here: int) -> None:
        """Go back to the last step whose weights are kept.

        Args:
            steps_here: inner steps of this attempt, since `forget_history` or later.
        """
        back = self.steps_here - steps_here
        assert 0 <= back <= len(self._history), "the history reaches back to the last check"
        if back:
            self.step, self.samples, self.tokens, self.target_tokens = self._history[-back]
            self.steps_here = steps_here

    def skip_to(self, step: int) -> None:
        """Give the last step a later number, which other clusters have reached."""
        self.step = max(self.step, step)

    def has_reached(self, every: int) -> bool:
        """True if the last step, or a step number that it skipped, is a multiple of `every`."""
        return self.step // every > self._step_before // every
