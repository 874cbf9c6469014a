"""Requests of several sequences that share a prompt (n, best_of)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence as Seq

from nanovllm.data.batch import Sample
from nanovllm.data.kv_groups import KVCapacity
from nanovllm.engine.request import Blocks, Request, Sequence
from nanovllm.engine.scheduler import SchedulerLimits
from nanovllm.errors import RequestError


class GroupRequest(Request):
    """A prompt and the sequences that answer it.

    The first sequence computes the prompt for all; then they fork, and `forked` is true from there on. From the fork on
    the sequences sample in the same steps.
    """

    forked: bool

    def __post_init__(self, arrival_time: float) -> None:
        super().__post_init__(arrival_time)
        self.forked = len(self.sequences) == 1

    def new_sequences(self) -> list[Sequence]:
        return [GroupSequence(self, next(self.seq_ids), index) for index in range(self.params.num_sequences)]

    # ---- what the scheduler asks

    @property
    def computing(self) -> list[Sequence]:
        """The sequences that the next step computes: the first live one before the fork, all live ones after it."""
        return self.live if self.forked else self.live[:1]

    def chunks(self, tokens: int, longest: int) -> list[tuple[Sequence, int]]:
        """See `Request.chunks`.

        After a recompute each sequence stops before its last token until all of them have caught up.
        """
        sequences = self.computing
        if len(sequences) == 1:
            return super().chunks(tokens, longest)
        if not self.is_prefill:
            return [(seq, 1) for seq in sequences] if len(sequences) <= tokens else []
        chunks: list[tuple[Sequence, int]] = []
        for seq in sequences:
            chunk = min(seq.num_remaining - 1, seq.num_to_snapshot, tokens, longest)
            if chunk > 0:
                chunks.append((seq, chunk))
                tokens -= chunk
        return chunks

    def num_extra_blocks(self, capacity: KVCapacity) -> int:
        """None for a new request. After a recompute, the blocks of what each sequence has generated."""
        if self.forked:
            return 0
        generated = [len(seq) for seq in self.live if seq.num_output_tokens]
        held = capacity.most_shared_blocks(self.prompt_len, generated)
        return max(0, held - capacity.most_blocks(self.prompt_len))

    def check_fits(self, max_model_len: int, capacity: KVCapacity) -> None:
        longest, needed = self._longest(max_model_len), self.blocks_at_most(max_model_len, capacity)
        if needed <= capacity.available:
            return
        lengths = range(self.prompt_len + 2, longest)
        held = bisect_right(lengths, capacity.available, key=lambda length: self._blocks_at_most(length, capacity))
        raise RequestError(
            f"request {self.request_id!r} asks for {self.params.num_sequences} sequences of up to {longest} tokens, "
            f"which can need {needed} KV blocks of {capacity.groups.block_sizes} tokens; the cache has "
            f"{capacity.num_blocks} and keeps {capacity.watermark} free: lower max_tokens to {held + 1}, or n or "
            "best_of, or raise num_gpu_blocks or num_cpu_blocks"
        )

    def blocks_at_most(self, max_model_len: int, capacity: KVCapacity) -> int:
        """Most KV blocks that it can hold at once: full prompt blocks are shared, all others are per sequence."""
        return self._blocks_at_most(self._longest(max_model_len), capacity)

    def _blocks_at_most(self, length: int, capacity: KVCapacity) -> int:
        """`blocks_at_most` with sequences of `length` tokens, the prompt included."""
        computed = max(length - 1, self.prompt_len)  # K/V of a sequence's last token is never computed
        if computed == self.prompt_len:  # one token each: the sequences end before they fork
            return capacity.most_blocks(computed)
        return capacity.most_shared_blocks(self.prompt_len, [computed] * self.params.num_sequences)

    def _longest(self, max_model_len: int) -> int:
        """Most tokens of each sequence, including the prompt."""
        max_tokens = self.params.max_tokens
        return max_model_len if max_tokens is None else min(self.prompt_len + max_tokens, max_model_len)

    # ---- sampling

    @property
    def num_logprobs(self) -> int | None:
        """Ranking the sequences needs the log-probabilities of their tokens, asked for or not."""
        asked = self.sampling.num_logprobs
        return (asked or 0) if self.is_ranked else asked

    def sampled_from(self, seq: Sequence) -> Seq[Sequence]:
        """Before the fork the sequences sample from the prompt's last row, unless they did before a preemption."""
        if self.forked:
            return [seq]
        return [] if seq.num_output_tokens else self.live

    def append_samples(self, samples: Seq[Sample], blocks: Blocks) -> None:
        self.fork(blocks)
        super().append_samples(samples, blocks)

    def fork(self, blocks: Blocks) -> None:
        """Share the blocks of the prompt with all sequences, once it is computed."""
        if not self.forked and self.computing[0].num_remaining == 0:
            first, *others = self.live
            for seq in others:
                blocks.fork(first, seq)
            self.forked = True

    # ---- preemption and end

    def rewind(self) -> None:
        """Go back to before the fork: the prompt is computed once for all sequences."""
        self.forked = len(self.live) == 1

    @property
    def is_ranked(self) -> bool:
        """Whether the sequences to return are chosen at the end."""
        return self.params.num_sequences > self.params.n

    @property
    def outputs(self) -> list[Sequence]:
        """The sequences to report; empty for a ranked request until it has finished."""
        return self.sequences if self.finished or not self.is_ranked else []

    def finish(self) -> None:
        """Mark the request finished, and of ranked sequences keep the `n` best, the best one first."""
        super().finish()
        if self.is_ranked:
            self.sequences = self.ranked()[: self.params.n]
            for index, seq in enumerate(self.sequences):
                seq.index = index

    def ranked(self) -> list[Sequence]:
        """The sequences, best first."""
        return sorted(self.sequences, key=lambda seq: -seq.cumulative_logprob)


class GroupSequence(Sequence):
    """One of several sequences. The first has the request's seed, the others have seeds of their own."""

    request: GroupRequest

    def __init__(self, request: GroupRequest, seq_id: int, index: int) -> None:
        super().__init__(request, seq_id)
        self.index = index
        if index > 0:
            self.seed = hash((request.seed, index))

    @property
    def end(self) -> int:
        """Tokens to compute before the sequence samples; before the fork only those of the prompt."""
        return len(self.token_ids) if self.request.forked else self.prompt_len


def check_num_sequences(request_id: str, count: int, limits: SchedulerLimits) -> None:
    """Raise RequestError for more sequences than fit in one step. Needs no request, which would hold them all."""
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        limit = getattr(limits, name)
        if count > limit:
            raise RequestError(
                f"request {request_id!r} asks for {count} sequences, which run together, and {name} is {limit}: "
                f"lower n or best_of, or raise {name}"
            )
