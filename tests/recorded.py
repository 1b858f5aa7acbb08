"""What must stay the same while the house is rebuilt: resolved run files, and the order of data.

    python -m tests.recorded DIR        all of it as text, to compare two checkouts with diff -r
    python -m tests.recorded --write    tests/golden/recorded.json, after a difference that is meant

`tests/unit/test_recorded.py` compares hashes. The tokenizer is one of bytes and the text comes from
a fixed seed, so that they hold on any machine.
"""

from __future__ import annotations

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
from tests.data import quiet, write_rows
from tests.documents import PAGES, ROOT, blocks

HASHES = Path(__file__).with_name("golden") / "recorded.json"
SEED = 7

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

WORDS = {"path": "words.jsonl", "weight": 3}
CHATS = {"path": "chats.jsonl", "type": "chat", "weight": 1}
MIXTURE = {"sources": [WORDS, CHATS]}


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
    templates = sorted((ROOT / "src/isles/config/templates").iterdir())
    for path in (*sorted((ROOT / "examples").rglob("*.yaml")), *templates):
        if path.parent.name != "fleets" or path.name == "run.yaml":  # the others are no run files
            yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
    for page in PAGES:
        whole = [b for b in blocks(page) if b.language == "yaml" and "\nmodel:" in f"\n{b.text}"]
        for number, block in enumerate(whole, start=1):
            yield f"{page.relative_to(ROOT)}, run file {number}", block.text


def resolved_texts() -> Iterator[tuple[str, str]]:
    """What each run file comes to with so many GPUs: resolved.yaml, or what is wrong with it."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for name, text in run_files():
            Path("run.yaml").write_text(text, encoding="utf-8")
            for gpus in (0, 1, 4):
                try:
                    found = dump_resolved(resolve(load_run_file(Path("run.yaml")), num_gpus=gpus))
                except UserError as error:
                    found = str(error)
                yield f"{name} on {gpus} GPUs", found


def byte_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """A token for each byte, and ChatML's two words; kept in a folder, as a stream needs it."""
    end, *turns = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    words = [end, *turns, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([end, *turns])
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, pad_token=end)
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

    kinds = {
        "words": lambda: {"text": said(80)},
        "chats": lambda: {"messages": talk()},
        "tasks": lambda: {"instruction": said(8), "output": said(12)},
        "pairs": lambda: {"prompt": said(4), "chosen": said(6), "rejected": said(6)},
        "ids": lambda: {"input_ids": rng.choices(range(3, 250), k=rng.randint(4, 90))},
    }
    for name, row in kinds.items():
        write_rows(folder / f"{name}.jsonl", [row() for _ in range(400)])


def data_digest(folder: Path, setting: str) -> str:
    """SHA-256 of the first ten thousand batches of a setting: inputs, targets and positions."""
    values = {"seq_length": 96, "validation_fraction": 0.0, **SETTINGS[setting]}
    sources = [s | {"path": str(folder / s["path"])} for s in values["sources"]]
    segments.SEGMENT_TOKENS = 20_000
    training, validation = build_datasets(
        DataConfig.model_validate({**values, "sources": sources}),
        byte_tokenizer(folder / "tokenizer"),
        folder / "cache",
        seed=SEED,
        vocab_size=512,
        progress=quiet,
        pairs=sources[0].get("type") == "preference",
    )
    digest = hashlib.sha256()
    for first in range(0, 40_000, 4):
        ids = np.arange(first, first + 4)
        parts = [np.asarray(part) for part in training.rows(ids) if part is not None]
        training.num_targets(ids)  # of a stream, what lies before is let go
        digest.update(b"".join(str((p.shape, p.dtype)).encode() + p.tobytes() for p in parts))
    if validation is not None:
        parts = [np.asarray(part) for part in validation.rows(np.arange(4)) if part is not None]
        digest.update(b"".join(part.tobytes() for part in parts))
    training.close()
    return digest.hexdigest()


def resolved_digests(texts: dict[str, str]) -> dict[str, str]:
    """SHA-256 of each text."""
    return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}


def main(target: str) -> None:
    """Write all that is recorded, into a folder or, for --write, where it is compared."""
    texts = dict(resolved_texts())
    with tempfile.TemporaryDirectory() as name:
        write_data(Path(name))
        data = {setting: data_digest(Path(name), setting) for setting in SETTINGS}
    text = json.dumps({"resolved": resolved_digests(texts), "data": data}, indent=1) + "\n"
    if target == "--write":
        HASHES.write_text(text, encoding="utf-8")
        return
    folder = Path(target)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / HASHES.name).write_text(text, encoding="utf-8")
    for name, text in texts.items():
        (folder / f"{name.replace('/', '_')}.txt").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
