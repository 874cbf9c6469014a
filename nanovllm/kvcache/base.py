"""What both rooms behind the KV-cache door have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from nanovllm.forward_context import ForwardContext, SequenceMetadata
from nanovllm.kvcache.budget import TransferCount
from nanovllm.kvcache.hybrid_manager import BlockMove
from nanovllm.kvcache.layout import KVLayout
from nanovllm.kvcache.prefill_plan import NO_LAYERWISE, LayerwiseMemory


@dataclass(frozen=True, slots=True)
class AttentionGeometry:
    """What attention needs to know of the model beyond the KV layout."""

    scale: float
    num_heads: int  # query heads
    windows: tuple[int | None, ...]  # sliding window of each layer, None for full attention


@dataclass(frozen=True, slots=True)
class StepTraffic:
    """KV bytes that one step moves for each of its sequences, each way."""

    h2d_bytes: list[int]
    d2h_bytes: list[int]


@dataclass(frozen=True, slots=True)
class KVStats:
    """Sizes of the KV memory, and what was copied between its tiers since the engine was made."""

    block_size: int  # tokens
    bytes_per_block: int  # all layers
    num_gpu_blocks: int  # the device budget that was given: resident blocks and ring together
    resident_blocks: int
    ring_slots: int  # each holds one layer of one block
    num_cpu_blocks: int
    num_swap_blocks: int
    device_bytes: int  # really allocated
    host_bytes: int
    swap_bytes: int  # on the host too, for preempted requests
    transfers: TransferCount
    layerwise_memory: LayerwiseMemory = NO_LAYERWISE  # what prompts may go layer by layer
    layer_buffer_bytes: int = 0  # really allocated for that, beyond num_gpu_blocks


class KVCacheBase(ABC):
    """A KV cache and its memory. Steps run one at a time: `begin_step`, every layer's `attend` in order, `end_step`."""

    layout: KVLayout

    @abstractmethod
    def begin_step(self, sequences: Sequence[SequenceMetadata], moves: Sequence[BlockMove]) -> StepTraffic:
        """Prepare a forward pass over a flat batch, after carrying out the block moves."""

    @abstractmethod
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, ctx: ForwardContext) -> Tensor:
        """See `forward_context.KVCache`."""

    def end_step(self) -> None:
        """The step's results are there. Raises EngineError if they rest on something that failed."""
        return

    @abstractmethod
    def abandon_step(self) -> None:
        """The forward pass failed half-way: make the room usable again. What was being written is undefined."""

    @abstractmethod
    def stats(self) -> KVStats: ...


def first_visible_block(context_len: int, window: int | None, block_size: int) -> int:
    """Index of the first block that any query from position `context_len` on can see."""
    return 0 if window is None else max(0, context_len - window + 1) // block_size
