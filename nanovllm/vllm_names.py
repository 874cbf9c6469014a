"""vLLM's names that are not this engine's, by the values that mean what the engine does anyway.

A name of vLLM's EngineArgs, SamplingParams or LLM is a field of `EngineConfig` or `SamplingParams` and does what it
does in vLLM, or it stands here: these values are accepted, and all others refused. The names are those of vLLM 0.33,
with a few of earlier versions that scripts still use.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from nanovllm.errors import quoted, unknown_name_message

Table = Mapping[str, tuple[Any, ...]]


def _table(*groups: tuple[Any, ...]) -> Table:
    """A table from groups (names, *values that mean what the engine does anyway); the first is vLLM's default."""
    return MappingProxyType({name: tuple(values) for names, *values in groups for name in names.split()})


# Engine arguments that this engine has under a name of its own.
ENGINE_ALIASES: Mapping[str, str] = MappingProxyType(
    {"block_size": "kvcache_block_size", "num_gpu_blocks_override": "num_gpu_blocks"}
)
# What takes the place of names that people try everywhere: as an argument, a flag, a parameter or a field.
INSTEAD: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("rope_scaling", "rope_theta"), "hf_overrides={'rope_parameters': {...}}"),
        **dict.fromkeys(
            (
                *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_decoding"),
                *("guided_json_object", "guided_decoding_backend", "guided_whitespace_pattern"),
            ),
            "structured_outputs",
        ),
        **dict.fromkeys(("reasoning_effort", "include_reasoning", "thinking_token_budget"), "chat_template_kwargs"),
    }
)
# EngineArgs.
ENGINE_ARGUMENTS = _table(
    (
        "allowed_media_domains attention_backend chat_template code_revision collect_detailed_traces "
        "cpu_distributed_timeout_seconds cudagraph_capture_sizes custom_histogram_buckets data_parallel_address "
        "data_parallel_rpc_port dcp_comm_backend default_mm_loras device_ids elastic_ep_max_dp_size "
        "gdn_prefill_backend hf_config_path io_processor_plugin log_config_file log_level lora_target_modules "
        "mamba_block_size mamba_ssu_algorithm max_context_len_to_capture max_cudagraph_capture_size "
        "max_lora_cls_labels max_num_active_seqs max_num_queued_reqs max_num_queued_tokens max_num_scheduled_tokens "
        "max_parallel_loading_workers max_seq_len_to_capture mm_device_do_normalize mm_encoder_attn_backend "
        "mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path num_speculative_tokens "
        "numa_bind_cpus numa_bind_nodes otlp_traces_endpoint prefix_match_unit rope_theta "
        "safetensors_prefetch_block_size safetensors_prefetch_num_threads scheduler_cls "
        "show_hidden_metrics_for_version spec_method spec_model spec_tokens speculative_model",
        None,
    ),
    (
        "aggregate_engine_logging calculate_kv_scales cudagraph_metrics data_parallel_external_lb "
        "data_parallel_hybrid_lb data_parallel_multi_port_external_lb disable_sliding_window enable_cumem_allocator "
        "enable_dbo enable_elastic_ep enable_ep_weight_filter enable_eplb enable_expert_parallel "
        "enable_fault_tolerance enable_hc_sp enable_layerwise_nvtx_tracing enable_logging_iteration_details "
        "enable_mamba_cache_stochastic_rounding enable_mamba_shared_prefix_checkpoint enable_mfu_metrics "
        "enable_mixed_moe_lora_format enable_mm_embeds enable_mm_processor_stats enable_moe_shared_loras "
        "enable_nccl_comm_suspend enable_prompt_embeds enable_return_routed_experts enable_shm_tensor_arena "
        "enable_sleep_mode enable_tower_connector_lora enable_trace_replay fail_on_environ_validation "
        "fully_sharded_loras interleave_mm_strings jit_monitor_verbose kv_cache_metrics kv_sharing_fast_prefill "
        "long_prefill_token_threshold_adaptive mm_encoder_only monokernel numa_bind ray_workers_use_nsight "
        "return_sampling_mask sleep_mode_offload_cudagraph specialize_active_lora tokens_only use_fp64_gumbel "
        "use_replayssm worker_use_ray",
        False,
    ),
    ("async_scheduling dcp_q_replicate enable_batch_sharded_sampling enable_flashinfer_autotune", None, False),
    (
        "additional_config attention_config aux_output_config compilation_config diffusion_config ec_manager_config "
        "ec_transfer_config engram_config eplb_config fault_tolerance_config ir_op_priority kernel_config "
        "kv_events_config kv_transfer_config limit_mm_per_prompt logging_config mamba_config media_io_kwargs "
        "mm_processor_kwargs model_class_overrides model_loader_extra_config pooler_config profiler_config "
        "quantization_config reasoning_config rope_scaling structured_outputs_config "
        "watchdog_config watermark_config weight_transfer_config",
        None,
        {},
    ),
    (
        "data_parallel_size dcp_kv_cache_interleave_size decode_context_parallel_size max_long_partial_prefills "
        "max_num_partial_prefills nnodes num_scheduler_steps offload_num_in_group offload_prefetch_step "
        "pipeline_parallel_size prefill_context_parallel_size prefill_schedule_interval renderer_num_workers "
        "stream_interval",
        1,
    ),
    (
        "cpu_offload_gb mamba_cache_philox_rounds mm_ipc_gpu_memory_gb node_rank num_lookahead_slots "
        "offload_group_size shutdown_timeout ubatch_size watermark",
        0,
    ),
    (
        "allow_deprecated_quantization disable_async_output_proc disable_chunked_mm_input disable_custom_all_reduce "
        "disable_log_stats language_model_only skip_mm_profiling use_tqdm_on_load",
        False,
        True,
    ),
    (
        "linear_backend mamba_cache_dtype mamba_ssm_cache_dtype model_impl moe_backend offload_backend "
        "sparse_indexer_topk_backend worker_cls",
        "auto",
    ),
    (
        "allowed_local_media_path model_weights reasoning_parser reasoning_parser_plugin worker_extension_cls",
        "",
        None,
    ),
    ("data_parallel_rank data_parallel_start_rank video_pruning_rate", None, 0),
    ("guided_decoding_backend kda_decode_backend kda_prefill_backend", None, "auto"),
    ("kv_cache_dtype_skip_layers logits_processors sleep_preserve_parameter_names", None, []),
    ("scheduler_reserve_full_isl swa_bounded_replay use_v2_block_manager", True, False),
    ("cp_kv_cache_interleave_size data_parallel_size_local", None, 1),
    ("dp_sync_interval replayssm_buffer_len", 16),
    ("disable_hybrid_kv_cache_manager disable_nccl_for_dp_synchronization", None, True, False),
    ("mamba_cache_mode per_request_spec_decode_metrics", "none"),
    ("runner task", "auto", "generate"),
    ("disable_cascade_attn enable_chunked_prefill", None, True),
    ("cpu_offload_params offload_params", None, set()),
    ("config_format tokenizer_mode", "auto", "hf"),
    ("data_parallel_backend", "mp"),
    ("master_addr", "127.0.0.1"),
    ("master_port", 29501),
    ("dbo_decode_token_threshold", 32),
    ("dbo_prefill_token_threshold", 512),
    ("all2all_backend", "allgather_reducescatter", None),
    ("expert_placement_strategy", "linear"),
    ("mm_processor_cache_gb", 4, 0),
    ("mm_processor_cache_type", "lru", None),
    ("mm_hasher_algorithm", "blake3", None),
    ("mm_shm_cache_max_object_size_mb", 128),
    ("mm_encoder_tp_mode", "weights"),
    ("mm_encoder_fp8_scale_save_margin", 1.5),
    ("video_pruning_method", "evs"),
    ("mm_tensor_ipc", "direct_rpc"),
    ("mm_processor_device", "auto", "cpu"),
    ("lora_dtype", "auto", None),
    ("mamba_backend", "triton", None),
    ("convert", "auto", "none"),
    ("kv_offloading_backend", "native"),
    ("prefix_cache_retention_interval", 0, None),
    ("prefix_caching_hash_algo", "sha256", "builtin", "xxhash"),
    ("scheduling_policy", "fcfs", "priority"),
    ("optimization_level", 2),
    ("performance_mode", "balanced"),
    ("jit_monitor_mode", "warn"),
    ("safetensors_load_strategy", None, "lazy"),
    ("ignore_patterns", None, [], ["original/**/*"]),
    ("pt_load_map_location", "cpu"),
    ("logprobs_mode", "raw_logprobs"),
    ("kv_cache_metrics_sample", 0.01),
    ("sleep_mode_backend", "cumem"),
)
# SamplingParams. Tokenizers decide about spaces between special tokens, so that both values mean the same.
SAMPLING_PARAMETERS = _table(
    (
        "guided_decoding logprob_token_ids prompt_logprob_start prompt_logprob_token_ids repetition_detection "
        "trace_decode_token_ids",
        None,
    ),
    ("flat_logprobs", False),
    ("skip_reading_prefix_cache watermarking", None, False),
    ("extra_args", None, {}),
    ("output_text_buffer_length routed_experts_prompt_start", 0),
    ("spaces_between_special_tokens", True, False),
    ("stream_interval", None, 1),
    ("thinking_token_budget", None, -1),
)
# Arguments of the methods of LLM and LLMEngine.
CALL_ARGUMENTS = _table(
    ("kv_hints prompt_adapter_request prompt_text session_id usage_context", None),
    ("enable_multiprocessing internal reset_connector reset_running_requests", False),
    ("mm_processor_kwargs tokenization_kwargs trace_headers", None, {}),
    ("stat_loggers", None, []),
)


def own_arguments(
    what: str, given: Mapping[str, Any], known: Collection[str], others: Table, error: type[Exception]
) -> dict[str, Any]:
    """The arguments of `given` that are `known`. vLLM's `others` are left out where they mean what the engine does.

    what: such as "engine argument". Raises `error` for other values, and for unknown names with the nearest valid one.
    """
    for name, value in given.items():
        if name in known:
            continue
        if name not in others:
            raise error(unknown_name(what, name, [*known, *others], listed=known))
        if not any(_same(value, accepted) for accepted in others[name]):
            advice = f"use {INSTEAD[name]} instead" if name in INSTEAD else "leave it out"
            raise error(f"{name}={quoted(value)} is not supported: {advice}")
    return {name: value for name, value in given.items() if name in known}


def refusal(name: str) -> str | None:
    """What is said of a name in `INSTEAD` wherever it is given; None for all other names."""
    return f"{name} is not supported: use {INSTEAD[name]} instead" if name in INSTEAD else None


def unknown_name(what: str, name: str, known: Collection[str], listed: Collection[str] | None = None) -> str:
    """The message for a name that is not known here: `refusal`, or the most similar one that is."""
    return refusal(name) or unknown_name_message(what, name, known, listed)


def _same(value: object, accepted: object) -> bool:
    if isinstance(value, bool) is not isinstance(accepted, bool):
        return False  # 1 is not True
    try:
        return value is accepted or bool(value == accepted)
    except Exception:  # from the object's own __eq__, such as an array's
        return False
