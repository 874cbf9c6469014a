"""How a step takes its sequences through the layers of the model: chunk by chunk here, or layer by layer.

`features/layerwise_prefill` has the second.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from nanovllm.data.batch import Adapter, Batch, ScheduledSequence
from nanovllm.kvcache.base import KVCacheBase, StepTraffic
from nanovllm.layers.forward_context import ForwardContext, KVCache, WatchedKVCache
from nanovllm.layers.linear import RowAdapters
from nanovllm.models.decoder import Decoder
from nanovllm.ops.attention import SequenceMetadata
from nanovllm.ops.upload import upload

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ComputedRows:
    """Hidden states after the final norm, [rows, hidden], of sequences whose rows begin at `starts`.

    A pass that keeps only the last row of a sequence gives a start before the first row, so that
    `start + len(token_ids) - 1` is the row to sample from in either case.
    """

    hidden: Tensor
    sequences: Sequence[ScheduledSequence]
    starts: Sequence[int]


class StepWatch:
    """Calls `on_layer` during a step with the share of the step's work that is done, in tokens times layers."""

    def __init__(self, num_layers: int) -> None:
        self.on_layer: Callable[[float], None] | None = None
        self._num_layers = num_layers
        self._begun = self._total = 0

    def begin_step(self, batch: Batch) -> Callable[[int], None]:
        """Start to count the layers of a step. Call the result before each layer, with the number of its tokens."""
        self._begun, self._total = 0, batch.token_layers(self._num_layers)
        return self._report

    def _report(self, tokens: int) -> None:
        """Call `on_layer`. An error in it is logged and does not fail the step."""
        done, self._begun = self._begun, self._begun + tokens
        try:
            if self.on_layer is not None:
                self.on_layer(done / self._total)
        except Exception:
            self.on_layer = None
            logger.exception("the function that watches the steps has failed, and is not called again")


class ForwardPass(Protocol):
    """Computes those sequences of a batch that go through the layers in this way.

    In each step the runner calls `begin_step` of its passes, then `run` of those that take part, both in one fixed
    order.
    """

    def begin_step(self, batch: Batch) -> StepTraffic | None:
        """Start the step's loads. Returns the KV bytes that each of this pass's sequences moves; None without any."""
        ...

    def run(self, on_attend: Callable[[int], None] | None) -> ComputedRows:
        """Compute the step. on_attend: called before each layer's attention, with the number of its tokens."""
        ...

    def abandon_step(self) -> None:
        """The step failed: make the pass usable for the next one."""
        ...


class DecodeRunner(Protocol):
    """Runs decode steps in a faster way than calling the model, where it can take them."""

    def take(self, sequences: Sequence[SequenceMetadata]) -> bool:
        """Whether `run` can compute a step of these sequences."""
        ...

    def run(self, inputs: Tensor, sequences: tuple[SequenceMetadata, ...], kv_cache: KVCache) -> Tensor:
        """Hidden states after the final norm, [rows, hidden], valid until the next step.

        inputs: int64 [3, rows] on the host: token ids, positions and RoPE lengths.
        """
        ...


class AdapterManager(Protocol):
    """Holds the LoRA adapters of the running requests on the device."""

    def begin_step(self, adapters: Sequence[Adapter]) -> Mapping[int, str]:
        """Load the adapters of all running requests. Returns why some cannot be loaded, by their number."""
        ...

    def of_rows(self, sequences: Sequence[tuple[int | None, int]]) -> Sequence[RowAdapters | None]:
        """`ForwardContext.adapters` of a batch, from each sequence's adapter and its number of rows, in order."""
        ...


class ChunkedPass:
    """All sequences of a step form one flat batch, which goes through all layers."""

    def __init__(
        self,
        model: Decoder,
        kv_cache: KVCacheBase,
        decode_runner: DecodeRunner | None,
        adapters: AdapterManager | None = None,
    ) -> None:
        self._model = model
        self._adapters = adapters
        self._kv_cache = kv_cache
        self.decode_runner = decode_runner
        self._sequences: Sequence[ScheduledSequence] = ()
        self._metadata: tuple[SequenceMetadata, ...] = ()

    def begin_step(self, batch: Batch) -> StepTraffic | None:
        """Carry out the block moves of the batch and start the loads of its chunks."""
        self._sequences = batch.chunked
        starts = accumulate((len(seq.token_ids) for seq in self._sequences), initial=0)  # in the flat batch
        self._metadata = tuple(
            SequenceMetadata.full(start, len(seq.token_ids), seq.context_len, seq.block_table)
            for start, seq in zip(starts, self._sequences, strict=False)
        )
        traffic = self._kv_cache.begin_step(self._metadata, batch.moves)
        return traffic if self._sequences else None

    def run(self, on_attend: Callable[[int], None] | None) -> ComputedRows:
        sequences = self._metadata
        token_ids = torch.tensor([token for seq in self._sequences for token in seq.token_ids], dtype=torch.int64)
        query_lens = torch.tensor([len(seq.token_ids) for seq in self._sequences])
        # Of each sequence: the position of its rows less their index in the batch.
        offsets = torch.tensor([part.context_len - part.query_start for part in sequences])
        rope_lens = torch.tensor([seq.rope_len for seq in self._sequences])
        positions = torch.arange(len(token_ids)) + offsets.repeat_interleave(query_lens)
        rope_lengths = torch.maximum(positions + 1, rope_lens.repeat_interleave(query_lens))
        inputs = torch.stack((token_ids, positions, rope_lengths))  # on the host
        kv_cache: KVCache = self._kv_cache if on_attend is None else WatchedKVCache(self._kv_cache, on_attend)
        rows = [(seq.adapter, len(seq.token_ids)) for seq in self._sequences]
        adapters = self._adapters.of_rows(rows) if self._adapters is not None else ()
        if not adapters and self.decode_runner is not None and self.decode_runner.take(sequences):
            hidden = self.decode_runner.run(inputs, sequences, kv_cache)
        else:
            token_ids, positions, rope_lengths = upload(inputs, self._model.device)
            hidden = self._model(token_ids, ForwardContext(positions, rope_lengths, sequences, kv_cache, adapters))
        return ComputedRows(hidden, self._sequences, [sequence.query_start for sequence in sequences])

    def abandon_step(self) -> None:
        self._kv_cache.abandon_step()
