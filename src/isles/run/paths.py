"""Names of the files in a run directory."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from isles.run.manifest import number_of
from isles.run.owner import owner_of


class _Entry:
    """A file or folder at a fixed place below the folder of its owner."""

    def __init__(self, *parts: str) -> None:
        self._parts = parts

    def __get__(self, owner: Attempt | RunDir, kind: object = None) -> Path:
        return owner.path.joinpath(*self._parts)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start of a run: its records and the logs of its ranks."""

    path: Path
    number: int

    launch = _Entry("launch.json")
    """Who started what; written by whoever starts the ranks."""
    outcome = _Entry("outcome.json")
    """How it ended; absent while it runs and after a kill."""
    agent_log = _Entry("agent.log")
    last_step = _Entry("last-step")
    """The restart and the step that rank 0 has done last: two numbers."""
    token = _Entry("token")
    """Secret by which agents and coordinator authenticate each other; mode 0600."""
    fleet = _Entry("fleet.json")
    """The nodes of this start; see `isles.run.nodes`."""
    nodes = _Entry("nodes.json")
    """Which nodes are connected, and when each was last seen; written by the coordinator."""
    live = _Entry("live.json")
    """The last samples of all nodes, and where each rank is; written by the coordinator."""
    stacks_request = _Entry("stacks-request.json")
    """Left by whoever wants to see the stacks of all ranks now."""
    stacks = _Entry("stacks.json")
    """The stacks of all ranks at the last request."""
    stop_request = _Entry("stop-request.json")
    script = _Entry("job.sh")
    """The job script that was submitted."""
    job = _Entry("job.json")
    """State of the job when its queue was last asked."""
    stopped = _Entry("stopped.json")
    """That the ranks of a job have saved and ended, until the coordinator decides what follows."""
    findings = _Entry("check.json")
    """What `isles check` found before this start."""
    hangs = _Entry("hangs")
    """Stacks of the ranks at steps that took far too long."""

    @property
    def owner(self) -> str:
        """Another user whose start this is; empty: this user's own.

        Several may start one run in turn, so the folder of the run itself does not matter.
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
        """The error that ended one rank after so many restarts."""
        name = f"rank-{rank}.restart-{restart}" if restart else f"rank-{rank}"
        return self.path / f"{name}.error.json"

    def rank_errors(self, restart: int) -> list[Path]:
        """The errors of all ranks after so many restarts."""
        pattern = f"rank-*.restart-{restart}.error.json" if restart else "rank-*.error.json"
        found = sorted(self.path.glob(pattern))
        return found if restart else [path for path in found if ".restart-" not in path.name]

    def restart(self, number: int) -> Path:
        """Why all ranks were started again; the first restart has number 1."""
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
    """The run file as it was given, word for word."""
    resolved = _Entry("resolved.yaml")
    """What the ranks read: every value, and where it came from."""
    node_of = _Entry("node-of.json")
    """On a node that keeps only logs of the run: which first node has the run itself."""
    status = _Entry("status.json")
    """What the run is doing now."""
    metrics = _Entry("metrics.jsonl")
    """One JSON line per recorded step."""
    telemetry = _Entry("telemetry")
    """What the agent of each node has sampled, over all starts."""
    balance = _Entry("balance.json")
    """How the rows of each step were divided, where that changes from step to step."""
    remote = _Entry("remote.json")
    """What this run directory has to do with its copy in object storage; see `isles.run.upload`."""
    join_line = _Entry("join")
    """Join line of the hub; a secret, mode 0600."""
    outer = _Entry("outer")
    """Who this cluster is among others, and files on their way to and from them."""
    tunnel_line = _Entry("outer", "spool", "hivemind", "line")
    """Engine hivemind: a join line for this machine, whose way to the hub rank 0 holds open; a
    secret, mode 0600."""
    summary = _Entry("summary.json")
    """Final figures."""
    loss_plot = _Entry("loss.png")
    tokenizer = _Entry("tokenizer")
    base = _Entry("base")
    """What an export needs of the model that the run begins with, beside its weights."""
    checkpoints = _Entry("checkpoints")
    """One folder a checkpoint."""
    model = _Entry("model")
    """The exported Hugging Face folder."""
    tensorboard = _Entry("logs", "runs")
    node_logs = _Entry("logs", "distributed_training")

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def owner(self) -> str:
        """Another user whose run this is, by its last start; empty: this user's own."""
        attempt = self.last_attempt()
        return (attempt.owner if attempt else "") or owner_of(self.resolved)

    def reference(self, part: str) -> Path:
        """Scores of pairs before training (dpo): of the part training or validation."""
        return self.path / f"reference-{part}.npz"

    def tracker_record(self, kind: str) -> Path:
        """A tracker's own id of the run, such as wandb's."""
        return self.path / "track" / f"{kind}.json"

    def node_telemetry(self, node: int) -> Path:
        """Samples of a node, one JSON line each: close together at the end, sparse before."""
        return self.telemetry / f"node-{node}.jsonl"

    def latest_node_log(self, node: int) -> Path:
        """Link to the newest log of a node: the lines of its agent and its ranks."""
        return self.node_logs / f"latest_node{node}.log"

    def attempts(self) -> list[Attempt]:
        """Every start of this run, oldest first."""
        folder = self.path / "attempts"
        if not os.access(folder, os.R_OK | os.X_OK):  # there is none, or it is another user's
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
    """Whether there is such a file; False also in a folder that is closed to this user."""
    return os.path.isfile(path)  # noqa: PTH113
