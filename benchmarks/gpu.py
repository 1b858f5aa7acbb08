"""isles on one GPU beside a loop in plain PyTorch and transformers, whole processes in turns.

    python benchmarks/gpu.py [--quick|--smoke] [--model llama-150m] [--rows 16] [--seq-length 1024]

Both train the same shape from scratch in bf16 autocast with fused AdamW, sdpa, clipping and the
same rows a step; the bare loop on random numbers that lie on the GPU already, isles on samples that
it makes up and brings there, with all that it does in a step. Whole logits go through the bare
loop's loss; isles computes it in chunks, or by liger-kernel where that is installed: it is said
which. Tokens a second are the median over windows of five steps, after the first ones.

The last line is JSON:
    ratio: tokens/s of isles over those of the bare loop.
    isles_tokens_per_s, bare_tokens_per_s, isles_mfu.
    isles_memory_gb, bare_memory_gb: the most that was allocated.
With --smoke on a machine without a GPU nothing is measured, and it says that there is none.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import make_parser, need, pick, print_figures

WINDOW, FIRST = 5, 15
DEADLINE_S = 400.0

RUN_FILE = """\
name: gpu
output_dir: {folder}/runs
model: {{name_or_path: {model}, init: scratch}}
data: {{sources: [{{type: fake}}], seq_length: {seq_length}, validation_fraction: 0}}
training:
  max_steps: {steps}
  global_batch_size: {rows}
  micro_batch_size: {rows}
  learning_rate: 3.0e-4
  precision: bf16-mixed
  logging_steps: {window}
  eval_steps: null
balance: even
checkpoint: {{every_steps: null, every_minutes: null, export_on_finish: false}}
track: [jsonl]
clusters: [{{gpus_per_node: 1}}]
"""


def bare(options: argparse.Namespace) -> dict[str, float]:
    """The loop as one writes it by hand; run in a process of its own."""
    import torch
    from torch.nn.functional import cross_entropy
    from transformers import LlamaConfig, LlamaForCausalLM

    from isles.facts.models import load_shape

    config = LlamaConfig(**load_shape(options.model))
    config.use_cache = False
    config._attn_implementation = "sdpa"
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, fused=True)
    shape = options.rows, options.seq_length + 1
    speeds = []
    for window in range(options.steps // WINDOW):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(WINDOW):
            ids = torch.randint(config.vocab_size, shape, device="cuda")
            with torch.autocast("cuda", dtype=torch.bfloat16):
                logits = model(input_ids=ids[:, :-1]).logits
                loss = cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        if window * WINDOW >= FIRST:
            tokens = WINDOW * options.rows * options.seq_length
            speeds.append(tokens / (time.perf_counter() - began))
    return {
        "tokens_per_s": statistics.median(speeds),
        "memory_gb": torch.cuda.max_memory_allocated() / 1e9,
    }


def bare_process(options: argparse.Namespace) -> dict[str, float]:
    """`bare` in a process of its own."""
    words = [sys.executable, __file__, "--bare", *_words(options)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    if done.returncode:
        sys.exit(f"the bare loop failed:\n{done.stderr[-3000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def has_gpu() -> bool:
    """Whether torch finds a GPU, by a process of its own, which leaves nothing on it."""
    code = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def _words(options: argparse.Namespace) -> list[str]:
    words = ["--model", options.model, "--rows", str(options.rows), "--steps", str(options.steps)]
    return [*words, "--seq-length", str(options.seq_length)]


def isles(options: argparse.Namespace, folder: Path, number: int) -> dict[str, float]:
    """`isles train` of the same."""
    from isles.run.paths import RunDir
    from isles.run.records import read_rows

    run_file = folder / "run.yaml"
    run_file.write_text(RUN_FILE.format(folder=folder, window=WINDOW, **vars(options)))
    words = [sys.executable, "-m", "isles", "train", str(run_file), "--resume", "no"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    if done.returncode:
        sys.exit(f"isles failed:\n{done.stdout[-2000:]}{done.stderr[-3000:]}")
    rows: list[dict[str, Any]] = [
        row
        for row in read_rows(RunDir(folder / "runs" / f"gpu-{number}").metrics)
        if row["kind"] == "train" and row["step"] > FIRST
    ]
    return {
        "tokens_per_s": statistics.median(row["tokens_per_second"] for row in rows),
        "memory_gb": max(row["memory_bytes"] for row in rows) / 1e9,
        "mfu": statistics.median(row["mfu"] or 0.0 for row in rows),
    }


def main() -> None:
    """Measure, print a table, and one line of JSON at the end."""
    parser = make_parser(__doc__, quick="one turn of each, fewer steps")
    parser.add_argument("--model", default="llama-150m")
    parser.add_argument("--rows", type=int, default=16, help="samples of a step")
    parser.add_argument("--seq-length", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=0, help="of each process")
    parser.add_argument("--bare", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    need("torch", "transformers")
    options.steps = options.steps or pick(options, full=100, quick=40, smoke=25)
    if options.bare:
        print(json.dumps(bare(options)))
        return
    if not has_gpu():
        if not options.smoke:
            sys.exit("gpu.py needs a GPU, and torch finds none here")
        print("torch finds no GPU here: nothing was measured")
        print_figures({"gpu": None})
        return
    if options.smoke:
        options.model, options.rows = "llama-2m", 4
    turns = pick(options, full=2, quick=1, smoke=1)
    found: dict[str, list[dict[str, float]]] = {"bare": [], "isles": []}
    with tempfile.TemporaryDirectory(prefix="isles-gpu-") as folder:
        for number in range(1, turns + 1):
            found["bare"].append(bare_process(options))
            found["isles"].append(isles(options, Path(folder), number))
    loss = "liger-kernel" if importlib.util.find_spec("liger_kernel") else "in chunks"
    print(f"{options.model}, {options.rows} x {options.seq_length} tokens a step; loss: {loss}")
    print(f"{'':<8}{'tokens/s':>12}{'memory GB':>12}{'MFU':>8}")
    for kind, runs in found.items():
        for run in runs:
            mfu = f"{run['mfu']:>8.3f}" if "mfu" in run else ""
            print(f"{kind:<8}{run['tokens_per_s']:>12.0f}{run['memory_gb']:>12.2f}{mfu}")
    middle = {
        kind: {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        for kind, runs in found.items()
    }
    result = {
        "ratio": middle["isles"]["tokens_per_s"] / middle["bare"]["tokens_per_s"],
        "isles_tokens_per_s": middle["isles"]["tokens_per_s"],
        "bare_tokens_per_s": middle["bare"]["tokens_per_s"],
        "isles_mfu": middle["isles"]["mfu"],
        "isles_memory_gb": middle["isles"]["memory_gb"],
        "bare_memory_gb": middle["bare"]["memory_gb"],
    }
    print_figures(result)


if __name__ == "__main__":
    main()
