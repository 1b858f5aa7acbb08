"""Names from other tools for how a cluster holds the model; in the format of `foreign.py`."""

from __future__ import annotations

STRATEGY_HERE = """
= strategy | {kind: fsdp}, and its keys below it
HF Trainer: fsdp fsdp_config
axolotl: fsdp fsdp_config
Accelerate: fsdp_config
Megatron: use_distributed_optimizer
torchtitan: parallelism
= strategy | {kind: fsdp, tp_size: 2}, or cp_size, pp_size
HF Trainer: parallelism_config
Accelerate: parallelism_config megatron_lm_config
= strategy | {kind: deepspeed, zero_stage: 2}, or with config_file: a JSON file of DeepSpeed
HF Trainer: deepspeed
axolotl: deepspeed
LLaMA-Factory: deepspeed
Accelerate: deepspeed_config
DeepSpeed: zero_optimization
= strategy.config_file | with kind: deepspeed
Accelerate: deepspeed_config_file
= strategy.zero_stage | with kind: deepspeed
DeepSpeed: zero_optimization.stage
= strategy.offload_optimizer | none, cpu or nvme
DeepSpeed: zero_optimization.offload_optimizer zero_optimization.offload_optimizer.device
DeepSpeed: offload_optimizer.device zero_optimization.cpu_offload
Accelerate: offload_optimizer_device
= strategy.offload_param | none, cpu or nvme
DeepSpeed: zero_optimization.offload_param zero_optimization.offload_param.device
DeepSpeed: offload_param.device zero_optimization.cpu_offload_params
Accelerate: offload_param_device
= strategy.nvme_path
DeepSpeed: offload_optimizer.nvme_path offload_param.nvme_path
Accelerate: offload_optimizer_nvme_path offload_param_nvme_path
= strategy.sharding_strategy
HF Trainer: fsdp_config.sharding_strategy
Accelerate: fsdp_sharding_strategy
= strategy.sharding_strategy | FULL_SHARD gathers again for the backward pass, SHARD_GRAD_OP not
Accelerate: fsdp_reshard_after_forward
axolotl: reshard_after_forward
torchtitan: parallelism.fsdp_reshard_after_forward fsdp_reshard_after_forward
= strategy.transformer_layer_cls_to_wrap
HF Trainer: fsdp_transformer_layer_cls_to_wrap
Accelerate: fsdp_transformer_layer_cls_to_wrap
LLaMA-Factory: fsdp_transformer_layer_cls_to_wrap
= strategy.cpu_offload
Accelerate: fsdp_offload_params
axolotl: offload_params
torchtitan: training.enable_cpu_offload enable_cpu_offload
torchtune: fsdp_cpu_offload
= strategy.forward_prefetch | it counts blocks
Accelerate: fsdp_forward_prefetch
= strategy.backward_prefetch | it counts blocks
Accelerate: fsdp_backward_prefetch fsdp_backward_prefetch_policy
= strategy.reduce_dtype | fp32 or bf16
torchtitan: training.mixed_precision_reduce mixed_precision_reduce
DeepSpeed: communication_data_type
= strategy.shard_size | with sharding_strategy: HYBRID_SHARD; ranks that share one copy
torchtitan: parallelism.data_parallel_shard_degree data_parallel_shard_degree
axolotl: dp_shard_size
Accelerate: dp_shard_size parallelism_config_dp_shard_size
DeepSpeed: zero_hpz_partition_size mics_shard_size
= strategy.shard_size | with sharding_strategy: HYBRID_SHARD; it counts ranks of a copy, not copies
torchtitan: parallelism.data_parallel_replicate_degree data_parallel_replicate_degree
axolotl: dp_replicate_size
Accelerate: dp_replicate_size parallelism_config_dp_replicate_size
= strategy.tp_size
axolotl: tensor_parallel_size
torchtitan: parallelism.tensor_parallel_degree tensor_parallel_degree
Megatron: tensor_model_parallel_size
Accelerate: parallelism_config_tp_size megatron_lm_tp_degree
DeepSpeed: tensor_parallel.autotp_size autotp_size
torchtune: tensor_parallel_dim
= strategy.cp_size
axolotl: context_parallel_size sequence_parallel_degree
torchtitan: parallelism.context_parallel_degree context_parallel_degree
Megatron: context_parallel_size
Accelerate: parallelism_config_cp_size
torchtune: context_parallel_dim
= strategy.cp_size | with cp_method: ulysses
Accelerate: sp_size
DeepSpeed: sequence_parallel_size
= strategy.cp_method | allgather or ulysses
torchtitan: parallelism.context_parallel_rotate_method context_parallel_rotate_method
Accelerate: cp_comm_strategy parallelism_config_cp_comm_strategy sp_backend cp_backend
axolotl: ring_attn_func
= strategy.pp_size
torchtitan: parallelism.pipeline_parallel_degree pipeline_parallel_degree
Megatron: pipeline_model_parallel_size
Accelerate: megatron_lm_pp_degree
= strategy.pp_schedule
torchtitan: parallelism.pipeline_parallel_schedule pipeline_parallel_schedule
= strategy.pp_schedule | interleaved-1f1b puts two stages on a rank
Megatron: num_layers_per_virtual_pipeline_stage virtual_pipeline_model_parallel_size
= strategy.bucket_cap_mb
HF Trainer: ddp_bucket_cap_mb
Accelerate: ddp_bucket_cap_mb
Megatron: ddp_bucket_size
= strategy.gradient_compression | none, bf16 or fp16
Accelerate: ddp_comm_hook comm_hook
Lightning: ddp_comm_hook
= strategy.static_graph
HF Trainer: ddp_static_graph
= clusters.0.max_restarts
Ray: max_failures
"""

STRATEGY_NOWHERE = """
= isles finds the blocks, loads and saves shard by shard, and always takes FSDP2
HF Trainer: fsdp_min_num_params
axolotl: fsdp_version fsdp_final_state_dict_type
Accelerate: fsdp_version fsdp_auto_wrap_policy fsdp_min_num_params fsdp_state_dict_type
Accelerate: fsdp_sync_module_states fsdp_use_orig_params fsdp_cpu_ram_efficient_loading
axolotl: auto_wrap_policy state_dict_type cpu_ram_efficient_loading sync_module_states
= isles builds and saves the model in shards, and exports it whole
Accelerate: zero3_init_flag zero3_save_16bit_model
DeepSpeed: stage3_gather_16bit_weights_on_model_save
DeepSpeed: zero_optimization.stage3_gather_16bit_weights_on_model_save
= each rank reads its own rows of a global batch; balance says how many
Accelerate: dispatch_batches split_batches even_batches dataloader_config
HF Trainer: accelerator_config
= every step uses all parameters, and buffers are constants
HF Trainer: ddp_find_unused_parameters ddp_broadcast_buffers
Lightning: find_unused_parameters
PyTorch: gradient_as_bucket_view
= tensor parallel ranks hold norms whole; strategy.tp_size alone says how many
Megatron: sequence_parallel
torchtitan: parallelism.disable_loss_parallel parallelism.enable_async_tensor_parallel
"""
