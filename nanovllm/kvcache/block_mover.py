"""Copies of blocks with all their layers: moves between the tiers, copy-on-write, swapping."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from nanovllm.device import CopyKind, Device, PitchedCopy, Stream
from nanovllm.kvcache.budget import TransferCount
from nanovllm.kvcache.hybrid_manager import BlockMove
from nanovllm.kvcache.layout import KVLayout
from nanovllm.kvcache.transfer_order import TransferOrder


class CountedCopies:
    """Issues copies on streams and counts them. Reports copies over the link, and blocks of CPU attention."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._counts = {
            kind: [0, 0] for kind in ("h2d", "d2h", "d2d", "h2h", "cpu_attention")
        }  # copies or blocks, bytes

    @property
    def transfers(self) -> TransferCount:
        return TransferCount(*self._counts["h2d"], *self._counts["d2h"], *self._counts["cpu_attention"])

    def put(self, copy: PitchedCopy, stream: Stream, blocks: int | None = None) -> None:
        """blocks: how many copies to count; None counts the calls that the device makes."""
        number = self._device.copy_2d(copy, stream)
        self.count(copy.kind, number if blocks is None else blocks, copy.width * copy.height)

    def count(self, kind: str, number: int, num_bytes: int) -> None:
        self._counts[kind][0] += number
        self._counts[kind][1] += num_bytes


class BlockMover:
    """Carries out a step's block moves, in order, on the move stream.

    resident: [layers, blocks, 2, kv_heads, block_size, head_dim]; host, swap: the same with blocks before layers.
    Physical block ids count the resident blocks first, then the host blocks, then the swap blocks. Swap blocks need the
    same orderings as host blocks.
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
        """Call it between forward passes: the next pass waits for the moves, and for all earlier stores."""
        if moves:
            stream = self._order.before_moves()
            for move in moves:
                self._move(move, stream)
            self._order.after_moves()
        self._order.before_copies()

    def _move(self, move: BlockMove, stream: Stream) -> None:
        first_host = self._resident.shape[1]
        to_host, from_host = move.dst >= first_host, move.src >= first_host
        kinds: dict[tuple[bool, bool], CopyKind] = {
            (True, False): "h2d",
            (False, True): "d2h",
            (False, False): "d2d",
            (True, True): "h2h",
        }
        to, what, kind = self._block(move.dst), self._block(move.src), kinds[from_host, to_host]
        layout = self._layout
        if move.num_tokens is None:
            dpitch, spitch = (t.stride(0) * t.element_size() for t in (to, what))
            width, height = layout.block_layer_bytes, layout.num_layers  # one strided copy for all layers
            self._copies.put(PitchedCopy(to, what, dpitch, spitch, width, height, kind), stream)
            return
        # The heads of K and V are equally far apart within a layer only: one strided copy for each.
        pitch, width, height = layout.head_pitch, move.num_tokens * layout.row_bytes, layout.rows_per_token
        for layer in range(layout.num_layers):
            copy = PitchedCopy(to[layer], what[layer], pitch, pitch, width, height, kind)
            self._copies.put(copy, stream, blocks=int(layer == 0))

    def _block(self, physical_id: int) -> Tensor:
        """[layers, 2, kv_heads, block_size, head_dim], each layer contiguous."""
        if physical_id < self._resident.shape[1]:
            return self._resident[:, physical_id]
        physical_id -= self._resident.shape[1]
        return self._host[physical_id] if physical_id < len(self._host) else self._swap[physical_id - len(self._host)]
