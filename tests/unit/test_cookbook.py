"""The cookbook: each recipe loads, `isles init` writes it, and its page shows it and its plan.

ISLES_WRITE_GOLDEN=1 writes run files and plans into the pages: plan --gpus --nodes --link.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path

import pytest

from isles.cli import main
from isles.config.load import load_run_file
from isles.config.resolve import resolve
from isles.config.show import RECIPES, template
from isles.errors import ExitCode
from isles.facts.models import load_shape
from tests.documents import ROOT, blocks
from tests.each import each

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40_960,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
}


def qwen3(layers: int, hidden: int, inner: int, heads: int) -> dict[str, object]:
    """The config.json of a Qwen3 model, as far as its memory and speed depend on it."""
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": inner}
    return {**QWEN3, **sizes, "num_attention_heads": heads, "tie_word_embeddings": hidden < 4096}


MODELS = {
    "Qwen/Qwen3-8B": qwen3(36, 4096, 12_288, 32),
    "Qwen/Qwen3-4B": qwen3(36, 2560, 9_728, 32),
    "Qwen/Qwen3-1.7B": qwen3(28, 2048, 6_144, 16),
    "meta-llama/Llama-3.2-1B": load_shape("llama-1b"),
    "meta-llama/Llama-3.1-8B": load_shape("llama-8b") | {"max_position_embeddings": 131_072},
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder, with the config.json of each model of a recipe in Hugging Face's cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    for name, content in MODELS.items():
        cached = tmp_path / "hub" / f"models--{name.replace('/', '--')}"
        (cached / "refs").mkdir(parents=True)
        (cached / "refs" / "main").write_text("a")
        (cached / "snapshots" / "a").mkdir(parents=True)
        (cached / "snapshots" / "a" / "config.json").write_text(json.dumps(content))
    return tmp_path


def brief(printed: str) -> str:
    """What a page shows of a plan: whether it fits, the memory of each GPU, and the time."""
    lines = printed.splitlines()
    kept = [lines[0]]
    for line, before in zip(lines[1:], lines, strict=False):
        is_table = line.startswith("GiB") or re.match(r"\d", line)
        goes_on = line.startswith("     ") and before.startswith("Time ") and kept[-1] == before
        if is_table or line.startswith(("Time ", "Balance", "  sync")) or goes_on:
            kept.append(line)
    return "".join(f"{line}\n" for line in kept)


def pages() -> dict[str, Path]:
    """The pages of recipes, by name."""
    found = sorted((ROOT / "docs").glob("cookbook-*.md"))
    return {page.stem.removeprefix("cookbook-"): page for page in found}


def test_each_recipe_has_a_page_and_is_an_example() -> None:
    examples = {path.stem for path in (ROOT / "examples" / "cookbook").glob("*.yaml")}
    assert set(RECIPES) == examples == set(pages()) - {"serve"}
    index = (ROOT / "docs" / "cookbook.md").read_text(encoding="utf-8")
    assert set(pages()) == set(re.findall(r"\(cookbook-([\w-]+)\.md\)", index))


@each(*RECIPES)
def test_init_writes_a_recipe_that_loads(name: str, *, here: Path, capsys) -> None:
    assert main(["init", "--template", name, "--output", "mine.yaml", "--force"]) == ExitCode.OK
    assert Path("mine.yaml").read_text(encoding="utf-8") == template(name)
    for num_gpus in (0, 16):
        resolve(load_run_file(Path("mine.yaml")), num_gpus=num_gpus)
    assert main(["config", "show", "mine.yaml"]) == ExitCode.OK


@each(*RECIPES)
def test_a_page_shows_its_run_file_and_its_plan(name: str, *, here: Path, capsys) -> None:
    main(["init", "--template", name, "--force"])
    page = pages()[name]
    text = shown = page.read_text(encoding="utf-8")
    (first, *_) = [block for block in blocks(page) if block.language == "yaml"]
    text = text.replace(first.text, template(name))
    consoles = [block.text.partition("\n") for block in blocks(page) if block.language == "console"]
    for typed, _, printed in consoles:
        capsys.readouterr()
        main(shlex.split(typed.removeprefix("$ isles ")))
        text = text.replace(f"{typed}\n{printed}", f"{typed}\n{brief(capsys.readouterr().out)}")
    if os.environ.get("ISLES_WRITE_GOLDEN"):
        page.write_text(text, encoding="utf-8")
    else:
        assert text == shown
