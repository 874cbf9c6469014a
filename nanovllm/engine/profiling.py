"""What a step needs besides weights and KV cache: one forward pass of the largest batch, on tensors without memory."""

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
from nanovllm.forward_context import ForwardContext, SequenceSlice
from nanovllm.kvcache.sizing import MemoryFacts
from nanovllm.layers import sampler
from nanovllm.models.decoder import Decoder
from nanovllm.ops.attention import AttentionState

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


def measure_memory(device: Device, model: Decoder, config: EngineConfig, layer_major: bool) -> MemoryFacts:
    """Memory as it stands, with the activation peak of the largest batch if anything is sized from memory.

    layer_major: whether prefill may go layer by layer, for which each token's residual stream and id are kept.
    """
    layer_major = layer_major and config.enable_cpu_offload
    sized_from_memory = config.num_gpu_blocks == -1 or (config.enable_cpu_offload and config.num_cpu_blocks == -1)
    return MemoryFacts(
        device_total=device.total_memory(),
        device_free=device.free_memory(),
        host_free=device.free_host_memory(),
        tiers_share_memory=device.torch_device.type == "cpu",
        activation_peak=activation_peak(model, config) if sized_from_memory or layer_major else 0,
        span_row_bytes=model.spec.hidden_size * model.dtype.itemsize + 8 if layer_major else 0,
    )


@torch.inference_mode()
def activation_peak(model: Decoder, config: EngineConfig) -> int:
    """Bytes that a step of max_num_batched_tokens tokens holds at its peak, sampling max_num_seqs of them.

    One layer stands for all, since none keeps activations for the next. What kernels allocate inside is not seen.
    """
    tokens = config.max_num_batched_tokens
    rows = min(config.max_num_seqs, tokens)
    spec = replace(model.spec, num_layers=1, sliding_windows=model.spec.sliding_windows[:1])
    twin = Decoder(spec, model.dtype, _META)
    twin.chunk_rows = model.chunk_rows
    positions = torch.empty(tokens, dtype=torch.int64, device=_META)
    sequence = SequenceSlice(query_start=0, query_len=tokens, context_len=0, block_table=())
    ctx = ForwardContext(positions, positions, (sequence,), _NoKVCache())
    sampled = SamplingRow(temperature=1.0, top_k=1, top_p=0.5, min_p=0.1, seed=0, index=0)
    with _LiveBytes() as counter:
        logits = twin.compute_logits(twin(positions, ctx)[:rows])
        at_once = min(rows, sampler.MAX_ROWS)
        sampler.kept_scores(logits[:at_once], [sampled] * at_once)
    return counter.peak
