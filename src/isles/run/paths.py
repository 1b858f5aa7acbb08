"""Where everything lies inside a run directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start of a run: its records and the logs of its ranks."""

    path: Path
    number: int

    @property
    def launch(self) -> Path:
        """Who started what: written by whoever starts the ranks."""
        return self.path / "launch.json"

    @property
    def outcome(self) -> Path:
        """How it ended: written last; absent while it runs or after a kill."""
        return self.path / "outcome.json"

    @property
    def agent_log(self) -> Path:
        """Output of the agent."""
        return self.path / "agent.log"

    def rank_log(self, rank: int) -> Path:
        """All that one rank printed."""
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

    @property
    def last_step(self) -> Path:
        """The restart and the step that rank 0 has done last: two numbers."""
        return self.path / "last-step"

    @property
    def token(self) -> Path:
        """The secret by which agents and coordinator know one another, for this user only."""
        return self.path / "token"

    @property
    def fleet(self) -> Path:
        """The nodes of this start, as its launcher or its job has settled them."""
        return self.path / "fleet.json"

    @property
    def stop_request(self) -> Path:
        """A stop request, from whoever can see this directory."""
        return self.path / "stop-request.json"

    @property
    def script(self) -> Path:
        """The job script that was submitted, word for word."""
        return self.path / "job.sh"

    @property
    def job(self) -> Path:
        """How a queue says that its job stands, when it was last asked."""
        return self.path / "job.json"

    @property
    def stopped(self) -> Path:
        """That the ranks of a job have saved and stopped, until its script decides what follows."""
        return self.path / "stopped.json"

    @property
    def findings(self) -> Path:
        """What was found wrong with the machines before this start."""
        return self.path / "check.json"

    @property
    def stalls(self) -> Path:
        """Stacks of all ranks at steps that took far too long."""
        return self.path / "stalls"

    @property
    def nodes(self) -> Path:
        """All nodes of a start on several: who is there, and when it was last heard of."""
        return self.path / "nodes.json"

    def node_record(self, node: int) -> Path:
        """The agent of one node: host, pid and start time."""
        return self.path / f"node-{node}.json"

    def node_log(self, node: int) -> Path:
        """Output of one node's agent."""
        return self.path / f"node-{node}.log"


@dataclass(frozen=True, slots=True)
class RunDir:
    """A run directory: one training from first to last step, over all restarts."""

    path: Path

    @property
    def name(self) -> str:
        """The run's name, as commands take it."""
        return self.path.name

    @property
    def run_file(self) -> Path:
        """The run file as it was given, word for word."""
        return self.path / "run.yaml"

    @property
    def node_of(self) -> Path:
        """On a node other than the head: whose run this is; the node keeps only its own logs."""
        return self.path / "node-of.json"

    @property
    def resolved(self) -> Path:
        """What the ranks read: every value, and where it came from."""
        return self.path / "resolved.yaml"

    @property
    def status(self) -> Path:
        """What the run is doing now."""
        return self.path / "status.json"

    @property
    def metrics(self) -> Path:
        """One JSON line per recorded step."""
        return self.path / "metrics.jsonl"

    @property
    def balance(self) -> Path:
        """How the rows of each step were dealt, where that is not the same at all steps."""
        return self.path / "balance.json"

    def reference(self, part: str) -> Path:
        """Scores of pairs before training (dpo): of the part training or validation."""
        return self.path / f"reference-{part}.npz"

    @property
    def join_line(self) -> Path:
        """How this cluster reaches the others of its run: a secret, for this user only."""
        return self.path / "join"

    @property
    def outer(self) -> Path:
        """Who this cluster is among others, and files on their way to and from them."""
        return self.path / "outer"

    @property
    def summary(self) -> Path:
        """Final figures."""
        return self.path / "summary.json"

    @property
    def loss_plot(self) -> Path:
        """The loss curve as a picture."""
        return self.path / "loss.png"

    @property
    def tokenizer(self) -> Path:
        """The tokenizer that the run trains with."""
        return self.path / "tokenizer"

    @property
    def checkpoints(self) -> Path:
        """One folder a checkpoint."""
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        """The exported Hugging Face folder."""
        return self.path / "model"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard's event files."""
        return self.path / "logs" / "runs"

    def tracker_record(self, kind: str) -> Path:
        """A tracker's own id of the run, such as wandb's."""
        return self.path / "track" / f"{kind}.json"

    def attempts(self) -> list[Attempt]:
        """Every start of this run, oldest first."""
        folder = self.path / "attempts"
        if not folder.is_dir():
            return []
        numbers = sorted(int(entry.name) for entry in folder.iterdir() if entry.name.isdigit())
        return [self.attempt(number) for number in numbers]

    def attempt(self, number: int) -> Attempt:
        """The attempt of this number, whether or not it exists."""
        return Attempt(self.path / "attempts" / f"{number:03d}", number)

    def last_attempt(self) -> Attempt | None:
        """The newest start of this run."""
        attempts = self.attempts()
        return attempts[-1] if attempts else None
