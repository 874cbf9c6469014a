"""A device that records graphs on the CPU, and attention for them. What a graph may not see is frozen, as on a GPU.

While a graph is recorded every operator is put on a tape with the very tensors that it took and made. A replay runs the
tape: whatever Python would have worked out anew is what it was, and nothing is read or written but the memory of then.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
from engines import offloaded, random_prompt
from ordering_check import OrderingCheck
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from nanovllm import build
from nanovllm.device import Device, Graph, RecordedWork
from nanovllm.device.cpu import CpuDevice
from nanovllm.device.wrapper import DeviceWrapper
from nanovllm.features.cuda_graphs import decode_tables
from nanovllm.features.cuda_graphs.decode_graphs import DecodeGraphs
from nanovllm.features.lora import grouped_adapters, manager
from nanovllm.kvcache.forward_pass import ComputedRows, FlatBatch
from nanovllm.layers import experts
from nanovllm.layers.causal_lm import CausalLM
from nanovllm.layers.dense_weight import linear
from nanovllm.layers.experts import Experts, Group, groups_of
from nanovllm.layers.gated_delta import GatedDelta
from nanovllm.ops import cpu_delta, cpu_kernels
from nanovllm.ops.attention import AttentionMetadata, AttentionState, DeviceMetadata, SequenceMetadata
from nanovllm.ops.cpu_attention import NativeAttention
from nanovllm.ops.cpu_kernels import FewRowLayer
from nanovllm.ops.delta_inputs import StateRows
from nanovllm.ops.row_kernels import store_kv

BLOCK = 16
VOCAB = 97
MODES = ("full steps", "pieces, resident", "pieces, offloaded", "pieces, no CPU attention")
PROMPTS = [random_prompt(length, VOCAB, 1) for length in (5, 31, 16, 17, 90, 1, 47, 3, 33, 8, 15, 2, 64)]


class Tape(TorchDispatchMode):
    """Operators, and calls of this package's own kernels, which torch does not see; cut into graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.graphs: list[list[Callable[[], object]]] = [[]]
        self._made: dict[int, Tensor] = {}  # by address, what the operators made

    def cut(self) -> None:
        self.graphs.append([])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.graphs[-1].append(lambda: self._again(func, args, kwargs, result))
        return result

    def call(self, kernel: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with _disable_current_modes():
            result = kernel(*args, **kwargs)
        self.graphs[-1].append(lambda: self._again(kernel, args, kwargs, result))
        return result

    def spoil(self) -> None:
        """Spoil all that was made: on a GPU another work has it in the same memory."""
        for tensor in self._made.values():
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))

    def _again(self, func: Any, args: Any, kwargs: Any, before: Any) -> None:
        """Run an operator; what it made the first time gets the result. A view shows it already."""
        now = func(*args, **kwargs)
        for old, new in zip(tree_leaves(before), tree_leaves(now), strict=True):
            if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                old.copy_(new)
                self._made[old.data_ptr()] = old


class TapedGraph(Graph):
    """The `index`th graph of a work. With the first one, all that any work has made before is gone."""

    def __init__(self, tape: Tape, index: int, device: CapturingDevice) -> None:
        self._tape = tape
        self._index = index
        self._device = device
        device.live.add(self)

    def replay(self) -> None:
        self._device.replays += 1
        with _disable_current_modes():
            if self._index == 0:
                if self._device.replayed is not None:
                    self._device.replayed.spoil()
                self._device.replayed = self._tape
            assert self._device.replayed is self._tape, "the memory of this graph belongs to another by now"
            for step in self._tape.graphs[self._index]:
                step()


class CapturingDevice(DeviceWrapper):
    """`fails_at`: the work whose recording fails. Each graph takes `graph_bytes` of the device's memory."""

    def __init__(self, inner: Device | None = None, fails_at: int | None = None, graph_bytes: int = 0) -> None:
        super().__init__(inner or CpuDevice())
        self.captures = True
        self.replays = 0
        self.tape: Tape | None = None
        self.replayed: Tape | None = None  # the latest
        self.live: weakref.WeakSet[TapedGraph] = weakref.WeakSet()
        self._fails_at = fails_at
        self._graph_bytes = graph_bytes
        self._free = self.inner.free_memory()

    def capture(self, works: Sequence[RecordedWork]) -> list[list[Graph]]:
        return [self._record(work, index) for index, work in enumerate(works)]

    def _record(self, work: RecordedWork, index: int) -> list[Graph]:
        work(lambda: None)
        if index == self._fails_at:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.tape = Tape()
        try:
            with self.tape:
                work(self.tape.cut)
            return [TapedGraph(self.tape, part, self) for part in range(len(self.tape.graphs))]
        finally:
            self.tape = None

    def kernel(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, put on the tape where there is one."""

        def call(*args: Any, **kwargs: Any) -> Any:
            # what `function` calls is a part of it
            tape = self.tape
            self.tape = None
            try:
                return function(*args, **kwargs) if tape is None else tape.call(function, args, kwargs)
            finally:
                self.tape = tape

        return call

    def free_memory(self) -> int:
        return self._free - self._graph_bytes * len(self.live)


class RowsOnCpu(NativeAttention):
    """The CPU's kernel, that reads the table of a graph's rows when it runs."""

    def __init__(self, device: CapturingDevice) -> None:
        super().__init__()
        self._call = device.kernel(self._attend_rows)

    def attend_rows(
        self,
        q: Tensor,
        pool: Tensor,
        table: DeviceMetadata,
        out: Tensor,
        scale: float,
        window: int | None,
        sinks: Tensor | None,
    ) -> None:
        assert table.few.total_rows == len(q) and not len(table.many)
        self._call(q, pool, table, out, scale, window, sinks)

    def _attend_rows(
        self,
        q: Tensor,
        pool: Tensor,
        table: DeviceMetadata,
        out: Tensor,
        scale: float,
        window: int | None,
        sinks: Tensor | None,
    ) -> None:
        sequences = []
        for row in table.few.rows.tolist():
            query_start, query_len, start, count, first_position, kv_end, position, rows_before = row
            assert count <= table.few.max_blocks and query_len <= table.few.max_rows
            if query_len:
                assert query_start == rows_before and count
                blocks = table.blocks[start : start + count].tolist()
                sequences.append(SequenceMetadata(query_start, query_len, position, first_position, kv_end, blocks))
        state = AttentionState.empty(q, sinks)
        self.attend(q, pool, AttentionMetadata(sequences), state, scale, window)
        for seq in sequences:
            rows = slice(seq.query_start, seq.query_start + seq.query_len)
            out[rows] = state.out[rows].to(out.dtype)


def record_kernels(monkeypatch: pytest.MonkeyPatch, device: CapturingDevice) -> None:
    """Puts the calls of the C++ kernels between two attentions on the tape, which sees torch's operators by itself.

    What experts and recurrences do with rows, which kernels for a GPU find on the device, is one call.
    """
    for name in (
        "add_", "copy_", "narrow_", "filled", "rows_of", "widened", "rms_norm", "silu_and_mul", "gelu_tanh_and_mul",
        "clamped_swiglu", "cos_sin", "cpu_linear", "place_heads", "likeliest", "sigmoid", "softmax",
    ):  # fmt: skip
        monkeypatch.setattr(cpu_kernels, name, device.kernel(getattr(cpu_kernels, name)))
    for name in ("project", "finish_"):
        monkeypatch.setattr(FewRowLayer, name, device.kernel(getattr(FewRowLayer, name)))
    monkeypatch.setattr(cpu_delta, "sigmoid_gate_", device.kernel(cpu_delta.sigmoid_gate_))
    monkeypatch.setattr(GatedDelta, "recur_", device.kernel(_without_padding(GatedDelta.recur_)))
    for name in ("route", "_sum"):
        monkeypatch.setattr(Experts, name, device.kernel(getattr(Experts, name)))
    monkeypatch.setattr(experts, "groups_of", Groups)
    monkeypatch.setattr(CausalLM, "is_recordable", True)


class Groups:
    """`experts.groups_of`, of what the tensors hold whenever somebody asks."""

    def __init__(self, weights: Tensor, chosen: Tensor) -> None:
        self._found = weights, chosen

    def __iter__(self) -> Iterator[Group]:
        return groups_of(*self._found)


def _without_padding(recur: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """`GatedDelta.recur_` for runs without a slot too, whose rows get zeros."""

    def call(layer: GatedDelta, x: Tensor, rows: StateRows, *others: Any) -> tuple[Tensor, Tensor]:
        slots, starts, run_of_row, _ = rows
        if x.is_meta:
            return recur(layer, x, rows, *others)
        count = int((slots >= 0).sum())
        end = int(starts[count]) if count else 0
        assert bool((slots[count:] == -1).all()), "padding comes last"
        widths = (layer.spec.value_size, layer.spec.projected_size)
        results = tuple(x.new_zeros(len(x), width) for width in widths)
        if count:
            real = StateRows(slots[:count], starts[: count + 1], run_of_row[:end])
            for padded, part in zip(results, recur(layer, x[:end], real, *others), strict=True):
                padded[:end] = part
        return results[0], results[1]

    return call


def use_graphs(monkeypatch: pytest.MonkeyPatch, device: CapturingDevice, *, rows: bool = False) -> None:
    """Engines made from now on run on `device`; with `rows` their attention can be recorded."""
    monkeypatch.setattr(build, "create_device", lambda name: OrderingCheck(device))
    record_kernels(monkeypatch, device)
    if rows:
        monkeypatch.setattr(build, "select_backend", lambda *_: RowsOnCpu(device))
        monkeypatch.setattr(decode_tables, "store_kv", device.kernel(store_kv))


def use_grouped_adapters(monkeypatch: pytest.MonkeyPatch, device: CapturingDevice) -> None:
    """Engines made from now on find adapters as a GPU does, by tables and rows in memory; torch multiplies."""

    def add_low_rank_(
        y: Tensor, x: Tensor, memory: Tensor, table: Tensor, rows: Tensor, ends: Tensor, max_rank: int
    ) -> None:
        elements = memory.flatten()
        starts = [0, *ends.tolist()]
        for slot, (start, end) in enumerate(pairwise(starts)):
            of_slot = rows[start:end]
            for a, rank, b, first, last in table[slot].tolist() if end > start else ():
                assert rank <= max_rank
                if rank:
                    of_a = elements[a : a + rank * x.shape[1]].view(rank, -1)
                    of_b = elements[b : b + (last - first) * rank].view(-1, rank)
                    y[of_slot, first:last] += linear(linear(x[of_slot], of_a), of_b)

    monkeypatch.setattr(manager, "use_triton", lambda tensor: True)
    monkeypatch.setattr(grouped_adapters, "add_low_rank_", device.kernel(add_low_rank_))


def arguments(mode: str, **others: Any) -> dict[str, Any]:
    """Of an engine that runs its decode steps in one of MODES, or "eager"."""
    sizes = {"max_num_seqs": 9, "max_num_batched_tokens": 40, "max_model_len": 200, "dtype": "float32"}
    if "resident" in mode or mode in ("full steps", "eager"):
        return {"kvcache_block_size": BLOCK, "num_gpu_blocks": 80, **sizes, **others}
    return {**offloaded(BLOCK, 8, 80, cpu_attention="no CPU attention" not in mode), **sizes, **others}


def watch_batches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many sequences each step had that graphs were replayed for, from now on."""
    batches: list[int] = []
    run = DecodeGraphs.run

    def watched(graphs: DecodeGraphs, batch: FlatBatch, kv_cache: Any) -> ComputedRows | None:
        computed = run(graphs, batch, kv_cache)
        if computed is not None:
            batches.append(len(batch.sequences))
        return computed

    monkeypatch.setattr(DecodeGraphs, "run", watched)
    return batches


def measured_memory(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What engines made from now on find of memory."""
    results: list[Any] = []
    measure = build.measure_memory

    def watched(*args: Any, **options: Any) -> Any:
        results.append(measure(*args, **options))
        return results[-1]

    monkeypatch.setattr(build, "measure_memory", watched)
    return results
