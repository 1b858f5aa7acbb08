"""The launcher pbs without a PBS: its script, what its commands say, a job's nodes, and a start."""

from __future__ import annotations

from pathlib import Path

import pytest

from isles.config.sections.cluster import PbsLauncherConfig
from isles.errors import CommunicationError, ConfigError, PreflightError, UserError
from isles.launch.base import Started, StartOptions
from isles.launch.queue.job import QueueJob
from isles.launch.queue.pbs import Dialect, Pbs, PbsAllocation, write_dialect
from isles.launch.queue.status import queue_job
from isles.launch.start import start
from isles.run.paths import RunDir
from isles.run.records import read_record, write_record
from tests.each import each
from tests.golden import check_golden
from tests.programs import write_program
from tests.slurm_job import RUN, RUN_DIR, script_text

PBS = (
    "clusters.0.launcher={kind: pbs, queue: gpu, account: physics, time: 24h, save_before: 10m, "
    "memory_per_node: 200gb, cpus_per_node: 32, extra: [-m ae]}",
    "clusters.0.environment={venv: /home/me/venv, modules: [cuda/12.8], variables: {HF_HOME: "
    "/scratch/hf}}",
)
ONE_NODE = ("clusters.0.nodes=1", "clusters.0.device=cpu")
NO_LIMIT = ("clusters.0.launcher.time=null", "clusters.0.launcher.requeue=false")


@each(
    ("pbs-openpbs.sh", "openpbs", (), RUN_DIR),
    ("pbs-torque.sh", "torque", (), RUN_DIR),
    ("pbs-one-node.sh", "openpbs", (*ONE_NODE, *NO_LIMIT), RUN_DIR),
    ("pbs-alone.sh", "openpbs", (), None),
)
def test_the_script_word_for_word(golden, dialect, overrides, run_dir, *, tmp_path):
    text = script_text(tmp_path, *PBS, *overrides, run_dir=run_dir, dialect=dialect)
    check_golden(golden, text)


def test_values_that_pbs_would_misread(tmp_path: Path) -> None:
    overrides = ["queue=my queue", "resources='select=2:ncpus=8:model=bro'"]
    overrides = [f"clusters.0.launcher.{text}" for text in overrides]
    text = script_text(tmp_path, *PBS, *overrides, run_dir="/my runs/x-1")
    assert "#PBS -q 'my queue'\n" in text
    assert "#PBS -o '/my runs/x-1/attempts/001/pbs.out'\n" in text
    requests = [line for line in text.splitlines() if line.startswith("#PBS -l")]
    assert requests == ["#PBS -l select=2:ncpus=8:model=bro", "#PBS -l walltime=24:00:00"]
    with pytest.raises(ConfigError, match="before it as a host"):
        script_text(tmp_path, *PBS, run_dir="/runs:1/x-1")
    with pytest.raises(ConfigError, match="memory_per_node much is not a valid size"):
        script_text(tmp_path, *PBS, dialect="torque", memory_per_node="much")


@each(
    ("echo 'pbs_version = 23.06.06'", "openpbs"),
    ("echo 'Version: 6.1.2' >&2; echo 'Commit: 6611' >&2", "torque"),
    ("echo 'Unknown option: version' >&2; exit 2", None),
    ("echo GE 8.1.9", None),
)
def test_which_pbs_it_is_is_asked(answer: str, dialect: str | None, *, tmp_path: Path) -> None:
    write_program(tmp_path / "qstat", answer)
    if dialect is not None:
        assert Pbs(str(tmp_path)).dialect() == dialect
        return
    with pytest.raises(PreflightError, match="which is not PBS"):
        Pbs(str(tmp_path)).dialect()


def test_no_qstat_names_the_folder_that_was_looked_in(tmp_path: Path) -> None:
    with pytest.raises(PreflightError) as caught:
        Pbs(str(tmp_path)).dialect()
    assert f"{tmp_path}/qstat" in caught.value.where and "bin_path" in caught.value.fix


def submitted(folder: Path, qstat: str, dialect: Dialect = "openpbs") -> QueueJob:
    """The job of a run; `qstat`: bash that answers for PBS."""
    write_program(folder / "bin" / "qstat", qstat)
    run_dir = RunDir(folder / "run")
    attempt = run_dir.attempt(1)
    attempt.path.mkdir(parents=True)
    write_dialect(attempt, dialect)
    return QueueJob(run_dir, attempt, "7.srv", Pbs(str(folder / "bin")))


def job_text(letter: str, comment: str, status: str) -> str:
    """Bash that prints a job as `qstat -f` does."""
    return f"""\
cat <<END
Job Id: 7.srv
    Job_Name = tiny
    job_state = {letter}
    comment = {comment}
    exec_host = a1/0*4+a2/0*4
    Resource_List.walltime = 01:00:00
    resources_used.walltime = 00:10:00
    Exit_status = {status}
END
"""


@each(
    # A long attribute goes on after a tab.
    ("Q", "Can Never \n\tRun: Insufficient", "", "no nodes of this kind (Can Never Run: Ins"),
    ("Q", "Not Running: Insufficient amount of resource: ngpus", "", "of this kind are in use"),
    ("Q", "Not Running: User has reached queue gpu running job limit.", "", "of the user"),
    ("Q", "Not Running: Would conflict with reservation", "", "overlap with a reservation"),
    ("H", "", "", "it is held"),
    ("Q", "", "", "has not given a reason"),
    ("Q", "Something new", "", "it waits: Something new"),
    ("R", "Job run at", "", "on a1+a2; its time limit is in 50m"),
    ("F", "", "0", "its script ended"),
    ("F", "", "85", "exit status 85"),
    ("F", "", "265", "killed by signal 9"),
    ("F", "", "137", "killed by signal 9"),
    ("F", "", "-27", "memory limit"),
    ("F", "", "", "deleted before it ran"),
)
def test_a_job_in_words(letter: str, comment: str, status: str, words: str, *, tmp_path):
    report = submitted(tmp_path, job_text(letter, comment, status)).look()
    assert words in report.reason
    assert report.state == {"R": "running", "F": "ended"}.get(letter, "pending")


def test_torque_shows_ended_jobs_without_x(tmp_path: Path) -> None:
    answer = f'case "$*" in *-x*) exit 1;; esac\n{job_text("C", "", "271")}'
    report = submitted(tmp_path, answer, "torque").look()
    assert (report.state, report.reason) == ("ended", "it was deleted (qdel)")


def test_a_job_over_its_time_names_the_key_to_change(tmp_path: Path) -> None:
    job = submitted(tmp_path, job_text("F", "over", "-29"))
    # It had been asked to save, and was too slow.
    write_record(job.attempt.stop_request, {"kind": "save", "requeue": True})
    job.write_outcome(job.look())
    outcome = read_record(job.attempt.outcome) or {}
    assert outcome["state"] == "failed" and "time limit" in outcome["error"]["what"]
    assert "launcher.time" in outcome["error"]["fix"]


def test_the_job_that_goes_on_in_place_of_the_first_is_asked_for(tmp_path: Path) -> None:
    job = submitted(tmp_path, 'test "$3" = 9.srv && echo "    job_state = R"')
    (job.attempt.path / "job-id").write_text("9.srv\n")
    launch = {"launcher": "pbs", "job_id": "7.srv", "bin_path": str(tmp_path / "bin")}
    write_record(job.attempt.launch, launch)
    found = queue_job(job.run_dir, job.attempt)
    assert found is not None and found.look().state == "running"


def allocation(folder: Path, nodes: str, num_nodes: int, **more: object) -> PbsAllocation:
    """The nodes of a job, as its script sees them."""
    attempt = RunDir(folder).attempt(1)
    attempt.path.mkdir(parents=True, exist_ok=True)
    (folder / "nodes").write_text(nodes)
    environ = {"PBS_JOBID": "12.srv", "PBS_NODEFILE": str(folder / "nodes")}
    environ |= {"PBS_O_WORKDIR": str(folder)}
    launcher = PbsLauncherConfig.model_validate({"bin_path": str(folder / "bin"), **more})
    return PbsAllocation(launcher, attempt, environ, num_nodes)


def test_each_host_is_one_node_and_gets_the_jobs_own_script(tmp_path: Path) -> None:
    pbsdsh = write_program(tmp_path / "bin" / "pbsdsh", "exit 0")
    job = allocation(tmp_path, "10.0.0.1\n10.0.0.1\n10.0.0.2\n10.0.0.2\n", 2)
    assert [node.name for node in job.nodes] == ["10.0.0.1", "10.0.0.2"]
    attempt, log = RunDir(tmp_path).attempt(1), tmp_path / "node-%n.log"
    task = ["/bin/bash", "-l", str(attempt.script), "--fleet", "f", "--log", str(log)]
    assert job.on_all_nodes(["--fleet", "f"], log) == [[str(pbsdsh), "--", *task]]
    write_dialect(attempt, "torque")
    assert job.on_all_nodes([], log)[0][1] == "-u", "one task a node, not one a core"
    pbsdsh.unlink()
    commands = job.on_all_nodes(["--fleet", "f"], log)
    assert [words[4] for words in commands] == ["10.0.0.1", "10.0.0.2"], "by ssh instead"
    with pytest.raises(CommunicationError, match=r"has 1 hosts \(a1\), but the run needs 2"):
        allocation(tmp_path, "a1\na1\n", 2)
    (only,) = allocation(tmp_path, "a1\na1\n", 1).nodes
    assert only.address == "127.0.0.1", "one node opens no port to the network"


def test_it_saves_before_the_time_limit_if_there_is_one(tmp_path: Path) -> None:
    assert allocation(tmp_path, "a1\n", 1).save_at() is None
    early = allocation(tmp_path, "a1\n", 1, time="1h", save_before="5m").save_at()
    late = allocation(tmp_path, "a1\n", 1, time="2h", save_before="5m").save_at()
    assert early is not None and late is not None and 3500 < late - early < 3700


def test_the_job_is_submitted_again_once(tmp_path: Path) -> None:
    job, script = allocation(tmp_path, "a1\n", 1), RunDir(tmp_path).attempt(1).script
    qsub = write_program(tmp_path / "bin" / "qsub", 'echo "$PWD $*" >>"$0.calls"; echo 13.srv')
    calls = qsub.with_name("qsub.calls")
    assert "the run continues as PBS job 13.srv" in job.queue_again()
    assert script.with_name("job-id").read_text().split() == ["13.srv"]
    assert calls.read_text() == f"{tmp_path} {script}\n"
    # Without an answer it may have been taken: then it finds the end on record, and ends.
    write_program(qsub, 'echo >>"$0.calls"; exec sleep 60')
    job.submit_s = 0.5
    with pytest.raises(UserError, match="qsub did not answer within"):
        job.queue_again()
    assert len(calls.read_text().splitlines()) == 2


def begin(folder: Path, monkeypatch: pytest.MonkeyPatch, qsub: str, *overrides: str) -> object:
    """Start from a folder that is not `workdir`."""
    version = "[ $1 = --version ] && echo pbs_version = 23 || echo '    job_state = Q'"
    write_program(folder / "bin" / "qstat", version)
    write_program(folder / "bin" / "qsub", qsub)
    (folder / "here").mkdir()
    (folder / "my work").mkdir()
    monkeypatch.chdir(folder / "here")
    Path("run.yaml").write_text(RUN)
    small = "clusters=[{launcher: {kind: pbs, time: 1h}, nodes: 2, gpus_per_node: 1, device: cpu}]"
    places = f"clusters.0.launcher.bin_path={folder}/bin", f"clusters.0.workdir={folder}/my work"
    values = (small, *places, *overrides)
    return start(StartOptions(Path("run.yaml"), values, "auto", False, str, str))


def test_paths_are_those_of_workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = begin(tmp_path, monkeypatch, "echo 7.server")
    assert isinstance(started, Started)
    assert started.run_dir.path == tmp_path / "my work" / "runs" / "llama-1b-1"
    assert (read_record(started.attempt.launch) or {})["job_id"] == "7.server"
    text = started.attempt.script.read_text()
    assert f"cd '{tmp_path}/my work' || exit 1" in text
    assert f"isles.agent '{started.run_dir.path}' --attempt 1" in text
    assert not list((tmp_path / "here").glob("runs*"))


TWICE = "echo 7[].server"


@each(
    ("queue", "x", "echo 'qsub: Unknown queue' >&2; exit 1", "Unknown queue", "qstat -Q"),
    ("account", "x", "echo 'qsub: Invalid account' >&2; exit 1", "Invalid account", "-P NAME"),
    ("resources", "x", "echo 'specification error' >&2; exit 1", "specification error", "dialect"),
    ("extra", "[-J 1-4]", TWICE, "would start the same run several times", "delete it"),
    ("extra", "[-t 0-3]", TWICE, "would start the same run several times", "delete it"),
)
def test_a_job_that_is_refused_leaves_nothing(
    key, value, qsub, words, fix, *, tmp_path, monkeypatch
):
    place = f"clusters.0.launcher.{key}"
    with pytest.raises(UserError, match=words) as caught:
        begin(tmp_path, monkeypatch, qsub, f"{place}={value}")
    assert place in caught.value.where and fix in caught.value.fix
    assert not list(tmp_path.rglob("llama-1b-*"))
