"""cuDNN's attention as a backend for prefill of complete blocks; another backend attends everything else.

cuDNN builds an execution plan for every new shape, which takes far longer than the attention itself. So it only gets
rows that begin and end at block boundaries: every call covers complete blocks of rows and one block of keys. Its causal
mask is aligned top-left, so a call is either square and causal or has no mask. Each result is merged into the state.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from nanovllm.ops.attention import (
    MAX_DECODE_ROWS,
    AttentionBackend,
    AttentionMetadata,
    AttentionState,
    SequenceMetadata,
)
from nanovllm.ops.merge import merge_states_

DTYPES = (torch.float16, torch.bfloat16)


class CudnnKernel(Protocol):
    """Attention over contiguous keys, without a mask or causal with as many queries as keys."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        """q: [queries, heads, head_dim], strided; k, v: [kv_heads, keys, head_dim]. Returns the output like q, and the
        natural-log LSE, fp32 [heads, queries]."""
        ...


class CudnnAttention:
    """Prefill through cuDNN for suitable rows and blocks; `other` attends few rows, windows, fp32 and the rest."""

    def __init__(self, kernel: CudnnKernel, other: AttentionBackend, from_block: int = 1) -> None:
        """from_block: the smallest block size in tokens; smaller blocks need too many merges."""
        self.name = f"cuDNN attention on whole blocks, else {other.name}"
        self._kernel = kernel
        self.other = other
        self._from_block = from_block

    def for_every_block(self) -> CudnnAttention:
        """This backend without a smallest block size, for a check on a small problem."""
        return CudnnAttention(self._kernel, self.other)

    def attend(
        self, q: Tensor, pool: Tensor, table: AttentionMetadata, state: AttentionState, scale: float, window: int | None
    ) -> None:
        taken = [window is None and self._takes(q, pool, seq) for seq in table.sequences]
        if not all(taken):
            rest = [seq for seq, take in zip(table.sequences, taken, strict=True) if not take]
            self.other.attend(q, pool, AttentionMetadata(rest) if any(taken) else table, state, scale, window)
        for seq, take in zip(table.sequences, taken, strict=True):
            if take:
                self._attend_sequence(q, pool, seq, state, scale)

    def _takes(self, q: Tensor, pool: Tensor, seq: SequenceMetadata) -> bool:
        """Whether cuDNN attends the rows; independent of the blocks, so that their grouping changes nothing."""
        block_size = pool.shape[3]
        whole = seq.context_len % block_size == 0 and seq.query_len % block_size == 0
        return whole and seq.query_len > MAX_DECODE_ROWS and block_size >= self._from_block and q.dtype in DTYPES

    def _attend_sequence(
        self, q: Tensor, pool: Tensor, seq: SequenceMetadata, state: AttentionState, scale: float
    ) -> None:
        block_size, offset = pool.shape[3], seq.query_start - seq.context_len
        end = seq.context_len + seq.query_len
        for index, block in enumerate(seq.block_table):
            first = seq.first_position + index * block_size
            k, v = pool[block]
            if seq.context_len <= first < end:
                self._merge(q, k, v, slice(first + offset, first + block_size + offset), state, scale, causal=True)
            below = max(seq.context_len, first + block_size)
            if below < end:
                self._merge(q, k, v, slice(below + offset, end + offset), state, scale, causal=False)

    def _merge(
        self, q: Tensor, k: Tensor, v: Tensor, rows: slice, state: AttentionState, scale: float, causal: bool
    ) -> None:
        out, lse = self._kernel(q[rows], k, v, scale, causal)
        merge_states_(state.out[rows], state.lse[:, rows], out, lse)


def cudnn_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """A `CudnnKernel`: torch's internal operator, since its public function does not return the LSE."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q.transpose(0, 1).unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), None, True, 0.0, causal, False, scale=scale
    )
    return out.squeeze(0).transpose(0, 1), lse.reshape(q.shape[1], q.shape[0])


def cudnn_takes(device: torch.device, head_dim: int) -> bool:
    """Whether torch provides the operator for this CUDA device and head size."""
    if not torch.backends.cudnn.is_available() or not hasattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention"):
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0) and head_dim % 8 == 0 and head_dim <= 128
