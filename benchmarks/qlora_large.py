"""QLoRA of a model whose 16-bit weights are larger than the memory of the host.

    python benchmarks/qlora_large.py            # 2.98 GB of weights, 2 GiB of memory, 10 steps
    python benchmarks/qlora_large.py --quick    # 4 steps
    python benchmarks/qlora_large.py --smoke    # a tiny model, in the same control group

Needs root and control groups with a memory controller, version 1 or 2. `isles train` runs with two
CPU ranks under fsdp in a control group of 2 GiB without swap. Half-way, after a checkpoint, all of
its processes are killed by SIGKILL. The same command resumes the run, which ends with the export of
the adapter. Another process of isles reads the export again, with the whole base model.

The model has the shape of Qwen3-1.7B as a Llama, with 29 layers, a vocabulary of 8,000 and random
weights. Gradient checkpointing is full, a micro-batch has one sequence of 128 tokens.

The peak of a rank is what its log records: memory of its process, and of the part that it got after
it began to build the model. `isles plan` counts the second. The last line is JSON:
    model_bytes, limit_bytes: 16-bit weights, and the limit of the control group.
    group_peak_bytes: most memory of all processes, without the cache of files, sampled.
    rank_peak_bytes: the larger of the two ranks' peaks, without their processes.
    group_over_plan: that peak over the main memory that the plan counts for the host.
    rank_over_plan: the ratio to the plan that is furthest from 1, of both ranks and both starts.
    oom_kills: of the kernel in the control group.
    steps: of the finished run.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from common import environment, make_parser, need_root, pick, print_figures

from isles.run.limits import CGROUPS, cgroup_folders, read_words

LIMIT_BYTES = 2 << 30
SAMPLE_S = 0.1
DEADLINE_S = 3600.0
SMOKE = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2}
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 29,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 8_000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}

RUN_FILE = """\
name: large
output_dir: {folder}/runs
model: {{name_or_path: {folder}/base, init: pretrained}}
adapter: {{type: qlora, r: 8, alpha: 16}}
data:
  sources: [{{path: python-docs}}]
  seq_length: 128
  validation_fraction: 0
  cache_dir: {folder}/cache
training:
  max_steps: {steps}
  global_batch_size: 2
  micro_batch_size: 1
  learning_rate: 1e-4
  gradient_checkpointing: full
  logging_steps: 1
  eval_steps: null
balance: even
strategy: {{kind: fsdp}}
checkpoint: {{every_steps: {half}, every_minutes: null}}
track: [jsonl]
clusters: [{{gpus_per_node: 2, device: cpu}}]
"""

_RECORD = re.compile(r"memory of rank (\d+): peak (.+?), calculated .+?, next to (.+?) of the")
_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


class MemoryGroup:
    """A control group with a memory limit and without swap. Its processes end with it."""

    def __init__(self, limit_bytes: int) -> None:
        own, self._is_v2 = next(iter(cgroup_folders("memory")), (CGROUPS, True))
        # In version 2 a group that has processes cannot have groups with a limit, except the root.
        self._folder = (CGROUPS if self._is_v2 else own) / f"isles-qlora-{os.getpid()}"
        try:
            if self._is_v2:
                (CGROUPS / "cgroup.subtree_control").write_text("+memory")
            self._folder.mkdir()
            limit, swap = "memory.limit_in_bytes", "memory.swappiness"
            if self._is_v2:
                limit, swap = "memory.max", "memory.swap.max"
            (self._folder / limit).write_text(str(limit_bytes))
            if (self._folder / swap).exists():  # not in a kernel without swap
                (self._folder / swap).write_text("0")
        except OSError as error:
            with suppress(OSError):
                self._folder.rmdir()
            sys.exit(f"qlora_large.py cannot limit memory with a control group here: {error}")

    def entered(self, command: list[str]) -> list[str]:
        """A command that enters the group first."""
        return ["sh", "-c", 'echo $$ > "$0" && exec "$@"', f"{self._folder}/cgroup.procs", *command]

    def processes(self) -> list[int]:
        """Processes of the group."""
        return [int(pid) for pid in (self._folder / "cgroup.procs").read_text().split()]

    def held_bytes(self) -> int:
        """Memory of the processes, without the cache of files, which the kernel can drop."""
        return read_words(self._folder / "memory.stat")["anon" if self._is_v2 else "total_rss"]

    def oom_kills(self) -> int:
        """Processes that the kernel has killed because the group was full."""
        name = "memory.events" if self._is_v2 else "memory.oom_control"
        return read_words(self._folder / name)["oom_kill"]

    def kill(self) -> None:
        """Kill all processes of the group."""
        while pids := self.processes():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(SAMPLE_S)

    def close(self) -> None:
        """Kill all processes, and delete the group."""
        self.kill()
        for _ in range(100):
            with suppress(OSError):  # the kernel is still counting dead processes
                self._folder.rmdir()
                return
            time.sleep(SAMPLE_S)


def make_base(folder: Path, shape: dict[str, object]) -> int:
    """Write a model with random weights, a file for each layer. Returns the bytes of its weights.

    In a process of its own, so that this one stays small.
    """
    command = [sys.executable, __file__, "--make", str(folder), json.dumps(shape)]
    subprocess.run(command, env=environment(), check=True)
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def write_base(folder: Path, shape: dict[str, int]) -> None:
    """See `make_base`."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    from isles.data.tokens.tokenizer import train_tokenizer

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    with torch.device("meta"):
        weights = LlamaForCausalLM(LlamaConfig(**shape)).state_dict()
    files: dict[str, list[str]] = {}
    for name in weights:
        layer = re.search(r"layers\.(\d+)\.", name)
        files.setdefault(f"model-{layer[1] if layer else name}.safetensors", []).append(name)
    generator = torch.Generator().manual_seed(0)
    for file, names in files.items():
        tensors = {}
        for name in names:
            value = torch.ones(weights[name].shape)
            if value.dim() > 1:
                value.normal_(std=0.02, generator=generator)
            tensors[name] = value.bfloat16()
        save_file(tensors, folder / file, {"format": "pt"})
    where = {name: file for file, names in files.items() for name in names}
    index = json.dumps({"metadata": {}, "weight_map": where})
    (folder / "model.safetensors.index.json").write_text(index, encoding="utf-8")
    train_tokenizer(["some words"], 260).save_pretrained(folder)


def recorded_step(run: Path) -> int:
    """The last recorded step of a run, or 0."""
    with suppress(OSError):
        rows = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return max((json.loads(row).get("step") or 0 for row in rows if row[-1:] == "}"), default=0)
    return 0


def train(group: MemoryGroup, run_file: Path, run: Path, kill_at: int | None) -> int:
    """`isles train` in the group, to its end or to a step at which all of it is killed.

    Returns:
        The most memory of all processes.

    Raises:
        SystemExit: the run failed.
    """
    command = [sys.executable, "-m", "isles", "train", str(run_file)]
    log = run_file.with_suffix(".log")
    with log.open("ab") as output:
        child = subprocess.Popen(
            group.entered(command), env=environment(), stdout=output, stderr=output
        )
    most, end = 0, time.monotonic() + DEADLINE_S
    while child.poll() is None or group.processes():
        most = max(most, group.held_bytes())
        if kill_at is not None and recorded_step(run) >= kill_at:
            group.kill()
            child.wait()
            return most
        if time.monotonic() > end:
            sys.exit(f"not over after {DEADLINE_S:.0f} s\n{log.read_text()[-4000:]}")
        time.sleep(SAMPLE_S)
    if child.returncode or kill_at is not None:
        sys.exit(f"{log.read_text()[-4000:]}\nisles train: exit code {child.returncode}")
    return most


def planned_bytes(run_file: Path) -> tuple[list[float], float]:
    """The peak of each rank by `isles plan`, and the main memory of the host."""
    command = [sys.executable, "-m", "isles", "plan", str(run_file), "--json"]
    done = subprocess.run(command, env=environment(), check=True, capture_output=True, text=True)
    (cluster,) = json.loads(done.stdout)["clusters"]
    ranks = [rank["peak_bytes"] for rank in cluster["ranks"]]
    return ranks, cluster["stores"][0]["needed_bytes"]


def recorded_peaks(run: Path) -> list[tuple[str, int, float, float]]:
    """The start, rank, memory of the process before the model, and memory since, of all ranks."""
    found = []
    for log in sorted(run.glob("attempts/*/rank-*.log")):
        for rank, own, process in _RECORD.findall(log.read_text(encoding="utf-8")):
            found.append((log.parent.name, int(rank), _bytes(process), _bytes(own)))
    return found


def _bytes(text: str) -> float:
    number, unit = text.split()
    return float(number) * _UNITS[unit]


def measure(folder: Path, shape: dict[str, object], steps: int) -> dict[str, float]:
    """Make the model, train, kill, resume, export, and compare with the plan."""
    half = steps // 2
    model_bytes = make_base(folder / "base", shape)
    run_file, run = folder / "large.yaml", folder / "runs" / "large-1"
    run_file.write_text(RUN_FILE.format(folder=folder, steps=steps, half=half), encoding="utf-8")
    planned, planned_host = planned_bytes(run_file)
    group = MemoryGroup(LIMIT_BYTES)
    try:
        # One step later the checkpoint has been written.
        peaks = [train(group, run_file, run, half + 1), train(group, run_file, run, None)]
        kills = group.oom_kills()
    finally:
        group.close()
    assert (run / "model" / "adapter_model.safetensors").exists(), "no export"
    print(f"{'start':>6}{'rank':>6}{'process':>12}{'model':>12}{'plan':>12}{'ratio':>8}")
    ratios, most = [], 0.0
    for start, rank, process, own in recorded_peaks(run):
        ratios.append(own / planned[rank])
        most = max(most, own)
        sizes = "".join(f"{each / 1e6:>9.1f} MB" for each in (process, own, planned[rank]))
        print(f"{start:>6}{rank:>6}{sizes}{ratios[-1]:>8.3f}")
    held, host, limit = (f"{each / 1e6:.1f} MB" for each in (max(peaks), planned_host, LIMIT_BYTES))
    print(f"all processes: {held}, plan {host}, limit {limit}")
    return {
        "model_bytes": model_bytes,
        "limit_bytes": LIMIT_BYTES,
        "group_peak_bytes": max(peaks),
        "group_over_plan": max(peaks) / planned_host,
        "rank_peak_bytes": most,
        "rank_over_plan": max(ratios, key=lambda ratio: abs(ratio - 1)),
        "oom_kills": kills,
        "steps": recorded_step(run),
    }


def main() -> None:
    """Measure and print."""
    parser = make_parser(__doc__, quick="minutes: 4 steps")
    parser.add_argument("--make", nargs=2, help="write the model; the benchmark calls this")
    options = parser.parse_args()
    if options.make:
        write_base(Path(options.make[0]), json.loads(options.make[1]))
        return
    need_root("it makes a control group with a memory limit")
    shape = SHAPE | pick(options, full={}, quick={}, smoke=SMOKE)
    with tempfile.TemporaryDirectory() as folder:
        print_figures(measure(Path(folder), shape, pick(options, full=10, quick=4, smoke=4)))


if __name__ == "__main__":
    main()
