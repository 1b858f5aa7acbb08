"""What a Slurm that is slow or silent may do to a run, and how often a job is queued again."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from isles.config.load import load_run_file
from isles.errors import ConfigError
from isles.launch.queue.slurm import Slurm
from isles.launch.queue.status import refresh, refresh_all
from isles.launch.queue.submit import LostSubmission, submission, submit
from isles.run.begin import Begun
from isles.run.paths import RunDir
from tests.unit.test_agent_requeue import queued
from tests.unit.test_slurm import OWN, PENDING, Job, make_script


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def test_only_who_wants_the_run_ends_slurms_pause(job: Job) -> None:
    text = PENDING.format(reason="BeginTime").replace("Restarts=0", "Restarts=1")
    job.program("scontrol", f"echo '{text}'")
    assert job.ask().state == "requeued"
    assert "update" not in job.calls.read_text(), "a look changes nothing"
    refresh(job.run_dir, job.attempt, max_age_s=0.0, hasten=True)
    assert "scontrol update jobid=7 StartTime=now" in job.calls.read_text()


def test_a_silent_slurm_is_waited_for_once(job: Job) -> None:
    """All runs are asked about at once; what it had said before is shown, with its age."""
    job.program("scontrol", "echo JobId=7 JobState=RUNNING Reason=None NodeList=a1")
    job.ask()
    runs = [job.run_dir]
    for number in range(2, 8):
        run_dir = RunDir(job.run_dir.path.with_name(f"llama-1b-{number}"))
        shutil.copytree(job.run_dir.path, run_dir.path)
        runs.append(run_dir)
    job.program("scontrol", "exec sleep 30")
    later = time.time() + 3600
    begun = time.monotonic()
    found = refresh_all(runs, ask_s=2.0, now=lambda: later)
    assert time.monotonic() - begun < len(runs) * 2.0
    assert len(found) == len(runs)
    for report in found.values():
        assert report.state == "running" and "no answer within" in report.reason, report
        assert "that was 1h" in report.reason

    job.program("scontrol", "echo JobId=$5 JobState=PENDING Reason=Priority NodeList=")
    found = refresh_all(runs, now=lambda: later)
    assert {report.reason for report in found.values()} == {"other jobs come first"}


def test_a_job_of_a_submission_without_an_answer_trains_nothing(job: Job, tmp_path: Path) -> None:
    job.program("sbatch", "exec sleep 30")
    loaded = load_run_file(tmp_path / "run.yaml", ["clusters.0.environment={}"])
    begun = Begun(job.run_dir, resumed=False, note="")
    lost = pytest.raises(LostSubmission, match="no answer within")
    with lost, submission(begun, job.attempt):
        submit(Slurm(str(job.bin), ask_s=0.2), job.attempt, loaded)
    # The job may have been taken: then it trains nothing beside the next start.
    assert queued(job).begin() == 2


def test_values_are_quoted_where_sbatch_would_misread_them(tmp_path: Path) -> None:
    odd = """clusters.0.launcher.reservation='a #1 "b" \\c'"""
    text = make_script(tmp_path, odd, run_dir="/my runs/50%/llama-1b-1")
    assert '\n#SBATCH --reservation="a #1 \\"b\\" \\\\c"\n' in text
    assert '\n#SBATCH --output="/my runs/50%%/llama-1b-1/attempts/001/slurm-%j.out"\n' in text
    assert "\n#SBATCH --constraint=a100|h100\n" in text
    with pytest.raises(ConfigError, match="no path with a backslash"):
        make_script(tmp_path, run_dir="/my\\runs/llama-1b-1")


@pytest.mark.parametrize("times", [19, 20])
def test_a_rendered_job_of_a_users_script_is_not_queued_for_ever(
    tmp_path: Path, times: int
) -> None:
    job = Job(tmp_path, text=OWN)
    asked = job.bin / "asked"
    job.program("scancel", f"touch {asked}")
    job.program("scontrol", "exit 0")
    ask = f"kill -USR1 $PPID; until [ -e {asked} ]; do read -t 0.05; done"
    job.program("torchrun", f"{ask} <> <(:); exit 1")
    done = job.rendered(tmp_path, SLURM_RESTART_COUNT=str(times))
    assert done.returncode == 1, done.stderr
    assert ("scontrol requeue 7" in job.calls.read_text()) == (times < 20)
    assert ("it has gone on 20 times" in done.stderr) != (times < 20)
