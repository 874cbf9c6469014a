"""The interface of KV caches, and the plain data that goes with it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanovllm.data.batch import BlockMove, StateMove
from nanovllm.data.kv_groups import KVGroups
from nanovllm.kvcache.pools import KVPools
from nanovllm.layers.forward_context import ForwardContext
from nanovllm.memory.budget import TransferCount
from nanovllm.memory.layerwise import NO_LAYERWISE, LayerwiseMemory
from nanovllm.ops.attention import AttentionBackend, AttentionState, SequenceMetadata


@dataclass(frozen=True, slots=True)
class AttentionGeometry:
    """The model's attention parameters beyond the KV layout."""

    scale: float
    num_heads: int  # query heads
    dtype: torch.dtype  # of queries, keys and values; the KV cache may store 8 bits of them
    sinks: tuple[Tensor, ...] = ()  # of each layer, see `AttentionState.empty`; (): the model has none

    def sinks_of(self, layer: int) -> Tensor | None:
        return self.sinks[layer] if self.sinks else None

    def before_keys(self, layer: int, q: Tensor) -> AttentionState:
        """The state of a layer's queries `[tokens, heads, head_dim]` before any key."""
        return AttentionState.empty(q, self.sinks_of(layer))


@dataclass(frozen=True, slots=True)
class AttendedPool:
    """The pool of every KV block, and how layers attend over it.

    pools: the pool `[planes, blocks, 2, kv_heads, block_size, head_dim]` in the shape of each KV group.
    """

    pools: Sequence[Tensor]
    groups: KVGroups
    geometry: AttentionGeometry
    backend: AttentionBackend


@dataclass(frozen=True, slots=True)
class StepTraffic:
    """KV bytes that a step copies for each of its sequences, in each direction."""

    h2d_bytes: list[int]
    d2h_bytes: list[int]


@dataclass(frozen=True, slots=True)
class KVStats:
    """Sizes of the KV memory, and the copies between its tiers, and of weights, since the engine was created."""

    block_size: int  # tokens
    bytes_per_block: int  # of one KV group, all its layers
    num_gpu_blocks: int  # the device budget: resident blocks and ring together
    resident_blocks: int
    ring_slots: int  # each holds one layer of one block
    num_cpu_blocks: int
    num_swap_blocks: int
    device_bytes: int  # allocated for resident blocks and ring; the layer buffer comes on top
    host_bytes: int
    swap_bytes: int  # in host memory, for preempted requests
    transfers: TransferCount
    read_weight_bytes: int = 0  # from disk, of layers that stream
    loaded_weight_bytes: int = 0  # copied to the device, of layers that stream: beside `transfers`, on the same link
    layerwise_memory: LayerwiseMemory = NO_LAYERWISE  # limits of layer-by-layer prefill
    layer_buffer_bytes: int = 0  # allocated for it on the device, beyond num_gpu_blocks and device_bytes
    windows: tuple[int | None, ...] = (None,)  # of each KV group; a sequence has blocks in all of them
    state_slots: tuple[int, int] = (0, 0)  # of recurrent layers, on the device and on the host
    state_bytes: tuple[int, int] = (0, 0)  # allocated for them, beyond device_bytes and host_bytes
    most_used_blocks: int = 0  # that requests held in one step, so far; behind windows cached ones are not held
    most_used_device_blocks: int = 0  # the same, of those on the device alone
    blocks_in_flight: tuple[int, ...] = ()  # physical ids of the blocks that the step in progress has in ring slots


class KVCacheBase(ABC):
    """A KV cache and its memory. Steps run one at a time: `begin_step`, every layer's `attend` in order, `end_step`."""

    attended_pool: AttendedPool | None = None  # None where a step attends to blocks of other memory as well

    def __init__(
        self, pools: KVPools, geometry: AttentionGeometry, backend: AttentionBackend, num_gpu_blocks: int
    ) -> None:
        """num_gpu_blocks: the device budget, resident blocks and ring together."""
        self.pools = pools
        self.layout = pools.layout
        self._device = pools.device
        self._geometry = geometry
        self._backend = backend
        self._num_gpu_blocks = num_gpu_blocks

    @property
    def backend(self) -> AttentionBackend:
        """What attends on the device."""
        return self._backend

    @abstractmethod
    def begin_step(
        self,
        sequences: Sequence[SequenceMetadata],
        moves: Sequence[BlockMove],
        state_moves: Sequence[StateMove] = (),
    ) -> StepTraffic:
        """Move the blocks and states, then prepare a forward pass over the flat batch."""

    @abstractmethod
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, ctx: ForwardContext) -> Tensor:
        """See `forward_context.KVCache`."""

    def end_step(self) -> None:
        """Finish the step once its results are there. Raises EngineError if work that they depend on failed."""
        return

    def abandon_step(self) -> None:
        """After a failed forward pass: make the cache usable again. The blocks that the step wrote are undefined."""
        self.pools.abandon()

    def stats(self) -> KVStats:
        pools = self.pools
        return KVStats(
            block_size=self.layout.block_size,
            bytes_per_block=self.layout.block_bytes,
            num_gpu_blocks=self._num_gpu_blocks,
            resident_blocks=pools.split.resident_blocks,
            ring_slots=pools.split.ring_slots,
            num_cpu_blocks=pools.num_host_blocks,
            num_swap_blocks=len(pools.swap),
            device_bytes=pools.resident.nbytes,
            host_bytes=pools.host.nbytes,
            swap_bytes=pools.swap.nbytes,
            transfers=pools.transfers,
            windows=tuple(group.window for group in self.layout.groups),
            state_slots=(0, 0) if pools.states is None else pools.states.num_slots,
            state_bytes=(0, 0) if pools.states is None else pools.states.num_bytes,
        )
