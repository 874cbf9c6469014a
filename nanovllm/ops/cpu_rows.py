"""The operations of `row_kernels` in C++, one call each.

In torch each operation is a chain of small operators, which with few rows take far longer than the arithmetic: a step
streams all weights through the caches and evicts the operators' code. Here the bits of a row depend on that row alone,
while torch's vectorised functions compute the remainder of a row, or of a thread's share, in another way.
All functions raise ValueError for tensors that they do not support or that do not fit each other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nanovllm.ops import _cpu_kernels, cpu_isa

_DTYPES = cpu_isa.KERNEL_DTYPES


def takes(x: Tensor, dims: int) -> bool:
    """Whether the kernels support x: bf16, fp16 or fp32 on the CPU, of `dims` (2 or 3) dimensions, with dense rows."""
    if not x.is_cpu or x.dtype not in _DTYPES or x.dim() != dims:
        return False
    shape, strides = x.shape, x.stride()
    row_is_dense = strides[-1] == 1 and (dims == 2 or shape[1] == 1 or strides[1] == shape[2])
    return row_is_dense or shape[0] == 0


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if not (takes(x, 2) and _is_vector(weight, x)):
        raise _misfit("rms_norm takes x [rows, size] and weight [size] of one dtype", x=x, weight=weight)
    return _norm(x, (0, 0), weight, eps)


def add_rms_norm_(residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    fits = takes(residual, 2) and takes(x, 2) and x.shape == residual.shape and x.dtype == residual.dtype
    if not (fits and _is_vector(weight, x)):
        rule = "add_rms_norm_ takes residual and x [rows, size] and weight [size] of one dtype"
        raise _misfit(rule, residual=residual, x=x, weight=weight)
    return _norm(residual, address(x), weight, eps)


def _norm(x: Tensor, addend: tuple[int, int], weight: Tensor, eps: float) -> Tensor:
    rows, size = x.shape
    y = x.new_empty(rows, size)
    _cpu_kernels.rms_norm(
        dtype=_DTYPES[x.dtype], x=address(x), addend=addend, weight=weight.data_ptr(), y=(y.data_ptr(), size),
        rows=rows, size=size, eps=eps,
        threads=torch.get_num_threads(),
    )  # fmt: skip
    return y


def place_heads(
    heads: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor, q: Tensor, k: Tensor, v: Tensor
) -> None:
    if not _heads_fit(heads, weight, cos, sin, q, k, v):
        rule = (
            "place_heads takes heads, q, k and v [tokens, heads, head_dim] of one dtype, a weight row for each head of"
            " q and k, and fp32 cos [tokens, 1, head_dim] and sin [tokens, 1, head_dim / 2]"
        )
        raise _misfit(rule, heads=heads, weight=weight, cos=cos, sin=sin, q=q, k=k, v=v)
    _cpu_kernels.place_heads(
        dtype=_DTYPES[heads.dtype], heads=address(heads), weight=0 if weight is None else weight.data_ptr(),
        cos=address(cos), sin=address(sin),
        q=address(q), k=address(k), v=address(v), tokens=heads.shape[0], q_heads=q.shape[1], kv_heads=k.shape[1],
        head_dim=heads.shape[2], eps=eps, threads=torch.get_num_threads(),
    )  # fmt: skip


def _heads_fit(heads: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, q: Tensor, k: Tensor, v: Tensor) -> bool:
    if not all(takes(x, 3) and x.dtype == heads.dtype for x in (heads, q, k, v)):
        return False
    tokens, total, head_dim = heads.shape
    rotated = q.shape[1] + k.shape[1]
    if weight is not None and (
        weight.dtype != heads.dtype or weight.shape != (rotated, head_dim) or not weight.is_contiguous()
    ):
        return False
    for angles, width in ((cos, head_dim), (sin, head_dim // 2)):
        if angles.dtype != torch.float32 or angles.shape != (tokens, 1, width) or angles.stride()[2] != 1:
            return False
    rest = (tokens, total - rotated, head_dim)
    return head_dim % 2 == 0 and v.shape == k.shape == rest and q.shape == (tokens, q.shape[1], head_dim)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    if not takes(gate_up, 2) or gate_up.shape[1] % 2:
        raise _misfit("silu_and_mul takes gate_up [rows, 2 * size]", gate_up=gate_up)
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    y = gate_up.new_empty(rows, size)
    _cpu_kernels.silu_and_mul(
        dtype=_DTYPES[gate_up.dtype], gate_up=address(gate_up), y=(y.data_ptr(), size), rows=rows, size=size,
        threads=torch.get_num_threads(),
    )  # fmt: skip
    return y


def cos_sin(angles: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    _check_rows("cos_sin takes angles [tokens, pairs]", angles)
    tokens, pairs = angles.shape
    cos, sin = angles.new_empty(tokens, 2 * pairs), angles.new_empty(tokens, pairs)
    _cpu_kernels.cos_sin(
        angles=address(angles), cos=address(cos), sin=address(sin), rows=tokens, size=pairs, factor=factor,
        threads=torch.get_num_threads(),
    )  # fmt: skip
    return cos, sin


def powers(bases: Tensor, exponents: Tensor) -> Tensor:
    for x in (bases, exponents):
        if not (x.is_cpu and x.dtype == torch.float64 and x.dim() == 1):
            raise _misfit("powers takes fp64 vectors on the CPU", x=x)
    results = bases.new_empty(len(bases), len(exponents))
    _cpu_kernels.powers(
        bases=bases.contiguous().data_ptr(), exponents=exponents.contiguous().data_ptr(), results=results.data_ptr(),
        rows=len(bases), size=len(exponents), threads=torch.get_num_threads(),
    )  # fmt: skip
    return results


def softmax(x: Tensor, *, log: bool = False) -> Tensor:
    _check_rows("softmax takes x [rows, size]", x)
    y = x.new_empty(x.shape)
    if x.shape[1]:
        _cpu_kernels.softmax(
            x=address(x), y=address(y), rows=x.shape[0], size=x.shape[1], log=log, threads=torch.get_num_threads()
        )
    return y


def draw(scores: Tensor, tokens: Tensor, starts: Tensor) -> Tensor:
    _check_rows("draw takes scores [rows, width]", scores)
    tokens = tokens.expand(scores.shape)
    if tokens.dtype != torch.int64 or starts.dtype != torch.int64 or starts.shape != scores.shape[:1]:
        raise _misfit("draw takes int64 tokens and a start for each row", tokens=tokens, starts=starts)
    if tokens.stride()[1] != 1:
        tokens = tokens.contiguous()
    drawn = torch.zeros(scores.shape[0], dtype=torch.int64)
    _cpu_kernels.draw(
        scores=address(scores), tokens=address(tokens), starts=starts.contiguous().data_ptr(), drawn=drawn.data_ptr(),
        rows=scores.shape[0], size=scores.shape[1], threads=torch.get_num_threads(),
    )  # fmt: skip
    return drawn


def _check_rows(rule: str, x: Tensor) -> None:
    if not (takes(x, 2) and x.dtype == torch.float32):
        raise _misfit(f"{rule} in fp32 on the CPU, each row dense", x=x)


def store_kv(pool: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    if not _kv_fits(pool, k, v, slots):
        rule = (
            "store_kv takes a pool [blocks, 2, kv_heads, block_size, head_dim] of dense blocks, k and v"
            " [tokens, kv_heads, head_dim] of its dtype with dense heads, and int64 slots [tokens], all on the CPU"
        )
        raise _misfit(rule, pool=pool, k=k, v=v, slots=slots)
    size = pool.element_size()
    k_strides, v_strides = k.stride(), v.stride()
    _cpu_kernels.store_kv(
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


def _is_vector(weight: Tensor, x: Tensor) -> bool:
    """Whether `weight` has an element for each column of x, in x's dtype."""
    return weight.is_cpu and weight.dtype == x.dtype and weight.shape == x.shape[1:] and weight.is_contiguous()


def address(x: Tensor) -> tuple[int, int]:
    """The address of the first row, and the stride between rows in elements."""
    return x.data_ptr(), x.stride()[0]


def _misfit(rule: str, **tensors: Tensor | None) -> ValueError:
    found = [
        f"{name} {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()} on {tensor.device}"
        for name, tensor in tensors.items()
        if tensor is not None
    ]
    return ValueError(f"{rule}; got {', '.join(found)}.")
