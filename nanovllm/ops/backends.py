"""The choice of the attention backend by device and head size; on a GPU only after a check against fp64."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch

from nanovllm.errors import ConfigError
from nanovllm.ops.attention import (
    MAX_DECODE_ROWS,
    AttentionBackend,
    AttentionMetadata,
    AttentionState,
    RowAttention,
    SequenceMetadata,
)
from nanovllm.ops.cpu_attention import NativeAttention, supports_head_dim
from nanovllm.ops.cpu_kernels import dtype_name
from nanovllm.ops.flash_attention import FlashAttention, flash_kernels
from nanovllm.ops.kv_quantization import SCALE_BYTES, dequantize_rows, has_scales, quantize_rows_torch
from nanovllm.ops.reference_attention import reference_attention
from nanovllm.ops.segment_attention import SegmentAttention
from nanovllm.ops.torch_attention import TorchAttention
from nanovllm.ops.triton_support import triton_runs

logger = logging.getLogger(__name__)

CHECK_BOUND = 2e-2  # largest error of output and LSE against fp64, for bf16 inputs of size 1


def select_backend(
    torch_device: torch.device, head_dim: int, kv_dtype: torch.dtype = torch.bfloat16
) -> AttentionBackend:
    """The backend for a device and KV blocks of kv_dtype. Raises ConfigError if none computes correct results."""
    if torch_device.type == "cpu":
        return select_cpu_backend(head_dim)
    backends = cuda_backends(torch_device, head_dim, kv_dtype)
    return first_right(backends, torch_device, head_dim, kv_dtype)


def select_cpu_backend(head_dim: int, num_threads: int | None = None) -> AttentionBackend:
    """The C++ kernel, or torch's operator for head sizes that the kernel does not support.

    num_threads: threads of the kernel, by default torch's number. The operator always uses torch's number.
    """
    return NativeAttention(num_threads) if supports_head_dim(head_dim) else TorchAttention()


def is_chunk_invariant(backend: AttentionBackend) -> bool:
    """Whether the bits of a row do not depend on the chunking of a prompt. torch's operator sums by the chunk shape."""
    return not isinstance(backend, TorchAttention)


def row_attention(backend: AttentionBackend) -> RowAttention | None:
    """The part of `backend` that attends single query rows, if a graph can record it."""
    if isinstance(backend, FlashAttention | SegmentAttention):
        return None if backend.other is None else row_attention(backend.other)
    return backend if isinstance(backend, RowAttention) else None


def peak_context(backend: AttentionBackend) -> int:
    """Tokens before a chunk with which attention to it takes the most memory."""
    return backend.most_parts * backend.segment if isinstance(backend, SegmentAttention) else 0


def cuda_backends(
    device: torch.device, head_dim: int, kv_dtype: torch.dtype = torch.bfloat16
) -> list[AttentionBackend]:
    """The available backends on a CUDA device for KV blocks of kv_dtype, the preferred one first.

    Raises ConfigError for 8-bit blocks that no backend reads: the libraries know no scale for each token.
    """
    own: AttentionBackend | None = None
    if triton_runs():
        from nanovllm.ops.triton_attention import TritonAttention

        own = TritonAttention()
    if has_scales(kv_dtype):
        if own is None or head_dim % SCALE_BYTES:
            raise ConfigError(
                f"kv_cache_dtype={dtype_name(kv_dtype)!r}: on a GPU only the Triton kernels read 8-bit KV, and head_dim"
                f" must be a multiple of {SCALE_BYTES}: Triton {'runs' if own else 'does not run'} here and head_dim is"
                f" {head_dim}, so use kv_cache_dtype='auto'"
            )
        return [own]
    backends: list[AttentionBackend] = [
        FlashAttention(name, kernel, own) for name, kernel in flash_kernels(device, head_dim).items()
    ]
    # Triton comes first, because the libraries merge block by block. `prefill_libraries` adds libraries for segments.
    return backends if own is None else [own, *backends]


def first_right(
    backends: Iterable[AttentionBackend], device: torch.device, head_dim: int, kv_dtype: torch.dtype = torch.bfloat16
) -> AttentionBackend:
    """The first backend that agrees with the reference; a warning names each rejected backend."""
    tried = []
    for backend in backends:
        try:
            difference = difference_from_reference(backend, device, head_dim, kv_dtype)
        except Exception as error:  # a library built for another torch or GPU may fail in any way
            logger.warning("attention backend %s is not used because it fails: %s", backend.name, error)
        else:
            if difference <= CHECK_BOUND:
                return backend
            logger.warning("attention backend %s is not used because its error is %g", backend.name, difference)
        tried.append(backend.name)
    raise ConfigError(
        f"device={str(device)!r}: no attention backend works for heads of {head_dim}"
        f" (tried: {', '.join(tried) or 'none is installed'}); install Triton, or use device='cpu'"
    )


def difference_from_reference(
    backend: AttentionBackend, device: torch.device, head_dim: int, kv_dtype: torch.dtype = torch.bfloat16
) -> float:
    """Largest error of output or LSE in prefill, of complete and partial blocks, and decode; NaN counts as infinite."""
    block_size = 64
    heads = 4
    kv_heads = 2
    scale = head_dim**-0.5
    many = MAX_DECODE_ROWS + 9
    whole = 2 * block_size
    sequences = (
        SequenceMetadata(0, many, 40, 0, many + 40, (2, 0)),
        SequenceMetadata(many, 1, 99, 0, 100, (1, 3)),
        SequenceMetadata(many + 1, whole, block_size, 0, block_size + whole, (3, 1, 2)),
    )
    generator = torch.Generator().manual_seed(0)
    pool = torch.randn(4, 2, kv_heads, block_size, head_dim, generator=generator).to(device, torch.bfloat16)
    q = torch.randn(many + 1 + whole, heads, head_dim, generator=generator).to(device, torch.bfloat16)
    state = AttentionState.empty(q)
    stored = quantize_rows_torch(pool, kv_dtype) if has_scales(kv_dtype) else pool
    pool = dequantize_rows(stored, torch.float32) if has_scales(kv_dtype) else pool
    backend.attend(q, stored, AttentionMetadata(sequences), state, scale, None)
    worst = 0.0
    for s in sequences:
        k, v = pool[list(s.block_table)].permute(1, 0, 3, 2, 4).reshape(2, -1, kv_heads, head_dim)[:, : s.kv_end]
        rows = slice(s.query_start, s.query_start + s.query_len)
        out, lse = reference_attention(q[rows], k, v, scale, s.context_len)
        errors = torch.stack([(state.out[rows] - out).abs().max(), (state.lse[:, rows] - lse).abs().max()])
        worst = max(worst, float(errors.nan_to_num(torch.inf).max()))
    return worst
