"""What follows from a run file, written down and read back; and what a resume may change."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from isles.config.clusters import named_cluster
from isles.config.load import load_run_file
from isles.config.resolve import Resolved, digest, dump_resolved, load_resolved, resolve
from isles.config.resume import Change, changed_mathematics
from isles.config.show import TEMPLATES, json_schema, show, template
from isles.errors import ConfigError
from isles.outer.hub.rules import Settings
from tests.each import each
from tests.run_files import load

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
DILOCO = "outer={kind: diloco, sync_every: 50}"


def settle(tmp_path: Path, *overrides: str, num_gpus: int = 0, **more: int | None) -> Resolved:
    return resolve(load(tmp_path, GOOD, *overrides), num_gpus=num_gpus, **more)


def test_ranks_follow_from_the_file_and_the_machine(tmp_path: Path) -> None:
    two = ("clusters.0.gpus_per_node=2",)
    for overrides, num_gpus, given, ranks in (
        ((), 0, None, 1),
        ((), 4, None, 4),
        (two, 0, None, 2),
        (two, 4, None, 2),
        (two, 4, 3, 3),
        ((), 0, 6, 6),
    ):
        resolved = settle(tmp_path, *overrides, num_gpus=num_gpus, world_size=given)
        assert (resolved.world_size, resolved.rows_per_rank) == (ranks, 48 // ranks)
        assert resolved.device == ("cuda" if num_gpus else "cpu")


def test_accumulation_follows_from_the_batch(tmp_path: Path) -> None:
    resolved = settle(tmp_path, "training.micro_batch_size=4", world_size=3)
    assert resolved.derived["grad_accum_steps"] == 4
    assert "grad_accum_steps" not in settle(tmp_path).derived


def test_what_the_ranks_cannot_do_is_refused(tmp_path: Path) -> None:
    batch = ("training.global_batch_size=504", "training.micro_batch_size=8", "balance=even")
    with pytest.raises(ConfigError) as raised:
        settle(tmp_path, *batch, world_size=24)
    what = "global_batch_size 504 is not a multiple of micro_batch_size 8 x 24 ranks = 192"
    assert (raised.value.what, raised.value.fix) == (what, "use 384 or 576, or balance: auto")
    assert raised.value.where == "command line training.global_batch_size"
    with pytest.raises(
        ConfigError, match="48 is less than one sequence per rank for 64 ranks"
    ) as r:
        settle(tmp_path, world_size=64)
    assert r.value.where == f"{tmp_path}/run.yaml:12 training.global_batch_size"
    with pytest.raises(ConfigError, match="gpus_per_node 4 is more than the 2 visible GPUs"):
        settle(tmp_path, "clusters.0.gpus_per_node=4", num_gpus=2)


@each(
    (),
    ("training.max_time=0.1s", "training.learning_rate=1e-300", "checkpoint.every_steps=null"),
    ("training.micro_batch_size=4", "track=[]", "seed=9223372036854775807"),
    ("track=[mlflow, {kind: wandb, project: p, tags: [a, b], mode: offline}]",),
    ("track=[{kind: mlflow, tracking_uri: 'http://tracker:5000', experiment: 'a b'}, jsonl]",),
    ("track=[{kind: mlflow, tracking_uri: 'databricks://profile@x'}]",),  # no password
    ('data.sources.0.path="a: b # \\"\' é😀\\t"', "output_dir='4e-4'"),
    ('clusters.0.environment.variables.X="a: b # \\"\' é😀\\n\\n"',),
)
def test_the_resolved_file_reads_back_the_same(overrides: tuple[str, ...], *, tmp_path):
    resolved = settle(tmp_path, *overrides)
    text = dump_resolved(resolved)
    again = load_resolved(text)
    assert again == resolved
    assert repr(again) == repr(resolved)
    assert dump_resolved(again) == text
    assert load(tmp_path, show(resolved)).config == resolved.config
    if not overrides:  # any YAML reader understands it
        assert yaml.safe_load(text)["config"]["training"]["max_time"] == 84_600.0


def test_a_file_of_another_version_is_refused(tmp_path: Path) -> None:
    text = dump_resolved(settle(tmp_path))
    for broken in (text.replace("seq_length", "seq_len"), "a: 1\n", text.replace("derived", "d")):
        with pytest.raises(ConfigError, match="not a resolved file"):
            load_resolved(broken)


def test_the_digest_sees_every_value_and_no_machine(tmp_path: Path) -> None:
    one = settle(tmp_path).config
    nearest = math.nextafter(one.training.learning_rate, 1)
    assert digest(one) != digest(settle(tmp_path, f"training.learning_rate={nearest!r}").config)
    assert digest(one) == digest(settle(tmp_path, num_gpus=4).config)


def test_what_is_shown_loads_again_and_means_the_same(tmp_path: Path) -> None:
    resolved = settle(tmp_path, "training.max_time=90061.5s", "seed=1")
    text = show(resolved)
    for start, end in (
        ("seed: 1 ", "# command line"),
        ("  max_steps: 100 ", "run.yaml:9"),
        ("  timeout: 30m ", "# default"),
        ("#   rows_per_rank: 48 ", "# derived: global_batch_size / world_size"),
    ):
        assert any(line.startswith(start) and line.endswith(end) for line in text.splitlines())
    plain = show(resolved, origins=False)
    assert "# default" not in plain
    for shown in (text, plain):
        (tmp_path / "shown.yaml").write_text(shown, encoding="utf-8")
        assert load_run_file(tmp_path / "shown.yaml").config == resolved.config


def test_the_schema_describes_every_key() -> None:
    schema = json_schema()
    json.dumps(schema)
    assert schema["$schema"].startswith("https://json-schema.org/")
    for section in (schema, *schema["$defs"].values()):
        assert section["additionalProperties"] is False
        for key, child in section["properties"].items():
            referred = schema["$defs"].get(child.get("$ref", "").rpartition("/")[2], {})
            assert child.get("description") or referred.get("description"), key
            assert not isinstance(child.get("default"), dict), key
    assert schema["$defs"]["CheckpointConfig"]["properties"]["timeout"]["default"] == "30m"
    assert schema["required"] == ["model", "data", "training"]


@each(*TEMPLATES)
def test_every_template_loads(kind: str, *, tmp_path):
    """As it is, on any machine, and with the lines that are commented out."""
    file = tmp_path / "run.yaml"
    text = template(kind)
    file.write_text(text, encoding="utf-8")
    for num_gpus in (0, 1, 2, 8):
        resolve(load_run_file(file), num_gpus=num_gpus)
    text = text.replace("# clusters:", "clusters:").replace("#   - gpus", "  - gpus")
    file.write_text(text, encoding="utf-8")
    assert load_run_file(file).config.clusters[0].gpus_per_node in (2, 4)


def changed(tmp_path: Path, old: tuple[str, ...], *new: str) -> list[Change]:
    """What a run that was started with `old` is told of, where it is resumed with `new`."""
    return changed_mathematics(load(tmp_path, GOOD, *old).config, load(tmp_path, GOOD, *new).config)


def test_a_resume_may_change_what_the_weights_do_not_depend_on(tmp_path: Path) -> None:
    assert changed(
        tmp_path, (), "name=x", "output_dir=x", "data.cache_dir=x", "data.max_bad_fraction=0.1",
        "training.max_steps=200", "training.max_time=1h", "training.micro_batch_size=4",
        "training.logging_steps=1", "training.eval_steps=null", "training.eval_samples=4",
        "training.torch_compile=true", "training.gradient_checkpointing=full",
        "checkpoint.keep=9", "track=[]", "clusters.0.gpus_per_node=2", "clusters.0.name=y",
        "clusters.0.max_restarts=0", "balance={a: 1}", "strategy={kind: ddp}",
        "model.attn_implementation=eager",
    ) == []  # fmt: skip
    free = "{kind: diloco, sync_every: 50, engine: hivemind, wait: {quorum: 2}, max_rate: 1MB}"
    assert changed(tmp_path, (DILOCO,), f"outer={free}") == []


def test_a_resume_is_told_of_every_change_of_mathematics(tmp_path: Path) -> None:
    new = ("seed=1", "training.learning_rate=1e-3", "data.sources=[{path: 'a b.jsonl'}]")
    first, second, third, *found = changed(tmp_path, (), *new)
    assert first == Change("seed", 0, 1)
    assert second == Change("data.sources.0.weight", 0.1, None)
    assert third == Change("data.sources.1.path", "on", None)
    assert found[-1] == Change("training.learning_rate", 3.3333333333333335e-05, 1e-3)
    found = changed(tmp_path, (DILOCO,), DILOCO.replace("50", "50, lr: 0.5, codec: bf16"))
    assert [change.key for change in found] == ["outer.lr", "outer.codec"]


@each(
    ("{kind: ddp}", "{kind: deepspeed, zero_stage: 3}", None),
    ("{kind: fsdp, tp_size: 2}", "{kind: auto}", None),
    ("{kind: ddp}", "{kind: ddp, gradient_compression: bf16}", "gradient_compression"),
    ("{kind: ddp, gradient_compression: bf16}", "{kind: fsdp}", "gradient_compression"),
    ("{kind: ddp}", "{kind: fsdp, reduce_dtype: bf16}", "reduce_dtype"),
)
def test_a_strategy_may_change_on_a_resume_unless_gradients_are_rounded(old, new, key, *, tmp_path):
    found = changed(tmp_path, (f"strategy={old}",), f"strategy={new}")
    assert [change.key for change in found] == ([f"strategy.{key}"] if key else [])
    assert all(change.old is not None and change.new is not None for change in found)


def test_a_cluster_has_its_own_part(tmp_path: Path) -> None:
    two = "[{name: a, gpus_per_node: 2, strategy: {kind: fsdp}}, {name: b, balance: even}]"
    loaded = load(tmp_path, GOOD, f"clusters={two}", DILOCO)
    with pytest.raises(ConfigError, match="this command starts one cluster"):
        resolve(loaded)
    first, second = (named_cluster(loaded, name) for name in "ab")
    assert [own.config.clusters[0].name for own in (first, second)] == ["a", "b"]
    assert (first.config.strategy.kind, first.config.balance) == ("fsdp", "auto")
    assert (second.config.strategy.kind, second.config.balance) == ("auto", "even")
    resolved = resolve(first)
    assert resolved.world_size == 2 and resolved.derived["strategy"] == "fsdp"
    assert resolved.origins["strategy.kind"] == "command line"
    assert load_resolved(dump_resolved(resolved)).config == resolved.config
    for own in (first, second):
        path = tmp_path / "own.yaml"
        path.write_text(own.text)
        assert load_run_file(path).config == own.config


def test_what_the_hub_is_told(tmp_path):
    def diloco(text: str) -> Any:
        return load(tmp_path, GOOD, f"{DILOCO[:-1]}, {text}}}").config.diloco

    topk = diloco("codec: {kind: topk, density: 0.01}, momentum: 0, max_rate: 20MB/s")
    assert (topk.codec_text, topk.max_bytes_per_s) == ("topk:0.01", 20e6)
    assert diloco("codec: bf16").codec_text == "bf16"
    quorum = {"wait": "quorum", "quorum": 3, "grace_s": 0.0, "min_clusters": 2}
    for text, expected in (
        ("wait: all, dead_after: 20s", {"wait": "all", "dead_after_s": 20.0}),
        ("wait: {time_boxed: 2m}", {"wait": "time_boxed", "time_box_s": 120.0}),
        ("wait: {quorum: 3, grace: 0s}, min_clusters: 2", quorum),
    ):
        told = diloco(text).hub_settings
        assert told.items() >= expected.items()
        Settings.model_validate(told)
