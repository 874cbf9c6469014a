"""Writing new K/V into cache blocks by slot mapping, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

TOKENS_PER_PROGRAM = 16


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["slots_ptr"])
def _store_kernel(  # type: ignore[no-untyped-def]
    pool_ptr,
    k_ptr,
    v_ptr,
    slots_ptr,
    tokens,
    head_dim,
    block_size,
    block_stride,
    kv_stride,
    head_stride,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    head = tl.program_id(1)
    token = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    column = tl.arange(0, BLOCK_D)[None, :]
    slot = tl.load(slots_ptr + token, mask=token < tokens, other=-1)
    mask = (slot >= 0)[:, None] & (column < head_dim)
    k = tl.load(k_ptr + head * k_head_stride + token[:, None] * k_token_stride + column, mask=mask)
    v = tl.load(v_ptr + head * v_head_stride + token[:, None] * v_token_stride + column, mask=mask)
    row = (slot // block_size) * block_stride + head * head_stride + (slot % block_size) * head_dim
    tl.store(pool_ptr + row[:, None] + column, k, mask=mask)
    tl.store(pool_ptr + kv_stride + row[:, None] + column, v, mask=mask)


def store_kv_triton(pool: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """See `store_kv.store_kv`."""
    tokens, heads, head_dim = k.shape
    if k.numel() == 0:
        return
    assert k.stride(2) == 1 and v.stride(2) == 1, "head_dim must be contiguous"
    assert pool[0].is_contiguous(), "a KV block must be contiguous"
    grid = (triton.cdiv(tokens, TOKENS_PER_PROGRAM), heads)
    _store_kernel[grid](
        pool, k, v, slots, tokens, head_dim, pool.shape[3], *pool.stride()[:3], *k.stride()[:2], *v.stride()[:2],
        BLOCK_T=TOKENS_PER_PROGRAM, BLOCK_D=triton.next_power_of_2(head_dim), enable_fp_fusion=True,
    )  # fmt: skip
