"""isles on one GPU beside two loops in plain PyTorch and transformers, whole processes in turns.

    python benchmarks/gpu.py [--quick|--smoke] [--model 150m|1b|8b] [--strategy ddp|fsdp]
        [--adapter lora|qlora] [--packed] [--optimizer NAME] [--as-shipped]

Three rows, all with random weights, bf16 products, sdpa, clipping and the same rows a step:

    compiled: the best loop that fits a page. Weights in bf16 with fp32 masters, blocks and loss
        compiled, fused AdamW. isles should reach 0.95 of it.
    eager: the loop that most people write, fp32 weights under autocast, nothing compiled.
    isles: `isles train` on fake samples, with everything that it does in a step. With --as-shipped
        a fourth row has the checkpoints and the evaluation of a user.

The loops train on random numbers that are on the GPU already. With --packed, isles isolates
documents of Python's own pages, with a tokenizer of 2,048 tokens, and the loops attend to whole
rows. --strategy and --optimizer apply to isles alone. The
speed of a loop is the median over windows of five steps, after the first windows. The speed of
isles is over the wall time, so that pauses count. MFU is the share of the card's dense bf16 peak
(src/isles/facts/gpus.py), with FLOPs of forward and backward, without recomputation.

The last line is JSON:
    rows: of each row tokens_per_s, tflops, mfu (null: the card is not in the table), memory_gb.
    ratio, ratio_eager: tokens/s of isles over those of the compiled and of the eager loop.
    saving: tokens/s as shipped over those without checkpoints and evaluation, with --as-shipped.
On a machine without a GPU, --smoke trains a tiny model on the CPU. This shows that every path runs,
and its figures say nothing about speed.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import make_parser, need, pick, print_figures

MODELS = {"150m": "llama-150m", "1b": "llama-1b", "8b": "llama-8b", "tiny": "llama-2m"}
ROWS = {"150m": (16, 1024), "1b": (8, 2048), "8b": (2, 4096), "tiny": (2, 64)}
"""Sequences of a step, and tokens of each."""

DEADLINE_S = 1500.0

RUN_FILE = """\
name: {name}
output_dir: {folder}/runs
model: {{{model}}}
data: {{seq_length: {length}, {data}}}
training:
  max_steps: {steps}
  global_batch_size: {rows}
  micro_batch_size: {rows}
  learning_rate: 3.0e-4
  precision: bf16-mixed
  logging_steps: {window}
  optimizer: {optimizer}
strategy: {{kind: {strategy}}}
balance: even
track: [jsonl]
clusters: [{{gpus_per_node: 1}}]
"""
WITHOUT_PAUSES = (
    *("data.validation_fraction=0", "training.eval_steps=null", "checkpoint.every_steps=null"),
    *("checkpoint.every_minutes=null", "checkpoint.export_on_finish=false"),
)


def shape_of(options: argparse.Namespace) -> dict[str, Any]:
    """The model's config.json."""
    from isles.facts.models import load_shape

    return load_shape(MODELS[options.model])


def make_model(options: argparse.Namespace, device: str) -> Any:
    """A transformers model with random weights in fp32."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**shape_of(options))
    config.use_cache = False
    config._attn_implementation = "sdpa"
    # Weights of 8B in fp32 do not fit beside the rest, and are frozen anyway.
    dtype = torch.bfloat16 if options.adapter else torch.float32
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return LlamaForCausalLM(config).train()
    finally:
        torch.set_default_dtype(before)


def add_adapter(model: Any, options: argparse.Namespace) -> Any:
    """peft's LoRA in fp32 on every matrix of the blocks, which qlora makes 4 bits wide first."""
    from peft import LoraConfig, get_peft_model

    if options.adapter == "qlora":
        import bitsandbytes
        import torch

        for layer in model.model.layers:
            for name, linear in list(layer.named_modules()):
                if isinstance(linear, torch.nn.Linear):
                    narrow = bitsandbytes.nn.Linear4bit(
                        linear.in_features,
                        linear.out_features,
                        bias=False,
                        compute_dtype=torch.bfloat16,
                        quant_type="nf4",
                    )
                    narrow.weight = bitsandbytes.nn.Params4bit(
                        linear.weight.data.cpu(), requires_grad=False, quant_type="nf4"
                    )
                    parent, _, own = name.rpartition(".")
                    setattr(layer.get_submodule(parent), own, narrow.to(linear.weight.device))
    adapted = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return adapted.base_model.model


def bare(options: argparse.Namespace) -> dict[str, float]:
    """A loop as one writes it by hand; run in a process of its own."""
    import torch
    from torch.nn.functional import cross_entropy

    device = "cuda" if torch.cuda.is_available() else "cpu"
    is_compiled, is_whole = options.bare == "compiled", not options.adapter
    model = make_model(options, device)
    if not is_whole:
        model = add_adapter(model, options)
    elif is_compiled:
        masters = [weight.detach().clone() for weight in model.parameters()]
        model.to(torch.bfloat16)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    has_masters = is_whole and is_compiled
    trained = masters if has_masters else weights
    optimizer = torch.optim.AdamW(trained, lr=3e-4, weight_decay=0.1, fused=True)

    def whole_loss(hidden: Any, head: Any, targets: Any) -> Any:
        return cross_entropy((hidden @ head.t()).flatten(0, 1).float(), targets.flatten())

    loss_of: Any = whole_loss
    if is_compiled:
        # A CPU shows only that the loop runs.
        backend = "inductor" if device == "cuda" else "eager"
        for block in model.model.layers:
            block.compile(backend=backend)
        loss_of = torch.compile(whole_loss, backend=backend)
    synchronize: Any = torch.cuda.synchronize if device == "cuda" else lambda: None
    autocast = functools.partial(
        torch.autocast, device, dtype=torch.bfloat16, enabled=not has_masters
    )
    vocab, speeds = model.config.vocab_size, []
    for window in range(options.steps // options.window):
        synchronize()
        began = time.perf_counter()
        for _ in range(options.window):
            ids = torch.randint(vocab, (options.rows, options.length + 1), device=device)
            with autocast():
                hidden = model.model(input_ids=ids[:, :-1]).last_hidden_state
                loss = loss_of(hidden, model.lm_head.weight, ids[:, 1:])
            loss.backward()
            if has_masters:
                for master, weight in zip(masters, weights, strict=True):
                    assert weight.grad is not None
                    master.grad, weight.grad = weight.grad.float(), None
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if has_masters:
                torch._foreach_copy_([weight.data for weight in weights], masters)
        synchronize()
        if window * options.window >= options.first:
            tokens = options.window * options.rows * options.length
            speeds.append(tokens / (time.perf_counter() - began))
    is_cuda = device == "cuda"
    return {
        "tokens_per_s": statistics.median(speeds),
        "memory_gb": torch.cuda.max_memory_allocated() / 1e9 if is_cuda else 0.0,
    }


def run_program(what: str, words: list[str]) -> str:
    """Run a program to its end; returns what it printed."""
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    if done.returncode:
        sys.exit(f"{what} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout


def bare_process(options: argparse.Namespace, kind: str) -> dict[str, float]:
    """`bare` in a process of its own."""
    words = [__file__, "--bare", kind, "--model", options.model]
    for name in ("rows", "length", "steps", "window", "first"):
        words += [f"--{name}", str(getattr(options, name))]
    words += ["--adapter", options.adapter] if options.adapter else []
    return dict(json.loads(run_program(f"the {kind} loop", words).splitlines()[-1]))


def device_name() -> str:
    """The first GPU's name, by a process of its own, which leaves nothing on it. Empty: none."""
    code = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
    return run_program("torch", ["-c", code]).strip()


def isles(options: argparse.Namespace, folder: Path, *, as_shipped: bool) -> dict[str, float]:
    """`isles train` of the same."""
    from isles.run.paths import RunDir
    from isles.run.records import read_rows

    name = "shipped" if as_shipped else "plain"
    path = folder / "model"
    model = f"name_or_path: {path}" + ("" if options.adapter else ", init: scratch")
    data = "sources: [{type: fake}]"
    if options.packed:
        data = "sources: [{path: python-docs}], isolate_documents: true"
        data += f", cache_dir: {folder}/cache"
    values = vars(options) | {"model": model, "data": data, "name": name, "folder": folder}
    text = RUN_FILE.format(**values)
    if options.packed:
        text += f"tokenizer: {{name_or_path: {path}}}\n"
    if options.adapter:
        text += f"adapter: {{type: {options.adapter}, r: 16, dropout: 0.0}}\n"
    run_file = folder / f"{name}.yaml"
    run_file.write_text(text, encoding="utf-8")
    words = ["-m", "isles", "train", str(run_file), "--resume", "no"]
    run_program("isles", [*words, *(() if as_shipped else WITHOUT_PAUSES)])
    run = max((folder / "runs").glob(f"{name}-*"), key=lambda each: each.stat().st_mtime)
    rows: list[dict[str, Any]] = [
        row
        for row in read_rows(RunDir(run).metrics)
        if row["kind"] == "train" and row["step"] >= options.first
    ]
    first, last = rows[0], rows[-1]
    tokens = (last["step"] - first["step"]) * options.rows * options.length
    return {
        "tokens_per_s": tokens / (last["at"] - first["at"]),
        "memory_gb": max(row["memory_bytes"] or 0 for row in rows) / 1e9,
    }


def save_model(options: argparse.Namespace, folder: Path, device: str) -> None:
    """A folder for isles: config.json, for an adapter random weights, and to pack a tokenizer."""
    (folder / "model").mkdir()
    if options.packed:
        from tokenizers import ByteLevelBPETokenizer
        from transformers import PreTrainedTokenizerFast

        own = ByteLevelBPETokenizer()
        files = sorted(Path(json.__file__).parent.glob("*.py"))
        texts = [file.read_text(encoding="utf-8") for file in files]
        own.train_from_iterator(texts, vocab_size=2048, special_tokens=["<eos>"])
        named = PreTrainedTokenizerFast(tokenizer_object=own._tokenizer, eos_token="<eos>")
        named.save_pretrained(folder / "model")
    if options.adapter:
        make_model(options, device).save_pretrained(folder / "model")
    else:
        text = json.dumps(shape_of(options))
        (folder / "model" / "config.json").write_text(text, encoding="utf-8")


def flops_per_token(options: argparse.Namespace) -> float:
    """FLOPs of a token, forward and backward; frozen weights get no gradients."""
    from isles.facts.memory.architecture import Architecture
    from isles.facts.memory.count import Count
    from isles.facts.memory.setting import Holding, MemorySettings
    from isles.plan.model import train_flops

    setting = MemorySettings(
        "bf16-mixed", "adamw", 1, options.length, adapter_rank=16 if options.adapter else 0
    )
    count = Count(Architecture.of(shape_of(options)), setting, Holding())
    return train_flops(count) / float(options.length)


def measure(options: argparse.Namespace, turns: int, device: str) -> dict[str, dict[str, float]]:
    """Medians of each row."""
    kinds = ["compiled", "eager", "isles"] + ["as shipped"] * options.as_shipped
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory(prefix="isles-gpu-") as name:
        folder = Path(name)
        save_model(options, folder, device)
        for _ in range(turns):
            for kind in kinds:
                if kind in ("compiled", "eager"):
                    found[kind].append(bare_process(options, kind))
                else:
                    is_shipped = kind == "as shipped"
                    found[kind].append(isles(options, folder, as_shipped=is_shipped))
    return {
        kind: {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        for kind, runs in found.items()
    }


def main() -> None:
    """Measure, print a table, and one line of JSON at the end."""
    parser = make_parser(__doc__, quick="one turn of each, fewer steps")
    parser.add_argument("--model", choices=MODELS, default="150m")
    parser.add_argument("--strategy", choices=("ddp", "fsdp"), default="ddp", help="of isles")
    parser.add_argument("--adapter", choices=("lora", "qlora"), default="")
    parser.add_argument("--packed", action="store_true", help="isolated documents in a row")
    parser.add_argument("--optimizer", default="adamw", help="of isles")
    parser.add_argument("--as-shipped", action="store_true", help="also with checkpoints")
    parser.add_argument("--rows", type=int, default=0, help="samples of a step")
    parser.add_argument("--length", "--seq-length", type=int, default=0)
    parser.add_argument("--steps", type=int, default=0, help="of each process")
    for name in ("--window", "--first"):
        parser.add_argument(name, type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--bare", choices=("compiled", "eager"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    need("torch", "transformers")
    if options.bare:
        print(json.dumps(bare(options)))
        return
    name = device_name()
    if not name and not options.smoke:
        sys.exit("gpu.py needs a GPU, and torch finds none here")
    if not name:
        options.model = "tiny"
    if options.model == "8b" and not options.adapter:
        parser.error("the state of 8B parameters does not fit one GPU: add --adapter lora")
    rows, length = ROWS[options.model]
    options.rows, options.length = options.rows or rows, options.length or length
    options.steps = options.steps or pick(options, full=100, quick=40, smoke=25 if name else 6)
    options.window, options.first = (5, 15) if name else (2, 2)
    found = measure(options, pick(options, full=2, quick=1, smoke=1), "cuda" if name else "cpu")

    from isles.facts.gpus import find_gpu

    flops, gpu = flops_per_token(options), find_gpu(name)
    print(f"{options.model}, {options.rows} x {options.length} tokens a step, {name or 'CPU'}")
    print(f"{'':<12}{'tokens/s':>12}{'TFLOP/s':>10}{'MFU':>8}{'memory GB':>12}")
    result: dict[str, Any] = {"device": name or "CPU", "rows": {}}
    for kind, row in found.items():
        rate = row["tokens_per_s"] * flops
        mfu = rate / gpu.bf16_flops if gpu is not None else None
        text = "unknown" if mfu is None else f"{mfu:.1%}"
        print(
            f"{kind:<12}{row['tokens_per_s']:>12,.0f}{rate / 1e12:>10.3g}{text:>8}"
            f"{row['memory_gb']:>12.2f}"
        )
        result["rows"][kind] = {**row, "tflops": rate / 1e12, "mfu": mfu}
    own = found["isles"]["tokens_per_s"]
    result["ratio"] = own / found["compiled"]["tokens_per_s"]
    result["ratio_eager"] = own / found["eager"]["tokens_per_s"]
    if options.as_shipped:
        result["saving"] = found["as shipped"]["tokens_per_s"] / own
    print_figures(result)


if __name__ == "__main__":
    main()
