"""cuDNN's attention behind the seam, for prefill over whole blocks; everything else goes to another backend.

cuDNN builds an execution plan for every new shape, which takes far longer than the attention itself. So it gets only
rows that begin and end with a block: then all calls are whole blocks of rows over one block of keys. Its causal mask is
aligned top-left, so that a call is square causal or without a mask. Every call's result is merged into the state.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from nanovllm.ops.attention import FEW_ROWS, AttentionBackend, AttentionMetadata, AttentionState, KVMetadata
from nanovllm.ops.merge import merge_states_

DTYPES = (torch.float16, torch.bfloat16)


class CudnnKernel(Protocol):
    """Attention over contiguous keys: all of them, or, with as many queries as keys, up to each query's own."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        """q: [queries, heads, head_dim], strided; k, v: [kv_heads, keys, head_dim]. Returns the output like q, and the
        natural-log LSE, fp32 [heads, queries]."""
        ...


class CudnnAttention:
    """Prefill through cuDNN where rows and blocks fit it; few rows, windows, fp32 and the rest through `other`."""

    def __init__(self, kernel: CudnnKernel, other: AttentionBackend, from_block: int = 1) -> None:
        """from_block: tokens; with smaller blocks the merges after every call cost too much."""
        self.name = f"cuDNN attention on whole blocks, else {other.name}"
        self._kernel = kernel
        self._other = other
        self._from_block = from_block

    @property
    def other(self) -> AttentionBackend:
        """What attends to everything else, few query rows among it."""
        return self._other

    def for_every_block(self) -> CudnnAttention:
        """The same without a smallest block, to be checked on a small problem."""
        return CudnnAttention(self._kernel, self._other)

    def attend(
        self, q: Tensor, pool: Tensor, table: AttentionMetadata, state: AttentionState, scale: float, window: int | None
    ) -> None:
        taken = [window is None and self._takes(q, pool, segment) for segment in table.segments]
        if not all(taken):
            rest = [segment for segment, take in zip(table.segments, taken, strict=True) if not take]
            self._other.attend(q, pool, AttentionMetadata(rest) if any(taken) else table, state, scale, window)
        for segment, take in zip(table.segments, taken, strict=True):
            if take:
                self._attend_segment(q, pool, segment, state, scale)

    def _takes(self, q: Tensor, pool: Tensor, segment: KVMetadata) -> bool:
        """Depends on the rows alone, so that the grouping of blocks into calls changes nothing."""
        block_size = pool.shape[3]
        whole = segment.query_position % block_size == 0 and segment.query_len % block_size == 0
        return whole and segment.query_len > FEW_ROWS and block_size >= self._from_block and q.dtype in DTYPES

    def _attend_segment(
        self, q: Tensor, pool: Tensor, segment: KVMetadata, state: AttentionState, scale: float
    ) -> None:
        block_size, offset = pool.shape[3], segment.query_start - segment.query_position
        end = segment.query_position + segment.query_len
        for index, block in enumerate(segment.blocks):
            first = segment.first_position + index * block_size
            k, v = pool[block]
            if segment.query_position <= first < end:
                self._merge(q, k, v, slice(first + offset, first + block_size + offset), state, scale, causal=True)
            below = max(segment.query_position, first + block_size)
            if below < end:
                self._merge(q, k, v, slice(below + offset, end + offset), state, scale, causal=False)

    def _merge(
        self, q: Tensor, k: Tensor, v: Tensor, rows: slice, state: AttentionState, scale: float, causal: bool
    ) -> None:
        out, lse = self._kernel(q[rows], k, v, scale, causal)
        merge_states_(state.out[rows], state.lse[:, rows], out, lse)


def cudnn_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """See `CudnnKernel`. torch's operator, with the LSE that its public function does not return."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q.transpose(0, 1).unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), None, True, 0.0, causal, False, scale=scale
    )
    return out.squeeze(0).transpose(0, 1), lse.reshape(q.shape[1], q.shape[0])


def cudnn_takes(device: torch.device, head_dim: int) -> bool:
    """Whether torch offers the operator on this CUDA device for heads of this size."""
    if not torch.backends.cudnn.is_available() or not hasattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention"):
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0) and head_dim % 8 == 0 and head_dim <= 128
