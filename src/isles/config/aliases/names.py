"""Names from other tools, and what isles calls the same thing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from isles import __version__
from isles.config.aliases.finetune import FINETUNE_HERE, FINETUNE_NOWHERE
from isles.config.aliases.strategy import STRATEGY_HERE, STRATEGY_NOWHERE


@dataclass(frozen=True, slots=True)
class Foreign:
    """One name of another tool.

    Args:
        name: as that tool writes it, with underscores: `training.seq_len`.
        tools: who calls it so.
        target: the key of isles, dotted; None where there is none.
        note: why there is none, or what to mind.
    """

    name: str
    tools: tuple[str, ...]
    target: str | None
    note: str


# `= key of isles | what to mind`, then the names by tool, as the tools' own argument classes and
# reference pages have them. A dotted name counts only inside its section.
_HERE = """
= training.micro_batch_size
HF Trainer: per_device_train_batch_size per_gpu_train_batch_size
LLaMA-Factory: per_device_train_batch_size
OpenDiLoCo: per_device_train_batch_size
DeepSpeed: train_micro_batch_size_per_gpu
torchtitan: training.local_batch_size local_batch_size training.batch_size
= training.global_batch_size | sequences per optimizer step, over all ranks and accumulation
OpenDiLoCo: total_batch_size
axolotl: batch_size
nanoGPT: batch_size
DeepSpeed: train_batch_size
= training.learning_rate
OpenDiLoCo: lr
torchtitan: optimizer.lr
PyTorch: lr
DeepSpeed: optimizer.params.lr
= training.max_steps
torchtitan: training.steps
OpenDiLoCo: total_steps
nanoGPT: max_iters lr_decay_iters
DeepSpeed: total_num_steps scheduler.params.total_num_steps
= training.num_train_epochs
axolotl: num_epochs
alpaca-lora: num_epochs
torchtune: epochs
= training.lr_scheduler_type
axolotl: lr_scheduler
= training.warmup_steps
torchtitan: lr_scheduler.warmup_steps
Accelerate: num_warmup_steps
nanoGPT: warmup_iters
DeepSpeed: warmup_num_steps scheduler.params.warmup_num_steps
= training.warmup_steps | it counts steps, not a share of the run
HF Trainer: warmup_ratio
axolotl: warmup_ratio
LLaMA-Factory: warmup_ratio
= training.decay_steps | with lr_scheduler_type: wsd; it counts steps, not a share of the run
torchtitan: lr_scheduler.decay_ratio decay_ratio
= training.min_lr_ratio | a share of the peak
torchtitan: lr_scheduler.lr_min lr_scheduler.min_lr_factor lr_min min_lr_factor
axolotl: cosine_min_lr_ratio
HF Trainer: min_lr_rate min_lr lr_scheduler_kwargs
nanoGPT: min_lr
= training.optimizer
HF Trainer: optim
torchtitan: optimizer.name
= training.adam_beta1
torchtitan: optimizer.beta1
nanoGPT: beta1
PyTorch: betas
DeepSpeed: optimizer.params.betas
= training.adam_beta2
torchtitan: optimizer.beta2
nanoGPT: beta2
= training.adam_epsilon
torchtitan: optimizer.eps
PyTorch: eps
DeepSpeed: optimizer.params.eps
= training.max_grad_norm
torchtitan: training.max_norm
Accelerate: max_norm gradient_clipping
DeepSpeed: gradient_clipping
nanoGPT: grad_clip
torchtune: clip_grad_norm
= training.precision | one of 32-true, bf16-mixed, fp16-mixed, bf16-true
HF Trainer: bf16 fp16 torch_dtype half_precision_backend fp16_opt_level
axolotl: bf16 fp16 bfloat16 float16 torch_dtype
LLaMA-Factory: bf16 fp16 pure_bf16
Accelerate: mixed_precision
torchtitan: training.mixed_precision_param mixed_precision_param training.dtype
DeepSpeed: bf16.enabled fp16.enabled
nanoGPT: dtype
torchtune: dtype
= training.gradient_checkpointing | none, full or selective
torchtitan: activation_checkpoint activation_checkpoint.mode
Accelerate: fsdp_activation_checkpointing activation_checkpointing
LLaMA-Factory: disable_gradient_checkpointing use_unsloth_gc
torchtune: enable_activation_checkpointing
= training.torch_compile
torchtitan: training.compile compile.enable
Accelerate: dynamo_config dynamo_backend
nanoGPT: compile
torchtune: compile
= training.logging_steps
torchtitan: metrics.log_freq
nanoGPT: log_interval
torchtune: log_every_n_steps
= training.eval_steps | null: only at the end
HF Trainer: evaluation_strategy eval_strategy
axolotl: evals_per_epoch evaluation_strategy eval_strategy
nanoGPT: eval_interval
torchtitan: validation.freq
= training.eval_samples | it counts sequences
HF Trainer: max_eval_samples
torchtitan: validation.steps
nanoGPT: eval_iters
= data.seq_length
axolotl: sequence_len
HF Trainer: max_seq_length max_length block_size
LLaMA-Factory: cutoff_len model_max_length
torchtitan: training.seq_len seq_len
nanoGPT: block_size
torchtune: tokenizer.max_seq_len max_seq_len
= data.sources | a list, each entry with its path
axolotl: datasets pretraining_dataset
HF Trainer: dataset_name train_file train_dataset
LLaMA-Factory: dataset dataset_dir tokenized_path
OpenDiLoCo: dataset_name_or_path c4_tiny
nanoGPT: dataset
torchtitan: training.dataset training.dataset_path dataset_path
= data.sources.0.path
axolotl: data_files
HF Trainer: data_files data_dir
alpaca-lora: data_path
= data.sources.0.type | type: fake
OpenDiLoCo: fake_data
= data.sources.0.subset
HF Trainer: dataset_config_name dataset_config
= data.sources.0.text_column
HF Trainer: dataset_text_field
axolotl: field
= data.sources.0.train_on | assistant, last or all, in each source
axolotl: train_on_inputs roles_to_train train_on_eos
LLaMA-Factory: train_on_prompt mask_history
HF Trainer: completion_only_loss assistant_only_loss
= data.sources.0.columns | such as {messages: conversations}, in each source
axolotl: field_messages message_property_mappings field_instruction field_input field_output
= tokenizer.chat_template | chatml or a Jinja file
axolotl: chat_template_jinja
LLaMA-Factory: template
HF Trainer: chat_template_path
= data.sources.0.weight | one in each source
LLaMA-Factory: interleave_probs
= data.packing
axolotl: sample_packing pad_to_sequence_len
LLaMA-Factory: neat_packing
= data.validation_fraction | a share of the documents
axolotl: val_set_size
LLaMA-Factory: val_size
HF Trainer: validation_split_percentage
= data.cache_dir
axolotl: dataset_prepared_path
= model.name_or_path
axolotl: base_model base_model_config
HF Trainer: model_name_or_path pretrained_model_name_or_path config_name model_name
LLaMA-Factory: model_name_or_path
OpenDiLoCo: path_model
torchtitan: model.name model.flavor model.hf_assets_path hf_assets_path
= model.attn_implementation | sdpa uses FlashAttention kernels where the GPU has them
axolotl: flash_attention sdp_attention xformers_attention eager_attention
LLaMA-Factory: flash_attn
HF Trainer: use_flash_attention_2
= model.init | pretrained or scratch
axolotl: reinit_weights
LLaMA-Factory: train_from_scratch
nanoGPT: init_from
= tokenizer.name_or_path
HF Trainer: tokenizer_name
axolotl: tokenizer_config
torchtitan: model.tokenizer_path tokenizer_path
= outer.sync_every
OpenDiLoCo: hv.local_steps local_steps
torchtitan: fault_tolerance.sync_steps
= outer.lr
OpenDiLoCo: hv.outer_lr outer_lr
= outer | {kind: diloco}
OpenDiLoCo: hv
torchtitan: fault_tolerance.enable fault_tolerance.semi_sync_method semi_sync_method
torchtitan: fault_tolerance
= outer.hivemind.initial_peers | a list, with outer.engine: hivemind
OpenDiLoCo: hv.initial_peers
= outer.hivemind.host_maddrs | a list, with outer.engine: hivemind
OpenDiLoCo: hv.host_maddrs
= outer.hivemind.announce_maddrs | a list, with outer.engine: hivemind
OpenDiLoCo: hv.announce_maddrs
= outer.deadline | a time such as 60s
OpenDiLoCo: hv.averaging_timeout hv.timeout_waiting_for_peers
= outer.wait | all, {time_boxed: 60s} or {quorum: 2, grace: 30s}
OpenDiLoCo: hv.all_reduce_strategy hv.matchmaking_time
= outer.min_clusters
OpenDiLoCo: hv.galaxy_size galaxy_size
= outer.codec | none, bf16, int8, int4 or topk
OpenDiLoCo: hv.hivemind_compression
= checkpoint.every_steps
HF Trainer: save_steps save_strategy
axolotl: save_steps saves_per_epoch
Accelerate: checkpointing_steps
torchtitan: checkpoint.interval
OpenDiLoCo: checkpoint_interval ckpt.interval
= checkpoint.keep
HF Trainer: save_total_limit
axolotl: save_total_limit
Accelerate: total_limit
torchtitan: checkpoint.keep_latest_k
OpenDiLoCo: ckpt.topk
= checkpoint.async_save
torchtitan: checkpoint.async_mode checkpoint.enable_async_checkpoint
= checkpoint.export_on_finish
torchtitan: checkpoint.last_save_in_hf
= checkpoint
OpenDiLoCo: ckpt
= track | a list of jsonl, tensorboard, wandb and mlflow
HF Trainer: report_to
Accelerate: log_with
OpenDiLoCo: metric_logger_type
axolotl: use_tensorboard
torchtitan: metrics.enable_tensorboard
= track | such as [{kind: wandb, project: p, entity: e, mode: offline}]
axolotl: wandb_project wandb_entity wandb_name wandb_run_id wandb_mode use_wandb
nanoGPT: wandb_log wandb_project wandb_run_name
torchtitan: metrics.enable_wandb
= track | such as [{kind: mlflow, tracking_uri: http://..., experiment: e}]
axolotl: use_mlflow mlflow_experiment_name mlflow_tracking_uri
= checkpoint.push_to_hub | owner/name
HF Trainer: hub_model_id
axolotl: hub_model_id
LLaMA-Factory: hub_model_id export_hub_model_id
= checkpoint.max_shard_gb | a number, in GB
HF Trainer: max_shard_size
LLaMA-Factory: export_size
= output_dir
torchtitan: job.dump_folder checkpoint.folder
OpenDiLoCo: checkpoint_path ckpt.path
HF Trainer: logging_dir
Accelerate: project_dir
nanoGPT: out_dir
= name
HF Trainer: run_name
torchtitan: job.description
= seed
HF Trainer: data_seed
axolotl: data_seed
= clusters.0.gpus_per_node
Accelerate: num_processes gpu_ids
HF Trainer: n_gpu
torchrun: nproc_per_node
DeepSpeed: num_gpus
torchtitan: ngpu
Lightning: devices
= clusters.0.nodes | a number, or a range such as 1:3
Accelerate: num_machines
torchrun: nnodes
Lightning: num_nodes
= clusters.0.comm_timeout | a time such as 10m
HF Trainer: ddp_timeout
LLaMA-Factory: ddp_timeout
axolotl: ddp_timeout
torchtitan: comm.train_timeout_seconds comm.init_timeout_seconds
"""

_NOT_YET = f"isles {__version__} does not have this yet"

_NOWHERE = f"""
= it follows from global_batch_size / (micro_batch_size x ranks)
HF Trainer: gradient_accumulation_steps
Accelerate: gradient_accumulation_steps gradient_accumulation_plugin
axolotl: gradient_accumulation_steps
LLaMA-Factory: gradient_accumulation_steps
DeepSpeed: gradient_accumulation_steps
nanoGPT: gradient_accumulation_steps
= evaluation takes the micro_batch_size of training
HF Trainer: per_device_eval_batch_size
axolotl: eval_batch_size
torchtitan: validation.local_batch_size
= it is an option of the command: isles train run.yaml --resume auto|PATH|no
HF Trainer: resume_from_checkpoint overwrite_output_dir
axolotl: auto_resume_from_checkpoints
OpenDiLoCo: resume_from_checkpoint ckpt.resume
torchtitan: checkpoint.load_step checkpoint.initial_load_path
= isles starts the processes and finds a free port itself
Lightning: accelerator
Accelerate: distributed_type compute_environment main_process_port main_training_function use_cpu
Accelerate: downcast_bf16 same_network main_process_ip
Accelerate: machine_rank
torchrun: rdzv_backend rdzv_endpoint rdzv_id master_addr master_port node_rank
HF Trainer: local_rank ddp_backend use_cpu no_cuda
= isles reads the model's config and needs no class name
axolotl: model_type tokenizer_type is_llama_derived_model
= tokens are prepared once, and read without workers
HF Trainer: dataloader_num_workers dataloader_pin_memory dataloader_drop_last
HF Trainer: preprocessing_num_workers overwrite_cache group_by_length
axolotl: dataset_processes dataloader_prefetch_factor group_by_length
LLaMA-Factory: preprocessing_num_workers overwrite_cache buffer_size
OpenDiLoCo: num_workers
= isles train trains, evaluates at intervals, and evaluates at the end
HF Trainer: do_train do_eval
LLaMA-Factory: do_train
= a cluster is a process group of its own: each has a name below clusters
OpenDiLoCo: hv.world_rank world_rank
= a cluster whose weights are not the run's takes them from another one
OpenDiLoCo: hv.skip_load_from_peers
= a cluster that is lost is dropped from the turn, and may come back
OpenDiLoCo: hv.fail_rank_drop
= clusters average through the hub, which each of them dials (outer.engine: hub)
isles before 0.2: outer.interface
= {_NOT_YET}; curves go to TensorBoard, wandb, MLflow and metrics.jsonl
axolotl: comet_project_name use_comet
= {_NOT_YET}
axolotl: special_tokens
= {_NOT_YET}
HF Trainer: neftune_noise_alpha label_smoothing_factor
HF Trainer: load_best_model_at_end metric_for_best_model tf32 max_train_samples
HF Trainer: auto_find_batch_size gradient_checkpointing_kwargs
axolotl: early_stopping_patience plugins lr_groups
LLaMA-Factory: max_samples eval_dataset rope_scaling plot_loss resize_vocab
torchtitan: float8 mx profiling profiling.enable_profiling memory_estimation experimental
torchtitan: model.converters training.gc_freq training.deterministic
OpenDiLoCo: log_activations_steps
"""

_TABLES = (
    (_HERE, True),
    (FINETUNE_HERE, True),
    (STRATEGY_HERE, True),
    (_NOWHERE, False),
    (FINETUNE_NOWHERE, False),
    (STRATEGY_NOWHERE, False),
)


def normal(name: str) -> str:
    """A key as the table has it: lower case, underscores, no leading dashes."""
    return name.strip().lstrip("-").replace("-", "_").lower()


@cache
def foreign_names() -> dict[str, Foreign]:
    """Every known name of another tool."""
    found: dict[str, Foreign] = {}
    for table, has_targets in _TABLES:
        target, note = None, ""
        for line in table.strip().splitlines():
            if line.startswith("= "):
                head, _, tail = line[2:].partition(" | ")
                target, note = (head, tail) if has_targets else (None, line[2:])
                continue
            tool, _, names = line.partition(": ")
            for name in names.split():
                known = found.setdefault(name, Foreign(name, (), target, note))
                if tool not in known.tools:
                    tools = (*known.tools, tool)
                    found[name] = Foreign(name, tools, known.target, known.note)
    return found


def find_foreign(path: Sequence[str | int]) -> Foreign | None:
    """The other tool's name that a key is, by its whole path or its last part."""
    names = foreign_names()
    parts = [normal(part) for part in path if isinstance(part, str)]
    for start in range(len(parts)):
        found = names.get(".".join(parts[start:]))
        if found is not None:
            return found
    return None
