"""A decoder layer on few rows on the CPU, but for its attention: two calls where the single operators take ten.

The kernels and their order are those of `cpu_linear` and `cpu_rows`, and so are the bits. With few rows the way through
Python between two operators is longer than most of the operators, and memory stands idle meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nanovllm.ops import _cpu_kernels, cpu_isa, cpu_linear, cpu_rows

MAX_ROWS = 24  # with more, the products take far longer than the way to them

Product = tuple[Tensor, Tensor | None]  # weight [out, in], bias [out]


class FewRowLayer:
    """The norms and products of one layer. Keeps the tensors; what is written into them later counts."""

    def __init__(
        self,
        norms: tuple[Tensor, Tensor | None, Tensor],
        products: Sequence[Product],
        eps: float,
        head_dim: int,
    ) -> None:
        """norms: of the input [hidden], of the heads of q and k [heads, head_dim] if they have one, after attention
        [hidden]; products: qkv, o, gate and up, down. All dense and of one dtype; see `few_row_layer`."""
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
        """Whether these rows [rows, hidden] are few enough, and of the weights' dtype."""
        fits = x.shape[0] <= MAX_ROWS and x.dtype == self._dtype
        return fits and cpu_rows.takes(x, 2) and x.shape[1] == self._hidden

    def project(self, x: Tensor, cos: Tensor, sin: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Write the rows' q [rows, heads, head_dim] and k, v [rows, kv_heads, head_dim], turned to their positions."""
        threads, q_heads, kv_heads = torch.get_num_threads(), q.shape[1], k.shape[1]
        x_at, cos_at, sin_at, q_at, k_at, v_at = (cpu_rows.address(tensor) for tensor in (x, cos, sin, q, k, v))
        self._layer.project(x_at, cos_at, sin_at, q_at, k_at, v_at, x.shape[0], q_heads, kv_heads, threads)

    def finish_(self, x: Tensor, attended: Tensor) -> None:
        """Add to x [rows, hidden] what projection and MLP make of the attended rows [rows, heads * head_dim]."""
        self._layer.finish(cpu_rows.address(x), cpu_rows.address(attended), x.shape[0], torch.get_num_threads())


def few_row_layer(
    norms: tuple[Tensor, Tensor | None, Tensor],
    products: Sequence[Product],
    eps: float,
    head_dim: int,
) -> FewRowLayer | None:
    """The layer of these tensors, or None where they are not on the CPU or of no dtype that the kernels take."""
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
