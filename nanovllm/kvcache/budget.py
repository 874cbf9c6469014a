"""Arithmetic of KV memory: how a device budget is split, and what a step has to move or attend on the host."""

from __future__ import annotations

from dataclasses import dataclass

from nanovllm.kvcache.decode_shares import blocks_of_share
from nanovllm.kvcache.layout import KVLayout
from nanovllm.kvcache.prefill_plan import NO_LAYERWISE, LayerwiseMemory, prefill_steps

MIN_RING_SLOTS = 4  # one loading, one attended, one storing, one ahead; with more slots, as many groups of slots
MAX_RING_SLOTS = 16  # past this depth a slot only takes memory from resident blocks
GROUP_BYTES = 16 << 20  # of host blocks in a group, at least: on a fast link several times what the host does for it


@dataclass(frozen=True, slots=True)
class DeviceSplit:
    """A device budget of `num_gpu_blocks` blocks, cut into ring slots (one layer of a block each) and whole blocks."""

    ring_slots: int
    resident_blocks: int

    def group_slots(self, slot_bytes: int) -> int:
        """How many host blocks are loaded and attended together, at most.

        A quarter of the ring; more, up to half of it, where that is less than GROUP_BYTES: one group loads while the
        other is attended. The ring is divided evenly, and holds `ring_slots // group_slots` groups.
        """
        wanted = max(self.ring_slots // MIN_RING_SLOTS, -(-GROUP_BYTES // slot_bytes))
        size = max(1, min(wanted, self.ring_slots // 2))
        groups = self.ring_slots // size
        return self.ring_slots // groups if groups else 1


def split_device(num_gpu_blocks: int, num_layers: int, slot_bytes: int | None = None) -> DeviceSplit:
    """The ring takes as few whole blocks as give it its depth; all others stay resident.

    slot_bytes: one layer of a block. Where slots are small, the ring has as many of its whole blocks' layers as two
    groups of GROUP_BYTES take, which costs no further block.
    """
    ring_slots = max(MIN_RING_SLOTS, min(MAX_RING_SLOTS, num_layers))
    ring_blocks = -(-ring_slots // num_layers)
    if slot_bytes is not None:
        ring_slots = max(ring_slots, min(ring_blocks * num_layers, 2 * -(-GROUP_BYTES // slot_bytes)))
    return DeviceSplit(ring_slots=ring_slots, resident_blocks=num_gpu_blocks - ring_blocks)


@dataclass(frozen=True, slots=True)
class TransferCount:
    """KV copies over the link and their bytes, each way, and what the CPU arm attended to without a copy.

    A copy is one layer of one block, or a whole block between steps. Neighbouring ones go out in one call, so there may
    be fewer calls than copies. `cpu_attention_blocks` counts one layer of one block too.
    """

    h2d_copies: int = 0
    h2d_bytes: int = 0
    d2h_copies: int = 0
    d2h_bytes: int = 0
    cpu_attention_blocks: int = 0
    cpu_attention_bytes: int = 0

    @property
    def without_cpu_attention(self) -> TransferCount:
        """What would have been copied had the arm attended to nothing: each of its blocks spares one load."""
        h2d = self.h2d_copies + self.cpu_attention_blocks, self.h2d_bytes + self.cpu_attention_bytes
        return TransferCount(*h2d, self.d2h_copies, self.d2h_bytes)

    def __bool__(self) -> bool:
        return self.h2d_copies + self.d2h_copies > 0

    def __add__(self, other: TransferCount) -> TransferCount:
        return TransferCount(
            self.h2d_copies + other.h2d_copies,
            self.h2d_bytes + other.h2d_bytes,
            self.d2h_copies + other.d2h_copies,
            self.d2h_bytes + other.d2h_bytes,
            self.cpu_attention_blocks + other.cpu_attention_blocks,
            self.cpu_attention_bytes + other.cpu_attention_bytes,
        )

    def __sub__(self, other: TransferCount) -> TransferCount:
        return TransferCount(
            self.h2d_copies - other.h2d_copies,
            self.h2d_bytes - other.h2d_bytes,
            self.d2h_copies - other.d2h_copies,
            self.d2h_bytes - other.d2h_bytes,
            self.cpu_attention_blocks - other.cpu_attention_blocks,
            self.cpu_attention_bytes - other.cpu_attention_bytes,
        )


@dataclass(frozen=True, slots=True)
class CpuAttentionUse:
    """The CPU arm takes `share` of the host blocks that a step may give it, if the step has few enough new tokens."""

    share: float
    most_tokens: int  # see `decode_shares.cpu_attention_query_len`


def predict_transfers(
    layout: KVLayout,
    resident_blocks: int,
    context_len: int,
    query_len: int,
    window: int | None = None,
    cpu_attention: CpuAttentionUse | None = None,
) -> TransferCount:
    """What one step moves for one sequence alone whose first `resident_blocks` blocks are on the device.

    Every stored token of the rest is loaded once per layer, block by block; every new token of the rest is stored once
    per layer, one copy for each block that it falls into. With a sliding window, blocks that no new token sees stay
    where they are. The arm spares loads: it takes whole blocks that get no new token.
    """
    block_size, layers = layout.block_size, layout.num_layers
    first = resident_blocks * block_size  # first position on the host
    seen = 0 if window is None else max(0, context_len - window + 1) // block_size * block_size
    total = context_len + query_len
    loaded, stored = max(0, context_len - max(first, seen)), max(0, total - max(first, context_len))
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
    layerwise_memory: LayerwiseMemory = NO_LAYERWISE,
) -> TransferCount:
    """`predict_transfers` summed over a whole request: its prefill, then one step for each further token.

    A span that is prefilled layer-major moves what one chunk of its length would.
    """
    total = TransferCount()
    host_blocks = range(resident_blocks, -(-prompt_len // layout.block_size))
    for step in prefill_steps(host_blocks, layout.block_size, prompt_len, max_num_batched_tokens, layerwise_memory):
        taking = cpu_attention if step.num_chunks == 1 else None
        total += predict_transfers(layout, resident_blocks, step.begin, step.end - step.begin, cpu_attention=taking)
    for context_len in range(prompt_len, prompt_len + output_len - 1):
        total += predict_transfers(layout, resident_blocks, context_len, 1, cpu_attention=cpu_attention)
    return total
