"""Row-wise work between the products of a layer on the CPU, in one call each: bf16 norms, heads, gates; writing K/V;
the activation in fp32.

In torch each is a chain of small operators. With few rows they cost far more than the arithmetic: a step streams all
weights through the caches, and every operator finds its code gone. A row's bits depend on that row alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nanovllm.ops import _cpu_rows


def takes(x: Tensor, dims: int) -> bool:
    """Whether the bf16 functions take this tensor: on the CPU, of 2 or 3 dimensions, each row dense."""
    if not x.is_cpu or x.dtype != torch.bfloat16 or x.dim() != dims:
        return False
    shape, strides = x.shape, x.stride()
    row_is_dense = strides[-1] == 1 and (dims == 2 or shape[1] == 1 or strides[1] == shape[2])
    return row_is_dense or shape[0] == 0


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`layers.norm.rms_norm` of x [rows, size]. Raises ValueError for tensors that are not taken or do not fit."""
    if not (takes(x, 2) and _is_vector(weight, x.shape[1])):
        raise _misfit("rms_norm takes bf16 x [rows, size] and weight [size]", x=x, weight=weight)
    return _norm(x, (0, 0), weight, eps)


def add_rms_norm_(residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`layers.norm.add_rms_norm_`. Raises ValueError for tensors that are not taken or do not fit."""
    if not (takes(residual, 2) and takes(x, 2) and x.shape == residual.shape and _is_vector(weight, x.shape[1])):
        rule = "add_rms_norm_ takes bf16 residual and x [rows, size] and weight [size]"
        raise _misfit(rule, residual=residual, x=x, weight=weight)
    return _norm(residual, address(x), weight, eps)


def _norm(x: Tensor, addend: tuple[int, int], weight: Tensor, eps: float) -> Tensor:
    rows, size = x.shape
    y = x.new_empty(rows, size)
    _cpu_rows.rms_norm(
        x=address(x), addend=addend, weight=weight.data_ptr(), y=(y.data_ptr(), size), rows=rows, size=size, eps=eps,
        threads=torch.get_num_threads(),
    )  # fmt: skip
    return y


def place_heads(
    heads: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor, q: Tensor, k: Tensor, v: Tensor
) -> None:
    """`layers.heads.place_heads`. Raises ValueError for tensors that are not taken or do not fit."""
    if not _heads_fit(heads, weight, cos, sin, q, k, v):
        rule = (
            "place_heads takes bf16 heads, q, k and v [tokens, heads, head_dim], a weight row for each head of q and k,"
            " and fp32 cos [tokens, 1, head_dim] and sin [tokens, 1, head_dim / 2]"
        )
        raise _misfit(rule, heads=heads, weight=weight, cos=cos, sin=sin, q=q, k=k, v=v)
    _cpu_rows.place_heads(
        heads=address(heads), weight=0 if weight is None else weight.data_ptr(), cos=address(cos), sin=address(sin),
        q=address(q), k=address(k), v=address(v), tokens=heads.shape[0], q_heads=q.shape[1], kv_heads=k.shape[1],
        head_dim=heads.shape[2], eps=eps, threads=torch.get_num_threads(),
    )  # fmt: skip


def _heads_fit(heads: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, q: Tensor, k: Tensor, v: Tensor) -> bool:
    if not (takes(heads, 3) and takes(q, 3) and takes(k, 3) and takes(v, 3)):
        return False
    tokens, total, head_dim = heads.shape
    turned = q.shape[1] + k.shape[1]
    if weight is not None and (
        weight.dtype != torch.bfloat16 or weight.shape != (turned, head_dim) or not weight.is_contiguous()
    ):
        return False
    for angles, width in ((cos, head_dim), (sin, head_dim // 2)):
        if angles.dtype != torch.float32 or angles.shape != (tokens, 1, width) or angles.stride()[2] != 1:
            return False
    rest = (tokens, total - turned, head_dim)
    return head_dim % 2 == 0 and v.shape == k.shape == rest and q.shape == (tokens, q.shape[1], head_dim)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """`layers.activation.silu_and_mul`. Raises ValueError for a tensor that is not taken."""
    if not takes(gate_up, 2) or gate_up.shape[1] % 2:
        raise _misfit("silu_and_mul takes bf16 gate_up [rows, 2 * size]", gate_up=gate_up)
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    y = gate_up.new_empty(rows, size)
    _cpu_rows.silu_and_mul(
        gate_up=address(gate_up), y=(y.data_ptr(), size), rows=rows, size=size, threads=torch.get_num_threads()
    )
    return y


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x) of fp32 x [rows, size]. Raises ValueError for another tensor.

    torch takes another exponential at the end of each thread's share, so that a row's bits depend on the other rows.
    """
    if not (x.is_cpu and x.dtype == torch.float32 and x.dim() == 2 and x.stride()[1] == 1):
        raise _misfit("silu takes fp32 x [rows, size] on the CPU, each row dense", x=x)
    rows, size = x.shape
    y = x.new_empty(rows, size)
    _cpu_rows.silu(x=address(x), y=(y.data_ptr(), size), rows=rows, size=size, threads=torch.get_num_threads())
    return y


def store_kv(pool: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """`ops.store_kv.store_kv`, in any dtype. Raises ValueError for tensors or slots that do not fit."""
    if not _kv_fits(pool, k, v, slots):
        rule = (
            "store_kv takes a pool [blocks, 2, kv_heads, block_size, head_dim] of dense blocks, k and v"
            " [tokens, kv_heads, head_dim] of its dtype with dense heads, and int64 slots [tokens], all on the CPU"
        )
        raise _misfit(rule, pool=pool, k=k, v=v, slots=slots)
    size = pool.element_size()
    k_strides, v_strides = k.stride(), v.stride()
    _cpu_rows.store_kv(
        pool=pool.data_ptr(), block_stride=pool.stride()[0] * size, blocks=pool.shape[0],
        k=k.data_ptr(), k_strides=(k_strides[0] * size, k_strides[1] * size),
        v=v.data_ptr(), v_strides=(v_strides[0] * size, v_strides[1] * size),
        slots=slots.data_ptr(), tokens=k.shape[0], kv_heads=k.shape[1], block_size=pool.shape[3],
        head_bytes=k.shape[2] * size, threads=torch.get_num_threads(),
    )  # fmt: skip


def _kv_fits(pool: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> bool:
    if not (pool.is_cpu and k.is_cpu and v.is_cpu and slots.is_cpu and pool.dim() == 5 and k.dim() == 3):
        return False
    _, planes, kv_heads, block_size, head_dim = pool.shape
    head = block_size * head_dim
    return (
        pool.dtype == k.dtype == v.dtype
        and pool.stride()[1:] == (kv_heads * head, head, head_dim, 1)
        and planes == 2
        and k.shape == v.shape == (slots.shape[0], kv_heads, head_dim)
        and k.stride()[2] == v.stride()[2] == 1
        and slots.dtype == torch.int64
        and slots.is_contiguous()
    )


def _is_vector(weight: Tensor, size: int) -> bool:
    return weight.is_cpu and weight.dtype == torch.bfloat16 and weight.shape == (size,) and weight.is_contiguous()


def address(x: Tensor) -> tuple[int, int]:
    """Where the rows begin, and the elements from one to the next."""
    return x.data_ptr(), x.stride()[0]


def _misfit(rule: str, **tensors: Tensor | None) -> ValueError:
    found = [
        f"{name} {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()} on {tensor.device}"
        for name, tensor in tensors.items()
        if tensor is not None
    ]
    return ValueError(f"{rule}; got {', '.join(found)}.")
