"""A plan as a table, as JSON and as engine arguments."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from nanovllm.features.kv_disk.policy import stored_bytes
from nanovllm.features.planner.drafts import PlannedDrafts, draft_network
from nanovllm.features.planner.network import Network
from nanovllm.features.planner.plan import Plan, RequestPlan
from nanovllm.features.planner.predict import Prediction, Rates
from nanovllm.features.planner.units import show_bytes, show_rate, show_seconds
from nanovllm.memory.budget import TransferCount
from nanovllm.memory.fitting import KVSizing
from nanovllm.memory.sizing import KVPlan
from nanovllm.models.spec import DecoderSpec

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
    others = [each for each in fields(config) if each.name not in (*arguments, *IN_NUMBERS)]
    given = {each.name: value for each in others if (value := getattr(config, each.name)) not in (each.default, {})}
    return arguments | given


def running_arguments(plan: Plan, prompt_len: int, output_len: int) -> dict[str, Any]:
    """Arguments to run a prompt as planned: those that decide where its KV cache is, unless its bytes are given."""
    config, names = plan.sizing.config, ["enable_cpu_offload", "kvcache_block_size"]
    names += ["num_gpu_blocks"] * (config.kv_cache_memory_bytes is None)
    names += ["num_cpu_blocks"] * (config.kv_offloading_size is None)
    arguments = {name: value for name, value in engine_arguments(plan).items() if name in names}
    if "num_cpu_blocks" not in arguments:  # more blocks than it needs cost nothing
        return arguments
    needed = plan.sizing.blocks_for(min(prompt_len + output_len, plan.kv.max_model_len)) - plan.kv.split.resident_blocks
    return arguments | {"num_cpu_blocks": min(plan.kv.num_cpu_blocks, max(needed, 0))}


# ---- JSON


def plan_json(plan: Plan, prompt_len: int, output_len: int) -> dict[str, Any]:
    """In bytes, tokens, seconds and rates per second; null for what is unknown or does not fit."""
    spec, kv, memory = plan.network.spec, plan.kv, asdict(plan.sizing.memory)
    fits, kept, states = plan.fits(prompt_len), memory.pop("layerwise_token_bytes"), plan.sizing.memory.states
    memory["states"] = None if states is None else states._asdict()
    return {
        "model": {
            "architecture": spec.architecture,
            "num_layers": spec.num_layers,
            "dtype": plan.network.dtype,
            "tensor_parallel_size": plan.network.num_ranks,
            "weight_bytes": plan.network.weight_bytes,
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
        "fits": fits,
        "changes_that_fit": [] if fits else plan.changes_for(prompt_len),
        "request": _request_json(plan, plan.request(prompt_len, output_len)) if fits else None,
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


# ---- text


def plan_table(plan: Plan, prompt_len: int, output_len: int) -> str:
    """Lines of label, value and note under three headings."""
    spec = plan.network.spec
    ranks = f", {plan.network.num_ranks} ranks; sizes and rates are each rank's" if plan.network.num_ranks > 1 else ""
    lines = [f"{spec.architecture}, {spec.num_layers} layers, {plan.network.dtype}{ranks}"]
    lines += ["", "Memory", *_memory(plan)]
    lines += ["", "Rates", *_rates(plan), "", f"A prompt of {prompt_len:,} tokens"]
    if plan.fits(prompt_len):
        lines += _request(plan, plan.request(prompt_len, output_len), output_len)
    else:
        lines += [_row("fits", "no", f"prompts of up to {plan.kv.max_model_len:,} tokens do")]
    return "\n".join(lines)


def _row(label: str, value: str, note: str = "") -> str:
    return f"  {label:<28}{value:>14}   {note}".rstrip()


def _memory(plan: Plan) -> list[str]:
    memory, kv, layout = plan.sizing.memory, plan.kv, plan.sizing.layout
    rows = [
        _row("device", show_bytes(memory.device_total), f"{show_bytes(memory.device_free)} free besides the weights"),
        _row("weights", show_bytes(plan.network.weight_bytes)),
    ]
    if memory.adapter_bytes:
        config = plan.sizing.config
        note = f"{config.max_loras} of rank {config.max_lora_rank}, {config.num_cpu_loras} in host memory too"
        rows.append(_row("LoRA adapters", show_bytes(memory.adapter_bytes), note))
    if plan.draft is not None:
        taken = plan.draft.memory
        note = f"weights, and KV of {taken.longest:,} tokens ({show_bytes(taken.kv_bytes)})"
        rows.append(_row(plan.draft.name, show_bytes(taken.device_bytes), note))
    if memory.states is not None:
        one, slots = plan.network.state_bytes, memory.states
        note = f"{slots.device} slots of {show_bytes(one)}, {slots.host} on the host; {slots.running} sequences at once"
        rows.append(_row("recurrent states", show_bytes(slots.device * one), note))
        if slots.draft_rows:
            kept = slots.draft_rows * plan.network.spec.draft_row_bytes(plan.network.itemsize)
            rows.append(
                _row("and for drafts", show_bytes(kept), f"what their layers keep of {slots.draft_rows:,} rows")
            )
    if memory.activation_peak:
        rows.append(_row("a step's activations", show_bytes(memory.activation_peak), f"{plan.chunk:,} tokens at most"))
    if kv.layerwise_memory.max_tokens:
        note = f"prefill layer by layer, {kv.layerwise_memory.max_tokens:,} tokens at a time"
        rows.append(_row("and for long prompts", show_bytes(kv.working_bytes - memory.activation_peak), note))
    note = f"{kv.split.resident_blocks:,} resident blocks of {layout.block_size:,} tokens"
    ring = f", {kv.split.ring_slots} ring slots" if kv.split.ring_slots else ""
    rows.append(_row("KV cache on the device", show_bytes(plan.device_kv_bytes), note + ring))
    if plan.sizing.config.enable_cpu_offload:
        rows.append(_row("KV cache on the host", show_bytes(plan.host_kv_bytes), f"{kv.num_cpu_blocks:,} blocks"))
    in_8_bits = f"{plan.network.kv_cache_dtype} with scales" if layout.scale_bytes else ""
    rows.append(_row("KV cache of a token", show_bytes(layout.token_bytes), in_8_bits))
    if any(group.window is not None for group in layout.groups):
        full = sum(len(group.layers) for group in layout.groups if group.window is None) * layout.token_layer_bytes
        note = f"{layout.groups}; {len(layout.groups)} block tables, {layout.planes} layers in a block"
        rows.append(_row("of a token behind windows", show_bytes(full), note))
    note = f"tokens; limit: {plan.sizing.longest_limit(plan.kv)}; the device alone holds {plan.device_tokens:,}"
    return [*rows, _row("longest prompt", f"{kv.max_model_len:,}", note)]


def _rates(plan: Plan) -> list[str]:
    rows = []
    for name, (option, unit) in RATES.items():
        if name == "link" or (name == "interconnect" and plan.network.num_ranks == 1):
            continue
        rate = getattr(plan.rates, name)
        shown = "not given" if rate is None else show_rate(rate, unit)
        if name == "disk_bandwidth" and rate is None:
            continue
        needed = rate is None and (name != "host_bandwidth" or plan.cpu_attention)
        rows.append(_row(name.replace("_", " "), shown, f"({option})" if needed else ""))
    link = plan.rates.link
    if link is None:
        rows.append(_row("link", "not given", "(--link)" if plan.kv.num_cpu_blocks else ""))
    else:
        note = f"back {show_rate(link.d2h, 'B/s')}; {link.overlap:.0%} of the shorter hides behind the longer"
        rows.append(_row("link", show_rate(link.h2d, "B/s"), note))
    rates = plan.rates
    fixed = {"step": rates.step_seconds, "layer": rates.layer_seconds, "block read": rates.block_read_seconds}
    if plan.network.num_ranks > 1:
        fixed["sum over the ranks"] = rates.all_reduce_seconds
    each = ", ".join(f"{show_seconds(seconds)} a {name}" for name, seconds in fixed.items())
    return [*rows, _row("fixed costs", "", each if any(fixed.values()) else "not given: speeds are upper bounds")]


def _request(plan: Plan, request: RequestPlan, wanted: int) -> list[str]:
    cut = f", not {wanted:,}: there the longest sequence ends" if request.output_len < wanted else ""
    rows = [
        _row("fits", "yes", f"and {request.output_len:,} token{'s' * (request.output_len != 1)} out{cut}"),
        _row("KV cache", show_bytes(request.kv_bytes), f"{request.num_blocks:,} blocks"),
        _row("stays on the device", show_bytes(request.resident_bytes)),
        _row("on the host", show_bytes(request.streamed_bytes)),
        *([_cpu_attention(request)] if plan.cpu_attention else []),
        *_moves("prefill", request.prefill_transfers, 1),
        *_moves("a decoded token", request.decode_transfers, request.output_len - 1),
    ]
    if request.layer_by_layer:
        rows.append(_row("goes layer by layer", f"{request.layer_by_layer:,}", "tokens of the prompt"))
    for name, phase in (("prefill", request.prefill), ("decode", request.decode)):
        if phase.seconds is None:
            rows.append(_row(name, "not known", f"not given: {_options(phase.missing)}"))
        elif name == "prefill":
            rate = f"{request.prompt_len / phase.seconds:,.1f} tok/s"
            rows.append(_row(name, show_seconds(phase.seconds), f"{rate}; {_limit(phase)}"))
        else:
            note = f"{show_seconds(phase.seconds)} a token; {_limit(phase)}"
            rows.append(_row(name, f"{1 / phase.seconds:,.1f} tok/s", note))
    if (drafts := request.drafts) is not None and drafts.step.seconds and drafts.tokens_per_second:
        passed = f"{drafts.tokens:.1f} tokens in a pass of {show_seconds(drafts.step.seconds)}"
        note = f"{passed}, if {drafts.acceptance:.0%} are right (--acceptance)"
        rows.append(_row(f"with {drafts.count} drafts", f"{drafts.tokens_per_second:,.1f} tok/s", note))
    return [*rows, _restore(Restore.of(plan, request))]


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
        rate, prefill = plan.rates.disk_bandwidth, request.prefill.seconds
        return cls(num_bytes, num_bytes / rate if rate else None, num_bytes / prefill if prefill else None)


def _restore(restore: Restore) -> str:
    parts = [] if restore.seconds is None else [show_seconds(restore.seconds)]
    if restore.worth_it_from:
        parts.append(f"faster than the prefill from {show_rate(restore.worth_it_from, 'B/s')} on")
    return _row("read from kv_cache_dir", show_bytes(restore.num_bytes), "; ".join(parts))


def _moves(phase: str, moved: TransferCount, steps: int) -> list[str]:
    """Transfers of one of `steps` steps, on average."""
    ways = (("in", moved.h2d_bytes, moved.h2d_copies), ("out", moved.d2h_bytes, moved.d2h_copies))
    return [
        _row(f"{phase} moves {way}", show_bytes(size / steps), f"{copies / steps:,.0f} copies")
        for way, size, copies in ways
        if copies
    ]


def _cpu_attention(request: RequestPlan) -> str:
    """The CPU's share of a decode step."""
    label = "the CPU attends to"
    if request.cpu_attention_bytes is None:
        return _row(label, "not given", f"({_options(request.no_cpu_attention)}): what follows is without the CPU")
    return _row(label, show_bytes(request.cpu_attention_bytes), "of these for a decoded token, in host memory")


def _limit(phase: Prediction) -> str:
    short = ((name.removesuffix(" memory bandwidth"), seconds) for name, seconds in phase.terms.items())
    parts = ", ".join(f"{name} {show_seconds(seconds)}" for name, seconds in short)
    return f"limit: {phase.limit} ({parts})"


def _options(rates: tuple[str, ...]) -> str:
    return ", ".join(dict.fromkeys(RATES[name][0] for name in rates))


@dataclass(frozen=True, slots=True)
class EnginePlan(Plan):
    """The plan of an engine that exists. Its text is the report on the longest prompt, as `nanovllm plan` prints it."""

    def __str__(self) -> str:
        return plan_table(self, self.kv.max_model_len, 1)


def engine_plan(spec: DecoderSpec, dtype: str, sizing: KVSizing, kv: KVPlan, rates: Rates | None) -> EnginePlan:
    """The plan of an engine whose KV memory is `kv`."""
    network, draft = Network(spec, dtype, sizing.config.kv_cache_dtype), draft_network(sizing.config, spec)
    return EnginePlan(network, sizing, rates or Rates(), kv, draft)
