"""A sequence's parameters and progress as the plain row that the sampler reads."""

from __future__ import annotations

from nanovllm.engine.batch import SamplingRow
from nanovllm.engine.request import Sequence

# Beyond these a larger value changes nothing, and would not fit the sampler's tensors.
MAX_TEMPERATURE = 1e30
MAX_TOP_K = 2**31 - 1


def sampling_row(seq: Sequence) -> SamplingRow:
    """How the next token of `seq` is drawn."""
    p = seq.params
    return SamplingRow(
        temperature=0.0 if p.is_greedy else min(float(p.temperature), MAX_TEMPERATURE),
        top_k=min(max(p.top_k, 0), MAX_TOP_K),
        top_p=p.top_p,
        min_p=p.min_p,
        seed=seq.seed,
        index=seq.num_output_tokens,
    )
