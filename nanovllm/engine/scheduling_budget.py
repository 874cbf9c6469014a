"""The limits of one engine step, and how its tokens are divided among the requests.

A *long prefill* takes more than one step. One is in progress at a time. Other long prompts wait until it has ended, and
may then find its blocks in the prefix cache; shorter prompts are admitted ahead of them. Decodes take their tokens of a
step first, then other prefills take up to half of what is left, and the long prefill gets the rest. So no decode and no
short prompt waits for a long prefill to end, and the long prefill advances in every step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from nanovllm.config import PreemptionMode
from nanovllm.engine.request import Request, Sequence
from nanovllm.memory.layerwise import NO_LAYERWISE, LayerwiseMemory


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Limits of one step, and what ends a sequence.

    long_prefill_token_threshold: most tokens of one prompt in a step; 0 means max_num_batched_tokens.
    preemption_mode: None swaps requests of several sequences and recomputes the others.
    layerwise_memory: device memory for layer-by-layer prefill.
    max_loras: LoRA adapters that the running requests may have; 0 if requests cannot have any.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    eos_token_ids: frozenset[int] = frozenset()
    long_prefill_token_threshold: int = 0
    preemption_mode: PreemptionMode | None = None
    num_layers: int = 1
    layerwise_memory: LayerwiseMemory = NO_LAYERWISE
    max_loras: int = 0

    @property
    def chunk(self) -> int:
        """Most tokens of one prompt in a step."""
        return min(self.max_num_batched_tokens, self.long_prefill_token_threshold or self.max_num_batched_tokens)


@dataclass(slots=True)
class SchedulingBudget:
    """Tokens and sequence slots of one step, and what has been scheduled so far.

    left: tokens not yet scheduled. free_seqs: free sequence slots. max_prefill_chunk: most tokens of one sequence that
    is not decoding. chunks: (sequence, number of tokens to compute), in batch order. long_prefill: the long prefill of
    this step, for which tokens are reserved. adapters: numbers of the LoRA adapters of the running requests, at most
    `max_loras`. awaits_adapter: the first request that waits until one of them is not in use.
    """

    left: int
    free_seqs: int
    max_prefill_chunk: int
    chunks: list[tuple[Sequence, int]] = field(default_factory=list)
    long_prefill: Request | None = None
    adapters: set[int] = field(default_factory=set)
    max_loras: int = 0
    awaits_adapter: Request | None = None
    _reserved: int = field(default=0, init=False)

    def has_slot(self, request: Request) -> bool:
        """Whether the request may run beside the others: its adapter, if it has one, is in use or can be loaded."""
        adapter = request.adapter
        return adapter is None or adapter.number in self.adapters or len(self.adapters) < self.max_loras

    def take(self, request: Request) -> None:
        """Count the sequences and the adapter of a request that begins to run."""
        self.free_seqs -= request.num_seqs
        if request.adapter is not None:
            self.adapters.add(request.adapter.number)
            if self.awaits_adapter is not None:
                self.awaits_adapter.num_overtaken += 1

    def schedule(self, request: Request) -> None:
        """Add the request's chunks to the step."""
        chunks = request.chunks(self.left, self.max_prefill_chunk)
        self.chunks += chunks
        self.left -= sum(chunk for _, chunk in chunks)

    def reserve_for(self, request: Request) -> None:
        """Make `request` the long prefill of this step, and reserve half of the tokens that are left for it."""
        self.long_prefill = request
        self._reserved = self.left // 2
        self.left -= self._reserved

    def schedule_long_prefill(self) -> None:
        """Give the long prefill all tokens that are left, the reserved ones too, unless it goes layer by layer."""
        assert self.long_prefill is not None
        self.left, self._reserved = self.left + self._reserved, 0
        if self.long_prefill.computing[0].layerwise is None:
            self.schedule(self.long_prefill)
