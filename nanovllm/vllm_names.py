"""vLLM's names: what this engine makes of each argument of vLLM's EngineArgs, SamplingParams and LLM.

A name is a field of `EngineConfig` or `SamplingParams` and does what it does in vLLM, or it stands in a table here, by
the reason why the engine does not have it. The lists are those of vLLM 0.33, with a few names of earlier versions that
scripts still use. See `nanovllm.vllm_arguments` for what is accepted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

CONFIG: tuple[Any, ...] = (None, {})  # a group of settings, none of which is set
OFF = (False,)
OFF_OR_NONE = (None, False)
UNSET = (None,)


@dataclass(frozen=True, slots=True)
class VllmName:
    """A name of vLLM's for something that this engine does not have.

    same: the values that mean what the engine does anyway; the first is vLLM's default. reason: completes "not
    supported: ..." for all other values.
    """

    same: tuple[Any, ...]
    reason: str

    def accepts(self, value: object) -> bool:
        return any(value is known or _equal(value, known) for known in self.same)


Table = Mapping[str, VllmName]


def _equal(value: object, known: object) -> bool:
    if isinstance(value, bool) is not isinstance(known, bool):
        return False  # 1 is not True
    try:
        return bool(value == known)
    except Exception:  # from the object's own __eq__, such as an array's
        return False


def _table(*groups: tuple[str, Mapping[str, tuple[Any, ...]]]) -> Table:
    """A table of groups (reason, {name: the values that mean the same})."""

    def names() -> Iterator[tuple[str, VllmName]]:
        for reason, members in groups:
            for name, same in members.items():
                yield name, VllmName(same, reason)

    return MappingProxyType(dict(names()))


# ---- Names that people try everywhere

_ROPE = (
    "RoPE is a part of the model's config: make the engine with hf_overrides={'rope_parameters': {'rope_type': 'yarn', "
    "'factor': 4.0, ...}}, on the command line --hf-overrides with the same as JSON"
)
_GUIDED = (
    "it is structured_outputs now: give {'json': SCHEMA}, {'regex': TEXT}, {'choice': LIST} or {'grammar': TEXT} as "
    "structured_outputs, in SamplingParams, a JSON line or row, or a request to the server"
)
_REASONING = (
    "the engine does not parse reasoning; what a chat template knows, such as {'enable_thinking': False}, is given as "
    "chat_template_kwargs, in LLM.chat or a request to the server"
)
EVERYWHERE: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("rope_scaling", "rope_theta"), _ROPE),
        **dict.fromkeys(
            (
                *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_decoding"),
                *("guided_json_object", "guided_decoding_backend", "guided_whitespace_pattern"),
            ),
            _GUIDED,
        ),
        **dict.fromkeys(("reasoning_effort", "include_reasoning", "thinking_token_budget"), _REASONING),
    }
)

# ---- EngineArgs

ENGINE_ARGUMENTS = _table(
    (
        "the engine runs one model, whose layers are divided by tensor_parallel_size alone; over several machines "
        "torchrun starts the ranks, with distributed_executor_backend='external_launcher'",
        {
            "pipeline_parallel_size": (1,),
            "prefill_context_parallel_size": (1,),
            "decode_context_parallel_size": (1,),
            "data_parallel_size": (1,),
            "data_parallel_rank": (None, 0),
            "data_parallel_start_rank": (None, 0),
            "data_parallel_size_local": (None, 1),
            "data_parallel_address": UNSET,
            "data_parallel_rpc_port": UNSET,
            "data_parallel_hybrid_lb": OFF,
            "data_parallel_external_lb": OFF,
            "data_parallel_multi_port_external_lb": OFF,
            "data_parallel_backend": ("mp",),
            "dp_sync_interval": (16,),
            "disable_nccl_for_dp_synchronization": (None, True, False),
            "dcp_comm_backend": UNSET,
            "dcp_q_replicate": OFF_OR_NONE,
            "dcp_kv_cache_interleave_size": (1,),
            "cp_kv_cache_interleave_size": (None, 1),
            "enable_hc_sp": OFF,
            "enable_batch_sharded_sampling": OFF_OR_NONE,
            "disable_custom_all_reduce": (False, True),
            "enable_shm_tensor_arena": OFF,
            "enable_nccl_comm_suspend": OFF,
            "nnodes": (1,),
            "node_rank": (0,),
            "master_addr": ("127.0.0.1",),
            "master_port": (29501,),
            "cpu_distributed_timeout_seconds": UNSET,
            "device_ids": UNSET,
            "max_parallel_loading_workers": UNSET,
            "ray_workers_use_nsight": OFF,
            "worker_use_ray": OFF,
            "worker_cls": ("auto",),
            "worker_extension_cls": ("", None),
            "enable_dbo": OFF,
            "ubatch_size": (0,),
            "dbo_decode_token_threshold": (32,),
            "dbo_prefill_token_threshold": (512,),
            "enable_fault_tolerance": OFF,
            "fault_tolerance_config": CONFIG,
        },
    ),
    (
        "bind the process to processors with numactl or taskset",
        {"numa_bind": OFF, "numa_bind_nodes": UNSET, "numa_bind_cpus": UNSET},
    ),
    (
        "all experts of a model are on one device, and their kernels are chosen by the device",
        {
            "enable_return_routed_experts": OFF,
            "enable_expert_parallel": OFF,
            "enable_ep_weight_filter": OFF,
            "moe_backend": ("auto",),
            "all2all_backend": ("allgather_reducescatter", None),
            "enable_elastic_ep": OFF,
            "elastic_ep_max_dp_size": UNSET,
            "eplb_config": CONFIG,
            "enable_eplb": OFF,
            "expert_placement_strategy": ("linear",),
        },
    ),
    (
        "the model families take text only",
        {
            "allowed_local_media_path": ("", None),
            "allowed_media_domains": UNSET,
            "language_model_only": (False, True),
            "limit_mm_per_prompt": CONFIG,
            "enable_mm_embeds": OFF,
            "interleave_mm_strings": OFF,
            "media_io_kwargs": CONFIG,
            "mm_processor_kwargs": CONFIG,
            "mm_processor_cache_gb": (4, 0),
            "mm_processor_cache_type": ("lru", None),
            "mm_hasher_algorithm": ("blake3", None),
            "mm_shm_cache_max_object_size_mb": (128,),
            "mm_encoder_only": OFF,
            "mm_encoder_tp_mode": ("weights",),
            "mm_encoder_attn_backend": UNSET,
            "mm_encoder_attn_dtype": UNSET,
            "mm_encoder_fp8_scale_path": UNSET,
            "mm_encoder_fp8_scale_save_path": UNSET,
            "mm_encoder_fp8_scale_save_margin": (1.5,),
            "skip_mm_profiling": (False, True),
            "video_pruning_rate": (None, 0),
            "video_pruning_method": ("evs",),
            "mm_tensor_ipc": ("direct_rpc",),
            "mm_processor_device": ("auto", "cpu"),
            "mm_ipc_gpu_memory_gb": (0,),
            "mm_device_do_normalize": UNSET,
            "disable_chunked_mm_input": (False, True),
            "enable_mm_processor_stats": OFF,
            "ec_transfer_config": CONFIG,
            "ec_manager_config": CONFIG,
        },
    ),
    (
        "LoRA adapters apply to the linear layers of a dense decoder, in its dtype and on one device",
        {
            "default_mm_loras": UNSET,
            "fully_sharded_loras": OFF,
            "lora_dtype": ("auto", None),
            "lora_target_modules": UNSET,
            "enable_tower_connector_lora": OFF,
            "specialize_active_lora": OFF,
            "enable_mixed_moe_lora_format": OFF,
            "enable_moe_shared_loras": OFF,
            "max_lora_cls_labels": UNSET,
        },
    ),
    (
        "the model families are dense decoders with attention in every layer",
        {
            "enable_prompt_embeds": OFF,
            "disable_hybrid_kv_cache_manager": (None, True, False),
            "mamba_cache_dtype": ("auto",),
            "mamba_ssm_cache_dtype": ("auto",),
            "mamba_block_size": UNSET,
            "mamba_cache_mode": ("none",),
            "enable_mamba_shared_prefix_checkpoint": OFF,
            "replayssm_buffer_len": (16,),
            "use_replayssm": OFF,
            "mamba_backend": ("triton", None),
            "mamba_ssu_algorithm": UNSET,
            "enable_mamba_cache_stochastic_rounding": OFF,
            "mamba_cache_philox_rounds": (0,),
            "mamba_config": CONFIG,
            "engram_config": CONFIG,
            "sparse_indexer_topk_backend": ("auto",),
            "gdn_prefill_backend": UNSET,
            "kda_prefill_backend": (None, "auto"),
            "kda_decode_backend": (None, "auto"),
            "diffusion_config": CONFIG,
        },
    ),
    (
        "the engine generates text: it has no pooling models and no conversion to them",
        {
            "runner": ("auto", "generate"),
            "task": ("auto", "generate"),
            "convert": ("auto", "none"),
            "pooler_config": CONFIG,
            "io_processor_plugin": UNSET,
        },
    ),
    (
        "how a checkpoint is quantized is read from its config, and plain weights are not quantized at load",
        {
            "quantization_config": CONFIG,
            "allow_deprecated_quantization": (False, True),
        },
    ),
    (
        "all layers store K and V in kv_cache_dtype, with scales that each token brings with it",
        {"calculate_kv_scales": OFF, "kv_cache_dtype_skip_layers": (None, [])},
    ),
    (
        "long prompts are always computed in chunks of at most max_num_batched_tokens tokens",
        {"enable_chunked_prefill": (None, True)},
    ),
    (
        "weights stay on the device: enable_cpu_offload=True extends the KV cache into host memory instead",
        {
            "cpu_offload_gb": (0,),
            "cpu_offload_params": (None, set()),
            "offload_backend": ("auto",),
            "offload_group_size": (0,),
            "offload_num_in_group": (1,),
            "offload_prefetch_step": (1,),
            "offload_params": (None, set()),
        },
    ),
    ("the engine itself offloads KV blocks, into host memory", {"kv_offloading_backend": ("native",)}),
    (
        "the KV cache is this engine's own",
        {
            "kv_transfer_config": CONFIG,
            "kv_events_config": CONFIG,
            "kv_sharing_fast_prefill": OFF,
            "swa_bounded_replay": (True, False),
            "prefix_match_unit": UNSET,
            "prefix_cache_retention_interval": (0, None),
            "disable_sliding_window": OFF,
            "disable_cascade_attn": (None, True),
        },
    ),
    (
        "the prefix cache compares tokens beside their xxh3 hash, so that no collision can be a hit",
        {"prefix_caching_hash_algo": ("sha256", "builtin", "xxhash")},
    ),
    (
        "the scheduler is this engine's own: requests run by priority and then by arrival",
        {
            "scheduling_policy": ("fcfs", "priority"),
            "scheduler_cls": UNSET,
            "scheduler_reserve_full_isl": (True, False),
            "prefill_schedule_interval": (1,),
            "watermark": (0,),
            "async_scheduling": OFF_OR_NONE,
            "disable_async_output_proc": (False, True),
            "num_scheduler_steps": (1,),
            "num_lookahead_slots": (0,),
            "use_v2_block_manager": (True, False),
            "max_num_scheduled_tokens": UNSET,
            "long_prefill_token_threshold_adaptive": OFF,
            "max_num_active_seqs": UNSET,
            "max_num_queued_reqs": UNSET,
            "max_num_queued_tokens": UNSET,
            "max_num_partial_prefills": (1,),
            "max_long_partial_prefills": (1,),
        },
    ),
    (
        "the engine has no speculative decoding",
        {
            "speculative_config": CONFIG,
            "speculative_model": UNSET,
            "num_speculative_tokens": UNSET,
            "spec_method": UNSET,
            "spec_model": UNSET,
            "spec_tokens": UNSET,
            "per_request_spec_decode_metrics": ("none",),
        },
    ),
    (
        "the engine takes the first attention backend that the device, the dtype and the head size allow, and logs it",
        {"attention_backend": UNSET, "attention_config": CONFIG},
    ),
    (
        "CUDA graphs are recorded for the batch sizes that the engine chooses, and enforce_eager=True turns them off",
        {
            "compilation_config": CONFIG,
            "cudagraph_capture_sizes": UNSET,
            "max_cudagraph_capture_size": UNSET,
            "max_seq_len_to_capture": UNSET,
            "max_context_len_to_capture": UNSET,
            "optimization_level": (2,),
        },
    ),
    (
        "kernels are chosen by the engine, for the device and the dtype",
        {
            "linear_backend": ("auto",),
            "kernel_config": CONFIG,
            "ir_op_priority": CONFIG,
            "enable_flashinfer_autotune": OFF_OR_NONE,
            "performance_mode": ("balanced",),
            "model_impl": ("auto",),
            "model_class_overrides": CONFIG,
            "monokernel": OFF,
            "jit_monitor_mode": ("warn",),
            "jit_monitor_verbose": OFF,
        },
    ),
    (
        "the model is read from config.json, tokenizer files and safetensors of one directory, without code of it",
        {
            "model_weights": ("", None),
            "hf_config_path": UNSET,
            "config_format": ("auto", "hf"),
            "tokenizer_mode": ("auto", "hf"),
            "code_revision": UNSET,
            "safetensors_load_strategy": (None, "lazy"),
            "safetensors_prefetch_num_threads": UNSET,
            "safetensors_prefetch_block_size": UNSET,
            "model_loader_extra_config": CONFIG,
            "ignore_patterns": (None, [], ["original/**/*"]),
            "pt_load_map_location": ("cpu",),
            "use_tqdm_on_load": (False, True),
            "weight_transfer_config": CONFIG,
        },
    ),
    (_ROPE, {"rope_scaling": CONFIG, "rope_theta": UNSET}),
    (
        "log-probabilities are of the raw logits",
        {"logprobs_mode": ("raw_logprobs",), "return_sampling_mask": OFF},
    ),
    ("the sampler is this engine's own", {"use_fp64_gumbel": OFF, "watermark_config": CONFIG}),
    (
        "give functions to each request, as SamplingParams(logits_processors=[...])",
        {"logits_processors": (None, [])},
    ),
    (
        "structured outputs are chosen by each request, as SamplingParams(structured_outputs=...)",
        {"structured_outputs_config": CONFIG},
    ),
    (_GUIDED, {"guided_decoding_backend": (None, "auto")}),
    (
        "the engine does not parse reasoning",
        {"reasoning_parser": ("", None), "reasoning_parser_plugin": ("", None), "reasoning_config": CONFIG},
    ),
    (
        "get_metrics() and the metrics of every output are always there, and logging is Python's",
        {
            "watchdog_config": CONFIG,
            "disable_log_stats": (False, True),
            "aggregate_engine_logging": OFF,
            "show_hidden_metrics_for_version": UNSET,
            "otlp_traces_endpoint": UNSET,
            "collect_detailed_traces": UNSET,
            "kv_cache_metrics": OFF,
            "kv_cache_metrics_sample": (0.01,),
            "custom_histogram_buckets": UNSET,
            "cudagraph_metrics": OFF,
            "enable_mfu_metrics": OFF,
            "enable_logging_iteration_details": OFF,
            "logging_config": CONFIG,
            "log_level": UNSET,
            "log_config_file": UNSET,
        },
    ),
    (
        "trace=FILE writes a timeline of all copies and kernels",
        {
            "profiler_config": CONFIG,
            "enable_layerwise_nvtx_tracing": OFF,
            "enable_trace_replay": OFF,
            "aux_output_config": CONFIG,
        },
    ),
    (
        "the engine cannot sleep: close() frees its memory",
        {
            "enable_sleep_mode": OFF,
            "sleep_mode_backend": ("cumem",),
            "sleep_mode_offload_cudagraph": OFF,
            "sleep_preserve_parameter_names": (None, []),
            "enable_cumem_allocator": OFF,
        },
    ),
    (
        "this is an argument of vLLM's server",
        {
            "renderer_num_workers": (1,),
            "stream_interval": (1,),
            "tokens_only": OFF,
            "shutdown_timeout": (0,),
            "fail_on_environ_validation": OFF,
        },
    ),
    ("give the template to each call, as chat(messages, chat_template=TEXT)", {"chat_template": UNSET}),
    ("the engine has no plugins", {"additional_config": CONFIG}),
)

# ---- SamplingParams

SAMPLING_PARAMETERS = _table(
    ("the engine does not mark its text", {"watermarking": OFF_OR_NONE}),
    (
        "prompt_logprobs=N reports the N most likely tokens of every prompt position, and -1 all of them",
        {"prompt_logprob_token_ids": UNSET, "prompt_logprob_start": UNSET},
    ),
    ("logprobs=N reports the N most likely tokens, and -1 all of them", {"logprob_token_ids": UNSET}),
    ("log-probabilities are reported as a dict for each position", {"flat_logprobs": OFF}),
    # Both values are the same: fast tokenizers ignore them, and a slow one goes by its own default.
    ("the tokenizer decides about spaces", {"spaces_between_special_tokens": (True, False)}),
    ("an output comes with every step that has one", {"stream_interval": (None, 1)}),
    ("the engine sets it from the stop strings", {"output_text_buffer_length": (0,)}),
    ("the sampler has no plugins", {"extra_args": CONFIG}),
    (
        "give the prompt a cache_salt of its own to keep it apart from other requests",
        {"skip_reading_prefix_cache": OFF_OR_NONE},
    ),
    (_REASONING, {"thinking_token_budget": (None, -1)}),
    ("repetition_penalty and frequency_penalty act against repetition", {"repetition_detection": UNSET}),
    ("outputs do not say which experts a token had", {"routed_experts_prompt_start": (0,)}),
    ("prompt_logprobs scores tokens that are given", {"trace_decode_token_ids": UNSET}),
    (_GUIDED, {"guided_decoding": UNSET}),
)

# ---- LLM

# Arguments of its methods, besides those that this LLM has.
CALL_ARGUMENTS = _table(
    ("the engine has no prompt adapters", {"prompt_adapter_request": UNSET}),
    ("encode the prompt with get_tokenizer() and give token ids", {"tokenization_kwargs": CONFIG}),
    (
        "the model families take text only",
        {"mm_processor_kwargs": CONFIG, "chat_template_content_format": ("auto", "string", None)},
    ),
)

# Arguments of the methods of its LLMEngine, and of reset_prefix_cache, likewise.
ENGINE_CALL_ARGUMENTS = _table(
    ("encode the prompt with get_tokenizer() and give token ids", {"tokenization_kwargs": CONFIG}),
    ("give a prompt with token ids, {'prompt_token_ids': ids, 'prompt': text}", {"prompt_text": UNSET}),
    ("the engine argument trace=FILE writes a timeline with the requests' ids", {"trace_headers": CONFIG}),
    ("cache_salt keeps the prefix cache of a group of requests to them", {"session_id": UNSET, "kv_hints": UNSET}),
    ("running requests keep their blocks: abort_request() ends them", {"reset_running_requests": OFF}),
    ("the KV cache is this engine's own, without connectors", {"reset_connector": OFF}),
    ("the engine runs in this process", {"enable_multiprocessing": OFF}),
    ("get_metrics() has all metrics", {"stat_loggers": (None, [])}),
    ("the engine reports no usage", {"usage_context": UNSET}),
    ("an abort is always the caller's", {"internal": OFF}),
)

_POOLING = "the engine generates text and has no pooling models"
_WEIGHTS = "weights are read once, when the LLM is made"
_SLEEP = "the engine cannot sleep: close() frees its memory"
_QUEUE = "use generate() or chat() with all prompts, stream() for outputs as they come, or LLMEngine for a queue"
_WORKERS = "the engine runs in this process, without workers"

# Public methods of vLLM's LLM that this one does not have, with the reason.
LLM_METHODS: Mapping[str, str] = MappingProxyType(
    {
        "encode": _POOLING,
        "embed": _POOLING,
        "classify": _POOLING,
        "reward": _POOLING,
        "score": f"{_POOLING}; score_choices() ranks answers by their log-probability",
        "enqueue": _QUEUE,
        "enqueue_chat": _QUEUE,
        "wait_for_completion": _QUEUE,
        "collective_rpc": _WORKERS,
        "apply_model": _WORKERS,
        "start_profile": "the engine argument trace=FILE writes a timeline of all copies and kernels",
        "stop_profile": "the engine argument trace=FILE writes a timeline of all copies and kernels",
        "sleep": _SLEEP,
        "wake_up": _SLEEP,
        "release_kv_cache_memory": _SLEEP,
        "reset_mm_cache": "the model families take text only",
        "init_weight_transfer_engine": _WEIGHTS,
        "shutdown_weight_transfer_engine": _WEIGHTS,
        "start_weight_update": _WEIGHTS,
        "start_draft_weight_update": _WEIGHTS,
        "update_weights": _WEIGHTS,
        "finish_weight_update": _WEIGHTS,
        "update_weight_version": _WEIGHTS,
        "get_weight_version": _WEIGHTS,
    }
)
