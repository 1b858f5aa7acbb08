"""The launcher slurm without a Slurm: its script word for word, what Slurm's answers mean, and what
a Slurm that is slow or silent may do to a run."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from isles.config.load import load_run_file
from isles.config.sections.cluster import SlurmLauncherConfig
from isles.errors import ConfigError
from isles.launch.queue.script import JobText, clock, job_script, rendered_script
from isles.launch.queue.slurm import Slurm, pending
from isles.launch.queue.status import read_job, refresh, refresh_all
from isles.launch.queue.submit import LostSubmission, submission, submit
from isles.run.begin import Begun
from isles.run.paths import RunDir
from isles.run.records import read_record
from tests.each import each
from tests.golden import check_golden
from tests.slurm_job import COMMAND, OWN, RUN, Job
from tests.unit.test_agent_failure import queued

RUN_DIR = "/home/me/train/runs/llama-1b-1"
RUNNING = "echo JobId=7 JobState=RUNNING Reason=None NodeList=a1 TimeLimit=1:0"
PENDING = (
    "echo 'JobId=7 JobName=a name UserId=me(1) JobState=PENDING Reason={reason} Requeue=1 "
    "Restarts={restarts} TimeLimit=1-00:00:00 StartTime=Unknown Partition=gpu NodeList= "
    "Command=/x/job.sh'"
)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def make_script(tmp_path: Path, *overrides: str, run_dir: str | None = RUN_DIR) -> str:
    """The script of a job; without a run directory the one that needs no isles."""
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    config = load_run_file(path, overrides).config
    cluster = config.clusters[0]
    assert isinstance(cluster.launcher, SlurmLauncherConfig)
    job = JobText(cluster.launcher, cluster.max_nodes, 4, "cuda", "/home/me/train", run_dir)
    if run_dir is None:
        return rendered_script(config, job, COMMAND)
    return job_script(config, job.of(RunDir(Path(run_dir)).attempt(1)))


ONE_NODE = (
    "clusters.0.nodes=1",
    "clusters.0.environment={venv: /home/me/venv}",
    "clusters.0.launcher={kind: slurm, requeue: false, gres: 'gpu:a100:4'}",
)


@each(
    ("golden", "overrides", "run_dir"),
    [
        ("slurm-two-nodes.sh", (), RUN_DIR),
        ("slurm-one-node.sh", ONE_NODE, RUN_DIR),
        ("slurm-interface.sh", ("clusters.0.network={interface: ib0, port: 31000}",), RUN_DIR),
        ("slurm-alone.sh", (), None),
    ],
)
def test_the_script_word_for_word(
    tmp_path: Path, golden: str, overrides: tuple[str, ...], run_dir: str | None
) -> None:
    check_golden(golden, make_script(tmp_path, *overrides, run_dir=run_dir))


def test_values_are_quoted_where_sbatch_would_misread_them(tmp_path: Path) -> None:
    odd = """clusters.0.launcher.reservation='a #1 "b" \\c'"""
    text = make_script(tmp_path, odd, run_dir="/my runs/50%/llama-1b-1")
    assert '\n#SBATCH --reservation="a #1 \\"b\\" \\\\c"\n' in text
    assert '\n#SBATCH --output="/my runs/50%%/llama-1b-1/attempts/001/slurm-%j.out"\n' in text
    assert "\n#SBATCH --constraint=a100|h100\n" in text
    with pytest.raises(ConfigError, match="no path with a backslash"):
        make_script(tmp_path, run_dir="/my\\runs/llama-1b-1")


def test_times_are_never_shorter_than_asked() -> None:
    assert [clock(s) for s in (60, 3599.5, 129_661)] == ["00:01:00", "01:00:00", "36:01:01"]


@each(
    ("reason", "meaning", "fix"),
    [
        ("Resources", "waiting for nodes that are free", ""),
        ("BeginTime", "not to start before its time", "scontrol update jobid=7 StartTime=now"),
        ("ReqNodeNotAvail,_UnavailableNodes:a[1-2]", "nodes that it needs", "sinfo -R"),
        ("QOSMaxJobsPerUserLimit", "a limit of the qos is reached: jobs of one user", "squeue"),
        ("AssocGrpGRES", "a limit of the account is reached: GPUs", "wait"),
        ("AssocGrpCPURunMinutesLimit", "a limit of the account is reached: minutes", "wait"),
        ("PartitionTimeLimit", "its time limit is longer", "a shorter `time`"),
        ("Some_New_Reason", "Some New Reason", ""),
    ],
)
def test_reasons_for_waiting_in_words(reason: str, meaning: str, fix: str) -> None:
    words, what_to_do = pending(reason, "7")
    assert meaning in words and fix in what_to_do


def test_the_queue_is_asked_and_its_words_are_kept(job: Job) -> None:
    reason = "ReqNodeNotAvail,_UnavailableNodes:a[1-2]"
    job.program("scontrol", PENDING.format(reason=reason, restarts=0))
    job.program("sinfo", "printf 'a1|drained|bad disk\\na2|down*|none\\n'")
    report = job.ask()
    assert report.state == "pending"
    assert "a1 is drained (bad disk), a2 is down*" in report.reason
    assert report.is_alive and read_job(job.attempt) == report
    job.program("scontrol", RUNNING)
    assert refresh(job.run_dir, job.attempt, max_age_s=60.0) == report
    assert job.ask().state == "running"
    job.program("scontrol", "echo 'Unable to contact slurm controller' >&2; exit 1")
    assert job.ask().state == "running", "its last answer stands while it gives none"


@each(
    ("state", "code", "words"),
    [
        ("TIMEOUT", 3, "time limit"),
        ("NODE_FAIL", 5, "one of its nodes failed"),
        ("OUT_OF_MEMORY", 4, "more memory"),
        ("CANCELLED", 130, "cancelled"),
    ],
)
def test_a_job_that_was_killed_with_its_script_has_an_outcome(
    tmp_path: Path, state: str, code: int, words: str
) -> None:
    job = Job(tmp_path)
    job.program("scontrol", f"echo JobId=7 JobState={state} Reason=None ExitCode=0:9 NodeList=a1")
    assert job.ask().state == "ended"
    outcome = read_record(job.attempt.outcome) or {}
    assert outcome["exit_code"] == code and words in outcome["reason"]
    assert (outcome["error"] is None) == (code == 130)


def test_a_job_that_slurm_has_forgotten_is_over(job: Job) -> None:
    job.program("scontrol", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    job.program("sacct", "echo 'TIMEOUT|0:15|a1'")
    assert (job.ask().state, job.ask().word) == ("ended", "TIMEOUT")


def test_only_who_wants_the_run_ends_slurms_pause(job: Job) -> None:
    job.program("scontrol", PENDING.format(reason="BeginTime", restarts=1))
    assert job.ask().state == "requeued"
    assert "update" not in job.calls.read_text(), "a look changes nothing"
    refresh(job.run_dir, job.attempt, max_age_s=0.0, hasten=True)
    assert "scontrol update jobid=7 StartTime=now" in job.calls.read_text()


def test_a_silent_slurm_is_waited_for_once(job: Job) -> None:
    job.program("scontrol", RUNNING)
    job.ask()
    runs = [job.run_dir]
    for number in range(2, 8):
        runs.append(RunDir(job.run_dir.path.with_name(f"llama-1b-{number}")))
        shutil.copytree(job.run_dir.path, runs[-1].path)
    job.program("scontrol", "exec sleep 30")
    later = time.time() + 3600
    begun = time.monotonic()
    found = refresh_all(runs, ask_s=2.0, now=lambda: later)
    assert time.monotonic() - begun < len(runs) * 2.0, "all are asked about at once"
    assert len(found) == len(runs)
    for report in found.values():
        assert report.state == "running" and "no answer within" in report.reason, report
        assert "that was 1h" in report.reason


def test_a_job_of_a_submission_without_an_answer_trains_nothing(job: Job, tmp_path: Path) -> None:
    job.program("sbatch", "exec sleep 30")
    loaded = load_run_file(tmp_path / "run.yaml", ["clusters.0.environment={}"])
    begun = Begun(job.run_dir, resumed=False, note="")
    lost = pytest.raises(LostSubmission, match="no answer within")
    with lost, submission(begun, job.attempt):
        submit(Slurm(str(job.bin), ask_s=0.2), job.attempt, loaded)
    # The job may have been taken: then it trains nothing beside the next start.
    assert queued(job).begin() == 2


@each(
    ("text", "saved", "restarts", "why_not"),
    [
        (RUN, 8, 0, None),
        (RUN, 4, 0, "nothing was saved"),
        (OWN, 4, 19, None),
        (OWN, 4, 20, "it has gone on 20 times"),
    ],
)
def test_a_rendered_job_is_not_queued_again_in_vain(
    tmp_path: Path, text: str, saved: int, restarts: int, why_not: str | None
) -> None:
    job = Job(tmp_path, text)
    (job.run_dir.checkpoints / "step-00000004").mkdir(parents=True)
    asked = job.bin / "asked"
    job.program("scancel", f"touch {asked}")
    job.program("scontrol", "exit 0")
    limit = f"kill -USR1 $PPID; until [ -e {asked} ]; do read -t 0.05; done <> <(:)"
    save = f"mkdir -p {job.run_dir.checkpoints}/step-0000000{saved}"
    job.program("torchrun", f"{limit}; {save}; exit 1")
    done = job.run_rendered(SLURM_RESTART_COUNT=str(restarts))
    assert done.returncode == 1, done.stderr
    assert ("scontrol requeue 7" in job.calls.read_text()) == (why_not is None)
    assert why_not is None or why_not in done.stderr
