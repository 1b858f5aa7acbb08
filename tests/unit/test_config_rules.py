"""Rules of a run file: each that is broken is one issue, with its place and its fix."""

from __future__ import annotations

from pathlib import Path

from isles.config.rules import check_rules
from tests.each import each
from tests.run_files import faults, load

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
EPOCHS = "training.num_train_epochs=2"
SSH = "clusters.0.launcher={kind: ssh, hosts: [a]}"
PYTHON = "clusters.0.environment.python=~/bin/python"
TOKEN = "clusters.0.environment.variables={HF_TOKEN: x, HF_TOKEN_PATH: y}"
TWO_FORMS = "data.sources=[{path: a, type: instruct, columns: {input: a, prompt: b}}]"
WARMUP = "warmup_rounds: 1, warmup_sync_every"
HIVEMIND = "engine: hivemind, hivemind: {initial_peers: [/ip4/192.0.2.1/tcp/1]}"
NOTHING = "has no effect with"
FP8 = "training.precision=fp8-mixed"
HALVES = "strategy={kind: fsdp, cp_size: 2}"
BF16, FP16 = "training.precision=bf16-true", "training.precision=fp16-mixed"
EAGER = "model.attn_implementation=eager"
NVME = "{kind: deepspeed, offload_optimizer: nvme"
MLFLOW, PUSH = "track: [{kind: mlflow, tracking_uri:", "checkpoint: {push_to_hub: a/b"
LOGIN = f"{MLFLOW} 'http://me:pa55word@tracker:5000/path'}}]"
TEXT = "data.sources=[{path: a}]"
PAIRS = "data.sources=[{path: a, type: preference}]"
STREAM, DPO = "data.streaming=true", "training.method=dpo"
NOT_PACKED, APART = "data.packing=false", "data.isolate_documents=true"
PIPELINE = "strategy={kind: ddp, pp_size: 2}"
RING = "strategy={kind: fsdp, pp_size: 2, cp_size: 2}"
GPT2, WARMUP_9 = "tokenizer.name_or_path=gpt2", "training.warmup_steps=9"
FLASH = "model.attn_implementation=flash_attention_2"
OFFLOADED = ("training.torch_compile=true", "training.gradient_checkpointing=offload")
LORA, QLORA = "adapter.type=lora", "adapter.type=qlora"
TENSOR = "strategy={kind: ddp, tp_size: 2}"
TARGETS, SAVED = "adapter.target_modules=[q_proj]", "adapter.modules_to_save=[q_proj]"


def check_refused(tmp_path: Path, source: str, what: str, fix: str, *given: str) -> None:
    """There is one issue: its key and these words, at the place of what was given.

    Of what is given, lines of the file have no equals sign, and overrides have one.
    """
    lines = [line for line in given if "=" not in line]
    text = "\n".join([GOOD.replace("TYPE", source).strip(), *lines])
    (issue,) = faults(tmp_path, text, *(word for word in given if "=" in word))
    assert what in f"{issue.where.rpartition(' ')[2]} {issue.what}", str(issue)
    assert fix in issue.fix and "pa55word" not in str(issue), str(issue)
    place = f"{tmp_path}/run.yaml:5 " if lines else ("command line ", f"{tmp_path}/run.yaml:")
    assert issue.where.startswith(place), str(issue)


@each(
    ("and num_train_epochs 2 both set", "keep one", "training.max_steps=5", EPOCHS),
    ("the run has no length", "max_time", NO_STEPS),
    ("cosine needs the last step", "constant", NO_STEPS, HOUR),
    ("leaves no step of max_steps", "below 1000", "training.warmup_steps=1000"),
    ("is more than max_steps 1000", "at most 991", WSD, "training.decay_steps=995", WARMUP_9),
    ("has no effect with lr_scheduler_type cosine", "wsd", "training.decay_steps=5"),
    ("has no effect with lr_scheduler_type const", "wsd", CONSTANT, "training.min_lr_ratio=0.1"),
    ("64 is not a multiple of micro_batch_size 128", "auto", "training.micro_batch_size=128"),
    ("64 is not a multiple", "use 63 or 70", "training.micro_batch_size=7"),
    ("no weights", "init: scratch", "model.name_or_path=llama-2m", GPT2),
    ("not a shape", "./llama-7b", "model={name_or_path: llama-7b, init: scratch}"),
    ("HF_TOKEN looks like a secret", "hf auth login", TOKEN),
    ("~/bin/python begins with ~", "as venv", SSH, PYTHON),
    ('device is "mps", not one', "a GPU over ssh", "clusters=[{device: mps}]"),
    ('device is "rocm", not one', "did you mean cuda?", "clusters=[{device: rocm}]"),
    # Of `strategy` and `balance`.
    (f"shard_size 2 {NOTHING}", "HYBRID_SHARD", "strategy={kind: fsdp, shard_size: 2}"),
    (
        f"16 {NOTHING} pp_size 2: Distr",
        "pp_size",
        "strategy={kind: ddp, pp_size: 2, bucket_cap_mb: 16}",
    ),
    (f"true {NOTHING} tp_", "tp_size", "strategy={kind: ddp, tp_size: 2, static_graph: true}"),
    (f"fp16 {NOTHING}", "bf16-mixed", "strategy={kind: ddp, gradient_compression: fp16}", BF16),
    ("3 does not divide seq_length 1024", "1023 or 1026", "strategy={kind: fsdp, cp_size: 3}"),
    ("eager does not work with cp_size 2", "sdpa", "strategy={kind: fsdp, cp_size: 2}", EAGER),
    (
        "fp16-mixed does not work with pp_size",
        "bf16-mixed",
        "strategy={kind: fsdp, pp_size: 2}",
        FP16,
    ),
    ("needs ZeRO stage 3", "_stage: 3", "strategy={kind: deepspeed, offload_param: cpu}"),
    ("offload_optimizer nvme needs a folder", "nvme_path", f"strategy={NVME}, zero_stage: 3}}"),
    (f"nvme_path /x {NOTHING}", "nvme", "strategy={kind: deepspeed, nvme_path: /x}"),
    ("whole matrices", "fsdp", "strategy={kind: deepspeed}", "training.optimizer=muon"),
    ("no fp32 weights", "bf16-mixed", "strategy={kind: deepspeed}", BF16),
    ("unknown key zero_stage", "kind: deepspeed", "strategy={kind: ddp, zero_stage: 3}"),
    ("not a section", "{kind: deepspeed, zero_stage: 3}", "strategy=zero3"),
    ("not one of its values", "HYBRID_SHARD?", "strategy={kind: fsdp, sharding_strategy: 4}"),
    ("balance is 3", "{big-box: 3}", "strategy={kind: auto}", "balance=3"),
    ("balance is empty", "{big-box: 3}", "strategy={kind: auto}", "balance={}"),
    ("big-box is -1: too small", "at least 0", "balance={big-box: -1}"),
    # Where clusters have no outer steps.
    ('outer is "diloco", not a section', "{kind: diloco}", "outer=diloco"),
    ("not a section", "codec: {kind: topk, density: 0.02}, lr: 1.0", "outer=sparseloco"),
    ("unknown key lr", "kind: diloco", "outer={kind: none, lr: 1}"),
    ("2 clusters need outer.kind", "{kind: diloco}", "clusters=[{name: a}, {name: b}]"),
    # The section track, and where an export goes.
    ('track.0 is "wandbb", not one of its values', "did you mean wandb?", "track: [wandbb]"),
    ("track.0 has no kind", "wandb, mlflow", "track: [{project: p}]"),
    ("track.0.project unknown", "kind: wandb", "track: [{kind: mlflow, project: p}]"),
    ("track.1.kind wandb is listed twice", "keep one", "track: [wandb, {kind: wandb}]"),
    ("tracker:5000 has no scheme", "write http://tracker:5000", f"{MLFLOW} tracker:5000}}]"),
    ("contains a user name or", "http://tracker:5000/path, and set MLFLOW_TRACKING_U", LOGIN),
    ('"me", not the name', "owner/name", "checkpoint: {push_to_hub: me}"),
    ("export_on_finish is false", "delete one", f"{PUSH}, export_on_finish: false}}"),
    # Of fp8.
    ("without torch_compile is slower", "bf16-mixed", FP8, "training.torch_compile=false"),
    ("fp8, which is missing on CPUs", "bf16-mixed", FP8, "clusters.0.device=cpu"),
    ("needs torch_compile, which does not work", "full", FP8, OFFLOADED[1]),
    ("never tried with adapter.type lora", "bf16-mixed", FP8, LORA),
    ("never tried with tp_size 2", "bf16-mixed", FP8, TENSOR),
    ("never tried with pp_size 2", "bf16-mixed", FP8, PIPELINE),
    ("never tried with strategy deepspeed", "bf16-mixed", FP8, "strategy={kind: deepspeed}"),
    ("multiple of 16 tokens", "992 or 1008", FP8, "data.seq_length=1000"),
    ("multiple of 32 tokens", "992 or 1024", FP8, "data.seq_length=1008", HALVES),
    # Of an optimizer, and of an adapter.
    ("by row", "fsdp", "strategy={kind: deepspeed}", "training.optimizer=adamw_8bit"),
    ("keeps fp32 weights", "bf16-true", "training.stochastic_rounding=true"),
    ("does not work with gradient_checkpointing offload", ": auto", *OFFLOADED),
    ("freeze random weights", "init: pretrained", LORA, "model.init=scratch"),
    (f"r 8 {NOTHING} type none", "type: lora", "adapter.r=8"),
    (f"fp4 {NOTHING} type lora", "type: qlora", LORA, "adapter.bnb_4bit_quant_type=fp4"),
    ("chooses the number of stages", "kind: ddp", "strategy={kind: auto, pp_size: 2}"),
    ("would cut a weight inside a block", "{kind: fsdp}", QLORA, "strategy={kind: deepspeed}"),
    ("tp_size 2 with adapter.type qlora is not built", "{kind: fsdp}", QLORA, TENSOR),
    ("0.1 does not work with tp_size 2", "tp_size: 1", LORA, TENSOR, "adapter.dropout=0.1"),
    ("which no rank has", "tp_size: 1", LORA, TENSOR, "adapter.use_dora=true"),
    ("q_proj is in both target_modules", "one of the two", LORA, TARGETS, SAVED),
    ("and the run trains no adapter", "whole model anyway", "checkpoint.merge_adapter=true"),
    ("target_modules", "a list such as", LORA, "adapter.target_modules=q_proj"),
)
def test_a_broken_rule_is_refused(row: tuple[str, ...], *, tmp_path):
    check_refused(tmp_path, "text", *row)


@each(
    ("has no tokenizer", "train_vocab_size", SCRATCH),
    ("two tokenizers", "keep one", SCRATCH, BPE, GPT2),
    ("the embeddings of gpt2 belong to another tokenizer", "init: scratch", BPE),
    ("no text to train a tokenizer on", "delete", SCRATCH, FAKE, BPE),
    ("that this run trains", "tokenizer.name", SCRATCH, BPE, "data.sources.0.type=tokens"),
    ("no messages for a chat template", "delete", FAKE, "tokenizer.chat_template=chatml"),
    ("fake source with real", "alone", "data.sources.1.type=fake"),
    ("a fake source has no path", "delete", "data.sources.0.type=fake"),
    ("this source has no path", "a glob", "data.sources=[{split: x}]"),
    ("source 2 has no weight", "every", "data.sources=[{path: a, weight: 1}, {path: b}]"),
    ("no column xyz", "use one of: messages, role", "data.sources.0.columns={xyz: a}"),
    ("text has no column text", "text_column", "data.sources=[{path: a, columns: {text: a}}]"),
    ("input and prompt, which belong to two data formats", "or prompt and completion", TWO_FORMS),
    ("on a source of type chat", "columns", "data.sources.0.text_column=body"),
    ("train_on last has no effect with", "delete it", "data.sources=[{path: a, train_on: last}]"),
    # What goes into a sample, and how.
    (f"true {NOTHING} packing false", "packing: true", NOT_PACKED, APART),
    ("too_long drop has no effect with text", "delete it", TEXT, "data.too_long=drop"),
    ("pipeline stages (pp_size 2) find documents", "data.packing: false", RING),
    ("flash_attention_2 between documents in pipeline stages", ": sdpa", FLASH, PIPELINE),
    ("method causal_lm does not read a preference source", "method: dpo", PAIRS),
    ("a chat source has one", "type: preference", DPO),
    ("num_train_epochs 2 has no length in steps", "max_steps", STREAM, NO_STEPS, EPOCHS),
    ("2 streamed sources", "such as weight: 1", STREAM, "data.sources=[{path: a}, {path: b}]"),
    ("needs no streaming", "delete", STREAM, FAKE),
    ("dpo", "delete", STREAM, DPO, PAIRS),
)
def test_a_broken_rule_of_data_or_tokenizer_is_refused(row: tuple[str, ...], *, tmp_path):
    check_refused(tmp_path, "chat", *row)


@each(
    # Of `outer` alone: what stands beside its kind.
    ("unknown key interface", "delete it: clusters average", "interface: eth0"),
    ("not one of its values", "mean hub?", "engine: gloo"),
    ("has no effect with engine hub", "hivemind", "hivemind: {relay: true}"),
    ("public h:1 has no effect with", "engine: hub", "engine: hivemind, public: 'h:1'"),
    ("/ip4/192.0.2.1/tcp/1", "p2p", HIVEMIND),
    ("2000 is more than max_steps 1000", "500", "sync_every: 2000"),
    ("501 fragments", "at most 500", "fragments: 501"),
    ("100 steps later", "less than 100", "fragments: 5, delay: 100"),
    ("has no effect with warmup_rounds 0", "1 or more", "warmup_sync_every: 50"),
    ("is more than sync_every 500", "at most 500", "warmup_rounds: 1, warmup_sync_every: 501"),
    ("do not fit warmup_sync_every 2", "at most 2", f"{WARMUP}: 2, fragments: 3"),
    ("last until step 1000", "use fewer", "warmup_rounds: 2"),
    ("no effect with sync_every auto", "with a number", f"{WARMUP}: 50, lr: 1, sync_every: auto"),
    ("neither time_boxed nor quorum", "{time_boxed: 60s}", "wait: {}"),
    ("both time_boxed and quorum", "{quorum: 2", "wait: {time_boxed: 5s, quorum: 2}"),
    ("less than min_clusters 3", "lower", "min_clusters: 3, wait: {quorum: 2}"),
    ("sync_every auto works only with wait", "wait: all", "sync_every: auto, wait: {quorum: 2}"),
    ("has no effect with kind int8", "topk", "codec: {density: 0.1}"),
    ("momentum 0.9 is too large", "momentum: 0.7 and lr: 0.9", "codec: topk"),
    ("has no effect with delay 0", "delay", "alpha: 0.1"),
    ('"20Mbit"', "20MB", "max_rate: 20Mbit"),
    ("not HOST:PORT", "hub.example.org:29400", "hub: hub"),
    ("uses the hub h:1", "delete it", "hub: 'h:1', public: 'g:1'"),
    # With other sections.
    ("a stream cannot go back", "streaming: false", "", "data.streaming=true"),
    ("has no fixed length with several clusters", "max_steps", "", NO_STEPS, EPOCHS),
    ("clusters.0 also has the name local", "a different name", "", "clusters=[{}, {}]"),
)
def test_a_broken_rule_of_outer_steps_is_refused(row: tuple[str, ...], *, tmp_path):
    what, fix, outer, *others = row
    check_refused(tmp_path, "text", what, fix, f"outer={{kind: diloco, {outer}}}", *others)


@each(
    ("text", [HOUR]),
    ("text", [NO_STEPS, "training.num_train_epochs=0.5"]),
    ("text", [NO_STEPS, HOUR, CONSTANT]),
    ("text", [WSD, "training.decay_steps=500", "training.warmup_steps=500"]),
    ("text", [SCRATCH, BPE]),
    ("text", [SCRATCH, FAKE]),
    ("text", [SCRATCH, FAKE, GPT2]),
    ("text", ["model.init=scratch", BPE]),
    ("text", ["model.name_or_path=./llama-7b", "model.init=scratch"]),
    ("text", ["data.sources=[{path: a, weight: 1}, {path: b, weight: 0.5}]"]),
    ("text", ["training.micro_batch_size=64"]),
    ("text", ["strategy={kind: fsdp, sharding_strategy: HYBRID_SHARD_ZERO2, shard_size: 2}"]),
    ("text", ["strategy={kind: fsdp, cp_method: allgather, pp_schedule: 1f1b}"]),
    ("text", ["strategy={kind: ddp, tp_size: 2, gradient_compression: none}"]),
    ("text", ["strategy={kind: deepspeed, offload_param: nvme, config_file: where.json}"]),
    ("chat", []),
    ("chat", [TEXT, APART]),
    ("chat", ["data.isolate_documents=false", RING]),
    ("chat", [NOT_PACKED, RING]),
    ("chat", [FP8, "strategy={kind: fsdp}", "training.gradient_checkpointing=selective"]),
    ("chat", [PAIRS, DPO, "data.too_long=drop"]),
    ("chat", [FAKE, DPO]),
    ("chat", [STREAM]),
    ("chat", [STREAM, "data.sources=[{path: a, weight: 1}, {path: b, weight: 2}]"]),
)
def test_what_makes_sense_is_accepted(source: str, overrides: list[str], *, tmp_path):
    assert check_rules(load(tmp_path, GOOD.replace("TYPE", source), *overrides).config) == []
