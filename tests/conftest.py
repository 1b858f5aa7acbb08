"""What all tests share: a tiny model, a little text, a cache of their own."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path

import pytest
import yaml

# Before anything imports the hub's library, which reads it once: no test reaches for a network.
os.environ["HF_HUB_OFFLINE"] = "1"
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # So a shell starts what is in the background; what tests interrupt must not inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
_IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ
if _IS_WORKER:
    # Tests run side by side: a thread per core in each of them would fight for the cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


# The modules that take longest, the longest first. Workers of pytest-xdist take whole modules in
# the order in which they stand: a long one at the end would leave all but one without work.
_LONGEST = (
    "test_slurm",
    "test_pbs",
    "test_elastic",
    "test_several_lab",
    "test_example_multicluster",
    "test_several",
    "test_fleet",
    "test_anywhere",
    "test_script",
    "test_ssh_faults",
    "test_ssh",
    "test_doc_blocks",
    "test_example_finetune",
    "test_example_slurm_ddp",
    "test_example_home_lab",
    "test_example_cluster_train",
    "test_check",
    "test_join",
    "test_train",
    "test_foreground",
    "test_strategies",
    "test_pipeline",
    "test_strategy_resume",
    "test_resume",
    "test_adapter",
    "test_deepspeed",
    "test_stream",
    "test_same_mathematics",
    "test_balance",
    "test_unshared",
    "test_outer_train",
    "test_optimizer",
    "test_outer_link",
    "test_outer_hivemind",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever takes a test cluster is marked `lab`; among several workers the longest go first."""
    for item in items:
        names = item.fixturenames if isinstance(item, pytest.Function) else ()
        if any(name == "lab" or name.endswith("_lab") for name in names):
            item.add_marker("lab")
        brief = item.get_closest_marker("brief")
        if brief is not None and case_of(item) not in brief.args:
            item.add_marker("long")
    if _IS_WORKER:
        items.sort(key=_turn)


def case_of(item: pytest.Item) -> str:
    """The id of a test's case, as it stands between brackets; empty: it has no cases."""
    return item.callspec.id if hasattr(item, "callspec") else ""


def _turn(item: pytest.Item) -> int:
    """Where a test's module stands among those that take long; the unit tests come last."""
    folder, name = item.path.parent.name, item.path.stem
    if folder == "unit":
        return len(_LONGEST) + 1
    return _LONGEST.index(name) if name in _LONGEST else len(_LONGEST)


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def tiny_model(tmp_path: Path) -> Path:
    """A Llama of 30 thousand parameters with dropout, as a config.json."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        "attention_dropout": 0.0,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def words(tmp_path: Path) -> Path:
    """A JSONL file of documents with very different lengths."""
    rng = random.Random(0)
    vocabulary = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 7))) for _ in range(200)]
    path = tmp_path / "words.jsonl"
    with path.open("w") as stream:
        for _ in range(300):
            text = " ".join(rng.choices(vocabulary, k=rng.randint(1, 60)))
            stream.write(json.dumps({"text": text}) + "\n")
    return path


@pytest.fixture
def run_file(tmp_path: Path, tiny_model: Path, words: Path) -> Path:
    """A run file that trains the tiny model on the words for 20 steps in fp32."""
    content = {
        "name": "tiny",
        "output_dir": str(tmp_path / "runs"),
        "model": {"name_or_path": str(tiny_model), "init": "scratch"},
        "tokenizer": {"train_vocab_size": 300},
        "data": {
            "sources": [{"path": str(words)}],
            "seq_length": 32,
            "packing": False,
            "validation_fraction": 0.1,
        },
        "training": {
            "max_steps": 20,
            "global_batch_size": 12,
            "micro_batch_size": "auto",
            "learning_rate": 0.001,
            "warmup_steps": 3,
            "precision": "32-true",
            "logging_steps": 5,
            "eval_steps": None,
        },
        "balance": "even",
        "checkpoint": {"every_steps": None, "every_minutes": None, "export_on_finish": False},
        "track": ["jsonl"],
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(content))
    return path
