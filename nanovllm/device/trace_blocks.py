"""For the trace: which KV blocks, layers and requests a copy or a kernel is about, found from the addresses it uses."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from torch import Tensor

from nanovllm.data.batch import ScheduledSequence
from nanovllm.data.kv_groups import KVGroups
from nanovllm.device.base import PitchedCopy

MOST_REQUESTS = 8  # that an event names
DEVICE_POOLS = ("KV blocks", "resident blocks")  # [layers, blocks, ...]
HOST_POOLS = ("host blocks", "swap blocks")  # [blocks, layers, ...], numbered after the blocks of the device
SLOTS = ("ring slots", "layer buffer")  # [slots, ...], each with one layer of one block


@dataclass(slots=True)
class Uses:
    """What an event is about: physical block ids, layers, and the ids of requests."""

    blocks: set[int] = field(default_factory=set)
    layers: set[int] = field(default_factory=set)
    requests: dict[str, None] = field(default_factory=dict)

    def facts(self) -> dict[str, str]:
        """Such as {"layer": "3", "blocks": "0-5, 9", "requests": "request-0"}, without what is not known."""
        names, others = list(self.requests), len(self.requests) - MOST_REQUESTS
        requests = ", ".join(names[:MOST_REQUESTS] + [f"and {others} more"] * (others > 0))
        facts = {"layer": ranges(self.layers), "blocks": ranges(self.blocks), "requests": requests}
        return {name: text for name, text in facts.items() if text}


def ranges(numbers: Iterable[int]) -> str:
    """The numbers in order, such as `0-5, 9`."""
    runs = groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0])
    ends = [[number for _, number in run] for _, run in runs]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in ends)


@dataclass(frozen=True, slots=True)
class Pool:
    """KV memory that is divided into pieces, each one layer of one block."""

    name: str
    start: int  # address
    num_bytes: int
    shape: tuple[int, int]  # of pieces; [slots, 1] for SLOTS
    first_block: int  # physical id of its first block

    @property
    def piece_bytes(self) -> int:
        return self.num_bytes // (self.shape[0] * self.shape[1])

    def piece_start(self, address: int) -> int:
        return address - (address - self.start) % self.piece_bytes

    def block_and_layer(self, address: int) -> tuple[int, int]:
        first, second = divmod((address - self.start) // self.piece_bytes, self.shape[1])
        block, layer = (second, first) if self.name in DEVICE_POOLS else (first, second)
        return self.first_block + block, layer


class TracedBlocks:
    """Follows the KV memory of an engine: its pools, the step's block tables, and what the slots of the ring hold."""

    def __init__(self) -> None:
        self._pools: list[Pool] = []  # by address
        self._num_blocks = 0
        self._readers: dict[int, list[str]] = {}  # of the step, by physical block id
        # Block table of the sequence that is prefilled layer by layer; () where its layers have several.
        self._buffered: Sequence[int] = ()
        self.groups: KVGroups | None = None  # whose planes the pools have; None: each is the layer of its number
        self._group_of: dict[int, int] = {}  # of the step, by physical block id
        self._held: dict[int, int] = {}  # physical block id by the address of the ring slot
        self._unknown: dict[int, list[Uses]] = {}  # events with a slot whose first copy has not come yet

    def add(self, name: str, memory: Tensor) -> Tensor:
        """Memory of the engine, which is returned. Pools are allocated in the order of their physical block ids."""
        if name in (*DEVICE_POOLS, *HOST_POOLS, *SLOTS) and memory.numel():
            shape = (memory.shape[0], 1 if name in SLOTS else memory.shape[1])
            pool = Pool(name, memory.data_ptr(), memory.nbytes, shape, self._num_blocks)
            bisect.insort(self._pools, pool, key=lambda pool: pool.start)
            if name not in SLOTS:
                self._num_blocks += shape[1] if name in DEVICE_POOLS else shape[0]
        return memory

    def begin_step(self, sequences: Iterable[ScheduledSequence]) -> Uses:
        """Take the sequences of the next step. Returns what the step as a whole is about."""
        self._readers, self._buffered, self._unknown, step = {}, (), {}, Uses()
        self._group_of = {}
        for seq in sequences:
            step.requests[seq.request_id] = None
            if seq.layerwise is not None:
                self._buffered = seq.block_tables[0] if len(seq.block_tables) == 1 else ()
            for group, table in enumerate(seq.block_tables):
                self._group_of.update(dict.fromkeys(table, group))
                for block in table:
                    self._readers.setdefault(block, []).append(seq.request_id)
        return step

    def use(self, tensors: Iterable[Tensor], uses: Uses, *, ends_slots: bool = False) -> None:
        """Add what a kernel reads or writes. ends_slots: it is the last use of the ring slots among them."""
        for tensor in tensors:
            self._use_addresses([tensor.data_ptr()], uses)
            pool = self._pool(tensor.data_ptr()) if ends_slots else None
            if pool is not None:
                self._held.pop(pool.piece_start(tensor.data_ptr()), None)

    def copied(self, copy: PitchedCopy) -> Uses:
        """What a copy is about. From now on its slots, if any, hold its blocks."""
        uses = Uses()
        ends = [
            list(self._addresses(start.data_ptr(), pitch, copy))
            for start, pitch in ((copy.src, copy.spitch), (copy.dst, copy.dpitch))
        ]
        for one, other in zip(*ends, strict=False):
            for slot, block in ((one, other), (other, one)):
                self._hold(slot, block)
        for addresses in ends:
            self._use_addresses(addresses, uses)
        return uses

    # ---- addresses

    def _addresses(self, start: int, pitch: int, copy: PitchedCopy) -> Iterator[int]:
        """The first byte of each piece that a copy's rows touch, row by row."""
        for row in range(copy.height):
            begin = start + row * pitch
            pool = self._pool(begin)
            yield from range(begin, begin + copy.width, pool.piece_bytes if pool is not None else copy.width)

    def _pool(self, address: int) -> Pool | None:
        index = bisect.bisect_right(self._pools, address, key=lambda pool: pool.start) - 1
        pool = self._pools[index] if index >= 0 else None
        return pool if pool is not None and address < pool.start + pool.num_bytes else None

    def _hold(self, slot: int, block: int) -> None:
        """Note that the ring slot at one address holds the block at another."""
        ring, pool = self._pool(slot), self._pool(block)
        if ring is None or pool is None or ring.name != "ring slots" or pool.name in SLOTS:
            return
        start, (held, _) = ring.piece_start(slot), pool.block_and_layer(block)
        self._held[start] = held
        for uses in self._unknown.pop(start, ()):
            self._note(held, uses)

    def _use_addresses(self, addresses: Iterable[int], uses: Uses) -> None:
        for address in addresses:
            pool = self._pool(address)
            if pool is None:
                continue
            if pool.name in SLOTS:
                self._use_slot(pool, address, uses)
            else:
                block, layer = pool.block_and_layer(address)
                self._note(block, uses)
                uses.layers.update(self._layers_of(block, layer))

    def _layers_of(self, block: int, plane: int) -> Sequence[int]:
        """The layer whose KV is in a plane of the block; none if the block is of no sequence of the step."""
        if self.groups is None or len(self.groups) == 1:
            return (plane,)
        layers = self.groups[self._group_of[block]].layers if block in self._group_of else ()
        return layers[plane : plane + 1]

    def _use_slot(self, pool: Pool, address: int, uses: Uses) -> None:
        start = pool.piece_start(address)
        if pool.name == "layer buffer":
            index = (start - pool.start) // pool.piece_bytes
            if index < len(self._buffered):
                self._note(self._buffered[index], uses)
        elif start in self._held:
            self._note(self._held[start], uses)
        else:
            self._unknown.setdefault(start, []).append(uses)

    def _note(self, block: int, uses: Uses) -> None:
        uses.blocks.add(block)
        uses.requests.update(dict.fromkeys(self._readers.get(block, ())))
