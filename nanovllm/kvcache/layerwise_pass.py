"""Layer-by-layer prefill: one long prompt goes through the layers one after the other, over several steps.

Its hidden states stay on the device between two steps. Then each layer's KV is loaded once for the whole prompt, and
not once for every chunk; `memory.layerwise` says when that moves less.

Layers here are those with K and V. A recurrent layer is run with the next of them, chunk after chunk, and leaves its
state between two chunks where every step leaves it, in the sequence's slot. Where a snapshot is due, it is copied from
there layer by layer, into a slot that the prefix cache finds when all layers have passed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanovllm.data.batch import Batch, LayerwiseStep, ScheduledSequence
from nanovllm.kvcache.base import AttentionGeometry, StepTraffic
from nanovllm.kvcache.forward_pass import ComputedRows, PassHook, with_hooks
from nanovllm.kvcache.layerwise_cache import LayerwiseKVCache
from nanovllm.kvcache.offload_engine import OffloadEngine
from nanovllm.layers.causal_lm import CausalLM
from nanovllm.layers.forward_context import ForwardContext, KVCache, StepStates, WatchedKVCache
from nanovllm.ops.attention import AttentionBackend, SequenceMetadata
from nanovllm.ops.upload import upload


@dataclass(slots=True)
class LayerwiseState:
    """A layer-by-layer prefill between two steps: its sequence, the layer chunk to run next, the hidden states."""

    seq_id: int
    next_layer_chunk: int
    x: Tensor  # [tokens of the prefill, hidden]


class LayerwisePass:
    """Runs the layer chunks that a step has of a long prompt. See `forward_pass.ForwardPass`.

    At most one layer-by-layer prefill is in progress. A step without a part of it drops its hidden states: the sequence
    was aborted or preempted or has failed, and starts the prefill again if it is resumed.
    """

    def __init__(
        self,
        model: CausalLM,
        engine: OffloadEngine,
        geometry: AttentionGeometry,
        backend: AttentionBackend,
        pass_hooks: Sequence[PassHook] = (),
    ) -> None:
        self._model = model
        self._spans = model.network.kv_spans
        self._recurrent = frozenset(model.network.recurrent_layers)
        self._engine = engine
        self._pass_hooks = pass_hooks
        self._kv_cache = LayerwiseKVCache(engine, geometry, backend)
        self._sequence: ScheduledSequence | None = None  # of the step in progress
        self.state: LayerwiseState | None = None

    def begin_step(self, batch: Batch) -> StepTraffic | None:
        """Start the loads of the step's layer chunks; to be called after the step's block moves."""
        seq = self._sequence = batch.layerwise
        if seq is None or seq.layerwise is None:
            self.state = None
            return None
        first = seq.layerwise.first_layer_chunk
        if first == 0:
            self.state = None  # frees the hidden states of an earlier prefill before the new ones are allocated
            self.state = LayerwiseState(seq.seq_id, 0, self._embed(seq))
        assert self.state is not None and (self.state.seq_id, self.state.next_layer_chunk) == (seq.seq_id, first)
        h2d_bytes, d2h_bytes = self._kv_cache.begin_part(seq.layerwise, seq.block_tables)
        return StepTraffic([h2d_bytes], [d2h_bytes])

    def run(self, on_attend: Callable[[int], None] | None) -> ComputedRows:
        """Run the layer chunks of the step.

        Rows are due with the last layer chunk alone: those of its tokens, or all of them if the prompt is scored.
        """
        seq = self._sequence
        state = self.state
        assert seq is not None and seq.layerwise is not None and state is not None
        part = seq.layerwise
        x = state.x
        kv_cache: KVCache = self._kv_cache if on_attend is None else WatchedKVCache(self._kv_cache, on_attend)
        pool = self._engine.states
        slot = seq.state_slot
        states = pool.of_step([slot]) if pool is not None and slot is not None else None
        num_chunks = part.layerwise.num_chunks
        for layer in range(part.first_layer_chunk // num_chunks, -(-part.end_layer_chunk // num_chunks)):
            first = max(part.first_layer_chunk, layer * num_chunks)
            end = min(part.end_layer_chunk, (layer + 1) * num_chunks)
            self._run_layer(range(first, end), seq, part, x, kv_cache, states)
        self._kv_cache.end_part()
        state.next_layer_chunk = part.end_layer_chunk
        if part.end_layer_chunk < num_chunks * len(self._spans):
            hidden = x[:0]
        else:
            self.state = None
            last = len(part.layerwise.positions(part.end_layer_chunk - 1))
            hidden = self._model.normalize_(x if seq.prompt_targets is not None else x[-last:].clone())
        return ComputedRows(hidden, [seq], [hidden.shape[0] - len(seq.token_ids)])

    def abandon_step(self) -> None:
        self.state = None

    def _embed(self, seq: ScheduledSequence) -> Tensor:
        return self._model.embed(upload(torch.tensor(seq.token_ids, dtype=torch.int64), self._model.device))

    def _run_layer(
        self,
        layer_chunks: range,
        seq: ScheduledSequence,
        part: LayerwiseStep,
        x: Tensor,
        kv_cache: KVCache,
        states: StepStates | None,
    ) -> None:
        """Run the chunks through a layer, after the recurrent ones before it, each of which takes all chunks first."""
        chunks = [
            self._chunk(part.layerwise.positions(chunk), seq, part, x, kv_cache, states) for chunk in layer_chunks
        ]
        for index in self._spans[part.layerwise.layer(layer_chunks.start)]:
            for where, rows, ctx in chunks:
                self._model.forward_layers_(range(index, index + 1), rows, self._model.inputs(rows, ctx))
                for position, slot in part.layerwise.snapshots if index in self._recurrent else ():
                    if position == where.stop and seq.state_slot is not None:
                        self._engine.copy_state(seq.state_slot, slot, range(index, index + 1))

    def _chunk(
        self,
        where: range,
        seq: ScheduledSequence,
        part: LayerwiseStep,
        x: Tensor,
        kv_cache: KVCache,
        states: StepStates | None,
    ) -> tuple[range, Tensor, ForwardContext]:
        """The rows of some positions, and what layers read besides them."""
        chunk = SequenceMetadata.full(0, len(where), where.start, *seq.block_tables)
        positions = torch.arange(where.start, where.stop, device=x.device)
        context = ForwardContext(positions, (chunk,), kv_cache, states=states)
        ctx = with_hooks(self._pass_hooks, context, [(seq, len(where))])
        rows = x[where.start - part.layerwise.begin : where.stop - part.layerwise.begin]
        return where, rows, ctx
