"""Copies of whole blocks, between any two places: moves across the tiers, copy-on-write, swapping."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from nanovllm.device import CopyKind, Device, PitchedCopy, Stream
from nanovllm.kvcache.budget import TransferCount
from nanovllm.kvcache.hybrid_manager import BlockMove
from nanovllm.kvcache.layout import KVLayout
from nanovllm.kvcache.transfer_order import TransferOrder


class CountedCopies:
    """Puts copies on streams and counts them; only those across the link, and the CPU arm's reads, are reported."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._counts = {kind: [0, 0] for kind in ("h2d", "d2h", "d2d", "h2h", "arm")}  # copies or blocks, bytes

    @property
    def transfers(self) -> TransferCount:
        return TransferCount(*self._counts["h2d"], *self._counts["d2h"], *self._counts["arm"])

    def put(self, copy: PitchedCopy, stream: Stream, blocks: int | None = None) -> None:
        """blocks: what the copy counts for; without it, as many copies as it takes."""
        number = self._device.copy_2d(copy, stream)
        self.count(copy.kind, number if blocks is None else blocks, copy.width * copy.height)

    def count(self, kind: str, number: int, num_bytes: int) -> None:
        self._counts[kind][0] += number
        self._counts[kind][1] += num_bytes


class BlockMover:
    """Carries out a step's block moves, in order, on the move stream. See `hybrid_manager` for places.

    resident: [layers, blocks, 2, kv_heads, block_size, head_dim], the first places; host and swap: block-major, the
    places after them. Swap blocks are ordered as host blocks are, and numbered after them.
    """

    def __init__(
        self,
        copies: CountedCopies,
        order: TransferOrder,
        layout: KVLayout,
        resident: Tensor,
        host: Tensor,
        swap: Tensor,
    ) -> None:
        self._copies = copies
        self._order = order
        self._layout = layout
        self._resident = resident
        self._host = host
        self._swap = swap

    def move_blocks(self, moves: Sequence[BlockMove]) -> None:
        """Called between forward passes; the next one starts when they are done, and when all stores before are."""
        if moves:
            stream = self._order.before_moves()
            for move in moves:
                self._move(move.src, move.dst, stream)
            self._order.after_moves()
        self._order.before_copies()

    def _move(self, src: int, dst: int, stream: Stream) -> None:
        first_host = self._resident.shape[1]
        to_host, from_host = dst >= first_host, src >= first_host
        kinds: dict[tuple[bool, bool], CopyKind] = {
            (True, False): "h2d",
            (False, True): "d2h",
            (False, False): "d2d",
            (True, True): "h2h",
        }
        to, what = self._block(dst), self._block(src)
        dpitch, spitch = (t.stride(0) * t.element_size() for t in (to, what))
        width, height = self._layout.block_layer_bytes, self._layout.num_layers  # one strided copy for all layers
        self._copies.put(PitchedCopy(to, what, dpitch, spitch, width, height, kinds[from_host, to_host]), stream)

    def _block(self, physical_id: int) -> Tensor:
        """[layers, 2, kv_heads, block_size, head_dim], each layer contiguous."""
        if physical_id < self._resident.shape[1]:
            return self._resident[:, physical_id]
        physical_id -= self._resident.shape[1]
        return self._host[physical_id] if physical_id < len(self._host) else self._swap[physical_id - len(self._host)]
