"""The seam of stored weights: how a matrix lies in the checkpoint and in memory, and how it is applied. No torch.

`Linear` and model files know nothing else about a matrix. `dense_weight.DenseWeight` is the plain form; a quantized
checkpoint brings its own `LinearMethod`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from nanovllm.ops.cpu_kernels import WeightPart

FLOATS = ("F64", "F32", "F16", "BF16")  # safetensors' codes of the types that convert to any other
# the dimensions of a matrix
ROWS = 0
COLUMNS = 1


# Of each axis of a tensor the slices that are read, one behind the other; () is the whole tensor.
Part = Sequence[Sequence[slice]]


class Axis(NamedTuple):
    """What an entry along an axis of a checkpoint tensor stands for: `size` rows or columns of the matrix."""

    dimension: int
    size: int = 1


class CheckpointTensor(NamedTuple):
    """What a checkpoint must hold under a name, known before anything is allocated.

    shape: as stored, unless it is one of other_shapes; dtypes: the types that are read, in the checkpoint's own codes;
    required: False if the tensor may be absent. axes: how tensor-parallel ranks divide it with the matrix. check: of a
    tensor that fills nothing and is only checked, by every rank as a whole; raises ModelError. held: the rows and the
    columns of the matrix that this rank has, () for all.
    """

    shape: tuple[int, ...]
    dtypes: tuple[str, ...] = FLOATS
    required: bool = True
    other_shapes: tuple[tuple[int, ...], ...] = ()
    axes: tuple[Axis | None, ...] = (Axis(ROWS), Axis(COLUMNS))
    check: Callable[[Tensor], None] | None = None
    held: tuple[Sequence[range], Sequence[range]] = ((), ())

    def part(self, shape: Sequence[int]) -> Part:
        """The part of the tensor, which has this shape in the file, that this rank reads.

        An axis with one entry is not divided: the entry holds for all rows or columns.
        """
        slices_of_axes = [
            [slice(span.start // axis.size, -(-span.stop // axis.size)) for span in self.held[axis.dimension]]
            if axis is not None and size > 1
            else []
            for axis, size in zip(self.axes, shape, strict=False)
        ]
        return [slices or [slice(None)] for slices in slices_of_axes] if any(slices_of_axes) else ()


NamedTensors = Iterator[tuple[str, CheckpointTensor]]


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """The destination of one checkpoint tensor: a view of a parameter, and the shape that the tensor must have.

    The view may be wider than the tensor (one norm weight for several heads); `write` broadcasts.
    convert: from the checkpoint's form to that of the view; raises ModelError for values that cannot be used.
    randomize: fills the view of a quantized weight with random values.
    """

    view: Tensor
    shape: tuple[int, ...]
    convert: Callable[[Tensor], Tensor] | None = None
    randomize: Callable[[torch.Generator], None] | None = None

    def write(self, tensor: Tensor) -> None:
        """Copy `tensor` (of `shape`, any device) into the parameter and convert it."""
        self.view.copy_(tensor if self.convert is None else self.convert(tensor))


NamedSlots = Iterator[tuple[str, WeightSlot]]


def slot_of(view: Tensor) -> WeightSlot:
    """The slot of a checkpoint tensor with exactly the shape of `view`."""
    return WeightSlot(view, tuple(view.shape))


class StoredWeight(Protocol):
    """A weight matrix [out, in] as it stays in memory. Allocated and not initialized; its slots fill it."""

    @property
    def dense(self) -> Tensor | None:
        """The matrix, if it is stored as plain floating-point numbers; else None."""
        ...

    def apply(self, x: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        """x W^T + b: [rows, in] -> [rows, out], in the dtype of x. out: memory for it, whose rows may be strided."""
        ...

    def rows(self, indices: Tensor) -> Tensor:
        """The rows of the matrix in the dtype of the network: int64 [n] -> [n, in]."""
        ...

    def slots(self) -> NamedSlots:
        """The destination of each checkpoint tensor, by name, as `LinearMethod.tensors` lists those that are stored.

        After `finish_loading` the views may be copies.
        """
        ...

    def finish_loading(self) -> None:
        """Called when all slots are filled: the weight may now be rearranged for its kernels.

        Another call changes nothing.
        """
        ...

    def tensors(self) -> Iterable[Tensor]:
        """All that the matrix is read from. Whoever lets them refer to other memory with the same content calls
        `Module.weights_moved`."""
        ...

    def read_from(self, tensors: Sequence[Tensor]) -> StoredWeight:
        """The same matrix, read from others that are like `tensors()`: the same order, shapes and dtypes.

        They may be on another device, whose kernels need not read this order.
        """
        ...

    def for_cpu(self) -> StoredWeight:
        """A copy of the finished matrix on the CPU, in the order of its kernels. Plain numbers stay in rows."""
        ...

    def take_(self, other: StoredWeight) -> None:
        """Become the matrix of `other`, a weight of the same modules on the same device, in the same memory as before.

        `other` may have the order of the CPU's kernels, in which it was finished there. Raises ValueError if it has
        another form.
        """
        ...

    def kernel_parts(self) -> Sequence[WeightPart] | None:
        """The matrix as the kernels of a whole layer read it on the CPU, one part below the other, or None."""
        ...

    def use_torch_products(self) -> None:
        """Let torch multiply many rows at once if it has a product for this form."""
        ...


class LinearMethod(Protocol):
    """How a quantized checkpoint stores its matrices. Plain data: comparable and picklable.

    A module is the name of a matrix in the checkpoint without ".weight", such as "model.layers.0.self_attn.q_proj",
    "model.embed_tokens" or "lm_head". A method may store some modules in the plain form.
    """

    @property
    def name(self) -> str:
        """The name of the format, for messages and logs."""
        ...

    def tensors(self, module: str, out_features: int, in_features: int) -> NamedTensors:
        """Name and form of each checkpoint tensor of a matrix, without its bias. Raises ModelError for sizes that the
        format cannot have."""
        ...

    def units(self, module: str, out_features: int, in_features: int) -> tuple[int, int]:
        """The multiples at which ranks may divide the rows and the columns of a matrix."""
        ...

    def weight_bytes(self, module: str, out_features: int, in_features: int, itemsize: int) -> int:
        """Bytes of the matrix in memory, where an element of the network's dtype takes `itemsize`.

        Kernels may round sizes up by a few rows, which is not counted.
        """
        ...

    def create(
        self, parts: Mapping[str, int], in_features: int, dtype: torch.dtype, device: torch.device
    ) -> StoredWeight:
        """The matrix of modules that share an input; `parts` maps each module to its output features, in order."""
        ...


def dense_tensors(module: str, out_features: int, in_features: int) -> NamedTensors:
    """`LinearMethod.tensors` of a matrix in the plain form."""
    yield f"{module}.weight", CheckpointTensor((out_features, in_features))
