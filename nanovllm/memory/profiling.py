"""The memory that a step needs besides weights and KV cache: that of one forward pass of the largest batch.

A device whose allocator reports its peak runs that pass. Elsewhere the pass runs on torch's meta device, where the
bytes of living tensors are counted: 16,384 tokens on a CPU would take minutes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nanovllm.config import EngineConfig
from nanovllm.data.batch import SamplingRow
from nanovllm.data.network import RecurrentSpec
from nanovllm.device import Device
from nanovllm.layers import sampler
from nanovllm.layers.causal_lm import CausalLM
from nanovllm.layers.forward_context import ForwardContext, KVCache
from nanovllm.layers.row_limits import LOGPROB_ROWS
from nanovllm.memory.layerwise import layerwise_token_bytes
from nanovllm.memory.layout import layout_of, of_rank
from nanovllm.memory.sizing import MemoryFacts, check_step_fits, needs_activation_peak, sized_from_memory
from nanovllm.ops import is_chunk_invariant
from nanovllm.ops.attention import AttentionBackend, AttentionMetadata, AttentionState, SequenceMetadata
from nanovllm.ops.backends import peak_context
from nanovllm.ops.kv_quantization import stored_dtype


class ScratchKVCache:
    """A KV cache of a single block, used as every block of one sequence with max_num_batched_tokens new tokens."""

    def __init__(self, model: CausalLM, backend: AttentionBackend, config: EngineConfig) -> None:
        tokens = config.max_num_batched_tokens
        layout = of_rank(layout_of(config, model.network), model.network)
        self._backend = backend
        self._scale = model.network.attention_scale
        self._groups = layout.groups
        dtype = stored_dtype(config.kv_cache_dtype, model.dtype)
        self._pools = layout.views(torch.zeros(1, *layout.block_shape, dtype=dtype, device=model.device))
        self._tables = []
        for group in layout.groups:
            context = peak_context(backend) if group.window is None else 0
            blocks = [0] * group.num_blocks(context + tokens)
            self._tables.append(AttentionMetadata([SequenceMetadata.full(0, tokens, context, blocks)]))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, ctx: ForwardContext) -> Tensor:
        """See `forward_context.KVCache`; does not store k and v."""
        state = AttentionState.empty(q)
        group = self._groups.of_layer[layer][0]
        window = self._groups[group].window
        self._backend.attend(q, self._pools[group], self._tables[group], state, self._scale, window)
        return q.copy_(state.out)


class ScratchStates:
    """One state slot for every recurrent layer. Implements `layers.forward_context.StepStates`."""

    def __init__(self, model: CausalLM, recurrent: RecurrentSpec) -> None:
        self.slots = torch.zeros(1, dtype=torch.int64, device=model.device)
        self.kept = None
        self._conv = torch.zeros(1, *recurrent.conv_shape, dtype=model.dtype, device=model.device)
        self._state = torch.zeros(1, *recurrent.state_shape, device=model.device)

    def of_layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """See `StepStates`."""
        return self._conv, self._state


class _NoKVCache:
    """Allocates what attention allocates for each query row, and stores nothing."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, ctx: ForwardContext) -> Tensor:
        return q.copy_(AttentionState.empty(q).out)


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of referenced tensors that operators made, and keeps the peak."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._references: dict[int, int] = {}  # storage -> tensors on it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._track(tensor)
        return result

    def _track(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        size = storage.nbytes()
        if key not in self._references:
            self._references[key] = 0
            self.live += size
            self.peak = max(self.peak, self.live)
        self._references[key] += 1
        weakref.finalize(tensor, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self._references[key] -= 1
        if not self._references[key]:
            del self._references[key]
            self.live -= size


def measure_memory(
    device: Device,
    model: CausalLM,
    backend: AttentionBackend,
    config: EngineConfig,
    to_load: int = 0,
    graph_bytes: Callable[[], int] = lambda: 0,
) -> MemoryFacts:
    """The memory that there is, with what the largest batch and graphs will take if anything is sized from memory.

    to_load: bytes of weights still to be loaded, if `model` is only a stand-in for the model that will run.
    graph_bytes: what CUDA graphs will take.
    """
    check_step_fits(model.network, config, device.free_memory() - to_load)
    # Before free memory is read: kernels and libraries that this pass loads stay loaded.
    if sized_from_memory(config):
        peak = _peak(device, model, backend, config) + graph_bytes()
    else:
        peak = activation_peak(model, config) if needs_activation_peak(config) else 0
    shared = device.torch_device.type == "cpu"
    token_bytes = layerwise_token_bytes(model.network, config)
    return MemoryFacts(
        device_total=device.total_memory(),
        device_free=device.free_memory() - to_load,
        host_free=device.free_host_memory() - (to_load if shared else 0),
        tiers_share_memory=shared,
        activation_peak=peak,
        host_may_grow=device.host_memory_may_grow,
        # With a backend whose bits depend on the chunks, outputs would depend on the order that memory allows.
        layerwise_token_bytes=token_bytes if is_chunk_invariant(backend) else 0,
        streamed_bytes=0 if model.layer_weights is None else model.layer_weights.streamed_bytes,
    )


def _peak(device: Device, model: CausalLM, backend: AttentionBackend, config: EngineConfig) -> int:
    def run() -> None:
        largest_step(model, ScratchKVCache(model, backend, config), config)

    measured = device.peak_memory(run)
    return activation_peak(model, config) if measured is None else measured


@torch.inference_mode()
def activation_peak(model: CausalLM, config: EngineConfig) -> int:
    """Bytes that a step of max_num_batched_tokens tokens holds at its peak, sampling for max_num_seqs of them.

    Measured on a model of one layer of each kind, since a layer keeps no activations for the next. What kernels
    allocate themselves is not counted.
    """
    twin = model.one_of_each_kind()
    with _LiveBytes() as counter:
        largest_step(twin, _NoKVCache(), config)
    return counter.peak


@torch.inference_mode()
def largest_step(model: CausalLM, kv_cache: KVCache, config: EngineConfig) -> None:
    """Run one prefill of max_num_batched_tokens tokens, with prompt log-probabilities and max_num_seqs samples."""
    tokens = config.max_num_batched_tokens
    rows = min(config.max_num_seqs + config.num_speculative_tokens, tokens)
    zeros = torch.zeros(tokens, dtype=torch.int64, device=model.device)  # token ids and positions
    sequence = SequenceMetadata.full(query_start=0, query_len=tokens, context_len=0, block_table=())
    recurrent = model.network.recurrent
    states = None if recurrent is None else ScratchStates(model, recurrent)
    hidden = model(zeros, ForwardContext(zeros, (sequence,), kv_cache, states=states))
    prompt_logits = model.compute_logits(hidden[:LOGPROB_ROWS])
    if model.has_logits:
        _score(prompt_logits, config.max_logprobs)
    del prompt_logits
    logits = model.compute_logits(hidden[:rows])
    if not model.has_logits:
        return
    _score(logits[:LOGPROB_ROWS].clone(), config.max_logprobs)
    _draw(logits[: sampler.rows_at_once(model.vocab_size, model.device)])


def _score(logits: Tensor, max_logprobs: int) -> None:
    """Compute log-probabilities with as many of the most likely tokens as a request may ask for."""
    rows, vocab_size = logits.shape
    token_ids = torch.zeros(rows, dtype=torch.int64, device=logits.device)
    logprobs, _, _ = sampler.chosen_logprobs(logits, token_ids)
    logprobs.topk(vocab_size if max_logprobs == -1 else min(max_logprobs, vocab_size), dim=-1)


def _draw(logits: Tensor) -> None:
    """Draw in both ways, from all tokens, as with a top_p just below 1."""
    rows = [SamplingRow(top_p=0.5, min_p=0.1, seed=0, index=0)] * logits.shape[0]
    scores, tokens, _ = sampler.kept_in_order(logits.clone(), rows, logits.shape[1])
    torch.argmax(scores + sampler.gumbel_noise(rows, tokens), dim=-1)
    del scores, tokens
    sampler.draw_from_all(logits.clone(), rows)
