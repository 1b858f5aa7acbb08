"""Time from the command to the first step on three hosts over ssh, against torchrun typed on each.

    python benchmarks/start_ssh.py [--quick|--smoke]

Needs root: the hosts are network namespaces of this machine, each with its own sshd and its own
root (see tests/lab). Both ways train the same run (a Llama of 30 thousand parameters, one CPU
process on each host, gloo) and take turns: isles torchrun torchrun isles … Each pair's difference
is one figure.

isles: `isles train run.yaml` on the machine that has the key, from just before the process is
started to the time in the row of step 1 in metrics.jsonl. torchrun: as typed by hand on each host,
with a static rendezvous, which is the quickest there is:
`torchrun --nnodes=3 --node_rank=K --master_addr=… -m isles.train run.yaml`, all three started at
once by `ssh HOST`, from just before the first ssh to the same row. Its hosts must be known, its
port free and its environment equal already, all of which isles finds out.

The last line is JSON, medians in seconds; overhead_s is that of the differences isles - torchrun.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from common import make_parser, need, need_root, pick, print_figures
from tests.lab.hosts import Lab, hosts

from isles.run.paths import RunDir
from isles.run.records import read_rows

HOSTS = ("a1", "a2", "a3")
QUICK_PAIRS, PAIRS = 3, 10
DEADLINE_S = 300.0
BIN = Path(sys.executable).parent

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 128,
}

RUN_FILE = """\
name: {name}
output_dir: /shared/runs
model: {{name_or_path: /shared/model, init: scratch}}
tokenizer: {{train_vocab_size: 300}}
data:
  sources: [{{path: /shared/words.jsonl}}]
  seq_length: 32
  cache_dir: /shared/cache
training: {{max_steps: 2, global_batch_size: 12, precision: 32-true, logging_steps: 1}}
strategy: {{kind: ddp}}
balance: even
checkpoint: {{every_steps: null, every_minutes: null, export_on_finish: false}}
track: [jsonl]
clusters:
  - launcher: {{kind: {launcher}}}
"""


def prepare(lab: Lab, among: Sequence[str] = HOSTS) -> None:
    """What both train on, in the folder that all hosts see."""
    model, rng = lab.shared / "model", random.Random(0)
    model.mkdir()
    (model / "config.json").write_text(json.dumps(MODEL))
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 7))) for _ in range(200)]
    rows = [{"text": " ".join(rng.choices(words, k=rng.randint(1, 60)))} for _ in range(300)]
    (lab.shared / "words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ssh = f"ssh, hosts: [{', '.join(among)}]"
    for name, launcher in (("isles", ssh), ("torchrun", "local")):
        text = RUN_FILE.format(name=name, launcher=launcher)
        (lab.shared / f"{name}.yaml").write_text(text)


def first_step_at(lab: Lab, name: str, number: int) -> float:
    """The time in the row of step 1 of the run NAME-NUMBER."""
    rows = read_rows(RunDir(lab.shared / "runs" / f"{name}-{number}").metrics)
    return float(next(row["at"] for row in rows if row["step"] == 1))


def start_isles(lab: Lab, number: int) -> float:
    """Seconds to the first step of `isles train`."""
    command = [str(BIN / "isles"), "train", "/shared/isles.yaml", "--resume", "no"]
    begun = time.time()
    done = lab.run("ctl", ["sh", "-c", f"cd /shared && {' '.join(command)}"])
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    return first_step_at(lab, "isles", number) - begun


def start_torchrun(lab: Lab, number: int) -> float:
    """Seconds to the first step where torchrun is typed on each host."""
    begun = time.time()
    typed: list[subprocess.Popen[bytes]] = []
    for rank, host in enumerate(HOSTS):
        command = (
            f"cd /shared && OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=eth0 {BIN}/torchrun "
            f"--nnodes={len(HOSTS)} --nproc_per_node=1 --node_rank={rank} "
            f"--master_addr={lab.address(HOSTS[0])} --master_port=29700 --rdzv_backend=static "
            "-m isles.train torchrun.yaml --resume no"
        )
        typed.append(lab.popen("ctl", ["ssh", host, command]))
    for process in typed:
        output, _ = process.communicate(timeout=DEADLINE_S)
        if process.returncode:
            raise RuntimeError(output.decode())
    return first_step_at(lab, "torchrun", number) - begun


def main() -> None:
    """Measure, and print every pair."""
    options = make_parser(__doc__, quick=f"{QUICK_PAIRS} pairs, not {PAIRS}").parse_args()
    pairs = pick(options, full=PAIRS, quick=QUICK_PAIRS, smoke=1)
    need("torch", "transformers")
    need_root()
    ways = {"isles": start_isles, "torchrun": start_torchrun}
    found: dict[str, list[float]] = {"isles": [], "torchrun": []}
    with (
        tempfile.TemporaryDirectory(prefix="isles-bench-") as folder,
        hosts(Path(folder), len(HOSTS)) as lab,
    ):
        prepare(lab)
        for start in ways.values():  # the tokenizer and the data, and files into memory
            start(lab, 1)
        for pair in range(pairs):
            for name in ways if pair % 2 == 0 else reversed(ways):
                found[name].append(ways[name](lab, pair + 2))
            isles_s, torchrun_s = found["isles"][-1], found["torchrun"][-1]
            line = f"isles {isles_s:.2f} s, torchrun {torchrun_s:.2f} s"
            print(f"pair {pair + 1}: {line}, {isles_s - torchrun_s:+.2f} s", flush=True)
    differences = [a - b for a, b in zip(found["isles"], found["torchrun"], strict=True)]
    figures = {
        "overhead_s": round(statistics.median(differences), 2),
        "isles_s": round(statistics.median(found["isles"]), 2),
        "torchrun_s": round(statistics.median(found["torchrun"]), 2),
    }
    print_figures(figures)


if __name__ == "__main__":
    main()
