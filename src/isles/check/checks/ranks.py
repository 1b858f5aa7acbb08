"""Ranks: torch on every device, an all-reduce over all ranks, and a training of three steps."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

from isles.check.checks.links import bit_rate, short_time
from isles.check.finding import Finding
from isles.check.plan import Answers, Hosts, NodePlan
from isles.config.scratch import scratch_folder
from isles.config.sections.cluster import NetworkConfig
from isles.facts.gpus import lacking
from isles.facts.units import format_bytes
from isles.launch.answers import parse_answer
from isles.launch.ssh.environment import network_variables
from isles.run.process import signal_name

_NOISE_BYTES = 1 << 20
_MEET_S = 30.0
_SMOKE_S = 180.0
_CPU_SIZES = [4 << 10, 1 << 20, 16 << 20]
_GPU_SIZES = [4 << 10, 4 << 20, 64 << 20]

_WHEELS = (((12, 0), "cu128"), ((10, 0), "cu128"), ((7, 5), "cu126"))
"""The oldest CUDA of torch's wheels with kernels for this capability and higher capabilities.

Source: PyTorch's release compatibility matrix (RELEASE.md of pytorch/pytorch)."""

_NEEDED = (
    "net.connect",
    "net.interface",
    "torch.imports",
    "gpu.visible",
    "gpu.kernel",
    "gpu.count",
)
"""Findings whose errors make an all-reduce hang."""

_WITHOUT = (
    ({"NCCL_P2P_DISABLE": "1"}, "without direct copies between GPUs"),
    (
        {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"},
        "without direct copies between GPUs and without shared memory",
    ),
)
"""Variables that may help if NCCL hangs or gives a wrong sum, and how NCCL works then.

GeForce GPUs, an IOMMU or ACS can be the cause: see the troubleshooting page of NCCL."""

_STAGES = {
    "store": "while meeting at rank 0",
    "group": "while connecting the ranks",
    "sum": "while adding up",
    "died": "in the library",
    "silent": "to end in time",
}


class CheckRanks:
    """One process with torch for each rank of this node. They start early and are used later."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._noise: list[int] = []

    def start(self, plan: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Start the processes. Each imports torch and runs a kernel.

        Returns:
            findings; versions: torch, cuda and nccl as rank 0 has imported them.
        """
        own = NodePlan(**plan)
        command = [sys.executable, "-m", "isles.train.check_rank", "--device", own.device]
        pipe = subprocess.PIPE
        # More threads do not help a tiny sum, and the ranks share this machine with the check.
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._noise = [os.memfd_create(f"rank-{index}") for index in range(own.nproc)]
        self._processes = [
            subprocess.Popen(
                [*command, "--index", str(index)],
                stdin=pipe,
                stdout=pipe,
                stderr=noise,
                env=environ,
                start_new_session=True,
            )
            for index, noise in enumerate(self._noise)
        ]
        found = self._answers(timeout_s)
        versions = {key: found[0].get(key) for key in ("torch", "cuda", "nccl")}
        findings = [asdict(finding) for finding in torch_findings(own, found)]
        no_peer = [
            (index, other) for index, rank in enumerate(found) for other in rank.get("no_peer", ())
        ]
        return {"findings": findings, "versions": versions, "no_peer": no_peer}

    def reduce(self, commands: list[dict[str, Any]], timeout_s: float) -> dict[str, Any]:
        """Run `isles.train.check_rank.reduce` on each rank. Returns their answers."""
        for process, command in zip(self._processes, commands, strict=True):
            assert process.stdin is not None
            try:
                process.stdin.write(json.dumps(command).encode() + b"\n")
                process.stdin.flush()
            except OSError:
                pass  # the process has ended: its answer reports it
        return {"ranks": self._answers(timeout_s)}

    def end(self) -> dict[str, Any]:
        """Kill the processes, and wait until they have ended."""
        self.kill()
        for process in self._processes:
            process.wait()
        for noise in self._noise:
            os.close(noise)
        self._processes, self._noise = [], []
        return {}

    def kill(self) -> None:
        """Kill the processes, without waiting, as a process may be stuck in a driver."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()

    def _answers(self, timeout_s: float) -> list[dict[str, Any]]:
        end = time.monotonic() + timeout_s
        ranks = zip(self._processes, self._noise, strict=True)
        return [_answer(process, noise, end) for process, noise in ranks]


def _answer(process: subprocess.Popen[bytes], noise: int, end: float) -> dict[str, Any]:
    # The next line of a rank, or a failure if it has ended or hangs.
    assert process.stdout is not None
    if not select.select([process.stdout], [], [], max(0.0, end - time.monotonic()))[0]:
        return {"stage": "silent", "failure": "no answer in time"}
    if line := process.stdout.readline():
        try:
            return parse_answer(dict[str, Any], line.decode(errors="replace"))
        except ValueError as error:  # killed during the output, or a library printed first
            return {"stage": "died", "failure": f"{error}: {line[:80]!r}"}
    code = process.wait(timeout=10)
    words = os.pread(noise, _NOISE_BYTES, 0).decode(errors="replace").strip().splitlines()
    how = f"by {signal_name(-code)}" if code < 0 else f"with exit code {code}"
    return {"stage": "died", "failure": f"ended {how}" + (f": {words[-1]}" if words else "")}


def torch_findings(plan: NodePlan, ranks: list[dict[str, Any]]) -> Iterator[Finding]:
    """Findings on torch and a first kernel on every device of a node.

    Args:
        plan: plan of the node.
        ranks: answers of `isles.train.check_rank.look`.
    """
    bad = [_failure(plan, index, own) for index, own in enumerate(ranks) if own.get("failure")]
    if bad:
        # A fault of the installation affects every rank.
        yield from {finding.text: finding for finding in bad}.values()
        return
    seconds = f"{ranks[0]['seconds']:.1f} s"
    yield Finding("torch.imports", "ok", plan.name, f"torch {ranks[0]['torch']}", seconds)
    if plan.device == "cuda":
        where = "its GPU" if len(ranks) == 1 else f"each of its {len(ranks)} GPUs"
        yield _visible(plan, where, ranks[0])
        text = f"a kernel ran on {where}, with the right result"
        yield Finding("gpu.kernel", "ok", plan.name, text)
    yield from _lacking(plan, ranks if plan.device == "cuda" else ranks[:1])


def _visible(plan: NodePlan, where: str, first: dict[str, Any]) -> Finding:
    text = f"torch sees {where}"
    if first.get("is_nvidia", True):
        return Finding("gpu.visible", "ok", plan.name, text)
    text += f" through ROCm {first['cuda']}. isles was never run on an AMD GPU, and packed rows "
    text += "have no variable-length attention there"
    fix = "run isles check --smoke, which trains three steps, and compare first losses with a CPU"
    return Finding("gpu.visible", "warning", plan.name, text, "ROCm", "CUDA", fix)


def _lacking(plan: NodePlan, ranks: list[dict[str, Any]]) -> Iterator[Finding]:
    # Devices that do not have the precision of the run.
    precision = "" if plan.run is None else plan.run["config"]["training"]["precision"]
    for index, own in enumerate(ranks):
        capability = own.get("capability")
        lack = lacking(precision, capability, is_nvidia=own.get("is_nvidia", True))
        if lack is not None:
            device = f"GPU {index} ({own['gpu']})" if capability else "the CPU"
            text = f"training.precision {precision} {lack.what.format(device)}"
            measured = f"sm_{capability[0]}{capability[1]}" if capability else "a CPU"
            yield Finding("gpu.precision", "error", plan.name, text, measured, lack.limit, lack.fix)


def _failure(plan: NodePlan, index: int, own: dict[str, Any]) -> Finding:
    name, failure = plan.name, str(own["failure"])
    match own["stage"]:
        case "kernel":
            return _kernel(name, index, own)
        case "visible":
            text = f"torch cannot use the GPUs: {failure}"
            measured = f"torch {own['torch']}, CUDA {own['cuda'] or 'none'}"
            fix = "compare the newest CUDA of the driver (nvidia-smi, top right) with torch's "
            fix += f"CUDA {own['cuda']}: update the driver, or install torch for an older CUDA"
            if own["cuda"] is None:
                fix = _pip("cu128")
            return Finding("gpu.visible", "error", name, text, measured, fix=fix)
        case "silent":
            text = "torch was not imported, or its first kernel has not finished, in time"
            fix = f"on {name}, run time python -c 'import torch' to see whether the disk is slow "
            fix += "(--timeout 3m waits longer), and dmesg | grep -i -e nvrm -e xid for GPU faults"
            return Finding("torch.imports", "error", name, text, fix=fix)
        case _:
            text = f"torch cannot be used: {failure}"
            fix = f"run python -c 'import torch' on {name}; isles setup run.yaml installs torch"
            return Finding("torch.imports", "error", name, text, failure, fix=fix)


def _kernel(name: str, index: int, own: dict[str, Any]) -> Finding:
    failure = str(own["failure"])
    if "no kernel image" not in failure:
        where = f"GPU {index}" if own.get("gpu") else "the CPU"
        text = f"a kernel failed on {where}: {failure}"
        fix = f"on {name}: dmesg | grep -i -e nvrm -e xid; if the fault returns, the GPU or the "
        fix += "driver is the cause"
        return Finding("gpu.kernel", "error", name, text, failure, fix=fix)
    major, minor = own["capability"]
    capability = f"sm_{major}{minor}"
    text = f"torch {own['torch']} has no kernels for GPU {index}, {own['gpu']} ({capability})"
    wheel = next((cuda for least, cuda in _WHEELS if (major, minor) >= least), "cu126")
    archs = " ".join(own["archs"])
    return Finding("gpu.kernel", "error", name, text, capability, archs, _pip(wheel))


def _pip(index: str) -> str:
    return (
        f"pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/{index}"
    )


def try_reduce(hosts: Hosts) -> None:
    """Run an all-reduce over all ranks, unless earlier findings make it hang."""
    names = hosts.names
    bad = [f for f in hosts.findings if f.level == "error" and f.id in _NEEDED]
    if bad or not hosts.reach or len(names) < len(hosts.facts):
        why = f"{bad[0].where}: {bad[0].text}" if bad else "hosts are missing"
        text, fix = f"the all-reduce was skipped ({why})", "fix this first, and check again"
        hosts.findings.append(Finding("reduce.works", "warning", "all hosts", text, fix=fix))
        return
    hosts.print_line("adding up tensors over all ranks")
    found = _reduce(hosts, {})
    bad = [finding for finding in found if finding.level == "error"]
    has_pairs = hosts.device == "cuda" and max(hosts.nproc.values()) > 1
    if bad and has_pairs and not any(f.measured == "store" for f in bad):
        found = _reduce_without(hosts, bad)
    hosts.findings += found


def _reduce_without(hosts: Hosts, bad: list[Finding]) -> list[Finding]:
    # The same all-reduce in new processes, each time without one more way between GPUs. Returns
    # the finding with the first that works, otherwise `bad`.
    names, timeout_s = hosts.names, hosts.extent.timeout_s
    for variables, how in _WITHOUT:
        hosts.print_line(f"again {how}")
        hosts.ask("end_ranks", finding_id="host.answers")()
        started = hosts.ask(
            "ranks",
            lambda name: {**hosts.plan(name), "timeout_s": timeout_s - 2},
            timeout_s=timeout_s,
        )()
        found = _reduce(hosts, variables)
        is_good = found and not any(finding.level == "error" for finding in found)
        if not is_good or hosts.names != names:
            continue
        text = f"{bad[0].text}; it works {how}"
        pairs = [
            f"{a} and {b} of {name}"
            for name, own in started.items()
            for a, b in own["no_peer"]
            if a < b
        ]
        text += f". GPUs {', '.join(pairs)} have no peer access" if pairs else ""
        own = {**hosts.run.cluster.environment.variables, **variables}
        lines = ", ".join(f'{key}: "{value}"' for key, value in own.items())
        fix = f"set clusters.0.environment.variables to {{{lines}}}, or update the GPUs' driver"
        return [replace(bad[0], text=text, measured=" ".join(variables), fix=fix)]
    tried = "; NCCL_P2P_DISABLE=1 and NCCL_SHM_DISABLE=1 did not help"
    return [replace(finding, text=finding.text + tried) for finding in bad]


def _reduce(hosts: Hosts, variables: Mapping[str, str]) -> list[Finding]:
    names, timeout_s = hosts.names, hosts.extent.timeout_s
    asked = {"port": hosts.run.cluster.network.port}
    free = hosts.ask("facts", asked, only=names[:1])()
    if not free:
        return []
    commands = _commands(hosts, free[names[0]]["port"], variables)
    answers = hosts.ask(
        "reduce",
        lambda name: {"commands": commands[name], "timeout_s": timeout_s - 2},
        timeout_s=timeout_s,
        finding_id="reduce.works",
    )()
    own_id = "net.bandwidth" if len(names) > 1 else "gpu.links"
    least = [f for f in hosts.findings if f.id == own_id and f.level == "ok"]
    expected = (least[0].measured if len(names) > 1 else least[0].limit) if least else ""
    network = hosts.run.cluster.network
    return list(reduce_findings(answers, commands, network, expected=expected))


def _commands(
    hosts: Hosts, port: int, variables: Mapping[str, str]
) -> dict[str, list[dict[str, Any]]]:
    # Arguments of `isles.train.check_rank.reduce` for each rank of each host.
    names, network, device = hosts.names, hosts.run.cluster.network, hosts.device
    world_size = sum(hosts.nproc[name] for name in names)
    first = 0
    commands: dict[str, list[dict[str, Any]]] = {}
    for name in names:
        interface = hosts.reach[name].interface or ("lo" if len(names) == 1 else None)
        commands[name] = [
            {
                "rank": first + index,
                "world_size": world_size,
                "address": hosts.reach[names[0]].address,
                "port": port,
                "backend": "nccl" if device == "cuda" else "gloo",
                "index": index,
                "variables": {**network_variables(network, interface, device), **variables},
                "sizes": _GPU_SIZES if device == "cuda" else _CPU_SIZES,
                "timeout_s": min(_MEET_S, hosts.extent.timeout_s / 2),
            }
            for index in range(hosts.nproc[name])
        ]
        first += hosts.nproc[name]
    return commands


def reduce_findings(
    answers: Answers,
    commands: Mapping[str, list[dict[str, Any]]],
    network: NetworkConfig,
    *,
    expected: str = "",
) -> Iterator[Finding]:
    """Findings on the all-reduce: its speed, or the failed ranks and their stage.

    Args:
        answers: answers of `CheckRanks.reduce` to the `commands` for the ranks of each host.
        expected: rate of the slowest link between ranks, as text. Empty: unknown.
    """
    owner = {command["rank"]: name for name, own in commands.items() for command in own}
    backend = str(commands[next(iter(commands))][0]["backend"])
    found = {
        command["rank"]: answer
        for name, own in answers.items()
        for command, answer in zip(commands[name], own["ranks"], strict=True)
    }
    bad = {rank: answer for rank, answer in found.items() if answer.get("failure")}
    missing = sorted({rank for answer in bad.values() for rank in answer.get("missing", ())})
    where_missing = ", ".join(sorted({owner[rank] for rank in missing if rank in owner}))
    for rank, answer in bad.items():
        what = answer["failure"]
        if answer.get("missing"):
            what = f"ranks {', '.join(map(str, missing))} on {where_missing} did not connect"
        elif missing and rank not in missing:
            continue  # it only waited for the missing ranks
        text = f"{backend} failed {_STAGES.get(answer['stage'], answer['stage'])}: {what}"
        fix = "check the interface (clusters.0.network.interface), and that every port is open "
        fix += "between the hosts"
        if backend == "nccl":
            fix = "NCCL_DEBUG=INFO in clusters.0.environment.variables prints details"
            if network.profile != "ethernet":
                fix = f"set clusters.0.network.profile to ethernet to skip InfiniBand; {fix}"
        where = f"{owner[rank]} rank {rank}"
        yield Finding("reduce.works", "error", where, text, answer["stage"], fix=fix)
    if bad or 0 not in found:
        return
    rows = found[0]["rows"]
    world = f"{len(found)} rank{'s' if len(found) > 1 else ''}"
    sizes = [f"{format_bytes(row['bytes'])} in {short_time(row['seconds'])}" for row in rows]
    text = f"{backend}, {world}: {', '.join(sizes)}"
    yield Finding("reduce.works", "ok", "all hosts", text, world)
    if len(found) > 1:
        best = max(rows, key=lambda row: row["bytes"])
        bus = bit_rate(best["bus"])
        text = f"bus bandwidth {bus}, algorithm bandwidth {bit_rate(best['algorithm'])}"
        if expected:
            text += f"; the limit of the slowest link is {expected} in each direction"
        yield Finding("reduce.speed", "ok", "all hosts", text, bus, expected)


_RUN_FILE = """\
name: smoke
output_dir: {folder}/runs
model: {{name_or_path: llama-2m, init: scratch}}
data:
  sources: [{{type: fake}}]
  seq_length: 64
  validation_fraction: 0
training:
  max_steps: 3
  global_batch_size: {rows}
  learning_rate: 1e-3
  logging_steps: 1
checkpoint: {{every_steps: null, every_minutes: null, export_on_finish: false}}
track: [jsonl]
"""


def smoke(plan: NodePlan, timeout_s: float = _SMOKE_S) -> Iterator[Finding]:
    """Train a small model on this machine. Yields a finding."""
    isles, begin = [sys.executable, "-m", "isles"], time.monotonic()
    with scratch_folder("isles-smoke-") as folder:
        path = folder / "run.yaml"
        path.write_text(_RUN_FILE.format(folder=folder, rows=4 * plan.nproc))
        words = [f"clusters.0.gpus_per_node={plan.nproc}"] if plan.nproc > 1 else []
        try:
            done = subprocess.run(
                [*isles, "train", str(path), *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=timeout_s,
                check=False,
            )
            code, output = done.returncode, done.stdout
            failure = f"ended with exit code {code}" if code else ""
        except subprocess.TimeoutExpired as error:
            stop = [*isles, "stop", "--now", "--output-dir", f"{folder}/runs"]
            subprocess.run(stop, capture_output=True, timeout=30, check=False)
            failure, output = f"not done in {timeout_s:.0f} s", error.stdout or b""
    seconds = f"{time.monotonic() - begin:.1f} s"
    if not failure:
        yield Finding("train.smoke", "ok", plan.name, "three steps trained", seconds)
        return
    last = "\n".join(output.decode(errors="replace").strip().splitlines()[-6:])
    text = f"a training of three steps {failure}:\n{last}"
    fix = "see the lines above; isles train on that host prints more"
    yield Finding("train.smoke", "error", plan.name, text, seconds, fix=fix)
