"""What common operators make of meta tensors, from shapes and dtypes alone.

Torch's own functions for meta tensors are written in Python. The first call imports torch's compiler or its symbolic
shapes, which takes up to two seconds. For an operator or a case that is not here, torch's function is called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise, zip_longest
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

_META = torch.device("meta")
_Result = Tensor | tuple[Tensor, ...] | None


def meta_result(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Result:
    """The result of the ATen operator `func`, uninitialized as all meta tensors; None if torch has to say."""
    name = func._schema.name
    if name in _IN_PLACE:
        return args[0] if args[0].is_meta else None
    if name == "aten::arange" and len(args) == 1 and kwargs.get("device") == _META and "dtype" not in kwargs:
        return _made([args[0]], torch.int64) if isinstance(args[0], int) else None
    make = _RESULTS.get(name)
    if make is None:
        return None
    given = [each for arg in args for each in (arg if isinstance(arg, list | tuple) else [arg])]
    tensors = [each for each in given if isinstance(each, Tensor)]
    if not tensors or not all(tensor.is_meta and _in_order(tensor) for tensor in tensors):
        return None
    return make(*args, **kwargs)


def _in_order(tensor: Tensor) -> bool:
    """Whether no axis is stored further out than one before it: results are contiguous then."""
    strides = [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]
    return all(outer >= inner for outer, inner in pairwise(strides))


def _made(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=_META)


def _common_shape(*operands: Any) -> list[int]:
    """The shape of broadcast operands, of which some may be numbers."""
    shapes = [operand.shape for operand in operands if isinstance(operand, Tensor)]
    sizes = zip_longest(*(reversed(shape) for shape in shapes), fillvalue=1)
    return [0 if 0 in size else max(size) for size in sizes][::-1]


def _elementwise(x: Any, y: Any, *, alpha: float = 1) -> Tensor:
    return _made(_common_shape(x, y), torch.result_type(x, y))


def _comparison(x: Any, y: Any) -> Tensor:
    return _made(_common_shape(x, y), torch.bool)


def _like(x: Tensor, dim: int = -1, dtype: torch.dtype | None = None, *, approximate: str = "none") -> Tensor | None:
    """A function of each number, or along an axis, that keeps the floating dtype."""
    return _made(x.shape, x.dtype) if x.is_floating_point() and dtype is None else None


def _rows_shape(x: Tensor, dims: Any, keepdim: bool) -> list[int] | None:
    """The shape of x without its last axis; None if another is meant."""
    last = dims == -1 or dims == [-1]
    return [*x.shape[:-1], *[1] * keepdim] if last and x.dim() else None


def _reduced(x: Tensor, dims: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor | None:
    shape = _rows_shape(x, dims, keepdim)
    return _made(shape, x.dtype) if shape is not None and dtype is None and x.is_floating_point() else None


def _sum(x: Tensor, dims: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor | None:
    shape = _rows_shape(x, dims, keepdim)
    if shape is None or dtype is not None:
        return None
    return _made(shape, x.dtype if x.is_floating_point() else torch.int64)


def _argmax(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor | None:
    shape = _rows_shape(x, dim, keepdim)
    return None if shape is None else _made(shape, torch.int64)


def _ordered(x: Tensor, dim: int = -1, descending: bool = False, *, stable: bool | None = None) -> _Result:
    return _made(x.shape, x.dtype), _made(x.shape, torch.int64)


def _topk(x: Tensor, k: int, dim: int = -1, largest: bool = True, is_sorted: bool = True) -> _Result:
    if dim != -1:
        return None
    shape = (*x.shape[:-1], k)
    return _made(shape, x.dtype), _made(shape, torch.int64)


def _gather(x: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Tensor:
    return _made(index.shape, x.dtype)


def _index(x: Tensor, indices: Sequence[Tensor | None]) -> Tensor | None:
    """Rows by their numbers; None for other indices."""
    if len(indices) != 1 or indices[0] is None or indices[0].dtype != torch.int64:
        return None
    return _made((*indices[0].shape, *x.shape[1:]), x.dtype)


def _embedding(weight: Tensor, indices: Tensor, *_: Any) -> Tensor:
    return _made((*indices.shape, weight.shape[1]), weight.dtype)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return _made((*x.shape[:-1], weight.shape[0]), x.dtype)


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor | None:
    first = tensors[0]
    if any(tensor.dtype != first.dtype or tensor.dim() != first.dim() for tensor in tensors):
        return None
    shape = list(first.shape)
    shape[dim] = sum(each.shape[dim] for each in tensors)
    return _made(shape, first.dtype)


def _stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor | None:
    first = tensors[0]
    if any(tensor.dtype != first.dtype or tensor.shape != first.shape for tensor in tensors):
        return None
    shape = list(first.shape)
    shape.insert(dim if dim >= 0 else first.dim() + 1 + dim, len(tensors))
    return _made(shape, first.dtype)


_IN_PLACE = frozenset(
    f"aten::{name}" for name in ("add_", "mul_", "div_", "addcmul_", "rsqrt_", "__iand__", "copy_", "masked_fill_")
)
_RESULTS: Mapping[str, Callable[..., _Result]] = MappingProxyType(
    {
        f"aten::{name}": make
        for make, names in (
            (_elementwise, ("add", "sub", "mul", "__and__", "__or__", "__xor__", "__lshift__", "__rshift__")),
            (_comparison, ("gt", "ge", "lt", "le")),
            (_like, ("square", "cos", "sin", "log", "neg", "silu", "gelu", "cumsum")),
            (_like, ("sigmoid", "softmax", "log_softmax")),
            (_reduced, ("mean", "amax")),
            (_sum, ("sum",)),
            (_argmax, ("argmax",)),
            (_ordered, ("sort",)),
            (_topk, ("topk",)),
            (_gather, ("gather",)),
            (_index, ("index",)),
            (_embedding, ("embedding",)),
            (_linear, ("linear",)),
            (_cat, ("cat",)),
            (_stack, ("stack",)),
        )
        for name in names
    }
)
