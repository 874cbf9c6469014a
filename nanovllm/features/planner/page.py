"""A plan as one page of text, and as JSON. Times from data sheets are bounds, and are called so beside each number."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from nanovllm.data.network import Network
from nanovllm.features.planner.plan import Plan, RequestPlan
from nanovllm.features.planner.predict import COMPUTE, DEVICE, DISK, HOST, INTERCONNECT, LINK, Prediction, Rates
from nanovllm.features.planner.units import show_bytes, show_rate, show_seconds
from nanovllm.memory.budget import TransferCount
from nanovllm.memory.fitting import KVSizing
from nanovllm.memory.sizing import KVPlan
from nanovllm.memory.weights import WeightPlan

WORK = {
    COMPUTE: "computing",
    DEVICE: "reading the memory of the device",
    HOST: "the CPU's attention and products with what is on the host",
    INTERCONNECT: "sums over the ranks",
    DISK: "reading weights from disk",
}
LIMITS = {
    COMPUTE: "computing",
    DEVICE: "the memory of the device",
    HOST: "the memory of the host",
    LINK: "the link",
    DISK: "the disk",
}
ENDS = {"positions": "there the model's positions end", "KV memory": "there the memory for KV cache ends"}
SHORT_STEP = 2048  # tokens of a step, of which models with windows hold little at once


def page(plan: Plan, name: str, machine: str, prompt_len: int | None, output_len: int) -> str:
    """Whether the prompt fits; then memory, KV cache and time, of the longest that fits if this one does not.

    name: of the model; machine: such as "RTX 4090 (24.0 GB)"; prompt_len: tokens, None for the longest that fits.
    """
    longest = plan.kv.max_model_len
    tokens = prompt_len or longest
    request = plan.request(min(tokens, longest), output_len)
    lines = [f"{name}: {_network(plan.network)}, {plan.network.dtype}", f"on {machine}", ""]
    if plan.fits(tokens):
        limit = plan.sizing.longest_limit(plan.kv)
        end = f"The longest that fits has {longest:,} ({ENDS.get(limit, limit)})."
        lines.append(f"A prompt of {tokens:,} tokens fits, with {_output(request, output_len)}. {end}")
    else:
        lines.append(f"A prompt of {tokens:,} tokens does not fit: {plan.sizing.advice(tokens)}.")
        lines.append(f"The numbers below are for {longest:,} tokens, the longest prompt that fits.")
    ranks = plan.network.num_ranks
    of_each = f", of each of {ranks} ranks" if ranks > 1 else ""
    lines += ["", f"Memory of the device{of_each}", *_memory(plan)]
    if plan.weights.streamed:
        lines += ["", f"Weights{of_each}", *_weights(plan, request)]
    lines += ["", f"KV cache of the {request.prompt_len + request.output_len:,} tokens{of_each}"]
    return "\n".join([*lines, *_kv_cache(plan, request), "", *_time(plan, request)])


def plan_json(plan: Plan, prompt_len: int | None, output_len: int) -> dict[str, Any]:
    """In bytes, tokens, seconds and rates per second; null for what is unknown.

    `request` is the prompt, or the longest that fits if this one does not.
    """
    tokens = prompt_len or plan.kv.max_model_len
    request = plan.request(min(tokens, plan.kv.max_model_len), output_len)
    memory = asdict(plan.sizing.memory)
    if plan.sizing.memory.states is not None:
        memory["states"] = plan.sizing.memory.states._asdict()
    network = plan.network
    return {
        "fits": plan.fits(tokens),
        "advice": None if plan.fits(tokens) else plan.sizing.advice(tokens),
        "model": {
            "architecture": network.architecture,
            "dtype": network.dtype,
            "weight_bytes": network.weight_bytes,
            "kv_bytes_per_token": plan.sizing.layout.token_bytes,
        },
        "memory": memory,
        "weights": {
            "device_bytes": plan.weights.device_bytes,
            "slots": plan.weights.num_slots,
            "slot_bytes": plan.weights.slot_bytes,
            "host_products": plan.weights.host_products,
            "cached_experts": plan.weights.cached_experts,
            "expert_bytes": plan.weights.expert_bytes,
            "host_bytes": plan.weights.host_bytes,
            "disk_bytes": plan.weights.disk_bytes,
            "host_experts": plan.weights.host_experts,
            "streamed_layers": plan.weights.streamed,
        },
        "rates": asdict(plan.rates),
        "engine": {
            "enable_cpu_offload": plan.sizing.config.enable_cpu_offload,
            "kvcache_block_size": plan.sizing.layout.block_size,
            "max_num_batched_tokens": plan.sizing.config.max_num_batched_tokens,
        },
        "kv_cache": asdict(plan.kv)
        | {
            "device_bytes": plan.device_kv_bytes,
            "host_bytes": plan.host_kv_bytes,
            "cache_tokens": plan.cache_tokens,
            "limit": plan.sizing.longest_limit(plan.kv),
        },
        "request": asdict(request)
        | {
            "streamed_bytes": request.streamed_bytes,
            "prefill": asdict(request.prefill) | {"limit": request.prefill.limit},
            "decode": asdict(request.decode) | {"limit": request.decode.limit},
            "faster": [change._asdict() for change in request.faster],
        },
    }


@dataclass(frozen=True, slots=True)
class EnginePlan(Plan):
    """The plan of an engine that exists. Its text is the page of the longest prompt."""

    def __str__(self) -> str:
        return page(self, "this engine", "this machine", None, 1)


def engine_plan(network: Network, sizing: KVSizing, kv: KVPlan, rates: Rates | None) -> EnginePlan:
    """The plan of an engine whose KV memory is `kv`."""
    return EnginePlan(network, sizing, rates or Rates(), kv)


def _row(label: str, value: str, note: str = "") -> str:
    return f"  {label:<18}{value:>19}   {note}".rstrip()


def _network(network: Network) -> str:
    experts = network.experts
    text = f"{network.architecture}, {network.num_layers} layers"
    if experts is not None:
        text += f" with {experts.num_experts} experts, of which a token uses {experts.num_experts_per_tok}"
    return text if network.quantization is None else f"{text}, quantized ({network.quantization})"


def _output(request: RequestPlan, wanted: int) -> str:
    tokens = f"{request.output_len:,} token{'s' * (request.output_len != 1)} of output"
    return f"{tokens} instead of {wanted:,}, since no longer sequence fits" if request.output_len < wanted else tokens


# ---- memory


def _memory(plan: Plan) -> list[str]:
    memory = plan.sizing.memory
    config = plan.sizing.config
    network = plan.network
    kv = plan.kv
    note = "" if plan.weights.streamed else _read_weights(network)
    rows = [_row("in all", show_bytes(memory.device_total))]
    rows.append(_row("weights", show_bytes(plan.weights.device_bytes), note))
    if memory.adapter_bytes:
        note = f"{config.max_loras} of rank {config.max_lora_rank}; {config.num_cpu_loras} are in host memory too"
        rows.append(_row("LoRA adapters", show_bytes(memory.adapter_bytes), note))
    if (states := memory.states) is not None:
        kept = states.draft_rows * network.draft_row_bytes
        note = f"{states.device} of {show_bytes(network.state_bytes)}, for {states.running} sequences at once"
        note += " and for prefixes that are kept" * (states.device > states.running)
        rows.append(_row("recurrent states", show_bytes(states.device * network.state_bytes + kept), note))
    if kv.working_bytes:
        note = f"what a step of up to {config.max_num_batched_tokens:,} tokens needs"
        note += ", and a buffer for prompts that stream" * (kv.layerwise_memory.max_tokens > 0)
        rows.append(_row("working memory", show_bytes(kv.working_bytes), note))
    ring = kv.split.ring_slots * plan.sizing.layout.block_layer_bytes
    note = f"{show_bytes(ring)} of it are buffers for what comes from the host" if ring else ""
    rows.append(_row("KV cache", show_bytes(plan.device_kv_bytes), note))
    left = memory.device_free - kv.working_bytes - plan.device_kv_bytes
    if left > 0 and not memory.tiers_share_memory:
        rows.append(_row("left free", show_bytes(left), f"--gpu-memory-utilization {config.gpu_memory_utilization:g}"))
    return rows


def _read_weights(network: Network) -> str:
    if network.experts is None:
        return ""
    read = network.num_layers * network.layer_weight_bytes(rows=1) + network.head_bytes
    return f"with all experts; a token reads {show_bytes(read)} of them"


def _weights(plan: Plan, request: RequestPlan) -> list[str]:
    """Where weights lie that do not all stay on the device, and what of them is copied there."""
    weights = plan.weights
    layers = plan.network.num_layers
    streamed = len(weights.streamed)
    slots = weights.num_slots * weights.slot_bytes
    what = "matrices" if plan.network.experts is None else "experts"
    stays = f"with the {what} of {layers - streamed} of {layers} layers"
    rows = [
        _row("in all", show_bytes(weights.sizes.num_bytes), _read_weights(plan.network)),
        _row("on the device", show_bytes(weights.sizes.num_bytes - weights.streamed_bytes), stays),
        _row("on the host", show_bytes(weights.host_bytes), _on_host(weights, what)),
        *([_row("on disk", show_bytes(weights.disk_bytes), _on_disk(weights, what))] if weights.on_disk else []),
        _row("in slots", show_bytes(slots), f"{weights.num_slots} on the device, each for one of these layers"),
    ]
    if weights.converts:
        note = "what a layer in a slot is converted to for the kernels of the device"
        rows.append(_row("in an image", show_bytes(weights.slot_bytes), note))
    if weights.cached_experts:
        note = f"{weights.cached_experts:,} of the {weights.num_streamed_experts:,} that stream, those used most"
        rows.append(_row("cached experts", show_bytes(weights.cached_experts * weights.expert_bytes), note))
    evenly = ", which chooses experts evenly" if weights.cached_experts else ""
    moved = (
        f", and {show_bytes(request.step_weight_bytes)} for each token after it" if request.step_weight_bytes else ""
    )
    chosen = "" if request.step_multiplied_bytes else evenly
    rows.append(_row("copied in", show_bytes(request.prefill_weight_bytes), f"for the prompt{moved}{chosen}"))
    if request.step_multiplied_bytes:
        says = f"for each token after the prompt{evenly}; the host multiplies with them"
        if plan.rates.host_bandwidth is None and not plan.sizing.memory.tiers_share_memory:
            says += ", at the link's rate (--host-bandwidth)"
        rows.append(_row("read on the host", show_bytes(request.step_multiplied_bytes), says))
    if weights.on_disk:
        moved = f"for the prompt, and {show_bytes(request.step_read_bytes)} for each token after it"
        rows.append(_row("read from disk", show_bytes(request.prefill_read_bytes), moved))
    return rows


def _on_host(weights: WeightPlan, what: str) -> str:
    """What of the layers that stream is in host memory."""
    kept = len(weights.streamed) - len(weights.on_disk)
    parts = [f"the {what} of {kept} layers, which stream"] if kept or not weights.on_disk else []
    if weights.host_experts:
        parts.append(f"{weights.host_experts:,} of the {weights.disk_experts:,} experts on disk, those used most")
    if weights.host_places:
        parts.append(f"{weights.host_places} places for layers that are read from disk")
    return ", and ".join(parts)


def _on_disk(weights: WeightPlan, what: str) -> str:
    return f"the {what} of {len(weights.on_disk)} of these layers"


# ---- the KV cache of the prompt


def _kv_cache(plan: Plan, request: RequestPlan) -> list[str]:
    total = request.kv_bytes
    layout = plan.sizing.layout
    stored = f", stored as {plan.sizing.config.kv_cache_dtype} with scales" if layout.scale_bytes else ""
    has_windows = any(group.window is not None for group in layout.groups)
    rows = [_row("at the end" if has_windows else "in all", show_bytes(total), f"{_kept(plan)}{stored}")]
    if has_windows:
        tokens = min(plan.sizing.config.max_num_batched_tokens, request.prompt_len)
        note = f"at most, while a step computes {tokens:,} tokens: all layers hold these until it ends"
        note += f" (--max-num-batched-tokens {SHORT_STEP} takes less)" * (tokens > SHORT_STEP)
        rows.append(_row("in the prefill", show_bytes(request.most_kv_bytes), note))
    rows.append(_row("on the device", show_bytes(request.resident_bytes), f"{request.resident_bytes / total:.0%}"))
    if request.streamed_bytes:
        rows.append(_row("on the host", show_bytes(request.streamed_bytes), f"{request.streamed_bytes / total:.0%}"))
        by_layer = request.layer_by_layer
        chunks = f"chunks of {plan.sizing.config.max_num_batched_tokens:,} tokens"
        told = f"{by_layer:,} tokens go layer by layer, where each byte moves once" if by_layer else f"in {chunks}"
        rows.append(_row("prefilled", "layer by layer" if by_layer else "chunk by chunk", told))
    if count := len(plan.network.recurrent_layers):
        note = f"{count} layers are recurrent and keep this in the place of KV, however many tokens there are"
        rows.append(_row("recurrent state", show_bytes(plan.network.state_bytes), note))
    return rows


def _kept(plan: Plan) -> str:
    """What a token takes in the layers that keep all, and what the others keep."""
    layout = plan.sizing.layout
    by_window = sorted(
        ((group.window, own) for group, own in zip(layout.groups, layout.of_groups, strict=True)),
        key=lambda pair: pair[0] or 0,
    )
    parts = []
    for window, pairs in groupby(by_window, key=lambda pair: pair[0]):
        layouts = [own for _, own in pairs]
        layers = sum(own.num_layers for own in layouts)
        size = show_bytes(sum(own.token_bytes for own in layouts))
        where = f"in {'all ' * (layers == plan.network.num_layers)}{layers} layers"
        parts.append(f"{size} for each {f'of the last {window:,} tokens' if window else 'token'} {where}")
    return ", and ".join(parts)


# ---- time


def _time(plan: Plan, request: RequestPlan) -> list[str]:
    known = _rates(plan)
    rows = [f"Time at peak rates, so that real runs take longer: {known}" if known else "Time"]
    prefill = _work(request.prefill, request.prefill_transfers, request.prefill_weight_bytes)
    decode = _work(request.decode, request.step_transfers, request.step_weight_bytes)
    rows += _phase("prefill", request.prefill, request.prompt_len, prefill)
    rows += _phase("decode of a token", request.decode, 1, decode)
    if request.faster:
        changes = "; ".join(f"{times:,.1f} times with {change}" for change, times in request.faster)
        rows.append(_row("  faster", "", changes))
    if not plan.cpu_attention or not request.streamed_bytes or request.decode.seconds is None:
        return rows
    if request.no_cpu_attention:
        says = f"{_options(request.no_cpu_attention)} counts what the CPU attends to, which makes this faster"
        rows.append(_row("", "", says))
    elif size := request.step_transfers.cpu_attention_bytes:
        says = f"the CPU attends to {show_bytes(size)} of the KV cache on the host, which are not copied"
        rows.append(_row("", "", says))
    return rows


def _phase(label: str, phase: Prediction, tokens: int, work: str) -> list[str]:
    """The seconds of a phase of so many tokens, its speed, and what it waits for."""
    if phase.seconds is None:
        return [_row(label, "not known", f"give {_options(phase.missing)}")]
    speed = tokens / phase.seconds
    shown = f"{speed:,.1f}" if speed < 10 or tokens == 1 else f"{speed:,.0f}"
    limit = LIMITS.get(phase.limit or "", phase.limit)
    note = f"{shown} tokens/s is the upper bound, limited by {limit}"
    return [_row(label, f"at least {show_seconds(phase.seconds)}", note), _row("", "", work)]


def _rates(plan: Plan) -> str:
    """The rates that are known, in words."""
    rates = plan.rates
    has_copies = plan.kv.num_cpu_blocks or plan.weights.streamed
    known = [
        *([f"computing {show_rate(rates.compute, 'FLOPS')}"] if rates.compute else []),
        *([f"device memory {show_rate(rates.device_bandwidth, 'B/s')}"] if rates.device_bandwidth else []),
        *([f"host memory {show_rate(rates.host_bandwidth, 'B/s')}"] if rates.host_bandwidth else []),
        *([f"disk {show_rate(rates.disk_bandwidth, 'B/s')}"] if rates.disk_bandwidth and plan.weights.on_disk else []),
        *([f"link {show_rate(rates.link, 'B/s')}"] if rates.link and has_copies else []),
    ]
    return ", ".join(known)


def _work(phase: Prediction, moved: TransferCount, weights: int) -> str:
    """What happens in the phase, with the seconds of each work, the longest first. weights: bytes copied."""
    if phase.seconds is None:
        return ""
    ways = ((moved.h2d_bytes + weights, "in"), (moved.d2h_bytes, "out"))
    copies = [f"{show_bytes(size)} {way}" for size, way in ways if size]
    names = WORK | {LINK: f"copying {' and '.join(copies)}"}
    terms = sorted(((seconds, name) for name, seconds in phase.terms.items() if seconds), reverse=True)
    first, *others = [f"{names[name]} {show_seconds(seconds)}" for seconds, name in terms]
    return f"{first}; meanwhile {', '.join(others)}" if others else first


def _options(rates: tuple[str, ...]) -> str:
    """The flags of these fields of `Rates`."""
    return ", ".join(f"--{name.replace('_', '-')}" for name in rates)
