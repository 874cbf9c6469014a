"""The adapters of a step's rows, added to the passes through the layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from nanovllm.data.batch import Batch, ScheduledSequence
from nanovllm.features.lora.manager import LoRAManager
from nanovllm.kvcache.forward_pass import PassHook
from nanovllm.layers.forward_context import ForwardContext


class AdapterRows(PassHook):
    """Loads the adapters of all running requests when a step begins, and gives the rows of a pass theirs."""

    def __init__(self, manager: LoRAManager) -> None:
        self.manager = manager

    def begin_step(self, batch: Batch) -> Mapping[int, str]:
        errors = self.manager.begin_step(batch.adapters)
        adapters = [seq.adapter for seq in batch.sequences]
        return {index: errors[number] for index, number in enumerate(adapters) if number in errors}

    def extended(self, context: ForwardContext, rows: Sequence[tuple[ScheduledSequence, int]]) -> ForwardContext:
        return replace(context, adapters=self.manager.of_rows([(seq.adapter, count) for seq, count in rows]))
