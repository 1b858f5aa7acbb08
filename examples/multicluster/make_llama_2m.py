"""Makes tests/models/llama-2m-fresh: a Llama of 2 million fresh weights with a tokenizer.

`python make_llama_2m.py [FOLDER]`. Needs no network: the shape comes with isles, the tokenizer is
trained on the language reference that every Python carries.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "tests" / "models" / "llama-2m-fresh"
_SHAPE = "llama-2m"


def main() -> None:
    """Make the folder that the command line names, unless it is there."""
    folder = Path(sys.argv[1]).expanduser() if len(sys.argv) > 1 else FOLDER
    if (folder / "config.json").is_file():
        print(f"{folder} is there already")
        return
    make(folder)
    print(f"{folder}: a model of 2.0 million fresh weights, and its tokenizer")


def make(folder: Path) -> None:
    """Write config.json, model.safetensors and the tokenizer's files."""
    from pydoc_data.topics import topics

    import torch
    from transformers.utils import logging as transformers_logging

    from isles.config.sections.model import ModelConfig
    from isles.data.tokens.tokenizer import train_tokenizer
    from isles.models.build import build_model
    from isles.train.logs import silence_libraries

    silence_libraries()
    transformers_logging.disable_progress_bar()
    config = ModelConfig(name_or_path=_SHAPE, init="scratch")
    model: Any = build_model(  # of transformers, which has no types
        config, device=torch.device("cpu"), dtype=torch.float32, seed=0, vocab_size=None
    )
    partial = folder.with_name(f".partial-{folder.name}")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    documents = [topics[name] for name in sorted(topics)]
    train_tokenizer(documents, model.config.vocab_size).save_pretrained(partial)
    # Git then leaves the folder alone, wherever it is made.
    (partial / ".gitignore").write_text("*\n")
    partial.replace(folder)


if __name__ == "__main__":
    main()
