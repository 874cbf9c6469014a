"""Arithmetic of KV memory: how a device budget is split, and what a step has to move."""

from __future__ import annotations

from dataclasses import dataclass

from nanovllm.kvcache.layout import KVLayout
from nanovllm.kvcache.prefill_plan import NO_SPANS, SpanMemory, prefill_steps

MIN_RING_SLOTS = 4  # one loading, one attended, one storing, one ahead
MAX_RING_SLOTS = 16  # past this depth a slot only takes memory from resident blocks


@dataclass(frozen=True, slots=True)
class DeviceSplit:
    """A device budget of `num_gpu_blocks` blocks, cut into ring slots (one layer of a block each) and whole blocks."""

    ring_slots: int
    resident_blocks: int


def split_device(num_gpu_blocks: int, num_layers: int) -> DeviceSplit:
    """The ring takes as few whole blocks as give it its depth; all others stay resident."""
    ring_slots = max(MIN_RING_SLOTS, min(MAX_RING_SLOTS, num_layers))
    ring_blocks = -(-ring_slots // num_layers)
    return DeviceSplit(ring_slots=ring_slots, resident_blocks=num_gpu_blocks - ring_blocks)


@dataclass(frozen=True, slots=True)
class TransferCount:
    """Copies over the link, and their bytes, each way."""

    h2d_copies: int = 0
    h2d_bytes: int = 0
    d2h_copies: int = 0
    d2h_bytes: int = 0

    def __bool__(self) -> bool:
        return self.h2d_copies + self.d2h_copies > 0

    def __add__(self, other: TransferCount) -> TransferCount:
        return TransferCount(
            self.h2d_copies + other.h2d_copies,
            self.h2d_bytes + other.h2d_bytes,
            self.d2h_copies + other.d2h_copies,
            self.d2h_bytes + other.d2h_bytes,
        )

    def __sub__(self, other: TransferCount) -> TransferCount:
        return TransferCount(
            self.h2d_copies - other.h2d_copies,
            self.h2d_bytes - other.h2d_bytes,
            self.d2h_copies - other.d2h_copies,
            self.d2h_bytes - other.d2h_bytes,
        )


def predict_transfers(
    layout: KVLayout, resident_blocks: int, context_len: int, query_len: int, window: int | None = None
) -> TransferCount:
    """What one step moves for one sequence alone whose first `resident_blocks` blocks are on the device.

    Every stored token of the rest is loaded once per layer, block by block; every new token of the rest is stored once
    per layer, one copy for each block that it falls into. With a sliding window, blocks that no new token sees stay
    where they are.
    """
    block_size, layers = layout.block_size, layout.num_layers
    first = resident_blocks * block_size  # first position on the host
    seen = 0 if window is None else max(0, context_len - window + 1) // block_size * block_size
    total = context_len + query_len
    loaded, stored = max(0, context_len - max(first, seen)), max(0, total - max(first, context_len))
    store_begin = max(first, context_len) // block_size
    return TransferCount(
        h2d_copies=layers * -(-loaded // block_size),
        h2d_bytes=loaded * layout.token_bytes,
        d2h_copies=layers * (-(-total // block_size) - store_begin) if stored else 0,
        d2h_bytes=stored * layout.token_bytes,
    )


def predict_request(
    layout: KVLayout,
    resident_blocks: int,
    prompt_len: int,
    output_len: int,
    max_num_batched_tokens: int,
    spans: SpanMemory = NO_SPANS,
) -> TransferCount:
    """`predict_transfers` summed over a whole request: its prefill, then one step for each further token.

    A span that is prefilled layer-major moves what one chunk of its length would.
    """
    total = TransferCount()
    host_blocks = range(resident_blocks, -(-prompt_len // layout.block_size))
    for step in prefill_steps(host_blocks, layout.block_size, prompt_len, max_num_batched_tokens, spans):
        total += predict_transfers(layout, resident_blocks, step.begin, step.end - step.begin)
    for context_len in range(prompt_len, prompt_len + output_len - 1):
        total += predict_transfers(layout, resident_blocks, context_len, 1)
    return total
