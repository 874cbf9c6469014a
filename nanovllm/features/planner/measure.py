"""What `nanovllm plan` learns with torch: the memory of a step, and the memory and the rates of this machine.

Rates are measured in a few seconds by running parts of the engine on a few layers of the network: the decoder's
layers, the KV caches, the ring and its streams, the attention backend. Every figure is a median, after a first call
that does not count.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from nanovllm.config import EngineConfig
from nanovllm.device import CopyKind, Device, create_device
from nanovllm.features.cpu_attention.host_blocks import cpu_attention_backend
from nanovllm.features.cuda_graphs import graph_bytes
from nanovllm.features.planner.network import Network
from nanovllm.features.planner.predict import Link, Rates
from nanovllm.features.planner.units import show_bytes
from nanovllm.kvcache.base import AttentionGeometry, KVCacheBase
from nanovllm.kvcache.chunked_attention import OffloadedKVCache
from nanovllm.kvcache.offload_engine import BlockTokens, OffloadEngine
from nanovllm.kvcache.paged_cache import PagedKVCache
from nanovllm.layers.forward_context import ForwardContext, KVCache
from nanovllm.layers.parallel import MetaRanks
from nanovllm.layers.row_limits import CPU_CHUNK_ROWS
from nanovllm.memory.budget import DeviceSplit
from nanovllm.memory.fitting import KVSizing
from nanovllm.memory.layout import KVLayout
from nanovllm.memory.profiling import activation_peak, measure_memory
from nanovllm.memory.sizing import MemoryFacts, NoMemoryError
from nanovllm.models.create import create_decoder
from nanovllm.models.decoder import Decoder
from nanovllm.models.loader import fill_with_random_weights
from nanovllm.models.spec import DecoderSpec
from nanovllm.ops import select_backend
from nanovllm.ops.attention import AttentionBackend, AttentionMetadata, SequenceMetadata
from nanovllm.ops.kv_quantization import has_scales, head_dim_of, quantize_rows_torch, stored_dtype
from nanovllm.ops.prefill_libraries import faster_prefill
from nanovllm.ops.timing import attend_once, call_seconds
from nanovllm.ops.upload import upload

Item = TypeVar("Item")

# blocks so small that only the fixed cost of a block read counts
TINY_BLOCK = 16
TINY_BLOCKS = 32
MOST_BLOCKS = 64  # in the measurement of the ring


@dataclass(frozen=True, slots=True)
class ProbeSizes:
    """The sizes of the measurements. The bytes are well above the caches of processors."""

    weight_bytes: int = 256 << 20
    kv_bytes: int = 128 << 20
    keys: int = 8192  # that the rows of a prefill chunk attend to
    rounds: int = 5
    seconds: float = 0.3  # of one figure, after which no further round begins


@dataclass(frozen=True, slots=True)
class Probe:
    """A few layers of a network on a device, with the KV geometry of an engine. `ring_slots` is 0 without offload."""

    device: Device
    model: Decoder
    backend: AttentionBackend
    block_size: int
    ring_slots: int
    chunk: int  # prompt tokens in a step
    sizes: ProbeSizes = ProbeSizes()
    kv_cache_dtype: str = "auto"

    @property
    def layout(self) -> KVLayout:
        return self.network.layout(self.block_size)

    @property
    def group_slots(self) -> int:
        """The most host blocks in a group that the engine loads and attends to together."""
        return DeviceSplit(self.ring_slots, resident_blocks=0).group_slots(self.layout.block_layer_bytes)

    @property
    def network(self) -> Network:
        return Network(self.model.spec, str(self.model.dtype).removeprefix("torch."), self.kv_cache_dtype)

    @property
    def stored_dtype(self) -> torch.dtype:
        """Of KV blocks."""
        return stored_dtype(self.kv_cache_dtype, self.model.dtype)

    @property
    def rows(self) -> int:
        """Rows of a matrix product in prefill."""
        return min(self.chunk, self.model.chunk_rows)

    def cut(self, num_layers: int) -> Probe:
        """The probe with the first layers only, which both share, with full attention."""
        part = copy.copy(self.model)
        part.layers = self.model.layers[:num_layers]
        spec = self.model.spec.of_layers(range(num_layers))
        part.spec = replace(spec, sliding_windows=(None,) * num_layers)
        return replace(self, model=part)

    def seconds(self, work: Callable[[], object]) -> float:
        """Median time of one call."""
        finish = self.device.compute_stream.synchronize
        return statistics.median(call_seconds(work, self.sizes.rounds, finish, self.sizes.seconds))


def probe_layers(network: Network, sizes: ProbeSizes) -> int:
    """Number of layers whose weights together exceed the processor's caches."""
    layer_bytes = network.spec.layer_weight_bytes(network.itemsize, rows=1)
    return min(network.spec.num_layers, math.ceil(sizes.weight_bytes / layer_bytes))


def random_model(spec: DecoderSpec, dtype: torch.dtype, device: Device, sizes: ProbeSizes) -> Decoder:
    """The measured part of the network with random weights, for use without a loaded checkpoint."""
    network = Network(spec, str(dtype).removeprefix("torch."))
    rows = max(1, sizes.weight_bytes // (spec.hidden_size * network.itemsize))
    layers = probe_layers(network, sizes)
    part = replace(
        spec.of_layers(range(layers)),
        sharding=None,
        whole=None,
        layer_shardings=(),
        sliding_windows=(None,) * layers,
        vocab_size=min(spec.vocab_size, rows),
        tie_word_embeddings=True,
    )
    with device.compute():
        decoder = create_decoder(part, dtype, device.torch_device)
        fill_with_random_weights(decoder, seed=0)
        decoder.finish_loading()
    return decoder


@torch.inference_mode()
def measure_rates(probe: Probe) -> Rates:
    """All rates. Only the first layers of `probe.model` are used; see `probe_layers`."""
    with probe.device.compute():
        return _measure(probe.cut(min(len(probe.model.layers), probe_layers(probe.network, probe.sizes))))


def _measure(probe: Probe) -> Rates:
    attention = _prefill_attention(probe)
    device_bandwidth = _decode_attention(probe)
    weights, head = _weights_seconds(probe)
    bare = probe.seconds(lambda: _step(probe.cut(0), None, 1))
    step = _resident_step(probe, 1)
    layers = probe.network.spec.num_layers
    rates = Rates(
        attention=attention,
        device_bandwidth=device_bandwidth,
        weight_bandwidth=layers * probe.network.spec.layer_matrix_bytes(probe.network.itemsize, rows=1) / weights,
        head_bandwidth=probe.network.spec.head_bytes(probe.network.itemsize) / head,
        step_seconds=max(0.0, bare - head),
        layer_seconds=max(0.0, (step - bare - weights) / layers),
    )
    rates = replace(rates, compute=_compute(probe.cut(1), rates))
    return _ring(probe, rates, step) if probe.ring_slots else rates


# ---- the device


def _compute(probe: Probe, rates: Rates) -> float:
    """Operations per second of one layer on a chunk's rows, without attention and fixed costs."""
    rows = probe.rows
    network = probe.network
    step = _resident_step(probe, rows)
    bare = probe.seconds(lambda: _step(probe.cut(0), None, rows))
    assert rates.attention is not None
    others = bare + rates.layer_seconds + network.attention_operations(0, rows) / rates.attention
    # The lower bound is for a network so small that noise exceeds the difference.
    return network.matrix_operations(rows) / max(step - others, step / 10)


def _weights_seconds(probe: Probe) -> tuple[float, float]:
    """Time of all products of the layers on one row, and of the output projection."""
    model = probe.model
    spec = probe.model.spec
    widths = {spec.hidden_size, *(layer.o.in_features for layer in model.layers)}
    by_width = {width: torch.ones(1, width, dtype=model.dtype, device=model.device) for width in widths}

    def layers() -> None:
        for layer in model.layers:
            layer.qkv(by_width[spec.hidden_size])
            layer.o(by_width[layer.o.in_features])
            layer.mlp(by_width[spec.hidden_size])

    return probe.seconds(layers), probe.seconds(lambda: model.compute_logits(by_width[spec.hidden_size]))


def _prefill_attention(probe: Probe) -> float:
    """Operations per second of a chunk's rows on earlier keys, in the groups in which the KV cache attends."""
    keys = max(probe.rows, probe.sizes.keys)
    seconds = _attention_seconds(probe, probe.rows, keys, in_ring_groups=probe.ring_slots > 0)
    return probe.cut(1).network.attention_operations(keys - probe.rows, probe.rows) / seconds


def _decode_attention(probe: Probe) -> float:
    """Bytes of KV cache per second that one row reads."""
    token_bytes = probe.layout.token_layer_bytes
    keys = max(1, min(4 * probe.sizes.keys, probe.sizes.kv_bytes // token_bytes))
    return keys * token_bytes / _attention_seconds(probe, 1, keys, in_ring_groups=False)


def _attention_seconds(probe: Probe, rows: int, keys: int, *, in_ring_groups: bool) -> float:
    """Attention of the last `rows` of `keys` positions in one layer."""
    layout = probe.layout.widest
    model = probe.model
    blocks = range(-(-keys // layout.block_size))
    pool = _written(probe.device.empty("measured KV blocks", (len(blocks), *layout.block_shape), probe.stored_dtype))
    q = torch.randn(rows, model.spec.num_heads, layout.head_dim, device=model.device).to(model.dtype)

    def metadata(group: Sequence[int]) -> AttentionMetadata:
        first = group[0] * layout.block_size
        end = min(keys, first + len(group) * layout.block_size)
        return AttentionMetadata([SequenceMetadata(0, rows, keys - rows, first, end, group)])

    groups = [metadata(group) for group in (in_groups(blocks, probe.group_slots) if in_ring_groups else [blocks])]
    return probe.seconds(lambda: attend_once(probe.backend, q, pool, groups))


def _resident_step(probe: Probe, rows: int) -> float:
    """A step of `rows` first tokens with all KV on the device. With one row, it samples a token."""
    blocks = -(-rows // probe.block_size)
    if probe.ring_slots:
        kv_cache: KVCacheBase = _offloaded_cache(probe, probe.layout, resident_blocks=blocks, host_blocks=0)
    else:
        geometry = _geometry(probe)
        kv_cache = PagedKVCache(probe.device, probe.layout, probe.stored_dtype, geometry, probe.backend, blocks)
    return probe.seconds(lambda: _step(probe, kv_cache, rows, range(blocks)))


def _step(
    probe: Probe, kv_cache: KVCacheBase | None, rows: int, table: Sequence[int] = (), context_len: int = 0
) -> None:
    """A forward pass as the model runner makes it. Without layers, `kv_cache` may be None."""
    model = probe.model
    ctx = _context(probe, kv_cache or _NoKVCache(), SequenceMetadata.full(0, rows, context_len, table))
    if kv_cache is not None:
        kv_cache.begin_step(ctx.sequences, ())
    hidden = model(torch.zeros(rows, dtype=torch.int64, device=model.device), ctx)
    if rows == 1:
        model.compute_logits(hidden).argmax(dim=-1).tolist()


def _context(probe: Probe, kv_cache: KVCache, sequence: SequenceMetadata) -> ForwardContext:
    positions = upload(sequence.positions(), probe.model.device)
    return ForwardContext(positions, (sequence,), kv_cache)


class _NoKVCache:
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, ctx: ForwardContext) -> Tensor:
        raise AssertionError("a model without layers does not attend")


# ---- the ring


def _ring(probe: Probe, rates: Rates, resident_step: float) -> Rates:
    """The rates with `block_read_seconds`, `link` and `host_bandwidth`."""
    layout = probe.layout
    read = _block_read_seconds(probe.cut(1))
    blocks = min(MOST_BLOCKS, max(2, probe.sizes.kv_bytes // layout.block_bytes))
    kv_cache = _offloaded_cache(probe, layout, resident_blocks=0, host_blocks=blocks)
    moved = blocks * layout.block_bytes
    loads = probe.seconds(lambda: _copy_all(kv_cache.engine, "h2d"))
    stores = probe.seconds(lambda: _copy_all(kv_cache.engine, "d2h"))
    host = moved / _host_attention_seconds(probe, kv_cache.engine)
    context_len = blocks * layout.block_size - 1
    step = probe.seconds(lambda: _step(probe, kv_cache, 1, range(blocks), context_len))
    assert rates.device_bandwidth is not None
    computing = resident_step + moved / rates.device_bandwidth
    overlapped = step - layout.num_layers * blocks * read
    duplex = probe.device.torch_device.type != "cpu"
    link = Link(h2d=moved / loads, d2h=moved / stores, duplex=duplex)
    link = link_during_computation(link, moved, computing, overlapped)
    return replace(rates, block_read_seconds=read, link=link, host_bandwidth=host)


def link_during_computation(link: Link, moved: int, computing: float, measured: float) -> Link:
    """The effective link, if copying `moved` bytes during `computing` seconds of work took `measured` seconds.

    `overlap` is the hidden share of the shorter of the two. If they took longer than one after the other, the overlap
    is 0 and the link is slower than alone.
    """
    copying = moved / link.h2d
    if measured <= computing + copying:
        shorter = min(computing, copying)
        return replace(link, overlap=min(1.0, (computing + copying - measured) / shorter))
    slower = copying / (measured - computing)
    return replace(link, h2d=link.h2d * slower, d2h=link.d2h * slower, overlap=0.0)


def _copy_all(engine: OffloadEngine, way: CopyKind) -> None:
    """Load or store every block of the host pool through the ring once."""
    layout = engine.layout
    tokens = engine.layout.block_size
    stored, new = (tokens, 0) if way == "h2d" else (0, tokens)
    first = engine.split.resident_blocks
    blocks = [BlockTokens(block, stored, new) for block in range(first, first + engine.num_host_blocks)]
    in_ring = in_groups(blocks, engine.group_slots)
    groups = [(layer, uses) for layer in range(layout.num_layers) for uses in in_ring]
    engine.begin(groups)
    for layer, uses in groups:
        engine.acquire(layer, uses[0].physical_id)
        if way == "d2h":
            engine.store()
        engine.release()
    engine.synchronize()


def in_groups(items: Sequence[Item], group_slots: int) -> list[Sequence[Item]]:
    """Consecutive items in groups of `group_slots`; the last group may be shorter."""
    return [items[first : first + group_slots] for first in range(0, len(items), group_slots)]


def _host_attention_seconds(probe: Probe, engine: OffloadEngine) -> float:
    """CPU attention of one row to all layers of the host pool."""
    layout = engine.layout
    backend = cpu_attention_backend(engine.device, engine.layout.head_dim)
    keys = engine.num_host_blocks * layout.block_size
    table = AttentionMetadata([SequenceMetadata(0, 1, keys - 1, 0, keys, range(engine.num_host_blocks))])
    q = torch.randn(1, probe.model.spec.num_heads, layout.head_dim).to(probe.model.dtype)

    def attend() -> None:
        for layer in range(layout.num_layers):
            attend_once(backend, q, engine.host[:, layer], [table])

    return probe.seconds(attend)


def _block_read_seconds(probe: Probe) -> float:
    """Fixed cost of the read of one block."""
    kv_cache = _offloaded_cache(probe, replace(probe.layout, block_size=TINY_BLOCK), 0, TINY_BLOCKS)
    context_len = TINY_BLOCKS * TINY_BLOCK - 1
    spec = probe.model.spec
    model = probe.model
    ctx = _context(probe, kv_cache, SequenceMetadata.full(0, 1, context_len, range(TINY_BLOCKS)))
    q, k, v = (
        torch.ones(1, heads, spec.head_dim, dtype=model.dtype, device=model.device)
        for heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    )

    def attend() -> None:
        kv_cache.begin_step(ctx.sequences, ())
        kv_cache.attend(0, q, k, v, ctx)

    return probe.seconds(attend) / TINY_BLOCKS


def _offloaded_cache(probe: Probe, layout: KVLayout, resident_blocks: int, host_blocks: int) -> OffloadedKVCache:
    split = DeviceSplit(probe.ring_slots, resident_blocks)
    groups = probe.group_slots  # as in the engine, though the blocks may be smaller here
    engine = OffloadEngine(probe.device, layout, probe.stored_dtype, split, host_blocks, group_slots=groups)
    for memory in (engine.resident, engine.ring, engine.host):
        _written(memory)
    return OffloadedKVCache(engine, _geometry(probe), probe.backend, 0)


def _written(memory: Tensor) -> Tensor:
    """The memory, filled. Memory that was never written would be read as one cached page of zeros."""
    some = torch.randn(*memory[:1].shape[:-1], head_dim_of(memory), device=memory.device)
    return memory.copy_(quantize_rows_torch(some, memory.dtype) if has_scales(memory.dtype) else some)


def _geometry(probe: Probe) -> AttentionGeometry:
    spec = probe.model.spec
    return AttentionGeometry(spec.attention_scale, spec.num_heads, probe.model.dtype)


# ---- this machine


def activation_peak_on_gpu(network: Network, config: EngineConfig) -> int:
    """Counted on meta tensors; see `memory.profiling.activation_peak`."""
    return activation_peak(_meta_decoder(replace(network, spec=network.spec.one_of_each_kind())), config)


@contextmanager
def local_machine(network: Network) -> Iterator[LocalMachine]:
    with closing(create_device(None)) as device:
        yield LocalMachine(network, device)


class LocalMachine:
    """The memory and the rates of the device that an engine on this machine would choose."""

    def __init__(self, network: Network, device: Device) -> None:
        self._network = network
        self._device = device
        dtype: torch.dtype = getattr(torch, network.dtype)
        stored = stored_dtype(network.kv_cache_dtype, dtype)
        self._dtype = dtype
        self._backend: AttentionBackend = select_backend(device.torch_device, network.spec.hardest_head_dim, stored)

    def memory(self, config: EngineConfig) -> MemoryFacts:
        """Memory as it will be after loading the weights. A GPU runs a layer of each kind, the CPU none."""
        network = self._network
        device = self._device
        weights = network.weight_bytes * (network.num_ranks if device.shares_host else 1)
        if weights > (free := device.free_memory()):
            raise NoMemoryError(f"the weights take {show_bytes(weights)}, and this machine has {show_bytes(free)} free")
        if device.torch_device.type == "cpu":
            model = _meta_decoder(network)
            model.chunk_rows = CPU_CHUNK_ROWS
            return self._measure(model, config, weights)
        spec = network.spec.one_of_each_kind()
        with device.compute():
            model = create_decoder(spec, self._dtype, device.torch_device)
            fill_with_random_weights(model, seed=0)
        to_load = network.weight_bytes - Network(spec, network.dtype).weight_bytes
        return self._measure(model, config, to_load)

    def _measure(self, model: Decoder, config: EngineConfig, to_load: int) -> MemoryFacts:
        backend = self._backend_for(model, config)
        graphs = partial(graph_bytes, self._device, model, backend, config)
        return measure_memory(self._device, model, backend, config, to_load, graphs)

    def _backend_for(self, model: Decoder, config: EngineConfig) -> AttentionBackend:
        shapes = model.spec.unwindowed_heads
        rows = config.max_num_batched_tokens
        return faster_prefill(self._backend, self._device.torch_device, shapes, self._dtype, rows)

    def rates(self, sizing: KVSizing) -> Rates:
        """Those of one rank, measured in a few seconds."""
        network = self._network
        device = self._device
        sizes = ProbeSizes()
        model = random_model(network.spec, self._dtype, device, sizes)
        ring_slots = sizing.plan().split.ring_slots
        block_size = sizing.layout.block_size
        chunk = sizing.config.max_num_batched_tokens
        stored = network.kv_cache_dtype
        probe = Probe(
            device, model, self._backend_for(model, sizing.config), block_size, ring_slots, chunk, sizes, stored
        )
        return _of_a_rank(measure_rates(probe), network.num_ranks, device.shares_host)


def _meta_decoder(network: Network) -> Decoder:
    group = MetaRanks(0, network.num_ranks) if network.num_ranks > 1 else None
    return create_decoder(network.spec, getattr(torch, network.dtype), torch.device("meta"), group)


def _of_a_rank(rates: Rates, num_ranks: int, shares_host: bool) -> Rates:
    """The rates of one rank of this machine, of whose cores and host memory each has its share; a GPU is its own."""
    names = ["host_bandwidth"]
    if shares_host:
        names += ["compute", "attention", "weight_bandwidth", "head_bandwidth", "device_bandwidth"]
    found = {name: getattr(rates, name) for name in names}
    shared = {name: rate / num_ranks for name, rate in found.items() if rate is not None}
    link = rates.link
    if shares_host and link is not None:
        link = replace(link, h2d=link.h2d / num_ranks, d2h=link.d2h / num_ranks)
    return replace(rates, **shared, link=link)
