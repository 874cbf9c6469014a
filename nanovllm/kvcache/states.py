"""The states of recurrent layers: slots on the device and on the host, and the copies between them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from math import prod

import torch
from torch import Tensor

from nanovllm.data.batch import StateMove
from nanovllm.data.network import Network
from nanovllm.device import CopyKind, Device, PitchedCopy, Stream
from nanovllm.layers.gated_delta import GatedDelta
from nanovllm.layers.state_rows import runs_of_rows
from nanovllm.memory.sizing import StateSlots
from nanovllm.ops.upload import upload

MOVE_KINDS: tuple[tuple[CopyKind, CopyKind], ...] = (("d2d", "d2h"), ("h2d", "h2h"))  # [from the host?][to the host?]


class StatePool:
    """Owns the memory of all state slots, numbered across the tiers, the device's first.

    Like KV blocks, the device's memory is layer-major, so that a layer's states are one tensor, and the host's is
    slot-major. A layer has two tensors, the inputs that its convolution still sees and the recurrent state.

    In a pass with drafts each layer keeps the outputs of its input projection until the next pass. If a draft was
    wrong, the recurrence runs over the rows that were right, from the state before them. That gives the same bits as
    computing them again, and multiplies no weights. To keep a state after each row would take 34 to 97 times the
    memory.
    """

    def __init__(
        self,
        device: Device,
        network: Network,
        dtype: torch.dtype,
        slots: StateSlots,
        recurrences: Sequence[GatedDelta],
    ) -> None:
        """dtype: of the convolution's inputs, the network's. recurrences: of the recurrent layers."""
        recurrent = network.recurrent
        assert recurrent is not None
        num_device_slots = slots.device
        num_host_slots = slots.host
        self.num_slots = num_device_slots, num_host_slots
        self.num_device_slots = num_device_slots
        self._device = device
        self._recurrences = recurrences
        self._rows_of = dict[int, range]()  # where the latest pass has kept the rows of a sequence, by its slot
        self._layers = network.recurrent_layers
        parts: list[tuple[str, tuple[int, ...], torch.dtype]] = [
            ("convolution states", recurrent.conv_shape, dtype),
            ("recurrent states", recurrent.state_shape, torch.float32),
        ]
        count = len(self._layers)
        self._on_device = list[Tensor]()
        self._on_host = list[Tensor]()
        for name, shape, kind in parts:
            one = (1, 1, 1, prod(shape))  # a state is one row, where a KV block has [2, kv_heads, tokens, head_dim]
            on_device = device.empty(name, (count, num_device_slots, *one), kind)
            on_host = device.empty_host(name, (num_host_slots, count, *one), kind)
            self._on_device.append(on_device.view(count, num_device_slots, *shape))
            self._on_host.append(on_host.view(num_host_slots, count, *shape))
        width = recurrent.projected_size
        kept = device.empty("inputs of rows with drafts", (count, slots.draft_rows, 1, 1, 1, width), dtype)
        self._kept = kept.view(count, slots.draft_rows, width)
        self.num_kept_rows = slots.draft_rows

    @property
    def num_bytes(self) -> tuple[int, int]:
        """Allocated on the device and on the host."""
        on_device = sum(memory.nbytes for memory in (*self._on_device, self._kept))
        return on_device, sum(memory.nbytes for memory in self._on_host)

    def parts(self, slot: int) -> list[Tensor]:
        """The bytes of a state, each part contiguous: first all layers' convolution inputs, then all their states."""
        tensors = (self._slot(part, slot) for part in range(len(self._on_device)))
        return [layer.flatten().view(torch.uint8) for tensor in tensors for layer in tensor if layer.numel()]

    def copy(self, moves: Iterable[StateMove], stream: Stream, count: Callable[[CopyKind, int, int], None]) -> None:
        """Submit the copies of a step, in order, to the stream of its block moves.

        count: called with the kind of each move, the number of copies (1), and the bytes.
        """
        for move in moves:
            if move.src is not None and not move.num_replayed:
                self._copy(move.src, move.dst, range(len(self._layers)), stream, count)

    def copy_layers(
        self, src: int, dst: int, layers: range, stream: Stream, count: Callable[[CopyKind, int, int], None]
    ) -> None:
        """Submit the copy of a part of a state: that of the recurrent layers among these layers of the network."""
        own = range(bisect_left(self._layers, layers.start), bisect_left(self._layers, layers.stop))
        if own:
            self._copy(src, dst, own, stream, count)

    def replay(self, moves: Sequence[StateMove]) -> None:
        """Run the right tokens of a pass with a wrong draft through states, before the copies of a step."""
        replays = [move for move in moves if move.num_replayed]
        if not replays:
            return
        assert all(move.num_replayed for move in moves[: len(replays)]), "copies would take states from before a replay"
        computed_in = [(self._rows_of[move.src], move.num_replayed) for move in replays if move.src is not None]
        rows = [row for of_slot, count in computed_in for row in of_slot[:count]]
        device = self._device.torch_device
        kept = upload(torch.tensor(rows), device)
        slots = upload(torch.tensor([move.dst for move in replays]), device)
        runs = runs_of_rows([move.num_replayed for move in replays], slots)
        for index, recurrence in enumerate(self._recurrences):
            states = self._on_device[0][index], self._on_device[1][index]
            written = (part[move.dst].flatten() for move in replays for part in states)
            self._device.declare_kernel("replay of states", (self._kept[index].flatten(),), written)
            recurrence(self._kept[index, kept], runs, states)
            self._device.end_kernel()

    def clear(self, moves: Sequence[StateMove]) -> None:
        """Zero the states of the sequences that begin in this step, after its copies."""
        last = {move.dst: move.src for move in moves}  # a slot may begin, and then be given to another sequence
        for slot in (dst for dst, src in last.items() if src is None):
            for memory in self._on_device:
                self._device.declare_kernel("clear a state", writes=(layer[slot].flatten() for layer in memory))
                memory[:, slot].zero_()
        self._device.end_kernel()

    def of_step(self, slots: Sequence[int], num_kept: Sequence[int] = ()) -> SlotStates:
        """The states of the sequences of a pass, whose slots are given in the order of its batch.

        num_kept: rows of each sequence to keep, all of them if it has drafts and else none.
        """
        kept = None
        if any(num_kept):
            ends = [*accumulate(num_kept, initial=0)]
            assert ends[-1] <= self._kept.shape[1], "more rows with drafts than there is memory for"
            rows = [range(begin, end) for begin, end in pairwise(ends)]
            self._rows_of = dict(zip(slots, rows, strict=True))
            kept = KeptRowsOfStep(self._device, self._layers, self._kept, rows)
        on_device = upload(torch.tensor(slots), self._device.torch_device)
        return SlotStates(self._device, self._layers, self._on_device, slots, on_device, kept)

    def of_recorded(self, slots: Tensor, num_kept: int) -> SlotStates:
        """The states of a pass that is recorded before its slots are known; it keeps its first `num_kept` rows.

        slots: int64 on the device, refilled before each replay, after a call of `begin_replay`.
        """
        assert num_kept <= self.num_kept_rows, "more rows with drafts than there is memory for"
        kept = KeptRowsOfStep(self._device, self._layers, self._kept, [range(num_kept)]) if num_kept else None
        return SlotStates(self._device, self._layers, self._on_device, (), slots, kept)

    def begin_replay(self, slots: Sequence[int], rows: Sequence[range]) -> None:
        """A recorded pass over the states of these slots follows. rows: of each sequence, if the pass keeps them."""
        if rows:
            self._rows_of = dict(zip(slots, rows, strict=True))
        kept = [self._kept.flatten()] if rows else []
        states = (
            memory[layer, slot].flatten()
            for memory in self._on_device
            for layer in range(len(memory))
            for slot in slots
        )
        self._device.declare_kernel("recorded recurrent layers", writes=chain(states, kept))

    def _copy(
        self, src: int, dst: int, own: range, stream: Stream, count: Callable[[CopyKind, int, int], None]
    ) -> None:
        """Submit the copies of a state, or of some of its layers. What has the first layer counts as the copy."""
        num_bytes = 0
        kind = MOVE_KINDS[src >= self.num_device_slots][dst >= self.num_device_slots]
        for part in range(len(self._on_device)):
            to = self._slot(part, dst)[own.start : own.stop]
            origin = self._slot(part, src)[own.start : own.stop]
            dpitch = to.stride(0) * to.element_size()
            spitch = origin.stride(0) * origin.element_size()
            width = to[0].numel() * to.element_size()
            if width:  # a convolution over one token keeps nothing
                self._device.copy_2d(PitchedCopy(to, origin, dpitch, spitch, width, len(to), kind), stream)
            num_bytes += width * len(to)
        count(kind, int(own.start == 0), num_bytes)

    def _slot(self, part: int, slot: int) -> Tensor:
        """`[layers, ...]`, each layer contiguous."""
        if slot < self.num_device_slots:
            return self._on_device[part][:, slot]
        return self._on_host[part][slot - self.num_device_slots]


@dataclass(slots=True)
class KeptRowsOfStep:
    """Implements `layers.forward_context.KeptInputs`. memory: [layers, rows, width]."""

    device: Device
    layers: Sequence[int]  # recurrent layers, by their index in the network
    memory: Tensor
    rows: Sequence[range]

    def of_layer(self, layer: int) -> Tensor:
        """See `KeptInputs`."""
        memory = self.memory[self.layers.index(layer)]
        self.device.declare_kernel("inputs of rows with drafts", writes=(memory.flatten(),))
        self.device.end_kernel()
        return memory


@dataclass(slots=True)
class SlotStates:
    """Implements `layers.forward_context.StepStates`. memory: of the device, layers x slots."""

    device: Device
    layers: Sequence[int]  # recurrent layers, by their index in the network
    memory: Sequence[Tensor]
    slot_ids: Sequence[int]
    slots: Tensor  # the same on the device
    kept: KeptRowsOfStep | None

    def of_layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """See `StepStates`."""
        conv, state = (memory[self.layers.index(layer)] for memory in self.memory)
        written = (part[slot].flatten() for slot in self.slot_ids for part in (conv, state))
        self.device.declare_kernel("recurrent layer", writes=written)
        self.device.end_kernel()
        return conv, state
