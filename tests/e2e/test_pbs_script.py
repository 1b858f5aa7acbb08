"""The job script of PBS under plain bash: a hand-made node file, and small fakes of pbsdsh, qsub
and torchrun on PATH; the decisions between are those of the real script and the real records."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from isles.run.paths import RunDir
from isles.run.records import read_record
from tests.deadline import DEADLINE_S

RUN = """\
name: tiny
model: {{name_or_path: llama-2m, init: scratch}}
data: {{sources: [{{type: fake}}], seq_length: 32}}
training: {{max_steps: 20, global_batch_size: 4}}
clusters:
  - launcher: {{kind: pbs, time: {time}, save_before: {save_before}, bin_path: {folder}/bin}}
    nodes: 2
    gpus_per_node: 1
    device: cpu
    start_timeout: {start_timeout}
    max_restarts: 0
    environment: {{venv: {folder}/venv}}
"""

OWN = f"name: tiny\ntraining: {{{{script: own.py}}}}\n{RUN[RUN.index('clusters:') :]}"
"""With a script of the user's own."""

FAKES = {
    "qstat": 'case "$1" in --version) echo "pbs_version = 23.06" ;; *) exit 35 ;; esac',
    # The job's id tells how often it was called.
    "qsub": 'echo "$1" >>"$0.calls"; echo "$(wc -l <"$0.calls").srv"',
    # Once for each line of the node file, with the bare environment that real tasks have.
    "pbsdsh": """
[ "$1" != -- ] || shift
for host in $(cat "$PBS_NODEFILE"); do
  [ "$host" = "${SILENT-}" ] && continue
  (cd / && exec env -i HOME=/ PATH=/bin:/usr/bin HOSTNAME="$host" PBS_JOBID="$PBS_JOBID" "$@") &
done
wait
exit 0
""",
}

TORCHRUN = """\
#!/bin/bash
for word; do case $word in --node_rank=*) rank=${word#*=} ;; esac; done
echo "$rank $*" >>"$FOLDER/torchrun.calls"
attempt_dir=$ISLES_RUN_DIR/attempts/001
"""


class Job:
    """A run that was submitted to the fake qsub, and its script."""

    def __init__(
        self,
        folder: Path,
        torchrun: str,
        *,
        time: str = "1h",
        save_before: str = "5m",
        start_timeout: str = "60s",
        check: bool = False,
        text: str = RUN,
    ) -> None:
        self.folder = folder
        for name, lines in FAKES.items():
            write_program(folder / "bin" / name, f"#!/bin/bash\n{lines}\n")
        write_program(folder / "venv" / "bin" / "torchrun", TORCHRUN + torchrun)
        write_program(
            folder / "venv" / "bin" / "python", f'#!/bin/sh\nexec {sys.executable} "$@"\n'
        )
        activate = f'export FOLDER={folder} PATH={folder}/venv/bin:{folder}/bin:"$PATH"\n'
        (folder / "venv" / "bin" / "activate").write_text(activate)
        values = {"time": time, "save_before": save_before, "start_timeout": start_timeout}
        if check:
            text = text.replace("kind: pbs", "kind: pbs, check: true")
        (folder / "run.yaml").write_text(text.format(folder=folder, **values))
        self.train("--detach")
        self.attempt = RunDir(folder / "runs" / "tiny-1").attempt(1)
        self.script = self.attempt.script

    def train(self, *words: str, code: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "isles", "train", "run.yaml", *words],
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        assert done.returncode == code, done.stderr
        return done.stderr if code else done.stdout

    def start(
        self, nodes: tuple[str, ...] = ("a1", "a2"), **variables: str
    ) -> subprocess.Popen[bytes]:
        """Run the script as PBS would on these hosts, each of them twice in the node file."""
        (self.folder / "nodes").write_text("".join(f"{node}\n{node}\n" for node in nodes))
        return subprocess.Popen(
            ["bash", self.script],
            cwd="/",
            env={
                "HOME": "/",
                "PATH": f"{self.folder}/bin:{os.environ['PATH']}",
                "HOSTNAME": "a1",
                "PBS_JOBID": "1.srv",
                "PBS_NODEFILE": str(self.folder / "nodes"),
                "PBS_O_WORKDIR": str(self.folder),
                "PBS_O_HOST": "nowhere",
                **variables,
            },
        )

    def run(self, **variables: str) -> int:
        return self.start(**variables).wait(DEADLINE_S)

    @property
    def outcome(self) -> dict[str, Any]:
        record = read_record(self.attempt.outcome)
        assert record is not None, self.log
        return record

    @property
    def log(self) -> str:
        return (self.attempt.path / "pbs.log").read_text()

    @property
    def calls(self) -> list[str]:
        return sorted((self.folder / "torchrun.calls").read_text().splitlines())


def write_program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


FINISHED = """\
[ "$rank" -ne 0 ] || echo '{"state": "finished", "exit_code": 0, "step": 20, "reason": "finished", \
"at": 1, "error": null}' >"$attempt_dir/outcome.json"
"""

STOPPED = """\
until [ -e "$attempt_dir/stop-request.json" ]; do sleep 0.1; done
[ "$rank" -ne 0 ] || echo '{"state": "stopped", "exit_code": 85, "step": 7}' \
>"$attempt_dir/stopped.json"
"""


def test_each_host_starts_torchrun_once_with_its_place(tmp_path: Path) -> None:
    job = Job(tmp_path, FINISHED)
    assert job.run() == 0, job.log
    assert len(job.calls) == 2  # four lines in the node file, two hosts
    for rank, call in enumerate(job.calls):
        assert call.startswith(f"{rank} ")
        assert f"--node_rank={rank} " in call
        assert "--nnodes=2 --nproc_per_node=1" in call
        assert "--rdzv_backend=static" in call
        assert call.endswith(f"-m isles.train {job.attempt.path.parents[1]} --attempt 1")
    assert "ranks on a1 a2 meet at" in job.log


def test_the_dry_run_shows_what_is_submitted(tmp_path: Path) -> None:
    job = Job(tmp_path, FINISHED)
    assert job.run() == 0
    text = job.train("--dry-run", "--resume", "no")
    expected = job.attempt.script.read_text().replace("/tiny-1", "/tiny-2")
    assert text.endswith(expected)
    assert (job.folder / "bin" / "qsub.calls").read_text() == f"{job.attempt.script}\n"


def test_a_node_that_fails_ends_the_others_and_is_named(tmp_path: Path) -> None:
    torchrun = """\
[ "$rank" -eq 1 ] && { echo "error: no such device" >&2; exit 7; }
trap 'echo told >"$FOLDER/told"; kill $!; exit 1' TERM
sleep 1000 & wait $!
"""
    job = Job(tmp_path, torchrun)
    assert job.run() == 3
    assert "node 1 (a2) has ended with 7" in job.log
    assert (tmp_path / "told").exists()
    assert job.outcome["state"] == "failed"
    assert "no such device" in job.outcome["error"]["what"]


@pytest.mark.long
def test_a_node_that_never_starts_is_named(tmp_path: Path) -> None:
    job = Job(tmp_path, "exec sleep 1000", start_timeout="2s")
    assert job.run(SILENT="a2") != 0
    assert "not started within 2 s: node 1 (a2)" in job.log
    assert "node 1 (a2)" in job.outcome["error"]["what"]


def test_before_the_time_limit_it_saves_and_is_submitted_again(tmp_path: Path) -> None:
    job = Job(tmp_path, STOPPED, time="60s", save_before="58s")
    assert job.run() == 0, job.log
    submitted = (job.folder / "bin" / "qsub.calls").read_text().splitlines()
    assert submitted == [str(job.attempt.script)] * 2
    assert (job.attempt.path / "job-id").read_text() == "2.srv\n"
    assert "it goes on as job 2.srv" in job.log
    # Nothing of the first job makes the second one stop, or its followers believe it is over.
    assert not job.attempt.outcome.exists()
    assert not job.attempt.stop_request.exists()
    # The second comes no further: it is not submitted for ever.
    assert job.run(PBS_JOBID="2.srv") != 0
    assert len((job.folder / "bin" / "qsub.calls").read_text().splitlines()) == 2
    assert job.outcome["state"] == "failed"
    assert "no time for a single step" in job.outcome["reason"]


@pytest.mark.long
def test_a_submission_without_an_answer_is_not_made_twice(tmp_path: Path) -> None:
    job = Job(tmp_path, STOPPED, time="60s", save_before="58s")
    text = job.script.read_text()
    assert text.count("timeout 60 ") == 2
    job.script = tmp_path / "job.sh"
    job.script.write_text(text.replace("timeout 60 ", "timeout 1 "))
    write_program(tmp_path / "bin" / "qsub", '#!/bin/sh\necho "$1" >>"$0.calls"; exec sleep 100')
    write_program(tmp_path / "bin" / "ssh", "#!/bin/sh\ntouch $0.calls; echo 3.srv")
    assert job.run() == 85, job.log
    assert len((tmp_path / "bin" / "qsub.calls").read_text().splitlines()) == 2
    assert not (tmp_path / "bin" / "ssh.calls").exists()
    assert job.outcome["state"] == "stopped"
    assert "no answer in" in job.log
    # The job that was taken all the same ends as it begins.
    before = job.calls
    assert job.run(PBS_JOBID="2.srv") == 85
    assert job.calls == before


@pytest.mark.long
def test_nodes_that_are_not_fit_start_no_ranks(tmp_path: Path) -> None:
    """Step 0 runs on every host, and only its 2 keeps the ranks from being started."""
    job = Job(tmp_path, FINISHED, check=True)
    finding = '{"findings": [{"level": "error", "id": "disk.free", "where": "a2", "text": "full"}]}'
    python = f"""#!/bin/bash
case "$*" in *isles.check.step*) ;; *) exec {sys.executable} "$@" ;; esac
echo "$*" >>{tmp_path}/step.calls; echo "disk.free a2: full"
echo '{finding}' >{job.attempt.findings}; exit 2
"""
    write_program(tmp_path / "venv" / "bin" / "python", python)
    assert job.run() == 2, job.log
    calls = sorted((tmp_path / "step.calls").read_text().splitlines())
    assert len(calls) == 2
    for node, call in enumerate(calls):
        assert f"--attempt 1 --node {node} --hosts a1,a2 --master " in call
    assert not (tmp_path / "torchrun.calls").exists()
    assert "are not fit: full" in job.outcome["reason"]
    assert job.outcome["error"]["where"] == "a2: disk.free"
    assert "disk.free a2: full" in job.log


@pytest.mark.long
def test_a_rendered_job_of_a_users_script_does_not_go_on_for_ever(tmp_path: Path) -> None:
    (tmp_path / "own.py").touch()
    job = Job(
        tmp_path,
        "trap 'kill $!; exit 1' TERM; sleep 1000 & wait $!",
        time="60s",
        save_before="58s",
        text=OWN,
    )
    job.script = tmp_path / "render.sh"
    words = [sys.executable, "-m", "isles", "render", "run.yaml", "--to", "pbs"]
    subprocess.run([*words, "-o", job.script], cwd=tmp_path, check=True, timeout=DEADLINE_S)
    count = tmp_path / "tiny.times"
    count.write_text("19\n")
    assert job.run() == 0
    submitted = (tmp_path / "bin" / "qsub.calls").read_text().splitlines()[1:]
    assert submitted == [str(job.script)] and count.read_text() == "20\n"
    assert job.run() != 0
    assert (tmp_path / "bin" / "qsub.calls").read_text().splitlines()[1:] == submitted
    assert not count.exists(), "typed once more, it goes on"


@pytest.mark.long
def test_a_stop_that_a_user_wants_is_not_submitted_again(tmp_path: Path) -> None:
    job = Job(tmp_path, STOPPED)
    job.attempt.stop_request.write_text('{"kind": "save", "by": "me", "at": 1}')
    process = job.start()
    assert process.wait(DEADLINE_S) == 85, job.log
    assert job.outcome["state"] == "stopped"
    assert len((job.folder / "bin" / "qsub.calls").read_text().splitlines()) == 1


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    """Wait until something is so; fails when the script ends first."""
    for _ in range(int(DEADLINE_S / 0.05)):
        if condition():
            return
        try:
            process.wait(0.05)
        except subprocess.TimeoutExpired:
            continue
        raise AssertionError(f"the script has ended with {process.returncode}")
    raise AssertionError(f"not within {DEADLINE_S} s")


@pytest.mark.long
def test_qdel_lets_the_ranks_save(tmp_path: Path) -> None:
    torchrun = """\
trap 'touch "$attempt_dir/told-$rank"; exit 1' TERM
echo $$ >"$attempt_dir/pid-$rank.new"
[ "$rank" -ne 0 ] || echo '{"state": "stopped", "exit_code": 85, "step": 7}' \
>"$attempt_dir/stopped.json"
mv "$attempt_dir/pid-$rank.new" "$attempt_dir/pid-$rank"
while :; do sleep 0.1; done
"""
    job = Job(tmp_path, torchrun)
    process = job.start()
    pids = [job.attempt.path / f"pid-{rank}" for rank in (0, 1)]
    wait_for(lambda: all(pid.exists() for pid in pids), process)
    # As PBS does: everything of the job is told, on every node.
    for pid in pids:
        os.kill(int(pid.read_text()), signal.SIGTERM)
    process.terminate()
    assert process.wait(DEADLINE_S) == 85, job.log
    assert job.outcome["state"] == "stopped"
    assert len((job.folder / "bin" / "qsub.calls").read_text().splitlines()) == 1


def test_too_few_hosts_say_what_to_ask_for(tmp_path: Path) -> None:
    job = Job(tmp_path, FINISHED)
    assert job.start(("a1",)).wait(DEADLINE_S) == 1
    assert "it has 1 hosts (a1), and this script is for 2" in job.log


def test_what_qsub_refuses_is_shown_with_its_place(tmp_path: Path) -> None:
    job = Job(tmp_path, FINISHED)
    for said, key, fix in (
        ("qsub: Unknown queue", "queue", "qstat -Q"),
        ("qsub: Invalid account", "account", "-P NAME"),
        ("qsub: node(s) specification error", "resources", "dialect"),
    ):
        write_program(tmp_path / "bin" / "qsub", f"#!/bin/sh\necho '{said}' >&2; exit 1\n")
        text = job.train("--resume", "no", f"clusters.0.launcher.{key}=x", code=1)
        assert said in text
        assert f"command line clusters.0.launcher.{key}" in text
        assert fix in text


@pytest.mark.long
def test_the_rendered_script_needs_no_run_directory(tmp_path: Path) -> None:
    """It leaves the request to stop in the newest run, and is submitted again after progress."""
    torchrun = """\
run=$FOLDER/runs/tiny-7
[ "$rank" -ne 0 ] || mkdir -p "$run/attempts/001" "$run/checkpoints/step-00000003"
until [ -e "$run/attempts/001/stop-request.json" ]; do sleep 0.1; done
exit 1
"""
    job = Job(tmp_path, torchrun, time="60s", save_before="58s")
    script = tmp_path / "render.sh"
    words = [sys.executable, "-m", "isles", "render", "run.yaml", "--to", "pbs", "-o", str(script)]
    subprocess.run(words, cwd=tmp_path, check=True, timeout=DEADLINE_S)
    (tmp_path / "nodes").write_text("a1\na2\n")
    job.script = script
    assert job.run() == 0
    assert [call.partition(" -m ")[2] for call in job.calls] == [
        f"isles.train {tmp_path}/run.yaml"
    ] * 2
    assert (tmp_path / "bin" / "qsub.calls").read_text().splitlines()[1:] == [str(script)]
