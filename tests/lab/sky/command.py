"""A stand-in for the command `sky`, over the pretend hosts: not SkyPilot, which needs a cloud.

As of SkyPilot 0.14 it copies: `launch` (the nodes of a cluster, its name in ~/.ssh/config, file
mounts, workdir, secrets from the environment, setup on all nodes before run on any, a job on each
node with SKYPILOT_NODE_RANK, NODE_IPS and NUM_NODES), `logs`, `queue`, `status`, `cancel` and
`down`; of managed jobs `jobs launch`, `logs`, `queue`, `cancel`, and recover_on_exit_codes. It does
not choose machines, price or mount anything, and never loses a cluster by itself: a test kills.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

STATE = Path(os.environ["SKY_STANDIN"])
HOSTS = os.environ["SKY_HOSTS"].split()
NODE = Path(__file__).with_name("node.py")
LOOK_S = 0.05


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def fail(text: str, code: int = 1) -> None:
    sys.stderr.write(f"{text}\n")
    sys.exit(code)


def addresses(nodes: list[str]) -> list[str]:
    table = dict(line.split()[::-1] for line in Path("/etc/hosts").read_text().splitlines())
    return [table[node] for node in nodes]


def clusters() -> dict[str, list[str]]:
    found = STATE.glob("cluster-*.json")
    return {p.stem.removeprefix("cluster-"): json.loads(p.read_text()) for p in found}


def write_ssh_config() -> None:
    text = "# written by sky\n"
    for name, nodes in clusters().items():
        for number, address in enumerate(addresses(nodes)):
            alias = name if number == 0 else f"{name}-worker{number}"
            text += f"Host {alias}\n  HostName {address}\n"
    config = Path.home() / ".ssh/config"
    own = config.read_text().partition("# end of sky\n")
    rest = own[2] if own[1] else config.read_text()
    config.write_text(f"{text}# end of sky\n{rest}")


def ssh(node: str, script: str, stdin: str = "") -> None:
    done = subprocess.run(
        ["ssh", node, script], input=stdin, capture_output=True, text=True, check=False
    )
    if done.returncode:
        fail(f"sky.exceptions.CommandError: on {node}: {done.stderr}")


def provision(name: str, wanted: int) -> list[str]:
    known = clusters()
    if name in known:
        return known[name]
    taken = {node for nodes in known.values() for node in nodes}
    free = [host for host in HOSTS if host not in taken]
    if len(free) < wanted:
        fail(
            "sky.exceptions.ResourcesUnavailableError: Failed to acquire resources in all zones: "
            f"{wanted} nodes are asked for, {len(free)} are there"
        )
    (STATE / f"cluster-{name}.json").write_text(json.dumps(free[:wanted]))
    write_ssh_config()
    return free[:wanted]


def copy(nodes: list[str], source: str, target: str) -> None:
    path = Path(source).expanduser()
    if not path.exists():
        fail(f"sky.exceptions.InvalidTask: {source} is not there")
    slash = "/" if path.is_dir() else ""
    for node in nodes:
        ssh(node, f'mkdir -p "$(dirname {target})"')
        subprocess.run(["rsync", "-a", f"{path}{slash}", f"{node}:{target}{slash}"], check=True)


def submit(task: dict[str, Any], name: str, secrets: dict[str, str], codes: list[int]) -> int:
    nodes = provision(name, int(task.get("num_nodes", 1)))
    say(f"✓ Cluster launched: {name}.")
    for target, source in (task.get("file_mounts") or {}).items():
        copy(nodes, source, target)
    for node in nodes:
        ssh(node, "mkdir -p ~/sky_workdir")
    if task.get("workdir"):
        copy(nodes, task["workdir"], "~/sky_workdir")
    number = 1 + len(list(STATE.glob("job-*")))
    folder = STATE / f"job-{number}"
    folder.mkdir()
    job = {"name": task.get("name", "sky-cmd"), "cluster": name, "nodes": nodes, "codes": codes}
    (folder / "job.json").write_text(json.dumps(job))
    for rank, node in enumerate(nodes):
        environ = {
            **secrets,
            "SKYPILOT_NODE_RANK": str(rank),
            "SKYPILOT_NODE_IPS": "\n".join(addresses(nodes)),
            "SKYPILOT_NUM_NODES": str(len(nodes)),
            "SKYPILOT_TASK_ID": f"sky-{name}-{number}",
        }
        content = {**job, "rank": rank, "environ": environ, "folder": str(folder)}
        content |= {"setup": task.get("setup") or "", "run": task["run"]}
        # Its words are on the standard input, as they have the secrets.
        start = f"setsid {sys.executable} {NODE} >/dev/null 2>{folder}/node-{rank}.err &"
        ssh(node, f"exec 3<&0; {start.replace('&', '<&3 &')}", json.dumps(content))
    return number


def launch(words: list[str], *, is_managed: bool) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file")
    parser.add_argument("--cluster", "-c")
    parser.add_argument("--secret", action="append", default=[])
    parser.add_argument("--yes", "-y", action="store_true")
    parser.add_argument("--detach-run", "-d", action="store_true")
    options = parser.parse_args(words)
    task = yaml.safe_load(Path(options.file).read_text())
    secrets = {}
    for name in options.secret:
        if "=" in name or name not in os.environ:
            fail(f"Error: {name} is not in the environment, or stands on the command line")
        secrets[name] = os.environ[name]
    if missing := set(task.get("secrets") or {}) - set(secrets):
        fail(f"Error: Secret {missing.pop()!r} is None. Please set a value with --secret.")
    codes = task.get("resources", {}).get("job_recovery", {}).get("recover_on_exit_codes", [])
    name = f"{task['name']}-managed" if is_managed else options.cluster
    number = submit(task, name, secrets, codes if is_managed else [])
    what = "Managed job submitted, ID" if is_managed else "Job submitted, ID"
    say(f"📋 {what}: {number}")


def job_of(number: str) -> tuple[Path, dict[str, Any]]:
    folder = STATE / f"job-{number}"
    if not folder.is_dir():
        fail(f"Job {number} not found")
    return folder, json.loads((folder / "job.json").read_text())


def state_of(folder: Path, job: dict[str, Any]) -> str:
    ends = [read_code(folder / f"end-{rank}") for rank in range(len(job["nodes"]))]
    if (folder / "cancel").exists():
        return "CANCELLED" if None not in ends else "RUNNING"
    if None in ends:
        return "RUNNING" if (folder / "setup-0").exists() else "SETTING_UP"
    return "SUCCEEDED" if not any(ends) else "FAILED"


def read_code(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def logs(number: str) -> None:
    folder, job = job_of(number)
    shown = 0
    while True:
        state = state_of(folder, job)
        path = folder / "log"
        text = path.read_bytes() if path.exists() else b""
        whole = text[: text.rfind(b"\n") + 1]
        sys.stdout.buffer.write(whole[shown:])
        sys.stdout.flush()
        shown = len(whole)
        if state not in ("RUNNING", "SETTING_UP"):
            fail(f"✗ Job finished (status: {state}).", 0 if state == "SUCCEEDED" else 100)
        time.sleep(LOOK_S)


def cancel(numbers: list[str]) -> None:
    for number in numbers:
        folder, job = job_of(number)
        (folder / "cancel").touch()
        while state_of(folder, job) == "RUNNING":
            time.sleep(LOOK_S)


def down(name: str) -> None:
    if name not in clusters():
        fail(f"Cluster(s) not found: {name}")
    running = [
        f
        for f in STATE.glob("job-*")
        if json.loads((f / "job.json").read_text())["cluster"] == name
    ]
    cancel([folder.name.removeprefix("job-") for folder in running])
    for node in clusters()[name]:
        ssh(node, "rm -rf ~/sky_workdir ~/.isles")
    (STATE / f"cluster-{name}.json").unlink()
    write_ssh_config()
    say(f"Terminating cluster {name}...done.")


def table() -> None:
    for folder in sorted(STATE.glob("job-*")):
        job = json.loads((folder / "job.json").read_text())
        say(folder.name.removeprefix("job-"), job["name"], job["cluster"], state_of(folder, job))


def main() -> None:
    STATE.mkdir(exist_ok=True)
    with (STATE / "calls").open("a") as calls:
        calls.write(" ".join(sys.argv[1:]) + "\n")
    words = [word for word in sys.argv[1:] if word not in ("--yes", "-y")]
    match words:
        case ["launch", *rest]:
            launch(rest, is_managed=False)
        case ["jobs", "launch", *rest]:
            launch(rest, is_managed=True)
        case ["jobs", "logs", number] | ["logs", _, number]:
            logs(number)
        case ["jobs", "cancel", *numbers] | ["cancel", _, *numbers]:
            cancel(numbers)
        case ["jobs", "queue"] | ["queue", *_]:
            table()
        case ["status", *_]:
            say("Clusters\nNAME  INFRA  RESOURCES  STATUS")
            for name, nodes in clusters().items():
                say(f"{name}  lab  {len(nodes)}x  UP")
        case ["down", name]:
            down(name)
        case _:
            fail(f"Error: No such command: {words}", 2)


if __name__ == "__main__":
    shutil.which("ssh") or fail("no ssh")
    main()
