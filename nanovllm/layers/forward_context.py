"""The inputs of one forward pass beyond its token ids. They are passed to the model, never kept in a global."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Protocol

from torch import Tensor

from nanovllm.layers.linear import RowAdapters
from nanovllm.ops.attention import SequenceMetadata
from nanovllm.ops.delta_inputs import StatePart


class KVCache(Protocol):
    """What an attention layer needs of the KV cache. Layers do not know where blocks are stored.

    A layer is counted among those that have keys and values of their own.
    """

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, ctx: ForwardContext) -> Tensor:
        """Store the new K/V of `layer`, attend causally over the history and the new tokens, return the output.

        q: [tokens, heads, head_dim]; k, v: [tokens, kv_heads, head_dim]. Returns the shape and dtype of q, and may
        overwrite q with it.
        """
        ...


class KeptInputs(Protocol):
    """Memory in which recurrent layers keep what their input projections give of the rows of sequences with drafts."""

    rows: Sequence[range]  # of each sequence of the batch: where its rows go; empty if they are not kept

    def of_layer(self, layer: int) -> Tensor:
        """[kept rows, `RecurrentSpec.projected_size`] in the model's dtype. layer: as of `StepStates.of_layer`."""
        ...


class StepStates(Protocol):
    """The states of a step's sequences in recurrent layers. Layers do not know who owns them, or how many there are.

    On entry to a layer a slot holds the state before the sequence's first row of the step: zeros for a new sequence,
    which the owner has written. The layer leaves in it the state after the sequence's last row.
    """

    slots: Tensor  # int64 [sequences] on the model's device: of each sequence of the batch, in batch order, none twice

    @property
    def kept(self) -> KeptInputs | None:
        """None if no sequence has drafts."""
        ...

    def of_layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """What is updated in place: conv [slots, channels, conv_kernel - 1] in the model's dtype, and the recurrent
        state, fp32 [slots, value_heads, key_dim, value_dim]. Slots may be strided, what is in one is contiguous.

        layer: the index of a recurrent layer among all layers.
        """
        ...


@dataclass(frozen=True, slots=True)
class WatchedKVCache:
    """A KV cache that reports the progress of a step: before each layer's attention, the number of its tokens.

    On a GPU a layer begins when it is issued, ahead of its computation.
    """

    kv_cache: KVCache
    on_attend: Callable[[int], None]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, ctx: ForwardContext) -> Tensor:
        """See `KVCache`."""
        self.on_attend(q.shape[0])
        return self.kv_cache.attend(layer, q, k, v, ctx)


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """The inputs of all layers of one forward pass."""

    positions: Tensor  # int64 [tokens]
    sequences: tuple[SequenceMetadata, ...]
    kv_cache: KVCache
    adapters: Sequence[RowAdapters | None] = ()  # of each part of `CausalLM.chunk_rows` rows; empty if no row has one
    states: StepStates | None = None  # of recurrent layers, if the network has any
    hidden: Tensor | None = None  # [tokens, hidden], which a head for multi-token prediction reads beside the tokens
    state_parts: Sequence[StatePart] = ()  # `state_rows.parts_of_states` makes them of `sequences` if there are none

    @property
    def adapters_of_parts(self) -> Iterable[RowAdapters | None]:
        """The adapters of part after part; without end if no row has one."""
        return self.adapters or repeat(None)
