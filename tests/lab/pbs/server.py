"""The server of the PBS stand-in: starts jobs on the pretend hosts over ssh, and ends them.

As a real OpenPBS 23.06 was seen to do: the script begins in $HOME with a login shell and umask
077; tasks of pbsdsh get the job's variables, not what the script exported, PATH=/bin:/usr/bin,
PBS_NODENUM, no PBS_NODEFILE on the first node, and write into the job's output file; TERM goes to
every process of the job, and KILL ten seconds later; a job over its wall time ends with -29.
"""

from __future__ import annotations

import json
import re
import shlex
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass

import jobs

_SSH = ("ssh", "-o", "BatchMode=yes")
_LOOK_S = 0.1
_KILL_DELAY_S = 10.0
_SPOOL = "/var/spool/pbs"
_OVER_WALLTIME, _DELETED, _KILLED = -29, 271, 265


def main() -> None:
    """Serve until there is a file `stop` in the folder of the records."""
    started: set[tuple[int, int]] = set()
    jobs.FOLDER.mkdir(parents=True, exist_ok=True)
    sys.stdout.write("serving\n")
    sys.stdout.flush()
    while not (jobs.FOLDER / "stop").exists():
        with jobs.locked():
            for job in jobs.all_jobs():
                if job.state == "Q" and (job.number, job.run_count) not in started:
                    lines = _place(job)
                    if lines:
                        started.add((job.number, job.run_count))
                        threading.Thread(target=_Run(job, lines).run, daemon=True).start()
        time.sleep(_LOOK_S)


def _place(job: jobs.Job) -> list[str]:
    """Give a job its nodes, if they are free: the lines of its node file. The lock is held."""
    busy = {host for other in jobs.all_jobs() if other.state == "R" for host in other.hosts}
    if not _take(job, list(jobs.NODES)):
        comment = "Can Never Run: Insufficient amount of resource: ncpus"
    elif not (lines := _take(job, [node for node in jobs.NODES if node not in busy])):
        comment = "Not Running: Not enough free nodes available"
    else:
        job.state, job.hosts = "R", list(dict.fromkeys(lines))
        job.comment, job.begun_at = f"Job run on {'+'.join(job.hosts)}", time.time()
        job.run_count += 1
        jobs.save(job)
        return lines
    if job.comment != comment:
        job.comment = comment
        jobs.save(job)
    return []


def _take(job: jobs.Job, pool: list[str]) -> list[str]:
    lines: list[str] = []
    for chunk in job.chunks:
        for _ in range(chunk.count):
            fits = chunk.cpus <= jobs.NUM_CPUS and chunk.gpus <= jobs.NUM_GPUS
            free = [node for node in pool if node not in lines and chunk.host in (None, node)]
            if not fits or not free:
                return []
            lines += [free[0]] * chunk.lines
    return lines


@dataclass
class _Run:
    """One run of a job, on its nodes."""

    job: jobs.Job
    lines: list[str]

    def __post_init__(self) -> None:
        self.node_file = f"{_SPOOL}/aux/{self.job.id}"
        self.tag = f"job{self.job.number}x{self.job.run_count}"
        self.output = jobs.FOLDER / f"{self.job.number}.OU"
        self.listener = socket.create_server(("0.0.0.0", 0))
        first = self.job.chunks[0]
        place = f"{socket.gethostbyname(jobs.SERVER)}:{self.listener.getsockname()[1]}"
        self.variables = {
            **self.job.variables,
            "PBS_JOBID": self.job.id,
            "PBS_JOBNAME": self.job.name,
            "PBS_ENVIRONMENT": "PBS_BATCH",
            "PBS_STANDIN_TM": place,
            "PBS_STANDIN_TAG": self.tag,
            "NCPUS": str(first.cpus),
            "OMP_NUM_THREADS": str(first.cpus),
        }

    def run(self) -> None:
        """Run it to its end, and say how it ended."""
        spooled = f"{_SPOOL}/{self.job.number}.SC"
        listing = shlex.quote("\n".join(self.lines) + "\n")
        prepare = f"mkdir -p {_SPOOL}/aux; printf %s {listing} > {self.node_file}; "
        prepare += f"cat > {spooled}; chmod 700 {spooled}"
        for host in self.job.hosts:
            _on(host, prepare, stdin=self.job.script)
        threading.Thread(target=self._serve, daemon=True).start()
        variables = {**self.variables, "PBS_NODEFILE": self.node_file, "PBS_NODENUM": "0"}
        if jobs.FLAVOUR == "torque" and self.job.walltime_s:
            variables["PBS_WALLTIME"] = str(self.job.walltime_s)
        shell = f"umask 077; {_exports(variables)} cd; exec setsid -w bash -lc 'exec {spooled}'"
        with self.output.open("ab") as stream:
            child = subprocess.Popen(
                [*_SSH, self.job.hosts[0], shell],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
            )
            code = self._watch(child)
        self._signal("KILL")
        self.listener.close()
        for host in self.job.hosts:
            _on(host, f"rm -f {self.node_file} {spooled}")
        self._conclude(code)

    def _watch(self, child: subprocess.Popen[bytes]) -> int:
        """Wait for the script; end it when its time is up, or when somebody wants it."""
        while child.poll() is None:
            is_deleted = (jobs.load(self.job.id) or self.job).is_deleted
            age_s = time.time() - self.job.begun_at
            is_late = 0 < self.job.walltime_s < age_s
            if not is_deleted and not is_late:
                time.sleep(_LOOK_S)
                continue
            if is_late:
                with self.output.open("a") as stream:
                    limit = self.job.walltime_s
                    stream.write(
                        f"=>> PBS: job killed: walltime {age_s:.0f} exceeded limit {limit}\n"
                    )
            self._signal("TERM")
            try:
                child.wait(_KILL_DELAY_S)
            except subprocess.TimeoutExpired:
                self._signal("KILL")
                child.wait()
            return _OVER_WALLTIME if is_late else _DELETED
        return child.returncode if child.returncode >= 0 else _KILLED

    def _conclude(self, code: int) -> None:
        self.job = jobs.load(self.job.id) or self.job
        with suppress(OSError):
            text = self.output.read_bytes()
            with open(self.job.output.rpartition(":")[2], "wb") as stream:  # noqa: PTH123
                stream.write(text)
        jobs.change(self.job, state=jobs.end_state(), exit_status=code)

    def _signal(self, name: str) -> None:
        """Signal every process of the job, on each of its nodes."""
        for host in self.job.hosts:
            _on(
                host,
                "for p in /proc/[0-9]*; do "
                f"grep -qz '^PBS_STANDIN_TAG={self.tag}$' $p/environ 2>/dev/null "
                f"&& kill -{name} ${{p#/proc/}} 2>/dev/null; done; true",
            )

    def _serve(self) -> None:
        """Take requests of pbsdsh."""
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        request = json.loads(connection.makefile().readline())
        tasks = list(enumerate(self.lines))
        if request["once_a_host"]:
            tasks = list({host: (number, host) for number, host in reversed(tasks)}.values())
        codes: dict[int, int] = {}

        def work(number: int, host: str) -> None:
            codes[number] = self._task(number, host, request["argv"])

        threads = [threading.Thread(target=work, args=task) for task in tasks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with suppress(OSError):
            connection.sendall(json.dumps(codes or {0: 255}).encode() + b"\n")
            connection.close()

    def _task(self, number: int, host: str, argv: list[str]) -> int:
        variables = {"PATH": "/bin:/usr/bin", **self.variables, "PBS_NODENUM": str(number)}
        if host != self.job.hosts[0]:
            variables["PBS_NODEFILE"] = self.node_file
        shell = (
            f"umask 077; {_exports(variables)} cd; command -v {shlex.quote(argv[0])} >/dev/null "
            f"|| exit 254; exec setsid -w {shlex.join(argv)}"
        )
        with self.output.open("ab") as stream:
            return subprocess.call(
                [*_SSH, host, shell], stdin=subprocess.DEVNULL, stdout=stream, stderr=stream
            )


def _exports(variables: dict[str, str]) -> str:
    own = ("HOME", "SHLVL", "_", "PWD", "HOSTNAME")
    return " ".join(
        f"export {name}={shlex.quote(value)};"
        for name, value in variables.items()
        if re.fullmatch(r"[A-Za-z_]\w*", name) and name not in own
    )


def _on(host: str, command: str, stdin: str = "") -> None:
    subprocess.run([*_SSH, host, command], input=stdin, text=True, check=False)


main()
