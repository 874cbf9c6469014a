"""The plan: what an engine allocates, the longest prompt that fits, and the memory, copies and time of one prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nanovllm.data.layerwise import LayerwisePrefill
from nanovllm.features.cpu_attention.shares import can_attend_concurrently
from nanovllm.features.planner.machine import Rates
from nanovllm.features.planner.network import Network
from nanovllm.features.planner.predict import KVPlacement, Prediction, StepModel, total
from nanovllm.memory.budget import TransferCount
from nanovllm.memory.fitting import KVSizing
from nanovllm.memory.layerwise import prefill_steps
from nanovllm.memory.sizing import KVPlan, longest_sequence

MAX_DECODE_SAMPLES = 64  # contexts at which the decode time of a long output is computed


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """One prompt that fits, alone in the engine. `output_len` is cut at the longest sequence.

    cpu_attention_bytes: KV that the CPU attends to in a decode step, on average; None if it is unknown.
    no_cpu_attention: the rates that are missing for it. Transfers and times are then without CPU attention.
    """

    prompt_len: int
    output_len: int
    num_blocks: int
    kv_bytes: int  # of all computed tokens: all but the last output token
    resident_bytes: int  # of kv_bytes, what stays on the device; the rest is streamed
    prefill_transfers: TransferCount
    decode_transfers: TransferCount  # of all output tokens after the first
    prefill: Prediction
    decode: Prediction  # of one token, on average
    layer_by_layer: int  # tokens of the prompt that are prefilled layer by layer
    cpu_attention_bytes: float | None
    no_cpu_attention: tuple[str, ...]

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
    def chunk(self) -> int:
        """Prompt tokens in a step."""
        return self.sizing.config.max_num_batched_tokens

    @property
    def device_kv_bytes(self) -> int:
        """Resident blocks and ring."""
        layout, split = self.sizing.layout, self.kv.split
        return split.resident_blocks * layout.block_bytes + split.ring_slots * layout.block_layer_bytes

    @property
    def host_kv_bytes(self) -> int:
        return self.kv.num_cpu_blocks * self.sizing.layout.block_bytes

    @property
    def device_tokens(self) -> int:
        """Tokens whose KV stays on the device."""
        return self.kv.split.resident_blocks * self.sizing.layout.block_size

    @property
    def cache_tokens(self) -> int:
        """The longest sequence that device and host hold together."""
        return longest_sequence(self.kv.num_sequence_blocks, self.sizing.layout.block_size, self.sizing.watermark)

    @property
    def longest_limit(self) -> str:
        """What limits the longest prompt."""
        return self.sizing.longest_limit(self.kv)

    @property
    def cpu_attention(self) -> bool:
        """Whether the CPU attends to a share of the host blocks."""
        can = self.sizing.memory.tiers_share_memory or can_attend_concurrently(self.sizing.layout.head_dim)
        return can and self.sizing.config.cpu_attention and self.kv.num_cpu_blocks > 0

    @property
    def hiding_chunk(self) -> int | None:
        """The smallest chunk, in query tokens, for which attention to a streamed block takes as long as its copy.

        Attention takes 4 * q_size operations for each query and key, the copy the bytes of a key and a value.
        """
        link, attention = self.rates.link, self.rates.attention
        if link is None or attention is None:
            return None
        token_bytes = self.sizing.layout.token_layer_bytes
        return -int(-attention * token_bytes // (4 * self.network.spec.q_size * link.h2d))

    def fits(self, prompt_len: int) -> bool:
        """Whether the engine accepts the prompt."""
        return prompt_len <= self.kv.max_model_len

    def changes_for(self, prompt_len: int) -> list[dict[str, Any]]:
        """Engine arguments each set of which makes the prompt fit; see `KVSizing.changes_for`."""
        return self.sizing.changes_for(prompt_len)

    def prefill_steps(self, prompt_len: int) -> list[LayerwisePrefill]:
        """The prefill steps of a lone prompt with nothing cached; see `memory.layerwise`."""
        block_size, resident = self.sizing.layout.block_size, self.kv.split.resident_blocks
        return prefill_steps(block_size, resident, prompt_len, self.chunk, self.kv.layerwise_memory)

    def request(self, prompt_len: int, output_len: int) -> RequestPlan:
        """One prompt that fits. Both lengths are at least 1."""
        assert 0 < prompt_len <= self.kv.max_model_len and output_len > 0
        output_len = min(output_len, max(1, self.kv.max_model_len - prompt_len))
        layout = self.sizing.layout
        model = self._steps()
        computed = prompt_len + output_len - 1
        steps = self.prefill_steps(prompt_len)
        contexts = range(prompt_len, computed)
        decode = [model.transfers(context, 1) for context in contexts or [prompt_len]]
        return RequestPlan(
            prompt_len=prompt_len,
            output_len=output_len,
            num_blocks=-(-computed // layout.block_size),
            kv_bytes=computed * layout.token_bytes,
            resident_bytes=min(computed, self.device_tokens) * layout.token_bytes,
            prefill_transfers=sum(map(model.prefill_transfers, steps), TransferCount()),
            decode_transfers=sum(decode[: len(contexts)], TransferCount()),
            prefill=total([model.prefill(step, step.end == prompt_len) for step in steps]),
            layer_by_layer=sum(step.end - step.begin for step in steps if step.num_chunks > 1),
            decode=_mean_decode(model, contexts or range(prompt_len, prompt_len + 1)),
            cpu_attention_bytes=None
            if model.no_cpu_attention
            else sum(moved.cpu_attention_bytes for moved in decode) / len(decode),
            no_cpu_attention=model.no_cpu_attention,
        )

    def _steps(self) -> StepModel:
        split = self.kv.split
        placement = KVPlacement(
            self.sizing.layout.block_size,
            split.resident_blocks,
            split.ring_slots,
            cpu_attention=self.cpu_attention,
            one_processor=self.sizing.memory.tiers_share_memory,
        )
        return StepModel(self.network, placement, self.rates)


def _mean_decode(model: StepModel, contexts: range) -> Prediction:
    """The mean over contexts. Evenly spaced samples are enough for many, since time is almost linear in the context."""
    step = -(-len(contexts) // MAX_DECODE_SAMPLES)
    sampled = [model.decode(context) for context in contexts[step // 2 :: step]]
    summed = total(sampled)
    if summed.seconds is None:
        return summed
    count = len(sampled)
    return Prediction(summed.seconds / count, {name: seconds / count for name, seconds in summed.terms.items()})


def make_plan(network: Network, sizing: KVSizing, rates: Rates) -> Plan:
    """Raises ConfigError if the engine would refuse its configuration."""
    return Plan(network, sizing, rates, sizing.plan())
