"""A stand-in for a Kubernetes cluster over the pretend hosts: no part of it is Kubernetes.

Each host is a node that has room for one pod. A pod is a process in namespaces of its own (mounts,
processes, host name), with its claims, ConfigMap and Secret mounted; its container image is this
machine, if it has the one name that is known here. What the Job controller does with a pod that has
ended is written after the documentation of Kubernetes 1.32: podFailurePolicy, backoffLimit,
successPolicy, podReplacementPolicy Failed, suspend, ttlSecondsAfterFinished; owners take with them
what they own. Not so: it does not wait longer with each new pod, knows no quotas, and believes
every manifest (the schemas are checked elsewhere).
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

Item = dict[str, Any]

FOLDER = Path(os.environ["KUBE_STANDIN_HERE"])
THERE = os.environ["KUBE_STANDIN"]
NODES = os.environ["KUBE_NODES"].split()
ON = os.environ["KUBE_ON"]
IMAGE = "isles:test"
INDEX = "batch.kubernetes.io/job-completion-index"
_LOOK_S = 0.1
_NAMES = {"jobs.batch": "job", "events": "event", "secrets": "secret", "configmaps": "configmap"}

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
        self.lock = threading.RLock()

    def of(self, kind: str) -> list[Item]:
        return [item for (k, _), item in list(self.items.items()) if k == kind]

    def add(self, item: Item) -> Item:
        metadata = item["metadata"]
        if "generateName" in metadata:
            metadata["name"] = metadata["generateName"] + secrets.token_hex(3)
        key = item["kind"].lower(), metadata["name"]
        if key in self.items:
            raise LookupError(f'Error from server (AlreadyExists): {key[0]}s "{key[1]}" exists')
        metadata["uid"] = secrets.token_hex(8)
        item.setdefault("status", {})
        self.items[key] = item
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
        spec, name = job["spec"]["template"], f"{job['metadata']['name']}-{index}"
        labels = {**spec["metadata"]["labels"], INDEX: str(index)}
        labels["job-name"] = job["metadata"]["name"]
        owner = {"uid": job["metadata"]["uid"]}
        metadata = {"name": f"{name}-{secrets.token_hex(3)[:5]}", "labels": labels}
        metadata |= {"ownerReferences": [owner]}
        body = {**spec["spec"], "hostname": name}
        body.setdefault("subdomain", job["subdomain"])
        pod = {"kind": "Pod", "metadata": metadata, "spec": body, "status": {"phase": "Pending"}}
        self.add(pod)

    def place(self, pod: Item) -> None:
        """Give a pending pod a node, and start its process."""
        spec, status = pod["spec"], pod["status"]
        taken = {p.get("host") for p in self.of("pod") if p["status"]["phase"] == "Running"}
        wanted = spec.get("nodeSelector", {}).get("kubernetes.io/hostname")
        asks = spec["containers"][0].get("resources", {}).get("requests", {})
        free = [n for n in NODES if n not in taken and wanted in (None, n)]
        is_reader = not asks and "files" not in {v["name"] for v in spec["volumes"]}
        free = free or (NODES[:1] if is_reader else [])
        if any(key.endswith("/gpu") for key in asks) or not free:
            why = f"{len(NODES)} Insufficient nvidia.com/gpu" if asks else "no place"
            if wanted and wanted not in NODES:
                why = f"{len(NODES)} node(s) didn't match Pod's node affinity/selector"
            text = f"0/{len(NODES)} nodes are available: {why}."
            condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
            status["conditions"] = [{**condition, "message": text}]
            return
        status["conditions"] = [{"type": "PodScheduled", "status": "True"}]
        image = spec["containers"][0]["image"]
        if image != IMAGE:
            text = f'Back-off pulling image "{image}": {image}: not found'
            waiting = {"reason": "ImagePullBackOff", "message": text}
            status["containerStatuses"] = [{"state": {"waiting": waiting}}]
            self.event(pod, "Failed", f'Failed to pull image "{image}": {image}: not found')
            return
        needs = [("configmap", v["configMap"]["name"]) for v in spec["volumes"] if "configMap" in v]
        needs += [("secret", v["secret"]["secretName"]) for v in spec["volumes"] if "secret" in v]
        if all(key in self.items for key in needs):
            self.start(pod, free[0])

    def start(self, pod: Item, host: str) -> None:
        """The process of a pod on a host."""
        spec, name = pod["spec"], pod["metadata"]["name"]
        container, address = spec["containers"][0], f"10.77.1.{host[1:]}"
        pod["host"], pod["status"] = host, {"phase": "Running", "podIP": address}
        sources = {v["name"]: self.source(pod, v) for v in spec["volumes"]}
        lines = [f"hostname {spec['hostname']}"]
        for mount in container["volumeMounts"]:
            if (there := sources[mount["name"]]) is not None:
                path = shlex.quote(mount["mountPath"])
                lines.append(f"mkdir -p {path} && mount --bind {there} {path}")
        names = FOLDER / "names"
        own = f"{address} {spec['hostname']}.{spec['subdomain']} {spec['hostname']}\n"
        kept = [ln for ln in names.read_text().splitlines(True) if own.split()[1] not in ln]
        names.write_text("".join([*kept, own]))  # in place: it is mounted in every pod
        lines.append(f"mount --bind {THERE}/names /etc/hosts")
        variables = {"ISLES_POD_IP": address, "XDG_STATE_HOME": "/tmp/state"}
        variables["JOB_COMPLETION_INDEX"] = pod["metadata"]["labels"].get(INDEX, "0")
        exports = [f"{key}={shlex.quote(value)}" for key, value in variables.items()]
        lines.append(f"exec env {' '.join(exports)} {shlex.join(container['command'])}")
        log = FOLDER / "logs" / name
        log.parent.mkdir(exist_ok=True)
        with log.open("ab") as stream:
            self.processes[name] = subprocess.Popen(
                [ON, host, "bash", "-c", _START, "-", " && ".join(lines), name],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )

    def source(self, pod: Item, volume: Item) -> str | None:
        """The folder that is mounted for a volume, as hosts see it."""
        if "persistentVolumeClaim" in volume:
            claim = volume["persistentVolumeClaim"]["claimName"]
            (FOLDER / "claims" / claim).mkdir(parents=True, exist_ok=True)
            return f"{THERE}/claims/{claim}"
        if "emptyDir" in volume:
            return None
        kind = "configMap" if "configMap" in volume else "secret"
        named = volume[kind].get("name") or volume[kind].get("secretName")
        item = self.items[kind.lower(), named]
        folder = FOLDER / "mounted" / pod["metadata"]["name"] / volume["name"]
        folder.mkdir(parents=True)
        for key, value in item.get("data", item.get("stringData")).items():
            (folder / key).write_text(value)
        return f"{THERE}/mounted/{pod['metadata']['name']}/{volume['name']}"

    def event(self, item: Item, reason: str, text: str) -> None:
        about = {"name": item["metadata"]["name"]}
        key = "event", f"{about['name']}.{reason}"
        more = {"type": "Warning", "reason": reason, "message": text, "involvedObject": about}
        self.items[key] = {"kind": "Event", "metadata": {"name": key[1]}, **more}

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
            item.setdefault("subdomain", name)
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
            return
        if spec.get("suspend"):
            return
        done = {p["metadata"]["labels"][INDEX] for p in pods if p["status"]["phase"] == "Succeeded"}
        if "0" in done:
            status["conditions"] = [{"type": "Complete", "status": "True"}]
            return
        live = {
            p["metadata"]["labels"][INDEX]
            for p in pods
            if p["status"]["phase"] in ("Pending", "Running")
        }
        for index in range(spec.get("completions", 1)):
            if str(index) not in live | done:
                self.make_pod(job, index)

    def has_ended(self, pod: Item, code: int) -> None:
        """Decide what the end of a pod means to its job."""
        if code < 0:
            code = 128 - code
        pod["status"]["phase"] = "Failed" if code else "Succeeded"
        pod["status"]["exit_code"] = code
        is_told = "deletionTimestamp" in pod["metadata"]
        if is_told:
            self.items.pop(("pod", pod["metadata"]["name"]), None)
        uid = pod["metadata"]["ownerReferences"][0]["uid"]
        job = next((j for j in self.of("job") if j["metadata"]["uid"] == uid), None)
        if job is None or code == 0:
            return
        for rule in job["spec"].get("podFailurePolicy", {}).get("rules", ()):
            if code in rule.get("onExitCodes", {}).get("values", ()):
                if rule["action"] == "FailJob":
                    self.fail(job, f"Container node for pod {pod['metadata']['name']} failed with "
                              f"exit code {code} matching FailJob rule")  # fmt: skip
                return
        job["status"]["failed"] = job["status"].get("failed", 0) + 1
        if job["status"]["failed"] > job["spec"].get("backoffLimit", 6):
            self.fail(job, "Job has reached the specified backoff limit")

    def fail(self, job: Item, why: str) -> None:
        job["status"]["conditions"] = [{"type": "Failed", "status": "True", "message": why}]

    # kubectl.

    def answer(self, words: list[str], stdin: str) -> Item:
        verb, rest = words[0], words[1:]
        try:
            return getattr(self, f"do_{verb}")(rest, stdin)
        except LookupError as error:
            return {"code": 1, "stderr": f"{error.args[0]}\n"}

    def do_create(self, words: list[str], stdin: str) -> Item:
        item = json.loads(stdin)
        refused = FOLDER / "refused"  # a test has written a kind there
        if refused.exists() and item["kind"] == refused.read_text():
            text = f"{item['kind'].lower()}s is forbidden: exceeded quota"
            raise LookupError(f"Error from server (Forbidden): {text}")
        return {"code": 0, "stdout": json.dumps(self.add(item))}

    def do_patch(self, words: list[str], stdin: str) -> Item:
        item = self.find(words[0], words[1])
        change = next(w for w in words if w.startswith("--patch=")).partition("=")[2]
        _merge(item, json.loads(change))
        return {"code": 0, "stdout": "patched\n"}

    def do_get(self, words: list[str], stdin: str) -> Item:
        names = [w for w in words[1:] if not w.startswith("-")]
        if "-l" not in words and names[0] != "json":
            return {"code": 0, "stdout": json.dumps(self.find(words[0], names[0]))}
        return {"code": 0, "stdout": json.dumps({"items": self.matching(words[0], words)})}

    def do_logs(self, words: list[str], stdin: str) -> Item:
        path = FOLDER / "logs" / words[0]
        text = path.read_text(errors="replace") if path.exists() else ""
        return {"code": 0, "stdout": text}

    def do_delete(self, words: list[str], stdin: str) -> Item:
        grace = 0.0 if "--grace-period=0" in words else None
        if "-l" in words:
            found = [i for kind in words[0].split(",") for i in self.matching(kind, words)]
        else:
            found = [self.find(words[0], words[1])]
        for item in found:
            self.remove(item, grace_s=grace)
        uids = [item["metadata"]["uid"] for item in found]
        return {"code": 0, "wait": [] if "--wait=false" in words else uids}

    def do_exec(self, words: list[str], stdin: str) -> Item:
        pod = self.find("pod", words[1])
        if pod["status"]["phase"] != "Running":
            raise LookupError(f"error: cannot exec into a container in pod {words[1]}")
        command = shlex.join(words[words.index("--") + 1 :])
        enter = f"nsenter --target $(cat /run/pods/{words[1]}) --mount --pid --uts --root --wd"
        return {"code": 0, "exec": [pod["host"], f"exec {enter} {command}"]}

    def find(self, kind: str, name: str) -> Item:
        kind = _singular(kind)
        if (kind, name) not in self.items:
            raise LookupError(f'Error from server (NotFound): {kind}s "{name}" not found')
        return self.items[kind, name]

    def matching(self, kind: str, words: list[str]) -> list[Item]:
        selector = words[words.index("-l") + 1] if "-l" in words else ""
        key, _, value = selector.partition("=")
        found = self.of(_singular(kind))
        return [i for i in found if not key or i["metadata"].get("labels", {}).get(key) == value]


def _singular(kind: str) -> str:
    return kind.partition(".")[0].removesuffix("s")


def _merge(item: Item, change: Item) -> None:
    for key, value in change.items():
        if isinstance(value, dict) and isinstance(item.get(key), dict):
            _merge(item[key], value)
        else:
            item[key] = value


def _serve(cluster: Cluster, connection: socket.socket) -> None:
    with connection, connection.makefile() as lines:
        request = json.loads(lines.readline())
        with (FOLDER / "asked").open("a") as log:
            log.write(json.dumps(request["words"]) + "\n")
        with cluster.lock:
            found = cluster.answer(request["words"], request["stdin"])
        while found.get("wait"):
            with cluster.lock:
                owners = [p["metadata"].get("ownerReferences") for p in cluster.of("pod")]
            if not any(uid in str(owners) for uid in found["wait"]):
                break
            time.sleep(_LOOK_S)
        connection.sendall(json.dumps(found).encode() + b"\n")


def main() -> None:
    """Serve until there is a file `stop`."""
    cluster = Cluster()
    (FOLDER / "names").write_text("127.0.0.1 localhost\n")
    with socket.socket(socket.AF_UNIX) as listener:
        # A path of a Unix socket has 107 letters at most.
        os.chdir(FOLDER)
        listener.bind("socket")
        listener.listen()
        listener.settimeout(_LOOK_S)
        sys.stdout.write("serving\n")
        sys.stdout.flush()
        while not (FOLDER / "stop").exists():
            try:
                connection, _ = listener.accept()
                connection.settimeout(None)
                threading.Thread(target=_serve, args=(cluster, connection), daemon=True).start()
            except TimeoutError:
                pass
            with cluster.lock:
                cluster.look()
    for process in cluster.processes.values():
        process.send_signal(signal.SIGTERM)
        process.wait()


main()
