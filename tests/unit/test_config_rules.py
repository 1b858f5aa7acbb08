"""Rules between the keys of a run file: each that is broken is one issue, with its fix."""

from __future__ import annotations

from pathlib import Path

import pytest

from isles.config.load import Loaded, load_run_file
from isles.config.rules import check_rules
from isles.errors import ConfigErrors
from tests.each import each

GOOD = """\
model: {name_or_path: gpt2}
data: {sources: [{path: a, type: TYPE}]}
training:
  max_steps: 1000
"""
SCRATCH = "model={name_or_path: llama-2m, init: scratch}"
BPE = "tokenizer.train_vocab_size=300"
FAKE = "data.sources=[{type: fake}]"
WSD, CONSTANT = "training.lr_scheduler_type=wsd", "training.lr_scheduler_type=constant"
NO_STEPS, HOUR = "training.max_steps=null", "training.max_time=1h"
SSH = "clusters.0.launcher={kind: ssh, hosts: [a]}"
PYTHON = "clusters.0.environment.python=~/bin/python"
TOKEN = "clusters.0.environment.variables={HF_TOKEN: x, HF_TOKEN_PATH: y}"
TWO_FORMS = "data.sources=[{path: a, type: instruct, columns: {input: a, prompt: b}}]"
WARMUP = "warmup_rounds: 1, warmup_sync_every"
HIVEMIND = "engine: hivemind, hivemind: {initial_peers: [/ip4/192.0.2.1/tcp/1]}"


def load(tmp_path: Path, *overrides: str, source: str = "text") -> Loaded:
    file = tmp_path / "run.yaml"
    file.write_text(GOOD.replace("TYPE", source), encoding="utf-8")
    return load_run_file(file, overrides)


def check_refused(tmp_path: Path, what: str, fix: str, *overrides: str, source: str) -> None:
    """One issue has these words, and the place of a key that was given."""
    with pytest.raises(ConfigErrors) as raised:
        load(tmp_path, *overrides, source=source)
    found = [issue for issue in raised.value.issues if what in issue.what]
    assert len(found) == 1, str(raised.value)
    assert fix in found[0].fix, str(found[0])
    assert found[0].where.startswith(("command line ", f"{tmp_path}/run.yaml:"))


@each(
    "row",
    [
        ("and num_train_epochs 2 both say", "keep one", "training.num_train_epochs=2"),
        ("the run has no length", "max_time", NO_STEPS),
        ("cosine needs to know", "constant", NO_STEPS, HOUR),
        ("leaves no step of max_steps", "below 1000", "training.warmup_steps=1000"),
        (
            "is more than max_steps 1000",
            "at most 991",
            WSD,
            "training.decay_steps=995",
            "training.warmup_steps=9",
        ),
        ("means nothing to lr_scheduler_type cosine", "wsd", "training.decay_steps=5"),
        ("means nothing to lr_scheduler_type const", "wsd", CONSTANT, "training.min_lr_ratio=0.1"),
        ("64 is not a multiple of micro_batch_size 128", "auto", "training.micro_batch_size=128"),
        ("64 is not a multiple", "use 63 or 70", "training.micro_batch_size=7"),
        ("no weights", "init: scratch", "model.name_or_path=llama-2m", BPE),
        ("no shape", "./llama-7b", "model={name_or_path: llama-7b, init: scratch}"),
        ("HF_TOKEN looks like a secret", "hf auth login", TOKEN),
        ("~/bin/python is run as it is", "as venv", SSH, PYTHON),
    ],
)
def test_a_broken_rule_of_training_or_environment_is_refused(
    tmp_path: Path, row: tuple[str, ...]
) -> None:
    check_refused(tmp_path, *row, source="text")


@each(
    "row",
    [
        ("comes without a tokenizer", "train_vocab_size", SCRATCH),
        ("two tokenizers", "keep one", SCRATCH, BPE, "tokenizer.name_or_path=gpt2"),
        ("the embeddings of gpt2 belong to another tokenizer", "init: scratch", BPE),
        ("no text to train a tokenizer on", "delete", SCRATCH, FAKE, BPE),
        ("one that is trained here", "tokenizer.name", SCRATCH, BPE, "data.sources.0.type=tokens"),
        ("no messages for a chat template", "delete", FAKE, "tokenizer.chat_template=chatml"),
        ("fake source stands among real", "alone", "data.sources.1.type=fake"),
        ("a fake source has no path", "delete", "data.sources.0.type=fake"),
        ("this source has no path", "a glob", "data.sources=[{split: x}]"),
        ("source 2 has no weight", "every", "data.sources=[{path: a, weight: 1}, {path: b}]"),
        ("columns is [a], not a section", "names with text", "data.sources.0.columns=[a]"),
        ("no xyz", "use one of: messages, role", "data.sources.0.columns={xyz: a}"),
        ("text has no text", "text_column", "data.sources=[{path: a, columns: {text: a}}]"),
        ("input and prompt, which belong to two forms", "or prompt and completion", TWO_FORMS),
        ("to a source of type chat", "columns", "data.sources.0.text_column=body"),
        ("train_on last means nothing to", "delete it", "data.sources=[{path: a, train_on: last}]"),
        ("sharegpt", "chat", "data.sources.0.type=sharegpt"),
        ("max_bad_fraction", "less than 1", "data.max_bad_fraction=1.0"),
    ],
)
def test_a_broken_rule_of_data_or_tokenizer_is_refused(
    tmp_path: Path, row: tuple[str, ...]
) -> None:
    check_refused(tmp_path, *row, source="chat")


@each(
    "row",
    [
        # Of `outer` alone: what stands beside its kind.
        ("unknown key interface", "delete it: clusters average", "interface: eth0"),
        ("not one of its values", "mean hub?", "engine: gloo"),
        ("means nothing to engine hub", "hivemind", "hivemind: {relay: true}"),
        ("public h:1 means nothing to", "engine: hub", "engine: hivemind, public: 'h:1'"),
        ("/ip4/192.0.2.1/tcp/1", "p2p", HIVEMIND),
        ("2000 is more than max_steps 1000", "500", "sync_every: 2000"),
        ("501 fragments", "at most 500", "fragments: 501"),
        ("100 steps later", "less than 100", "fragments: 5, delay: 100"),
        ("means nothing to warmup_rounds 0", "1 or more", "warmup_sync_every: 50"),
        ("is more than sync_every 500", "at most 500", "warmup_rounds: 1, warmup_sync_every: 501"),
        ("in warmup_sync_every 2 steps", "at most 2", f"{WARMUP}: 2, fragments: 3"),
        ("last until step 1000", "use fewer", "warmup_rounds: 2"),
        ("nothing to sync_every auto", "with a number", f"{WARMUP}: 50, lr: 1, sync_every: auto"),
        ("neither time_boxed nor quorum", "{time_boxed: 60s}", "wait: {grace: 5s}"),
        ("both time_boxed and quorum", "{quorum: 2", "wait: {time_boxed: 5s, quorum: 2}"),
        ("less than min_clusters 3", "lower", "min_clusters: 3, wait: {quorum: 2}"),
        ("which sync_every auto leaves open", "wait: all", "sync_every: auto, wait: {quorum: 2}"),
        ("means nothing to kind int8", "topk", "codec: {density: 0.1}"),
        ("momentum 0.9 goes badly", "momentum: 0.7 and lr: 0.9", "codec: topk"),
        ("means nothing to delay 0", "delay", "alpha: 0.1"),
        ("means nothing to sync_every 500", "auto", "max_sync_overhead: 0.1"),
        ('"20Mbit"', "20MB", "max_rate: 20Mbit"),
        ("not HOST:PORT", "hub.example.org:29400", "hub: hub"),
        ("there is one already: h:1", "delete it", "hub: 'h:1', public: 'g:1'"),
        # With other sections.
        ("pp_size 2 does not go", "fsdp", "", "strategy={kind: fsdp, pp_size: 2}"),
        ("pp_size 2 does not go", "fsdp", "", "clusters.0.strategy={kind: ddp, pp_size: 2}"),
        ("forwards only", "streaming: false", "", "data.streaming=true"),
        (
            "the clusters share the samples",
            "max_steps",
            "",
            NO_STEPS,
            "training.num_train_epochs=2",
        ),
        ("clusters.0 is called local, too", "a name of its own", "", "clusters=[{}, {}]"),
    ],
)
def test_a_broken_rule_of_outer_steps_is_refused(tmp_path: Path, row: tuple[str, ...]) -> None:
    what, fix, outer, *others = row
    outer = f"outer={{kind: diloco, {outer}}}"
    check_refused(tmp_path, what, fix, outer, *others, source="text")


@each(
    "row",
    [
        ('outer is "diloco", not a section', "{kind: diloco}", "outer=diloco"),
        ("not a section", "codec: {kind: topk, density: 0.02}, lr: 1.0", "outer=sparseloco"),
        ("unknown key lr", "kind: diloco", "outer={kind: none, lr: 1}"),
        ("2 clusters, and nothing", "{kind: diloco}", "clusters=[{name: a}, {name: b}]"),
    ],
)
def test_several_clusters_without_outer_steps_are_refused(
    tmp_path: Path, row: tuple[str, ...]
) -> None:
    check_refused(tmp_path, *row, source="text")


@each(
    "overrides",
    [
        [HOUR],
        [NO_STEPS, "training.num_train_epochs=0.5"],
        [NO_STEPS, HOUR, CONSTANT],
        [WSD, "training.decay_steps=500", "training.warmup_steps=500"],
        [SCRATCH, BPE],
        [SCRATCH, FAKE],
        [SCRATCH, FAKE, "tokenizer.name_or_path=gpt2"],
        ["model.init=scratch", BPE],
        ["model.name_or_path=./llama-7b", "model.init=scratch"],
        ["data.sources=[{path: a, weight: 1}, {path: b, weight: 0.5}]"],
        ["training.micro_batch_size=64"],
    ],
)
def test_what_makes_sense_is_accepted(tmp_path: Path, overrides: list[str]) -> None:
    assert check_rules(load(tmp_path, *overrides).config) == []


def test_a_rule_names_the_line_of_a_key_that_was_given(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"{GOOD.replace('TYPE', 'text')}  micro_batch_size: 7\n", encoding="utf-8")
    with pytest.raises(ConfigErrors) as raised:
        load_run_file(file)
    (issue,) = raised.value.issues
    assert issue.where == f"{file}:5 training.micro_batch_size"
