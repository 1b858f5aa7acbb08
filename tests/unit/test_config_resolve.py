"""What follows from a run file, written down and read back; and what a resume may change."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import yaml

from isles.config.load import load_run_file
from isles.config.resolve import Resolved, digest, dump_resolved, leaves, load_resolved, resolve
from isles.config.resume import Change, changed_mathematics
from isles.config.show import TEMPLATES, json_schema, show, template
from isles.errors import ConfigError
from isles.facts.units import parse_duration_s, write_duration
from tests.each import each

GOOD = """\
model: {name_or_path: llama-2m, init: scratch}
tokenizer: {train_vocab_size: 2048}
data:
  sources:
    - {path: "a b.jsonl", weight: 0.1}
    - path: "on"
      weight: 3
training:
  max_steps: 100
  learning_rate: 3.3333333333333335e-05
  max_time: 23h30m
  global_batch_size: 48
"""


def settle(
    tmp_path: Path, *overrides: str, num_gpus: int = 0, world_size: int | None = None
) -> Resolved:
    file = tmp_path / "run.yaml"
    file.write_text(GOOD, encoding="utf-8")
    return resolve(load_run_file(file, overrides), num_gpus=num_gpus, world_size=world_size)


@each(
    ("overrides", "num_gpus", "given", "ranks", "device"),
    [
        ((), 0, None, 1, "cpu"),
        ((), 4, None, 4, "cuda"),
        (("clusters.0.gpus_per_node=2",), 0, None, 2, "cpu"),
        (("clusters.0.gpus_per_node=2",), 4, None, 2, "cuda"),
        (("clusters.0.gpus_per_node=2",), 4, 3, 3, "cuda"),
        ((), 0, 6, 6, "cpu"),
    ],
)
def test_ranks_follow_from_the_file_and_the_machine(
    tmp_path: Path,
    overrides: tuple[str, ...],
    num_gpus: int,
    *,
    given: int | None,
    ranks: int,
    device: str,
) -> None:
    resolved = settle(tmp_path, *overrides, num_gpus=num_gpus, world_size=given)
    assert (resolved.world_size, resolved.device) == (ranks, device)
    assert resolved.rows_per_rank == 48 // ranks
    assert resolved.derived["strategy"] == "auto"
    assert "grad_accum_steps" not in resolved.derived


def test_accumulation_follows_from_the_batch(tmp_path: Path) -> None:
    resolved = settle(tmp_path, "training.micro_batch_size=4", world_size=3)
    assert resolved.derived["grad_accum_steps"] == 4


@each(
    ("overrides", "ranks", "what", "fix"),
    [
        (
            ("training.global_batch_size=504", "training.micro_batch_size=8", "balance=even"),
            24,
            "global_batch_size 504 is not a multiple of micro_batch_size 8 x 24 ranks = 192",
            "use 384 or 576, or balance: auto",
        ),
        (
            (),
            64,
            "global_batch_size 48 is less than one sequence for each of 64 ranks",
            "use 64 or more",
        ),
    ],
)
def test_rows_that_do_not_divide_are_refused(
    tmp_path: Path, overrides: tuple[str, ...], ranks: int, what: str, fix: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        settle(tmp_path, *overrides, world_size=ranks)
    assert (raised.value.what, raised.value.fix) == (what, fix)
    place = "command line" if overrides else f"{tmp_path}/run.yaml:12"
    assert raised.value.where == f"{place} training.global_batch_size"


def test_more_ranks_than_gpus_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="gpus_per_node 4 is more than the 2 visible GPUs"):
        settle(tmp_path, "clusters.0.gpus_per_node=4", num_gpus=2)


def test_every_leaf_has_an_origin(tmp_path: Path) -> None:
    resolved = settle(tmp_path, "seed=3")
    keys = {key for key, _ in leaves(resolved.config)}
    assert keys <= set(resolved.origins)
    assert resolved.origins["seed"] == "command line"
    assert resolved.origins["data.sources.0.path"] == f"{tmp_path}/run.yaml:5"
    assert resolved.origins["track"] == "default"
    assert resolved.origins["derived.rows_per_rank"] == "derived: global_batch_size / world_size"


@each(
    "overrides",
    [
        (),
        ("training.max_time=0.1s", "training.learning_rate=1e-300", "checkpoint.every_steps=null"),
        ("training.micro_batch_size=4", "track=[]", "seed=9223372036854775807"),
        ('data.sources.0.path="a: b # \\u2028 \\x85 \\"\' é😀\\n"', "output_dir='4e-4'"),
    ],
)
def test_the_resolved_file_reads_back_the_same(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    resolved = settle(tmp_path, *overrides)
    text = dump_resolved(resolved)
    again = load_resolved(text)
    assert again == resolved
    assert repr(again) == repr(resolved)
    assert digest(again.config) == digest(resolved.config)
    assert dump_resolved(again) == text
    if not overrides:  # any YAML reader understands it
        assert yaml.safe_load(text)["config"]["training"]["max_time"] == 84_600.0


def test_a_file_of_another_version_is_refused(tmp_path: Path) -> None:
    text = dump_resolved(settle(tmp_path))
    for broken in (text.replace("seq_length", "seq_len"), "a: 1\n", text.replace("derived", "d")):
        with pytest.raises(ConfigError, match="no resolved file"):
            load_resolved(broken)


def test_the_digest_sees_every_value(tmp_path: Path) -> None:
    one = settle(tmp_path).config
    nearest = math.nextafter(one.training.learning_rate, 1)
    two = settle(tmp_path, f"training.learning_rate={nearest!r}").config
    assert digest(one) != digest(two)
    assert len(digest(one)) == 64
    assert digest(one) == digest(settle(tmp_path, num_gpus=4).config)
    assert digest(one) != digest(settle(tmp_path, "seed=1").config)


def test_what_is_shown_loads_again_and_means_the_same(tmp_path: Path) -> None:
    resolved = settle(tmp_path, "training.max_time=90061.5s", "seed=1")
    text = show(resolved)
    lines = text.splitlines()
    assert any(line.startswith("seed: 1 ") and line.endswith("# command line") for line in lines)
    assert any("max_steps: 100 " in line and line.endswith("run.yaml:9") for line in lines)
    assert any("timeout: 30m " in line and line.endswith("# default") for line in lines)
    assert any("rows_per_rank: 48" in line and "# derived: global" in line for line in lines)
    (tmp_path / "shown.yaml").write_text(text, encoding="utf-8")
    assert load_run_file(tmp_path / "shown.yaml").config == resolved.config
    plain = show(resolved, origins=False)
    (tmp_path / "shown.yaml").write_text(plain, encoding="utf-8")
    assert load_run_file(tmp_path / "shown.yaml").config == resolved.config
    assert "# default" not in plain


@each(
    "seconds", [0.0, 1.0, 59.0, 60.0, 90.0, 1200.0, 84_600.0, 90_061.0, 0.1, 1e-7, 1e300, math.pi]
)
def test_a_duration_reads_back_the_same(seconds: float) -> None:
    assert parse_duration_s(write_duration(seconds)) == seconds


def test_durations_are_short() -> None:
    assert [write_duration(s) for s in (1200.0, 84_600.0, 172_800.0)] == ["20m", "23h30m", "2d"]


def test_the_schema_describes_every_key() -> None:
    schema = json_schema()
    json.dumps(schema)
    assert schema["$schema"].startswith("https://json-schema.org/")
    assert schema["title"] == "isles run file"
    for section in (schema, *schema["$defs"].values()):
        assert section["additionalProperties"] is False
        for key, child in section["properties"].items():
            referred = schema["$defs"].get(child.get("$ref", "").rpartition("/")[2], {})
            assert child.get("description") or referred.get("description"), key
            assert not isinstance(child.get("default"), dict), key
    assert schema["$defs"]["CheckpointConfig"]["properties"]["timeout"]["default"] == "30m"
    assert schema["required"] == ["model", "data", "training"]


@each("kind", TEMPLATES)
def test_every_template_loads(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(template(kind), encoding="utf-8")
    for num_gpus in (0, 1, 2, 8):
        resolve(load_run_file(file), num_gpus=num_gpus)
    uncommented = (
        template(kind).replace("# clusters:", "clusters:").replace("#   - gpus", "  - gpus")
    )
    file.write_text(uncommented, encoding="utf-8")
    assert load_run_file(file).config.clusters[0].gpus_per_node in (2, 4)


def test_an_unknown_template_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean finetune"):
        template("fine-tune")


def test_a_resume_may_change_what_the_weights_do_not_depend_on(tmp_path: Path) -> None:
    old = settle(tmp_path).config
    free = settle(
        tmp_path, "name=x", "output_dir=x", "data.cache_dir=x", "data.max_bad_fraction=0.1",
        "training.max_steps=200",
        "training.max_time=1h", "training.micro_batch_size=4", "training.logging_steps=1",
        "training.eval_steps=null", "training.eval_samples=4", "training.torch_compile=true",
        "training.gradient_checkpointing=full", "checkpoint.keep=9", "track=[]",
        "clusters.0.gpus_per_node=2", "clusters.0.name=y", "strategy={kind: ddp}",
        "model.attn_implementation=eager",
    ).config  # fmt: skip
    assert changed_mathematics(old, free) == []


def test_a_resume_is_told_of_every_change_of_mathematics(tmp_path: Path) -> None:
    old = settle(tmp_path).config
    new = settle(
        tmp_path, "seed=1", "training.learning_rate=1e-3", "data.sources=[{path: 'a b.jsonl'}]"
    ).config  # fmt: skip
    assert changed_mathematics(old, new) == [
        Change("seed", 0, 1),
        Change("data.sources.0.weight", 0.1, None),
        Change("data.sources.1.path", "on", None),
        Change("data.sources.1.type", "text", None),
        Change("data.sources.1.text_column", "text", None),
        Change("data.sources.1.train_on", "assistant", None),
        Change("data.sources.1.split", "train", None),
        Change("data.sources.1.weight", 3.0, None),
        Change("training.learning_rate", 3.3333333333333335e-05, 1e-3),
    ]
