"""Decides, afresh for every step, which sequences compute how many tokens."""

from __future__ import annotations

import bisect
import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace

from nanovllm.engine.batch import Batch, Sample, ScheduledSequence, StepResult
from nanovllm.engine.block_manager import AllocStatus, BlockManager
from nanovllm.engine.long_prefill import long_prefill, passes, plan_span, take_slice
from nanovllm.engine.request import Request, RequestStatus, Sequence
from nanovllm.engine.sampling_rows import prompt_targets, sampling_row
from nanovllm.errors import ConfigError, RequestError
from nanovllm.kvcache.prefill_plan import NO_SPANS, PrefillSpan, SpanMemory, SpanSlice

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Budgets of one step, and what ends a sequence."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    eos_token_ids: frozenset[int] = frozenset()
    num_layers: int = 1
    spans: SpanMemory = NO_SPANS  # what prompts may go layer by layer


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
        self.waiting: list[Request] = []  # both lists in scheduling order: priority, then arrival
        self.running: list[Request] = []
        self.num_preemptions = 0

    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Queue a request; one that can never be admitted is refused at once."""
        seq = request.sequences[0]
        if self.block_manager.can_allocate(seq) is AllocStatus.NEVER:
            manager = self.block_manager
            raise RequestError(
                f"request {request.request_id!r} has {len(seq)} tokens and needs "
                f"{seq.num_blocks(manager.block_size)} KV blocks of {manager.block_size} tokens; the cache has "
                f"{manager.num_blocks} and keeps {manager.watermark} free: shorten the prompt to "
                f"{manager.max_sequence_tokens} tokens, or raise num_gpu_blocks or num_cpu_blocks"
            )
        bisect.insort(self.waiting, request, key=lambda r: r.order)

    # ---- one step

    def schedule(self, now: float) -> Batch:
        """The next step's batch; empty when nothing can run. `now` stamps first-scheduled times."""
        self._grow_running()
        budget = self.limits.max_num_batched_tokens
        # A decode is a sequence that lacks one token.
        chunks = _cut((seq for seq in self._live() if seq.num_remaining == 1), budget)
        left = budget - len(chunks)
        others, long = self._prefills(left, now)
        chunks += others
        left -= sum(chunk for _, chunk in others)
        if long is not None and long.span is None:
            chunks += _cut([long], left)
        self.block_manager.promote(seq for seq, _ in chunks)
        moves = self.block_manager.take_moves()
        sequences = [self._scheduled(seq, chunk) for seq, chunk in chunks]
        if long is not None and long.span is not None:
            sequences.append(self._scheduled_slice(long, long.span, left))
        return Batch(sequences, moves)

    def update(self, batch: Batch, result: StepResult, now: float) -> list[Request]:
        """Take a step's result in: advance, append the sampled tokens, end what is finished. Returns the requests."""
        by_id = {seq.seq_id: seq for request in self.running for seq in request.live}
        stepped = [by_id[scheduled.seq_id] for scheduled in batch.sequences]
        rows = zip(stepped, batch.sequences, result.samples, result.h2d_bytes, result.d2h_bytes, strict=True)
        for seq, scheduled, samples, h2d_bytes, d2h_bytes in rows:
            computed, metrics = len(scheduled.token_ids), seq.request.metrics
            if scheduled.span is not None:
                computed = take_slice(seq, scheduled.span, self.limits.num_layers)
            seq.num_computed += computed
            metrics.prefill_tokens += max(0, min(computed, seq.prompt_len - scheduled.context_len))
            metrics.h2d_bytes += h2d_bytes
            metrics.d2h_bytes += d2h_bytes
            self.block_manager.register_computed(seq, scheduled.context_len)
            for sample in samples:
                self._append(seq, sample, now)
        for seq, prompt_logprobs in zip(stepped, result.prompt_logprobs, strict=False):
            seq.request.prompt_logprobs.extend(prompt_logprobs)
        return list(dict.fromkeys(seq.request for seq in stepped))

    # ---- ending a sequence

    def end_by_string(self, seq: Sequence, stop_string: str, now: float) -> None:
        """The sequence's last token completed a stop string, which counts for more than having reached its length."""
        seq.stop_reason = stop_string
        if seq.finished:
            seq.finish_reason = "stop"
        else:
            self._finish(seq, "stop", now)

    def abort(self, request: Request, now: float, reason: str = "abort") -> None:
        """End a request wherever it is and free its blocks."""
        for seq in request.live:
            self._finish(seq, reason, now)

    def fail(self, now: float) -> list[Request]:
        """A step failed or was interrupted anywhere: ends all requests that hold blocks, and forgets all content."""
        failed = [*self.running, *(r for r in self.waiting if r not in self.running and self._holds_blocks(r))]
        self.waiting = [request for request in self.waiting if request not in failed]
        self.running = []
        self.block_manager.reset()
        for request in failed:
            for seq in request.live:
                seq.block_table = []
                seq.finish_reason = "error"
            self._end(request, now)
        return failed

    def _holds_blocks(self, request: Request) -> bool:
        return any(seq.block_table for seq in request.sequences)

    def _append(self, seq: Sequence, sample: Sample, now: float) -> None:
        metrics, token = seq.request.metrics, sample.token_id
        if metrics.first_token_time is None:
            metrics.first_token_time = now
        else:
            metrics.decode_tokens += 1
        seq.append(sample)
        if token in seq.params.stop_token_ids:
            seq.stop_reason = token
            self._finish(seq, "stop", now)
        elif token in self.limits.eos_token_ids and not seq.params.ignore_eos:
            self._finish(seq, "stop", now)
        elif seq.num_output_tokens == seq.params.max_tokens or len(seq) >= self.limits.max_model_len:
            self._finish(seq, "length", now)

    def _finish(self, seq: Sequence, reason: str, now: float) -> None:
        """End one sequence and free its blocks; with its last one the request ends."""
        request = seq.request
        seq.finish_reason = reason
        self.block_manager.free(seq)
        if not request.live:
            (self.waiting if request.status is RequestStatus.WAITING else self.running).remove(request)
            self._end(request, now)

    def _end(self, request: Request, now: float) -> None:
        request.status = RequestStatus.FINISHED
        request.metrics.finished_time = now

    # ---- admission and preemption

    def _live(self) -> list[Sequence]:
        return [seq for request in self.running for seq in request.live]

    def _prefills(self, left: int, now: float) -> tuple[list[tuple[Sequence, int]], Sequence | None]:
        """Chunks of prefills, running and admitted now, out of the tokens `left` by decodes; and the long prefill."""
        running = self._live()
        long = long_prefill(running, left)
        if long is not None and long.span is None:
            self._plan_span(long)
        room = left if long is None else -(-left // 2)
        chunks = _cut((seq for seq in running if seq.num_remaining > 1 and seq is not long), room)
        while (request := self._admissible(long)) is not None:
            taken = sum(chunk for _, chunk in chunks)
            room = left if long is None else -(-left // 2)
            if taken >= room:
                break
            seq = self._admit(request, now)
            if seq.span is not None:
                long = seq
            else:
                chunks.append((seq, min(seq.num_remaining, room - taken)))
        return chunks, long

    def _plan_span(self, seq: Sequence) -> None:
        plan_span(seq, self.block_manager, self.limits.max_num_batched_tokens, self.limits.spans)

    def _admissible(self, long: Sequence | None) -> Request | None:
        """The request to admit next: the first that waits, or beside a long prefill the first that may pass it."""
        if len(self.running) >= self.limits.max_num_seqs:
            return None
        manager, chunk = self.block_manager, self.limits.max_num_batched_tokens
        passing = (r for r in self.waiting if long is None or passes(r.sequences[0], manager, chunk))
        first = next(passing, None)
        if first is None or manager.can_allocate(first.sequences[0]) is not AllocStatus.OK:
            return None
        return first

    def _admit(self, request: Request, now: float) -> Sequence:
        seq = request.sequences[0]
        self.block_manager.allocate(seq)
        self._plan_span(seq)
        if request.metrics.first_scheduled_time is None:
            request.metrics.first_scheduled_time = now
            request.metrics.cached_tokens = seq.num_computed
        request.status = RequestStatus.RUNNING
        bisect.insort(self.running, request, key=lambda r: r.order)
        self.waiting.remove(request)  # last, so that a request is in one of the lists whenever an interrupt comes
        return seq

    def _grow_running(self) -> None:
        """Give each running sequence the block of its next token, first in order first."""
        for request in list(self.running):
            if request.status is not RequestStatus.RUNNING:  # preempted for one before it
                continue
            seq = request.sequences[0]
            while not self.block_manager.can_grow(seq):
                victim = self.running[-1]
                self._preempt(victim)
                if victim is request:
                    break
            else:
                self.block_manager.grow(seq)

    def _preempt(self, request: Request) -> None:
        self.num_preemptions += 1
        request.metrics.preemptions += 1
        logger.warning(
            "preempted request %r to free %d KV blocks: %d computed tokens are recomputed as far as they leave the "
            "prefix cache (preemption %d)",
            request.request_id,
            sum(len(seq.block_table) for seq in request.sequences),
            sum(seq.num_computed for seq in request.sequences),
            self.num_preemptions,
        )
        self.running.remove(request)
        for seq in request.sequences:
            self.block_manager.free(seq)
        request.status = RequestStatus.WAITING
        bisect.insort(self.waiting, request, key=lambda r: r.order)

    def _scheduled_slice(self, seq: Sequence, span: PrefillSpan, tokens: int) -> ScheduledSequence:
        """The next units of the sequence's span, as many as `tokens` are worth through all layers."""
        num_layers = self.limits.num_layers
        end_unit = span.slice_end(seq.span_units, tokens * num_layers, num_layers)
        scheduled = replace(
            self._scheduled(seq, span.end - seq.num_computed), span=SpanSlice(span, seq.span_units, end_unit)
        )
        if end_unit < num_layers * span.num_chunks:  # no row has come through all layers
            return replace(scheduled, samples=(), prompt_targets=None)
        return scheduled

    def _scheduled(self, seq: Sequence, chunk: int) -> ScheduledSequence:
        end = seq.num_computed + chunk
        return ScheduledSequence(
            seq_id=seq.seq_id,
            token_ids=seq.token_ids[seq.num_computed : end],
            context_len=seq.num_computed,
            prompt_len=seq.prompt_len,
            block_table=self.block_manager.places(seq, end),
            samples=[sampling_row(seq)] if end == len(seq) else (),
            prompt_targets=prompt_targets(seq, chunk),
        )


def _cut(sequences: Iterable[Sequence], tokens: int) -> list[tuple[Sequence, int]]:
    """What each of them computes while `tokens` last, first in order first."""
    chunks: list[tuple[Sequence, int]] = []
    for seq in sequences:
        if tokens > 0:
            chunks.append((seq, min(seq.num_remaining, tokens)))
            tokens -= chunks[-1][1]
    return chunks
