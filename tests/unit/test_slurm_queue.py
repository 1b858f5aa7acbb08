"""What a Slurm that is slow or silent may do to a run, and how often a job is queued again."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from isles.config.load import Loaded, load_run_file
from isles.errors import ConfigError
from isles.launch.queue.jobs import refresh, refresh_all
from isles.launch.queue.start import LostSubmission, submission
from isles.launch.slurm.job import Slurm
from isles.launch.slurm.submit import submit_slurm
from isles.run.begin import Begun
from isles.run.paths import RunDir
from isles.run.records import read_record, write_record
from isles.run.restarts import list_restarts
from isles.agent.conclude import begin, conclude
from tests.unit.test_begin import add_checkpoint
from tests.unit.test_slurm import OWN, PENDING, Job, leave, make_script


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
        assert submit_slurm(slurm, job.attempt, _loaded(tmp_path)) == "44"
        return
    begun = Begun(job.run_dir, resumed=False, note="")
    lost = pytest.raises(LostSubmission, match="no job of it is in the queue")
    with lost, submission(begun, job.attempt):
        submit_slurm(slurm, job.attempt, _loaded(tmp_path))
    # It may still come: then it trains nothing beside the next start.
    done = job.script(tmp_path)
    assert done.returncode == 2, done.stderr
    assert "torchrun" not in job.calls.read_text()


def test_values_are_quoted_where_sbatch_would_misread_them(tmp_path: Path) -> None:
    odd = """clusters.0.launcher.reservation='a #1 "b" \\c'"""
    text = make_script(tmp_path, odd, run_dir="/my runs/50%/llama-1b-1")
    assert '\n#SBATCH --reservation="a #1 \\"b\\" \\\\c"\n' in text
    assert '\n#SBATCH --output="/my runs/50%%/llama-1b-1/attempts/001/slurm-%j.out"\n' in text
    assert '--output="${attempt_dir//%/%%}/node-%n.log"' in text
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
    done = job.script(tmp_path, alone=True, SLURM_RESTART_COUNT=str(times))
    assert done.returncode == 1, done.stderr
    assert ("scontrol requeue 7" in job.calls.read_text()) == (times < 20)
    assert ("it has gone on 20 times" in done.stderr) != (times < 20)


def test_preemption_with_a_time_of_grace_queues_the_job_again(job: Job, tmp_path: Path) -> None:
    """Slurm tells the ranks alone, and the script must ask for the rest."""
    job.program("torchrun", f"{leave(job.attempt, 85)}; exit 1")
    job.program("scontrol", "echo JobId=7 JobState=RUNNING PreemptTime=2026-01-01T00:00:00 X=1")
    done = job.script(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "scontrol requeue 7" in job.calls.read_text()
    (restart,) = list_restarts(job.attempt)
    assert "another job took the nodes of Slurm job 7" in restart.text


def test_a_script_that_asks_to_be_started_again_is_queued_again(tmp_path: Path) -> None:
    job = Job(tmp_path, text=OWN)
    job.program("torchrun", f"{leave(job.attempt, 85)}; exit 1")
    job.program("scontrol", '[ "$1" = requeue ]')
    for _ in range(20):
        write_record(job.attempt.stopped, {"state": "stopped", "exit_code": 85, "step": None})
        assert conclude(job.gang, 1, terminated=False) == "requeue"
    done = job.script(tmp_path)
    assert done.returncode == 3, "it is not started for ever"
    error = (read_record(job.attempt.outcome) or {})["error"]
    assert "no further in 21 starts" in error["what"] and "isles.report" in error["fix"]


def test_a_job_that_loses_its_nodes_again_and_again_is_ended(job: Job) -> None:
    """Ten times in vain; a checkpoint makes them ten again."""
    for restart in range(14):
        write_record(job.attempt.rank_record(0), {"restart": restart, "pid": 9})
        if restart == 3:
            add_checkpoint(job.run_dir, 8)
        answer = begin(job.gang)
        assert answer == "start" or restart == 13, restart
    assert answer == "3"
    error = (read_record(job.attempt.outcome) or {})["error"]
    assert "was taken off its nodes, and it has come no further in 11 starts" in error["what"]
    assert error["what"].endswith("the last step that was saved is 8")
