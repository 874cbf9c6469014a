"""Arithmetic of KV memory: how a device budget is split, and a count of what steps copy or leave to CPU attention."""

from __future__ import annotations

import operator
from dataclasses import astuple, dataclass

MIN_RING_SLOTS = 4  # one loading, one attended, one storing, one ahead; a deeper ring has as many groups of slots
MAX_RING_SLOTS = 16  # a deeper ring only takes memory from resident blocks
GROUP_BYTES = 64 << 20  # smallest group of host blocks: its copy takes longer than the host's work for it


@dataclass(frozen=True, slots=True)
class DeviceSplit:
    """`num_gpu_blocks` device blocks, split into ring slots (a layer of a block each) and resident blocks."""

    ring_slots: int
    resident_blocks: int

    def group_slots(self, slot_bytes: int) -> int:
        """The most host blocks that are loaded and attended together.

        A quarter of the ring. Where that is less than GROUP_BYTES, up to half of it: one group loads while the other is
        attended. The ring is divided evenly into `ring_slots // group_slots` groups.
        """
        wanted = max(self.ring_slots // MIN_RING_SLOTS, -(-GROUP_BYTES // slot_bytes))
        size = max(1, min(wanted, self.ring_slots // 2))
        groups = self.ring_slots // size
        return self.ring_slots // groups if groups else 1


def split_device(num_gpu_blocks: int, num_layers: int, slot_bytes: int | None = None) -> DeviceSplit:
    """Give the ring the fewest blocks that reach its depth; all others are resident.

    slot_bytes: one layer of a block. Where slots are small, the ring uses as much of its blocks as two groups of
    GROUP_BYTES need, which costs no further block.
    """
    ring_slots = max(MIN_RING_SLOTS, min(MAX_RING_SLOTS, num_layers))
    ring_blocks = -(-ring_slots // num_layers)
    if slot_bytes is not None:
        ring_slots = max(ring_slots, min(ring_blocks * num_layers, 2 * -(-GROUP_BYTES // slot_bytes)))
    return DeviceSplit(ring_slots=ring_slots, resident_blocks=num_gpu_blocks - ring_blocks)


@dataclass(frozen=True, slots=True)
class TransferCount:
    """Copies of KV and states over the link and their bytes, in each direction, and what the CPU attended to instead.

    A copy is one layer of a block, or all layers of a block or of a recurrent state moved between steps. Neighbouring
    blocks take one call, so there may be fewer calls than copies. `cpu_attention_blocks` also counts single layers of a
    block.
    """

    h2d_copies: int = 0
    h2d_bytes: int = 0
    d2h_copies: int = 0
    d2h_bytes: int = 0
    cpu_attention_blocks: int = 0
    cpu_attention_bytes: int = 0

    @property
    def without_cpu_attention(self) -> TransferCount:
        """What would have been copied without CPU attention: each of its blocks saves one load."""
        h2d = self.h2d_copies + self.cpu_attention_blocks, self.h2d_bytes + self.cpu_attention_bytes
        return TransferCount(*h2d, self.d2h_copies, self.d2h_bytes)

    def __bool__(self) -> bool:
        return self.h2d_copies + self.d2h_copies > 0

    def __add__(self, other: TransferCount) -> TransferCount:
        return TransferCount(*map(operator.add, astuple(self), astuple(other)))

    def __sub__(self, other: TransferCount) -> TransferCount:
        return TransferCount(*map(operator.sub, astuple(self), astuple(other)))


def blocks_of_share(count: int, share: float) -> int:
    """`share` of `count` blocks, rounded to a whole number of blocks, halves up."""
    return int(count * share + 0.5)
