"""Attention of CPU cores over host blocks: a side of the engine, see `nanovllm.engine.sides.CpuAttention`."""

from __future__ import annotations

import logging

from nanovllm.kvcache.bandwidth import measure_bandwidths
from nanovllm.kvcache.base import AttentionGeometry
from nanovllm.kvcache.decode_shares import ONE_PROCESSOR, can_attend_concurrently
from nanovllm.kvcache.host_block_attention import BalancedShare, HostBlockAttention, cpu_attention_backend
from nanovllm.kvcache.offload_engine import OffloadEngine
from nanovllm.ops.attention import AttentionBackend

logger = logging.getLogger(__name__)


def make_cpu_attention(
    engine: OffloadEngine,
    head_dim: int,
    layer_weight_bytes: int,
    geometry: AttentionGeometry,
    backend: AttentionBackend,
) -> HostBlockAttention | None:
    """CPU attention for an engine's host blocks; None, with a line in the log, if its kernel cannot take the heads.

    On a device of its own memory, the bandwidths that decide the CPU's share are measured first.
    """
    device = engine.device
    if not (device.shares_host or can_attend_concurrently(head_dim)):
        logger.info("no CPU attention: its kernel takes heads of a multiple of 16, not of %d", head_dim)
        return None
    host_backend = cpu_attention_backend(device, head_dim)
    rates = ONE_PROCESSOR
    if not device.shares_host:
        with device.compute():
            rates = measure_bandwidths(engine, geometry, backend, host_backend)
        gb_s = (rate / 1e9 for rate in (rates.link, rates.host, rates.device))
        logger.info("KV bandwidths in GB/s: link %.1f, CPU attention %.1f, device attention %.1f", *gb_s)
    return HostBlockAttention(engine, geometry, host_backend, BalancedShare(rates, layer_weight_bytes))
