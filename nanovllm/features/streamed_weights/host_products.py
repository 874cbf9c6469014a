"""Products with matrices in host memory: rows go there, and results come back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.device import Device
from nanovllm.layers.expert_weights import ExpertWeights
from nanovllm.layers.experts import Group, Routing, groups_of
from nanovllm.layers.linear_method import NamedSlots, StoredWeight
from nanovllm.ops.cpu_kernels import WeightPart

if TYPE_CHECKING:
    from nanovllm.ops.triton_routing import Grouping

ROUTING_BYTES = 1 << 20  # of the routing of so many rows


class MappedBuffer:
    """A way to the device that does not wait for copies of weights: kernels read host memory.

    What is put there is overwritten by the next one. Before that the host must have read what the device computed
    later.
    """

    def __init__(self, device: Device, num_bytes: int) -> None:
        self._device = device
        self._memory = device.empty_host("products on the host", (num_bytes,), torch.uint8)
        mapped = device.mapped(self._memory)
        assert mapped is not None, "without it there are no products on the host"
        self._mapped = mapped

    def put(self, tensor: Tensor) -> Tensor:
        """The tensor on the device."""
        own = self._memory[: tensor.nbytes]
        self._device.declare_host_access("a result of the host", writes=(own,))
        own.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        self._device.declare_kernel("take a result of the host", reads=(own,))
        taken = torch.mul(self._mapped[: tensor.nbytes].view(tensor.dtype).view(tensor.shape), 1)  # by a kernel
        self._device.end_kernel()
        return taken


class HostExchange:
    """The way of rows to the host, and of results back.

    in_place: the device shares the host's memory, so that nothing moves.
    """

    def __init__(self, device: Device, most_bytes: int) -> None:
        """most_bytes: of a result."""
        self._device = device
        self.in_place = device.shares_host
        self.num_bytes = 0  # of weights with which the host multiplies, counted by those who ask for it
        self.seconds = 0.0  # which products took, without the wait for rows
        if not self.in_place:
            self._results = MappedBuffer(device, most_bytes)
            self.routings = MappedBuffer(device, ROUTING_BYTES)

    def read(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors on the host. Waits for the device."""
        if self.in_place:
            return list(tensors)
        waits = [self._device.read(tensor) for tensor in tensors]
        return [wait() for wait in waits]

    def computed(self, compute: Callable[[], Tensor]) -> Tensor:
        """What `compute` gives on the host, on the device."""
        begin = time.perf_counter()
        result = compute()
        self.seconds += time.perf_counter() - begin
        if self.in_place:
            return result
        return self._results.put(result)


class PlacedWeight:
    """A matrix of a streamed layer, see `StoredWeight`: it is multiplied with in its slot, or on the host."""

    def __init__(
        self, in_slot: StoredWeight, on_host: StoredWeight, bias: Tensor | None, exchange: HostExchange
    ) -> None:
        """bias: on the host."""
        self.in_slot = in_slot
        self.is_on_host = False
        self._host = on_host
        self._bias = bias
        self._exchange = exchange

    @property
    def dense(self) -> Tensor | None:
        return self._here.dense

    @property
    def _here(self) -> StoredWeight:
        return self._host if self.is_on_host else self.in_slot

    def apply(self, x: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        if not self.is_on_host:
            return self.in_slot.apply(x, bias, out)
        (rows,) = self._exchange.read((x,))
        own_bias = None if bias is None else self._bias
        y = self._exchange.computed(lambda: self._host.apply(rows, own_bias))
        return y if out is None else out.copy_(y)

    def rows(self, indices: Tensor) -> Tensor:
        return self.in_slot.rows(indices)

    def slots(self) -> NamedSlots:
        return self.in_slot.slots()

    def finish_loading(self) -> None:
        self.in_slot.finish_loading()

    def tensors(self) -> Iterable[Tensor]:
        return self.in_slot.tensors()

    def read_from(self, tensors: Sequence[Tensor]) -> StoredWeight:
        return self.in_slot.read_from(tensors)

    def take_(self, other: StoredWeight) -> None:
        self.in_slot.take_(other)

    def for_cpu(self) -> StoredWeight:
        return self._host

    def kernel_parts(self) -> Sequence[WeightPart] | None:
        """None on the host of a device of its own too: the kernels of a whole layer know no way there."""
        return None if self.is_on_host and not self._exchange.in_place else self._here.kernel_parts()

    def use_torch_products(self) -> None:
        self.in_slot.use_torch_products()


class Chosen:
    """Which experts rows have chosen, as the host knows it."""

    def __init__(self, exchange: HostExchange, x: Tensor, routing: Routing) -> None:
        """Waits for the device. x: the rows."""
        weights, chosen = routing
        self._routing = routing
        self._exchange = exchange
        if isinstance(chosen, Tensor):
            self.rows, self.weights, self.experts = exchange.read((x, weights, chosen))
        else:
            self.rows, self.weights, ends, entries = exchange.read((x, weights, chosen.ends, chosen.entries))
            self.experts = torch.searchsorted(ends, entries, right=True)
            self.weights = self.weights[:, : entries.shape[1]]
        self.numbers: list[int] = self.experts.unique().tolist()


def chosen_numbers(routing: Routing) -> Sequence[int]:
    """The experts that any row has chosen, ascending. Waits for the device."""
    chosen = routing.chosen
    if isinstance(chosen, Tensor):
        return chosen.unique().tolist()
    return torch.searchsorted(chosen.ends.cpu(), chosen.entries.cpu(), right=True).unique().tolist()


class HostExperts:
    """Implements `layers.experts.HostPart`."""

    def __init__(
        self,
        chosen: Chosen,
        numbers: Set[int],
        matrices: tuple[ExpertWeights, ExpertWeights],
        exchange: HostExchange,
        at_hand: Callable[[int], AbstractContextManager[None]] = lambda expert: nullcontext(),
    ) -> None:
        """numbers: of the chosen experts those that are computed on the host. at_hand: a context for each of them in
        which it is in host memory."""
        self.numbers = numbers
        self._matrices = matrices
        self._at_hand = at_hand
        self._chosen = chosen
        self._exchange = exchange

    def of_device(self, routing: Routing) -> tuple[Tensor, Grouping]:
        """See `HostPart`."""
        weights, grouping = routing
        assert not isinstance(grouping, Tensor)
        experts = self._chosen.experts
        is_here = torch.tensor([expert in self.numbers for expert in range(len(grouping.ends))])[experts]
        counts = experts[~is_here].bincount(minlength=len(grouping.ends))
        order = experts.masked_fill(is_here, len(counts)).flatten().argsort(stable=True)
        entries = torch.empty_like(order)
        entries[order] = torch.arange(len(order))
        total = int(counts.sum())
        nothing = len(grouping.rows)
        rows = F.pad(order[:total] // experts.shape[1], (0, nothing - total))
        parts = counts.cumsum(0), rows, entries.masked_fill(entries >= total, nothing)
        there = self._exchange.routings.put(torch.cat(parts).int())
        ends, rows, entries = there.split([len(part) for part in parts])
        return weights, grouping._replace(ends=ends, rows=rows, entries=entries.view(experts.shape))

    def output(self, compute: Callable[[Tensor, Iterable[Group]], Tensor]) -> Tensor:
        """See `HostPart`."""
        groups = (group for group in groups_of(self._chosen.weights, self._chosen.experts) if group[0] in self.numbers)
        return self._exchange.computed(lambda: compute(self._chosen.rows, groups))

    @contextmanager
    def matrices(self, expert: int) -> Iterator[tuple[ExpertWeights, ExpertWeights]]:
        """See `HostPart`."""
        with self._at_hand(expert):
            yield self._matrices
