"""A decoder layer without its attention for few rows on the CPU: two calls instead of ten for the single operators.

The kernels and their order are those of `cpu_linear` and `cpu_rows`, and so are the bits. With few rows the Python code
between two operators takes longer than most operators.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nanovllm.ops import _cpu_kernels, cpu_isa, cpu_linear, cpu_rows

MAX_ROWS = 24  # with more rows the overhead of Python is negligible

Product = tuple[Tensor, Tensor | None]  # weight [out, in], bias [out]


class FewRowLayer:
    """The norms and products of one layer. Keeps references to the tensors, which may be filled later."""

    def __init__(
        self,
        norms: tuple[Tensor, Tensor | None, Tensor],
        products: Sequence[Product],
        eps: float,
        head_dim: int,
    ) -> None:
        """norms: weights of the input norm [hidden], of the q and k norm [heads, head_dim] or None, and of the norm
        after attention [hidden]; products: qkv, o, gate and up, down. All dense and of one dtype."""
        self._tensors = (norms, products)
        self._hidden = products[0][0].shape[1]
        self._dtype = products[0][0].dtype
        before, heads, after = norms
        self._layer = _cpu_kernels.Layer(
            isa=cpu_isa.choose(),
            dtype=cpu_isa.KERNEL_DTYPES[self._dtype],
            norms=_cpu_kernels.Norms(input=before.data_ptr(), heads=_address(heads), post=after.data_ptr(), eps=eps),
            **{name: _product(*of) for name, of in zip(("qkv", "o", "gate_up", "down"), products, strict=True)},
            head_dim=head_dim,
        )

    def takes(self, x: Tensor) -> bool:
        """Whether x [rows, hidden] has at most MAX_ROWS rows and the dtype of the weights."""
        fits = x.shape[0] <= MAX_ROWS and x.dtype == self._dtype
        return fits and cpu_rows.takes(x, 2) and x.shape[1] == self._hidden

    def project(self, x: Tensor, cos: Tensor, sin: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Write the rows' q [rows, heads, head_dim] and k, v [rows, kv_heads, head_dim], with RoPE applied."""
        threads, q_heads, kv_heads = torch.get_num_threads(), q.shape[1], k.shape[1]
        x_at, cos_at, sin_at, q_at, k_at, v_at = (cpu_rows.address(tensor) for tensor in (x, cos, sin, q, k, v))
        self._layer.project(x_at, cos_at, sin_at, q_at, k_at, v_at, x.shape[0], q_heads, kv_heads, threads)

    def finish_(self, x: Tensor, attended: Tensor) -> None:
        """Project attended [rows, heads * head_dim], add it to x [rows, hidden], then add the MLP of the sum to x."""
        self._layer.finish(cpu_rows.address(x), cpu_rows.address(attended), x.shape[0], torch.get_num_threads())


def few_row_layer(
    norms: tuple[Tensor, Tensor | None, Tensor],
    products: Sequence[Product],
    eps: float,
    head_dim: int,
) -> FewRowLayer | None:
    """The layer of these tensors, or None if they are not on the CPU or their dtype is not supported."""
    if not all(cpu_linear.takes(weight, weight) for weight, _ in products):
        return None
    return FewRowLayer(norms, products, eps, head_dim)


def _product(weight: Tensor, bias: Tensor | None) -> _cpu_kernels.Linear:
    out_features, in_features = weight.shape
    return _cpu_kernels.Linear(
        weight=weight.data_ptr(), bias=_address(bias), in_features=in_features, out_features=out_features
    )  # fmt: skip


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
