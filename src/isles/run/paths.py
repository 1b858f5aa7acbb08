"""Names of the files in a run directory."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from isles.run.manifest import number_of
from isles.run.owner import owner_of


class _Entry:
    """A file or folder with a fixed name below the folder of its owner."""

    def __init__(self, *parts: str) -> None:
        self._parts = parts

    def __get__(self, owner: Attempt | RunDir, kind: object = None) -> Path:
        return owner.path.joinpath(*self._parts)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt of a run: its records and the logs of its ranks."""

    path: Path
    number: int

    launch = _Entry("launch.json")
    """The started processes, written by the process that starts the ranks."""
    outcome = _Entry("outcome.json")
    """The outcome, which is absent while it runs and after a kill."""
    agent_log = _Entry("agent.log")
    last_step = _Entry("last-step")
    """The restart and last step of rank 0, as two numbers."""
    token = _Entry("token")
    """Secret for the authentication of agents and coordinator, with mode 0600."""
    fleet = _Entry("fleet.json")
    """The nodes of this attempt. See `isles.run.nodes`."""
    nodes = _Entry("nodes.json")
    """The connected nodes with their last heartbeats, written by the coordinator."""
    live = _Entry("live.json")
    """The last samples of all nodes and positions of all ranks, written by the coordinator."""
    stacks_request = _Entry("stacks-request.json")
    """Request for the stacks of all ranks."""
    stacks = _Entry("stacks.json")
    """The stacks of all ranks at the last request."""
    stop_request = _Entry("stop-request.json")
    script = _Entry("job.sh")
    """The submitted job script."""
    job = _Entry("job.json")
    """State of the job at the last query of its queue."""
    stopped = _Entry("stopped.json")
    """Mark that the ranks of a job have saved and ended, until the coordinator decides how to
    continue."""
    findings = _Entry("check.json")
    """The results of `isles check` before this attempt."""
    hangs = _Entry("hangs")
    """Stacks of the ranks at stuck steps."""

    @property
    def owner(self) -> str:
        """The other user who owns this attempt, or empty for this user.

        Several users may start one run in turn, so the owner of the run's folder does not matter.
        """
        folder = self.path.parent
        link = owner_of(folder) if folder.is_symlink() else ""
        return link or owner_of(self.path) or owner_of(self.launch)

    def rank_log(self, rank: int) -> Path:
        return self.path / f"rank-{rank}.log"

    def rank_record(self, rank: int) -> Path:
        """Host, pid and start time of one rank."""
        return self.path / f"rank-{rank}.json"

    def rank_error(self, rank: int, restart: int = 0) -> Path:
        """The error that ended one rank after this number of restarts."""
        name = f"rank-{rank}.restart-{restart}" if restart else f"rank-{rank}"
        return self.path / f"{name}.error.json"

    def rank_errors(self, restart: int) -> list[Path]:
        """The errors of all ranks after this number of restarts."""
        pattern = f"rank-*.restart-{restart}.error.json" if restart else "rank-*.error.json"
        found = sorted(self.path.glob(pattern))
        return found if restart else [path for path in found if ".restart-" not in path.name]

    def restart(self, number: int) -> Path:
        """The reason for a restart of all ranks. The first restart has number 1."""
        return self.path / f"restart-{number:03d}.json"

    def node_record(self, node: int) -> Path:
        """Host, pid and start time of one node's agent."""
        return self.path / f"node-{node}.json"

    def node_log(self, node: int) -> Path:
        return self.path / f"node-{node}.log"


@dataclass(frozen=True, slots=True)
class RunDir:
    """A run directory: one training from first to last step, over all restarts."""

    path: Path

    run_file = _Entry("run.yaml")
    """The run file of the user, unchanged."""
    resolved = _Entry("resolved.yaml")
    """The input of the ranks: every value with its origin."""
    node_of = _Entry("node-of.json")
    """On a node with only logs of the run: the first node, which has the run itself."""
    status = _Entry("status.json")
    """The current status of the run."""
    metrics = _Entry("metrics.jsonl")
    """One JSON line per recorded step."""
    telemetry = _Entry("telemetry")
    """The samples of each node's agent, over all attempts."""
    balance = _Entry("balance.json")
    """The division of the rows of each step, if it changes between steps."""
    remote = _Entry("remote.json")
    """The state of the run's copy in object storage. See `isles.run.upload`."""
    join_line = _Entry("join")
    """Join line of the hub, a secret with mode 0600."""
    outer = _Entry("outer")
    """The identity of this cluster among others, and files in transfer."""
    tunnel_line = _Entry("outer", "spool", "hivemind", "line")
    """Engine hivemind: a join line for this machine, a secret with mode 0600. Rank 0 keeps the
    connection to the hub open."""
    summary = _Entry("summary.json")
    """Final figures."""
    loss_plot = _Entry("loss.png")
    tokenizer = _Entry("tokenizer")
    base = _Entry("base")
    """Files of the initial model, other than weights, that an export needs."""
    checkpoints = _Entry("checkpoints")
    """One folder per checkpoint."""
    model = _Entry("model")
    """The exported Hugging Face folder."""
    tensorboard = _Entry("logs", "runs")
    node_logs = _Entry("logs", "distributed_training")

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def owner(self) -> str:
        """The other user who owns this run, by its last attempt, or empty for this user."""
        attempt = self.last_attempt()
        return (attempt.owner if attempt else "") or owner_of(self.resolved)

    def reference(self, part: str) -> Path:
        """Scores of pairs before training (dpo), for the part training or validation."""
        return self.path / f"reference-{part}.npz"

    def tracker_record(self, kind: str) -> Path:
        """A tracker's own id of the run, such as wandb's."""
        return self.path / "track" / f"{kind}.json"

    def node_telemetry(self, node: int) -> Path:
        """Samples of a node, one JSON line each, dense at the end and sparse before."""
        return self.telemetry / f"node-{node}.jsonl"

    def latest_node_log(self, node: int) -> Path:
        """Link to the newest log of a node, with the lines of its agent and its ranks."""
        return self.node_logs / f"latest_node{node}.log"

    def attempts(self) -> list[Attempt]:
        """Every attempt of this run, oldest first."""
        folder = self.path / "attempts"
        if not os.access(folder, os.R_OK | os.X_OK):  # missing, or another user's
            return []
        numbers = (number_of(entry.name) for entry in folder.iterdir())
        return [self.attempt(number) for number in sorted(n for n in numbers if n is not None)]

    def attempt(self, number: int) -> Attempt:
        """The attempt of this number, whether or not it exists."""
        return Attempt(self.path / "attempts" / f"{number:03d}", number)

    def last_attempt(self) -> Attempt | None:
        attempts = self.attempts()
        return attempts[-1] if attempts else None


def is_file(path: Path) -> bool:
    """True if the file exists. False also in a folder without permission for this user."""
    return os.path.isfile(path)  # noqa: PTH113
