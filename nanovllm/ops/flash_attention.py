"""Flash attention libraries (flash-attn 3 and 2, torch's own) as a backend: one call per block and kind of mask.

These kernels cannot continue from an (output, LSE), so the result of every call is merged into the state. Blocks are
passed as strided views, which avoids gathering and the libraries' page size of 256 tokens. Calls go block by block and
never split the keys, so that the bits of a row do not depend on the grouping of blocks.
"""

from __future__ import annotations

import inspect
import math
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor

from nanovllm.errors import ConfigError
from nanovllm.ops.attention import (
    MAX_DECODE_ROWS,
    AttentionBackend,
    AttentionMetadata,
    AttentionState,
    SequenceMetadata,
)
from nanovllm.ops.merge import merge_attention_outputs


class FlashKernel(Protocol):
    """The common interface of these libraries. With sq queries, sk keys and masks aligned bottom-right, query
    i sees the keys from i + sk - sq - left to i + sk - sq + right; -1 means no bound.
    """

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float, left: int, right: int) -> tuple[Tensor, Tensor]:
        """q: [sq, heads, head_dim]; k, v: [sk, kv_heads, head_dim], strided. Returns the output like q, and the
        natural-log LSE fp32 [heads, sq], +inf or -inf for a query without keys."""
        ...


class FlashAttention:
    """Prefill through a flash kernel; `other`, if any, attends few query rows and fp32."""

    def __init__(
        self,
        name: str,
        kernel: FlashKernel,
        other: AttentionBackend | None,
        dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16),
    ) -> None:
        self.name = name if other is None else f"{name}, decode through {other.name}"
        self._kernel = kernel
        self.other = other
        self._dtypes = dtypes

    def attend(
        self, q: Tensor, pool: Tensor, table: AttentionMetadata, state: AttentionState, scale: float, window: int | None
    ) -> None:
        if self.other is None and q.dtype not in self._dtypes:
            known = " and ".join(str(dtype)[6:] for dtype in self._dtypes)
            raise ConfigError(f"dtype={str(q.dtype)[6:]!r}: {self.name} computes in {known} only")
        others = [s for s in table.sequences if self._leaves(q, s)]
        if self.other is not None and others:
            rest = table if len(others) == len(table.sequences) else AttentionMetadata(others)
            self.other.attend(q, pool, rest, state, scale, window)
        for seq in table.sequences:
            if not self._leaves(q, seq):
                self._attend_sequence(q, pool, seq, state, scale, window)

    def _leaves(self, q: Tensor, seq: SequenceMetadata) -> bool:
        return self.other is not None and (seq.query_len <= MAX_DECODE_ROWS or q.dtype not in self._dtypes)

    def _attend_sequence(
        self, q: Tensor, pool: Tensor, seq: SequenceMetadata, state: AttentionState, scale: float, window: int | None
    ) -> None:
        block_size = pool.shape[3]
        for index, block in enumerate(seq.block_table):
            first = seq.first_position + index * block_size
            last = min(first + block_size, seq.kv_end)
            for rows, keys, left, right in calls(seq, first, last, window):
                k, v = pool[block, :, :, :keys].transpose(1, 2)
                out, lse = self._kernel(q[rows], k, v, scale, left, right)
                lse = lse.masked_fill(lse == math.inf, -math.inf)  # flash-attn 2 marks a row without keys by +inf
                merge_attention_outputs(state.out[rows], state.lse[:, rows], out, lse)


def calls(seq: SequenceMetadata, first: int, last: int, window: int | None) -> list[tuple[slice, int, int, int]]:
    """Calls (rows of the batch, number of keys, left, right) for the keys at positions [first, last) of one block.

    Without a window, the rows at positions in the block get a causal call whose last row is at the last key, and the
    later rows get a call without a mask: kernels are slower with an offset causal mask.
    """
    begin = max(seq.context_len, first)
    end = seq.context_len + seq.query_len
    offset = seq.query_start - seq.context_len
    if window is not None:
        end = min(end, last - 1 + window)  # later rows see no key of the block
    if begin >= end or first >= last:
        return []
    if window is not None:
        visible = min(last, end)
        beyond = end - visible
        return [(slice(begin + offset, end + offset), visible - first, window - 1 - beyond, beyond)]
    level = min(end, last)
    calls = []
    if begin < level:
        calls.append((slice(begin + offset, level + offset), level - first, -1, 0))
    if max(begin, level) < end:
        calls.append((slice(max(begin, level) + offset, end + offset), last - first, -1, -1))
    return calls


# ---- the libraries


def torch_flash(q: Tensor, k: Tensor, v: Tensor, scale: float, left: int, right: int) -> tuple[Tensor, Tensor]:
    """The operator below torch's varlen_attn, which supports no grouped heads before 2.12."""
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), None, None, q.shape[0], k.shape[0], 0.0,
        (left, right) == (-1, 0), False, scale=scale, window_size_left=left, window_size_right=right,
    )  # fmt: skip
    return out.squeeze(0), lse.squeeze(0)[:, : q.shape[0]]


def flash_attn_2(q: Tensor, k: Tensor, v: Tensor, scale: float, left: int, right: int) -> tuple[Tensor, Tensor]:
    """The package flash-attn; the third result is the weights, computed only with dropout."""
    from flash_attn import flash_attn_func

    out, lse, _ = flash_attn_func(
        q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), softmax_scale=scale, causal=(left, right) == (-1, 0),
        window_size=(left, right), return_attn_probs=True,
    )  # fmt: skip
    return out.squeeze(0), lse.squeeze(0)[:, : q.shape[0]]


def flash_attn_3(q: Tensor, k: Tensor, v: Tensor, scale: float, left: int, right: int) -> tuple[Tensor, Tensor]:
    """flash-attn's Hopper kernels; early releases always return the LSE, later ones on request."""
    from flash_attn_interface import flash_attn_func

    asked = {"return_attn_probs": True} if "return_attn_probs" in inspect.signature(flash_attn_func).parameters else {}
    out, lse, *_ = flash_attn_func(
        q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), softmax_scale=scale, causal=(left, right) == (-1, 0),
        window_size=(left, right), num_splits=1, **asked,
    )  # fmt: skip
    return out.squeeze(0), lse.squeeze(0)[:, : q.shape[0]]


def flash_kernels(device: torch.device, head_dim: int) -> dict[str, FlashKernel]:
    """The installed flash kernels that support this head size on this CUDA device, by name, fastest first."""
    if head_dim % 8 or head_dim > 256:
        return {}
    kernels: dict[str, FlashKernel] = {"torch's flash attention": torch_flash}
    if find_spec("flash_attn") is not None:
        kernels = {"flash-attn 2": flash_attn_2, **kernels}
    if find_spec("flash_attn_interface") is not None and torch.cuda.get_device_capability(device)[0] == 9:
        kernels = {"flash-attn 3": flash_attn_3, **kernels}
    return kernels
