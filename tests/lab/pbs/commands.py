"""The commands of the PBS stand-in: qsub, qstat, qdel, pbsnodes, pbsdsh.

A stand-in for tests, over the pretend hosts: no PBS server can be installed without a machine of
its own. It does what a real OpenPBS 23.06 was seen to do with the same jobs; of the flavour
torque, nothing was compared with a real one. Not there: nodes shared by jobs, priorities,
reservations, hooks, staging, arrays, interactive jobs. `server.py` runs the jobs.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import sys
from pathlib import Path
from typing import NoReturn

import jobs

_VALUED = "lvNojqrkmMASWePpaRu"


def _end(text: str, code: int) -> NoReturn:
    sys.stderr.write(text + "\n")
    sys.exit(code)


def _options(words: list[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Options with their values, in the order given; and what stands behind them."""
    found: dict[str, list[str]] = {}
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] != "--":
        word = rest.pop(0)
        letter = word[1:2]
        if letter in _VALUED:
            if not word[2:] and not rest:
                _end(f"qsub: option requires an argument -- '{letter}'", 2)
            found.setdefault(letter, []).append(word[2:] or rest.pop(0))
        elif word in ("-V", "-h", "-z"):
            found.setdefault(letter, []).append("")
        else:
            _end(f"qsub: illegal option {word}", 2)
    return found, rest


def _directives(script: str) -> dict[str, list[str]]:
    """The options in the `#PBS` lines, which end at the first line that is a command."""
    words: list[str] = []
    for line in script.splitlines():
        if line.startswith("#PBS"):
            words += shlex.split(line[4:])
        elif line.strip() and not line.lstrip().startswith("#"):
            break
    return _options(words)[0]


def qsub(words: list[str]) -> None:
    """Take a job: a script's path, or the script on stdin; options win over the script's lines."""
    typed, rest = _options(words)
    name = "STDIN"
    if rest:
        script, name = Path(rest[0]).read_text(), Path(rest[0]).name
    else:
        script = sys.stdin.read()
    asked = {**_directives(script), **typed}
    name = asked.get("N", [name])[-1]
    queue = asked.get("q", ["workq"])[-1]
    try:
        chunks, walltime_s = jobs.read_request(asked.get("l", []))
    except jobs.RequestError as error:
        _end(*error.args)
    variables = _variables(asked, queue)
    with jobs.locked():
        number = max((job.number for job in jobs.all_jobs()), default=-1) + 1
        job = jobs.Job(
            number=number,
            name=name,
            chunks=chunks,
            walltime_s=walltime_s,
            variables=variables,
            output=asked.get("o", [f"{Path.cwd()}/{name}.o{number}"])[-1],
            script=script,
            queue=queue,
        )
        jobs.save(job)
    sys.stdout.write(job.id + "\n")


def _variables(asked: dict[str, list[str]], queue: str) -> dict[str, str]:
    """A job's variables: those of -V and -v, and where it came from."""
    variables = dict(os.environ) if "V" in asked else {}
    for pair in (pair for text in asked.get("v", []) for pair in text.split(",")):
        key, has_value, value = pair.partition("=")
        variables[key] = value if has_value else os.environ.get(key, "")
    variables |= {
        "PBS_O_WORKDIR": str(Path.cwd()),
        "PBS_O_HOST": socket.gethostname(),
        "PBS_O_HOME": os.environ.get("HOME", "/"),
        "PBS_O_PATH": os.environ["PATH"],
        "PBS_O_QUEUE": queue,
        "PBS_QUEUE": queue,
    }
    return variables


def qstat(words: list[str]) -> None:
    """Show jobs. OpenPBS: ended ones only with -x. Torque shows them a while, state C."""
    if "--version" in words:
        if jobs.FLAVOUR == "torque":
            _end("Version: 6.1.2\nCommit: stand-in", 0)
        sys.stdout.write("pbs_version = 23.06.06 (stand-in)\n")
        return
    flags = {letter for word in words if word.startswith("-") for letter in word[1:]}
    given = [word for word in words if not word.startswith("-")]
    shows_ended = jobs.FLAVOUR == "torque" or "x" in flags
    chosen = []
    for job_id in given or [job.id for job in jobs.all_jobs()]:
        job = jobs.load(job_id)
        if job is None:
            _end(f"qstat: Unknown Job Id {job_id}", 153)
        if not job.is_over or shows_ended:
            chosen.append(job)
        elif given:
            _end(
                f"qstat: {job_id} Job has finished, use -x or -H to obtain historical job "
                "information",
                35,
            )
    if "f" in flags:
        for job in chosen:
            sys.stdout.write(f"Job Id: {job.id}\n")
            sys.stdout.writelines(f"    {key} = {value}\n" for key, value in _attributes(job))
            sys.stdout.write("\n")
    elif chosen:
        sys.stdout.write("Job id            Name             User              S Queue\n")
        for job in chosen:
            sys.stdout.write(f"{job.id:<17} {job.name[:16]:<16} root  {job.state} {job.queue}\n")


def _attributes(job: jobs.Job) -> list[tuple[str, object]]:
    found: list[tuple[str, object]] = [
        ("Job_Name", job.name),
        ("job_state", job.state),
        ("queue", job.queue),
        ("server", jobs.SERVER),
        ("run_count", job.run_count),
        ("Output_Path", job.output),
    ]
    if job.comment:
        # Long values go on in lines that begin with a tab, wherever they break.
        found.append(("comment", f"{job.comment[:60]}\n\t{job.comment[60:]}".rstrip()))
    if job.hosts:
        found.append(("exec_host", "+".join(f"{host}/0" for host in job.hosts)))
    if job.exit_status is not None:
        key = "exit_status" if jobs.FLAVOUR == "torque" else "Exit_status"
        found.append((key, job.exit_status))
    return found


def qdel(words: list[str]) -> None:
    """Leave a request for the server."""
    code = 0
    for job_id in (word for word in words if not word.startswith("-")):
        with jobs.locked():
            job = jobs.load(job_id)
            if job is None:
                sys.stderr.write(f"qdel: Unknown Job Id {job_id}\n")
                code = 153
            elif job.is_over:
                sys.stderr.write(f"qdel: Job has finished {job_id}\n")
                code = 35
            elif job.state == "Q":
                job.state, job.exit_status = jobs.end_state(), 271
                jobs.save(job)
            else:
                job.is_deleted = True
                jobs.save(job)
    sys.exit(code)


def pbsdsh(words: list[str]) -> None:
    """Run a command on the job's nodes: once for each line of the node file; -u: once a host."""
    once_a_host = False
    while words and words[0].startswith("-"):
        word = words.pop(0)
        if word == "--":
            break
        if word == "-u" and jobs.FLAVOUR == "torque":
            once_a_host = True
        elif word not in ("-v", "-s", "-o"):
            _end(f"pbsdsh: invalid option {word}", 1)
    address, port = os.environ["PBS_STANDIN_TM"].split(":")
    connection = socket.create_connection((address, int(port)))
    signal.signal(signal.SIGTERM, lambda *_: os._exit(1))
    request = {"argv": words, "once_a_host": once_a_host}
    connection.sendall(json.dumps(request).encode() + b"\n")
    answer = connection.makefile().readline()
    if not answer:
        sys.exit(1)
    codes = {int(task): code for task, code in json.loads(answer).items()}
    for task, code in codes.items():
        if code:
            sys.stderr.write(f"pbsdsh: task 0x{task:08x} exit status {code}\n")
    # And yet it ends with 0, as the real one was seen to do.


def main() -> None:
    """`commands.py NAME WORDS...`."""
    name, words = sys.argv[1], sys.argv[2:]
    match name:
        case "qsub":
            qsub(words)
        case "qstat":
            qstat(words)
        case "qdel":
            qdel(words)
        case "pbsdsh":
            pbsdsh(words)
        case "pbsnodes":
            sys.stdout.writelines(f"{node}\n     state = free\n" for node in jobs.NODES)


main()
