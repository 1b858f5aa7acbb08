"""Speed of fine-tuning with isles against Hugging Face's Trainer and TRL, and what packing wastes.

    python benchmarks/finetune.py [--quick|--smoke]     # needs isles[bench]

All train the same small Llama, in fp32 on the CPU with one thread, on the same conversations about
the topics of Python's documentation, on what the assistant says alone; once all weights, and once
LoRA (peft, rank 16 on every matrix but the head). The others are in `bare_finetune.py`, in their
best plain settings: A is Trainer on rows that TRL has packed, a micro-batch of as many packed rows
as isles has; B is Trainer on conversations grouped by length, padded, as many as have about as many
tokens. TRL's SFTTrainer with packing is measured as well, without --quick; it takes one packed row
at a time, as it would lay several end to end, for which a CPU has no attention that is fast.

Chunks of isles' own loop and of A and B take turns in the same process: isles A B isles B A isles.
Speed is trained tokens per second: padding and prompts count for nobody. isles' chunk counts all
that it does in a step: reading, records, trackers, its look at signals.

The last line is JSON:
    full_over_hf, lora_over_hf: isles' tokens/s over those of the faster of A and B, the median over
        neighboring chunks; higher is better.
    padding_waste: share of the places in isles' packed samples that hold padding.
With --smoke the first two are of LoRA only.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from pydoc_data.topics import topics
from typing import TYPE_CHECKING

from common import (
    Effort,
    Turns,
    make_parser,
    need,
    pick,
    print_figures,
    print_header,
    print_row,
    take_turns,
)

from isles.facts.models import load_shape
from isles.run.paths import RunDir

if TYPE_CHECKING:
    from bare_finetune import Finetuning

    from isles.train.parts import Parts

SEQ_LENGTH, ROWS = 512, 4
LEARNING_RATE = 1e-3
VOCABULARY = 2048
FULL, QUICK = Effort(rounds=24, chunk_steps=10), Effort(rounds=6, chunk_steps=5)
SMOKE, SMOKE_TOPICS = Effort(rounds=2, chunk_steps=1, warmup_rounds=0), 8
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

RUN_FILE = """\
name: {name}
output_dir: {folder}/runs
model: {{name_or_path: {folder}/base}}
adapter: {{type: {adapter}, r: 16, alpha: 32}}
data:
  sources: [{{path: {folder}/conversations.jsonl, type: chat}}]
  seq_length: {seq_length}
  validation_fraction: 0
  cache_dir: {folder}/cache
training:
  max_steps: {max_steps}
  global_batch_size: {rows}
  micro_batch_size: {rows}
  learning_rate: {learning_rate}
  lr_scheduler_type: constant
  max_grad_norm: 1.0
  precision: 32-true
  logging_steps: 10
  eval_steps: null
balance: even
strategy: {{kind: ddp}}
checkpoint: {{every_steps: null, every_minutes: null, export_on_finish: false}}
track: [jsonl, tensorboard]
"""


def conversations(num_topics: int | None) -> Iterator[dict[str, object]]:
    """Questions about a topic, two at a time, and paragraphs of the documentation as answers."""
    for name, text in sorted(topics.items())[:num_topics]:
        paragraphs = [part.strip() for part in text.split("\n\n")]
        answers = [part for part in paragraphs if len(part) > 40]
        for first in range(0, len(answers), 2):
            messages = []
            for number, answer in enumerate(answers[first : first + 2], first + 1):
                question = f"What does Python's documentation say about {name!r}, part {number}?"
                messages += [{"role": "user", "content": question}]
                messages += [{"role": "assistant", "content": answer}]
            yield {"messages": messages}


def prepare(folder: Path, num_topics: int | None) -> None:
    """Conversations about so many topics, or all, and an untrained model with its tokenizer."""
    import torch
    from tokenizers import ByteLevelBPETokenizer
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    lines = [json.dumps(row) for row in conversations(num_topics)]
    (folder / "conversations.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    special = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(topics.values(), vocab_size=VOCABULARY, special_tokens=special)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=trained._tokenizer, pad_token=special[0], eos_token=special[2]
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "base")
    torch.manual_seed(0)
    config = LlamaConfig(**load_shape("llama-2m") | {"vocab_size": len(tokenizer)})
    config.pad_token_id, config.eos_token_id, config.bos_token_id = 0, 2, None
    LlamaForCausalLM(config).save_pretrained(folder / "base")


def make_others(parts: Parts, folder: Path, kinds: Sequence[str]) -> Sequence[Finetuning]:
    """The Trainers; this runs in the process that trains with isles."""
    from bare_finetune import Finetuning, Settings

    assert parts.total_steps is not None
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)  # a Trainer would take itself for one of several ranks
    settings = Settings(
        model=folder / "base",
        conversations=folder / "conversations.jsonl",
        output=folder / "theirs",
        seq_length=SEQ_LENGTH,
        rows=ROWS,
        max_steps=2 * parts.total_steps,  # it is only ever let through for a chunk
        learning_rate=LEARNING_RATE,
        lora=parts.config.adapter.type == "lora",
    )
    return [Finetuning(kind, settings) for kind in kinds]


def padding_waste(folder: Path) -> float:
    """Share of padding in the packed samples of all conversations, as isles counts it."""
    from transformers import AutoTokenizer

    from isles.config.sections.data import DataConfig, SourceConfig
    from isles.data.mix import build_datasets
    from isles.data.samples import SampleTable
    from isles.dist.world import join_world, leave_world
    from isles.run.env import RankEnv

    source = SourceConfig(path=str(folder / "conversations.jsonl"), type="chat")
    config = DataConfig(sources=(source,), seq_length=SEQ_LENGTH, validation_fraction=0)
    world = join_world(RankEnv(0, 0, 1, 1, 0, None), device="cpu", timeout_s=60)
    training, _ = build_datasets(
        config,
        AutoTokenizer.from_pretrained(folder / "base"),
        folder / "cache",
        seed=0,
        vocab_size=VOCABULARY,
        progress=lambda _: None,
        world=world,
    )
    leave_world()
    (samples,) = training.parts
    assert isinstance(samples, SampleTable)
    return samples.counts.padding_share


def report(folder: Path, adapter: str, effort: Effort, kinds: Sequence[str]) -> dict[str, float]:
    """Measure and print; isles' tokens/s over those of each other, the median over neighbors."""
    name = "full" if adapter == "none" else adapter
    run_file = folder / f"{name}-{'-'.join(kinds)}.yaml"
    text = RUN_FILE.format(
        name=run_file.stem,
        folder=folder,
        adapter=adapter,
        seq_length=SEQ_LENGTH,
        rows=ROWS,
        max_steps=effort.max_steps,
        learning_rate=LEARNING_RATE,
    )
    run_file.write_text(text, encoding="utf-8")
    here = Path(__file__).resolve()
    turns = take_turns(here, run_file, 1, effort, str(folder), ",".join(kinds), step_deadline_s=10)
    kept = speeds(turns, effort)[3 * effort.warmup_rounds :]
    found = dict[str, float]()
    for unit, column in (("s", 1), ("CPU s", 2)):
        chunks = [(chunk[0], float(chunk[column])) for chunk in kept]
        ratios: dict[str, list[float]] = {"A": [], "B": []}
        for (who, speed), (next_who, next_speed) in pairwise(chunks):
            if "isles" in (who, next_who):
                both = {who: speed, next_who: next_speed}
                (other,) = set(both) - {"isles"}
                ratios[other].append(both["isles"] / both[other])
        middle = {w: statistics.median(s for v, s in chunks if v == w) for w in ("isles", "A", "B")}
        for who, kind in zip("AB", kinds, strict=True):
            label = f"{name} against {kind}, tokens/{unit}"
            ratio = print_row(label, middle["isles"], middle[who], ratios[who])
            found.setdefault(kind, ratio)
    last = [float(turns.rows[-1]["loss"]), *(losses[-1] for losses in turns.losses)]
    words = ", ".join(
        f"{who} {loss:.2f}" for who, loss in zip(("isles", *kinds), last, strict=True)
    )
    print(f"{name}, last losses: {words}", flush=True)
    return found


def speeds(turns: Turns, effort: Effort) -> list[tuple[str, float, float]]:
    """Who ran, and trained tokens per second and per second of CPU time, chunk by chunk.

    isles' packed samples hold nearly the same number of tokens: those of a mean step are taken.
    """
    last = turns.rows[-1]
    ours = effort.chunk_steps * float(last["target_tokens"]) / float(last["step"])
    theirs = {who: iter(tokens) for who, tokens in zip("AB", turns.tokens, strict=True)}
    found = []
    for who, wall, cpu in turns.chunks:
        tokens = ours if who == "isles" else next(theirs[who])
        found.append((who, tokens / wall, tokens / cpu))
    return found


def main() -> None:
    """Measure everything and print it."""
    parser = make_parser(__doc__, quick="fewer and shorter rounds")
    parser.add_argument("--rank", nargs=4, help=argparse.SUPPRESS)  # what this script starts
    options = parser.parse_args()
    need("torch", "transformers", "peft", "trl", "accelerate")
    if options.rank:
        from ranks import run_rank

        run_dir, chunk_steps, folder, kinds = options.rank
        run_rank(
            RunDir(Path(run_dir)),
            int(chunk_steps),
            lambda parts: make_others(parts, Path(folder), kinds.split(",")),
        )
        return
    effort = pick(options, full=FULL, quick=QUICK, smoke=SMOKE)
    with tempfile.TemporaryDirectory(prefix="isles-finetune-") as name:
        folder = Path(name)
        prepare(folder, SMOKE_TOPICS if options.smoke else None)
        waste = padding_waste(folder)
        print_header()
        figures = {}
        for adapter in ("lora",) if options.smoke else ("none", "lora"):
            found = report(folder, adapter, effort, ("packed", "grouped"))
            kind = "full" if adapter == "none" else adapter
            figures[f"{kind}_over_hf"] = min(found.values())
        if not options.quick and not options.smoke:
            report(folder, "none", QUICK, ("trl", "packed"))
    print_figures({**figures, "padding_waste": waste})


if __name__ == "__main__":
    main()
