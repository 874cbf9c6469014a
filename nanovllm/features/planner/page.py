"""A plan as one page of text. Times from data sheets are bounds, and are called so beside each number."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from nanovllm.features.planner.drafts import draft_network
from nanovllm.features.planner.network import Network
from nanovllm.features.planner.outlook import Obstacle, Outlook, four_bit_bytes
from nanovllm.features.planner.plan import Plan, RequestPlan
from nanovllm.features.planner.predict import COMPUTE, DEVICE, FIXED, HOST, INTERCONNECT, LINK, Prediction, Rates
from nanovllm.features.planner.report import RATES, Restore
from nanovllm.features.planner.units import show_bytes, show_rate, show_seconds
from nanovllm.memory.budget import TransferCount
from nanovllm.memory.fitting import KVSizing
from nanovllm.memory.sizing import KVPlan
from nanovllm.models.spec import DecoderSpec

AsFlags = Callable[[Mapping[str, Any]], str]
WORK = {
    COMPUTE: "computing",
    DEVICE: "reading the memory of the device",
    HOST: "attention of the CPU to what is on the host",
    INTERCONNECT: "sums over the ranks",
    FIXED: "fixed costs",
}
LIMITS = {COMPUTE: "computing", DEVICE: "the memory of the device", HOST: "the memory of the host", LINK: "the link"}
ENDS = {"positions": "there the model's positions end", "KV memory": "there the memory for KV cache ends"}
SHORT_STEP = 2048  # tokens of a step, of which models with windows hold little at once


def page(outlook: Outlook, name: str, output_len: int, as_flags: AsFlags) -> str:
    """Whether the prompt fits, and what helps if it does not; then memory, KV cache and time.

    name: of the model; as_flags: engine arguments as on the command line.
    """
    plan = outlook.plan
    request = plan.request(outlook.prompt_len, output_len)
    lines = [f"{name}: {_network(outlook.spec)}, {plan.network.dtype}", f"on {outlook.machine}", ""]
    if outlook.fits:
        limit = plan.sizing.longest_limit(plan.kv)
        longest = f"The longest that fits has {plan.kv.max_model_len:,} ({ENDS.get(limit, limit)})."
        lines.append(f"A prompt of {request.prompt_len:,} tokens fits, with {_output(request, output_len)}. {longest}")
    else:
        lines += _obstacles(outlook.obstacles, as_flags)
        lines += ["", f"The numbers below are {', '.join(outlook.as_if)}, with {_output(request, output_len)}."]
    lines += ["", "Memory of the device" + _each(plan), *_memory(plan)]
    lines += ["", f"KV cache of the {request.prompt_len + request.output_len:,} tokens" + _each(plan)]
    return "\n".join([*lines, *_kv_cache(plan, request), "", *_time(plan, request)])


@dataclass(frozen=True, slots=True)
class EnginePlan(Plan):
    """The plan of an engine that exists. Its text is the page of the longest prompt."""

    def __str__(self) -> str:
        return page(
            Outlook(self, self.kv.max_model_len, "this machine", self.network.spec), "this engine", 1, lambda _: ""
        )


def engine_plan(spec: DecoderSpec, dtype: str, sizing: KVSizing, kv: KVPlan, rates: Rates | None) -> EnginePlan:
    """The plan of an engine whose KV memory is `kv`."""
    network = Network(spec, dtype, sizing.config.kv_cache_dtype)
    draft = draft_network(sizing.config, spec)
    return EnginePlan(network, sizing, rates or Rates(), kv, draft)


def _row(label: str, value: str, note: str = "") -> str:
    return f"  {label:<18}{value:>19}   {note}".rstrip()


def _each(plan: Plan) -> str:
    return f", of each of {plan.network.num_ranks} ranks" if plan.network.num_ranks > 1 else ""


def _network(spec: DecoderSpec) -> str:
    experts = spec.experts
    found = f"{spec.architecture}, {spec.num_layers} layers"
    if experts is not None:
        found += f" with {experts.num_experts} experts, of which a token uses {experts.num_experts_per_tok}"
    return found if spec.quantization is None else f"{found}, quantized ({spec.quantization.name})"


def _output(request: RequestPlan, wanted: int) -> str:
    tokens = f"{request.output_len:,} token{'s' * (request.output_len != 1)} of output"
    return f"{tokens} instead of {wanted:,}, since no longer sequence fits" if request.output_len < wanted else tokens


def _obstacles(obstacles: Sequence[Obstacle], as_flags: AsFlags) -> list[str]:
    lines = ["The prompt does not fit. What is in the way, and what would help:"]
    for obstacle in obstacles:
        lines.append(f"  {obstacle.text}")
        for remedy in obstacle.remedies:
            flags = remedy.machine or (as_flags(remedy.arguments) if remedy.arguments else "")
            lines.append(f"    - {': '.join(part for part in (remedy.text, flags) if part)}")
    return lines


# ---- memory


def _memory(plan: Plan) -> list[str]:
    memory = plan.sizing.memory
    kv = plan.kv
    network = plan.network
    rows = [_row("in all", show_bytes(memory.device_total)), _weights(plan)]
    taken = network.weight_bytes + plan.device_kv_bytes + kv.working_bytes + memory.adapter_bytes
    if memory.adapter_bytes:
        config = plan.sizing.config
        note = f"{config.max_loras} of rank {config.max_lora_rank}; {config.num_cpu_loras} are in host memory too"
        rows.append(_row("LoRA adapters", show_bytes(memory.adapter_bytes), note))
    if plan.draft is not None:
        drafts = plan.draft.memory
        note = f"its weights, and {show_bytes(drafts.kv_bytes)} of KV cache for {drafts.longest:,} tokens"
        rows.append(_row(plan.draft.name, show_bytes(drafts.device_bytes), note))
        taken += drafts.device_bytes
    if (states := memory.states) is not None:
        one = network.state_bytes
        kept = states.draft_rows * network.spec.draft_row_bytes(network.itemsize)
        size = states.device * one + kept
        note = f"{states.device} of {show_bytes(one)}, for {states.running} sequences at once"
        note += " and for prefixes that are kept" * (states.device > states.running)
        rows.append(_row("recurrent states", show_bytes(size), note))
        taken += size
    if kv.working_bytes:
        note = f"what a step of up to {plan.chunk:,} tokens needs"
        note += ", and a buffer for prompts that stream" * (kv.layerwise_memory.max_tokens > 0)
        rows.append(_row("working memory", show_bytes(kv.working_bytes), note))
    ring = kv.split.ring_slots * plan.sizing.layout.block_layer_bytes
    note = f"{show_bytes(ring)} of it are buffers for what comes from the host" if ring else ""
    rows.append(_row("KV cache", show_bytes(plan.device_kv_bytes), note))
    left = memory.device_total - taken
    share = plan.sizing.config.gpu_memory_utilization
    if left > 0 and not memory.tiers_share_memory:
        rows.append(_row("left free", show_bytes(left), f"--gpu-memory-utilization {share:g}"))
    return rows


def _weights(plan: Plan) -> str:
    network = plan.network
    notes = []
    if network.spec.experts is not None:
        read = network.spec.num_layers * network.spec.layer_weight_bytes(network.itemsize, rows=1)
        read += network.spec.head_bytes(network.itemsize)
        notes.append(f"with all experts; a token reads {show_bytes(read)} of them")
    if (size := four_bit_bytes(network)) is not None:
        notes.append(f"a checkpoint with 4-bit weights takes {show_bytes(size)}")
    return _row("weights", show_bytes(network.weight_bytes), "; ".join(notes))


# ---- the KV cache of the prompt


def _kv_cache(plan: Plan, request: RequestPlan) -> list[str]:
    total = request.kv_bytes
    layout = plan.sizing.layout
    stored = f", stored as {plan.network.kv_cache_dtype} with scales" if layout.scale_bytes else ""
    has_windows = any(group.window is not None for group in layout.groups)
    rows = [_row("at the end" if has_windows else "in all", show_bytes(total), f"{_kept(plan)}{stored}")]
    if has_windows:
        tokens = min(plan.chunk, request.prompt_len)
        note = f"at most, while a step computes {tokens:,} tokens: all layers hold these until it ends"
        note += f" (--max-num-batched-tokens {SHORT_STEP} takes less)" * (tokens > SHORT_STEP)
        rows.append(_row("in the prefill", show_bytes(request.most_kv_bytes), note))
    rows.append(_row("on the device", show_bytes(request.resident_bytes), f"{request.resident_bytes / total:.0%}"))
    if request.streamed_bytes:
        rows.append(_row("on the host", show_bytes(request.streamed_bytes), f"{request.streamed_bytes / total:.0%}"))
    if count := plan.network.spec.num_recurrent_layers:
        note = f"{count} layers are recurrent and keep this in the place of KV, however many tokens there are"
        rows.append(_row("recurrent state", show_bytes(plan.network.state_bytes), note))
    return rows


def _kept(plan: Plan) -> str:
    """What a token takes in the layers that keep all, and what the others keep."""
    layout = plan.sizing.layout
    spec = plan.network.spec
    groups = sorted(zip(layout.groups, layout.of_groups, strict=True), key=lambda each: each[0].window or 0)
    parts = []
    for window, of_kind in groupby(groups, key=lambda each: each[0].window):
        layouts = [own for _, own in of_kind]
        layers = sum(own.num_layers for own in layouts)
        size = sum(own.token_bytes for own in layouts)
        where = f"in {'all ' * (layers == spec.num_layers)}{layers} layers"
        if window is None:
            parts.append(f"{show_bytes(size)} for each token {where}")
        else:
            parts.append(f"{show_bytes(size)} for each of the last {window:,} tokens {where}")
    return ", and ".join(parts)


# ---- time


def _time(plan: Plan, request: RequestPlan) -> list[str]:
    rates = plan.rates
    decode = request.decode
    moved = request.step_transfers
    bound = not (rates.step_seconds or rates.layer_seconds or rates.block_read_seconds)
    says = "at peak rates, so that real runs take longer" if bound else "estimated from measured or given rates"
    known = _rates(plan)
    rows = [f"Time {says}: {known}" if known else "Time"]
    prefill = request.prefill.seconds
    speed = request.prompt_len / prefill if prefill else 0.0
    shown = f"{speed:,.1f}" if speed < 10 else f"{speed:,.0f}"
    rows += _phase("prefill", request.prefill, prefill, shown, bound, request.prefill_transfers)
    speed = 1 / decode.seconds if decode.seconds else 0.0
    rows += _phase("decode of a token", decode, decode.seconds, f"{speed:,.1f}", bound, moved)
    rows += _cpu_attention(plan, request)
    if (drafts := request.drafts) is not None and drafts.step.seconds:
        label = f"with {drafts.count} drafts"
        seconds = drafts.step.seconds / drafts.tokens
        rows += _phase(label, drafts.step, seconds, f"{1 / seconds:,.1f}", bound, moved)
        passed = f"{drafts.tokens:.1f} tokens in a pass of {show_seconds(drafts.step.seconds)}"
        rows.append(_row("", "", f"{passed}, if {drafts.acceptance:.0%} of the drafts are right (--acceptance)"))
    if plan.rates.disk_bandwidth is not None:
        restore = Restore.of(plan, request)
        note = f"instead of the prefill, where kv_cache_dir has the prompt: {show_bytes(restore.num_bytes)}"
        rows.append(_row("reading from disk", show_seconds(restore.seconds or 0.0), note))
    return rows


def _phase(
    label: str, phase: Prediction, seconds: float | None, speed: str, bound: bool, moved: TransferCount
) -> list[str]:
    """The seconds of a phase, or of a token of it, its speed in tokens per second, and what it waits for."""
    if seconds is None:
        return [_row(label, "not known", f"give {_options(phase.missing)}")]
    shown = f"at least {show_seconds(seconds)}" if bound else show_seconds(seconds)
    limit = LIMITS.get(phase.limit or "", phase.limit)
    note = f"{speed} tokens/s{' is the upper bound' * bound}, limited by {limit}"
    return [_row(label, shown, note), _row("", "", _work(phase, moved))]


def _rates(plan: Plan) -> str:
    """The rates that are known, in words."""
    rates = plan.rates
    link = plan.rates.link
    known = [
        *([f"computing {show_rate(rates.compute, 'FLOPS')}"] if rates.compute else []),
        *([f"device memory {show_rate(rates.device_bandwidth, 'B/s')}"] if rates.device_bandwidth else []),
        *([f"host memory {show_rate(rates.host_bandwidth, 'B/s')}"] if rates.host_bandwidth else []),
        *([f"link {show_rate(link.h2d, 'B/s')}"] if link and plan.kv.num_cpu_blocks else []),
    ]
    return ", ".join(known)


def _work(phase: Prediction, moved: TransferCount) -> str:
    """What happens in the phase, with the seconds of each work, the longest first."""
    copies = [f"{show_bytes(size)} {way}" for size, way in ((moved.h2d_bytes, "in"), (moved.d2h_bytes, "out")) if size]
    named = WORK | {LINK: f"copying {' and '.join(copies)}"}
    terms = sorted(((seconds, name) for name, seconds in phase.terms.items() if seconds), reverse=True)
    first, *others = [f"{named[name]} {show_seconds(seconds)}" for seconds, name in terms if name != FIXED]
    text = f"{first}; meanwhile {', '.join(others)}" if others else first
    fixed = phase.terms.get(FIXED)
    return f"{text}; besides, {WORK[FIXED]} of {show_seconds(fixed)}" if fixed else text


def _cpu_attention(plan: Plan, request: RequestPlan) -> list[str]:
    """What the CPU takes over in decode, where it can."""
    if not plan.cpu_attention or not request.streamed_bytes or not request.decode.seconds:
        return []
    if request.cpu_attention_bytes is None:
        says = f"{_options(request.no_cpu_attention)} counts what the CPU attends to, which makes this faster"
        return [_row("", "", says)]
    if not request.cpu_attention_bytes:
        return []
    size = show_bytes(request.cpu_attention_bytes)
    return [_row("", "", f"the CPU attends to {size} of the KV cache on the host, which are not copied")]


def _options(rates: tuple[str, ...]) -> str:
    return ", ".join(dict.fromkeys(RATES[name][0] for name in rates))
