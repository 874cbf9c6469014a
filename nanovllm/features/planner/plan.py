"""The plan: what an engine allocates, the longest prompt that fits, and the memory, copies and time of one prompt.

It is for an engine that exists, for this machine, or for the one that the flags of `nanovllm plan` describe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nanovllm.data.batch import LayerwisePrefill
from nanovllm.data.kv_groups import ANY_LENGTH, HOLE
from nanovllm.errors import RequestError
from nanovllm.features.cpu_attention.shares import can_attend_concurrently
from nanovllm.features.planner.drafts import (
    ACCEPTANCE,
    DraftNetwork,
    PlannedDrafts,
    planned_drafts,
)
from nanovllm.features.planner.dry_run import StepMoves, dry_run
from nanovllm.features.planner.network import Network
from nanovllm.features.planner.predict import Prediction, Rates, StepModel, total
from nanovllm.memory.budget import TransferCount
from nanovllm.memory.fitting import KVSizing
from nanovllm.memory.sizing import (
    KVPlan,
    longest_sequence,
)

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
    kv_bytes: int  # of all computed tokens, all but the last output token, as far as a layer still sees them
    resident_bytes: int  # of kv_bytes, what stays on the device; the rest is streamed
    most_kv_bytes: int  # of the blocks that it holds in any step, after which those behind windows are freed
    prefill_transfers: TransferCount
    decode_transfers: TransferCount  # of all output tokens after the first
    step_transfers: TransferCount  # of one decode step, on average; its bytes alone
    prefill: Prediction
    decode: Prediction  # of one token, on average
    layer_by_layer: int  # tokens of the prompt that are prefilled layer by layer
    cpu_attention_bytes: float | None
    no_cpu_attention: tuple[str, ...]
    drafts: PlannedDrafts | None = None  # with speculative decoding

    @property
    def streamed_bytes(self) -> int:
        return self.kv_bytes - self.resident_bytes


@dataclass(frozen=True, slots=True)
class Plan:
    """An engine on a machine. `kv` is what `LLM` with the same arguments allocates.

    draft: the second network of speculative decoding. acceptance: the share of right drafts that is assumed.
    """

    network: Network
    sizing: KVSizing
    rates: Rates
    kv: KVPlan
    draft: DraftNetwork | None = None
    acceptance: float = ACCEPTANCE

    @property
    def chunk(self) -> int:
        """Prompt tokens in a step."""
        return self.sizing.config.max_num_batched_tokens

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
    def device_tokens(self) -> int:
        """The longest sequence whose KV stays on the device."""
        groups = self.sizing.layout.groups
        return min(self._any_length, groups.longest_sequence(self.kv.split.resident_blocks, self.sizing.config.chunk))

    @property
    def _any_length(self) -> int:
        """Tokens to name where memory does not limit the length of a sequence."""
        return self.sizing.model_max_len if all(group.window for group in self.sizing.layout.groups) else ANY_LENGTH

    @property
    def cache_tokens(self) -> int:
        """The longest sequence that device and host hold together."""
        sizing = self.sizing
        longest = longest_sequence(sizing.config, sizing.layout, self.kv.num_sequence_blocks, sizing.watermark)
        return min(self._any_length, longest)

    @property
    def cpu_attention(self) -> bool:
        """Whether the CPU attends to a share of the host blocks."""
        can = self.sizing.memory.tiers_share_memory or all(map(can_attend_concurrently, self.sizing.layout.head_dims))
        return can and self.sizing.config.cpu_attention and self.kv.num_cpu_blocks > 0

    @property
    def hiding_chunk(self) -> int | None:
        """The smallest chunk, in query tokens, for which attention to a streamed block takes as long as its copy.

        Attention takes 4 * q_size operations for each query and key, the copy the bytes of a key and a value.
        """
        link = self.rates.link
        attention = self.rates.attention
        if link is None or attention is None:
            return None
        layout = self.sizing.layout.of_groups[0]  # of layers with full attention, if there are such
        q_size = self.network.spec.num_heads * layout.head_dim
        return -int(-attention * layout.token_layer_bytes // (4 * q_size * link.h2d))

    def fits(self, prompt_len: int) -> bool:
        """Whether the engine accepts the prompt."""
        return prompt_len <= self.kv.max_model_len

    def changes_for(self, prompt_len: int) -> list[dict[str, Any]]:
        """Engine arguments each set of which makes the prompt fit; see `KVSizing.changes_for`."""
        return self.sizing.changes_for(prompt_len)

    def request(self, prompt_len: int, output_len: int) -> RequestPlan:
        """One prompt that fits. Raises RequestError for another, and if nothing comes out."""
        if not 0 < prompt_len <= self.kv.max_model_len or output_len < 1:
            given = f"prompt_len={prompt_len}, output_len={output_len}"
            raise RequestError(f"{given}: plan 1 to {self.kv.max_model_len} tokens in, and at least 1 out")
        output_len = min(output_len, max(1, self.kv.max_model_len - prompt_len))
        model = self._step_model
        planned = self._steps(model, prompt_len, output_len)
        steps = [each for each in planned.steps if each[0].begin < prompt_len]
        decodes = planned.steps[len(steps) :]
        shown = decodes or [planned.next_token]
        return RequestPlan(
            prompt_len=prompt_len,
            output_len=output_len,
            num_blocks=planned.num_blocks,
            kv_bytes=planned.kv_bytes,
            resident_bytes=planned.resident_bytes,
            most_kv_bytes=planned.most_blocks * self.sizing.layout.block_bytes,
            prefill_transfers=sum((moves.transfers for _, moves in steps), TransferCount()),
            decode_transfers=sum((moves.transfers for _, moves in decodes), TransferCount()),
            step_transfers=_mean_bytes([moves.transfers for _, moves in shown]),
            prefill=total([model.prefill(step, step.end == prompt_len, moves) for step, moves in steps]),
            layer_by_layer=sum(step.end - step.begin for step, _ in steps if step.num_chunks > 1),
            decode=_mean_decode(model, shown),
            cpu_attention_bytes=None
            if model.no_cpu_attention
            else sum(moves.transfers.cpu_attention_bytes for _, moves in shown) / len(shown),
            no_cpu_attention=model.no_cpu_attention,
            drafts=self._drafts(model, shown),
        )

    def _drafts(self, model: StepModel, decodes: Sequence[PlannedStep]) -> PlannedDrafts | None:
        """Decode with drafts, in the middle of the output."""
        count = self.sizing.config.num_speculative_tokens
        if not count:
            return None
        work, moves = decodes[len(decodes) // 2]
        return planned_drafts(model, work.begin, moves, count, self.acceptance, self.draft)

    @property
    def _step_model(self) -> StepModel:
        return StepModel(
            self.network,
            self.rates,
            self.sizing.layout,
            self.kv.split.ring_slots,
            cpu_attention=self.cpu_attention,
            one_processor=self.sizing.memory.tiers_share_memory,
        )

    def _steps(self, model: StepModel, prompt_len: int, output_len: int) -> PlannedSteps:
        """The steps that the engine's scheduler takes."""
        layout = self.sizing.layout
        resident = self.kv.split.resident_blocks
        steps: list[PlannedStep] = []
        most_blocks = 0
        states = self.sizing.memory.states
        for scheduled in dry_run(self.sizing.config, layout, self.kv, states, prompt_len, output_len):
            work = scheduled.work
            last = scheduled
            most_blocks = max(most_blocks, scheduled.used_blocks)
            share = model.share_of if scheduled.seq.layerwise is None and model.can_share(last.query_len) else None
            moves = scheduled.moved(layout, resident, share)
            if steps and steps[-1][0] == work:  # a further part of a layer-by-layer prefill
                moves += steps.pop()[1]
            steps.append((work, moves))
        end = last.again()
        kv_bytes, resident_bytes = end.seen(layout, resident)
        moves = end.moved(layout, resident, model.share_of if model.can_share(1) else None)
        num_blocks = sum(block != HOLE for table in end.seq.block_tables for block in table)
        return PlannedSteps(steps, (end.work, moves), num_blocks, kv_bytes, resident_bytes, most_blocks)


PlannedStep = tuple[LayerwisePrefill, StepMoves]  # what is computed, a single token too, and what that moves


@dataclass(frozen=True, slots=True)
class PlannedSteps:
    """The steps of a request alone, and what it holds at its end. next_token: one more step, of one token."""

    steps: list[PlannedStep]
    next_token: PlannedStep
    num_blocks: int
    kv_bytes: int
    resident_bytes: int
    most_blocks: int  # in any step


def _mean_bytes(moved: Sequence[TransferCount]) -> TransferCount:
    """The bytes that a step copies, on average."""
    summed = sum(moved, TransferCount())
    return TransferCount(h2d_bytes=summed.h2d_bytes // len(moved), d2h_bytes=summed.d2h_bytes // len(moved))


def _mean_decode(model: StepModel, steps: Sequence[PlannedStep]) -> Prediction:
    """The mean over steps. Evenly spaced samples are enough for many, since time is almost linear in the context."""
    step = -(-len(steps) // MAX_DECODE_SAMPLES)
    sampled = [model.decode(work.begin, moves) for work, moves in steps[step // 2 :: step]]
    summed = total(sampled)
    if summed.seconds is None:
        return summed
    count = len(sampled)
    return Prediction(summed.seconds / count, {name: seconds / count for name, seconds in summed.terms.items()})
