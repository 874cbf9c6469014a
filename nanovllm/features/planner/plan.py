"""The plan: what an engine allocates, the longest prompt that fits, and the memory, copies and time of one prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from nanovllm.data.batch import LayerwisePrefill
from nanovllm.data.kv_groups import ANY_LENGTH, HOLE
from nanovllm.data.network import Network, WeightSizes
from nanovllm.errors import RequestError
from nanovllm.features.cpu_attention.shares import can_attend_concurrently
from nanovllm.features.planner.dry_run import NOTHING_MOVED, dry_run
from nanovllm.features.planner.predict import DISK, HOST, LINK, Prediction, Rates, StepModel, total
from nanovllm.features.planner.units import show_bytes
from nanovllm.memory.budget import TransferCount
from nanovllm.memory.fitting import KVSizing
from nanovllm.memory.sizing import KVPlan, longest_sequence
from nanovllm.memory.weights import WeightPlan, plan_weights, with_disk

WORTH = 1.05  # times as fast as now, for a change to be named
FOUR_BITS = 4.5  # bits of a weight in 4 bits, with its share of scales
MOST_OF_NOW = 0.7  # of their bytes that weights in 4 bits may take for the change to be named

PlannedStep = tuple[LayerwisePrefill, TransferCount]  # what is computed, a single token too, and what that moves


class FasterDecode(NamedTuple):
    """A change that makes decode faster."""

    change: str
    times: float  # as fast


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """One prompt that fits and runs alone in the engine."""

    prompt_len: int
    output_len: int  # cut at the longest sequence
    num_blocks: int
    kv_bytes: int  # of all computed tokens, all but the last output token, as far as a layer still sees them
    resident_bytes: int  # of kv_bytes, what stays on the device; the rest is streamed
    most_kv_bytes: int  # of the blocks that it holds in any step, after which those behind windows are freed
    layer_by_layer: int  # tokens of the prompt that are prefilled layer by layer
    prefill_transfers: TransferCount
    decode_transfers: TransferCount  # of all output tokens after the first
    step_transfers: TransferCount  # of one decode step, on average; its bytes alone
    prefill_weight_bytes: int  # of layers that stream, copied to the device while the prompt is computed
    step_weight_bytes: int  # the same in one decode step
    step_multiplied_bytes: int  # with which the host multiplies in one decode step
    prefill_read_bytes: int  # of these, read from disk
    step_read_bytes: int
    prefill: Prediction
    decode: Prediction  # of one token, on average
    no_cpu_attention: tuple[str, ...]  # rates without which CPU attention is unknown and left out
    faster: tuple[FasterDecode, ...]  # changes of a machine where the link limits the decode of weights that stream

    @property
    def streamed_bytes(self) -> int:
        return self.kv_bytes - self.resident_bytes


@dataclass(frozen=True, slots=True)
class Plan:
    """An engine on a machine. `kv` is what `LLM` with the same arguments allocates."""

    network: Network
    sizing: KVSizing
    rates: Rates
    kv: KVPlan

    @property
    def weights(self) -> WeightPlan:
        """Where the weights lie."""
        return self.sizing.weights or WeightPlan(self.network.weights)

    @property
    def device_kv_bytes(self) -> int:
        """Resident blocks and ring."""
        layout = self.sizing.layout
        split = self.kv.split
        return split.resident_blocks * layout.block_bytes + split.ring_slots * layout.block_layer_bytes

    @property
    def host_kv_bytes(self) -> int:
        return self.kv.num_cpu_blocks * self.sizing.layout.block_bytes

    @property
    def cache_tokens(self) -> int:
        """The longest sequence that device and host hold together."""
        sizing = self.sizing
        has_windows_alone = all(group.window for group in sizing.layout.groups)
        most = sizing.model_max_len if has_windows_alone else ANY_LENGTH  # else memory does not limit the length
        return min(most, longest_sequence(sizing.config, sizing.layout, self.kv.num_sequence_blocks, sizing.watermark))

    @property
    def cpu_attention(self) -> bool:
        """Whether the CPU attends to a share of the host blocks."""
        can = self.sizing.memory.tiers_share_memory or all(map(can_attend_concurrently, self.sizing.layout.head_dims))
        return can and self.sizing.config.cpu_attention and self.kv.num_cpu_blocks > 0

    def fits(self, prompt_len: int) -> bool:
        """Whether the engine accepts the prompt."""
        return prompt_len <= self.kv.max_model_len

    def request(self, prompt_len: int, output_len: int) -> RequestPlan:
        """One prompt that fits. Raises RequestError for another, and if nothing comes out."""
        if not 0 < prompt_len <= self.kv.max_model_len or output_len < 1:
            given = f"prompt_len={prompt_len}, output_len={output_len}"
            raise RequestError(f"{given}: plan 1 to {self.kv.max_model_len} tokens in, and at least 1 out")
        output_len = min(output_len, max(1, self.kv.max_model_len - prompt_len))
        model = self._step_model
        planned = self._steps(model, prompt_len, output_len)
        prefills = [step for step in planned.steps if step[0].begin < prompt_len]
        decodes = planned.steps[len(prefills) :]
        shown = decodes or [planned.next_token]
        decode = _decode(model, shown)
        return RequestPlan(
            prompt_len=prompt_len,
            output_len=output_len,
            num_blocks=planned.num_blocks,
            kv_bytes=planned.kv_bytes,
            resident_bytes=planned.resident_bytes,
            most_kv_bytes=planned.most_blocks * self.sizing.layout.block_bytes,
            layer_by_layer=sum(work.end - work.begin for work, _ in prefills if work.num_chunks > 1),
            prefill_transfers=sum((moved for _, moved in prefills), NOTHING_MOVED),
            decode_transfers=sum((moved for _, moved in decodes), NOTHING_MOVED),
            step_transfers=_mean_bytes([moved for _, moved in shown]),
            prefill_weight_bytes=sum(model.loaded_weights(work.end - work.begin) for work, _ in prefills),
            step_weight_bytes=model.loaded_weights(1),
            step_multiplied_bytes=model.multiplied_weights(1),
            prefill_read_bytes=sum(model.read_weights(work.end - work.begin) for work, _ in prefills),
            step_read_bytes=model.read_weights(1),
            prefill=total([model.prefill(work, work.end == prompt_len, moved) for work, moved in prefills]),
            decode=decode,
            no_cpu_attention=model.no_cpu_attention,
            faster=self._faster(model, shown, decode),
        )

    def _faster(self, model: StepModel, steps: Sequence[PlannedStep], decode: Prediction) -> tuple[FasterDecode, ...]:
        """What would make decode faster if weights stream and the link, the host or the disk limits it.

        The steps move the same KV then, and but for the last change the device's memory for weights stays as it is.
        """
        if not model.weights.streamed or decode.seconds is None or decode.limit not in (LINK, HOST, DISK):
            return ()
        rates = model.rates
        changes: list[tuple[str, StepModel]] = []
        if (smaller := _four_bits(self.network.weights)) is not None:
            network = replace(self.network, weights=smaller)
            weights = with_disk(plan_weights(smaller, self.weights.device_bytes), self.weights.host_bytes)
            changes.append(("a checkpoint in 4 bits", replace(model, network=network, weights=weights)))
        if decode.limit == LINK and rates.link is not None:
            changes.append(("a link twice as fast", replace(model, rates=replace(rates, link=2 * rates.link))))
        if decode.limit == HOST and rates.host_bandwidth is not None:
            faster = replace(rates, host_bandwidth=2 * rates.host_bandwidth)
            changes.append(("host memory twice as fast", replace(model, rates=faster)))
        if decode.limit == DISK and rates.disk_bandwidth is not None:
            faster = replace(rates, disk_bandwidth=2 * rates.disk_bandwidth)
            changes.append(("a disk twice as fast", replace(model, rates=faster)))
            says = f"{show_bytes(self.weights.streamed_bytes)} of host memory for weights"
            on_host = replace(model.weights, on_disk=(), host_experts=0)
            changes.append((says, replace(model, weights=on_host)))
        more = max(0, self.weights.sizes.num_bytes - self.weights.device_bytes)
        size = self.sizing.memory.device_total + int(more / self.sizing.config.gpu_memory_utilization)
        says = f"a device of {show_bytes(size)}, which holds all weights"
        changes.append((says, replace(model, weights=WeightPlan(self.weights.sizes))))
        seconds = [_decode(changed, steps).seconds for _, changed in changes]
        return tuple(
            FasterDecode(says, decode.seconds / changed)
            for (says, _), changed in zip(changes, seconds, strict=True)
            if changed and decode.seconds / changed >= WORTH
        )

    @property
    def _step_model(self) -> StepModel:
        one_processor = self.sizing.memory.tiers_share_memory
        layout = self.sizing.layout
        ring_slots = self.kv.split.ring_slots
        return StepModel(
            self.network, self.rates, layout, ring_slots, self.weights, self.cpu_attention, one_processor=one_processor
        )

    def _steps(self, model: StepModel, prompt_len: int, output_len: int) -> PlannedSteps:
        """The steps that the engine's scheduler takes."""
        layout = self.sizing.layout
        resident = self.kv.split.resident_blocks
        steps: list[PlannedStep] = []
        most_blocks = 0
        for scheduled in dry_run(self.sizing, self.kv, prompt_len, output_len):
            last = scheduled
            most_blocks = max(most_blocks, scheduled.used_blocks)
            shares = scheduled.seq.layerwise is None and model.can_share(scheduled.query_len)
            moved = scheduled.moved(layout, resident, model.share_of if shares else None)
            if steps and steps[-1][0] == scheduled.work:  # a further part of a layer-by-layer prefill
                moved += steps.pop()[1]
            steps.append((scheduled.work, moved))
        end = last.again()
        kv_bytes, resident_bytes = end.seen(layout, resident)
        moved = end.moved(layout, resident, model.share_of if model.can_share(1) else None)
        num_blocks = sum(block != HOLE for table in end.seq.block_tables for block in table)
        return PlannedSteps(steps, (end.work, moved), num_blocks, kv_bytes, resident_bytes, most_blocks)


@dataclass(frozen=True, slots=True)
class PlannedSteps:
    """The steps of a request alone, and what it holds at its end."""

    steps: list[PlannedStep]
    next_token: PlannedStep  # one more step, of one token
    num_blocks: int
    kv_bytes: int
    resident_bytes: int
    most_blocks: int  # in any step


def _mean_bytes(moved: Sequence[TransferCount]) -> TransferCount:
    """The bytes that a step moves, on average."""
    summed = sum(moved, NOTHING_MOVED)
    count = len(moved)
    return TransferCount(
        h2d_bytes=summed.h2d_bytes // count,
        d2h_bytes=summed.d2h_bytes // count,
        cpu_attention_bytes=summed.cpu_attention_bytes // count,
    )


def _decode(model: StepModel, steps: Sequence[PlannedStep]) -> Prediction:
    """Of one of these decode steps, on average."""
    summed = total([model.decode(work.begin, moved) for work, moved in steps])
    if summed.seconds is None:
        return summed
    count = len(steps)
    return Prediction(summed.seconds / count, {name: seconds / count for name, seconds in summed.terms.items()})


def _four_bits(sizes: WeightSizes) -> WeightSizes | None:
    """The sizes if the layers' matrices were in 4 bits with their scales; None if they take little more as it is."""
    stored = sum(sizes.stored_bytes)
    share = FOUR_BITS * sizes.layer_matrix_weights / (8 * stored)
    if share > MOST_OF_NOW:
        return None
    smaller = tuple(int(share * size) for size in sizes.stored_bytes)
    saved = stored - sum(smaller)
    return replace(
        sizes,
        num_bytes=sizes.num_bytes - saved,
        layer_bytes=sizes.layer_bytes - saved,
        stored_bytes=smaller,
        stored_expert_bytes=tuple(int(share * size) for size in sizes.stored_expert_bytes),
        expert_bytes=int(share * sizes.expert_bytes),
    )
