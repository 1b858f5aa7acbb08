"""`launcher: skypilot`, by a stand-in for sky (`tests/lab/sky`) that starts a task on the hosts."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from shlex import quote
from typing import Any

import pytest

from isles.errors import ExitCode
from isles.run.paths import RunDir
from tests.lab.home import (
    QUOTED_ISLES,
    QUOTED_PYTHON,
    assert_nothing_left,
    assert_stopped,
    begin,
    end,
    install,
    isles,
    outcome_of,
    sh,
    signal_all,
    until,
    until_step,
    write_run,
)
from tests.lab.hosts import Lab

NUM_HOSTS = 2
NODES = ("a1", "a2")
LONG = {"max_steps": 100_000}
MOUNTS = {"~/sky_workdir/tiny": "tiny", "~/sky_workdir/words.jsonl": "words.jsonl"}


@pytest.fixture(autouse=True)
def state(lab: Lab) -> Iterator[Path]:
    """The command on the laptop, and the folder of its state."""
    folder, program = lab.shared / ".sky", Path(__file__).parents[1] / "lab/sky/command.py"
    folder.mkdir()
    line = f'SKY_HOSTS="{" ".join(NODES)}" exec {QUOTED_PYTHON} {quote(str(program))} "$@"'
    install(lab, "ctl", "sky", line)
    yield folder
    for job in folder.glob("job-*"):
        (job / "cancel").touch()
        num = len(list(job.glob("pid-*")))
        until(lambda job=job, num=num: len(list(job.glob("end-*"))) >= num, f"{job.name} ends")
    for name in NODES:
        sh(lab, name, "rm -rf ~/sky_workdir")
    sh(lab, "ctl", "rm -rf /shared/.sky /shared/runs")


def prepare(lab: Lab, name: str, launcher: dict[str, Any], **more: Any) -> RunDir:
    """A run file of two nodes, and the directory of its first run, on the first of them."""
    launcher = {"kind": "skypilot", "file_mounts": MOUNTS, **launcher}
    cluster = {"device": "cpu", "gpus_per_node": 1, "nodes": 2, "workdir": None}
    environment = {"python": sys.executable}
    more = {**cluster, "environment": environment, "launcher": launcher, **more}
    write_run(lab, name, output_dir="runs", **more)
    return RunDir(lab.root("a1") / "root/sky_workdir/runs" / f"{name}-1")


def test_two_nodes_train_stop_and_go_on_from_the_laptop(lab: Lab, state: Path) -> None:
    run_dir = prepare(lab, "cloud", {"secrets": ["MY_KEY"]}, training=LONG)
    sh(lab, "ctl", f"cd /shared && MY_KEY=hidden {QUOTED_ISLES} train cloud.yaml --detach")
    attempt = run_dir.attempt(1)
    until_step(attempt, 3)
    seen = (state / "calls").read_text()
    assert "--secret ISLES_TOKEN --secret MY_KEY" in seen
    seen += (state / "job-1" / "log").read_text()
    assert "hidden" not in seen and attempt.token.read_text().strip() not in seen
    assert "10.77.1.2 rank 1]" in isles(lab, "logs", "cloud-1@isles-cloud")
    isles(lab, "stop", "cloud-1@isles-cloud")
    # It finishes on the same machines; what is followed ends with its exit code.
    length = f"training.max_steps={assert_stopped(run_dir) + 5}"
    again = f"{QUOTED_ISLES} train cloud.yaml {length} --resume runs/cloud-1 2>&1"
    assert "going on with cloud-1" in sh(lab, "ctl", f"cd /shared && MY_KEY=hidden {again}")
    assert outcome_of(run_dir.attempt(2))["state"] == "finished"
    assert_nothing_left(lab, NODES)


@pytest.mark.long
def test_a_managed_job_that_has_saved_is_started_again_and_goes_on(lab: Lab, state: Path) -> None:
    run_dir = prepare(lab, "spot", {"managed": True}, training=LONG)
    text = isles(lab, "train", "spot.yaml")
    assert "sky jobs cancel 1" in text
    first, second = run_dir.attempt(1), run_dir.attempt(2)
    until_step(first, 3)
    # As a cloud does that takes a machine: one node alone is told.
    sh(lab, "a2", "kill -TERM $(cat /shared/.sky/job-1/pid-1)")
    outcome = outcome_of(first)
    assert (outcome["state"], outcome["exit_code"]) == ("stopped", ExitCode.REQUEUE)
    until_step(second, outcome["step"] + 3)
    sh(lab, "ctl", "sky jobs cancel --yes 1")
    assert outcome_of(second)["exit_code"] == ExitCode.REQUEUE
    assert_nothing_left(lab, NODES)


@pytest.mark.long
def test_a_start_that_fails_leaves_nothing_and_shows_the_words_of_sky(lab: Lab, state: Path):
    gone = {"sources": [{"path": "gone.jsonl"}], "seq_length": 32}
    bad, slow = ["echo no such thing >&2", "exit 3"], ["sleep 600"]
    for name, launcher, more, words in (
        ("many", {"secrets": ["MY_KEY"]}, {"nodes": 3}, ["MY_KEY is not set in this shell"]),
        ("many", {}, {"nodes": 3}, ["ResourcesUnavailableError", "3 nodes are asked for, 2 are"]),
        (
            "many",
            {"managed": True},
            {"nodes": 3},
            ["may have accepted the job after all; check with sky"],
        ),
        ("nodata", {}, {"data": gone}, ["gone.jsonl", "the job ended before the run"]),
        ("badsetup", {"setup": bad}, {}, ["no such thing"]),
        (
            "slow",
            {"setup": slow, "launch_timeout": "15s"},
            {},
            ["did not start the run within 15s"],
        ),
    ):
        prepare(lab, name, launcher, **more)
        code = ExitCode.USER if "secrets" in launcher else ExitCode.PREFLIGHT
        text = isles(lab, "train", f"{name}.yaml", expected=code)
        assert all(word in text for word in words), text
    # A Ctrl+C while the machines are set up.
    prepare(lab, "early", {"setup": slow})
    process = begin(lab, "train", "early.yaml")
    until(lambda: "logs isles-early" in (state / "calls").read_text(), "its setup is on its way")
    signal_all(lab, "ctl", signal.SIGINT, "train", "early.yaml")
    said = end(process)
    assert process.returncode == ExitCode.INTERRUPTED, said
    assert not list(state.glob("cluster-*")), "all machines are given back"
    assert_nothing_left(lab, NODES)
    assert not list((lab.shared / "runs").glob(".remote/*"))
