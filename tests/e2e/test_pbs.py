"""The launcher pbs over pretend hosts, with a stand-in for PBS (tests/lab/pbs): real ssh, real
nodes, real ranks; the queue itself is a small program of ours."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from isles.run.checkpoints import list_checkpoints
from isles.run.paths import RunDir
from isles.run.records import read_record
from tests.e2e import typed
from tests.lab.home import PLACE, assert_places, until
from tests.lab.hosts import Lab
from tests.lab.pbs import pbs
from tests.runs import losses_of, rows_of

NUM_HOSTS = 2

ISLES = f"{sys.executable} -m isles"

RUN = """\
name: {name}
model: {{name_or_path: llama-2m, init: scratch}}
data: {{sources: [{{type: fake}}], seq_length: 32}}
training:
  {{max_steps: {steps}, global_batch_size: 4, micro_batch_size: 2, precision: 32-true,
   logging_steps: 1, eval_steps: null, eval_samples: 4}}
strategy: {{kind: {strategy}}}
balance: even
checkpoint: {{export_on_finish: false}}
track: [jsonl]
clusters:
  - launcher: {launcher}
    nodes: {nodes}
    gpus_per_node: 1
    device: cpu
    max_restarts: 0
"""


@dataclass
class Site:
    """A login node and what users do there."""

    lab: Lab
    flavour: str

    @property
    def home(self) -> Path:
        return self.lab.shared / self.flavour

    def sh(self, command: str) -> subprocess.CompletedProcess[str]:
        return self.lab.run("ctl", ["sh", "-c", f"cd /shared/{self.flavour} && {command}"])

    def isles(self, *words: str, code: int = 0) -> str:
        done = self.sh(f"{ISLES} {shlex.join(words)}")
        assert done.returncode == code, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def submit(self, name: str, launcher: str, steps: int, strategy: str = "ddp") -> RunDir:
        """Write a run file for two nodes, and start it."""
        text = RUN.format(name=name, launcher=launcher, steps=steps, nodes=2, strategy=strategy)
        (self.home / f"{name}.yaml").write_text(text)
        self.isles("train", f"{name}.yaml", "--detach")
        return RunDir(self.home / "runs" / f"{name}-1")

    def job(self, run_dir: RunDir) -> dict[str, Any]:
        """How its job stands, by `isles status`."""
        self.isles("status", run_dir.name, "--json")
        return read_record(run_dir.attempt(1).job) or {}

    def until(self, run_dir: RunDir, condition: Callable[[], Any]) -> Any:
        def said() -> str:
            logs = sorted(run_dir.attempt(1).path.glob("*.log"))
            return "\n".join(f"== {log.name}\n{log.read_text()[-2000:]}" for log in logs)

        return until(condition, said)

    def end(self, run_dir: RunDir) -> dict[str, Any]:
        """Its outcome, once its job is over too."""
        attempt = run_dir.attempt(1)
        asked_at = time.monotonic()

        def is_over() -> bool:
            """Asks now and then, for a script that was killed leaves no outcome; `isles status` in
            a loop would take from the ranks the time that they need."""
            nonlocal asked_at
            if attempt.outcome.exists() or time.monotonic() - asked_at < 3:
                return attempt.outcome.exists()
            asked_at = time.monotonic()
            return bool(self.job(run_dir).get("state") == "ended")

        self.until(run_dir, is_over)
        self.until(run_dir, lambda: self.job(run_dir).get("state") == "ended")
        for host in ("a1", "a2"):
            left = self.lab.run(host, ["pgrep", "-fa", f"isles.agent.*{run_dir.name}"])
            assert left.stdout == "", left.stdout
        return read_record(attempt.outcome) or {}


@pytest.fixture(scope="module")
def site(lab: Lab) -> Iterator[Site]:
    with pbs(lab, ("a1", "a2"), "openpbs"):
        found = Site(lab, "openpbs")
        found.home.mkdir()
        yield found


@pytest.fixture(scope="module")
def uninterrupted(lab: Lab) -> list[float]:
    """Losses of the same run on one machine."""
    home = lab.shared / "local"
    home.mkdir()
    local = {"launcher": "{kind: local}", "steps": 6, "nodes": 1, "strategy": "ddp"}
    (home / "run.yaml").write_text(RUN.format(name="r", **local))
    typed.isles("train", "run.yaml", cwd=home)
    return losses_of(RunDir(home / "runs" / "r-1"))


def assert_trained(run_dir: RunDir, losses: list[float]) -> None:
    """The mathematics of one machine; both nodes and their links were looked at before."""
    assert losses_of(run_dir) == pytest.approx(losses, rel=1e-5)
    attempt = run_dir.attempt(1)
    records = [read_record(attempt.rank_record(rank)) or {} for rank in (0, 1)]
    assert [record["host"] for record in records] == ["a1", "a2"]
    found = read_record(attempt.findings) or {}
    assert found["summary"]["errors"] == 0, found
    seen = {finding["id"]: finding for finding in found["findings"]}
    assert seen["reduce.works"]["measured"] == "2 ranks"
    hosts = {finding["where"] for finding in found["findings"] if finding["id"] == "os.kernel"}
    assert hosts == {"a1", "a2"}


def test_two_nodes_train_as_one_machine_does(site: Site, uninterrupted: list[float]) -> None:
    launcher = "{kind: pbs, time: 1h, save_before: 5m, check: true}"
    run_dir = site.submit("ddp", launcher, steps=6)
    assert site.end(run_dir)["state"] == "finished"
    assert_trained(run_dir, uninterrupted)
    assert "finished" in site.isles("status")


def goes_on(site: Site, name: str, save_after: int) -> RunDir | None:
    """A run whose jobs save after so many seconds, in its second job; None: that is too short.

    A busy machine may need longer for the start of one job than for that of another.
    """
    launcher = f"{{kind: pbs, time: 2h, save_before: {7200 - save_after}s}}"
    run_dir = site.submit(name, launcher, steps=10**6, strategy="fsdp")
    attempt = run_dir.attempt(1)
    site.until(run_dir, lambda: (attempt.path / "job-id").exists() or attempt.outcome.exists())
    checkpoints = list_checkpoints(run_dir)
    if not attempt.outcome.exists() and not checkpoints:
        site.isles("stop", run_dir.name)
        site.end(run_dir)
        return None
    if not attempt.outcome.exists():
        # The run is alive all the time, though its first job is over.
        said = site.isles("train", f"{name}.yaml", code=1)
        assert "is running as PBS job" in said or "is queued again as PBS job" in said
        saved = checkpoints[-1].step
        assert saved > 0
        site.until(run_dir, lambda: len(losses_of(run_dir)) > saved + 2 or attempt.outcome.exists())
    outcome = read_record(attempt.outcome)
    if outcome is None:
        return run_dir
    assert "no time for a single step" in outcome["reason"], outcome
    return None


@pytest.mark.long
def test_time_is_up_and_the_next_job_goes_on_until_qdel_by_hand(site: Site) -> None:
    """Twenty seconds a job, or as long as the machine needs for the first steps; both save."""
    waits = (20, 60, 240)
    found = (goes_on(site, f"long{save_after}", save_after) for save_after in waits)
    run_dir = next((run_dir for run_dir in found if run_dir is not None), None)
    assert run_dir is not None, f"no step within {waits[-1]} s"
    job_id = site.job(run_dir)["job_id"]
    assert job_id == (run_dir.attempt(1).path / "job-id").read_text().strip()
    site.sh(f"qdel {job_id}")
    outcome = site.end(run_dir)
    assert (outcome["state"], outcome["exit_code"]) == ("stopped", 85)
    assert [row["step"] for row in rows_of(run_dir)] == list(range(1, outcome["step"] + 1))
    assert list_checkpoints(run_dir)[-1].step == outcome["step"]


@pytest.mark.long
def test_a_rank_that_is_killed_is_named(site: Site) -> None:
    run_dir = site.submit("killed", "{kind: pbs, time: 1h}", steps=10**6)
    site.until(run_dir, lambda: len(losses_of(run_dir)) > 1)
    place = read_record(run_dir.attempt(1).rank_record(1)) or {}
    site.lab.run("a2", ["kill", "-KILL", str(place["pid"])])
    outcome = site.end(run_dir)
    assert outcome["state"] == "failed"
    assert outcome["error"]["rank"] == 1
    assert "a2" in outcome["error"]["where"]


OWN = """\
name: mine
output_dir: runs
training: {script: place.py, script_args: [--epochs, 2]}
clusters:
  - launcher: {kind: pbs, login: a1, time: 1h}
    nodes: 2
    gpus_per_node: 1
    device: cpu
    workdir: /shared/openpbs
"""


@pytest.mark.long
def test_a_script_of_the_users_own_from_a_laptop(site: Site) -> None:
    """ctl is the laptop; qsub is called on a1."""
    (site.home / "place.py").write_text(PLACE)
    laptop = "mkdir -p /root/home && cd /root/home"
    site.sh(f"{laptop} && cat >mine.yaml <<'END'\n{OWN}END")
    done = site.sh(f"{laptop} && {ISLES} train mine.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert_places(site.lab, site.home, "--epochs", "2")
    shown = site.sh(f"{laptop} && {ISLES} status").stdout
    assert "mine-1@a1" in shown and "finished" in shown


def test_a_job_that_waits_says_why_and_can_be_taken_back(site: Site) -> None:
    run_dir = site.submit("much", "{kind: pbs, time: 1h, cpus_per_node: 64}", steps=6)
    # The scheduler has not said why in the first moment.
    site.until(run_dir, lambda: "never run" in str(site.job(run_dir).get("reason")))
    assert "it can never run" in site.isles("status", run_dir.name)
    site.isles("stop", run_dir.name)
    assert site.job(run_dir)["state"] == "ended"
    report = json.loads(site.isles("status", run_dir.name, "--json"))
    assert report["state"] == "stopped"


@pytest.mark.long
def test_the_form_of_torque(lab: Lab, uninterrupted: list[float]) -> None:
    with pbs(lab, ("a1", "a2"), "torque"):
        site = Site(lab, "torque")
        site.home.mkdir()
        launcher = "{kind: pbs, time: 1h, cpus_per_node: 2, check: true}"
        run_dir = site.submit("ppn", launcher, steps=6)
        assert "#PBS -l nodes=2:ppn=2\n" in run_dir.attempt(1).script.read_text()
        assert site.end(run_dir)["state"] == "finished"
        assert_trained(run_dir, uninterrupted)
