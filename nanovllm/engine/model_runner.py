"""The executor of one process: takes batches through the layers of the model, and samples. Tensors begin here.

Sequences go chunk by chunk (`ChunkedPass`) or layer by layer (`kvcache.layerwise_pass`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from typing import Protocol

import torch

from nanovllm.data.batch import Batch, ScheduledSequence, StepResult
from nanovllm.device import Busy, Device
from nanovllm.engine.row_sampling import explain_non_finite_logits, sample_rows
from nanovllm.errors import EngineError
from nanovllm.kvcache.base import KVCacheBase, KVStats, StepTraffic
from nanovllm.kvcache.forward_pass import ComputedRows, FlatBatch, ForwardPass, PassHook, with_hooks
from nanovllm.layers.causal_lm import CausalLM
from nanovllm.layers.forward_context import ForwardContext, KVCache, StepStates, WatchedKVCache
from nanovllm.memory.fitting import KVSizing
from nanovllm.memory.sizing import KVPlan
from nanovllm.ops.attention import SequenceMetadata
from nanovllm.ops.upload import upload

logger = logging.getLogger(__name__)


class StepWatch:
    """Calls `on_layer` during a step with the share of the step's work that is done, in tokens times layers."""

    def __init__(self, num_layers: int) -> None:
        self.on_layer: Callable[[float], None] | None = None
        self._num_layers = num_layers
        self._begun = self._total = 0

    def begin_step(self, batch: Batch) -> Callable[[int], None]:
        """Start to count the layers of a step. Call the result before each layer, with the number of its tokens."""
        self._begun = 0
        self._total = batch.token_layers(self._num_layers)
        return self._report

    def _report(self, tokens: int) -> None:
        """Call `on_layer`. An error in it is logged and does not fail the step."""
        done = self._begun
        self._begun += tokens
        try:
            if self.on_layer is not None:
                self.on_layer(done / self._total)
        except Exception:
            self.on_layer = None
            logger.exception("the function that watches the steps has failed, and is not called again")


class DecodeRunner(Protocol):
    """Runs decode steps in a faster way than calling the model, where it can take them."""

    def run(self, batch: FlatBatch, kv_cache: KVCache) -> ComputedRows | None:
        """The rows of a step, valid until the next step; None if it cannot compute them."""
        ...

    def forget(self) -> None:
        """Blocks have moved, or a step failed: what was computed ahead of the next step is not that step's."""
        ...


class ChunkedPass:
    """All sequences of a step form one flat batch, which goes through all layers."""

    def __init__(
        self,
        model: CausalLM,
        kv_cache: KVCacheBase,
        pass_hooks: Sequence[PassHook] = (),
        decode_runner: DecodeRunner | None = None,
    ) -> None:
        self._model = model
        self._pass_hooks = pass_hooks
        self._kv_cache = kv_cache
        self.decode_runner = decode_runner
        self._sequences: Sequence[ScheduledSequence] = ()
        self._metadata: tuple[SequenceMetadata, ...] = ()

    def begin_step(self, batch: Batch) -> StepTraffic | None:
        """Carry out the block moves of the batch and start the loads of its chunks."""
        self._sequences = batch.chunked
        starts = accumulate((len(seq.token_ids) for seq in self._sequences), initial=0)  # in the flat batch
        self._metadata = tuple(
            SequenceMetadata.full(start, len(seq.token_ids), seq.context_len, *seq.block_tables)
            for start, seq in zip(starts, self._sequences, strict=False)
        )
        if self.decode_runner is not None and (batch.moves or batch.state_moves):
            self.decode_runner.forget()
        traffic = self._kv_cache.begin_step(self._metadata, batch.moves, batch.state_moves)
        return traffic if self._sequences else None

    def run(self, on_attend: Callable[[int], None] | None) -> ComputedRows:
        batch = self._flat_batch()
        kv_cache: KVCache = self._kv_cache if on_attend is None else WatchedKVCache(self._kv_cache, on_attend)
        if self.decode_runner is not None and (rows := self.decode_runner.run(batch, kv_cache)) is not None:
            return rows
        token_ids, positions = upload(batch.inputs, self._model.device)
        context = ForwardContext(positions, batch.sequences, kv_cache, states=self._states())
        rows_of = [(seq, len(seq.token_ids)) for seq in self._sequences]
        hidden = self._model(token_ids, with_hooks(self._pass_hooks, context, rows_of))
        return ComputedRows(hidden, self._sequences, [sequence.query_start for sequence in batch.sequences])

    def _flat_batch(self) -> FlatBatch:
        sequences = self._metadata
        token_ids = torch.tensor([token for seq in self._sequences for token in seq.token_ids], dtype=torch.int64)
        query_lens = torch.tensor([len(seq.token_ids) for seq in self._sequences])
        # For each sequence the difference between the position of a row and its index in the batch.
        offsets = torch.tensor([part.context_len - part.query_start for part in sequences])
        positions = torch.arange(len(token_ids)) + offsets.repeat_interleave(query_lens)
        return FlatBatch(torch.stack((token_ids, positions)), sequences, self._sequences)

    def _states(self) -> StepStates | None:
        """The recurrent states of the step's sequences, if the model has any."""
        pool = self._kv_cache.pools.states
        if pool is None:
            return None
        slots = [seq.state_slot for seq in self._sequences if seq.state_slot is not None]
        return pool.of_step(slots, [seq.num_kept for seq in self._sequences])

    def abandon_step(self) -> None:
        if self.decode_runner is not None:
            self.decode_runner.forget()
        self._kv_cache.abandon_step()


class ModelRunner:
    """Owns the device, the model and the KV cache, and runs one batch at a time. `build.build_runner` makes it."""

    def __init__(
        self,
        device: Device,
        model: CausalLM,
        kv_cache: KVCacheBase,
        passes: Sequence[ForwardPass],
        sizing: KVSizing,
        plan: KVPlan,
        num_swap_blocks: int,
        pass_hooks: Sequence[PassHook] = (),
    ) -> None:
        """passes: the forward pass chunk by chunk, then the one layer by layer if prompts may go that way."""
        self.device = device
        self.model = model
        self.kv_cache = kv_cache
        self.passes = passes
        self.sizing = sizing
        self.plan = plan
        self.num_swap_blocks = num_swap_blocks
        self.pass_hooks = pass_hooks
        self.network = model.network  # of this process
        self.dtype = model.dtype
        self._closed = False
        self._was_layerwise = False  # whether the last step had a part of a layer-by-layer prefill
        self._moved_before = self._moved_weights  # by the pass that measured memory
        self._watch = StepWatch(model.network.num_kv_layers)

    @torch.inference_mode()
    def execute(self, batch: Batch) -> StepResult:
        """Run one step. After a failure the runner can be used again; the KV that the step was writing is undefined."""
        self.check_health()
        # The pass of layer-by-layer prefill also begins the step after one with a part: if the prefill was aborted or
        # preempted, it drops there what it kept between two steps.
        passes = self.passes if batch.layerwise is not None or self._was_layerwise else self.passes[:1]
        self._was_layerwise = batch.layerwise is not None
        result = StepResult()
        errors: dict[int, str] = {}
        on_attend = self._watch.begin_step(batch) if self._watch.on_layer is not None else None
        try:
            with self.device.compute():
                for hook in self.pass_hooks:
                    errors |= hook.begin_step(batch)
                begun = [(one_pass, moved) for one_pass in passes if (moved := one_pass.begin_step(batch)) is not None]
                for one_pass, moved in begun:
                    rows = one_pass.run(on_attend)
                    # Logits of the last rows, then `layers.sampler.sample`.
                    sample_rows(self.model, rows, result, lambda: self._why_not_finite)
                    for hook in self.pass_hooks:
                        hook.computed(rows)
                    result.h2d_bytes.extend(moved.h2d_bytes)
                    result.d2h_bytes.extend(moved.d2h_bytes)
                self.kv_cache.end_step()
        except BaseException:
            for one_pass in self.passes:
                one_pass.abandon_step()
            raise
        result.errors.update(errors)
        return result

    def check_health(self) -> None:
        """Raise EngineError if no step can run any more."""
        if self._closed:
            raise EngineError("the engine is closed: make a new LLM")

    def advise(self, num_tokens: int) -> str:
        """See `Executor`."""
        return self.sizing.advice(num_tokens)

    def watch_steps(self, on_layer: Callable[[float], None] | None) -> Callable[[float], None] | None:
        """See `LLM.watch_steps`."""
        before = self._watch.on_layer
        self._watch.on_layer = on_layer
        return before

    def kv_stats(self) -> KVStats:
        if self._closed:
            return self._last_stats
        loaded, read = self._moved_weights
        loaded_before, read_before = self._moved_before
        stats = self.kv_cache.stats()
        return replace(stats, loaded_weight_bytes=loaded - loaded_before, read_weight_bytes=read - read_before)

    @property
    def _moved_weights(self) -> tuple[int, int]:
        """Bytes that were copied to the device, and read from files."""
        weights = self.model.layer_weights
        return (0, 0) if weights is None else (weights.loaded_bytes, weights.read_bytes)

    def link_busy(self) -> Busy:
        """Bytes copied to the device so far, or in a sample of the copies, and the seconds during which they ran."""
        return self.device.link_busy()

    def close(self) -> None:
        """End the device's streams, release weights and KV cache. Safe to call twice."""
        if not self._closed:
            self._last_stats = self.kv_stats()
            self._closed = True
            weights = self.model.layer_weights
            try:
                self.device.close()
            finally:
                if weights is not None:
                    weights.close()
                del self.model, self.kv_cache, self.passes, self.pass_hooks

    @cached_property
    def _why_not_finite(self) -> str:
        return explain_non_finite_logits(self.model)
