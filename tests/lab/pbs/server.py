"""The server of the PBS stand-in: takes jobs, and runs them on the pretend hosts over ssh.

A stand-in for tests: no PBS server can be installed without a machine of its own. It does what a
real OpenPBS 23.06 was seen to do with the same jobs: the script begins in $HOME with a login shell
and umask 077; tasks of pbsdsh get the job's variables, not what the script exported,
PATH=/bin:/usr/bin, PBS_NODENUM, no PBS_NODEFILE on the first node, and write into the job's output
file; qdel sends TERM to every process of the job, and KILL ten seconds later. Of the flavor
torque, nothing was compared with a real one. Not there: time limits, nodes shared by jobs or named
by them, priorities, reservations, hooks, staging, arrays, interactive jobs.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from multiprocessing.connection import Connection, Listener
from pathlib import Path

Answer = tuple[int, str, str]
"""Exit code of a command, and what it prints on stdout and stderr."""

FOLDER, IS_TORQUE, NODES = Path(sys.argv[1]), sys.argv[2] == "torque", sys.argv[3:]
NUM_CPUS, NUM_GPUS = 4, 2
"""Of each node, as far as requests are concerned."""

KILL_DELAY_S = 10.0
_SSH = ("ssh", "-o", "BatchMode=yes")
_OWN = ("HOME", "HOSTNAME", "PWD")

QSUB = argparse.ArgumentParser("qsub")
QSUB.add_argument("-l", action="append", default=[])
QSUB.add_argument("-V", action="store_true")
for letter in "NoqAjrm":
    QSUB.add_argument(f"-{letter}")
QSUB.add_argument("script")


@dataclass
class Job:
    """One job; `state` is PBS's letter: Q, R, F (OpenPBS) or C (Torque).

    Args:
        nodes, lines, cpus, gpus: how many nodes, and of each: how often it stands in the node file,
            its cores and its GPUs.
    """

    number: int
    script: str
    variables: dict[str, str]
    output: str
    nodes: int
    lines: int
    cpus: int
    gpus: int
    state: str = "Q"
    comment: str = ""
    exit_status: int | None = None
    hosts: list[str] = field(default_factory=list)
    is_deleted: bool = False
    has_ended: threading.Event = field(default_factory=threading.Event)

    @property
    def id(self) -> str:
        return f"{self.number}.ctl"

    def file(self, suffix: str) -> Path:
        return FOLDER / f"{self.number}.{suffix}"

    def start(self, host: str, command: str, **variables: str) -> subprocess.Popen[bytes]:
        """Start a command of the job on one of its hosts."""
        given = {"PATH": "/bin:/usr/bin", **self.variables, **variables, "PBS_JOBID": self.id}
        pairs = [f"{name}={value}" for name, value in given.items() if name not in _OWN]
        line = f"umask 077; cd; exec env {shlex.join(pairs)} setsid -w {command}"
        with self.file("OU").open("ab") as stream:
            return subprocess.Popen(
                [*_SSH, host, line], stdin=subprocess.DEVNULL, stdout=stream, stderr=stream
            )

    def signal(self, name: str) -> None:
        """Signal every process of the job, on each of its nodes."""
        found = f"grep -lsz '^PBS_JOBID={self.id}$' /proc/[0-9]*/environ | cut -d/ -f3"
        for host in self.hosts:
            line = f"kill -{name} $({found}) 2>/dev/null"
            subprocess.run([*_SSH, host, line], check=False)

    def delete(self) -> None:
        """End it while it runs."""
        self.signal("TERM")
        if not self.has_ended.wait(KILL_DELAY_S):
            self.signal("KILL")

    def run(self) -> None:
        """Run it to its end, on the hosts that it has."""
        self.file("SC").write_text(self.script)
        self.file("SC").chmod(0o700)
        self.file("nodes").write_text("".join(f"{host}\n" * self.lines for host in self.hosts))
        command = f"bash -lc 'exec {self.file('SC')}'"
        variables = {"PBS_NODENUM": "0", "PBS_NODEFILE": str(self.file("nodes"))}
        code = self.start(self.hosts[0], command, **variables).wait()
        self.has_ended.set()
        self.signal("KILL")
        shutil.copyfile(self.file("OU"), self.output)
        with LOCK:
            self.end(271 if self.is_deleted else code)
            schedule()

    def end(self, code: int) -> None:
        self.state, self.exit_status = "C" if IS_TORQUE else "F", code


JOBS: list[Job] = []
LOCK = threading.Lock()


def schedule() -> None:
    """Give jobs that wait their nodes, if they are free. The lock is held."""
    for job in [job for job in JOBS if job.state == "Q"]:
        busy = {host for other in JOBS if other.state == "R" for host in other.hosts}
        free = [node for node in NODES if node not in busy]
        if job.nodes > len(NODES) or job.cpus > NUM_CPUS or job.gpus > NUM_GPUS:
            job.comment = "Can Never Run: Insufficient amount of resource: ncpus"
        elif job.nodes > len(free):
            job.comment = "Not Running: Not enough free nodes available"
        else:
            job.state, job.hosts = "R", free[: job.nodes]
            job.comment = f"Job run on {'+'.join(job.hosts)}"
            threading.Thread(target=job.run, daemon=True).start()


def qsub(words: list[str], environ: dict[str, str]) -> Answer:
    """Take a job: a script's path; options win over the script's own, which end at a command."""
    folder = environ["PBS_O_WORKDIR"]
    script = Path(folder, words[-1]).read_text()
    head = takewhile(lambda line: line.startswith("#") or not line, script.splitlines())
    own = [word for line in head if line.startswith("#PBS") for word in shlex.split(line[4:])]
    given = QSUB.parse_args([*own, *words])
    # Each flavor refuses the request of the other.
    asked = dict(text.split("=", 1) for text in given.l)["nodes" if IS_TORQUE else "select"]
    count, *parts = asked.split(":")
    values = {name: int(value) for name, value in (p.split("=") for p in parts) if name != "mem"}
    lines = values.get("ppn" if IS_TORQUE else "mpiprocs", 1)
    with LOCK:
        name = given.N or Path(words[-1]).name
        job = Job(
            number=len(JOBS),
            script=script,
            variables=environ if given.V else {k: environ[k] for k in environ if "PBS_O_" in k},
            output=given.o or f"{folder}/{name}.o{len(JOBS)}",
            nodes=int(count),
            lines=lines,
            cpus=values.get("ncpus", lines),
            gpus=values.get("gpus" if IS_TORQUE else "ngpus", 0),
        )
        job.variables["OMP_NUM_THREADS"] = str(job.cpus)
        JOBS.append(job)
        schedule()
    return 0, f"{job.id}\n", ""


def qstat(words: list[str], environ: dict[str, str]) -> Answer:
    """Show a job. OpenPBS: one that has ended only with -x. Torque shows it a while, state C."""
    if "--version" in words:
        if IS_TORQUE:
            return 0, "", "Version: 6.1.2\nCommit: stand-in\n"
        return 0, "pbs_version = 23.06.06 (stand-in)\n", ""
    job = find(words[-1])
    if job.state == "F" and "-x" not in words:
        return 35, "", f"qstat: {job.id} Job has finished, use -x\n"
    text = f"Job Id: {job.id}\n    job_state = {job.state}\n"
    # Long values go on in lines that begin with a tab, wherever they break.
    text += f"    comment = {job.comment[:60]}\n\t{job.comment[60:]}\n"
    text += f"    exec_host = {'+'.join(f'{host}/0' for host in job.hosts)}\n" * bool(job.hosts)
    if job.exit_status is not None:
        text += f"    {'exit' if IS_TORQUE else 'Exit'}_status = {job.exit_status}\n"
    return 0, text, ""


def qdel(words: list[str], environ: dict[str, str]) -> Answer:
    """End a job; the command does not wait for it."""
    job = find(words[-1])
    with LOCK:
        if job.state == "Q":
            job.end(271)
        elif job.state == "R":
            job.is_deleted = True
            threading.Thread(target=job.delete, daemon=True).start()
        else:
            return 35, "", f"qdel: Job has finished {job.id}\n"
    return 0, "", ""


def pbsdsh(words: list[str], environ: dict[str, str]) -> Answer:
    """Run a command on the job's nodes: once for each line of the node file; -u: once a host."""
    job = find(environ["PBS_JOBID"])
    is_once = words[0] == "-u"
    if is_once and not IS_TORQUE:
        return 1, "", "pbsdsh: invalid option -u\n"
    command = shlex.join(words[words.index("--") + 1 :])
    tasks = []
    for number, host in enumerate(h for h in job.hosts for _ in range(1 if is_once else job.lines)):
        variables = {"PBS_NODENUM": str(number)}
        if host != job.hosts[0]:
            variables["PBS_NODEFILE"] = str(job.file("nodes"))
        tasks.append(job.start(host, command, **variables))
    codes = [task.wait() for task in tasks]
    said = [f"pbsdsh: task 0x{n:08x} exit status {code}\n" for n, code in enumerate(codes) if code]
    return 0, "", "".join(said)  # and yet it ends with 0, as the real one was seen to do


def find(job_id: str) -> Job:
    """A job by its id, with or without the server's name."""
    return JOBS[int(job_id.partition(".")[0])]


def answer(connection: Connection) -> None:
    """Do what a command asks for."""
    (name, *words), environ = connection.recv()
    commands = {"qsub": qsub, "qstat": qstat, "qdel": qdel, "pbsdsh": pbsdsh}
    with connection, suppress(BrokenPipeError):
        connection.send(commands[name](words, environ))


def main() -> None:
    """Serve until stdin is closed."""
    listener = Listener(str(FOLDER / "socket"))

    def serve() -> None:
        while True:
            threading.Thread(target=answer, args=[listener.accept()], daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    sys.stdout.write("serving\n")
    sys.stdout.flush()
    sys.stdin.read()


main()
