"""The linear layers of a network. Each knows its modules in the checkpoint, and which part of them its rank has.

The scheme of the ranks is Megatron's (Shoeybi et al., "Megatron-LM", 2019): column-parallel layers hold some of the
outputs, row-parallel ones some of the inputs, so that the sum of all ranks' products is the product.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from nanovllm.errors import ConfigError
from nanovllm.layers.build_context import BuildContext, Split, held_ranges
from nanovllm.layers.dense_weight import create_weight
from nanovllm.layers.linear_method import (
    CheckpointTensor,
    NamedSlots,
    NamedTensors,
    StoredWeight,
    dense_tensors,
    slot_of,
)
from nanovllm.layers.module import Matrix, Module, Weights

Rows = Mapping[
    str, Sequence[Split]
]  # of each module of the checkpoint the things that its rows are, one below the other


class RowAdapters(Protocol):
    """What some rows of a product get in addition, such as the low-rank products of LoRA adapters."""

    def add_(self, linear: Linear, x: Tensor, y: Tensor) -> None:
        """Add to y [rows, out], which is `linear` of x [rows, in]."""
        ...


class Linear(Module):
    """y = x W^T + b for modules of the checkpoint that share an input, such as q, k and v, as one product.

    weight: of shape [sum of part sizes, in_features]; bias: [sum of part sizes] or None.
    """

    def __init__(
        self, rows: Rows, columns: Split, build: BuildContext, *, bias: bool = False, adds_bias: bool = True
    ) -> None:
        """rows: by the names of the modules below `build`; columns: the input features.

        adds_bias: False on a rank to whose product another one adds the bias. Raises ConfigError if this rank's part
        begins or ends where the matrix cannot be divided as it is stored.
        """
        self._build = build
        self._rows = {f"{build.prefix}{name}": splits for name, splits in rows.items()}
        self._columns = columns
        self._has_bias = bias
        self.in_features = columns.size
        self.parts = {module: sum(split.size for split in splits) for module, splits in self._rows.items()}
        if build.group is not None and build.method is not None:
            self._check_division()
        self.weight = create_weight(build.method, self.parts, self.in_features, build.dtype, build.device)
        out_features = sum(self.parts.values())
        has_own = bias and adds_bias
        self.bias = torch.empty(out_features, dtype=build.dtype, device=build.device) if has_own else None

    def __call__(self, x: Tensor, adapters: RowAdapters | None = None) -> Tensor:
        """x: [rows, in_features] -> [rows, sum of part sizes], in the order of the parts."""
        y = self.weight.apply(x, self.bias)
        if adapters is not None:
            adapters.add_(self, x, y)
        return y

    def held(self, module: str) -> tuple[Sequence[range], Sequence[range]]:
        """The rows and the columns of a module's matrix that this rank has; () for all. See `CheckpointTensor.held`."""
        if self._build.group is None:
            return (), ()
        rows = held_ranges(self._rows[module])
        is_whole = all(split.size == split.total for split in self._rows[module])
        return () if is_whole else rows, self._columns.parts

    def whole_shape(self, module: str) -> tuple[int, int]:
        """Output and input features of a module's matrix over all ranks."""
        return sum(split.total for split in self._rows[module]), self._columns.total

    def own_tensors(self) -> NamedTensors:
        method = self._build.method
        for module in self._rows:
            shape = self.whole_shape(module)
            held = self.held(module)
            tensors = dense_tensors(module, *shape) if method is None else method.tensors(module, *shape)
            for name, tensor in tensors:
                yield name, tensor._replace(held=held)
            if self._has_bias:
                yield f"{module}.bias", CheckpointTensor(shape[:1], held=held)

    def own_slots(self) -> NamedSlots:
        yield from self.weight.slots()
        if self.bias is not None:
            for module, part in zip(self.parts, self.bias.split(list(self.parts.values())), strict=True):
                yield f"{module}.bias", slot_of(part)

    def own_matrices(self) -> Iterable[Matrix]:
        return ((module, rows, self.in_features) for module, rows in self.parts.items())

    def own_weights(self) -> Iterable[StoredWeight]:
        return (self.weight,)

    def own_matrix_weights(self) -> Weights:
        return stored_weights(self.own_matrices(), self._build)

    def own_vector_weights(self) -> Weights:
        return Weights() if self.bias is None else Weights(self.bias.numel(), self.bias.nbytes)

    def _check_division(self) -> None:
        """Raise ConfigError if a part of a matrix begins or ends where its storage cannot be divided."""
        method = self._build.method
        assert method is not None
        for module in self._rows:
            shape = self.whole_shape(module)
            for held, total, unit, what in zip(
                self.held(module), shape, method.units(module, *shape), ("rows", "columns"), strict=True
            ):
                if any(part.start % unit or (part.stop % unit and part.stop != total) for part in held):
                    parts = " and ".join(f"{part.start} to {part.stop - 1}" for part in held)
                    assert self._build.group is not None
                    raise ConfigError(
                        f"tensor_parallel_size={self._build.num_ranks}: rank {self._build.group.rank} would hold "
                        f"{what} {parts} of {module}, and its {method.name} form can be divided at multiples of {unit} "
                        "only; take another number of ranks, or a checkpoint in another form"
                    )


def stored_weights(matrices: Iterable[Matrix], build: BuildContext) -> Weights:
    """How many weights matrices have, and their bytes in memory in the form in which they are stored."""
    count = 0
    nbytes = 0
    itemsize = build.dtype.itemsize
    for module, rows, columns in matrices:
        count += rows * columns
        method = build.method
        dense = rows * columns * itemsize
        nbytes += dense if method is None else method.weight_bytes(module, rows, columns, itemsize)
    return Weights(count, nbytes)


class ReplicatedLinear(Linear):
    """A layer that every rank has whole."""

    def __init__(
        self, in_features: int, out_features: Mapping[str, int], build: BuildContext, *, bias: bool = False
    ) -> None:
        """out_features: of each module."""
        rows = {name: (Split.whole(size),) for name, size in out_features.items()}
        super().__init__(rows, Split.whole(in_features), build, bias=bias)


class ColumnParallelLinear(Linear):
    """A layer of which each rank has some outputs. Several modules that share an input are one product."""

    def __init__(self, in_features: int, rows: Rows, build: BuildContext, *, bias: bool = False) -> None:
        super().__init__(rows, Split.whole(in_features), build, bias=bias)


class QKVParallelLinear(ColumnParallelLinear):
    """The projections to queries, keys and values, of which each rank has some heads.

    Without a projection to values the keys are the values, too.
    """

    def __init__(
        self,
        in_features: int,
        heads: Split,
        kv_heads: Split,
        head_dim: int,
        build: BuildContext,
        *,
        bias: bool = False,
        gate: bool = False,
        kv_parts: Sequence[str] = ("k_proj", "v_proj"),
        merged: bool = False,
    ) -> None:
        """gate: whether each head's query is followed by the gate of its output; kv_parts: the projections that give
        keys and values; merged: whether the checkpoint has one matrix, qkv_proj, for all."""
        q = heads.times(head_dim * (1 + gate))
        kv = kv_heads.times(head_dim)
        rows: Rows = {"qkv_proj": (q, kv, kv)} if merged else {"q_proj": (q,), **dict.fromkeys(kv_parts, (kv,))}
        super().__init__(in_features, rows, build, bias=bias)
        self._shared = slice(q.size, None) if tuple(kv_parts) == ("k_proj",) else None

    def __call__(self, x: Tensor, adapters: RowAdapters | None = None) -> Tensor:
        """x: [rows, in_features] -> [rows, features of q, k and v]."""
        y = super().__call__(x, adapters)
        return y if self._shared is None else torch.cat((y, y[:, self._shared]), dim=1)


class RowParallelLinear(Linear):
    """A layer of which each rank has some inputs. The ranks' products are summed by the caller."""

    def __init__(
        self, name: str, columns: Split, out_features: int, build: BuildContext, *, bias: bool = False
    ) -> None:
        """name: of the module. The bias is added by the first rank."""
        super().__init__({name: (Split.whole(out_features),)}, columns, build, bias=bias, adds_bias=build.is_first_rank)
