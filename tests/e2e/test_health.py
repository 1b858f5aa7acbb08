"""`isles status --check` and `isles report`, typed beside a run of two real ranks."""

from __future__ import annotations

import json
import os
import signal
import socket
import zipfile
from pathlib import Path

import pytest

from isles.errors import ExitCode
from isles.run.paths import Attempt
from isles.run.process import ProcessId
from isles.run.records import read_record
from tests.deadline import until
from tests.e2e.typed import Command, isles, the_run
from tests.runs import nothing_left

LONG = ("training.max_steps=100000", "training.logging_steps=1")
PASSWORD, KEY, TOKEN = "correct horse battery", "k-5f2a-of-a-service", "hf_thisMustNotLeakAnywhere"


@pytest.mark.long
def test_a_run_is_well_then_a_rank_freezes_and_a_report_tells_no_secret(run_file: Path) -> None:
    cwd, attempt = run_file.parent, the_run(run_file).attempt(1)
    secrets = {"HF_TOKEN": TOKEN, "MY_SERVICE_KEY": KEY, "DB_PASS": PASSWORD}
    with nothing_left(cwd):
        command = Command(
            "train", str(run_file), "clusters.0.gpus_per_node=2", *LONG, cwd=cwd, env=secrets
        )
        command.until(attempt.fleet.exists)
        waited = isles("status", "tiny", "--check", "--wait", "9m", cwd=cwd)
        shown = waited.out.splitlines()
        assert [line.split()[:2] for line in shown[1:]] == [
            ["ok", name] for name in ("processes", "memory", "loss", "ranks", "records")
        ]
        assert "2 processes on 1 host, one for each rank" in waited.out
        assert "waiting, " in waited.err, "it was typed before the first step"

        frozen = ProcessId.from_record(read_record(attempt.rank_record(1)) or {})
        assert frozen is not None
        os.kill(frozen.pid, signal.SIGSTOP)
        try:
            name = f"rank 1 on {socket.gethostname()}"

            def wrong() -> dict[str, str]:
                asked = isles("status", "tiny", "--check", "--json", cwd=cwd, expected=None)
                found = json.loads(asked.out)
                code = ExitCode.OK if found["is_well"] else ExitCode.PREFLIGHT
                assert asked.process.returncode == code
                bad = [line for line in found["lines"] if line["state"] == "wrong"]
                return {line["where"]: line["next"] for line in bad}

            found = until(lambda: found if name in (found := wrong()) else {})
            assert found[name] == "isles logs tiny-1 --rank 1"
            assert_report(attempt, cwd, secrets)
        finally:
            os.kill(frozen.pid, signal.SIGCONT)
        isles("stop", "tiny", "--now", cwd=cwd)
        command.end()
        ended = isles("status", "tiny", "--check", cwd=cwd, expected=ExitCode.PREFLIGHT)
        assert "it has ended" in ended.out


def assert_report(attempt: Attempt, cwd: Path, secrets: dict[str, str]) -> None:
    """It holds what it lists, of the run as it is now, and none of the secrets."""
    with attempt.rank_log(0).open("a") as log:
        log.write(f"login with {TOKEN} and {PASSWORD}, {KEY} at https://me:{KEY}@example.org\n")
    said = isles("report", "tiny", cwd=cwd, env=secrets).out
    (path,) = attempt.path.parents[1].glob("report-*.zip")
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name).decode() for name in archive.namelist()}
    listed = {line.split()[0] for line in said.splitlines()[:-1] if "not in it" not in line}
    assert listed == set(files)
    assert {"versions.json", "snapshot.json", "attempts/001/rank-1.json", "resolved.yaml"} <= listed
    assert {"metrics.jsonl", "telemetry/node-0.jsonl", "attempts/001/live.json"} <= listed
    assert "0" in json.loads(files["stacks-now.json"]), "where rank 0 waits"
    taken = (PASSWORD, KEY, TOKEN, attempt.token.read_text().strip())
    whole = "\n".join(files.values())
    assert [secret for secret in taken if secret in whole] == []
    assert "at https://[removed]@example.org" in files["attempts/001/rank-0.log"]
