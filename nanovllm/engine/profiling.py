"""What a step needs besides weights and KV cache: one forward pass of the largest batch.

A device that knows its allocator's peak runs it; elsewhere it runs on tensors without memory, whose bytes are counted.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nanovllm.config import EngineConfig
from nanovllm.device import Device
from nanovllm.engine.batch import SamplingRow
from nanovllm.engine.decode_graphs import graph_bytes
from nanovllm.engine.scratch_attention import ScratchKVCache
from nanovllm.forward_context import ForwardContext, KVCache, SequenceMetadata
from nanovllm.kvcache.sizing import MemoryFacts
from nanovllm.layers import logprobs, sampler
from nanovllm.memory_checks import check_fits
from nanovllm.models.decoder import Decoder
from nanovllm.ops import is_chunk_invariant
from nanovllm.ops.attention import AttentionBackend, AttentionState

_META = torch.device("meta")


class _NoKVCache:
    """Takes what attention takes per query row, and keeps nothing."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, ctx: ForwardContext) -> Tensor:
        return AttentionState.empty(q).output(q)


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that operators made and that are still referenced, and remembers the peak."""

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
        key, size = storage._cdata, storage.nbytes()
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
    device: Device, model: Decoder, backend: AttentionBackend, config: EngineConfig, to_load: int = 0
) -> MemoryFacts:
    """Memory as it stands, with what the largest batch and graphs will take if anything is sized from memory.

    to_load: bytes of weights that are still to come, where `model` only stands for the one that will run.
    """
    check_step_fits(model, config, device.free_memory() - to_load)
    # First of all: kernels and libraries that the run loads stay, and are no longer free.
    if sized_from_memory(config):
        peak = _peak(device, model, backend, config) + graph_bytes(device, model, backend, config)
    else:
        peak = step_bytes(model, config)
    shared = device.torch_device.type == "cpu"
    return MemoryFacts(
        device_total=device.total_memory(),
        device_free=device.free_memory() - to_load,
        host_free=device.free_host_memory() - (to_load if shared else 0),
        tiers_share_memory=shared,
        activation_peak=peak,
        host_may_grow=device.host_memory_may_grow,
        layerwise_token_bytes=layerwise_token_bytes(model, backend, config),
    )


def check_step_fits(model: Decoder, config: EngineConfig, free: int) -> None:
    """Refuse sizes of which the largest step alone takes more than is `free` beside the weights.

    Asked before that step is run to measure it. Raises ConfigError.
    """
    tokens, seqs = config.max_num_batched_tokens, config.max_num_seqs
    if not sized_from_memory(config):  # no step has more than all blocks hold
        blocks = config.num_gpu_blocks + max(config.num_cpu_blocks, 0)
        tokens, seqs = min(tokens, blocks * config.block_size), min(seqs, blocks)
    what = f"max_num_batched_tokens={config.max_num_batched_tokens}, max_num_seqs={config.max_num_seqs}: a step takes"
    check_fits(what, least_step_bytes(model, tokens, seqs), free, "beside the weights the device has", "lower them")


def least_step_bytes(model: Decoder, tokens: int, seqs: int) -> int:
    """Less than a step of so many tokens takes, sampling for so many sequences, in whole numbers.

    For each token the residual stream, what it attends with and to, and its ids; for each sequence its logits.
    """
    spec = model.spec
    row = (spec.hidden_size + spec.q_size + 2 * spec.kv_size) * model.dtype.itemsize + 2 * torch.int64.itemsize
    return tokens * row + min(seqs, tokens) * spec.vocab_size * torch.float32.itemsize


def sized_from_memory(config: EngineConfig) -> bool:
    """Whether the blocks of either tier follow from the memory there is."""
    return config.num_gpu_blocks == -1 or (config.enable_cpu_offload and config.num_cpu_blocks == -1)


def step_bytes(model: Decoder, config: EngineConfig) -> int:
    """The activation peak of the largest batch if a tier, or memory for spans, is sized from memory, else 0."""
    return activation_peak(model, config) if sized_from_memory(config) or config.enable_cpu_offload else 0


def layerwise_token_bytes(model: Decoder, backend: AttentionBackend, config: EngineConfig) -> int:
    """What layer-major prefill keeps for each token, its residual stream and id; 0 where all prefill is chunk-major.

    With a backend whose bits depend on the chunks, answers would depend on which way the memory allows.
    """
    if not config.enable_cpu_offload or not is_chunk_invariant(backend):
        return 0
    return model.spec.hidden_size * model.dtype.itemsize + torch.int64.itemsize


def _peak(device: Device, model: Decoder, backend: AttentionBackend, config: EngineConfig) -> int:
    def run() -> None:
        largest_step(model, ScratchKVCache(model, backend, config), config)

    measured = device.peak_memory(run)
    return activation_peak(model, config) if measured is None else measured


@torch.inference_mode()
def activation_peak(model: Decoder, config: EngineConfig) -> int:
    """Bytes that a step of max_num_batched_tokens tokens holds at its peak, sampling max_num_seqs of them.

    One layer stands for all, since none keeps activations for the next. What kernels allocate inside is not seen.
    """
    spec = replace(model.spec, num_layers=1, sliding_windows=model.spec.sliding_windows[:1])
    twin = Decoder(spec, model.dtype, _META)
    twin.chunk_rows = model.chunk_rows
    with _LiveBytes() as counter:
        largest_step(twin, _NoKVCache(), config)
    return counter.peak


@torch.inference_mode()
def largest_step(model: Decoder, kv_cache: KVCache, config: EngineConfig) -> None:
    """One prefill of max_num_batched_tokens tokens, scored, with sampling for max_num_seqs of them."""
    tokens = config.max_num_batched_tokens
    rows = min(config.max_num_seqs, tokens)
    zeros = torch.zeros(tokens, dtype=torch.int64, device=model.device)  # token ids and positions
    sequence = SequenceMetadata(query_start=0, query_len=tokens, context_len=0, block_table=())
    hidden = model(zeros, ForwardContext(zeros, zeros, (sequence,), kv_cache))
    _score(model.compute_logits(hidden[: logprobs.MAX_ROWS]), config.max_logprobs)  # of a prompt
    logits = model.compute_logits(hidden[:rows])
    _score(logits[: logprobs.MAX_ROWS].clone(), config.max_logprobs)
    _draw(logits[: sampler.rows_at_once(model.spec.vocab_size, model.device)])


def _score(logits: Tensor, max_logprobs: int) -> None:
    """Log-probabilities with as many of the most likely tokens as a request may ask for."""
    rows, vocab_size = logits.shape
    token_ids = torch.zeros(rows, dtype=torch.int64, device=logits.device)
    found, _, _ = logprobs.chosen_logprobs(logits, token_ids)
    found.topk(vocab_size if max_logprobs == -1 else min(max_logprobs, vocab_size), dim=-1)


def _draw(logits: Tensor) -> None:
    """Both ways of drawing a row, with nothing cut off, as with a top_p just below 1."""
    rows = [SamplingRow(temperature=1.0, top_k=0, top_p=0.5, min_p=0.1, seed=0, index=0)] * logits.shape[0]
    scores, tokens, _ = sampler.kept_in_order(logits.clone(), rows, logits.shape[1])
    torch.argmax(scores + sampler.gumbel_noise(rows, tokens), dim=-1)
    del scores, tokens
    sampler.draw_from_all(logits.clone(), rows)
