"""The formula of what a step and a request copy or leave to CPU attention, from sizes alone.

Of a model without windows: with windows a block's place depends on what was released before, which the dry run of
`features.planner` follows. Written without the engine, so that tests hold the engine and the planner against it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from nanovllm.data.batch import LayerwisePrefill
from nanovllm.memory.budget import TransferCount, blocks_of_share
from nanovllm.memory.layerwise import NO_LAYERWISE, prefill_steps
from nanovllm.memory.layout import KVLayout


@dataclass(frozen=True, slots=True)
class CpuAttentionUse:
    """CPU attention of a `share` of the host blocks, in steps with at most `most_tokens` new tokens."""

    share: float
    most_tokens: int  # see `cpu_attention.shares.cpu_attention_query_len`


def predict_transfers(
    layout: KVLayout,
    resident_blocks: int,
    context_len: int,
    query_len: int,
    cpu_attention: CpuAttentionUse | None = None,
) -> TransferCount:
    """What a step copies for a sequence alone whose first `resident_blocks` blocks are on the device.

    Of the other blocks, every stored token is loaded once per layer, block by block, and every new token is stored once
    per layer, with one copy for each block that gets new tokens. CPU attention saves the loads of full blocks without
    new tokens. Of a model without windows: with windows a block's place depends on what was released before
    (`features.planner.dry_run`).
    """
    block_size = layout.block_size
    layers = layout.num_layers
    first = resident_blocks * block_size  # first position on the host
    total = context_len + query_len
    loaded = max(0, context_len - first)
    stored = max(0, total - max(first, context_len))
    store_begin = max(first, context_len) // block_size
    spared = 0
    if cpu_attention is not None and query_len <= cpu_attention.most_tokens:
        spared = blocks_of_share(loaded // block_size, cpu_attention.share)
    return TransferCount(
        h2d_copies=layers * (-(-loaded // block_size) - spared),
        h2d_bytes=loaded * layout.token_bytes - spared * layout.block_bytes,
        d2h_copies=layers * (-(-total // block_size) - store_begin) if stored else 0,
        d2h_bytes=stored * layout.token_bytes,
        cpu_attention_blocks=layers * spared,
        cpu_attention_bytes=spared * layout.block_bytes,
    )


def predict_request(
    layout: KVLayout,
    resident_blocks: int,
    prompt_len: int,
    output_len: int,
    max_num_batched_tokens: int,
    cpu_attention: CpuAttentionUse | None = None,
    prefill: Iterable[LayerwisePrefill] | None = None,
) -> TransferCount:
    """`predict_transfers` summed over a request: its prefill, then one step for each further token.

    prefill: of `memory.layerwise.prefill_steps`; None for chunk by chunk. A layer-by-layer prefill copies what a
    single chunk of its length would.
    """
    total = TransferCount()
    chunks = (layout.block_size, resident_blocks, prompt_len, max_num_batched_tokens, NO_LAYERWISE)
    for step in prefill or prefill_steps(*chunks):
        taking = cpu_attention if step.num_chunks == 1 else None
        total += predict_transfers(layout, resident_blocks, step.begin, step.end - step.begin, cpu_attention=taking)
    for context_len in range(prompt_len, prompt_len + output_len - 1):
        total += predict_transfers(layout, resident_blocks, context_len, 1, cpu_attention=cpu_attention)
    return total
