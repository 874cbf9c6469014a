"""What bounds a step of the engine, and how it makes room."""

from __future__ import annotations

from dataclasses import dataclass

from nanovllm.config import PreemptionMode
from nanovllm.kvcache.prefill_plan import NO_LAYERWISE, LayerwiseMemory


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Budgets of one step, and what ends a sequence.

    long_prefill_token_threshold: the most tokens of one prompt in a step, 0 for as many as fit. preemption_mode: None
    swaps requests of several sequences and recomputes the others. spans: what prompts may go layer by layer.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    eos_token_ids: frozenset[int] = frozenset()
    long_prefill_token_threshold: int = 0
    preemption_mode: PreemptionMode | None = None
    num_layers: int = 1
    layerwise_memory: LayerwiseMemory = NO_LAYERWISE

    @property
    def chunk(self) -> int:
        """The most tokens of one prompt in a step."""
        return min(self.max_num_batched_tokens, self.long_prefill_token_threshold or self.max_num_batched_tokens)
