"""Run files from the disk: every fault at once, each with its place and its fix."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from isles.config import keys
from isles.config.issues import alias_keys, alias_words, aliases, unknown_key
from isles.config.load import Loaded, load_run_file
from isles.errors import ConfigError, ConfigErrors
from tests.each import each

GOOD = """\
model:
  name_or_path: llama-2m
  init: scratch
tokenizer: {train_vocab_size: 2048}
data:
  sources:
    - path: python-docs
  seq_length: 256
training:
  max_steps: 100
  learning_rate: 4e-4
  max_time: 23h30m
"""


def load(tmp_path: Path, text: str, *overrides: str) -> Loaded:
    file = tmp_path / "run.yaml"
    file.write_text(text, encoding="utf-8")
    return load_run_file(file, overrides)


def issues(tmp_path: Path, text: str, *overrides: str) -> list[str]:
    """Every fault as `run.yaml:3 key | what | fix`."""
    with pytest.raises((ConfigError, ConfigErrors)) as raised:
        load(tmp_path, text, *overrides)
    error = raised.value
    found: Sequence[ConfigError] = error.issues if isinstance(error, ConfigErrors) else [error]  # type: ignore[list-item]
    assert "Input should" not in str(error)
    return [f"{f.where} | {f.what} | {f.fix}".replace(f"{tmp_path}/", "") for f in found]


def test_a_good_file_loads_with_its_origins(tmp_path: Path) -> None:
    loaded = load(tmp_path, GOOD, "training.max_steps=5")
    assert loaded.config.training.learning_rate == 4e-4
    assert loaded.config.training.max_time == 84_600.0
    assert loaded.config.training.max_steps == 5
    assert loaded.text == GOOD
    assert loaded.origins["training.learning_rate"] == f"{tmp_path}/run.yaml:11"
    assert loaded.origins["data.sources.0.path"] == f"{tmp_path}/run.yaml:7"
    assert loaded.origins["training.max_steps"] == "command line"
    assert "seed" not in loaded.origins


STEPS = "  max_steps: 100"


@each(
    ("old", "new", "place", "what", "fix"),
    [
        (STEPS, '  max_steps: "8"', "10 training.max_steps", '"8" (text)', "remove the quotes"),
        (STEPS, "  max_steps: 1e6", "10 training.max_steps", "1000000.0", "max_steps: 1000000"),
        (STEPS, "  max_steps: 1_000", "10 training.max_steps", '"1_000"', "max_steps: 1000"),
        (STEPS, "  max_steps: 0", "10 training.max_steps", "0: too small", "at least 1"),
        (STEPS, "  max_steps: true", "10 training.max_steps", "true, not a whole", "whole number"),
        (STEPS, "  max_step: 100", "10 training.max_step", "unknown key max_step", "max_steps?"),
        (
            STEPS,
            "  max-steps: 100",
            "10 training.max-steps",
            "unknown key",
            "write it as max_steps",
        ),
        (STEPS, f"{STEPS}\n  seed: 1", "11 training.seed", "unknown key", "at the top"),
        (
            STEPS,
            f"{STEPS}\n  zzzz: 1",
            "11 training.zzzz",
            "unknown key zzzz (value 1)",
            "max_time",
        ),
        (STEPS, f"{STEPS}\n  bf16: true", "11 training.bf16", "from HF Trainer", "precision"),
        (STEPS, f"{STEPS}\n  precision: bf16", "11 training.precision", '"bf16"', "bf16-mixed?"),
        (STEPS, f"{STEPS}\n  eval_steps: inf", "11 training.eval_steps", '"inf"', "null"),
        (STEPS, f"{STEPS}\n  torch_compile: yes", "11 training.torch_compile", '"yes"', ": true"),
        (STEPS, f"{STEPS}\n  global_batch_size:", "11 training.global", "empty (null)", "default"),
        ("23h30m", "30", "12 training.max_time", "30, without a unit", "30s, 30m or 30h"),
        ("23h30m", "soon", "12 training.max_time", '"soon", not a time', "23h30m"),
        ("23h30m", "0s", "12 training.max_time", '"0s": too small', "a time"),
        ("  init: scratch", "  init: Scratch", "3 model.init", '"Scratch"', "did you mean scratch"),
        ("  seq_length: 256", "  cache_dir: 5", "8 data.cache_dir", "5, not text", '"5"'),
        ("  seq_length: 256", "  seq_length: 99999999", "8 data.seq", "too large", "16777216"),
        ("    - path: python-docs", "    []", "6 data.sources", "an empty list", "a list"),
        ("    - path: python-docs", "    - docs", "7 data.sources.0", '"docs"', "{path: docs}"),
        ("\n    - path: python-docs", " docs", "6 data.sources", "not a list", "[{path: docs}]"),
        ("model:", "name: my run\nmodel:", "1 name", '"my run"', "such as my-run"),
        ("model:", "clusters: [{workdir: 3}]\nmodel:", "1 clusters.0.workdir", "3, not", ': "3"'),
        ("model:", 'clusters: [{workdir: "a\\nb"}]\nmodel:', "1 clusters.0", "not one line", "one"),
        ("model:", "strategy: fsdp\nmodel:", "1 strategy", "not a section", "{kind: fsdp}"),
        ("model:", "strategy: {kind: zero}\nmodel:", "1 strategy.kind", "zero", "deepspeed"),
        ("model:", "strategy: {}\nmodel:", "1 strategy", "does not say its kind", "auto, ddp"),
        ("model:", "track: jsonl\nmodel:", "1 track", "not a list", "track: [jsonl]"),
        ("model:", "clusters: []\nmodel:", "1 clusters", "an empty list", "a list"),
        (
            "model:",
            "lerning_rate: 1\nmodel:",
            "1 lerning_rate",
            "unknown",
            "training.learning_rate",
        ),
        ("model:", "training.seed: 1\nmodel:", "1 training.seed", "unknown", "at the top"),
        ("model:", "base-model: x\nmodel:", "1 base-model", "from axolotl", "model.name_or_path"),
        ("model:", "adapter: lora\nmodel:", "1 adapter", "not a section", "{type: lora}"),
        (
            "model:\n  name_or_path: llama-2m\n  init: scratch\n",
            "",
            "1 model",
            "missing",
            "name_or",
        ),
        ("  name_or_path: llama-2m\n", "", "1 model.name_or_path", "missing", "text"),
        ("  sources:\n    - path: python-docs\n", "", "5 data.sources", "is missing", "a list"),
    ],
)
def test_each_fault_names_its_place_value_and_fix(
    tmp_path: Path, old: str, new: str, *, place: str, what: str, fix: str
) -> None:
    assert old in GOOD
    found = issues(tmp_path, GOOD.replace(old, new))
    assert len(found) == 1, found
    assert found[0].startswith(f"run.yaml:{place}")
    assert what in found[0].split(" | ")[1]
    assert fix in found[0].split(" | ")[2]


def test_all_faults_are_reported_at_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    text = (
        "lr: 1\nmodel: {name_or_path: llama-2m, init: maybe, init: scratch}\n"
        "data: {sources: [{path: !x a}], seq_length: 1}\ntraining: {max_steps: a, eval_step: 5}\n"
    )
    found = issues(tmp_path, text, "training.keep=3", "nonsense")
    assert [line.split(" | ")[0] for line in found] == [
        "run.yaml:1 lr",
        "run.yaml:2 model.init",
        "run.yaml:3 data.sources.0.path",
        "run.yaml:3 data.seq_length",
        "run.yaml:4 training.max_steps",
        "run.yaml:4 training.eval_step",
        "command line",
        "command line training.keep=3",
    ]


def test_one_mistake_is_one_fault(tmp_path: Path) -> None:
    text = GOOD.replace("  name_or_path", "  base_model").replace("max_steps", "maxsteps")
    text = text.replace("  max_time: 23h30m\n", "")
    assert [line.split(" | ")[0] for line in issues(tmp_path, text)] == [
        "run.yaml:2 model.base_model",
        "run.yaml:10 training.maxsteps",
    ]


def test_rules_are_checked_beside_unknown_keys(tmp_path: Path) -> None:
    found = issues(tmp_path, f"{GOOD}  warmup_steps: 200\n  zzz: 1\n")
    assert [line.split(" | ")[0] for line in found] == [
        "run.yaml:13 training.warmup_steps",
        "run.yaml:14 training.zzz",
    ]


def test_sections_of_other_tools_are_taken_apart(tmp_path: Path) -> None:
    text = f"optimizer: {{name: AdamW, lr: 1e-3, eps: 1e-8}}\nhv: {{local_steps: 5}}\n{GOOD}"
    found = "\n".join(issues(tmp_path, text))
    for part in (
        "optimizer.lr | unknown key lr, a name from torchtitan (value 0.001) | here it is called"
        " training.learning_rate",
        "optimizer.eps | ",
        "training.adam_epsilon",
        "hv.local_steps | unknown key local_steps, a name from OpenDiLoCo (value 5) | here it is"
        " called outer.sync_every",
    ):
        assert part in found


@each(
    ("override", "key", "value"),
    [
        ("training.max_steps=5", "training.max_steps", 5),
        ("--training.max-steps=5", "training.max_steps", 5),
        ("training.learning_rate=1e-3", "training.learning_rate", 1e-3),
        ("name=on", "name", "on"),
        ("track=[jsonl]", "track", ("jsonl",)),
        ("clusters.0.gpus_per_node=2", "clusters.0.gpus_per_node", 2),
        ("clusters.0.gpus-per-node=auto", "clusters.0.gpus_per_node", "auto"),
        ("data.sources.0.path=a=b", "data.sources.0.path", "a=b"),
        ("data.sources.1.path=b", "data.sources.1.path", "b"),
        ("checkpoint={keep: 7}", "checkpoint.keep", 7),
        ("training.max_time=", "training.max_time", None),
        ("model.name_or_path=./Llama-3.2-1B", "model.name_or_path", "./Llama-3.2-1B"),
    ],
)
def test_overrides_win_over_the_file(
    tmp_path: Path, override: str, key: str, value: object
) -> None:
    loaded = load(tmp_path, GOOD, override)
    node: object = loaded.config
    for part in key.split("."):
        node = node[int(part)] if part.isdigit() else getattr(node, part)  # type: ignore[index]
    assert node == value
    assert loaded.origins[key] == "command line"


def test_the_last_of_two_overrides_counts(tmp_path: Path) -> None:
    assert load(tmp_path, GOOD, "seed=1", "seed=2").config.seed == 2


@each(
    ("override", "place", "words"),
    [
        ("seed", "command line", "not of the form key=value"),
        ("a..b=5", "command line", "not of the form key=value"),
        ("seed=[", "command line seed=[", "value is missing"),
        ("seed=!x 1", "command line seed=!x 1", "tag !x"),
        ("seed=x", "command line seed=x", 'seed is "x"'),
        ("training.max_time.x=1", "command line training.max_time.x=1", "a single value"),
        ("data.sources.path=x", "command line data.sources.path=x", "is a list"),
        ("data.sources.7.path=x", "command line data.sources.7.path=x", "no item 6"),
        ("training.0=1", "command line training.0=1", "is a section"),
        ("training.lr=1", "command line training.lr=1", "unknown key lr, a name from"),
        ("clusters.0.gpus_per_node=0", "command line clusters.0.gpus_per_node=0", "too small"),
        ("training.warmup_steps=500", "command line training.warmup_steps=500", "leaves no step"),
        ("training={max_steps: x}", "command line training={max_steps: x}", 'max_steps is "x"'),
        ("name=\ud800", "command line", "U+D800"),
    ],
)
def test_a_wrong_override_is_named(tmp_path: Path, override: str, place: str, words: str) -> None:
    found = issues(tmp_path, GOOD, override)
    assert len(found) == 1, found
    assert found[0].startswith(f"{place}")
    assert words in found[0]


@each(
    ("content", "place", "words"),
    [
        (b"a: 1\nb: \xff\n", "run.yaml:2", "0xff is not UTF-8"),
        (b"\xff\xfea\x00", "run.yaml:1", "not UTF-8"),
        (b"#" * (2 << 20), "run.yaml:1", "larger than 1 MiB"),
        (b"\x00\x01\x02", "run.yaml:1:1", "U+0000"),
    ],
)
def test_what_is_no_text_is_refused(tmp_path: Path, content: bytes, place: str, words: str) -> None:
    (tmp_path / "run.yaml").write_bytes(content)
    with pytest.raises(ConfigError) as raised:
        load_run_file(tmp_path / "run.yaml")
    assert raised.value.where.removeprefix(f"{tmp_path}/").startswith(place)
    assert words in raised.value.what


def test_a_byte_order_mark_is_no_fault(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_bytes(b"\xef\xbb\xbf" + GOOD.encode())
    assert load_run_file(tmp_path / "run.yaml").config.seed == 0


def test_a_path_that_is_no_file_is_named(tmp_path: Path) -> None:
    for path, words in (
        (tmp_path / "nowhere.yaml", "no such file"),
        (tmp_path, "a folder"),
        (Path("a\0b"), "cannot be read"),
        (Path("x" * 5000), "cannot be read"),
        (tmp_path / "run.yaml" / "x", "cannot be read"),
    ):
        (tmp_path / "run.yaml").write_text(GOOD, encoding="utf-8")
        with pytest.raises(ConfigError) as raised:
            load_run_file(path)
        assert raised.value.where == str(path)
        assert words in raised.value.what


def test_every_name_of_another_tool_leads_to_a_key_that_exists() -> None:
    known = {".".join(str(part) for part in path) for path in keys.all_paths()}
    names = alias_keys()
    assert len(names) >= 120
    assert {f.target for f in names.values() if f.target} <= known
    assert set(aliases()["values"]) <= known
    for key in aliases()["values"]:
        node = keys.schema_at(tuple(int(p) if p.isdigit() else p for p in key.split(".")))
        assert node is not None
        words = alias_words("values", key)
        assert set(words.values()) <= set(keys.literals(node))
        assert all(word == word.lower() for word in words), "they are compared in lower case"


def test_no_key_of_isles_is_taken_for_another_tools() -> None:
    ours = {str(path[-1]) for path in keys.all_paths()}
    # In the section outer these are of the outer optimizer; elsewhere other tools have them.
    assert ours & set(alias_keys()) == {"lr", "max_norm"}


def test_every_name_of_another_tool_is_recognised_in_any_spelling() -> None:
    for name, alias in alias_keys().items():
        for spelling in (name, name.upper(), name.replace("_", "-")):
            (issue,) = unknown_key(tuple(spelling.split(".")), 1)
            assert f"a name from {alias.tools[0]}" in issue.what
            assert (alias.target or alias.note) in issue.fix
