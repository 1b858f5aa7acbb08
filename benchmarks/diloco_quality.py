"""What is learned by clusters that average now and then, against one synchronous run.

    python benchmarks/diloco_quality.py [--quick|--smoke] [--clusters 2,4]
        [--settings int8,int8+fragments] [--together STEPS] [--folder FOLDER] [KEY=VALUE ...]

A small Llama learns the sources of Python's standard library. The synchronous run makes every step
with the whole batch. K clusters share the same batch: each makes as many inner steps with 1/K of
its rows, and they average every `sync_every` steps. So all runs make the same number of steps with
the same samples, seed, inner optimizer and learning rates, and train on equally many tokens. All
begin from scratch, from the same random weights; the first rounds are short and only average
(`outer.warmup_rounds`). With `--together STEPS` they begin, without such rounds, from the weights
and optimizer that the synchronous run has after so many steps. `sync, other samples` tells how far
two synchronous runs differ by chance.

All clusters live in this one process and step by turns: there is no hub and no network. What
they do to the weights is isles' own: engine, optimizer, loader, layout, codecs with error feedback,
the hub' averaging, weighted by tokens, and the cluster's outer step, with the same schedule
of turns as in training. After each turn the outer parameters of all clusters must have one digest.
Settings are codecs; `+fragments` cuts the model in fragments that are averaged by turns, while
inner steps go on. topk has less outer momentum, as what it leaves out is fed back; SparseLoCo none.

KEY=VALUE changes the run file below. With --folder what was measured is kept there, and is not
measured again. Curves are of the first cluster's weights; at the end all have the same.

The last line is JSON:
    loss: final validation loss by setting.
    over_sync: that over the synchronous run's, less one.
    tokens: of each run, from where they part.
    parameters, rounds: the model's; outer steps of every weight.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import common
import torch
from diloco_clusters import FRAGMENTS, Bench, Replica, Setting, open_meeting

from isles.config.load import load_run_file
from isles.data.mix import build_datasets
from isles.data.tokens.tokenizer import load_tokenizer
from isles.dist.world import join_world, leave_world
from isles.run.env import RankEnv
from isles.train.data import write_tokenizer

CODECS = ("none", "int8", "int4", "topk", "topk:0.02")
POINTS = 6

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 48,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "vocab_size": 512,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}

RUN_FILE = """\
name: quality
model: {{name_or_path: {folder}/model, init: scratch}}
tokenizer: {{train_vocab_size: 512}}
data:
  sources: [{{path: python-stdlib}}]
  seq_length: 64
  validation_fraction: 0.02
  cache_dir: {folder}/cache
training:
  max_steps: 1280
  global_batch_size: 64
  micro_batch_size: 64
  learning_rate: 4e-3
  lr_scheduler_type: cosine
  min_lr_ratio: 0.1
  warmup_steps: 40
  precision: 32-true
  eval_samples: 256
strategy: {{kind: ddp}}
clusters: [{{gpus_per_node: 1}}]
outer:
  kind: diloco
  lr: 0.7
  momentum: 0.8
  sync_every: 12
  warmup_rounds: 40
  warmup_sync_every: 4
  fragments: 3
  delay: 1
  alpha: 0.0
"""


def run(bench: Bench, setting: Setting) -> dict[str, Any]:
    """Train one setting to its end; its curve. All clusters must end with the same weights."""
    steps = bench.config.training.max_steps
    assert steps is not None
    began, cpu = time.monotonic(), time.process_time()
    replicas = [Replica(bench, setting, number) for number in range(setting.num_clusters)]
    start = bench.start[0]
    every = [start + (steps - start) * point // POINTS for point in range(1, POINTS + 1)]
    curve = []
    with tempfile.TemporaryDirectory() as folder:
        meeting = None
        if setting.codec:
            meeting = open_meeting(bench, setting, replicas, Path(folder))
        for step in range(start + 1, steps + 1):
            for replica in replicas:
                replica.train()
            if meeting is not None:
                meeting.take(step)
                if step - start >= meeting.schedule.step_of(meeting.turns):
                    meeting.contribute(step)
                    meeting.take(step)
                if step == steps:
                    meeting.finish(step)
            if step in every:
                curve.append(replicas[0].loss())
    assert len({replica.digest() for replica in replicas}) == 1, setting.name
    for replica in replicas:
        replica.close()
    return {
        "setting": setting.name,
        "of": digest_of(bench),
        "loss": curve[-1],
        "curve": curve,
        "steps": every,
        "tokens": sum(replica.tokens for replica in replicas),
        "parameters": replicas[0].parameters,
        "rounds": 0 if meeting is None else meeting.turns // len(meeting.layout.fragments),
        "seconds": time.monotonic() - began,
        "cpu_seconds": time.process_time() - cpu,
    }


def open_bench(folder: Path, overrides: Sequence[str], *, quick: bool, together: bool) -> Bench:
    """Tokenizer, tokens, and the run file."""
    (folder / "model").mkdir(parents=True, exist_ok=True)
    (folder / "model" / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    path = folder / "quality.yaml"
    path.write_text(RUN_FILE.format(folder=folder), encoding="utf-8")
    steps = ["training.max_steps=64", "training.warmup_steps=8"]
    short = [*steps, "outer.sync_every=16", "outer.delay=2", "outer.warmup_rounds=1"]
    short.append("outer.warmup_sync_every=8")
    warm = ["outer.warmup_rounds=0", "outer.warmup_sync_every=null"]  # it was warmed together
    own = [*(short if quick else []), *(warm if together else []), *overrides]
    config = load_run_file(path, own).config
    write_tokenizer(config, folder / "tokenizer")
    tokenizer = load_tokenizer(str(folder / "tokenizer"), trust_remote_code=False)
    training, validation = build_datasets(
        config.data,
        tokenizer,
        folder / "cache",
        seed=config.seed,
        vocab_size=len(tokenizer),
        progress=lambda text: print(text, flush=True),
    )
    assert validation is not None
    world = join_world(RankEnv(0, 0, 1, 1, 0, None), device="cpu", timeout_s=600)
    return Bench(config, world, tokenizer, training, validation)


def digest_of(bench: Bench) -> str:
    """Of all that the figures depend on but the setting."""
    text = f"{bench.start[0]} {bench.config.model_dump_json()}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def train_together(bench: Bench, steps: int, folder: Path) -> Bench:
    """The state of one synchronous run after so many steps, from which all settings go on."""
    path = folder / f"{digest_of(replace(bench, start=(steps, {})))}.pt"
    if steps and not path.exists():
        replica = Replica(bench, Setting(), 0)
        for _ in range(steps):
            replica.train()
        torch.save(replica.engine.state_dict(), path)
        replica.close()
    return replace(bench, start=(steps, torch.load(path, weights_only=True) if steps else {}))


def settings_of(clusters: Sequence[int], wanted: Sequence[str]) -> Iterator[Setting]:
    """All runs, those that are compared with first."""
    yield Setting()
    for number in clusters:
        for name in wanted:
            yield Setting(number, name.removesuffix(FRAGMENTS), name.endswith(FRAGMENTS))
    yield Setting(has_other_samples=True)


def table(results: Sequence[dict[str, Any]]) -> None:
    """The curves, side by side."""
    base = results[0]["loss"]
    print("\n" + " " * 20 + "".join(f"{step:>8}" for step in results[0]["steps"]) + "    over sync")
    for found in results:
        points = "".join(f"{loss:8.4f}" for loss in found["curve"])
        print(f"{found['setting']:20}{points}{found['loss'] / base - 1:12.2%}", flush=True)


def main() -> None:
    """Measure what is not measured yet, and print the table."""
    parser = common.make_parser(__doc__, quick="64 steps: shows that it works")
    both = ",".join([*CODECS, *(codec + FRAGMENTS for codec in CODECS)])
    parser.add_argument("--clusters", default="2,4", help="how many, such as 2,4")
    parser.add_argument("--settings", default=both, help="codecs, some with +fragments")
    parser.add_argument("--folder", type=Path, help="keep data and results here")
    parser.add_argument(
        "--together", type=int, default=0, help="steps of one run before the clusters part"
    )
    parser.add_argument("overrides", nargs="*", help="KEY=VALUE of the run file")
    given = parser.parse_args()
    if given.smoke:
        given.clusters, given.settings = "2", "int8" + FRAGMENTS
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as fresh:
        folder = (given.folder or Path(fresh)).resolve()
        together = given.together
        is_short = given.quick or given.smoke
        bench = open_bench(folder, given.overrides, quick=is_short, together=together > 0)
        bench = train_together(bench, together, folder)
        log = folder / "results.jsonl"
        lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
        known = {
            found["setting"]: found
            for found in map(json.loads, lines)
            if found.get("of") == digest_of(bench)
        }
        results = []
        clusters = [int(number) for number in given.clusters.split(",")]
        for setting in settings_of(clusters, given.settings.split(",")):
            if setting.name not in known:
                known[setting.name] = run(bench, setting)
                with log.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(known[setting.name]) + "\n")
            results.append(known[setting.name])
            table([results[0], results[-1]])
        leave_world()
    table(results)
    base = results[0]["loss"]
    last = {
        "loss": {found["setting"]: round(found["loss"], 4) for found in results},
        "over_sync": {found["setting"]: round(found["loss"] / base - 1, 4) for found in results},
        "tokens": results[0]["tokens"],
        "parameters": results[0]["parameters"],
        "rounds": max(found["rounds"] for found in results),
    }
    common.print_figures(last)


if __name__ == "__main__":
    main()
