"""A stand-in for a Kubernetes cluster over the pretend hosts: no part of it is Kubernetes.

Each host is a node that has room for one pod. A pod is a process in namespaces of its own (mounts,
processes, host name), with its claims, ConfigMap and Secret mounted; its container image is this
machine, if it has the one name that is known here. What the Job controller does with a pod that has
ended is written after the documentation of Kubernetes 1.32: podFailurePolicy, successPolicy,
podReplacementPolicy Failed, suspend, ttlSecondsAfterFinished; owners take with them what they own.
Not so: it does not wait longer with each new pod, has no end of new ones (backoffLimit), knows no
quotas, and believes every manifest (the schemas are checked elsewhere).
"""

from __future__ import annotations

import json
import os
import secrets
import select
import shlex
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

Item = dict[str, Any]

FOLDER, NODES = Path(sys.argv[1]), sys.argv[2:]
THERE = "/shared/.kube"
"""The folder as the hosts see it."""
ON = Path(__file__).parents[1] / "net/on.sh"
IMAGE = "isles:test"
INDEX = "batch.kubernetes.io/job-completion-index"
_LOOK_S = 0.1

# In the host: the pod's first process, whose pid there is kept for exec and signals.
_START = """
mkdir -p /run/pods
unshare --mount --pid --uts --fork --kill-child --mount-proc bash -c "exec 2>&1; $1" \\
  2> /run/pods/$2.err &
child=$!
until pid=$(pgrep -P $child); do kill -0 $child || break; done
echo $pid > /run/pods/$2
wait $child
code=$?
# Of a first process that was killed unshare says this, and ends with 1.
if grep -q sigprocmask /run/pods/$2.err; then exit 137; fi
exit $code
"""


class Cluster:
    """All objects, by kind and name."""

    def __init__(self) -> None:
        self.items: dict[tuple[str, str], Item] = {}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.names = {"localhost": "127.0.0.1"}
        self.lock = threading.Condition()

    def of(self, kind: str) -> list[Item]:
        return [item for (k, _), item in list(self.items.items()) if k == kind]

    def add(self, item: Item) -> Item:
        metadata = item["metadata"]
        if "generateName" in metadata:
            metadata["name"] = metadata["generateName"] + secrets.token_hex(3)
        metadata["uid"] = secrets.token_hex(8)
        item.setdefault("status", {})
        self.items[item["kind"].lower(), metadata["name"]] = item
        return item

    def remove(self, item: Item, *, grace_s: float | None = None) -> None:
        """Delete an object, what it owns, and the pods of a job."""
        kind, name = item["kind"].lower(), item["metadata"]["name"]
        if kind == "pod":
            self.end_pod(item, grace_s)
            return
        self.items.pop((kind, name), None)
        for other in list(self.items.values()):
            owners = other["metadata"].get("ownerReferences", ())
            if any(owner["uid"] == item["metadata"]["uid"] for owner in owners):
                self.remove(other, grace_s=grace_s)

    # Pods.

    def end_pod(self, pod: Item, grace_s: float | None) -> None:
        """Tell a pod to end; it is removed once it has."""
        metadata = pod["metadata"]
        if grace_s is None:
            grace_s = pod["spec"].get("terminationGracePeriodSeconds", 30)
        metadata.setdefault("deletionTimestamp", time.time())
        metadata["kill_at"] = min(metadata.get("kill_at", 1e12), time.time() + grace_s)
        if metadata["name"] in self.processes:
            self.signal(pod, "TERM" if grace_s else "KILL")
        else:
            self.items.pop(("pod", metadata["name"]), None)

    def signal(self, pod: Item, name: str) -> None:
        pod_name = pod["metadata"]["name"]
        # A pod that was started just now has no such file yet.
        wait = f"for _ in $(seq 100); do [ -s /run/pods/{pod_name} ] && break; sleep 0.05; done"
        script = f"{wait}; kill -{name} $(cat /run/pods/{pod_name})"
        subprocess.run([ON, pod["host"], "sh", "-c", script], check=False, capture_output=True)

    def make_pod(self, job: Item, index: int) -> None:
        """A new pod of a job."""
        template, job_name = job["spec"]["template"], job["metadata"]["name"]
        name = f"{job_name}-{index}"
        labels = {**template["metadata"]["labels"], INDEX: str(index), "job-name": job_name}
        metadata = {"name": f"{name}-{secrets.token_hex(3)[:5]}", "labels": labels}
        metadata["ownerReferences"] = [{"uid": job["metadata"]["uid"]}]
        domain = job.get("subdomain", job_name)
        spec = {"subdomain": domain, **template["spec"], "hostname": name}
        status = {"phase": "Pending"}
        self.add({"kind": "Pod", "metadata": metadata, "spec": spec, "status": status})

    def place(self, pod: Item) -> None:
        """Give a pending pod a node, and start its process."""
        spec, status = pod["spec"], pod["status"]
        taken = {p.get("host") for p in self.of("pod") if p["status"]["phase"] == "Running"}
        wanted = spec.get("nodeSelector", {}).get("kubernetes.io/hostname")
        free = [n for n in NODES if n not in taken and wanted in (None, n)]
        is_reader = "files" not in {v["name"] for v in spec["volumes"]}
        free = free or (NODES[:1] if is_reader else [])
        container = spec["containers"][0]
        if "resources" in container or not free:
            why = "Insufficient nvidia.com/gpu" if "resources" in container else "no place"
            if wanted and wanted not in NODES:
                why = "node(s) didn't match Pod's node affinity/selector"
            text = f"0/{len(NODES)} nodes are available: {len(NODES)} {why}."
            condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
            status["conditions"] = [{**condition, "message": text}]
        elif container["image"] == IMAGE:
            self.start(pod, free[0])
        else:
            text = f'Back-off pulling image "{container["image"]}": {container["image"]}: not found'
            waiting = {"reason": "ImagePullBackOff", "message": text}
            pod["status"] = {
                "phase": "Pending",
                "containerStatuses": [{"state": {"waiting": waiting}}],
            }
            event = {"type": "Warning", "reason": "Failed", "message": text}
            event |= {"involvedObject": {"name": pod["metadata"]["name"]}}
            self.items["event", pod["metadata"]["name"]] = {
                "kind": "Event",
                "metadata": {},
                **event,
            }

    def start(self, pod: Item, host: str) -> None:
        """The process of a pod on a host."""
        spec, name = pod["spec"], pod["metadata"]["name"]
        container, address = spec["containers"][0], f"10.77.1.{host[1:]}"
        pod["host"], pod["status"] = host, {"phase": "Running", "podIP": address}
        lines = [f"hostname {spec['hostname']}"]
        sources = {volume["name"]: self.source(name, volume) for volume in spec["volumes"]}
        for mount in container["volumeMounts"]:
            if there := sources[mount["name"]]:
                path = shlex.quote(mount["mountPath"])
                lines.append(f"mkdir -p {path} && mount --bind {THERE}/{there} {path}")
        self.names[f"{spec['hostname']}.{spec['subdomain']} {spec['hostname']}"] = address
        text = "".join(f"{address} {names}\n" for names, address in self.names.items())
        (FOLDER / "names").write_text(text)  # in place: it is mounted in every pod
        lines.append(f"mount --bind {THERE}/names /etc/hosts")
        variables = {"ISLES_POD_IP": address, "XDG_STATE_HOME": "/tmp/state"}
        variables["JOB_COMPLETION_INDEX"] = pod["metadata"]["labels"][INDEX]
        # Not of the cluster: what is in a pod is a test's.
        exports = [os.environ["LAB_MARK"], *(f"{key}={value}" for key, value in variables.items())]
        lines.append(f"exec env {' '.join(exports)} {shlex.join(container['command'])}")
        with (FOLDER / "logs" / name).open("ab") as stream:
            self.processes[name] = subprocess.Popen(
                [ON, host, "bash", "-c", _START, "-", " && ".join(lines), name],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )

    def source(self, pod: str, volume: Item) -> str:
        """The folder, within that of the cluster, that is mounted for a volume; empty: none."""
        match volume:
            case {"persistentVolumeClaim": {"claimName": claim}}:
                (FOLDER / "claims" / claim).mkdir(parents=True, exist_ok=True)
                return f"claims/{claim}"
            case {"configMap": {"name": name}}:
                files = self.items["configmap", name]["data"]
            case {"secret": {"secretName": name}}:
                files = self.items["secret", name]["stringData"]
            case _:
                return ""
        folder = FOLDER / "mounted" / pod / volume["name"]
        folder.mkdir(parents=True)
        for key, value in files.items():
            (folder / key).write_text(value)
        return str(folder.relative_to(FOLDER))

    # The controllers.

    def look(self) -> None:
        """One turn of all controllers."""
        for name, process in list(self.processes.items()):
            pod = self.items.get(("pod", name))
            if process.poll() is not None:
                del self.processes[name]
                if pod is not None:
                    self.has_ended(pod, process.returncode)
            elif pod is not None and time.time() > pod["metadata"].get("kill_at", 1e12):
                self.signal(pod, "KILL")
        for kind in ("trainjob", "jobset", "job"):
            for item in self.of(kind):
                self.control(kind, item)
        for pod in self.of("pod"):
            if pod["status"]["phase"] == "Pending":
                self.place(pod)

    def control(self, kind: str, item: Item) -> None:
        spec, status = item["spec"], item["status"]
        name, owner = item["metadata"]["name"], [{"uid": item["metadata"]["uid"]}]
        more = {"labels": {}, "ownerReferences": owner}
        if kind == "trainjob" and ("jobset", name) not in self.items and not spec.get("suspend"):
            runtime = self.items["trainingruntime", spec["runtimeRef"]["name"]]
            template = runtime["spec"]["template"]["spec"]
            self.add({"kind": "JobSet", "metadata": {"name": name, **more}, "spec": template})
        elif kind == "jobset" and not spec.get("suspend"):
            for each in spec["replicatedJobs"]:
                child = f"{name}-{each['name']}-0"
                if ("job", child) not in self.items:
                    job = {"kind": "Job", "metadata": {"name": child, **more}, "subdomain": name}
                    self.add({**job, "spec": each["template"]["spec"]})
        elif kind == "job":
            self.control_job(item)
        for child in self.items.values():
            owners = child["metadata"].get("ownerReferences", ())
            if kind != "job" and owner[0] in owners and child["kind"] in ("Job", "JobSet"):
                status["conditions"] = child["status"].get("conditions", [])
        keep = spec.get("ttlSecondsAfterFinished")
        if status.get("conditions"):
            status.setdefault("ended_at", time.time())
            if keep is not None and time.time() > status["ended_at"] + keep:
                self.remove(item)

    def control_job(self, job: Item) -> None:
        spec, status = job["spec"], job["status"]
        pods = [p for p in self.of("pod") if job["metadata"]["uid"] in str(p["metadata"])]
        if status.get("conditions"):
            for pod in pods:
                is_live = pod["status"]["phase"] in ("Pending", "Running")
                if is_live and "deletionTimestamp" not in pod["metadata"]:
                    self.end_pod(pod, None)
        if status.get("conditions") or spec.get("suspend"):
            return
        phases = [(p["metadata"]["labels"][INDEX], p["status"]["phase"]) for p in pods]
        if ("0", "Succeeded") in phases:
            status["conditions"] = [{"type": "Complete", "status": "True"}]
            return
        there = {index for index, phase in phases if phase != "Failed"}
        for index in range(spec.get("completions", 1)):
            if str(index) not in there:
                self.make_pod(job, index)

    def has_ended(self, pod: Item, code: int) -> None:
        """Decide what the end of a pod means to its job."""
        if code < 0:
            code = 128 - code
        pod["status"]["phase"] = "Failed" if code else "Succeeded"
        if "deletionTimestamp" in pod["metadata"]:
            self.items.pop(("pod", pod["metadata"]["name"]), None)
        uid = pod["metadata"]["ownerReferences"][0]["uid"]
        job = next((j for j in self.of("job") if j["metadata"]["uid"] == uid), {"spec": {}})
        for rule in job["spec"].get("podFailurePolicy", {}).get("rules", ()):
            if rule["action"] == "FailJob" and code in rule["onExitCodes"]["values"]:
                why = f"Container node for pod {pod['metadata']['name']} failed with exit code "
                why += f"{code} matching FailJob rule"
                failed = {"type": "Failed", "status": "True", "message": why}
                job["status"]["conditions"] = [failed]

    # kubectl.

    def do_create(self, words: list[str], stdin: str) -> str:
        item = json.loads(stdin)
        refused = FOLDER / "refused"  # a test has written a kind there
        if refused.exists() and item["kind"] == refused.read_text():
            text = f"{item['kind'].lower()}s is forbidden: exceeded quota"
            raise LookupError(f"Error from server (Forbidden): {text}")
        return json.dumps(self.add(item))

    def do_patch(self, words: list[str], stdin: str) -> str:
        item = self.find(words[0], words[1])
        for key, change in json.loads(words[-1].removeprefix("--patch=")).items():
            item[key].update(change)
        return "patched\n"

    def do_get(self, words: list[str], stdin: str) -> str:
        if words[1].startswith("-"):
            return json.dumps({"items": self.matching(words[0], words)})
        return json.dumps(self.find(words[0], words[1]))

    def do_logs(self, words: list[str], stdin: str) -> str:
        path = FOLDER / "logs" / words[0]
        return path.read_text(errors="replace") if path.exists() else ""

    def do_delete(self, words: list[str], stdin: str) -> str:
        grace = 0.0 if "--grace-period=0" in words else None
        if "-l" in words:
            found = [i for kind in words[0].split(",") for i in self.matching(kind, words)]
        else:
            found = [self.find(words[0], words[1])]
        for item in found:
            self.remove(item, grace_s=grace)
        if "--wait=false" not in words:
            uids = [item["metadata"]["uid"] for item in found]
            self.lock.wait_for(
                lambda: not any(uid in str(p["metadata"]) for p in self.of("pod") for uid in uids)
            )
        return ""

    def do_exec(self, words: list[str], stdin: str) -> list[str]:
        """The host and the command line there."""
        pod = self.find("pod", words[1])
        if pod["status"]["phase"] != "Running":
            raise LookupError(f"error: cannot exec into a container in pod {words[1]}")
        command = shlex.join(words[words.index("--") + 1 :])
        enter = f"nsenter --target $(cat /run/pods/{words[1]}) --mount --pid --uts --root --wd"
        return [pod["host"], f"exec {enter} {command}"]

    def find(self, kind: str, name: str) -> Item:
        kind = _singular(kind)
        if (kind, name) not in self.items:
            raise LookupError(f'Error from server (NotFound): {kind}s "{name}" not found')
        return self.items[kind, name]

    def matching(self, kind: str, words: list[str]) -> list[Item]:
        found = self.of(_singular(kind))
        if "-l" not in words:
            return found
        key, _, value = words[words.index("-l") + 1].partition("=")
        return [item for item in found if item["metadata"].get("labels", {}).get(key) == value]


def _singular(kind: str) -> str:
    return kind.partition(".")[0].removesuffix("s")


def _answer(cluster: Cluster, connection: Connection) -> None:
    words, stdin = connection.recv()
    with (FOLDER / "asked").open("a") as log:
        log.write(f"{words}\n")
    with connection, cluster.lock:
        try:
            connection.send((0, getattr(cluster, f"do_{words[0]}")(words[1:], stdin), ""))
        except LookupError as error:
            connection.send((1, "", f"{error.args[0]}\n"))


def main() -> None:
    """Serve until stdin is closed."""
    cluster = Cluster()
    (FOLDER / "logs").mkdir()
    # A path of a Unix socket has 107 letters at most.
    os.chdir(FOLDER)
    listener = Listener("socket")

    def serve() -> None:
        while True:
            request = cluster, listener.accept()
            threading.Thread(target=_answer, args=request, daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    sys.stdout.write("serving\n")
    sys.stdout.flush()
    while not select.select([sys.stdin], [], [], _LOOK_S)[0]:
        with cluster.lock:
            cluster.look()
            cluster.lock.notify_all()
    for process in cluster.processes.values():
        process.terminate()
        process.wait()


main()
