"""Names from other tools for adapters, chats and preferences; in the format of `foreign.py`."""

from __future__ import annotations

from isles import __version__

_NOT_YET = f"isles {__version__} does not have this yet"

FINETUNE_HERE = """
= adapter.type | none, lora or qlora
LLaMA-Factory: finetuning_type
TRL: use_peft peft_config
= adapter.type | qlora holds the frozen matrices in 4 bits
axolotl: load_in_4bit
LLaMA-Factory: quantization_bit quantization_method
TRL: load_in_4bit quantization_config
torchtune: quantize_base model.quantize_base
= adapter.r
axolotl: lora_r
LLaMA-Factory: lora_rank
TRL: lora_r
torchtune: lora_rank model.lora_rank
= adapter.alpha
axolotl: lora_alpha
LLaMA-Factory: lora_alpha
peft: lora_alpha
TRL: lora_alpha
torchtune: lora_alpha model.lora_alpha
= adapter.dropout
axolotl: lora_dropout
LLaMA-Factory: lora_dropout
peft: lora_dropout
TRL: lora_dropout
torchtune: lora_dropout model.lora_dropout
= adapter.target_modules | all-linear, or a list such as [q_proj, v_proj]
axolotl: lora_target_modules lora_target_linear
LLaMA-Factory: lora_target
TRL: lora_target_modules
alpaca-lora: lora_target_modules
torchtune: lora_attn_modules apply_lora_to_mlp apply_lora_to_output
torchtune: model.lora_attn_modules model.apply_lora_to_mlp model.apply_lora_to_output
= adapter.modules_to_save | a list such as [embed_tokens, lm_head]
axolotl: lora_modules_to_save
LLaMA-Factory: additional_target
TRL: lora_modules_to_save
= adapter.use_dora
axolotl: peft_use_dora
= adapter.use_rslora
axolotl: peft_use_rslora
= adapter.bnb_4bit_quant_type | nf4 or fp4
LLaMA-Factory: quantization_type
= adapter.bnb_4bit_use_double_quant
TRL: use_bnb_nested_quant
LLaMA-Factory: double_quantization
= training.method | causal_lm or dpo
axolotl: rl
LLaMA-Factory: stage
= training.dpo_beta
TRL: beta
axolotl: rl_beta
LLaMA-Factory: pref_beta
= training.dpo_label_smoothing
TRL: label_smoothing
= training.stochastic_rounding | with precision: bf16-true
torchtune: bf16_stochastic_round optimizer.bf16_stochastic_round
= training.optimizer | adamw_8bit
OpenDiLoCo: use_8bit_adam
= data.packing
axolotl: eval_sample_packing sample_packing_bin_size sample_packing_group_size
TRL: packing_strategy padding_free eval_packing
torchtune: packed dataset.packed
= data.isolate_documents | null: documents that are packed together never see each other, save text
axolotl: batch_flattening sample_packing_sequentially
LLaMA-Factory: block_diag_attn
= data.too_long | truncate or drop
axolotl: excess_length_strategy
TRL: truncation_mode truncation_strategy
= data.seq_length | of a prompt and its answer together
TRL: max_prompt_length max_completion_length max_target_length
= data.streaming
TRL: dataset_streaming
axolotl: streaming_multipack_buffer_size
= data.sources.0.split
TRL: dataset_train_split
= data.validation_fraction | a share of each source
TRL: dataset_test_split test_split_size
axolotl: test_datasets
= data.sources.0.type | chat, instruct, text, tokens or preference
TRL: dataset_format
LLaMA-Factory: formatting
= data.sources.0.train_on | all: the prompt too
alpaca-lora: train_on_input
torchtune: dataset.train_on_input
= tokenizer.chat_template | chatml or a Jinja file
torchtune: prompt_template tokenizer.prompt_template
alpaca-lora: prompt_template_name
= checkpoint.merge_adapter | or later: isles checkpoint export --merge-adapter
axolotl: merge_lora
torchtune: save_adapter_weights_only
= track | such as [{kind: wandb, project: p}]
LLaMA-Factory: use_wandb
"""

FINETUNE_NOWHERE = f"""
= a message's role says who speaks; data.sources[].columns says where it stands
axolotl: roles user_assistant_roles
LLaMA-Factory: role_tag content_tag user_tag assistant_tag
= rows are padded to the longest of a micro-batch, and padding is never trained on
TRL: pad_to_multiple_of pad_token dataset_kwargs remove_unused_columns
HF Trainer: padding_side label_names
= the loss is computed in pieces and never holds all logits; Liger's is used where it is installed
HF Trainer: use_liger_kernel liger_kernel_config
axolotl: liger_rms_norm liger_cross_entropy liger_fused_linear_cross_entropy chunked_cross_entropy
LLaMA-Factory: enable_liger_kernel
TRL: use_liger_loss
= causal_lm has the cross-entropy and dpo the sigmoid loss
TRL: loss_type loss_weights
axolotl: dpo_loss_type
LLaMA-Factory: pref_loss pref_ftx
= dpo scores every pair once before training, with the model that the run begins with
TRL: precompute_ref_log_probs precompute_ref_batch_size ref_model ref_model_name_or_path
TRL: reference_free sync_ref_model model_adapter_name ref_adapter_name
LLaMA-Factory: ref_model_adapters
= isles trains on all layers' adapters, with no bias
peft: bias fan_in_fan_out layers_to_transform layers_pattern
axolotl: lora_layers_to_transform lora_fan_in_fan_out
TRL: lora_task_type
peft: task_type
= a repository that is made is private, and the token comes from `hf auth login` or HF_TOKEN
HF Trainer: hub_private_repo hub_token hub_strategy hub_always_push
axolotl: hub_strategy
LLaMA-Factory: export_hub_private_repo
= {_NOT_YET}: qlora holds frozen weights in 4 bits
axolotl: load_in_8bit gptq
TRL: load_in_8bit
= {_NOT_YET}: an adapter begins anew
axolotl: lora_model_dir
LLaMA-Factory: adapter_name_or_path
= {_NOT_YET}: it trains all weights, or an adapter beside them
axolotl: unfrozen_parameters relora relora_steps
LLaMA-Factory: freeze_trainable_layers freeze_trainable_modules use_galore use_badam use_apollo
LLaMA-Factory: pissa_init loraplus_lr_ratio
peft: init_lora_weights use_qalora rank_pattern alpha_pattern
axolotl: loraplus_lr_ratio peft_init_lora_weights lora_mlp_kernel lora_qkv_kernel lora_o_kernel
torchtitan: lora
= {_NOT_YET}
TRL: activation_offloading neftune
HF Trainer: optim_target_modules optim_args
axolotl: optim_args optim_target_modules
"""
