"""Run files from the disk: every fault at once, each with its place and its fix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from isles.config import keys
from isles.config.issues import alias_keys, alias_words, aliases
from isles.config.load import load_run_file
from isles.errors import ConfigError
from tests.each import each
from tests.run_files import issues, load

GOOD = """\
model:
  name_or_path: llama-2m
  init: scratch
tokenizer: {train_vocab_size: 2048}
data:
  sources: [{path: python-docs}]
  seq_length: 256
training:
  max_steps: 100
  learning_rate: 4e-4
  max_time: 23h30m
"""
END = GOOD.count("\n") + 1


def places(tmp_path: Path, text: str, *overrides: str) -> list[str]:
    return [line.partition(" | ")[0] for line in issues(tmp_path, text, *overrides)]


@each(
    # Instead of a line of the file.
    (9, '  max_steps: "8"', "training.max_steps", '"8" (text)', "remove the quotes"),
    (9, "  max_steps: 1e6", "training.max_steps", "1000000.0", "max_steps: 1000000"),
    (9, "  max_steps: 1_000", "training.max_steps", '"1_000"', "max_steps: 1000"),
    (9, "  max_steps: 0", "training.max_steps", "0: too small", "at least 1"),
    (9, "  max_step: 100", "training.max_step", "unknown key max_step", "max_steps?"),
    (9, "  max-steps: 100", "training.max-steps", "unknown key", "write it as max_steps"),
    (11, "  max_time: 30", "training.max_time", "30, without a unit", "30s, 30m or 30h"),
    (11, "  max_time: soon", "training.max_time", '"soon", not a valid time', "23h30m"),
    (3, "  init: Scratch", "model.init", '"Scratch"', "did you mean scratch"),
    (7, "  cache_dir: 5", "data.cache_dir", "5, not text", '"5"'),
    (6, "  sources: []", "data.sources", "an empty list", "a list"),
    (6, "  sources: [docs]", "data.sources.0", '"docs"', "{path: docs}"),
    # Below the last one, in `training`.
    (END, "  seed: 1", "training.seed", "unknown key", "at the top"),
    (END, "  bf16: true", "training.bf16", "from HF Trainer", "precision"),
    (END, "  precision: bf16", "training.precision", '"bf16"', "bf16-mixed?"),
    (END, "  eval_steps: inf", "training.eval_steps", '"inf"', "null"),
    (END, "  torch_compile: yes", "training.torch_compile", '"yes"', "use true"),
    (END, "  global_batch_size:", "training.global_batch_size", "empty (null)", "default"),
    # Above the first one.
    (0, "name: my run", "name", '"my run"', "such as my-run"),
    (0, 'clusters: [{workdir: "a\\nb"}]', "clusters.0.workdir", "not one line", "one"),
    (0, "strategy: fsdp", "strategy", "not a section", "{kind: fsdp}"),
    (0, "strategy: {kind: zero}", "strategy.kind", "zero", "deepspeed"),
    (0, "strategy: {}", "strategy", "has no kind", "auto, ddp"),
    (0, "track: jsonl", "track", "not a list", "track: [jsonl]"),
    (0, "lerning_rate: 1", "lerning_rate", "unknown", "training.learning_rate"),
    (0, "training.seed: 1", "training.seed", "unknown", "at the top"),
    (0, "base-model: x", "base-model", "from axolotl", "model.name_or_path"),
)
def test_each_fault_names_its_place_value_and_fix(line, text, key, what, fix, *, tmp_path):
    lines = ["", *GOOD.splitlines(), ""]
    lines[line] = text
    (found,) = issues(tmp_path, "\n".join(lines if line == 0 else lines[1:]))
    place, said, how = found.split(" | ")
    assert place == f"run.yaml:{max(line, 1)} {key}"
    assert what in said and fix in how


def test_a_renamed_key_is_refused_with_its_new_name(tmp_path: Path) -> None:
    launcher = "clusters.0.launcher"
    in_file = f"clusters: [{{launcher: {{kind: kubernetes, flavour: job}}}}]\n{GOOD}"
    typed = (f"{launcher}.kind=kubernetes", f"{launcher}.flavour=job")
    for found in (issues(tmp_path, in_file), issues(tmp_path, GOOD, *typed)):
        (line,) = (line for line in found if "unknown key" in line)
        assert line.endswith(' key flavour (value "job") | flavour is called flavor')


def test_all_faults_are_reported_at_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    text = (
        "lr: 1\nmodel: {name_or_path: llama-2m, init: maybe, init: scratch}\n"
        "data: {sources: [{path: !x a}], seq_length: 1}\ntraining: {max_steps: a, eval_step: 5}\n"
    )
    assert places(tmp_path, text, "training.keep=3", "nonsense") == [
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
    """A key with a wrong name is not missing as well."""
    text = GOOD.replace("  name_or_path", "  base_model").replace("max_steps", "maxsteps")
    text = text.replace("  max_time: 23h30m\n", "")
    found = places(tmp_path, text)
    assert found == ["run.yaml:2 model.base_model", "run.yaml:9 training.maxsteps"]
    (missing,) = issues(tmp_path, GOOD.replace("  name_or_path: llama-2m\n", ""))
    assert missing.startswith("run.yaml:1 model.name_or_path | ") and "missing" in missing
    # Rules are checked beside it, and names of the user's own, such as hosts, are no unknown keys.
    found = places(tmp_path, f"{GOOD}  warmup_steps: 200\n  zzz: 1\nbalance: {{a: 1}}\n")
    assert found == ["run.yaml:12 training.warmup_steps", "run.yaml:13 training.zzz"]


def test_sections_of_other_tools_are_taken_apart(tmp_path: Path) -> None:
    found = issues(tmp_path, f"optimizer: {{name: AdamW, lr: 1e-3, eps: 1e-8}}\n{GOOD}")
    lr = "lr, a name from torchtitan (value 0.001) | isles calls it training.learning_rate"
    assert any(f"optimizer.lr | unknown key {lr}" in line for line in found)
    assert any("optimizer.eps | " in line and "training.adam_epsilon" in line for line in found)


def test_overrides_win_over_the_file(tmp_path):
    given = {
        "--training.max-steps=5": ("training.max_steps", 5),
        "training.learning_rate=1e-3": ("training.learning_rate", 1e-3),
        "name=on": ("name", "on"),
        "clusters.0.gpus-per-node=auto": ("clusters.0.gpus_per_node", "auto"),
        "data.sources.0.path=a=b": ("data.sources.0.path", "a=b"),
        "data.sources.1.path=b": ("data.sources.1.path", "b"),
        "clusters[0].max_restarts=2": ("clusters.0.max_restarts", 2),
        "data.sources[2].path=c": ("data.sources.2.path", "c"),
        "checkpoint={keep: 7}": ("checkpoint.keep", 7),
        "training.max_time=": ("training.max_time", None),
    }
    loaded = load(tmp_path, GOOD, *given)
    for key, value in given.values():
        node: Any = loaded.config
        for part in key.split("."):
            node = node[int(part)] if part.isdigit() else getattr(node, part)
        assert (node, loaded.origins[key]) == (value, "command line"), key


def test_a_typed_length_replaces_that_of_the_file(tmp_path):
    """Two lengths in one place are still refused."""
    epochs = GOOD.replace("max_steps: 100", "num_train_epochs: 3")
    short = load(tmp_path, epochs, "training.max_steps=20").config.training
    assert (short.max_steps, short.num_train_epochs) == (20, None)
    long = load(tmp_path, GOOD, "training.num_train_epochs=2").config.training
    assert (long.max_steps, long.num_train_epochs) == (None, 2)
    same = load(tmp_path, GOOD, "training.num_train_epochs=null").config.training
    assert same.max_steps == 100
    both = ("training.max_steps=5", "training.num_train_epochs=2")
    (issue,) = issues(tmp_path, epochs, *both)
    assert "both set the length of the run" in issue
    (issue,) = issues(tmp_path, epochs.replace("  max_time", "  max_steps: 5\n  max_time"))
    assert "both set the length of the run" in issue


def test_variables_are_text_as_it_is_typed(tmp_path: Path) -> None:
    typed = ("8", "true", "TRUE", "1.5", "0x7fff", "010", "1e5", ".inf", "-0", "1e999", "7" * 50)
    names = [f"V{number}" for number in range(len(typed))]
    section = ", ".join(f"{name}: {text}" for name, text in zip(names, typed, strict=True))
    expected = dict(zip(names, typed, strict=True))
    variables = "clusters.0.environment.variables"
    file = f"{GOOD}clusters: [{{environment: {{variables: {{{section}, Q: '010'}}}}}}]\n"
    base = f"{GOOD}clusters: [{{environment: {{variables: {{Q: '010'}}}}}}]\n"
    for text, overrides in (
        (file, []),
        (base, [f"{variables}.{name}={text}" for name, text in expected.items()]),
        (base, [f"{variables}={{{section}, Q: '010'}}"]),
        (base, [f"clusters.0.environment={{variables: {{{section}, Q: '010'}}}}"]),
    ):
        (cluster,) = load(tmp_path, text, *overrides).config.clusters
        assert cluster.environment.variables == {**expected, "Q": "010"}, overrides
    for value, words in {
        "{E: null}": f'{variables}.E | E is empty (null) | write text, or E: ""',
        "{E: }": f"{variables}.E | E is empty (null)",
        "{E: [8]}": f"{variables}.E | E is [8], not text",
        "{E: {a: 8}}": f"{variables}.E | E is a section, not text",
        "{a-b: x}": f'{variables}.a-b | "a-b" is not a valid name in {variables}',
        "8": f"{variables} | variables is 8, not a section",
    }.items():
        bad = f"{GOOD}clusters: [{{environment: {{variables: {value}}}}}]\n"
        (found,) = issues(tmp_path, bad)
        assert words in found and found.startswith(f"run.yaml:{END} "), found


def test_a_section_on_the_command_line_replaces_the_whole_one(tmp_path):
    loaded = load(tmp_path, GOOD, "training={max_steps: 5}")
    assert loaded.config.training.max_time is None
    assert "training.max_time" not in loaded.origins
    # They are applied in their order; and a host of balance keeps its name, dots and all.
    config = load(tmp_path, GOOD, "seed=1", "balance.a-box.local=3", "seed=2", "balance.0=2").config
    assert (config.seed, config.balance) == (2, {"a-box.local": 3, "0": 2})


@each(
    ("seed", "not of the form key=value"),
    ("seed=[", "value is missing"),
    ("seed=!x 1", "tag !x"),
    ("training.max_time.x=1", "a single value"),
    ("data.sources.path=x", "is a list"),
    ("data.sources.7.path=x", "no item 6"),
    ("training.0=1", "is a section"),
    ("training.warmup_steps=500", "leaves no step"),
    ("name=\ud800", "U+D800"),
)
def test_a_wrong_override_is_named(override: str, words: str, *, tmp_path):
    (found,) = issues(tmp_path, GOOD, override)
    assert found.startswith("command line")
    assert words in found


@each(
    (b"a: 1\nb: \xff\n", "run.yaml:2", "0xff is not UTF-8"),
    (b"\xff\xfea\x00", "run.yaml:1", "not UTF-8"),
    (b"#" * (2 << 20), "run.yaml:1", "larger than 1 MiB"),
    (b"\x00\x01\x02", "run.yaml:1:1", "U+0000"),
)
def test_what_is_no_text_is_refused(content: bytes, place: str, words: str, *, tmp_path):
    (tmp_path / "run.yaml").write_bytes(content)
    with pytest.raises(ConfigError) as raised:
        load_run_file(tmp_path / "run.yaml")
    assert raised.value.where.removeprefix(f"{tmp_path}/").startswith(place)
    assert words in raised.value.what
    # A byte order mark is no fault.
    (tmp_path / "run.yaml").write_bytes(b"\xef\xbb\xbf" + GOOD.encode())
    assert load_run_file(tmp_path / "run.yaml").config.seed == 0


def test_a_path_that_is_no_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(GOOD, encoding="utf-8")
    for path, words in (
        (tmp_path / "nowhere.yaml", "does not exist"),
        (tmp_path, "a folder"),
        (Path("a\0b"), "cannot be read"),
        (Path("x" * 5000), "cannot be read"),
        (tmp_path / "run.yaml" / "x", "cannot be read"),
    ):
        with pytest.raises(ConfigError) as raised:
            load_run_file(path)
        assert raised.value.where == str(path)
        assert words in raised.value.what


def test_the_names_of_other_tools_lead_to_keys_and_values_that_exist() -> None:
    known = {".".join(str(part) for part in path) for path in keys.all_paths()}
    names = alias_keys()
    assert len(names) >= 120
    assert {alias.target for alias in names.values() if alias.target} <= known
    # In the section outer these are of the outer optimizer; elsewhere other tools have them.
    assert {key.rpartition(".")[2] for key in known} & set(names) == {"lr", "max_norm"}
    for key in aliases()["values"]:
        node = keys.schema_at(tuple(int(p) if p.isdigit() else p for p in key.split(".")))
        assert node is not None, key
        words = alias_words("values", key)
        assert set(words.values()) <= set(keys.literals(node))
        assert all(word == word.lower() for word in words), "they are compared in lower case"
