"""Decides, afresh for every step, which sequences compute how many tokens."""

from __future__ import annotations

import bisect
import logging

from nanovllm.engine.admission import blocks_beside, check_servable
from nanovllm.engine.batch import Batch, Sample, SamplingRow, ScheduledSequence, StepResult
from nanovllm.engine.beams import advance_beams
from nanovllm.engine.block_manager import AllocStatus, BlockManager
from nanovllm.engine.limits import SchedulerLimits
from nanovllm.engine.long_prefill import long_prefill, passes, plan_layerwise, scheduled_part, take_part
from nanovllm.engine.preemption import Preemption
from nanovllm.engine.request import Request, RequestStatus, Sequence
from nanovllm.engine.sampling_rows import prompt_targets, sampling_row
from nanovllm.engine.scheduling_budget import SchedulingBudget, is_prefill
from nanovllm.errors import ConfigError, told
from nanovllm.kvcache.prefill_plan import LayerwisePrefill

logger = logging.getLogger(__name__)


class Scheduler:
    """Continuous batching with chunked prefill; prefill and decode share a step.

    A step is filled in this order: requests that decode (one token of each sequence, so that a long prefill never
    stalls them), running prefills, swapped requests unless one was swapped out in this step, then waiting ones, as far
    as blocks and budgets allow; a prompt that takes several steps shares them with the others (`long_prefill.py`). A
    request gets the blocks of its whole prompt when it is admitted, and grows block by block after that. The sequences
    of a request run together or not at all. When a running request cannot grow, the last one in order (itself last) is
    preempted: it is swapped out and waits for room, or its blocks are freed, it waits in front, and it is recomputed
    from whatever the prefix cache still holds.
    """

    def __init__(self, limits: SchedulerLimits, block_manager: BlockManager) -> None:
        if limits.max_model_len > block_manager.max_sequence_tokens:  # such a sequence could never be resumed
            raise ConfigError(
                f"max_model_len={limits.max_model_len}: the KV cache holds sequences of up to "
                f"{block_manager.max_sequence_tokens} tokens; lower max_model_len or give the cache more blocks"
            )
        self.limits = limits
        self.block_manager = block_manager
        self.preemption = Preemption(block_manager, limits.preemption_mode)
        self.waiting: list[Request] = []  # all lists in scheduling order: priority, then arrival
        self.swapped: list[Request] = []
        self.running: list[Request] = []

    @property
    def num_preemptions(self) -> int:
        return self.preemption.stats.total

    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.swapped or self.running)

    def add(self, request: Request) -> None:
        """Queue a request; one that could never run to its end is refused at once."""
        check_servable(request, self.limits, self.block_manager)
        bisect.insort(self.waiting, request, key=lambda r: r.order)

    # ---- one step

    def schedule(self, now: float) -> Batch:
        """The next step's batch; empty when nothing can run. `now` stamps first-scheduled times."""
        swapped_out = self._grow_running()
        limits = self.limits
        free_seqs = limits.max_num_seqs - sum(request.num_seqs for request in self.running)
        step = SchedulingBudget(limits.max_num_batched_tokens, free_seqs, limits.long_prefill_token_threshold)
        for request in [request for request in self.running if not is_prefill(request)]:
            step.give(request)
        long = self._give_beside_long_prefill(step, swapped_out, now)
        step.release()
        layerwise = long.computing[0].layerwise if long is not None else None
        if long is not None and layerwise is None:
            step.give(long)
        self.block_manager.promote(seq for seq, _ in step.chunks)
        moves = self.block_manager.take_moves()
        sequences = [self._scheduled(seq, chunk) for seq, chunk in step.chunks]
        if long is not None and layerwise is not None:
            sequences.append(self._scheduled_part(long.computing[0], layerwise, step.left))
        assert sequences or not moves, "whoever runs alone is in every step"
        return Batch(sequences, moves)

    def update(self, batch: Batch, result: StepResult, now: float) -> list[Request]:
        """Take a step's result in: advance, append the sampled tokens, end what is finished. Returns the requests."""
        by_id = {seq.seq_id: seq for request in self.running for seq in request.live}
        stepped = [by_id[scheduled.seq_id] for scheduled in batch.sequences]
        drawn: dict[Request, list[Sample]] = {}
        rows = zip(stepped, batch.sequences, result.samples, result.h2d_bytes, result.d2h_bytes, strict=True)
        for seq, scheduled, samples, h2d_bytes, d2h_bytes in rows:
            computed, metrics = len(scheduled.token_ids), seq.request.metrics
            if scheduled.layerwise is not None:
                computed = take_part(seq, scheduled.layerwise, self.limits.num_layers)
            seq.num_computed += computed
            metrics.prefill_tokens += max(0, min(computed, seq.prompt_len - scheduled.context_len))
            metrics.h2d_bytes += h2d_bytes
            metrics.d2h_bytes += d2h_bytes
            self.block_manager.register_computed(seq, scheduled.context_len)
            drawn.setdefault(seq.request, []).extend(samples)
        errors = {stepped[index].request: error for index, error in result.errors.items()}
        for seq, prompt_logprobs in zip(stepped, result.prompt_logprobs, strict=False):
            if seq.request not in errors:
                seq.request.prompt_logprobs.extend(prompt_logprobs)
        for request, of_request in drawn.items():
            if request in errors:
                self.end_by_error(request, errors[request], now)
                continue
            try:
                self._continue(request, of_request, now)
            except Exception as error:  # of what was drawn for this request: it ends, the others go on
                logger.exception("request %r cannot go on", request.request_id)
                self.end_by_error(request, told(error), now)
        return list(drawn)

    def _continue(self, request: Request, samples: list[Sample], now: float) -> None:
        """A step has computed something of a request and drawn these: nothing, or one for each live sequence."""
        if not request.forked and request.computing[0].num_remaining == 0:
            first, *others = request.live
            for seq in others:
                self.block_manager.fork(first, seq)
            request.forked = True
        if not samples:
            return
        metrics = request.metrics
        if metrics.first_token_time is None:
            metrics.first_token_time = now
        else:
            metrics.decode_tokens += len(samples)
        if request.beam_search is None:
            for seq, sample in zip(request.live, samples, strict=True):
                self._append(seq, sample, now)
        elif advance_beams(request, samples, self.block_manager):
            self._end(request, now)

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

    def end_by_error(self, request: Request, error: str, now: float) -> None:
        """Something went wrong with this request alone."""
        request.error = error
        self.abort(request, now, "error")

    def fail(self, now: float, error: str | None = None) -> list[Request]:
        """A step failed or was interrupted anywhere: ends all running requests, and forgets all content.

        Swapped requests wait and are recomputed.
        """
        failed = [*self.running, *(r for r in self.waiting if r not in self.running and self._holds_blocks(r))]
        swapped = [request for request in self.swapped if request not in failed]
        self.waiting = [request for request in self.waiting if request not in failed and request not in swapped]
        self.running, self.swapped = [], []
        self.block_manager.reset()
        for request in [*failed, *swapped]:
            for seq in request.live:
                seq.block_table, seq.num_computed = [], 0
        for request in swapped:
            request.rewind()
            request.status = RequestStatus.WAITING
            bisect.insort(self.waiting, request, key=lambda r: r.order)
        for request in failed:
            request.error = error
            for seq in request.live:
                seq.finish_reason = "error"
            self._end(request, now)
        return failed

    def _holds_blocks(self, request: Request) -> bool:
        return any(seq.block_table for seq in request.sequences)

    def _append(self, seq: Sequence, sample: Sample, now: float) -> None:
        token = sample.token_id
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
        seq.finish_reason = reason
        self.block_manager.free(seq)
        if not seq.request.live:
            self._end(seq.request, now)

    def _end(self, request: Request, now: float) -> None:
        for queue in (self.waiting, self.swapped, self.running):
            if request in queue:
                queue.remove(request)
        request.finish()
        request.metrics.finished_time = now

    # ---- admission and preemption

    def _can_swap_in(self, step: SchedulingBudget) -> bool:
        """Whether the first swapped request has a seat, room for its blocks, and a share of the step."""
        if not self.swapped or self.swapped[0].num_seqs > step.free_seqs:
            return False
        request, manager = self.swapped[0], self.block_manager
        needed = manager.num_swapped_blocks(request.live) + manager.num_to_grow(request.computing)
        return manager.num_allocatable - needed >= manager.watermark and bool(step.share_of(request))

    def _swap_in(self) -> Request:
        request = self.swapped[0]
        self.preemption.resume(request)
        bisect.insort(self.running, request, key=lambda r: r.order)
        del self.swapped[0]
        self.block_manager.grow(request.computing)
        return request

    def _give_beside_long_prefill(self, step: SchedulingBudget, swapped_out: bool, now: float) -> Request | None:
        """Give prefills their shares, running and admitted now, but for the long one, of which half is held back."""
        long = long_prefill(self.running, step.left)
        if long is not None:
            if long.computing[0].layerwise is None:
                plan_layerwise(long.computing[0], self.block_manager, self.limits)
            step.hold_half()
        for request in [r for r in self.running if is_prefill(r) and r is not long]:
            step.give(request)
        while not swapped_out and self._can_swap_in(step):
            step.join(self._swap_in())
        while step.left > 0 and (admissible := self._admissible(step, beside_long=long is not None)) is not None:
            self._admit(admissible, now)
            if admissible.computing[0].layerwise is None:
                step.join(admissible)
            else:
                step.free_seqs -= admissible.num_seqs
                long = admissible
                step.hold_half()
        return long

    def _admissible(self, step: SchedulingBudget, beside_long: bool) -> Request | None:
        """The request to admit next, if it can begin: the first that waits, or the first that passes a long prefill.

        Nobody passes a request of his order that is swapped out.
        """
        manager, chunk = self.block_manager, self.limits.chunk
        request = next((r for r in self.waiting if not beside_long or passes(r, manager, chunk)), None)
        if request is None or (self.swapped and self.swapped[0].order < request.order):
            return None
        if request.num_seqs > step.free_seqs:
            return None
        beside = blocks_beside(request, manager.block_size)
        return request if manager.can_allocate(request.computing[0], beside) is AllocStatus.OK else None

    def _admit(self, request: Request, now: float) -> None:
        seq = request.computing[0]
        self.block_manager.allocate(seq)
        plan_layerwise(seq, self.block_manager, self.limits)
        if request.metrics.first_scheduled_time is None:
            request.metrics.first_scheduled_time = now
            request.metrics.cached_tokens = seq.num_computed
        request.status = RequestStatus.RUNNING
        bisect.insort(self.running, request, key=lambda r: r.order)
        self.waiting.remove(request)  # last, so that a request is in one of the lists whenever an interrupt comes

    def _grow_running(self) -> bool:
        """Give each running request the blocks of its next tokens, first in order first.

        Returns whether a request was swapped out for that.
        """
        swapped_before = self.preemption.stats.swapped
        for request in list(self.running):
            if request.status is not RequestStatus.RUNNING:  # preempted for one before it
                continue
            while not self.block_manager.can_grow(request.computing):
                victim = self.running[-1]
                self._preempt(victim)
                if victim is request:
                    break
            else:
                self.block_manager.grow(request.computing)
        return self.preemption.stats.swapped > swapped_before

    def _preempt(self, request: Request) -> None:
        self.preemption.preempt(request)
        queue = self.swapped if request.status is RequestStatus.SWAPPED else self.waiting
        bisect.insort(queue, request, key=lambda r: r.order)
        self.running.remove(request)

    def _scheduled_part(self, seq: Sequence, layerwise: LayerwisePrefill, tokens: int) -> ScheduledSequence:
        whole = self._scheduled(seq, layerwise.end - layerwise.begin)
        return scheduled_part(whole, seq, layerwise, min(tokens, self.limits.chunk), self.limits.num_layers)

    def _scheduled(self, seq: Sequence, chunk: int) -> ScheduledSequence:
        end = seq.num_computed + chunk
        return ScheduledSequence(
            seq_id=seq.seq_id,
            token_ids=seq.token_ids[seq.num_computed : end],
            context_len=seq.num_computed,
            prompt_len=seq.prompt_len,
            block_table=self.block_manager.physical_ids(seq, end),
            samples=self._sampling_rows(seq) if end == seq.end else (),
            prompt_targets=prompt_targets(seq, chunk),
        )

    def _sampling_rows(self, seq: Sequence) -> list[SamplingRow]:
        """What is drawn once the sequence has computed all it can."""
        if seq.request.forked:
            return [sampling_row(seq)]
        if seq.num_output_tokens:  # preempted after its first tokens were drawn
            return []
        return [sampling_row(sibling) for sibling in seq.request.live]
