"""The executor of one process: runs batches through the model, samples. Tensors begin here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Protocol

import torch

from nanovllm.data.batch import Batch, ScheduledSequence, StepResult
from nanovllm.device import Busy, Device
from nanovllm.engine.forward_pass import AdapterManager, ForwardPass, StepWatch
from nanovllm.engine.sampling import explain_non_finite_logits, sample_rows
from nanovllm.errors import Advice, EngineError
from nanovllm.kvcache.base import KVCacheBase, KVStats
from nanovllm.memory.fitting import KVSizing
from nanovllm.memory.sizing import KVPlan
from nanovllm.models.decoder import Decoder


class StepTrace(Protocol):
    """Writes a timeline of copies and kernels; see `device.trace`."""

    def begin_step(self, sequences: Sequence[ScheduledSequence]) -> None:
        """Work from now on belongs to a step of these sequences."""
        ...


class ModelRunner:
    """Owns the device, the model and the KV cache, and runs one batch at a time. `build.build_runner` makes it."""

    def __init__(
        self,
        device: Device,
        model: Decoder,
        kv_cache: KVCacheBase,
        passes: Sequence[ForwardPass],
        sizing: KVSizing,
        plan: KVPlan,
        num_swap_blocks: int,
        adapters: AdapterManager | None = None,
        trace: StepTrace | None = None,
    ) -> None:
        """passes: the forward pass chunk by chunk, then the one layer by layer if prompts may go that way."""
        self.device = device
        self.model = model
        self.kv_cache = kv_cache
        self.passes = passes
        self.sizing = sizing
        self.plan = plan
        self.num_swap_blocks = num_swap_blocks
        self.adapters = adapters
        self.spec = model.spec  # of this rank
        self.dtype = model.dtype
        self._trace = trace
        self._closed = False
        self._was_layerwise = False  # whether the last step had a part of a layer-by-layer prefill
        self._watch = StepWatch(model.spec.num_layers)

    @torch.inference_mode()
    def execute(self, batch: Batch) -> StepResult:
        """Run one step. After a failure the runner can be used again; the KV that the step was writing is undefined."""
        self.check_health()
        # Layer-by-layer prefill also takes part in the step after its last, to drop what it kept between two steps.
        passes = self.passes if batch.layerwise is not None or self._was_layerwise else self.passes[:1]
        self._was_layerwise = batch.layerwise is not None
        result = StepResult()
        on_attend = self._watch.begin_step(batch) if self._watch.on_layer is not None else None
        if self._trace is not None:
            self._trace.begin_step(batch.sequences)
        try:
            with self.device.compute():
                unloaded = self.adapters.begin_step(batch.adapters) if self.adapters is not None else {}
                begun = [(each, moved) for each in passes if (moved := each.begin_step(batch)) is not None]
                for each, moved in begun:
                    sample_rows(self.model, each.run(on_attend), result, lambda: self._why_not_finite)
                    result.h2d_bytes.extend(moved.h2d_bytes)
                    result.d2h_bytes.extend(moved.d2h_bytes)
                self.kv_cache.end_step()
        except BaseException:
            for each in self.passes:
                each.abandon_step()
            raise
        for index, seq in enumerate(batch.sequences):
            if seq.adapter is not None and seq.adapter in unloaded:
                result.errors[index] = unloaded[seq.adapter]
        return result

    def check_health(self) -> None:
        """Raise EngineError if no step can run any more."""
        if self._closed:
            raise EngineError("the engine is closed: make a new LLM")

    def advise(self, num_tokens: int) -> Advice:
        """What to do about a prompt of `num_tokens` tokens, which is too long for the KV cache."""
        return self.sizing.advice(num_tokens)

    def watch_steps(self, on_layer: Callable[[float], None] | None) -> Callable[[float], None] | None:
        """See `LLM.watch_steps`."""
        before, self._watch.on_layer = self._watch.on_layer, on_layer
        return before

    def kv_stats(self) -> KVStats:
        return self._last_stats if self._closed else self.kv_cache.stats()

    def link_busy(self) -> Busy:
        """Bytes copied to the device so far, or in a sample of the copies, and the seconds during which they ran."""
        return self.device.link_busy()

    def close(self) -> None:
        """End the device's streams, release weights and KV cache. Safe to call twice."""
        if not self._closed:
            self._closed = True
            self._last_stats = self.kv_cache.stats()
            try:
                self.device.close()
            finally:
                del self.model, self.kv_cache, self.passes, self.adapters

    @cached_property
    def _why_not_finite(self) -> str:
        return explain_non_finite_logits(self.model)
