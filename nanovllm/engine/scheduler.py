"""The scheduler: decides, anew for every step, which sequences compute how many tokens."""

from __future__ import annotations

import bisect
import logging
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq

from nanovllm.data.batch import Batch, Sample, ScheduledSequence, StepResult
from nanovllm.engine.block_manager import AllocStatus, BlockManager
from nanovllm.engine.preemption import Preemption
from nanovllm.engine.request import Request, RequestStatus, Sequence
from nanovllm.engine.scheduling_budget import SchedulerLimits, SchedulingBudget
from nanovllm.errors import ConfigError, RequestError, told

logger = logging.getLogger(__name__)

MOST_PASSED_OVER = 64  # waiting requests in a step: each takes as long as a look into the prefix cache


class Scheduler:
    """Continuous batching with chunked prefill: prefill and decode share a step.

    `schedule` lists the stages in which a step is filled. A request gets the blocks of its entire prompt when it is
    admitted, and grows block by block after that; in layers with a window it has the blocks of the window and of a
    chunk, and grows chunk by chunk. When a running request cannot grow, the last running or pending request is
    preempted, possibly the growing request itself. The sequences of one request run together or not at all.

    A request that waits for content of its blocks is *pending* between its admission and its first step: it holds
    blocks and a sequence slot, others run meanwhile, and it is preempted like them.

    A hook may compute the next *part* of a long prompt in its own way, as layer by layer (`layerwise_scheduler`); the
    part ends at `part_end`. All other tokens go chunk by chunk.
    """

    def __init__(self, limits: SchedulerLimits, block_manager: BlockManager) -> None:
        longest = block_manager.capacity.max_sequence_tokens
        if limits.max_model_len > longest:  # such a sequence could never be resumed
            raise ConfigError(
                f"max_model_len={limits.max_model_len}: the KV cache holds sequences of up to {longest} tokens; lower "
                "max_model_len or give the cache more blocks"
            )
        self.limits = limits
        self.block_manager = block_manager
        self.hooks = block_manager.hooks
        self.preemption = Preemption(block_manager, limits.preemption_mode)
        # All four are sorted by priority, then by arrival. Of a request, `live` has the sequences that go on, and
        # `computing` those of the next step: the first one until its prompt is computed, then all.
        self.waiting: list[Request] = []
        self.pending: list[Request] = []
        self.swapped: list[Request] = []
        self.running: list[Request] = []
        self._further: dict[Sequence, list[Sample]] = {}  # of the last step, to be appended still; the next one is last
        self._is_any_held = False  # a hook held back a waiting request in the last step
        self._passed_until: tuple[float, ...] | None = None  # order of the last request that was passed over in turn
        self.prompt_tokens_computed = self.tokens_generated = 0  # since it was created

    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.pending or self.swapped or self.running)

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError for one that could not finish even with the KV cache to itself.

        Preemption relies on this check: a request that runs alone can always grow.
        """
        capacity = self.block_manager.capacity
        seq = request.sequences[0]
        if self.block_manager.can_allocate(seq) is AllocStatus.NEVER:
            raise RequestError(
                f"request {request.request_id!r} has {request.prompt_len} tokens and needs "
                f"{capacity.most_blocks(seq.end)} KV blocks of {capacity.groups.block_sizes} tokens; the cache has "
                f"{capacity.num_blocks} and keeps {capacity.watermark} free: shorten the prompt to "
                f"{capacity.max_sequence_tokens} tokens, or raise num_gpu_blocks or num_cpu_blocks"
            )
        request.check_fits(self.limits.max_model_len, capacity)
        _insert(self.waiting, request)

    # ---- one step

    def schedule(self, now: float) -> Batch:
        """The batch of the next step; empty when nothing can run. now: the time at which requests begin to run."""
        self._end_pending(now)
        self._grow_running()
        budget = SchedulingBudget(self.limits, [*self.running, *self.pending], self._limit)
        self._schedule_running(budget)  # first of all, so that a long prefill never stalls a decode
        self._resume_swapped(budget)
        self._admit_waiting(budget, now)
        budget.add_long_prefill()
        for hook in self.hooks:
            hook.planned(budget)
        return self._batch(budget)

    def update(self, batch: Batch, result: StepResult, now: float) -> list[Request]:
        """Apply the result of a step: append sampled tokens, end finished sequences. Returns the requests that ran."""
        by_id = {seq.seq_id: seq for request in self.running for seq in request.live}
        stepped = [by_id[scheduled.seq_id] for scheduled in batch.sequences]
        for index, error in result.errors.items():
            stepped[index].request.error = error
        self._take_reports(stepped, result)
        sampled: dict[Request, list[Sample]] = {}
        for seq, scheduled, samples in zip(stepped, batch.sequences, result.samples, strict=True):
            sampled.setdefault(seq.request, []).extend(self._take_computed(seq, scheduled, samples))
        for request, new in sampled.items():
            self._take_samples(request, new, now)
        return list(sampled)

    def wait(self, seconds: float) -> bool:
        """Wait until what keeps requests from running may have changed, at most so long. False if that is nothing."""
        if not (self.pending or self._is_any_held):
            return False
        for hook in self.hooks:
            hook.wait(seconds)
        return True

    def append_next(self, seq: Sequence, now: float) -> bool:
        """Append the next sample of a sequence that looked ahead. Returns False when there is none left.

        Call it after `update` for every sequence until it returns False. The tokens come one by one, since each may end
        the sequence: what would have followed is dropped.
        """
        samples = self._further.get(seq)
        if samples is None:
            return False
        if seq.finished or not samples:
            self._end_look_ahead(seq)
            return False
        sample = samples.pop()
        seq.num_computed += 1  # the token that is now the last one was computed with the others
        self._count_computed(seq, seq.num_computed - 1, [sample])
        if not samples:  # before the last token, which may end the sequence: what it has computed may be worth keeping
            self._end_look_ahead(seq)
        self._apply_samples(seq.request, [sample], now)
        return True

    # ---- the stages of a step

    def _end_pending(self, now: float) -> None:
        """Start the requests whose blocks are filled. If that failed, a request waits again, for what is left of it."""
        for request in list(self.pending):
            seq = request.computing[0]
            if seq.pending is not None and not seq.pending.has_ended:
                continue
            if self.block_manager.end_pending(seq):
                self._start(request, now)
            else:
                self.preemption.restart(request)
                _insert(self.waiting, request)
            self.pending.remove(request)

    def _grow_running(self) -> None:
        """Give each running request the blocks of its next tokens; preempt the last of all to free them."""
        for request in list(self.running):
            if request.status is not RequestStatus.RUNNING:  # preempted for an earlier one
                continue
            while self.block_manager.num_to_grow(request.computing) > self.block_manager.pool.num_allocatable:
                victim = max(self.running[-1:] + self.pending[-1:], key=lambda last: last.order)
                self._preempt(victim)
                if victim is request:
                    break
            else:
                self.block_manager.grow(request.computing)

    def _schedule_running(self, budget: SchedulingBudget) -> None:
        """Schedule the decodes, then the prefills; for the long one only plan its part, and reserve tokens.

        The long prefill is the one of which a hook computes a part, else the first that the tokens left in this step do
        not complete. A request whose sequences are recomputed side by side has no single prompt, and does not count.
        """
        prefills: list[Request] = []
        for request in self.running:
            if request.is_prefill:
                prefills.append(request)
            else:
                budget.add_chunks(request)
        alone = [request for request in prefills if len(request.computing) == 1]
        in_parts = (request for request in alone if request.computing[0].part_end)
        long = (request for request in alone if request.computing[0].num_remaining > max(budget.left, 1))
        long_prefill = next(in_parts, next(long, None))
        if long_prefill is not None:
            self._plan_part(long_prefill.computing[0])
            budget.reserve_for(long_prefill)
        for request in prefills:
            if request is not long_prefill:
                budget.add_chunks(request)

    def _resume_swapped(self, budget: SchedulingBudget) -> None:
        """Resume swapped requests in order, as far as blocks, sequence slots and tokens allow."""
        while self.swapped and (request := self.preemption.resume(self.swapped, budget)) is not None:
            _insert(self.running, request)
            self.swapped.remove(request)
            self.block_manager.grow(request.computing)
            self._count_started(request, budget)
            budget.add_chunks(request)

    def _admit_waiting(self, budget: SchedulingBudget, now: float) -> None:
        """Admit waiting requests in order, as far as blocks, sequence slots and tokens allow.

        These are passed over:
        - while a long prefill runs, requests that one step cannot complete;
        - requests that will find in the prefix cache what a running request computes next;
        - requests that a hook does not let start, or holds back.
        The first of the others that does not fit ends the admission, so that later ones do not take its blocks.
        """
        self._is_any_held = False
        computing = self._computing_next() if self.waiting else {}
        passed_over: list[Request] = []
        for request in self._in_turn(passed_over):
            if budget.left == 0:
                return
            if not self._may_start(request, budget) or self._awaits_prefix(request, computing):
                passed_over.append(request)
                continue
            if not self._can_admit(request, budget):
                return
            if not all(hook.is_ready(request) for hook in self.hooks):
                self._is_any_held = True
                passed_over.append(request)
                continue
            self._admit(request, budget, now)
            computing.setdefault(self.block_manager.next_hash(request.computing[0]), request)

    def _in_turn(self, passed_over: Seq[Request]) -> Iterator[Request]:
        """The waiting requests in order, until MOST_PASSED_OVER of them are passed over.

        In a longer queue a step looks at the first requests, and then goes on where the step before it ended, so that
        all have their turn.
        """
        queue = list(self.waiting)
        index = 0
        half = MOST_PASSED_OVER // 2
        has_skipped = False
        while index < len(queue):
            if len(passed_over) == MOST_PASSED_OVER:
                return
            yield queue[index]
            index += 1
            if len(passed_over) > half:
                self._passed_until = passed_over[-1].order
            elif len(passed_over) == half and not has_skipped and self._passed_until is not None:
                index = max(index, bisect.bisect_right(queue, self._passed_until, key=lambda request: request.order))
                has_skipped = True
        self._passed_until = None

    # ---- helpers of the stages

    def _limit(self, seq: Sequence, tokens: int) -> int:
        """How many of the next tokens of a sequence all hooks let a step compute."""
        for hook in self.hooks:
            tokens = hook.limit(seq, tokens)
        return tokens

    def _plan_part(self, seq: Sequence) -> None:
        """Let a hook take the next part of a long prompt, unless it has one."""
        for hook in self.hooks if not seq.part_end else ():
            hook.plan_part(seq)

    def _computing_next(self) -> dict[bytes | None, Request]:
        """The running and pending prefills by the hash of the hash block that they compute, or get, next."""
        computing = dict[bytes | None, Request]()
        for request in [*self.running, *self.pending]:
            if request.is_prefill or request.status is RequestStatus.PENDING:
                for seq in request.computing:
                    computing.setdefault(self.block_manager.next_hash(seq), request)
        return computing

    def _may_start(self, request: Request, budget: SchedulingBudget) -> bool:
        if budget.long_prefill is not None and not self._fits_a_step(request):
            return False
        return all(hook.may_start(request) for hook in self.hooks)

    def _count_started(self, request: Request, budget: SchedulingBudget) -> None:
        budget.count_started(request)
        for hook in self.hooks:
            hook.started(request)

    def _can_admit(self, request: Request, budget: SchedulingBudget) -> bool:
        """Whether sequence slots and blocks suffice. No request overtakes a swapped one that precedes it."""
        if request.num_seqs > budget.free_seqs or (self.swapped and self.swapped[0].order < request.order):
            return False
        extra_blocks = request.num_extra_blocks(self.block_manager.capacity)
        return self.block_manager.can_allocate(request.computing[0], extra_blocks) is AllocStatus.OK

    def _awaits_prefix(self, request: Request, computing: Mapping[bytes | None, Request]) -> bool:
        """Whether a running or pending request is about to have what follows the cached prefix of a waiting one.

        No request waits for one that comes after it, which others may keep from running.
        """
        missing = self.block_manager.missing_hash(request.computing[0])
        return missing is not None and missing in computing and computing[missing].order < request.order

    def _fits_a_step(self, request: Request) -> bool:
        """Whether one step can compute the tokens of a waiting request that are not cached, and that no hook fills."""
        seq = request.computing[0]
        chunk = self.limits.chunk
        if seq.end <= chunk or seq.end - (cached := self.block_manager.num_cached_tokens(seq)) <= chunk:
            return True
        return seq.end - self.block_manager.reach(seq, cached) <= chunk

    def _admit(self, request: Request, budget: SchedulingBudget, now: float) -> None:
        """Give a waiting request its blocks, and let it run, unless it is pending."""
        seq = request.computing[0]
        self.block_manager.allocate(seq)
        self.waiting.remove(request)
        if seq.pending is not None:
            request.status = RequestStatus.PENDING
            _insert(self.pending, request)
            self._count_started(request, budget)
            return
        if budget.long_prefill is None:  # else it fits a step, unless a hook fills less than it has just said
            self._plan_part(seq)
        self._start(request, now)
        self._count_started(request, budget)
        if seq.part_end:
            budget.reserve_for(request)
        else:
            budget.add_chunks(request)

    def _start(self, request: Request, now: float) -> None:
        """Let a request run that has its blocks."""
        if request.metrics.first_scheduled_time is None:
            seq = request.computing[0]
            request.metrics.first_scheduled_time = now
            request.metrics.cached_tokens = seq.num_computed
            request.metrics.cached_tokens_host = seq.prefix.num_on_host
            for hook in self.hooks:
                hook.first_run(request)
        request.status = RequestStatus.RUNNING
        _insert(self.running, request)

    def _preempt(self, request: Request) -> None:
        """Take the blocks of a running or a pending request, which will be admitted, or swapped in, again.

        By default a single sequence is recomputed, and what it has computed stays cached in whole hash blocks; several
        are swapped out, or recomputed if the swap tier is full or a hook does not agree: see `Preemption`.
        """
        queue = self.running
        if request.status is RequestStatus.PENDING:
            queue = self.pending
            self.preemption.restart(request)
        else:
            self.preemption.preempt(request)
        _insert(self.swapped if request.status is RequestStatus.SWAPPED else self.waiting, request)
        queue.remove(request)

    # ---- the batch

    def _batch(self, budget: SchedulingBudget) -> Batch:
        """What the step computes; empty if that is nothing. Moves stay planned until a step carries them out."""
        pool = self.block_manager.pool
        self.block_manager.promote(seq for seq, _ in budget.chunks)
        chunks = [*budget.chunks]
        if (seq := budget.part) is not None:
            chunks.append((seq, seq.part_end - seq.num_computed))
        if not chunks:
            is_expected = self.pending or not self.has_unfinished() or not pool.has_moves
            assert is_expected, "block moves were planned for a step without sequences"
            return Batch([])
        scheduled = [self._scheduled(seq, chunk) for seq, chunk in chunks]
        pool.count_used()
        batch = Batch(scheduled, pool.take_moves())
        sequences = [seq for seq, _ in chunks]
        for hook in self.hooks:
            hook.built(batch, sequences)
        return batch

    def _scheduled(self, seq: Sequence, chunk: int) -> ScheduledSequence:
        end = seq.num_computed + chunk
        sampling = seq.request.sampled_from(seq) if end == seq.end else ()
        return ScheduledSequence(
            seq_id=seq.seq_id,
            token_ids=seq.token_ids[seq.num_computed : end],
            context_len=seq.num_computed,
            prompt_len=seq.prompt_len,
            block_tables=self.block_manager.physical_ids(seq, end),
            samples=[other.sampling_row() for other in sampling],  # temperature, top_p and the others, seed and index
            prompt_targets=seq.prompt_targets(chunk) if seq.num_computed < seq.prompt_len else None,
            request_id=seq.request.request_id,
        )

    # ---- the result of a step

    def _take_reports(self, stepped: Seq[Sequence], result: StepResult) -> None:
        """What a step reports besides its samples: bytes of copies, and log-probabilities of prompts."""
        for seq, h2d_bytes, d2h_bytes in zip(stepped, result.h2d_bytes, result.d2h_bytes, strict=True):
            seq.request.metrics.h2d_bytes += h2d_bytes
            seq.request.metrics.d2h_bytes += d2h_bytes
        for seq, logprobs in zip(stepped, result.prompt_logprobs, strict=False):
            if seq.request.error is None:
                seq.request.prompt_logprobs.extend(logprobs)

    def _take_computed(self, seq: Sequence, scheduled: ScheduledSequence, samples: list[Sample]) -> list[Sample]:
        """Count what a step has computed of a sequence. Returns the samples to append now.

        A sequence that looked ahead computed guesses of its next tokens too. It is then the first sample; `append_next`
        appends the others.
        """
        begin = scheduled.context_len
        computed = len(scheduled.token_ids) - seq.num_ahead if scheduled.is_complete else 0
        if seq.num_ahead and not samples:  # a guess has spoiled the logits: it is computed again
            computed = 0
        seq.num_computed += computed
        prefilled = max(0, min(computed, seq.prompt_len - begin))
        self.prompt_tokens_computed += prefilled
        seq.request.metrics.prefill_tokens += prefilled
        if seq.request.error is not None:  # the numbers are unusable
            return samples
        self._count_computed(seq, begin, samples)
        if not seq.num_ahead:
            return samples
        self._further[seq] = samples[:0:-1]
        return samples[:1]

    def _count_computed(self, seq: Sequence, begin: int, samples: Seq[Sample]) -> None:
        """Let the prefix cache and the hooks see what is computed, and release what no later token sees."""
        self.block_manager.register_computed(seq, begin)
        for hook in self.hooks:
            hook.computed(seq, begin, samples)
        self.block_manager.release_hidden(seq)

    def _end_look_ahead(self, seq: Sequence) -> None:
        del self._further[seq]
        self.block_manager.end_look_ahead(seq)

    def _take_samples(self, request: Request, samples: list[Sample], now: float) -> None:
        """Apply samples. Invalid ones end this request only."""
        if request.error is None:
            try:
                self._apply_samples(request, samples, now)
            except Exception as error:
                logger.exception("request %r cannot go on", request.request_id)
                request.error = told(error)
        if request.error is not None:
            self.abort(request, now, "error")

    def _apply_samples(self, request: Request, samples: list[Sample], now: float) -> None:
        """Append `samples`, none or one per live sequence, and end the sequences that they complete."""
        self.tokens_generated += len(samples)
        metrics = request.metrics
        if samples and metrics.first_token_time is None:
            metrics.first_token_time = now
            metrics.first_prefill_tokens = metrics.prefill_tokens
        else:
            metrics.decode_tokens += len(samples)
        request.append_samples(samples, self.block_manager.fork)
        for seq in request.live if samples else ():
            token = seq.token_ids[-1]
            if token in seq.params.stop_token_ids:
                seq.stop_reason = token
                self._finish(seq, "stop", now)
            elif token in self.limits.eos_token_ids and not seq.params.ignore_eos:
                self._finish(seq, "stop", now)
            elif seq.num_output_tokens == seq.params.max_tokens or len(seq) >= self.limits.max_model_len:
                self._finish(seq, "length", now)
        if request.params.max_tokens == 0 and request.computing[0].num_remaining == 0:
            self._finish(request.computing[0], "length", now)

    # ---- ending sequences and requests

    def end_by_string(self, seq: Sequence, stop_string: str, now: float) -> None:
        """End a sequence whose last token completed a stop string; this takes precedence over its length limit."""
        seq.stop_reason = stop_string
        if seq.finished:
            seq.finish_reason = "stop"
        else:
            self._finish(seq, "stop", now)

    def abort(self, request: Request, now: float, reason: str = "abort") -> None:
        """End a request in any state and free its blocks."""
        for seq in request.live:
            self._finish(seq, reason, now)

    def fail(self, now: float, error: str | None = None) -> None:
        """End all running requests and forget all cached content, after a step that failed or was interrupted.

        All others wait to be admitted, the swapped and pending ones again: what a step had begun for them is undone.
        """
        unfinished = dict.fromkeys([*self.running, *self.swapped, *self.pending, *self.waiting])
        failed = [request for request in unfinished if request in self.running or not request.live]
        self.waiting = sorted(unfinished.keys() - set(failed), key=lambda request: request.order)
        self.running = []
        self.swapped = []
        self.pending = []
        self._further = {}
        self.block_manager.reset([seq for request in unfinished for seq in request.sequences])
        for request in self.waiting:
            request.rewind()
            request.status = RequestStatus.WAITING
        for request in failed:
            request.error = error
            request.step_failed = True
            for seq in request.live:
                seq.finish_reason = "error"
            self._end(request, now)

    def _finish(self, seq: Sequence, reason: str, now: float) -> None:
        """End one sequence and free its blocks; the request ends with its last sequence."""
        seq.finish_reason = reason
        self.block_manager.free(seq)
        if not seq.request.live:
            self._end(seq.request, now)

    def _end(self, request: Request, now: float) -> None:
        request.finish()
        request.metrics.finished_time = now
        for queue in (self.waiting, self.pending, self.swapped, self.running):
            if request in queue:
                queue.remove(request)


def _insert(queue: list[Request], request: Request) -> None:
    bisect.insort(queue, request, key=lambda r: r.order)
