"""The limits of a step, and what a step that is being scheduled can still take."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from nanovllm.config import PreemptionMode, longest_chunk
from nanovllm.engine.request import Request, Sequence
from nanovllm.memory.layerwise import NO_LAYERWISE, LayerwiseMemory


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Limits of one step, and what ends a sequence."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    eos_token_ids: frozenset[int] = frozenset()
    long_prefill_token_threshold: int = 0  # most tokens of one prompt in a step; 0 means max_num_batched_tokens
    preemption_mode: PreemptionMode | None = None  # None swaps requests of several sequences and recomputes the others
    num_layers: int = 1  # with K and V; a recurrent layer is counted with the next one of these
    layerwise_memory: LayerwiseMemory = NO_LAYERWISE  # device memory for layer-by-layer prefill
    # A prompt that a step cannot complete is cut at a multiple of `edge`. Every step must have room for two such parts
    # beside its decodes.
    edge: int = 1

    @property
    def chunk(self) -> int:
        """Most tokens of one prompt in a step."""
        most = longest_chunk(self.max_num_batched_tokens, self.long_prefill_token_threshold)
        return most // self.edge * self.edge


class SchedulingBudget:
    """Tokens and sequence slots of one step, and what has been scheduled so far."""

    def __init__(self, limits: SchedulerLimits, running: Seq[Request], limit: Callable[[Sequence, int], int]) -> None:
        """running: all requests that hold sequence slots, those that are pending among them.

        limit: cuts a chunk of a sequence where it has to end.
        """
        self.left = limits.max_num_batched_tokens  # tokens not yet scheduled
        self.free_seqs = limits.max_num_seqs - sum(request.num_seqs for request in running)  # free sequence slots
        self.chunks: list[tuple[Sequence, int]] = []  # sequences and numbers of tokens to compute, in batch order
        self.long_prefill: Request | None = None  # for which tokens are reserved
        self._limits = limits
        self._limit = limit
        self._reserved = 0  # tokens

    def count_started(self, request: Request) -> None:
        """Count the sequences of a request that begins to run."""
        self.free_seqs -= request.num_seqs

    def chunks_of(self, request: Request) -> list[tuple[Sequence, int]]:
        """What the step would compute of the request; empty if it does not fit."""
        return request.chunks(self.left, self._limits.chunk, self._limits.edge, self._limit)

    def add_chunks(self, request: Request) -> None:
        """Compute as much of the request in this step as fits."""
        chunks = self.chunks_of(request)
        self.chunks += chunks
        self.left -= sum(chunk for _, chunk in chunks)

    def reserve_for(self, request: Request) -> None:
        """Make `request` the long prefill of this step, and reserve half of the tokens that are left for it."""
        self.long_prefill = request
        self._reserved = self.left // 2
        self.left -= self._reserved

    def add_long_prefill(self) -> None:
        """Give the long prefill all tokens that are left, the reserved ones too. A hook takes them for its `part`."""
        self.left = self.left + self._reserved
        self._reserved = 0
        if self.long_prefill is not None and self.part is None:
            self.add_chunks(self.long_prefill)

    @property
    def part(self) -> Sequence | None:
        """The sequence of which a hook computes a part, with all tokens that are left in the end."""
        seq = None if self.long_prefill is None else self.long_prefill.computing[0]
        return seq if seq is not None and seq.part_end else None
