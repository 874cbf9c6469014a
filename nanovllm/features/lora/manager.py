"""Adapters in host memory and on the device: loaded when a running request needs them, the least recently used out."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from nanovllm.config import EngineConfig
from nanovllm.data.batch import Adapter
from nanovllm.errors import ConfigError, ModelError, told
from nanovllm.features.lora.adapter_files import check_unchanged, read_adapter
from nanovllm.features.lora.weights import AdapterWeights, PackedAdapter, batch_parts, read_packed
from nanovllm.layers.causal_lm import CausalLM
from nanovllm.layers.linear import RowAdapters
from nanovllm.memory.adapters import most_elements
from nanovllm.ops.triton_support import use_triton

if TYPE_CHECKING:  # imports triton
    from nanovllm.features.lora.grouped_adapters import AdapterTables, RecordedAdapters

logger = logging.getLogger(__name__)


class LoRAManager:
    """Holds up to max_loras adapters on the device and max_cpu_loras in host memory."""

    def __init__(self, model: CausalLM, config: EngineConfig) -> None:
        self._model = model
        self._max_lora_rank = config.max_lora_rank
        self._max_cpu_loras = config.num_cpu_loras
        elements = most_elements(model.network, config.max_lora_rank)
        self._slots = torch.empty(config.max_loras, elements, dtype=model.dtype, device=model.device)
        self._tables: AdapterTables | None = None  # where Triton multiplies
        if use_triton(self._slots):
            from nanovllm.features.lora.grouped_adapters import AdapterTables

            self._tables = AdapterTables(model, self._slots, config.max_lora_rank)
        # By the number of the adapter, the least recently used one first.
        self.on_device: OrderedDict[int, tuple[int, AdapterWeights]] = OrderedDict()  # with its slot
        self.on_host: OrderedDict[int, PackedAdapter] = OrderedDict()
        self.num_reads = 0  # from files
        self.num_loads = 0  # to the device

    def begin_step(self, adapters: Sequence[Adapter]) -> dict[int, str]:
        """Load the adapters of all running requests, which are at most max_loras and evict only other ones.

        Returns, by the number of an adapter, why it cannot be loaded.
        """
        for adapter in adapters:
            if adapter.number in self.on_device:
                self.on_device.move_to_end(adapter.number)
        missing = [adapter for adapter in adapters if adapter.number not in self.on_device]
        packed: dict[int, PackedAdapter] = {}
        errors: dict[int, str] = {}
        for adapter in missing:
            try:
                packed[adapter.number] = self._packed(adapter)
            except Exception as error:  # of files that have changed, and of other libraries
                logger.exception("the adapter %r cannot be loaded", adapter.request.lora_name)
                is_own = isinstance(error, ModelError | ConfigError)
                errors[adapter.number] = str(error).removesuffix(".") if is_own else told(error)
        self._add_errors_of_ranks(missing, errors)
        for adapter in missing:
            if adapter.number not in errors:
                self._load(adapter.number, packed[adapter.number])
        names = {adapter.number: adapter.request.lora_name for adapter in missing}
        return {number: f"the adapter {names[number]!r} cannot be loaded: {why}" for number, why in errors.items()}

    def _add_errors_of_ranks(self, adapters: Sequence[Adapter], errors: dict[int, str]) -> None:
        """Add the adapters that another rank cannot load: a sum to which only some ranks add would be wrong."""
        group = self._model.group
        if group is None or not adapters:
            return
        failed = torch.zeros(len(adapters), group.size, device=self._model.device)
        failed[:, group.rank] = torch.tensor([float(adapter.number in errors) for adapter in adapters])
        for adapter, ranks in zip(adapters, group.all_reduce(failed).tolist(), strict=True):
            if any(ranks):
                errors.setdefault(adapter.number, f"rank {ranks.index(1.0)} cannot read it, and has logged why")

    def of_rows(self, sequences: Sequence[tuple[int | None, int]]) -> Sequence[RowAdapters | None]:
        """`ForwardContext.adapters` of a batch, from each sequence's adapter and its number of rows, in order.

        Rows of an adapter that could not be loaded get none.
        """
        if self._tables is not None:
            return self._tables.batch_parts(sequences, self.on_device, self._model.chunk_rows)
        weights = {number: weights for number, (_, weights) in self.on_device.items()}
        return batch_parts(sequences, weights, self._model.chunk_rows, self._model.device)

    def recorded(self, most_rows: int) -> RecordedRowAdapters | None:
        """The adapters of steps of at most so many rows; None if their products cannot be recorded."""
        return None if self._tables is None else RecordedRowAdapters(self, self._tables.recorded(most_rows))

    def _load(self, number: int, packed: PackedAdapter) -> None:
        if len(self.on_device) == len(self._slots):
            self.on_device.popitem(last=False)
        taken = {slot for slot, _ in self.on_device.values()}
        slot = next(slot for slot in range(len(self._slots)) if slot not in taken)
        memory = self._slots[slot, : packed.elements.numel()]
        memory.copy_(packed.elements)
        if self._tables is not None:
            self._tables.fill(slot, packed.layout)
        self.on_device[number] = (slot, packed.weights_in(memory))
        self.num_loads += 1

    def _packed(self, adapter: Adapter) -> PackedAdapter:
        """The adapter in host memory, read from its files if it is not there. Raises ModelError."""
        if adapter.number not in self.on_host:
            check_unchanged(adapter)
            modules = read_adapter(adapter.directory, self._model.network, self._max_lora_rank)
            while len(self.on_host) >= self._max_cpu_loras:
                self.on_host.popitem(last=False)
            packed = read_packed(adapter.directory, modules, self._model)
            check_unchanged(adapter)  # while they were read
            self.on_host[adapter.number] = packed
            self.num_reads += 1
        self.on_host.move_to_end(adapter.number)
        return self.on_host[adapter.number]


class RecordedRowAdapters:
    """Implements `features.cuda_graphs.decode_graphs.RecordedAdapters`."""

    def __init__(self, manager: LoRAManager, adapters: RecordedAdapters) -> None:
        self._manager = manager
        self._adapters = adapters

    def of_rows(self, rows: int) -> RowAdapters:
        return self._adapters.of_rows(rows)

    def fill(self, sequences: Sequence[tuple[int | None, int]]) -> None:
        self._adapters.fill(sequences, self._manager.on_device)
