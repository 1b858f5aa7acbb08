"""The launcher slurm without a Slurm: its script, what Slurm's answers mean, its silence, and a job
that goes on."""

from __future__ import annotations

import re
import shlex
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from isles.agent.requeue import QueuedRun
from isles.config.load import load_run_file
from isles.errors import ConfigError, ExitCode, UserError
from isles.launch.base import StartOptions
from isles.launch.queue.job import hand_on
from isles.launch.queue.script import clock
from isles.launch.queue.slurm import Slurm, SlurmAllocation, pending
from isles.launch.queue.status import read_job, refresh, refresh_all
from isles.launch.queue.submit import LostSubmission, start_in_queue, submission, submit
from isles.run.choose import Begun
from isles.run.paths import RunDir
from isles.run.records import read_record, write_record
from isles.run.restarts import list_restarts
from tests.each import each
from tests.golden import check_golden
from tests.programs import write_program
from tests.slurm_job import OWN, RUN, RUN_DIR, Job, script_text
from tests.unit.test_begin import add_checkpoint

RUNNING = "echo JobId=7 JobState=RUNNING Reason=None NodeList=a1 TimeLimit=1:0"
PENDING = (
    "echo 'JobId=7 JobName=a name UserId=me(1) JobState=PENDING Reason={reason} Requeue=1 "
    "Restarts={restarts} TimeLimit=1-00:00:00 StartTime=Unknown Partition=gpu NodeList= "
    "Command=/x/job.sh'"
)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


ONE_NODE = (
    "clusters.0.nodes=1",
    "clusters.0.environment={venv: /home/me/venv}",
    "clusters.0.launcher={kind: slurm, requeue: false, gres: 'gpu:a100:4'}",
)


@each(
    ("slurm-two-nodes.sh", (), RUN_DIR),
    ("slurm-one-node.sh", ONE_NODE, RUN_DIR),
    ("slurm-interface.sh", ("clusters.0.network={interface: ib0, port: 31000}",), RUN_DIR),
    ("slurm-alone.sh", (), None),
)
def test_the_script_word_for_word(golden: str, overrides: tuple[str, ...], run_dir, *, tmp_path):
    check_golden(golden, script_text(tmp_path, *overrides, run_dir=run_dir))


def test_values_are_quoted_where_sbatch_would_misread_them(tmp_path: Path) -> None:
    odd = """clusters.0.launcher.reservation='a #1 "b" \\c'"""
    text = script_text(tmp_path, odd, run_dir="/my runs/50%/llama-1b-1")
    assert '\n#SBATCH --reservation="a #1 \\"b\\" \\\\c"\n' in text
    assert '\n#SBATCH --output="/my runs/50%%/llama-1b-1/attempts/001/slurm-%j.out"\n' in text
    assert "\n#SBATCH --constraint=a100|h100\n" in text
    with pytest.raises(ConfigError, match="to a path with a backslash"):
        script_text(tmp_path, run_dir="/my\\runs/llama-1b-1")


def test_times_are_never_shorter_than_asked() -> None:
    assert [clock(s) for s in (60, 3599.5, 129_661)] == ["00:01:00", "01:00:00", "36:01:01"]


@each(
    ("Resources", "waiting for free nodes", ""),
    ("BeginTime", "must not start before its start time", "scontrol update jobid=7 StartTime=now"),
    ("ReqNodeNotAvail,_UnavailableNodes:a[1-2]", "required nodes are not available", "sinfo -R"),
    ("QOSMaxJobsPerUserLimit", "a limit of the qos is reached (jobs per user)", "squeue"),
    ("AssocGrpGRES", "a limit of the account is reached (GPUs", "wait"),
    ("AssocGrpCPURunMinutesLimit", "a limit of the account is reached (minutes", "wait"),
    ("PartitionTimeLimit", "its time limit is longer", "a shorter `time`"),
    ("Some_New_Reason", "Some New Reason", ""),
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
    # A job that Slurm has forgotten is over.
    job.program("scontrol", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    job.program("sacct", "echo 'TIMEOUT|0:15|a1'")
    assert (job.ask().state, job.ask().word) == ("ended", "TIMEOUT")


@each(
    ("TIMEOUT", 3, "time limit"),
    ("NODE_FAIL", 5, "one of its nodes failed"),
    ("OUT_OF_MEMORY", 4, "more memory"),
    ("CANCELLED", 130, "canceled"),
)
def test_a_job_that_was_killed_with_its_script_has_an_outcome(state, code, words, *, tmp_path):
    job = Job(tmp_path)
    job.program("scontrol", f"echo JobId=7 JobState={state} Reason=None ExitCode=0:9 NodeList=a1")
    assert job.ask().state == "ended"
    outcome = read_record(job.attempt.outcome) or {}
    assert outcome["exit_code"] == code and words in outcome["reason"]
    assert (outcome["error"] is None) == (code == 130)


def test_only_who_wants_the_run_ends_slurms_pause(job: Job) -> None:
    job.program("scontrol", PENDING.format(reason="BeginTime", restarts=1))
    assert job.ask().state == "requeued"
    assert "update" not in job.calls.read_text(), "a look changes nothing"
    refresh(job.run_dir, job.attempt, max_age_s=0.0, hasten=True)
    assert "scontrol update jobid=7 StartTime=now" in job.calls.read_text()


def test_who_starts_a_run_that_is_queued_again_waits_for_its_job(tmp_path, monkeypatch) -> None:
    """The same values start nothing new; with others the run would not be the one that is typed."""
    monkeypatch.chdir(tmp_path)
    bin_path, said = tmp_path / "bin", list[str]()
    write_program(bin_path / "sbatch", "echo 7")
    write_program(bin_path / "scontrol", PENDING.format(reason="Priority", restarts=0))
    Path("run.yaml").write_text(
        "name: tiny\nmodel: {name_or_path: llama-2m, init: scratch}\n"
        "data: {sources: [{type: fake}], seq_length: 32}\ntraining: {max_steps: 8}\n"
        "clusters: [{device: cpu, gpus_per_node: 1, launcher: {kind: slurm, time: 1h,"
        f" bin_path: {bin_path}}}}}]\n"
    )

    def start(*overrides: str) -> Any:
        loaded = load_run_file(Path("run.yaml"), overrides)
        options = StartOptions(Path("run.yaml"), overrides, "auto", False, said.append, str)
        return start_in_queue(loaded, loaded.config.clusters[0].launcher, options)

    first = start()
    with pytest.raises(UserError, match="is queued as Slurm job 7"):
        start()
    write_program(bin_path / "scontrol", PENDING.format(reason="BeginTime", restarts=1))
    again = start()
    assert (again.run_dir, again.attempt) == (first.run_dir, first.attempt)
    assert "tiny-1 is queued again as Slurm job 7" in said[-1] and "to start it now" in said[-1]
    with pytest.raises(UserError, match="is queued again as Slurm job 7"):
        start("training.max_steps=9")


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
        assert "1h 00m ago; " in report.reason


def test_a_job_of_a_submission_without_an_answer_trains_nothing(job: Job, tmp_path: Path) -> None:
    job.program("sbatch", "exec sleep 30")
    job.attempt.script.touch()
    loaded = load_run_file(tmp_path / "run.yaml", ["clusters.0.environment={}"])
    begun = Begun(job.run_dir, resumed=False, note="")
    lost = pytest.raises(LostSubmission, match="no answer within")
    with lost, submission(begun, job.attempt):
        submit(Slurm(str(job.bin), ask_s=0.2), job.attempt, loaded)
    # The job may have been taken: then it trains nothing beside the next start.
    assert queued(job).begin() == 2
    job.attempt.outcome.unlink()
    assert queued(job).begin() == 1, "nor before the outcome is there"


def test_a_job_that_has_begun_is_no_lost_submission(job: Job, tmp_path: Path) -> None:
    job.program("sbatch", "exec sleep 30")
    job.attempt.script.touch()
    job.attempt.launch.unlink()
    assert queued(job).begin() is None
    loaded = load_run_file(tmp_path / "run.yaml", ["clusters.0.environment={}"])
    assert submit(Slurm(str(job.bin), ask_s=0.2), job.attempt, loaded) == "7"


def test_of_two_jobs_only_one_trains(job: Job) -> None:
    assert queued(job, job_id="9").begin() == 1, "it was not this start that has submitted it"
    assert queued(job).begin() is None
    assert queued(job, job_id="8").begin() == 1
    assert queued(job).begin() is None, "the same again, where Slurm has queued it again"
    assert not job.attempt.outcome.exists()


def test_a_job_that_is_handed_on_again_is_asked_for_until_the_next_is_known(job: Job) -> None:
    assert queued(job).begin() is None
    for before, after in (("7", "8"), ("8", "9")):
        job.program("scontrol", "echo JobId=$5 JobState=RUNNING Reason=None NodeList=a1")
        hand_on(job.attempt)
        assert job.ask().job_id == before, "not the first one, which is over"
        assert queued(job, job_id=after).begin() is None
        hand_on(job.attempt, after)
        assert queued(job, job_id=before).begin() == 1
    assert not job.attempt.outcome.exists()


def test_variables_of_the_shell_do_not_count_more_than_the_run_file(job, tmp_path, monkeypatch):
    job.program("sbatch", '[ -z "$SBATCH_WAIT$SBATCH_ARRAY_INX" ] && echo 8')
    job.attempt.script.write_text(
        '#!/bin/bash\n#SBATCH --job-name="a b"\n#SBATCH -n 4 # all\n#SBATCH --a=b c\n'
    )
    monkeypatch.setenv("SBATCH_WAIT", "1")
    monkeypatch.setenv("SBATCH_ARRAY_INX", "1-2")
    loaded = load_run_file(tmp_path / "run.yaml", ["clusters.0.environment={}"])
    assert submit(Slurm(str(job.bin)), job.attempt, loaded) == "8"
    assert f"sbatch --parsable --job-name=a b -n 4 {job.attempt.script}" in job.calls.read_text()


@each(
    (RUN, 8, 0, None),
    (RUN, 4, 0, "nothing was saved, so the job is not"),
    (OWN, 4, 19, None),
    (OWN, 4, 20, "has been resumed 20 times"),
)
def test_a_rendered_job_is_not_queued_again_in_vain(text, saved, restarts, why_not, *, tmp_path):
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


def queued(job: Job, scontrol: str = "exit 1", job_id: str = "7") -> QueuedRun:
    """The run as its job sees it; `scontrol`: bash that answers all but the names of the nodes."""
    nodes = 'case "$1 $2" in "show hostnames") echo a1; exit;; esac'
    job.program("scontrol", f"{nodes}\n{scontrol}")
    environ = {"SLURM_JOB_ID": job_id, "SLURM_JOB_NODELIST": "a1"}
    allocation = SlurmAllocation(job.launcher, job.attempt, environ)
    return QueuedRun(job.run_dir, job.attempt, job.config, allocation)


def saved(job: Job, step: int | None = 3, restart: int = 0) -> None:
    """What rank 0 leaves when it was asked to stop in a job."""
    write_record(job.attempt.stopped, {"exit_code": 85, "step": step, "reason": "asked to stop"})
    write_record(job.attempt.rank_record(0), {"restart": restart, "pid": 9})


def saved_before_limit(job: Job, scontrol: str = "exit 1") -> QueuedRun:
    """The run after the time limit was near, and its ranks have saved and ended."""
    run = queued(job, scontrol)
    run.limit_is_near()
    saved(job)
    run.stopped()
    assert run.is_requeued
    return run


def outcome(job: Job) -> dict[str, Any]:
    return read_record(job.attempt.outcome) or {}


def test_a_job_that_slurm_does_not_requeue_is_submitted_again(job: Job) -> None:
    ignored = job.run_dir.path / "ignored"
    run = saved_before_limit(job, f"grep SigIgn /proc/$$/status > {ignored}; exit 1")
    job.program("sbatch", "echo 8")
    job.attempt.script.touch()
    before = signal.getsignal(signal.SIGTERM)
    assert run.queue_again() == 0
    assert signal.getsignal(signal.SIGTERM) == before, "what this process starts can be ended"
    mask = int(ignored.read_text().split()[1], 16)
    assert mask >> (signal.SIGTERM - 1) & 1, "Slurm ends the job before scontrol has answered"
    again = f"sbatch --parsable --dependency=afterany:7 {job.attempt.script}"
    assert again in job.calls.read_text()
    job.program("scontrol", "echo JobId=$5 JobState=RUNNING Reason=None NodeList=a1")
    assert job.ask().job_id == "8"
    job.program("scontrol", "exit 1")
    job.program("sbatch", "echo 'sbatch: error: QOSMaxSubmitJobPerUserLimit' >&2; exit 1")
    assert run.queue_again() == ExitCode.REQUEUE
    assert outcome(job)["state"] == "stopped"
    assert "everything is saved" in outcome(job)["reason"]
    assert "QOSMaxSubmit" in outcome(job)["reason"], "why it cannot be"


@each(("save", 85), ("interrupt", 130))
def test_a_stop_that_a_user_wants_is_the_end(kind: str, code: int, *, tmp_path: Path) -> None:
    job = Job(tmp_path)
    write_record(job.attempt.stop_request, {"kind": kind, "by": "me", "at": 0})
    run = queued(job)
    run.stopped()
    assert not run.is_requeued
    assert (outcome(job)["state"], outcome(job)["exit_code"]) == ("stopped", code)


def test_a_stop_asked_for_while_the_job_is_queued_again_holds(job: Job) -> None:
    saved_before_limit(job)
    write_record(job.attempt.stop_request, {"kind": "save", "by": "me", "at": 1})
    assert queued(job).begin() == 85
    assert outcome(job)["state"] == "stopped"


def test_a_limit_that_leaves_no_time_ends_the_run(job: Job) -> None:
    for is_last in (False, True):
        run = queued(job)
        assert run.begin() is None
        run.limit_is_near()
        write_record(job.attempt.stopped, {"exit_code": 85, "step": None})
        run.stopped()
        assert run.is_requeued != is_last
    error = outcome(job)["error"]
    assert "too short for a single step" in error["what"] and "save_before" in error["fix"]


def test_a_job_that_loses_a_node_or_is_taken_off_all_goes_on_later(job: Job) -> None:
    run = queued(job)
    assert run.lost("node 1 (a2) is lost") and run.is_requeued
    assert "node 1 (a2) is lost" in list_restarts(job.attempt)[0].text

    saved(job, step=5, restart=1)
    run = queued(job)
    run.is_terminated = True
    assert not run.lost("node 1 (a2) is lost"), "the job is being ended: nobody is to blame"
    run.stopped()
    assert not run.is_requeued
    assert outcome(job)["state"] == "stopped", "it may have been scancel"
    assert queued(job).begin() is None
    assert not job.attempt.outcome.exists()
    assert "taken off its nodes" in list_restarts(job.attempt)[1].text

    # Nodes that fail leave no word at all.
    write_record(job.attempt.rank_record(0), {"restart": 2, "pid": 9})
    assert queued(job).begin() is None
    assert len(list_restarts(job.attempt)) == 3

    write_record(job.attempt.outcome, {"state": "finished", "exit_code": 0, "at": 1.0})
    assert queued(job).begin() == 0, "a run that is over is not started again"


def test_a_job_that_loses_its_nodes_again_and_again_is_ended(job: Job) -> None:
    answers = []
    for restart in range(14):
        write_record(job.attempt.rank_record(0), {"restart": restart, "pid": 9})
        if restart == 3:
            add_checkpoint(job.run_dir, 8)
        answers.append(queued(job).begin())
    assert answers == [None] * 13 + [3], "ten times in vain; a checkpoint makes them ten again"
    what = outcome(job)["error"]["what"]
    assert "was taken off its nodes, and it has made no progress in 11 starts" in what
    assert what.endswith("the last saved step is 8")


def test_a_script_that_asks_to_be_started_again_is_queued_again(tmp_path: Path) -> None:
    job, requeued = Job(tmp_path, OWN), []
    for _ in range(21):
        saved(job, None)
        run = queued(job, "echo JobId=7 JobState=RUNNING PreemptTime=None X=1")
        run.stopped()
        requeued.append(run.is_requeued)
    assert requeued == [True] * 20 + [False], "it is not started for ever"
    error = outcome(job)["error"]
    assert "no progress in 21 starts" in error["what"] and "isles.report" in error["fix"]


def test_in_a_job_the_commands_for_its_nodes_are_printed(tmp_path, monkeypatch) -> None:
    """Each printed command is one that isles takes."""
    monkeypatch.chdir(tmp_path)
    text = RUN + "\noutput_dir: runs\n" if "output_dir" not in RUN else RUN
    Path("run.yaml").write_text(text)
    environment = "clusters.0.environment={venv: /v, modules: [cuda], variables: {A: '1'}}"
    overrides = ["training.max_steps=7", environment, "clusters.0.workdir=."]
    loaded = load_run_file(Path("run.yaml"), overrides)
    typed = shlex.join(["isles", "train", "run.yaml", *overrides])
    options = StartOptions(Path("run.yaml"), tuple(overrides), "auto", False, str, str, typed=typed)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    for on_node in (False, True):
        monkeypatch.setenv("SLURMD_NODENAME", "n1" if on_node else "")
        with pytest.raises(UserError, match="this shell is inside Slurm job 7") as caught:
            start_in_queue(loaded, loaded.config.clusters[0].launcher, options)
        commands = re.findall(r"`([^`]+)`", caught.value.fix)
        assert len(commands) == 3
        render, here, again = map(shlex.split, commands)
        assert render[:2] == ["isles", "render"] and render[-4:] == [
            "job.sh",
            "&&",
            "bash",
            "job.sh",
        ]
        assert (
            load_run_file(Path(render[2]), render[3 : render.index("--to")]).config == loaded.config
        )
        assert (here[0] == "srun") == (not on_node)
        words = here[here.index("train") + 1 :]
        cluster = load_run_file(Path(words[0]), words[1:]).config.clusters[0]
        assert cluster.is_here and cluster.max_nodes == 1
        assert cluster.environment.variables == {"A": "1"}
        assert again[:3] == ["env", "-u", "SLURM_JOB_ID"]
