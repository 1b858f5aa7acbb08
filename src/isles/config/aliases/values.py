"""Values from other tools, and what isles writes instead."""

from __future__ import annotations

VALUES: dict[str, dict[str, str]] = {
    "training.precision": {
        "bf16": "bf16-mixed",
        "bfloat16": "bf16-mixed",
        "fp16": "fp16-mixed",
        "float16": "fp16-mixed",
        "fp32": "32-true",
        "float32": "32-true",
        "no": "32-true",
    },
    "training.optimizer": {
        "adam": "adamw",
        "adamw_torch": "adamw",
        "adamw_torch_fused": "adamw",
        "adamw_hf": "adamw",
        "adamw_bnb_8bit": "adamw_8bit",
        "adamw_torch_8bit": "adamw_8bit",
        "adamw8bit": "adamw_8bit",
        "paged_adamw_8bit": "adamw_8bit",
    },
    "training.method": {"sft": "causal_lm", "pt": "causal_lm", "clm": "causal_lm"},
    "adapter.type": {"full": "none", "peft": "lora", "dora": "lora", "rslora": "lora"},
    "data.too_long": {"keep_start": "truncate", "keep_end": "truncate"},
    "data.sources.0.train_on": {"true": "all", "false": "assistant", "last_turn": "last"},
    "training.lr_scheduler_type": {
        "constant_with_warmup": "constant",
        "warmup_stable_decay": "wsd",
    },
    "training.gradient_checkpointing": {"true": "full", "false": "none"},
    "model.attn_implementation": {
        "flash_attention_3": "flash_attention_2",
        "flash_attention": "flash_attention_2",
        "flash_attn": "flash_attention_2",
        "fa2": "flash_attention_2",
        "flex": "flex_attention",
        "sdp": "sdpa",
    },
    "data.sources.0.type": {
        "completion": "text",
        "pretrain": "text",
        "chat_template": "chat",
        "sharegpt": "chat",
        "messages": "chat",
        "alpaca": "instruct",
        "prompt_completion": "instruct",
        "tokenized": "tokens",
        "dpo": "preference",
        "ranking": "preference",
    },
    "strategy.kind": {
        "dp": "ddp",
        "distributed_data_parallel": "ddp",
        "ddp_find_unused_parameters_true": "ddp",
        "ddp_find_unused_parameters_false": "ddp",
        "fsdp1": "fsdp",
        "fsdp2": "fsdp",
        "hsdp": "fsdp",
        "tp": "fsdp",
        "megatron": "fsdp",
        "zero": "deepspeed",
        "zero1": "deepspeed",
        "zero2": "deepspeed",
        "zero3": "deepspeed",
        "deepspeed_stage_1": "deepspeed",
        "deepspeed_stage_2": "deepspeed",
        "deepspeed_stage_3": "deepspeed",
    },
    "strategy.sharding_strategy": {
        "1": "FULL_SHARD",
        "2": "SHARD_GRAD_OP",
        "3": "NO_SHARD",
        "4": "HYBRID_SHARD",
        "5": "HYBRID_SHARD_ZERO2",
        "_hybrid_shard_zero2": "HYBRID_SHARD_ZERO2",
        "zero2": "SHARD_GRAD_OP",
        "zero3": "FULL_SHARD",
        "hsdp": "HYBRID_SHARD",
        "ddp": "NO_SHARD",
        "true": "FULL_SHARD",
        "false": "SHARD_GRAD_OP",
    },
    "strategy.reduce_dtype": {
        "float32": "fp32",
        "bfloat16": "bf16",
        "torch.float32": "fp32",
        "torch.bfloat16": "bf16",
    },
    "strategy.gradient_compression": {
        "no": "none",
        "float16": "fp16",
        "bfloat16": "bf16",
        "fp16_compress": "fp16",
        "bf16_compress": "bf16",
    },
    "strategy.cp_method": {"all-gather": "allgather", "all_gather": "allgather", "sp": "ulysses"},
    "strategy.pp_schedule": {
        "interleaved1f1b": "interleaved-1f1b",
        "interleaved_1f1b": "interleaved-1f1b",
        "zbvzerobubble": "zbv",
        "schedulezbvzerobubble": "zbv",
        "schedule1f1b": "1f1b",
        "schedulegpipe": "gpipe",
    },
    "outer.codec": {
        "fp32": "none",
        "float32": "none",
        "no": "none",
        "bfloat16": "bf16",
        "scaled_fp16": "bf16",
        "fp16": "bf16",
        "uniform8bit": "int8",
        "blockwise8bit": "int8",
        "quantile8bit": "int8",
        "sparseloco": "topk",
    },
    "outer.engine": {"http": "hub", "nccl": "hub", "gloo": "hub"},
    "strategy.offload_optimizer": {"true": "cpu", "false": "none", "no": "none"},
    "strategy.offload_param": {"true": "cpu", "false": "none", "no": "none"},
    "balance": {"none": "even", "equal": "even", "true": "auto", "false": "even"},
}
"""By key: words of other tools for a value, and the word here."""

VALUES_NOT_YET: dict[str, frozenset[str]] = {
    "training.optimizer": frozenset(
        ("paged_adamw_32bit", "lion", "lion_8bit", "adafactor", "adamw_torch_4bit", "galore_adamw")
    ),
    "training.method": frozenset(("kto", "orpo", "simpo", "ipo", "ppo", "grpo", "rm", "reward")),
    "adapter.type": frozenset(("ia3", "oft", "vera", "llama-adapter", "freeze", "prompt_tuning")),
    "track": frozenset(("comet", "comet_ml", "swanlab", "clearml", "neptune", "trackio")),
    "outer.engine": frozenset(("torchft",)),
}
"""By key: values that people know from other tools or from isles' plans, and isles lacks."""

SECTIONS: dict[str, dict[str, str]] = {
    "adapter": {
        "none": "{type: none}",
        "lora": "{type: lora}",
        "qlora": "{type: qlora}",
        "dora": "{type: lora, use_dora: true}",
        "rslora": "{type: lora, use_rslora: true}",
    },
    "outer": {
        "local_sgd": "{kind: diloco, lr: 1.0, momentum: 0.0}",
        "opendiloco": "{kind: diloco}",
        "streaming_diloco": "{kind: diloco, fragments: 4, delay: 5}",
        "sparseloco": "{kind: diloco, codec: {kind: topk, density: 0.02}, lr: 1.0, momentum: 0.0}",
    },
    "strategy": {
        "hsdp": "{kind: fsdp, sharding_strategy: HYBRID_SHARD}",
        "hybrid_shard": "{kind: fsdp, sharding_strategy: HYBRID_SHARD}",
        "full_shard": "{kind: fsdp}",
        "shard_grad_op": "{kind: fsdp, sharding_strategy: SHARD_GRAD_OP}",
        "tp": "{kind: fsdp, tp_size: 2}",
        **{
            f"{word}{stage}": f"{{kind: deepspeed, zero_stage: {stage}}}"
            for word in ("deepspeed_stage_", "zero", "zero-", "zero_")
            for stage in (1, 2, 3)
        },
    },
}
"""By section: words that other tools write in its place, and the section that does the same."""
