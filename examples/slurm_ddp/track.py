"""Experiment tracking of the example: MLflow or Weights & Biases, on rank 0 where it is wanted."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, Literal

TRACKERS = ("none", "mlflow", "wandb")


def require_tracker(kind: str) -> None:
    """Refuse a tracker that is not installed, before anybody waits for a rank that has ended.

    Raises:
        ValueError: it is not.
    """
    if kind != "none" and find_spec(kind) is None:
        raise ValueError(f"--track {kind}: it is not installed\n  fix: pip install {kind}")


class Tracker:
    """Takes figures, and ends."""

    def __init__(self, kind: str, settings: Mapping[str, Any]) -> None:
        """Begin a run, unless the kind is none. Where it goes, the tracker's own variables say.

        Raises:
            ValueError: the tracker does not begin one.
        """
        self._module: Any = None  # neither package says what its functions take
        self._kind = kind
        try:
            self._begin(dict(settings))
        except Exception as error:  # each has many kinds of its own
            what = (str(error).splitlines() or [type(error).__name__])[0]
            raise ValueError(f"--track {kind}: {what}\n  fix: or leave --track out") from error

    def _begin(self, settings: dict[str, Any]) -> None:
        match self._kind:
            case "mlflow":
                import mlflow

                self._module = mlflow
                mlflow.set_experiment("train_distributed_example")
                mlflow.start_run()
                mlflow.log_params(settings)
            case "wandb":
                import wandb

                self._module = wandb
                wandb.init(project="train_distributed_example", config=settings)

    def log(self, figures: Mapping[str, float], epoch: int) -> None:
        """Figures of one epoch."""
        match self._kind:
            case "mlflow":
                self._module.log_metrics(dict(figures), step=epoch)
            case "wandb":
                self._module.log(dict(figures), step=epoch)

    def end(self, state: Literal["FINISHED", "FAILED"]) -> None:
        """Whether the run was finished."""
        match self._kind:
            case "mlflow":
                self._module.end_run(state)
            case "wandb":
                self._module.finish(exit_code=0 if state == "FINISHED" else 1)


def report(epoch: int, epochs: int, loss: float) -> None:
    """Let `isles status` know how far it is, where isles has started it; else nothing happens."""
    try:
        import isles
    except ImportError:
        return
    isles.report(epoch, total_steps=epochs, loss=loss)
