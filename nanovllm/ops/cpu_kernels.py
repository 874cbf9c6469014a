"""The kernels of the network in C++: linear layers, row-wise operations, and decoder layers for few rows.

The bits of a row depend only on the row, the weights and the instruction set. torch computes the remainder of a row, or
of a thread's share, in another way, and the order of its sums depends on the number of rows. torch also runs a row-wise
operation as a chain of small operators. With few rows they take far longer than the arithmetic, because the weights of
a step go through the caches and evict the operators' code.
All functions raise ValueError for tensors that they do not support or that do not fit each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm.errors import ConfigError
from nanovllm.ops import _cpu_kernels
from nanovllm.ops.kernel_choice import KernelChoice, kernel_choice, machine_key

MAX_LAYER_ROWS = 24  # of `FewRowLayer`: with more rows the overhead of Python is negligible
_HUGE_PAGE = 2 << 20

# ---- instruction sets

KERNEL_DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


@cache
def instruction_sets() -> tuple[str, ...]:
    """The subset of "avx512bf16", "avx512", "avx2" and "portable" that this machine supports, best first.

    The environment variable NANOVLLM_CPU_ISA sets the best one to use; ConfigError if the machine does not support it.
    """
    try:
        return tuple(_cpu_kernels.instruction_sets())
    except ValueError as error:
        raise ConfigError(str(error)) from error


def cpu_machine() -> str:
    """The processor and its instruction sets: machines with the same text choose among the same kernels."""
    return machine_key(instruction_sets())


def cpu_kernel_choice() -> KernelChoice:
    """The instruction set for each kind of work in this process; the first call may measure for some 100 ms.

    Raises ConfigError for environment variables that do not fit this machine.
    """
    return kernel_choice(instruction_sets())


def choose(isa: str | None, work: str) -> str:
    """`isa`, or for None the choice for a work, one of `kernel_choice.WORKS`.

    Raises ValueError if this machine does not support `isa`.
    """
    available = instruction_sets()
    if isa is None:
        return kernel_choice(available).isa_of[work]
    if isa not in available:
        raise ValueError(f"Instruction set {isa!r} does not run on this machine; choose one of {', '.join(available)}.")
    return isa


def dtype_name(dtype: torch.dtype) -> str:
    """torch's name of a dtype, as the kernels take it."""
    return str(dtype).removeprefix("torch.")


# ---- linear layers; csrc/cpu_linear.h documents the order of a sum


def cpu_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    interleaved: bool = False,
    isa: str | None = None,
    num_threads: int | None = None,
) -> Tensor:
    """x W^T + b: [rows, in] -> [rows, out], bfloat16, float16 or float32, without gradients. The GIL is released.

    x: rows may be strided, the elements of a row are contiguous; weight: [out, in] and bias: [out] or None, contiguous.
    interleaved: the weight is as `interleave_` leaves it, which is faster with few rows and gives the same bits.
    Sums are fp32 and rounded once. `isa` is one of `instruction_sets()`, by default `choose`'s. Raises ValueError
    for other arguments.
    """
    fits = x.is_cpu and x.dtype in KERNEL_DTYPES and x.dim() == weight.dim() == 2 and 0 < x.shape[1] == weight.shape[1]
    fits = fits and (x.stride()[1] == 1 or x.shape[1] == 1) and (bias is None or bias.shape == weight.shape[:1])
    for tensor in (weight,) if bias is None else (weight, bias):
        fits = fits and tensor.is_cpu and tensor.dtype == x.dtype and tensor.is_contiguous()
    if not fits:
        rule = (
            "a product takes x [rows, in] with contiguous rows, and contiguous weight [out, in] and bias [out], in"
            " being positive, all on the CPU and all bfloat16, float16 or float32"
        )
        raise misfit(rule, x=x, weight=weight, bias=bias)
    rows = x.shape[0]
    (out_features, in_features) = weight.shape
    y = x.new_empty(rows, out_features)
    _cpu_kernels.linear(
        isa=choose(isa, f"linear.{KERNEL_DTYPES[x.dtype]}"), dtype=KERNEL_DTYPES[x.dtype], x=address(x),
        weight=weight.data_ptr(), bias=_address(bias), y=(y.data_ptr(), out_features), rows=rows,
        in_features=in_features, out_features=out_features, interleaved=interleaved,
        threads=torch.get_num_threads() if num_threads is None else num_threads,
    )  # fmt: skip
    return y


def can_interleave(weight: Tensor) -> bool:
    """Whether `interleave_` takes a weight [out, in]."""
    if not weight.is_cpu or weight.dtype not in KERNEL_DTYPES or not weight.is_contiguous() or weight.data_ptr() % 4:
        return False
    rows, inputs = weight.shape
    return rows >= _cpu_kernels.INTERLEAVED_ROWS and inputs % _cpu_kernels.INTERLEAVED_INPUTS == 0


def interleave_(weight: Tensor, *, back: bool = False) -> None:
    """Reorder a weight [out, in] in place, so that a product reads the same inputs of 16 outputs as one vector.

    Its memory is then [out / 16, in / unit, 16, unit] and the last out % 16 rows as they were. A unit is a pair of
    inputs in bfloat16, otherwise one. back: from this order to the usual one.
    """
    assert can_interleave(weight)
    _cpu_kernels.interleave(
        dtype=KERNEL_DTYPES[weight.dtype], weight=weight.data_ptr(), out_features=weight.shape[0],
        in_features=weight.shape[1], back=back, threads=torch.get_num_threads(),
    )  # fmt: skip


def interleaved_to_rows(weight: Tensor, rows: Tensor) -> None:
    """Copy a weight that `interleave_` has reordered to `rows` [out, in] in the usual order, on any device."""
    unit = 2 if weight.dtype == torch.bfloat16 else 1
    whole = weight.shape[0] // _cpu_kernels.INTERLEAVED_ROWS * _cpu_kernels.INTERLEAVED_ROWS
    units = weight[:whole].reshape(-1, weight.shape[1] // unit, _cpu_kernels.INTERLEAVED_ROWS, unit)
    rows[:whole].view(units.shape[0], _cpu_kernels.INTERLEAVED_ROWS, -1, unit).copy_(units.transpose(1, 2))
    rows[whole:].copy_(weight[whole:])


def rows_of(weight: Tensor, indices: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rows of a contiguous weight [out, in], as it is or as `interleave_` leaves it: int64 [n] -> [n, in].

    Raises IndexError for an index outside of the weight.
    """
    (out_features, in_features) = weight.shape
    indices = indices.contiguous()
    rows = weight.new_empty(indices.shape[0], in_features)
    _cpu_kernels.gather(
        dtype=KERNEL_DTYPES[weight.dtype], weight=weight.data_ptr(), y=rows.data_ptr(), indices=indices.data_ptr(),
        count=indices.shape[0], in_features=in_features, out_features=out_features, interleaved=interleaved,
        threads=torch.get_num_threads(),
    )  # fmt: skip
    return rows


def use_huge_pages(weight: Tensor) -> None:
    """Request huge pages for a large dense CPU tensor that has not been written yet.

    A product reads a few bytes of each of many rows in turn; with small pages, address translation takes longer than
    reading.
    """
    if weight.is_cpu and weight.nbytes >= _HUGE_PAGE and weight.is_contiguous():
        _cpu_kernels.use_huge_pages(weight.data_ptr(), weight.nbytes)


# ---- the operations of `row_kernels`


def takes(x: Tensor, dims: int) -> bool:
    """Whether the kernels support x: bf16, fp16 or fp32 on the CPU, of `dims` (2 or 3) dimensions, with dense rows."""
    if not x.is_cpu or x.dtype not in KERNEL_DTYPES or x.dim() != dims:
        return False
    shape = x.shape
    strides = x.stride()
    row_is_dense = strides[-1] == 1 and (dims == 2 or shape[1] == 1 or strides[1] == shape[2])
    return row_is_dense or shape[0] == 0


def address(x: Tensor) -> tuple[int, int]:
    """The address of the first row, and the stride between rows in elements."""
    return x.data_ptr(), x.stride()[0]


def _rows(
    x: Tensor, *, dims: int = 2, dtype: torch.dtype | None = None, shape: Sequence[int] | None = None
) -> tuple[int, int]:
    """The `address` of an x that the kernels support and that has this dtype and shape; ValueError for others."""
    if not takes(x, dims) or (dtype is not None and x.dtype != dtype) or (shape is not None and x.shape != shape):
        wanted = f"{dims} dimensions" if shape is None else tuple(shape)
        dtypes = dtype or "bfloat16, float16 or float32"
        raise misfit(f"the kernel takes {wanted} of {dtypes} on the CPU, each row dense", x=x)
    return x.data_ptr(), x.stride()[0]


def add_(x: Tensor, addend: Tensor) -> Tensor:
    _cpu_kernels.add(
        x=_rows(x), addend=_rows(addend, dtype=x.dtype, shape=x.shape), dtype=KERNEL_DTYPES[x.dtype],
        rows=x.shape[0], size=x.shape[1], threads=torch.get_num_threads(),
    )  # fmt: skip
    return x


def copy_(target: Tensor, source: Tensor) -> Tensor:
    size = target.element_size()
    (y, y_stride) = _rows(target)
    (x, x_stride) = _rows(source, dtype=target.dtype, shape=target.shape)
    _cpu_kernels.copy(
        x=(x, x_stride * size), y=(y, y_stride * size), rows=target.shape[0], row_bytes=target.shape[1] * size,
        threads=torch.get_num_threads(),
    )  # fmt: skip
    return target


def narrow_(target: Tensor, wide: Tensor) -> Tensor:
    _cpu_kernels.narrow(
        y=_rows(target, dims=3), x=_rows(wide, dims=3, dtype=torch.float32, shape=target.shape),
        dtype=KERNEL_DTYPES[target.dtype], rows=target.shape[0], size=target.shape[1] * target.shape[2],
        threads=torch.get_num_threads(),
    )  # fmt: skip
    return target


def widened(x: Tensor) -> Tensor:
    y = torch.empty(x.shape, dtype=torch.float32)
    _cpu_kernels.widen(
        x=_rows(x), y=address(y), dtype=KERNEL_DTYPES[x.dtype], rows=x.shape[0], size=x.shape[1],
        threads=torch.get_num_threads(),
    )  # fmt: skip
    return y


def filled(shape: Sequence[int], value: float) -> Tensor:
    x = torch.empty(shape, dtype=torch.float32)
    _cpu_kernels.fill(x=x.data_ptr(), size=x.numel(), value=value, threads=torch.get_num_threads())
    return x


def add_rms_norm_(residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rms_norm(residual, weight, eps, x)


def rms_norm(x: Tensor, weight: Tensor, eps: float, addend: Tensor | None = None) -> Tensor:
    y = x.new_empty(x.shape)
    _cpu_kernels.rms_norm(
        x=_rows(x), addend=(0, 0) if addend is None else _rows(addend, dtype=x.dtype, shape=x.shape),
        weight=_norm_weight(weight, x.dtype, x.shape[1:]), y=address(y), dtype=KERNEL_DTYPES[x.dtype],
        rows=x.shape[0], size=x.shape[1], eps=eps, threads=torch.get_num_threads(),
    )  # fmt: skip
    return y


def _norm_weight(weight: Tensor | None, dtype: torch.dtype, shape: Sequence[int]) -> tuple[int, bool]:
    """The `_norm_address` of weights of this shape in `dtype` or fp32. Raises ValueError for others."""
    if weight is None:
        return _norm_address(None)
    if not (weight.is_cpu and weight.is_contiguous() and weight.shape == shape):
        raise misfit(f"the weights of this norm are {tuple(shape)} on the CPU", weight=weight)
    if weight.dtype not in (dtype, torch.float32):
        raise misfit(f"the weights of a norm of {dtype} are in it or in float32", weight=weight)
    return _norm_address(weight)


def _norm_address(weight: Tensor | None) -> tuple[int, bool]:
    """The address of a norm's weights, 0 for None, and whether they are fp32."""
    return (0, False) if weight is None else (weight.data_ptr(), weight.dtype == torch.float32)


def place_heads(
    heads: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor, q: Tensor, k: Tensor, v: Tensor
) -> None:
    dtype = heads.dtype
    at = _rows(heads, dims=3)
    (tokens, _, head_dim) = heads.shape
    q_heads = q.shape[1]
    kv_heads = k.shape[1]
    if heads.shape[1] != q_heads + 2 * kv_heads or head_dim % 2:
        raise misfit("heads are those of q, k and v, of an even size", heads=heads, q=q, k=k)
    _cpu_kernels.place_heads(
        dtype=KERNEL_DTYPES[dtype], heads=at, weight=_norm_weight(weight, dtype, (q_heads + kv_heads, head_dim)),
        cos=_rows(cos, dims=3, dtype=torch.float32, shape=(tokens, 1, head_dim)),
        sin=_rows(sin, dims=3, dtype=torch.float32, shape=(tokens, 1, head_dim // 2)),
        q=_rows(q, dims=3, dtype=dtype, shape=(tokens, q_heads, head_dim)),
        k=_rows(k, dims=3, dtype=dtype, shape=(tokens, kv_heads, head_dim)),
        v=_rows(v, dims=3, dtype=dtype, shape=(tokens, kv_heads, head_dim)),
        tokens=tokens, q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, eps=eps, threads=torch.get_num_threads(),
    )  # fmt: skip


def silu_and_mul(gate_up: Tensor) -> Tensor:
    return _gated_unit("silu", gate_up)


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    return _gated_unit("gelu_tanh", gate_up)


def clamped_swiglu(gate_up: Tensor) -> Tensor:
    return _gated_unit("clamped_swiglu", gate_up)


def _gated_unit(activation: str, gate_up: Tensor) -> Tensor:
    rows = gate_up.shape[0]
    size = gate_up.shape[1] // 2
    y = gate_up.new_empty(rows, size)
    _cpu_kernels.gated_unit(
        gate_up=_rows(gate_up, shape=(rows, 2 * size)), y=(y.data_ptr(), size), dtype=KERNEL_DTYPES[gate_up.dtype],
        activation=activation, rows=rows, size=size, threads=torch.get_num_threads(),
    )  # fmt: skip
    return y


def cos_sin(angles: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    tokens, pairs = angles.shape
    cos = angles.new_empty(tokens, 2 * pairs)
    sin = angles.new_empty(tokens, pairs)
    _cpu_kernels.cos_sin(
        angles=_rows(angles, dtype=torch.float32), cos=address(cos), sin=address(sin), rows=tokens, size=pairs,
        factor=factor, threads=torch.get_num_threads(),
    )  # fmt: skip
    return cos, sin


def softmax(x: Tensor, *, log: bool = False) -> Tensor:
    y = x.new_empty(x.shape)
    at = _rows(x, dtype=torch.float32)
    if x.shape[1]:
        _cpu_kernels.softmax(
            x=at, y=address(y), rows=x.shape[0], size=x.shape[1], log=log, threads=torch.get_num_threads()
        )
    return y


def sigmoid(x: Tensor) -> Tensor:
    y = x.new_empty(x.shape)
    _cpu_kernels.sigmoid(
        x=_rows(x, dtype=torch.float32), y=address(y), rows=x.shape[0], size=x.shape[1], threads=torch.get_num_threads()
    )
    return y


def likeliest(logits: Tensor) -> Tensor:
    at = _rows(logits)
    (rows, size) = logits.shape
    if not size:
        raise misfit("likeliest takes at least one logit in a row", logits=logits)
    tokens = torch.empty(rows, dtype=torch.int64)
    _cpu_kernels.likeliest(
        dtype=KERNEL_DTYPES[logits.dtype], logits=at, tokens=tokens.data_ptr(), rows=rows, size=size,
        threads=torch.get_num_threads(),
    )  # fmt: skip
    return tokens


def draw(scores: Tensor, tokens: Tensor, starts: Tensor) -> Tensor:
    tokens = tokens.expand(scores.shape)
    if tokens.dtype != torch.int64 or starts.dtype != torch.int64 or starts.shape != scores.shape[:1]:
        raise misfit("draw takes int64 tokens and a start for each row", tokens=tokens, starts=starts)
    if tokens.stride()[1] != 1:
        tokens = tokens.contiguous()
    starts = starts.contiguous()
    drawn = torch.zeros(scores.shape[0], dtype=torch.int64)
    _cpu_kernels.draw(
        scores=_rows(scores, dtype=torch.float32), tokens=address(tokens), starts=starts.data_ptr(),
        drawn=drawn.data_ptr(), rows=scores.shape[0], size=scores.shape[1], threads=torch.get_num_threads(),
    )  # fmt: skip
    return drawn


def store_kv(pool: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    (blocks, planes, kv_heads, block_size, head_dim) = pool.shape
    k_strides = k.stride()
    v_strides = v.stride()
    fits = planes == 2 and pool.stride()[1:] == (kv_heads * block_size * head_dim, block_size * head_dim, head_dim, 1)
    fits = fits and k.shape == v.shape == (slots.shape[0], kv_heads, head_dim) and pool.dtype == k.dtype == v.dtype
    fits = fits and k_strides[2] == v_strides[2] == 1 and slots.dtype == torch.int64 and slots.is_contiguous()
    if not (fits and pool.is_cpu and k.is_cpu and v.is_cpu and slots.is_cpu):
        rule = (
            "store_kv takes a pool [blocks, 2, kv_heads, block_size, head_dim] of dense blocks, k and v"
            " [tokens, kv_heads, head_dim] of its dtype with dense heads, and int64 slots [tokens], all on the CPU"
        )
        raise misfit(rule, pool=pool, k=k, v=v, slots=slots)
    size = pool.element_size()
    _cpu_kernels.store_kv(
        pool=pool.data_ptr(), block_stride=pool.stride()[0] * size, blocks=blocks,
        k=k.data_ptr(), k_strides=(k_strides[0] * size, k_strides[1] * size),
        v=v.data_ptr(), v_strides=(v_strides[0] * size, v_strides[1] * size),
        slots=slots.data_ptr(), tokens=k.shape[0], kv_heads=kv_heads, block_size=block_size,
        head_bytes=head_dim * size, threads=torch.get_num_threads(),
    )  # fmt: skip


def misfit(rule: str, **tensors: Tensor | None) -> ValueError:
    """The error for tensors that break a rule."""
    described = [
        f"{name} {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()} on {tensor.device}"
        for name, tensor in tensors.items()
        if tensor is not None
    ]
    return ValueError(f"{rule}; got {', '.join(described)}.")


# ---- a decoder layer for few rows


# A matrix as the kernels read it: rows in the network's dtype, interleaved, or packed, valid while its tensors live.
WeightPart = Tensor | _cpu_kernels.DenseWeight | _cpu_kernels.PackedWeight
Product = tuple[Sequence[WeightPart], Tensor | None]  # the parts of the weight, one below the other; bias [out]


class LayerNorms(NamedTuple):
    """The weights of a layer's norms, all in the layer's dtype or all in fp32; None where there is no norm."""

    input: Tensor  # [hidden]
    heads: Tensor | None  # of q and k: [heads, head_dim]
    mlp: Tensor  # [hidden]: before the MLP
    attention_output: Tensor | None  # [hidden]
    mlp_output: Tensor | None  # [hidden]
    eps: float


class HeadLayout(NamedTuple):
    """How the heads stand in a projection to q, k and v."""

    head_dim: int
    rotary_dim: int  # the first features of each head of q and k, rotated in pairs (i, i + rotary_dim / 2)
    gated: bool = False  # each head of q is followed by the gate of its output


class FewRowLayer:
    """A decoder layer without its attention for few rows: two calls instead of ten for the single operators.

    The kernels and their order are those of the functions above, and so are the bits. With few rows the Python code
    between two operators takes longer than most operators. Keeps references to the tensors, which may be filled later.
    """

    def __init__(
        self, norms: LayerNorms, products: Sequence[Product], dtype: torch.dtype, heads: HeadLayout, activation: str
    ) -> None:
        """products: qkv, o, gate and up, down; heads: of qkv. All tensors are dense, and but for norms of `dtype`."""
        self._tensors = (norms, products)
        self._hidden = norms.input.shape[0]
        self._dtype = dtype
        self._gated = heads.gated
        (qkv, o, gate_up, down) = (
            _cpu_kernels.Linear(parts=[_matrix(part) for part in parts], bias=_address(bias))
            for parts, bias in products
        )
        self._layer = _cpu_kernels.Layer(
            isa=choose(None, f"linear.{KERNEL_DTYPES[dtype]}"),
            packed_isa=choose(None, "packed"),
            dtype=KERNEL_DTYPES[dtype],
            input_norm=_norm_address(norms.input),
            heads_norm=_norm_address(norms.heads),
            mlp_norm=_norm_address(norms.mlp),
            attention_output_norm=_norm_address(norms.attention_output),
            mlp_output_norm=_norm_address(norms.mlp_output),
            eps=norms.eps,
            qkv=qkv,
            o=o,
            gate_up=gate_up,
            down=down,
            head_dim=heads.head_dim,
            rotary_dim=heads.rotary_dim,
            gated=heads.gated,
            activation=activation,
        )

    def takes(self, x: Tensor) -> bool:
        """Whether x [rows, hidden] has at most MAX_LAYER_ROWS rows and the dtype of the weights."""
        fits = x.shape[0] <= MAX_LAYER_ROWS and x.dtype == self._dtype
        return fits and takes(x, 2) and x.shape[1] == self._hidden

    def project(
        self, x: Tensor, cos: Tensor, sin: Tensor, q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None = None
    ) -> None:
        """Write the rows' q [rows, heads, head_dim] and k, v [rows, kv_heads, head_dim], with RoPE applied.

        gate: where the gates go [rows, heads * head_dim], if q has any.
        """
        if (gate is not None) != self._gated:
            given = "no memory for gates" if gate is None else "memory for gates"
            raise ValueError(f"gates are written where queries have them; got {given} for gated={self._gated}.")
        threads = torch.get_num_threads()
        q_heads = q.shape[1]
        kv_heads = k.shape[1]
        x_at, cos_at, sin_at, q_at, k_at, v_at = (address(tensor) for tensor in (x, cos, sin, q, k, v))
        gate_at = (0, 0) if gate is None else address(gate)
        self._layer.project(x_at, cos_at, sin_at, q_at, k_at, v_at, gate_at, x.shape[0], q_heads, kv_heads, threads)

    def recur(
        self,
        weights: _cpu_kernels.DeltaWeights,
        runs: _cpu_kernels.DeltaRuns,
        x: Tensor,
        conv: Tensor,
        states: Tensor,
        projected: Tensor,
        y: Tensor,
    ) -> None:
        """Write the input projection of a recurrent layer to `projected` and what its output projection reads to y, and
        advance its states. See `cpu_delta.FewRows`.
        """
        x_at, conv_at, states_at, projected_at, y_at = (address(tensor) for tensor in (x, conv, states, projected, y))
        self._layer.recur(weights, runs, x_at, conv_at, states_at, projected_at, y_at, torch.get_num_threads())

    def finish_(self, x: Tensor, attended: Tensor) -> None:
        """Project attended [rows, heads * head_dim], add it to x [rows, hidden], then add the MLP of the sum to x."""
        self._layer.finish(address(x), address(attended), x.shape[0], torch.get_num_threads())


def few_row_layer(
    norms: LayerNorms,
    products: Sequence[tuple[Sequence[WeightPart] | None, Tensor | None]],
    dtype: torch.dtype,
    heads: HeadLayout,
    activation: str,
) -> FewRowLayer | None:
    """The layer of these tensors, or None if a weight is None, or they are not on the CPU or not of `dtype`."""
    if not norms.input.is_cpu or norms.input.dtype not in (dtype, torch.float32) or dtype not in KERNEL_DTYPES:
        return None
    supported = []
    for parts, bias in products:
        if parts is None or any(isinstance(p, Tensor) and not (p.is_cpu and p.dtype == dtype) for p in parts):
            return None
        supported.append((parts, bias))
    return FewRowLayer(norms, supported, dtype, heads, activation)


def interleaved_part(weight: Tensor) -> WeightPart:
    """A weight that `interleave_` has reordered, as a part of a `Product`; valid as long as the tensor lives."""
    return _matrix(weight, interleaved=True)


def _matrix(part: WeightPart, *, interleaved: bool = False) -> _cpu_kernels.DenseWeight | _cpu_kernels.PackedWeight:
    if not isinstance(part, Tensor):
        return part
    out_features, in_features = part.shape
    return _cpu_kernels.DenseWeight(
        address=part.data_ptr(), in_features=in_features, out_features=out_features, interleaved=interleaved
    )


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
