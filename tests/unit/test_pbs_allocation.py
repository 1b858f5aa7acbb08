"""The nodes of a PBS job as its coordinator sees them, and how it is queued again."""

from __future__ import annotations

from pathlib import Path

import pytest

from isles.config.sections.cluster import PbsLauncherConfig
from isles.errors import CommunicationError, UserError
from isles.launch.queue.pbs import PbsAllocation, write_dialect
from isles.run.paths import Attempt
from tests.unit.test_pbs import program


def allocation(folder: Path, nodes: str, num_nodes: int, **more: object) -> PbsAllocation:
    attempt = Attempt(folder / "attempts" / "001", 1)
    attempt.path.mkdir(parents=True, exist_ok=True)
    (folder / "nodes").write_text(nodes)
    environ = {"PBS_JOBID": "12.srv", "PBS_NODEFILE": str(folder / "nodes")}
    environ |= {"PBS_O_WORKDIR": str(folder)}
    launcher = PbsLauncherConfig.model_validate({"bin_path": str(folder / "bin"), **more})
    return PbsAllocation(launcher, attempt, environ, num_nodes)


def test_each_host_is_one_node_and_gets_the_jobs_own_script(tmp_path: Path) -> None:
    program(tmp_path / "bin", "pbsdsh", "exit 0")
    job = allocation(tmp_path, "10.0.0.1\n10.0.0.1\n10.0.0.2\n10.0.0.2\n", 2)
    assert [node.name for node in job.nodes] == ["10.0.0.1", "10.0.0.2"]
    assert (job.job, job.key, job.first_port) == ("PBS job 12.srv", "12.srv", 12)
    script, log = str(tmp_path / "attempts/001/job.sh"), tmp_path / "node-%n.log"
    (command,) = job.on_all_nodes(["--fleet", "f"], log)
    task = ["/bin/bash", "-l", script, "--fleet", "f", "--log", str(log)]
    assert command == [str(tmp_path / "bin/pbsdsh"), "--", *task]
    write_dialect(Attempt(tmp_path / "attempts/001", 1), "torque")
    assert job.on_all_nodes([], log)[0][1] == "-u", "one task a node, not one a core"
    (tmp_path / "bin" / "pbsdsh").unlink()
    commands = job.on_all_nodes(["--fleet", "f"], log)
    assert [words[4] for words in commands] == ["10.0.0.1", "10.0.0.2"], "by ssh instead"


def test_one_node_opens_no_port_to_the_network(tmp_path: Path) -> None:
    assert [node.address for node in allocation(tmp_path, "a1\na1\n", 1).nodes] == ["127.0.0.1"]


def test_too_few_hosts_say_what_to_ask_for(tmp_path: Path) -> None:
    with pytest.raises(CommunicationError, match=r"has 1 hosts \(a1\), and the run is for 2"):
        allocation(tmp_path, "a1\na1\n", 2)


def test_it_saves_before_the_time_limit_if_there_is_one(tmp_path: Path) -> None:
    assert allocation(tmp_path, "a1\n", 1).save_at() is None
    early = allocation(tmp_path, "a1\n", 1, time="1h", save_before="5m").save_at()
    late = allocation(tmp_path, "a1\n", 1, time="2h", save_before="5m").save_at()
    assert early is not None and late is not None and 3500 < late - early < 3700


def test_the_job_is_submitted_again_once(tmp_path: Path) -> None:
    job = allocation(tmp_path, "a1\n", 1)
    program(tmp_path / "bin", "qsub", 'pwd >"$0.where"; echo "$1" >>"$0.calls"; echo 13.srv')
    assert "it goes on as PBS job 13.srv" in job.queue_again()
    assert (tmp_path / "attempts/001/job-id").read_text().split() == ["13.srv"]
    assert (tmp_path / "bin/qsub.where").read_text().strip() == str(tmp_path)
    assert (tmp_path / "bin/qsub.calls").read_text().split() == [
        str(tmp_path / "attempts/001/job.sh")
    ]


def test_a_submission_without_an_answer_is_not_made_twice(tmp_path: Path) -> None:
    """The job may have been taken: it finds the end on record, and ends."""
    job = allocation(tmp_path, "a1\n", 1)
    job.submit_s = 0.5
    program(tmp_path / "bin", "qsub", 'echo >>"$0.calls"; exec sleep 60')
    with pytest.raises(UserError, match="qsub has not answered within"):
        job.queue_again()
    assert (tmp_path / "bin/qsub.calls").read_text() == "\n"
