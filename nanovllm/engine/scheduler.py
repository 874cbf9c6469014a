"""Decides, afresh for every step, which sequences compute how many tokens."""

from __future__ import annotations

import bisect
import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace

from nanovllm.engine.batch import Batch, SamplingRow, ScheduledSequence, StepResult
from nanovllm.engine.block_manager import AllocStatus, BlockManager
from nanovllm.engine.long_prefill import long_prefill, passes, plan_span, take_slice
from nanovllm.engine.sequence import Sequence, SequenceStatus
from nanovllm.errors import ConfigError, RequestError
from nanovllm.kvcache.prefill_plan import PrefillSpan, SpanSlice

logger = logging.getLogger(__name__)

# Beyond these a larger value changes nothing, and would not fit the sampler's tensors.
MAX_TEMPERATURE = 1e30
MAX_TOP_K = 2**31 - 1


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Budgets of one step, and what ends a sequence."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    eos_token_ids: frozenset[int] = frozenset()
    num_layers: int = 1
    max_span_tokens: int = 0  # the last position that can be prefilled layer by layer; see `kvcache/prefill_plan.py`


class Scheduler:
    """Continuous batching with chunked prefill; prefill and decode share a step.

    A step is filled in this order: sequences that decode (one token each, so that a long prefill never stalls them),
    running prefills, then waiting sequences as far as blocks and budgets allow; a prompt that takes several steps
    shares them with the others (`long_prefill.py`). A sequence gets the blocks of its whole prompt when it is admitted,
    and grows block by block after that. When a running sequence cannot grow, the last one in order (itself last) is
    preempted: its blocks are freed, it waits in front, and it is recomputed from whatever the prefix cache still holds.
    """

    def __init__(self, limits: SchedulerLimits, block_manager: BlockManager) -> None:
        if limits.max_model_len > block_manager.max_sequence_tokens:  # such a sequence could never be resumed
            raise ConfigError(
                f"max_model_len={limits.max_model_len}: the KV cache holds sequences of up to "
                f"{block_manager.max_sequence_tokens} tokens; lower max_model_len or give the cache more blocks"
            )
        self.limits = limits
        self.block_manager = block_manager
        self.waiting: list[Sequence] = []  # both lists in scheduling order: priority, then arrival
        self.running: list[Sequence] = []
        self.num_preemptions = 0

    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, seq: Sequence) -> None:
        """Queue a sequence; one that can never be admitted is refused at once."""
        if self.block_manager.can_allocate(seq) is AllocStatus.NEVER:
            manager = self.block_manager
            raise RequestError(
                f"request {seq.request_id!r} has {len(seq)} tokens and needs {seq.num_blocks(manager.block_size)} KV "
                f"blocks of {manager.block_size} tokens; the cache has {manager.num_blocks} and keeps "
                f"{manager.watermark} free: shorten the prompt to {manager.max_sequence_tokens} tokens, or raise "
                "num_gpu_blocks or num_cpu_blocks"
            )
        bisect.insort(self.waiting, seq, key=lambda s: s.order)

    # ---- one step

    def schedule(self, now: float) -> Batch:
        """The next step's batch; empty when nothing can run. `now` stamps first-scheduled times."""
        self._grow_running()
        budget = self.limits.max_num_batched_tokens
        # A decode is a sequence that lacks one token.
        chunks = _cut((seq for seq in self.running if seq.num_remaining == 1), budget)
        left = budget - len(chunks)
        others, long = self._prefills(left, now)
        chunks += others
        left -= sum(chunk for _, chunk in others)
        if long is not None and long.span is None:
            chunks += _cut([long], left)
        self.block_manager.promote(seq for seq, _ in chunks)
        moves = self.block_manager.take_moves()
        sequences = [self._scheduled(seq, seq.num_computed + chunk) for seq, chunk in chunks]
        if long is not None and long.span is not None:
            sequences.append(self._scheduled_slice(long, long.span, left))
        return Batch(sequences, moves)

    def update(self, batch: Batch, result: StepResult, now: float) -> list[Sequence]:
        """Take a step's result in: advance, append the sampled tokens, end what is finished. Returns the sequences."""
        by_id = {seq.seq_id: seq for seq in self.running}
        stepped = [by_id[scheduled.seq_id] for scheduled in batch.sequences]
        rows = zip(stepped, batch.sequences, result.token_ids, result.h2d_bytes, result.d2h_bytes, strict=True)
        for seq, scheduled, token, h2d_bytes, d2h_bytes in rows:
            computed = len(scheduled.token_ids)
            if scheduled.span is not None:
                computed = take_slice(seq, scheduled.span, self.limits.num_layers)
            seq.num_computed += computed
            prompt_tokens = max(0, min(computed, seq.prompt_len - scheduled.context_len))
            seq.metrics.prefill_tokens += prompt_tokens
            seq.metrics.h2d_bytes += h2d_bytes
            seq.metrics.d2h_bytes += d2h_bytes
            self.block_manager.register_computed(seq, scheduled.context_len)
            if token is not None:
                self._append(seq, token, now)
        return stepped

    # ---- ending a sequence

    def abort(self, request_id: str, now: float, reason: str = "abort") -> Sequence | None:
        """End a request wherever it is and free its blocks; None if it is not here."""
        for seq in [*self.waiting, *self.running]:
            if seq.request_id == request_id:
                self._finish(seq, reason, now)
                return seq
        return None

    def fail(self, now: float) -> list[Sequence]:
        """A step failed or was interrupted anywhere: ends all sequences that hold blocks, and forgets all content."""
        failed = [*self.running, *(seq for seq in self.waiting if seq.block_table and seq not in self.running)]
        self.waiting = [seq for seq in self.waiting if seq not in failed]
        self.running = []
        self.block_manager.reset()
        for seq in failed:
            seq.block_table = []
            self._end(seq, "error", now)
        return failed

    def _append(self, seq: Sequence, token: int, now: float) -> None:
        if seq.metrics.first_token_time is None:
            seq.metrics.first_token_time = now
        else:
            seq.metrics.decode_tokens += 1
        seq.token_ids.append(token)
        if token in seq.params.stop_token_ids:
            seq.stop_reason = token
            self._finish(seq, "stop", now)
        elif token in self.limits.eos_token_ids and not seq.params.ignore_eos:
            self._finish(seq, "stop", now)
        elif seq.num_output_tokens == seq.params.max_tokens or len(seq) >= self.limits.max_model_len:
            self._finish(seq, "length", now)

    def _finish(self, seq: Sequence, reason: str, now: float) -> None:
        (self.waiting if seq.status is SequenceStatus.WAITING else self.running).remove(seq)
        self.block_manager.free(seq)
        self._end(seq, reason, now)

    def _end(self, seq: Sequence, reason: str, now: float) -> None:
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason = reason
        seq.metrics.finished_time = now

    # ---- admission and preemption

    def _prefills(self, left: int, now: float) -> tuple[list[tuple[Sequence, int]], Sequence | None]:
        """Chunks of prefills, running and admitted now, out of the tokens `left` by decodes; and the long prefill."""
        long = long_prefill(self.running, left)
        room = left if long is None else -(-left // 2)
        chunks = _cut((seq for seq in self.running if seq.num_remaining > 1 and seq is not long), room)
        while (seq := self._admissible(long)) is not None:
            taken = sum(chunk for _, chunk in chunks)
            room = left if long is None else -(-left // 2)
            if taken >= room:
                break
            self._admit(seq, now)
            if seq.span is not None:
                long = seq
            else:
                chunks.append((seq, min(seq.num_remaining, room - taken)))
        return chunks, long

    def _admissible(self, long: Sequence | None) -> Sequence | None:
        """The waiting sequence to admit next: the first, or beside a long prefill the first that may pass it."""
        if len(self.running) >= self.limits.max_num_seqs:
            return None
        manager, chunk = self.block_manager, self.limits.max_num_batched_tokens
        first = next((seq for seq in self.waiting if long is None or passes(seq, manager, chunk)), None)
        if first is None or manager.can_allocate(first) is not AllocStatus.OK:
            return None
        return first

    def _admit(self, seq: Sequence, now: float) -> None:
        self.block_manager.allocate(seq)
        plan_span(seq, self.block_manager, self.limits.max_num_batched_tokens, self.limits.max_span_tokens)
        if seq.metrics.first_scheduled_time is None:
            seq.metrics.first_scheduled_time = now
            seq.metrics.cached_tokens = seq.num_computed
        seq.status = SequenceStatus.RUNNING
        bisect.insort(self.running, seq, key=lambda s: s.order)
        self.waiting.remove(seq)  # last, so that a sequence is in one of the lists whenever an interrupt comes

    def _grow_running(self) -> None:
        """Give each running sequence the block of its next token, first in order first."""
        for seq in list(self.running):
            if seq.status is not SequenceStatus.RUNNING:  # preempted for one before it
                continue
            while not self.block_manager.can_grow(seq):
                victim = self.running[-1]
                self._preempt(victim)
                if victim is seq:
                    break
            else:
                self.block_manager.grow(seq)

    def _preempt(self, seq: Sequence) -> None:
        self.num_preemptions += 1
        seq.metrics.preemptions += 1
        logger.warning(
            "preempted request %r to free %d KV blocks: %d computed tokens are recomputed as far as they leave the "
            "prefix cache (preemption %d)",
            seq.request_id,
            len(seq.block_table),
            seq.num_computed,
            self.num_preemptions,
        )
        self.running.remove(seq)
        self.block_manager.free(seq)
        seq.status = SequenceStatus.WAITING
        bisect.insort(self.waiting, seq, key=lambda s: s.order)

    def _scheduled_slice(self, seq: Sequence, span: PrefillSpan, tokens: int) -> ScheduledSequence:
        """The next units of the sequence's span, as many as `tokens` are worth through all layers."""
        num_layers = self.limits.num_layers
        end_unit = span.slice_end(seq.span_units, tokens * num_layers, num_layers)
        scheduled = self._scheduled(seq, span.end)
        sampling = scheduled.sampling if end_unit == num_layers * span.num_chunks else None
        return replace(scheduled, span=SpanSlice(span, seq.span_units, end_unit), sampling=sampling)

    def _scheduled(self, seq: Sequence, end: int) -> ScheduledSequence:
        """The sequence's tokens from those that are computed up to `end`."""
        return ScheduledSequence(
            seq_id=seq.seq_id,
            token_ids=seq.token_ids[seq.num_computed : end],
            context_len=seq.num_computed,
            prompt_len=seq.prompt_len,
            block_table=self.block_manager.places(seq, end),
            sampling=_sampling_row(seq) if end == len(seq) else None,
        )


def _cut(sequences: Iterable[Sequence], tokens: int) -> list[tuple[Sequence, int]]:
    """What each of them computes while `tokens` last, first in order first."""
    chunks: list[tuple[Sequence, int]] = []
    for seq in sequences:
        if tokens > 0:
            chunks.append((seq, min(seq.num_remaining, tokens)))
            tokens -= chunks[-1][1]
    return chunks


def _sampling_row(seq: Sequence) -> SamplingRow:
    p = seq.params
    return SamplingRow(
        temperature=0.0 if p.is_greedy else min(float(p.temperature), MAX_TEMPERATURE),
        top_k=min(max(p.top_k, 0), MAX_TOP_K),
        top_p=p.top_p,
        min_p=p.min_p,
        seed=seq.seed,
        index=seq.num_output_tokens,
    )
