"""What must stay the same while the house is rebuilt: resolved run files, and the order of data.

    python -m tests.recorded DIR        all of it as text, to compare two checkouts with diff -r
    python -m tests.recorded --write    tests/golden/recorded.json, after a difference that is meant

`tests/unit/test_recorded.py` compares hashes. The tokenizer is one of bytes and the text comes from
a fixed seed, so that they hold on any machine.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from isles.config.load import load_run_file
from isles.config.resolve import dump_resolved, resolve
from isles.config.sections.data import DataConfig
from isles.data.mix import build_datasets
from isles.data.stream import segments
from isles.data.tokens.tokenizer import load_tokenizer
from isles.errors import UserError
from tests.documents import blocks

ROOT = Path(__file__).parents[1]
HASHES = Path(__file__).with_name("golden") / "recorded.json"
GPUS = (0, 1, 4)
BATCH_ROWS = 4
SEED = 7

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

MIXTURE = {
    "sources": [
        {"path": "words.jsonl", "weight": 3},
        {"path": "chats.jsonl", "type": "chat", "weight": 1},
    ]
}


def _of(name: str, type: str = "text", **of_source: str) -> dict[str, Any]:
    return {"sources": [{"path": f"{name}.jsonl", "type": type, **of_source}]}


SETTINGS: dict[str, dict[str, Any]] = {
    "text": _of("words"),
    "text-isolated": _of("words") | {"isolate_documents": True},
    "text-whole": _of("words") | {"packing": False},
    "text-held-out": _of("words") | {"validation_fraction": 0.2},
    "chat": _of("chats", "chat"),
    "chat-whole": _of("chats", "chat") | {"packing": False},
    "chat-last": _of("chats", "chat", train_on="last"),
    "instruct-drop": _of("tasks", "instruct") | {"too_long": "drop"},
    "pairs": _of("pairs", "preference"),
    "tokens": _of("ids", "tokens"),
    "mixture": MIXTURE,
    "stream": MIXTURE | {"streaming": True},
}


def run_files() -> Iterator[tuple[str, str]]:
    """Every whole run file of the examples, the templates and the documentation."""
    for path in sorted(
        [*(ROOT / "examples").rglob("*.yaml"), *(ROOT / "src/isles/config/templates").iterdir()]
    ):
        if path.parent.name != "fleets" or path.name == "run.yaml":  # the others are no run files
            yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
    for page in sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")]):
        whole = [b for b in blocks(page) if b.language == "yaml" and "\nmodel:" in f"\n{b.text}"]
        for number, block in enumerate(whole, start=1):
            yield f"{page.relative_to(ROOT)}, run file {number}", block.text


def resolved_texts() -> Iterator[tuple[str, str]]:
    """What each run file comes to with so many GPUs: resolved.yaml, or what is wrong with it."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for name, text in run_files():
            Path("run.yaml").write_text(text, encoding="utf-8")
            for gpus in GPUS:
                try:
                    found = dump_resolved(resolve(load_run_file(Path("run.yaml")), num_gpus=gpus))
                except UserError as error:
                    found = str(error)
                yield f"{name} on {gpus} GPUs", found


def byte_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """A token for each byte, and ChatML's two words; kept in a folder, as a stream needs it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocab = {word: number for number, word in enumerate([*special, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    whole = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|endoftext|>", pad_token="<|endoftext|>"
    )
    whole.chat_template = CHATML
    whole.save_pretrained(folder)
    return load_tokenizer(str(folder))


def write_data(folder: Path) -> None:
    """Some hundred rows of every kind."""
    rng = random.Random(SEED)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 9))) for _ in range(300)]

    def said(most: int) -> str:
        return " ".join(rng.choices(words, k=rng.randint(1, most)))

    def talk() -> list[dict[str, str]]:
        roles = ("user", "assistant") * rng.randint(1, 3)
        return [{"role": role, "content": said(6)} for role in roles]

    def write(name: str, rows: list[dict[str, Any]]) -> None:
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / name).write_text(text, encoding="utf-8")

    write("words.jsonl", [{"text": said(80)} for _ in range(400)])
    write("chats.jsonl", [{"messages": talk()} for _ in range(400)])
    write("tasks.jsonl", [{"instruction": said(8), "output": said(12)} for _ in range(400)])
    pairs = [{"prompt": said(4), "chosen": said(6), "rejected": said(6)} for _ in range(400)]
    write("pairs.jsonl", pairs)
    ids = [{"input_ids": rng.choices(range(3, 250), k=rng.randint(4, 90))} for _ in range(400)]
    write("ids.jsonl", ids)


def batches(folder: Path, setting: str, count: int) -> Iterator[bytes]:
    """The first batches of a setting: inputs, targets and positions."""
    values = {"seq_length": 96, "validation_fraction": 0.0, **SETTINGS[setting]}
    sources = [s | {"path": str(folder / s["path"])} for s in values["sources"]]
    pairs = sources[0].get("type") == "preference"
    segments.SEGMENT_TOKENS = 20_000
    training, validation = build_datasets(
        DataConfig.model_validate({**values, "sources": sources}),
        byte_tokenizer(folder / "tokenizer"),
        folder / "cache",
        seed=SEED,
        vocab_size=512,
        progress=lambda _: None,
        pairs=pairs,
    )
    for number in range(count):
        ids = np.arange(number * BATCH_ROWS, (number + 1) * BATCH_ROWS)
        parts = [np.asarray(part) for part in training.rows(ids) if part is not None]
        training.num_targets(ids)  # of a stream, what lies before is let go
        yield b"".join(str((p.shape, p.dtype)).encode() + p.tobytes() for p in parts)
    if validation is not None:
        parts = [np.asarray(part) for part in validation.rows(np.arange(4)) if part is not None]
        yield b"".join(part.tobytes() for part in parts)
    training.close()


def data_digest(folder: Path, setting: str, count: int) -> str:
    """SHA-256 of the first batches of a setting."""
    digest = hashlib.sha256()
    for batch in batches(folder, setting, count):
        digest.update(batch)
    return digest.hexdigest()


def main(arguments: list[str]) -> None:
    """Write all that is recorded."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, help="where the texts are written")
    parser.add_argument("--write", action="store_true", help=f"write {HASHES.name}")
    options = parser.parse_args(arguments)
    texts = dict(resolved_texts())
    found = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}
    with tempfile.TemporaryDirectory() as name:
        write_data(Path(name))
        data = {setting: data_digest(Path(name), setting, 10_000) for setting in SETTINGS}
    text = json.dumps({"resolved": found, "data": data}, indent=1) + "\n"
    if options.write:
        HASHES.write_text(text, encoding="utf-8")
    if options.folder is None:
        sys.stdout.write(text)
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    (options.folder / HASHES.name).write_text(text, encoding="utf-8")
    for name, text in texts.items():
        path = options.folder / f"{name.replace('/', '_')}.txt"
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
