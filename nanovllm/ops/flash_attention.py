"""Flash attention of others (flash-attn 3 and 2, torch's own) behind the seam: a call per block and kind of mask.

These kernels know no (output, LSE) to start from, so every call's result is merged into the state. Blocks are given to
them as strided views, which spares gathering and their demand for pages of 256 tokens. Calls go block by block and
never split the keys, so that a row's bits do not depend on how blocks are grouped.
"""

from __future__ import annotations

import inspect
import math
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor

from nanovllm.errors import ConfigError
from nanovllm.ops.attention import FEW_ROWS, AttentionBackend, AttentionMetadata, AttentionState, KVMetadata
from nanovllm.ops.merge import merge_states_


class FlashKernel(Protocol):
    """Flash attention as all of these libraries mean it. With sq queries, sk keys and masks aligned bottom-right, query
    i sees the keys from i + sk - sq - left to i + sk - sq + right; -1 stands for no bound.
    """

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float, left: int, right: int) -> tuple[Tensor, Tensor]:
        """q: [sq, heads, head_dim]; k, v: [sk, kv_heads, head_dim], strided. Returns the output like q, and the
        natural-log LSE fp32 [heads, sq], +inf or -inf for a query without keys."""
        ...


class FlashAttention:
    """Prefill through a flash kernel; few query rows and fp32 go to another backend where there is one."""

    def __init__(
        self,
        name: str,
        kernel: FlashKernel,
        other: AttentionBackend | None,
        dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16),
    ) -> None:
        self.name = name if other is None else f"{name}, decode through {other.name}"
        self._kernel = kernel
        self._other = other
        self._dtypes = dtypes

    @property
    def other(self) -> AttentionBackend | None:
        """What attends to few query rows."""
        return self._other

    def attend(
        self, q: Tensor, pool: Tensor, table: AttentionMetadata, state: AttentionState, scale: float, window: int | None
    ) -> None:
        if self._other is None and q.dtype not in self._dtypes:
            known = " and ".join(str(dtype)[6:] for dtype in self._dtypes)
            raise ConfigError(f"dtype={str(q.dtype)[6:]!r}: {self.name} computes in {known} only")
        others = [s for s in table.segments if self._leaves(q, s)]
        if self._other is not None and others:
            rest = table if len(others) == len(table.segments) else AttentionMetadata(others)
            self._other.attend(q, pool, rest, state, scale, window)
        for segment in table.segments:
            if not self._leaves(q, segment):
                self._attend_segment(q, pool, segment, state, scale, window)

    def _leaves(self, q: Tensor, segment: KVMetadata) -> bool:
        return self._other is not None and (segment.query_len <= FEW_ROWS or q.dtype not in self._dtypes)

    def _attend_segment(
        self, q: Tensor, pool: Tensor, segment: KVMetadata, state: AttentionState, scale: float, window: int | None
    ) -> None:
        block_size = pool.shape[3]
        for index, block in enumerate(segment.blocks):
            first = segment.first_position + index * block_size
            last = min(first + block_size, segment.kv_end)
            for rows, keys, left, right in calls(segment, first, last, window):
                k, v = pool[block, :, :, :keys].transpose(1, 2)
                out, lse = self._kernel(q[rows], k, v, scale, left, right)
                lse = lse.masked_fill(lse == math.inf, -math.inf)  # flash-attn 2's mark of a row without keys
                merge_states_(state.out[rows], state.lse[:, rows], out, lse)


def calls(segment: KVMetadata, first: int, last: int, window: int | None) -> list[tuple[slice, int, int, int]]:
    """Calls (rows of the batch, number of keys, left, right) for the keys at positions [first, last) of one block.

    Without a window the rows that stand in the block get a causal call whose last row is level with its last key, and
    the rows after it one without a mask, since kernels take a mask off the diagonal at another, slower pace.
    """
    begin = max(segment.query_position, first)
    end = segment.query_position + segment.query_len
    offset = segment.query_start - segment.query_position
    if window is not None:
        end = min(end, last - 1 + window)  # rows after this see none of the block any more
    if begin >= end or first >= last:
        return []
    if window is not None:
        visible = min(last, end)
        beyond = end - visible
        return [(slice(begin + offset, end + offset), visible - first, window - 1 - beyond, beyond)]
    level = min(end, last)
    found = []
    if begin < level:
        found.append((slice(begin + offset, level + offset), level - first, -1, 0))
    if max(begin, level) < end:
        found.append((slice(max(begin, level) + offset, end + offset), last - first, -1, -1))
    return found


# ---- the libraries


def torch_flash(q: Tensor, k: Tensor, v: Tensor, scale: float, left: int, right: int) -> tuple[Tensor, Tensor]:
    """What torch's varlen_attn calls as well, which before 2.12 takes no grouped heads."""
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), None, None, q.shape[0], k.shape[0], 0.0,
        (left, right) == (-1, 0), False, scale=scale, window_size_left=left, window_size_right=right,
    )  # fmt: skip
    return out.squeeze(0), lse.squeeze(0)[:, : q.shape[0]]


def flash_attn_2(q: Tensor, k: Tensor, v: Tensor, scale: float, left: int, right: int) -> tuple[Tensor, Tensor]:
    """The package flash-attn; the third result, made only under dropout, is the matrix of weights."""
    from flash_attn import flash_attn_func

    out, lse, _ = flash_attn_func(
        q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), softmax_scale=scale, causal=(left, right) == (-1, 0),
        window_size=(left, right), return_attn_probs=True,
    )  # fmt: skip
    return out.squeeze(0), lse.squeeze(0)[:, : q.shape[0]]


def flash_attn_3(q: Tensor, k: Tensor, v: Tensor, scale: float, left: int, right: int) -> tuple[Tensor, Tensor]:
    """flash-attn's Hopper kernels; early releases return the LSE without being asked, later ones when asked."""
    from flash_attn_interface import flash_attn_func

    asked = {"return_attn_probs": True} if "return_attn_probs" in inspect.signature(flash_attn_func).parameters else {}
    out, lse, *_ = flash_attn_func(
        q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), softmax_scale=scale, causal=(left, right) == (-1, 0),
        window_size=(left, right), num_splits=1, **asked,
    )  # fmt: skip
    return out.squeeze(0), lse.squeeze(0)[:, : q.shape[0]]


def flash_kernels(device: torch.device, head_dim: int) -> dict[str, FlashKernel]:
    """The flash kernels that are installed and take heads of this size on this CUDA device, by name, fastest first."""
    if head_dim % 8 or head_dim > 256:
        return {}
    kernels: dict[str, FlashKernel] = {"torch's flash attention": torch_flash}
    if find_spec("flash_attn") is not None:
        kernels = {"flash-attn 2": flash_attn_2, **kernels}
    if find_spec("flash_attn_interface") is not None and torch.cuda.get_device_capability(device)[0] == 9:
        kernels = {"flash-attn 3": flash_attn_3, **kernels}
    return kernels
