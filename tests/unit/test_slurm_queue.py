"""What a Slurm that is slow or silent may do to a run, and how often a job is queued again."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from isles.config.load import Loaded, load_run_file
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


def _at(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + seconds))


def test_only_who_wants_the_run_ends_slurms_pause(job: Job) -> None:
    def says(begins_in_s: float) -> None:
        text = PENDING.format(reason="BeginTime").replace("Restarts=0", "Restarts=1")
        text = text.replace("StartTime=Unknown", f"StartTime={_at(begins_in_s)}")
        job.program("scontrol", f"echo '{text}'")

    says(100)
    assert job.ask().state == "requeued"
    assert "update" not in job.calls.read_text(), "a look changes nothing"
    says(3600)
    refresh(job.run_dir, job.attempt, max_age_s=0.0, hasten=True)
    assert "update" not in job.calls.read_text(), "somebody has chosen that time"
    says(100)
    refresh(job.run_dir, job.attempt, max_age_s=0.0, hasten=True)
    assert "scontrol update jobid=7 StartTime=now" in job.calls.read_text()


def test_a_silent_slurm_is_asked_once_for_all_runs(job: Job) -> None:
    """Also where it had answered before: what it said then is shown, with its age."""
    job.program("scontrol", "echo JobId=7 JobState=RUNNING Reason=None NodeList=a1")
    job.ask()
    runs = [job.run_dir]
    for number in range(2, 8):
        run_dir = RunDir(job.run_dir.path.with_name(f"llama-1b-{number}"))
        shutil.copytree(job.run_dir.path, run_dir.path)
        runs.append(run_dir)
    job.calls.unlink()
    job.program("scontrol", "exec sleep 30")
    later = time.time() + 3600
    found = refresh_all(runs, ask_s=0.5, now=lambda: later)
    assert job.calls.read_text().count("scontrol") == 1
    assert len(found) == len(runs)
    for report in found.values():
        assert report.state == "running" and "no answer within" in report.reason, report
        assert "that was 1h" in report.reason

    job.program("scontrol", "echo JobId=$5 JobState=PENDING Reason=Priority NodeList=")
    found = refresh_all(runs, now=lambda: later)
    assert {report.reason for report in found.values()} == {"other jobs come first"}


def _loaded(folder: Path) -> Loaded:
    return load_run_file(folder / "run.yaml", ["clusters.0.environment={}"])


@pytest.mark.parametrize("is_taken", [True, False])
def test_a_submission_without_an_answer_is_looked_for(
    job: Job, tmp_path: Path, is_taken: bool
) -> None:
    job.program("sbatch", "exec sleep 30")
    line = f"44|{job.attempt.script}" if is_taken else "44|/some/other/attempts/001/job.sh"
    job.program("squeue", f"echo '43|/x/job.sh'; echo '{line}'")
    slurm = Slurm(str(job.bin), ask_s=0.2)
    if is_taken:
        assert submit(slurm, job.attempt, _loaded(tmp_path)) == "44"
        return
    begun = Begun(job.run_dir, resumed=False, note="")
    lost = pytest.raises(LostSubmission, match="no job of it is in the queue")
    with lost, submission(begun, job.attempt):
        submit(slurm, job.attempt, _loaded(tmp_path))
    # It may still come: then it trains nothing beside the next start.
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
