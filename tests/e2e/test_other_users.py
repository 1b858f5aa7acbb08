"""Two accounts on one machine: one looks at the runs of the other, whose records are evil."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from isles.config.load import load_run_file
from isles.config.resolve import dump_resolved, resolve
from isles.run.join_line import JoinLine
from isles.run.nodes import Fleet, FleetNode
from isles.run.process import ProcessId
from isles.run.records import write_record, write_secret
from isles.run.remote import RemoteRun, write_remote
from tests.deadline import DEADLINE_S
from tests.programs import write_program
from tests.run_records import recorded_run

MAKER, VIEWER = "games", "daemon"
PROGRAMS = (
    *("scontrol", "sacct", "squeue", "scancel", "sinfo", "qstat", "qdel", "ssh", "rsync"),
    *("kubectl", "sky", "podman", "apptainer", "srun", "ray"),
)
LOOKS = (
    ["status", "RUN"],
    ["status", "RUN", "--json"],
    ["status", "RUN", "--check"],
    ["top", "RUN"],
    ["top", "RUN", "--json"],
    ["dashboard", "RUN", "--export", "PAGE"],
    ["report", "RUN", "--yes", "--output", "PAGE.zip"],
    ["logs", "RUN"],
    ["checkpoint", "list", "RUN"],
    ["checkpoint", "verify", "RUN"],
    ["stop", "RUN", "--timeout", "1s"],
)
DRIVER = """
import contextlib, io, json, sys
from isles.cli import main
said = {}
for words in json.load(sys.stdin):
    with contextlib.redirect_stdout(io.StringIO()) as out, \\
            contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            code = main(words)
        except SystemExit as end:
            code = end.code
    said[' '.join(words)] = [code, out.getvalue() + err.getvalue()]
print('SAID' + json.dumps(said))
"""


@dataclass
class Users:
    """A folder of several users, marks that programs leave, and a port that counts who comes."""

    folder: Path
    port: int
    callers: list[object] = field(default_factory=list)

    @property
    def runs(self) -> Path:
        return self.folder / "runs"

    @property
    def marks(self) -> Path:
        return self.folder / "marks"

    def stand_ins(self, name: str) -> Path:
        """Programs that leave a mark."""
        for program in PROGRAMS:
            # Like an sshd on which the viewer has a key: ssh runs its last word.
            end = 'exec bash -c "${@: -1}"' if program == "ssh" else "exit 1"
            lines = f'echo "$0 $*" >>{self.marks}/{name}-{program}; {end}'
            write_program(self.folder / name / program, lines)
        return self.folder / name

    def isles(self, account: str, commands: list[list[str]]) -> dict[str, tuple[int, str]]:
        """Run isles as an account, one command after the other; exit code and text of each."""
        user = pwd.getpwnam(account)
        home = self.folder / f"home-{account}"
        path = f"{self.folder}/path:/usr/bin:/bin"
        environ = {"PATH": path, "HOME": str(home), "PYTHONDONTWRITEBYTECODE": "1"}
        environ |= {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}", "AWS_REGION": "x"}
        environ |= {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"}
        # The account may read what isles itself consists of, wherever a tester keeps that.
        able = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
        words = ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
        done = subprocess.run(
            [*words, *able, sys.executable, "-c", DRIVER],
            input=json.dumps(commands),
            capture_output=True,
            text=True,
            env=environ,
            cwd=home,
            timeout=5 * DEADLINE_S,
            check=False,
        )
        _, found, answer = done.stdout.rpartition("SAID")
        assert found, done.stdout + done.stderr
        return {words: tuple(said) for words, said in json.loads(answer).items()}

    def state(self) -> dict[str, object]:
        """All that is in the folder of runs."""
        return {
            str(path): path.read_bytes() if path.is_file() else sorted(map(str, path.iterdir()))
            for path in (self.runs, *self.runs.rglob("*"))
        }


@pytest.fixture(scope="module")
def users_lab() -> Iterator[Users]:
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("it takes root, and setpriv, for two accounts")
    # Not in pytest's folder, which each start of pytest closes to other users.
    folder = Path(tempfile.mkdtemp(prefix="isles-users-", dir="/tmp"))
    folder.chmod(0o755)
    with socket.create_server(("127.0.0.1", 0)) as server:
        users = Users(folder, server.getsockname()[1])

        def count() -> None:
            while True:
                try:
                    caller, address = server.accept()
                except OSError:
                    return
                users.callers.append(address)
                caller.close()

        thread = threading.Thread(target=count)
        thread.start()
        try:
            for name in ("runs", "marks", "home-games", "home-daemon"):
                (folder / name).mkdir()
                (folder / name).chmod(0o777)
            yield users
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
            shutil.rmtree(folder)


def make_runs(users: Users, victim: ProcessId) -> list[str]:
    """Runs whose records name whatever isles acts on, and a record of a run elsewhere."""
    bins, touch = users.stand_ins("bins"), f"touch {users.marks}/lines"
    (users.folder / "run.yaml").write_text(
        "model: {name_or_path: x}\ndata: {sources: [{path: x.txt}]}\n"
        "training: {max_steps: 9, global_batch_size: 2}\ncheckpoint: {remote: 's3://evil/b'}\n"
        "clusters:\n- launcher: {kind: ssh, hosts: [prod-db]}\n"
        f"  environment: {{setup: ['{touch}'], python: {bins}/ray}}\n"
    )
    here = victim.record()
    hub = f"http://127.0.0.1:{users.port}"
    launches = {
        "slurm-1": {"launcher": "slurm", "job_id": "4711", "bin_path": str(bins)},
        "pbs-1": {"launcher": "pbs", "job_id": "4711.x", "bin_path": str(bins)},
        "ray-1": {"launcher": "ray", "job_id": "raysubmit_1", "address": hub},
        "ssh-1": {"launcher": "ssh", **here},
        "pid-1": {"launcher": "local", **here},
    }
    resolved = dump_resolved(resolve(load_run_file(users.folder / "run.yaml"), num_gpus=0))
    line = JoinLine("127.0.0.1", users.port, "evil", "A" * 43, bytes(32)).secret_text()
    for name, launch in launches.items():
        run_dir, attempt = recorded_run(users.runs / name, launch, status={"phase": "training"})
        run_dir.resolved.write_text(resolved)
        run_dir.join_line.write_text(line)
        nodes = (FleetNode(0, "h0", "prod-a", "10.0.0.1", 1), FleetNode(1, "h1", "prod-db", "", 1))
        container = {"image": "evil", "runtime": "podman"}
        fleet = Fleet("ssh", nodes, 29500, 2, "cpu", 60.0, "", container=container)
        fleet.write(attempt)
        attempt.rank_log(0).write_text("a line of rank 0\n")
    for name in ("mc-1", "hub-1"):
        state = users.runs / name / ("hub" if name == "mc-1" else "")
        state.mkdir(parents=True)
        record = {"command": [str(bins / "ray")], "listen": "127.0.0.1:1", **here}
        write_record(state / "process.json", record)
        write_record(state / "settings.json", {})
        write_secret(state / "join", line)
    cluster = {"name": "a", "launcher": "local", "path": str(users.runs / "pid-1")}
    record = {"clusters": [cluster], "begun_at": 1.0, "started_at": 1.0, "typed": touch}
    config = {"outer": {"kind": "diloco", "engine": "hub"}}
    write_record(users.runs / "mc-1" / "clusters.json", {**record, "config": config})
    for name, ssh in (("far-1", "me@prod-db"), ("pod-1", "kubernetes:x")):
        launcher = "kubernetes" if name == "pod-1" else "ssh"
        lines, python = (touch,), str(bins / "ray")
        far = RemoteRun(name, ssh, "/x", lines, python, launcher, (ssh,), time.time())
        write_remote(users.runs, far)
    return [*launches, "mc-1", "hub-1", "far-1", "pod-1"]


def give(users: Users, account: str) -> None:
    """Make the runs an account's, which lets all others write in them."""
    uid = pwd.getpwnam(account).pw_uid
    for path in users.runs.rglob("*"):
        os.chown(path, uid, -1)
        path.chmod(0o777 if path.is_dir() else 0o666)


def test_a_look_at_another_users_run_does_nothing_that_its_records_name(users_lab: Users) -> None:
    users = users_lab
    users.stand_ins("path")
    uid = pwd.getpwnam(VIEWER).pw_uid
    victim = subprocess.Popen(["sleep", "1000"], user=uid, start_new_session=True)
    try:
        names = make_runs(users, ProcessId.of(victim.pid))
        give(users, MAKER)
        before, home = users.state(), users.folder / f"home-{VIEWER}"
        folder = f"--output-dir={users.runs}"
        commands = [["status", folder], ["status", folder, "--json"]]
        for name in names:
            for words in LOOKS:
                has_none = name in ("mc-1", "hub-1", "far-1", "pod-1") and words[0] == "checkpoint"
                has_none |= name == "hub-1" and {"logs", "--check"} & {*words} != set()
                if not has_none:
                    page = str(home / f"{name}.html")
                    given = [w.replace("RUN", name).replace("PAGE", page) for w in words]
                    commands.append([*given, folder])
        said = users.isles(VIEWER, commands)
        marks = sorted(path.name for path in users.marks.iterdir())
        assert not marks and not users.callers, (marks, users.callers)
        assert victim.poll() is None, "the viewer's own process was ended"
        after = users.state()
        asked = {path for path in after if path.endswith("stop-request.json")}
        changed = {path for path in {*before, *after} if before.get(path) != after.get(path)}
        assert all("attempts/001" in path for path in asked)
        folders = {str(Path(path).parent) for path in asked}
        assert changed == asked | folders, "only a request to stop may lie there now"
        wrong = {}
        for words in commands:
            code, text = said[" ".join(words)]
            is_quiet = "--json" in words or words[0] in ("checkpoint", "dashboard", "stop")
            if "Traceback" in text or (MAKER not in text and not is_quiet):
                wrong[" ".join(words)] = (code, text)
        assert not wrong, "\n".join(f"{words}: {said}" for words, said in wrong.items())
        # The same records, as their owner: now they are acted on.
        shutil.rmtree(users.marks)
        users.marks.mkdir()
        users.marks.chmod(0o777)
        users.isles(MAKER, [["status", "slurm-1", folder], ["logs", "ssh-1", folder]])
        marks = sorted(path.name for path in users.marks.iterdir())
        assert {"bins-scontrol", "path-ssh", "lines"} <= set(marks), marks
    finally:
        victim.kill()
        victim.wait()
        shutil.rmtree(users.runs)
