"""Writing new K/V into cache blocks by slot mapping."""

from __future__ import annotations

from torch import Tensor

from nanovllm.ops import cpu_rows
from nanovllm.ops.triton_support import use_triton


def store_kv(pool: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Write K and V of each token into its slot of the pool; tokens whose slot is -1 are left out.

    pool: [blocks, 2, kv_heads, block_size, head_dim], each block contiguous; k, v: [tokens, kv_heads, head_dim], rows
    and heads may be strided; slots: int64 [tokens], block * block_size + offset, no slot twice.
    """
    if use_triton(pool):
        from nanovllm.ops.triton_store import store_kv_triton

        store_kv_triton(pool, k, v, slots)
        return
    if pool.is_cpu:
        cpu_rows.store_kv(pool, k, v, slots)
        return
    if (slots < 0).any():
        kept = slots >= 0
        k, v, slots = k[kept], v[kept], slots[kept]
    blocks, offsets = slots // pool.shape[3], slots % pool.shape[3]
    pool[blocks, 0, :, offsets] = k
    pool[blocks, 1, :, offsets] = v
