"""Launches and bytes of a step on a GPU, counted without one.

    python -m benchmarks.launches [--model llama-3.1-8b ...] [--rows 1] [--context 2048] [--kernels]

The network runs in its full size over tensors that have shapes and no memory, and say that they lie on a CUDA device:
the same code chooses the same kernels, and whatever reads a value on the host fails, as it would make a GPU wait. A
launch is one of Triton's, or an operator of torch that is no view; operators that launch more than one kernel count
once. Bytes are those of the tensors that a launch takes, once each, so that they are an upper bound where it reads a
part of them, as of a KV pool.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from benchmarks.options import Parser, add_json_option, positive
from benchmarks.report import machine_facts, print_row, write_json
from benchmarks.shapes import Shape, open_shape
from nanovllm.config import EngineConfig
from nanovllm.device import Busy, Device, PitchedCopy
from nanovllm.device.base import CallStream, Event, Graph, HostTask, Mark, RecordedWork, Stream
from nanovllm.errors import EngineError
from nanovllm.features.cuda_graphs.decode_graphs import record
from nanovllm.kvcache.base import AttentionGeometry
from nanovllm.kvcache.paged_cache import PagedKVCache
from nanovllm.kvcache.states import StatePool
from nanovllm.layers.causal_lm import CausalLM
from nanovllm.layers.forward_context import ForwardContext
from nanovllm.memory.layout import kv_layout
from nanovllm.memory.sizing import StateSlots
from nanovllm.ops import kernel_config, prefill_libraries, row_kernels, scaled_product, triton_support
from nanovllm.ops.attention import SequenceMetadata
from nanovllm.ops.triton_attention import TritonAttention

CUDA = torch.device("cuda", 0)
CAPABILITY = (9, 0)
BLOCK = 256  # tokens
MODELS = (
    "llama-3.1-8b", "llama-3.1-8b:int4", "llama-3.1-8b:fp8", "llama-3.1-8b:q4_k_m", "qwen3-30b-a3b", "gpt-oss-20b",
    "qwen3.6-35b-a3b:int4", "qwen3.5-9b", "gemma-4-31b",
)  # fmt: skip
# Operators that give memory or another shape of the same memory.
NO_LAUNCH = frozenset({"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "detach", "alias"})


class GpuTensor(Tensor):
    """A tensor without memory that says it lies on a CUDA device. What is made of it is one too."""

    is_cuda = True
    is_cpu = False
    is_meta = False
    device = CUDA


@dataclass
class Launches:
    """What ran, by name."""

    counts: Counter[str] = field(default_factory=Counter)
    num_bytes: Counter[str] = field(default_factory=Counter)
    on_host: Counter[str] = field(default_factory=Counter)  # operators with a tensor of the host, such as copies

    @property
    def total(self) -> int:
        return self.counts.total()

    def taken(self) -> Launches:
        """What was counted until now; the count begins anew."""
        counted = Launches(self.counts, self.num_bytes, self.on_host)
        self.counts = Counter()
        self.num_bytes = Counter()
        self.on_host = Counter()
        return counted

    def add(self, name: str, tensors: Sequence[Tensor]) -> None:
        distinct = {tensor.untyped_storage()._cdata: tensor for tensor in tensors}
        self.counts[name] += 1
        self.num_bytes[name] += sum(tensor.numel() * tensor.itemsize for tensor in distinct.values())


class _OnGpu(TorchFunctionMode):
    """Makes tensors for a CUDA device without memory."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.pin_memory:
            return args[0]
        values = [*args, *(kwargs or {}).values()]
        if not any(_is_cuda(value) for value in values):
            return func(*args, **(kwargs or {}))
        there = [torch.device("meta") if _is_cuda(value) else value for value in args]
        named = {name: torch.device("meta") if _is_cuda(value) else value for name, value in (kwargs or {}).items()}
        named.pop("pin_memory", None)
        made = func(*there, **named)
        return made.as_subclass(GpuTensor) if isinstance(made, Tensor) else made


def _is_cuda(value: object) -> bool:
    return isinstance(value, torch.device) and value.type == "cuda"


class _Counting(TorchDispatchMode):
    """Counts torch's operators on tensors without memory."""

    def __init__(self, launches: Launches) -> None:
        super().__init__()
        self._launches = launches

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Operators without memory are partly Python, which must not meet tensors that claim a device.
        args, kwargs = tree_map_only(GpuTensor, lambda tensor: tensor.as_subclass(Tensor), (args, kwargs or {}))
        made = func(*args, **kwargs)
        leaves = [leaf for leaf in tree_leaves((args, kwargs, made)) if isinstance(leaf, Tensor)]
        tensors = [tensor for tensor in leaves if tensor.is_meta]
        if len(tensors) < len(leaves):
            self._launches.on_host[func.overloadpacket.__name__] += 1
        if tensors and not func.is_view and func.overloadpacket.__name__ not in NO_LAUNCH:
            self._launches.add(func.overloadpacket.__name__, tensors)
        return made


@contextmanager
def counted() -> Iterator[Launches]:
    """Counts launches within; tensors that are made there for a CUDA device have no memory, and no kernel runs."""
    from nanovllm.ops import triton_merge

    launches = Launches()

    def run(kernel: Any, *args: Any, **options: Any) -> None:
        launches.add(kernel.__name__, [value for value in (*args, *options.values()) if isinstance(value, Tensor)])

    runs = triton_support.triton_runs
    with ExitStack() as stack:
        for module in [*sys.modules.values()]:
            if getattr(module, "triton_runs", None) is runs:
                stack.enter_context(mock.patch.object(module, "triton_runs", lambda: True))
        stack.enter_context(mock.patch.object(type(triton_merge._merge_kernel), "run", run))
        stack.enter_context(mock.patch("torch.cuda.get_device_capability", lambda device=None: CAPABILITY))
        stack.enter_context(mock.patch("torch.cuda.get_device_name", lambda device=None: "a counted GPU"))
        _forget_gpu()
        stack.callback(_forget_gpu)
        stack.enter_context(_Counting(launches))
        stack.enter_context(_OnGpu())
        yield launches


def _forget_gpu() -> None:
    """What is kept of the GPU that is there, or of the one that is counted for."""
    for module in (kernel_config, prefill_libraries, row_kernels, scaled_product, triton_support):
        for kept in vars(module).values():
            if hasattr(kept, "cache_clear"):
                kept.cache_clear()


class CountedStream(CallStream):
    """Nothing is submitted to it."""

    def record(self, event: Event) -> None:
        return

    def wait(self, event: Event) -> None:
        return

    def synchronize(self) -> None:
        raise EngineError("a counted step waits for nothing")

    def mark(self) -> Mark:
        raise EngineError("a counted step takes no time")

    def launch(self, task: HostTask) -> None:
        raise EngineError("a counted step gives the host nothing to do")


class CountedDevice(Device):
    """A device with memory of no size, on which nothing runs. Recording a graph calls its work once."""

    name = "cuda"
    torch_device = CUDA
    shares_host = False
    captures = True

    def __init__(self, launches: Launches) -> None:
        self._launches = launches
        self.compute_stream = CountedStream()

    def new_stream(self, name: str) -> Stream:
        return CountedStream()

    def new_call_stream(self, name: str) -> CallStream:
        return CountedStream()

    def new_event(self) -> Event:
        return Event()

    def wait_for(self, event: Event) -> None:
        raise EngineError("a counted step waits for nothing")

    def empty(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=CUDA)

    def empty_host(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty((0, *shape[1:]), dtype=dtype)

    def mapped(self, host: Tensor) -> Tensor | None:
        return None

    def copy_2d(self, copy: PitchedCopy, stream: Stream) -> int:
        raise EngineError("a counted step moves nothing")

    def link_busy(self) -> Busy:
        return Busy()

    def free_memory(self) -> int:
        return 1 << 40

    def total_memory(self) -> int:
        return 1 << 40

    def free_host_memory(self) -> int:
        return 1 << 40

    def close(self) -> None:
        return

    def capture(self, works: Sequence[RecordedWork]) -> list[list[Graph]]:
        for work in works:
            self._launches.taken()  # the last work counts
            work(lambda: None)
        return [[] for _ in works]


@dataclass(frozen=True, slots=True)
class Counted:
    """The launches of a decode step of one sequence with its greedy token, and of a chunk of a prompt."""

    model: str
    stored: str | None
    num_layers: int
    decode: Launches
    chunk: Launches


def count(shape: Shape, chunk: int, context: int) -> Counted:
    """chunk: tokens of a prompt's chunk that ends at `context` tokens, after which a token is decoded."""
    config = EngineConfig(
        model=str(shape.path),
        load_format="dummy",
        max_num_seqs=1,
        max_num_batched_tokens=chunk,
        max_model_len=context + 1,
        kvcache_block_size=BLOCK,
    )
    with torch.inference_mode(), counted() as launches:
        device = CountedDevice(launches)
        model = shape.config.build(shape.dtype, CUDA)
        model.finish_loading()
        kv_cache = _kv_cache(device, model, shape, config)
        launches.taken()
        _run_chunk(model, kv_cache, chunk, context)
        of_chunk = launches.taken()
        max_len = config.max_model_len or context
        record(device, model, kv_cache.attended_pool, kv_cache.pools.states, max_len, config, tried=slice(0, 1))
        return Counted(shape.name, shape.stored, shape.network.num_layers, launches.taken(), of_chunk)


def _kv_cache(device: Device, model: CausalLM, shape: Shape, config: EngineConfig) -> PagedKVCache:
    """With room for the longest sequence and, of a recurrent network, the states of one."""
    network = shape.network
    layout = kv_layout(network, "auto").with_block_size(BLOCK)
    backend = TritonAttention()
    geometry = AttentionGeometry(network.attention_scale, network.num_heads, shape.dtype, model.sinks)
    assert config.max_model_len is not None
    num_blocks = len(layout.groups) * (config.max_model_len // BLOCK + 1)
    kv_cache = PagedKVCache(device, layout, shape.dtype, geometry, backend, num_blocks)
    if network.recurrent is not None:
        kv_cache.pools.states = StatePool(device, network, shape.dtype, StateSlots(1, 0, 1, 0, 1), model.recurrences)
    return kv_cache


def _run_chunk(model: CausalLM, kv_cache: PagedKVCache, chunk: int, context: int) -> None:
    """One chunk of a prompt through all layers."""
    num_blocks = context // BLOCK + 1
    tables = [range(index * num_blocks, (index + 1) * num_blocks) for index in range(len(kv_cache.layout.groups))]
    sequences = (SequenceMetadata.full(0, chunk, context - chunk, *tables),)
    kv_cache.begin_step(sequences, ())
    positions = torch.arange(context - chunk, context).to(CUDA)
    states = kv_cache.pools.states
    of_step = states.of_step([0], [0]) if states is not None else None
    model(positions, ForwardContext(positions, sequences, kv_cache, states=of_step))


def show(result: Counted, kernels: bool) -> None:
    name = result.model if result.stored is None else f"{result.model}, {result.stored}"
    for step, launches in (("decode step", result.decode), ("chunk", result.chunk)):
        gigabytes = launches.num_bytes.total() / 1e9
        print_row(f"{name}: {step}", f"{launches.total:,} launches", f"of tensors of {gigabytes:,.1f} GB")
        for kernel, number in launches.counts.most_common() if kernels else ():
            print_row(f"    {kernel}", f"{number:,}", f"{launches.num_bytes[kernel] / 1e6:,.1f} MB")


def figures(result: Counted) -> dict[str, Any]:
    """For a report."""
    steps = {
        step: {"launches": launches.total, "counts": dict(launches.counts), "num_bytes": dict(launches.num_bytes)}
        for step, launches in (("decode", result.decode), ("chunk", result.chunk))
    }
    return {"model": result.model, "stored": result.stored, "num_layers": result.num_layers, **steps}


def run(args: argparse.Namespace) -> int:
    results = []
    for name in args.model:
        model, _, stored = name.partition(":")
        with open_shape(model, None, "auto", stored=stored or None) as shape:
            results.append(count(shape, args.chunk, args.context))
        show(results[-1], args.kernels)
    write_json(args.output_json, args, machine_facts("cpu"), results=[figures(result) for result in results])
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m benchmarks.launches", description="Launches of a step on a GPU, without one.")
    add = parser.add_argument
    add("--model", nargs="+", default=list(MODELS), help="published names, with a form of storage after a colon")
    add("--chunk", type=positive, default=8192, help="tokens of a prompt's chunk (default: %(default)s)")
    add("--context", type=positive, default=32768, help="tokens after the chunk (default: %(default)s)")
    add("--kernels", action="store_true", help="show each kernel and operator")
    add_json_option(parser)
    return parser.run(argv, run)


if __name__ == "__main__":
    sys.exit(main())
