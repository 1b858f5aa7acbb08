"""A stand-in for the command `sky`, over the pretend hosts: not SkyPilot, which needs a cloud.

As of SkyPilot 0.14 it copies: `launch` (the nodes of a cluster, its name in ~/.ssh/config, file
mounts, secrets from the environment, setup on all nodes before run on any, a job on each node with
SKYPILOT_NODE_RANK, NODE_IPS and NUM_NODES), `logs`, `status`, `cancel` and `down`; of managed jobs
`jobs launch`, `jobs cancel`, and recover_on_exit_codes. It does not choose machines, price or mount
anything, and never loses a cluster by itself: a test kills. `node.py` is what runs on a node.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

STATE = Path("/shared/.sky")
HOSTS = os.environ["SKY_HOSTS"].split()
NODE = Path(__file__).with_name("node.py")
LOOK_S = 0.05


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def fail(text: str, code: int = 1) -> None:
    sys.stderr.write(f"{text}\n")
    sys.exit(code)


def clusters() -> dict[str, list[str]]:
    found = STATE.glob("cluster-*.json")
    return {p.stem.removeprefix("cluster-"): json.loads(p.read_text()) for p in found}


def write_ssh_config() -> None:
    text = ""
    for name, nodes in clusters().items():
        for number, node in enumerate(nodes):
            alias = name if number == 0 else f"{name}-worker{number}"
            text += f"Host {alias}\n  HostName {socket.gethostbyname(node)}\n"
    folder = Path.home() / ".ssh"
    (folder / "sky").write_text(text)
    rest = (folder / "config").read_text().removeprefix("Include sky\n")
    (folder / "config").write_text(f"Include sky\n{rest}")


def ssh(node: str, script: str, stdin: str = "") -> None:
    subprocess.run(["ssh", node, script], input=stdin, text=True, check=True)


def provision(name: str, wanted: int) -> list[str]:
    known = clusters()
    if name not in known:
        taken = [node for nodes in known.values() for node in nodes]
        free = [host for host in HOSTS if host not in taken]
        if len(free) < wanted:
            fail(
                "sky.exceptions.ResourcesUnavailableError: Failed to acquire resources in all "
                f"zones: {wanted} nodes are asked for, {len(free)} are there"
            )
        (STATE / f"cluster-{name}.json").write_text(json.dumps(free[:wanted]))
        write_ssh_config()
    return clusters()[name]


def copy(node: str, source: str, target: str) -> None:
    path = Path(source).expanduser()
    slash = "/" if path.is_dir() else ""
    ssh(node, f'mkdir -p "$(dirname {target})"')
    subprocess.run(["rsync", "-a", f"{path}{slash}", f"{node}:{target}{slash}"], check=True)


def launch(words: list[str], *, is_managed: bool) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file")
    parser.add_argument("--cluster")
    parser.add_argument("--secret", action="append", default=[])
    parser.add_argument("--detach-run", action="store_true")
    options = parser.parse_args(words)
    task = yaml.safe_load(Path(options.file).read_text())
    if wrong := [name for name in options.secret if name not in os.environ]:
        fail(f"Error: {wrong} is not in the environment, or stands on the command line")
    if missing := set(task.get("secrets") or {}) - set(options.secret):
        fail(f"Error: Secret {missing.pop()!r} is None. Please set a value with --secret.")
    codes = task["resources"]["job_recovery"]["recover_on_exit_codes"] if is_managed else []
    name = f"{task['name']}-managed" if is_managed else options.cluster
    nodes = provision(name, task["num_nodes"])
    say(f"✓ Cluster launched: {name}.")
    for node in nodes:
        ssh(node, "mkdir -p ~/sky_workdir")
        for target, source in (task.get("file_mounts") or {}).items():
            copy(node, source, target)
    # There is a job from here on: whoever ends it waits for all its nodes.
    number = 1 + len(list(STATE.glob("job-*")))
    folder = STATE / f"job-{number}"
    folder.mkdir()
    job: dict[str, Any] = {"cluster": name, "nodes": nodes, "codes": codes, "folder": str(folder)}
    (folder / "job.json").write_text(json.dumps(job))
    job |= {"setup": task.get("setup") or "", "run": task["run"]}
    environ = {
        **{name: os.environ[name] for name in options.secret},
        "SKYPILOT_NODE_IPS": "\n".join(map(socket.gethostbyname, nodes)),
        "SKYPILOT_NUM_NODES": str(len(nodes)),
    }
    for rank, node in enumerate(nodes):
        own = {"rank": rank, "environ": {**environ, "SKYPILOT_NODE_RANK": str(rank)}}
        # Its words are on the standard input, as they have the secrets.
        node_program = shlex.join([sys.executable, str(NODE)])
        start = f"exec 3<&0; setsid {node_program} >/dev/null 2>{folder}/node-{rank}.err"
        ssh(node, f"{start} <&3 &", json.dumps({**job, **own}))
    say(f"📋 {'Managed job' if is_managed else 'Job'} submitted, ID: {number}")


def job_of(number: str) -> tuple[Path, dict[str, Any]]:
    folder = STATE / f"job-{number}"
    return folder, json.loads((folder / "job.json").read_text())


def state_of(number: str) -> str:
    folder, job = job_of(number)
    ends = [folder / f"end-{rank}" for rank in range(len(job["nodes"]))]
    codes = [end.read_text() for end in ends if end.exists()]
    if len(codes) < len(ends) or "" in codes:
        return "RUNNING"
    if (folder / "cancel").exists():
        return "CANCELLED"
    return "SUCCEEDED" if set(codes) == {"0"} else "FAILED"


def logs(number: str) -> None:
    path, shown = job_of(number)[0] / "log", 0
    while True:
        state = state_of(number)
        text = path.read_bytes() if path.exists() else b""
        whole = text[: text.rfind(b"\n") + 1]
        sys.stdout.buffer.write(whole[shown:])
        sys.stdout.flush()
        shown = len(whole)
        if state != "RUNNING":
            fail(f"✗ Job finished (status: {state}).", 0 if state == "SUCCEEDED" else 100)
        time.sleep(LOOK_S)


def cancel(number: str) -> None:
    (job_of(number)[0] / "cancel").touch()
    while state_of(number) == "RUNNING":
        time.sleep(LOOK_S)


def down(name: str) -> None:
    if name not in clusters():
        fail(f"Cluster(s) not found: {name}")
    for folder in STATE.glob("job-*"):
        number = folder.name.removeprefix("job-")
        if job_of(number)[1]["cluster"] == name:
            cancel(number)
    for node in clusters()[name]:
        ssh(node, "rm -rf ~/sky_workdir ~/.isles")
    (STATE / f"cluster-{name}.json").unlink()
    write_ssh_config()
    say(f"Terminating cluster {name}...done.")


def main() -> None:
    with (STATE / "calls").open("a") as calls:
        calls.write(" ".join(sys.argv[1:]) + "\n")
    match [word for word in sys.argv[1:] if word != "--yes"]:
        case ["launch", *rest]:
            launch(rest, is_managed=False)
        case ["jobs", "launch", *rest]:
            launch(rest, is_managed=True)
        case ["logs", _, number]:
            logs(number)
        case ["jobs", "cancel", number] | ["cancel", _, number]:
            cancel(number)
        case ["status", *_]:
            say("Clusters\nNAME  INFRA  RESOURCES  STATUS")
            for name, nodes in clusters().items():
                say(f"{name}  lab  {len(nodes)}x  UP")
        case ["down", name]:
            down(name)
        case words:
            fail(f"Error: No such command: {words}", 2)


main()
