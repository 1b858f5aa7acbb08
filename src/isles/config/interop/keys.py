"""The keys of a DeepSpeed JSON: what is handed on, and what isles says elsewhere."""

from __future__ import annotations

# As of DeepSpeed 0.19: runtime/config.py, runtime/zero/config.py, runtime/zero/offload_config.py.


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


PASSED = _words(
    """
    aio comms_logger communication_data_type data_types disable_allgather disable_python_gc
    dump_state flops_profiler gradient_predivide_factor log_level memory_breakdown
    prescale_gradients seq_parallel_communication_data_type steps_per_print timers
    wall_clock_breakdown zero_allow_untested_optimizer zero_force_ds_cpu_optimizer
    """
)
"""Handed to DeepSpeed as they are."""

_PRECISION = "training.precision says it; delete the section"
_TRACK = "the key track of the run file says it; delete the section"
_DELETE = "delete it"

ELSEWHERE = {
    "activation_checkpointing": "training.gradient_checkpointing says it; delete the section",
    "amp": _PRECISION,
    "autotuning": "isles finds the micro-batch itself (micro_batch_size: auto); delete it",
    "checkpoint": "the section checkpoint of the run file says it; delete it",
    "comet": _TRACK,
    "compile": "training.torch_compile says it; delete the section",
    "compression_training": _DELETE,
    "csv_monitor": _TRACK,
    "curriculum_learning": _DELETE,
    "data_efficiency": _DELETE,
    "data_parallel_size": "isles counts the ranks; delete it",
    "elasticity": "isles itself goes on with other numbers of ranks; delete the section",
    "expert_parallel": _DELETE,
    "fp32_allreduce": "data_types and communication_data_type say it; delete it",
    "gradient_allreduce_op": "isles weighs every token equally, over all ranks; delete it",
    "hybrid_engine": _DELETE,
    "managed_gradient_accumulation": "isles counts the micro-batches; delete it",
    "nebula": _DELETE,
    "pipeline": "pipelines go with strategy: {kind: fsdp, pp_size: ...}; delete the section",
    "progressive_layer_drop": _DELETE,
    "quantize_training": _DELETE,
    "random_ltd": _DELETE,
    "sequence_parallel_size": "use strategy: {kind: fsdp, cp_size: ...}",
    "sparse_attention": _DELETE,
    "sparse_gradients": _DELETE,
    "tensor_parallel": "use strategy: {kind: fsdp, tp_size: ...}",
    "tensorboard": _TRACK,
    "torch_autocast": _PRECISION,
    "use_data_before_expert_parallelism": _DELETE,
    "use_node_local_storage": _DELETE,
    "wandb": _TRACK,
    "weight_quantization": _DELETE,
    "zenflow": _DELETE,
}
"""What would change the mathematics behind the run file's back, or says what it says; the fix."""

ZERO_NUMBERS = _words(
    """
    reduce_bucket_size allgather_bucket_size sub_group_size zero_hpz_partition_size
    stage3_prefetch_bucket_size prefetch_bucket_size stage3_param_persistence_threshold
    param_persistence_threshold stage3_model_persistence_threshold model_persistence_threshold
    stage3_max_live_parameters max_live_parameters stage3_max_reuse_distance max_reuse_distance
    stage3_module_granularity_threshold module_granularity_threshold
    """
)
"""Of the section zero_optimization."""

ZERO_SWITCHES = _words(
    """
    contiguous_gradients reduce_scatter use_multi_rank_bucket_allreduce allgather_partitions
    overlap_comm load_from_fp32_weights ignore_unused_parameters round_robin_gradients
    parameter_alignment zero_quantized_weights zero_quantized_nontrainable_weights
    zero_quantized_gradients memory_efficient_linear pipeline_loading_checkpoint
    override_module_apply log_trace_cache_warnings enable_sanity_checks compute_grad_norm
    stage3_gather_16bit_weights_on_model_save gather_16bit_weights_on_model_save
    stage3_gather_fp16_weights_on_model_save stage3_use_all_reduce_for_fetch_params
    use_all_reduce_for_fetch_params stage3_allgather_sequential allgather_sequential
    """
)
"""Of the section zero_optimization."""

ZERO = ZERO_NUMBERS | ZERO_SWITCHES | {"stage", "offload_param", "offload_optimizer", "leaf_module"}
"""Of the section zero_optimization: all that is handed to DeepSpeed."""

_OFFLOAD_FIX = 'write "offload_optimizer": {"device": "cpu"} instead'
ZERO_ELSEWHERE = {
    "cpu_offload": _OFFLOAD_FIX,
    "cpu_offload_params": 'write "offload_param": {"device": "cpu"} instead',
    "cpu_offload_param": 'write "offload_param": {"device": "cpu"} instead',
    "cpu_offload_use_pin_memory": "write pin_memory in offload_optimizer and offload_param",
    "elastic_checkpoint": "isles saves checkpoints that fit any number of ranks; delete it",
    "legacy_stage1": _DELETE,
    "mics_shard_size": "use strategy: {kind: fsdp, sharding_strategy: HYBRID_SHARD}",
    "mics_hierarchical_params_gather": _DELETE,
    "zenflow": _DELETE,
    "save_muon_momentum_buffer_in_memory": _DELETE,
}
"""Old names, and what isles does otherwise; the fix."""

OFFLOAD = _words(
    """
    device nvme_path buffer_count buffer_size max_in_cpu pin_memory pipeline_read pipeline_write
    fast_init ratio super_offload cpuadam_cores_perc
    """
)
"""Of the sections offload_optimizer and offload_param."""

OPTIMIZERS = {"adamw": ("adamw", "adam"), "sgd": ("sgd",), "muon": ("muon",)}
"""training.optimizer -> DeepSpeed's types, in small letters; its Adam is AdamW by default."""

SCHEDULERS = {"constant": "WarmupLR", "linear": "WarmupDecayLR", "cosine": "WarmupCosineLR"}
"""training.lr_scheduler_type -> DeepSpeed's type."""
