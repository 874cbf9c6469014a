"""A plan as JSON and as engine arguments."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from nanovllm.features.kv_disk.policy import stored_bytes
from nanovllm.features.planner.drafts import PlannedDrafts
from nanovllm.features.planner.outlook import Outlook, four_bit_bytes
from nanovllm.features.planner.plan import Plan, RequestPlan
from nanovllm.features.planner.predict import Prediction

RATES = {  # option of the command line, and unit
    "compute": ("--compute", "FLOPS"),
    "attention": ("--compute", "FLOPS"),
    "weight_bandwidth": ("--device-bandwidth", "B/s"),
    "head_bandwidth": ("--device-bandwidth", "B/s"),
    "device_bandwidth": ("--device-bandwidth", "B/s"),
    "host_bandwidth": ("--host-bandwidth", "B/s"),
    "link": ("--link", "B/s"),
    "interconnect": ("--interconnect", "B/s"),
    "disk_bandwidth": ("--disk-bandwidth", "B/s"),
}
IN_NUMBERS = ("model", "num_cpu_blocks", "kv_cache_memory_bytes", "kv_offloading_size")  # arguments that are told so


def engine_arguments(plan: Plan) -> dict[str, Any]:
    """Arguments for `LLM` that reproduce the plan, with sizes from memory as numbers."""
    config = plan.sizing.config
    arguments = {
        "dtype": plan.network.dtype,
        "enable_cpu_offload": config.enable_cpu_offload,
        "kvcache_block_size": plan.sizing.layout.block_size,
        "max_num_batched_tokens": plan.chunk,
        "max_num_seqs": config.max_num_seqs,
        "num_gpu_blocks": plan.kv.num_gpu_blocks,
    }
    if config.enable_cpu_offload:
        arguments |= {"num_cpu_blocks": plan.kv.num_cpu_blocks, "cpu_attention": config.cpu_attention}
    others = [field for field in fields(config) if field.name not in (*arguments, *IN_NUMBERS)]
    given = {other.name: value for other in others if (value := getattr(config, other.name)) not in (other.default, {})}
    return arguments | given


def running_arguments(plan: Plan, prompt_len: int, output_len: int) -> dict[str, Any]:
    """Arguments to run a prompt as planned: those that decide where its KV cache is, unless its bytes are given."""
    config = plan.sizing.config
    names = ["enable_cpu_offload", "kvcache_block_size"]
    names += ["num_gpu_blocks"] * (config.kv_cache_memory_bytes is None)
    names += ["num_cpu_blocks"] * (config.kv_offloading_size is None)
    arguments = {name: value for name, value in engine_arguments(plan).items() if name in names}
    if "num_cpu_blocks" not in arguments:  # more blocks than it needs cost nothing
        return arguments
    needed = plan.sizing.blocks_for(min(prompt_len + output_len, plan.kv.max_model_len)) - plan.kv.split.resident_blocks
    return arguments | {"num_cpu_blocks": min(plan.kv.num_cpu_blocks, max(needed, 0))}


# ---- JSON


def plan_json(outlook: Outlook, output_len: int) -> dict[str, Any]:
    """In bytes, tokens, seconds and rates per second; null for what is unknown.

    If the prompt does not fit, all but `fits`, `in_the_way` and `changes_that_fit` is as `as_if` says.
    """
    plan = outlook.plan
    prompt_len = outlook.prompt_len
    spec = plan.network.spec
    kv = plan.kv
    memory = asdict(plan.sizing.memory)
    kept = memory.pop("layerwise_token_bytes")
    states = plan.sizing.memory.states
    memory["states"] = None if states is None else states._asdict()
    return {
        "model": {
            "architecture": spec.architecture,
            "num_layers": spec.num_layers,
            "dtype": plan.network.dtype,
            "tensor_parallel_size": plan.network.num_ranks,
            "weight_bytes": plan.network.weight_bytes,
            "four_bit_weight_bytes": four_bit_bytes(plan.network),
            "kv_cache_dtype": plan.network.kv_cache_dtype,
            "kv_bytes_per_token": plan.sizing.layout.token_bytes,
            "kv_groups": [{"window": group.window, "layers": len(group.layers)} for group in plan.sizing.layout.groups],
            "max_model_len": plan.sizing.model_max_len,
        },
        "memory": memory | {"layerwise": {"token_bytes": kept} if kept else None},
        "rates": asdict(plan.rates),
        "engine": engine_arguments(plan),
        "kv_cache": {
            "resident_blocks": kv.split.resident_blocks,
            "ring_slots": kv.split.ring_slots,
            "host_blocks": kv.num_cpu_blocks,
            "device_bytes": plan.device_kv_bytes,
            "host_bytes": plan.host_kv_bytes,
            "device_tokens": plan.device_tokens,
            "cache_tokens": plan.cache_tokens,
            "layer_buffer_blocks": kv.layerwise_memory.buffer_blocks,
            "max_span_tokens": kv.layerwise_memory.max_tokens,
            "working_bytes": kv.working_bytes,
        },
        "longest_prompt": {"tokens": kv.max_model_len, "limit": plan.sizing.longest_limit(plan.kv)},
        "chunk_that_hides_the_link": plan.hiding_chunk,
        "prompt_len": prompt_len,
        "fits": outlook.fits,
        "in_the_way": [asdict(obstacle) for obstacle in outlook.obstacles],
        "as_if": list(outlook.as_if),
        "changes_that_fit": list(outlook.changes),
        "request": _request_json(plan, plan.request(prompt_len, output_len)),
    }


def _request_json(plan: Plan, request: RequestPlan) -> dict[str, Any]:
    restore = Restore.of(plan, request)
    return {
        "output_len": request.output_len,
        "layer_by_layer_tokens": request.layer_by_layer,
        "num_blocks": request.num_blocks,
        "kv_bytes": request.kv_bytes,
        "resident_bytes": request.resident_bytes,
        "streamed_bytes": request.streamed_bytes,
        "most_kv_bytes": request.most_kv_bytes,
        "cpu_attention": {
            "bytes_per_decode_step": request.cpu_attention_bytes,
            "rates_not_known": list(request.no_cpu_attention),
        },
        "restore_from_disk": {
            "bytes": restore.num_bytes,
            "seconds": restore.seconds,
            "faster_than_prefill_from_bytes_per_second": restore.worth_it_from,
        },
        "prefill": _phase_json(request.prefill, request.prompt_len) | {"transfers": asdict(request.prefill_transfers)},
        "decode": _phase_json(request.decode, 1) | {"transfers": asdict(request.decode_transfers)},
        "drafts": None if request.drafts is None else _drafts_json(request.drafts),
    }


def _drafts_json(drafts: PlannedDrafts) -> dict[str, Any]:
    return {
        "count": drafts.count,
        "acceptance": drafts.acceptance,
        "tokens_in_a_pass": drafts.tokens,
        "tokens_per_second": drafts.tokens_per_second,
        "seconds": drafts.step.seconds,
        "rates_not_known": list(drafts.step.missing),
    }


def _phase_json(phase: Prediction, tokens: int) -> dict[str, Any]:
    return {
        "seconds": phase.seconds,
        "tokens_per_second": tokens / phase.seconds if phase.seconds else None,
        "limit": phase.limit,
        "seconds_by_resource": phase.terms,
        "rates_not_known": list(phase.missing),
    }


@dataclass(frozen=True, slots=True)
class Restore:
    """Reading what `kv_cache_dir` may have of a prompt, instead of computing it.

    seconds: None if the rate of the disk is not known. worth_it_from: bytes per second from which on it is faster than
    the prefill; None if the prefill's time is not known.
    """

    num_bytes: int
    seconds: float | None
    worth_it_from: float | None

    @classmethod
    def of(cls, plan: Plan, request: RequestPlan) -> Restore:
        state_bytes = plan.network.state_bytes if plan.network.spec.recurrent is not None else 0
        num_bytes = stored_bytes(plan.sizing.layout, state_bytes, request.prompt_len)
        rate = plan.rates.disk_bandwidth
        prefill = request.prefill.seconds
        return cls(num_bytes, num_bytes / rate if rate else None, num_bytes / prefill if prefill else None)
