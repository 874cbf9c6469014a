"""Layer-major prefill on the executor's side: the residual stream of one span, kept from step to step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nanovllm.engine.batch import ScheduledSequence
from nanovllm.forward_context import ForwardContext, SequenceMetadata
from nanovllm.kvcache.base import StepTraffic
from nanovllm.kvcache.layerwise_cache import LayerwiseKVCache
from nanovllm.kvcache.prefill_plan import LayerwiseStep
from nanovllm.models.decoder import Decoder
from nanovllm.ops.upload import upload


@dataclass(slots=True)
class LayerwiseState:
    """A span under way: whose it is, the unit that comes next, and its hidden states as far as they have come."""

    seq_id: int
    next_layer_chunk: int
    x: Tensor  # [span, hidden]


class LayerwiseRunner:
    """Runs the units that a step has of a span. At most one span is under way; what is kept of it is its state.

    A step that does not go on with the span drops it: its sequence was aborted, was preempted or failed, and begins
    afresh if it ever comes back.
    """

    def __init__(self, model: Decoder, kv_cache: LayerwiseKVCache) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self.state: LayerwiseState | None = None

    def begin_step(self, seq: ScheduledSequence | None, traffic: StepTraffic) -> None:
        """Start the loads of the step's slice, if it has one, and add the bytes that it moves to those of the step."""
        if seq is None or seq.layerwise is None:
            self.state = None
            return
        if seq.layerwise.first_layer_chunk == 0:
            self.state = None  # before the next one's memory is taken
            self.state = LayerwiseState(seq.seq_id, 0, self._embed(seq))
        assert self.state is not None and (self.state.seq_id, self.state.next_layer_chunk) == (
            seq.seq_id,
            seq.layerwise.first_layer_chunk,
        )
        h2d_bytes, d2h_bytes = self._kv_cache.begin_part(seq.layerwise, seq.block_table)
        traffic.h2d_bytes.append(h2d_bytes)
        traffic.d2h_bytes.append(d2h_bytes)

    def run(self, seq: ScheduledSequence) -> Tensor:
        """Run the slice that was begun. Returns the hidden states that are due, after the final norm: [rows, hidden].

        Before the last unit none are. With it, the span's last token is, and all of the span if its prompt has targets.
        """
        assert seq.layerwise is not None and self.state is not None
        for layer_chunk in range(seq.layerwise.first_layer_chunk, seq.layerwise.end_layer_chunk):
            self._run_layer_chunk(layer_chunk, seq, seq.layerwise, self.state.x)
        self._kv_cache.end_part()
        self.state.next_layer_chunk = seq.layerwise.end_layer_chunk
        x = self.state.x
        if self.state.next_layer_chunk < seq.layerwise.layerwise.num_chunks * self._model.spec.num_layers:
            return x[:0]
        self.state = None
        return self._model.normalize_(x if seq.prompt_targets is not None else x[-1:].clone())

    def drop(self) -> None:
        """Forget the span under way."""
        self.state = None

    def _embed(self, seq: ScheduledSequence) -> Tensor:
        return self._model.embed(upload(torch.tensor(seq.token_ids, dtype=torch.int64), self._model.device))

    def _run_layer_chunk(self, layer_chunk: int, seq: ScheduledSequence, part: LayerwiseStep, x: Tensor) -> None:
        where = part.layerwise.positions(layer_chunk)
        chunk = SequenceMetadata(0, len(where), where.start, seq.block_table)
        positions = torch.arange(where.start, where.stop, device=x.device)
        ctx = ForwardContext(positions, (positions + 1).clamp(min=seq.prompt_len), (chunk,), self._kv_cache)
        rows = x[where.start - part.layerwise.begin : where.stop - part.layerwise.begin]
        self._model.forward_layer_(part.layerwise.layer(layer_chunk), rows, ctx)
