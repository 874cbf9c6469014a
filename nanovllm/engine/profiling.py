"""What a step needs besides weights and KV cache, found out by running one."""

from __future__ import annotations

import torch
from torch import Tensor

from nanovllm.config import EngineConfig
from nanovllm.device import Device
from nanovllm.forward_context import ForwardContext, SequenceSlice
from nanovllm.kvcache.sizing import MemoryFacts
from nanovllm.models.decoder import Decoder
from nanovllm.ops.attention import AttentionState

_CPU_PROFILE_TOKENS = 512  # activations grow with the tokens; the largest batch would take long on a CPU


class _NoKVCache:
    """Takes what attention takes per query row, and keeps nothing."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, ctx: ForwardContext) -> Tensor:
        return AttentionState.empty(q).out.to(q.dtype)


def measure_memory(device: Device, model: Decoder, config: EngineConfig) -> MemoryFacts:
    """Memory as it stands, with the activation peak of the largest batch if a tier is sized from memory."""
    sized_from_memory = config.num_gpu_blocks == -1 or (config.enable_cpu_offload and config.num_cpu_blocks == -1)
    return MemoryFacts(
        device_total=device.total_memory(),
        device_free=device.free_memory(),
        host_free=device.free_host_memory(),
        tiers_share_memory=device.torch_device.type == "cpu",
        activation_peak=_activation_peak(device, model, config) if sized_from_memory else 0,
    )


def _activation_peak(device: Device, model: Decoder, config: EngineConfig) -> int:
    tokens = config.max_num_batched_tokens
    on_cpu = device.torch_device.type == "cpu"
    profiled = min(tokens, _CPU_PROFILE_TOKENS) if on_cpu else tokens
    peak = device.peak_memory_of(lambda: _forward(device, model, profiled, min(config.max_num_seqs, profiled)))
    return peak * -(-tokens // profiled)


@torch.inference_mode()
def _forward(device: Device, model: Decoder, tokens: int, sampled_rows: int) -> None:
    positions = torch.arange(tokens, device=device.torch_device)
    sequence = SequenceSlice(query_start=0, query_len=tokens, context_len=0, block_table=())
    ctx = ForwardContext(positions, positions + 1, (sequence,), _NoKVCache())
    hidden = model(torch.zeros(tokens, dtype=torch.int64, device=device.torch_device), ctx)
    model.compute_logits(hidden[:sampled_rows]).float().softmax(dim=-1)
