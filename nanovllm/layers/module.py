"""What a network is made of: a tree of modules that know the names of their tensors in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from nanovllm.layers.linear_method import CheckpointTensor, NamedSlots, NamedTensors, StoredWeight, WeightSlot

Matrix = tuple[str, int, int]  # module of the checkpoint, output features, input features


class Weights(NamedTuple):
    """How many weights something has in memory, and their bytes."""

    number: int = 0
    nbytes: int = 0

    def __add__(self, other: object) -> Weights:
        if not isinstance(other, Weights):
            return NotImplemented
        return Weights(self.number + other.number, self.nbytes + other.nbytes)


class Module:
    """A part of a network. Modules that it has as attributes, alone or in a list, are its children.

    Parameters are allocated and not initialized. On the meta device they take no memory, and a network tells its sizes
    from there. Unlike a `torch.nn.Module` it knows which tensors of the checkpoint fill it, of which a rank may hold a
    part, and in which form they lie in memory.
    """

    def children(self) -> Iterator[Module]:
        """The modules directly below this one, each once."""
        seen: set[int] = set()
        for value in vars(self).values():
            for child in value if isinstance(value, list | tuple) else (value,):
                if isinstance(child, Module) and id(child) not in seen:
                    seen.add(id(child))
                    yield child

    def modules(self) -> Iterator[Module]:
        """This module and all below it."""
        yield self
        for child in self.children():
            yield from child.modules()

    # ---- what a module has itself, without its children

    def own_slots(self) -> NamedSlots:
        """Where the tensors of the checkpoint go, by name."""
        return iter(())

    def own_tensors(self) -> NamedTensors:
        """What a checkpoint must hold, whole, by name: those of `own_slots`, and tensors that are only checked."""
        return iter(())

    def own_matrices(self) -> Iterable[Matrix]:
        """The matrices with which rows are multiplied, with the sizes that are held."""
        return ()

    def own_weights(self) -> Iterable[StoredWeight]:
        return ()

    def own_weight_tensors(self) -> Iterator[Tensor]:
        """All that `own_weights` are read from."""
        for weight in self.own_weights():
            yield from weight.tensors()

    def own_matrix_weights(self) -> Weights:
        """Of the weights with which rows are multiplied."""
        return Weights()

    def own_vector_weights(self) -> Weights:
        """Of the other weights: norms and biases."""
        return Weights()

    def own_expert_weights(self) -> Weights:
        """Of those with which rows are multiplied, the weights of experts of which a row reads a few."""
        return Weights()

    # ---- with all modules below it

    def slots(self) -> NamedSlots:
        """The parameter view of each tensor of the checkpoint, by name. Tied weights appear once."""
        for module in self.modules():
            yield from module.own_slots()

    def tensors(self) -> NamedTensors:
        """Name and form of every checkpoint tensor, whole, also where a rank holds a part. Needs no memory."""
        for module in self.modules():
            yield from module.own_tensors()

    def matrices(self) -> Iterator[Matrix]:
        """Every stored matrix."""
        for module in self.modules():
            yield from module.own_matrices()

    def matrix_weights(self) -> Weights:
        return sum((module.own_matrix_weights() for module in self.modules()), Weights())

    def vector_weights(self) -> Weights:
        return sum((module.own_vector_weights() for module in self.modules()), Weights())

    def expert_weights(self) -> Weights:
        return sum((module.own_expert_weights() for module in self.modules()), Weights())

    def weight_tensors(self) -> Iterator[Tensor]:
        """All that stored matrices are read from, without routers."""
        for module in self.modules():
            yield from module.own_weight_tensors()

    def finish_loading(self) -> None:
        """Called when all slots are filled: weights may now be rearranged for their kernels."""
        for child in self.children():
            child.finish_loading()
        for weight in self.own_weights():
            weight.finish_loading()

    def weights_moved(self) -> None:
        """Called when `weight_tensors` refer to other memory with the same content."""

    def use_torch_products(self) -> None:
        """Let torch multiply many rows at once. The last bits of a result then depend on the number of rows."""
        for child in self.children():
            child.use_torch_products()
        for weight in self.own_weights():
            weight.use_torch_products()


class Parameter(Module):
    """A tensor of the checkpoint that is stored as plain numbers, such as the weight of a norm.

    The view may have a row for each head, or a part of the tensor, of which `held` are the rows.
    """

    def __init__(
        self,
        name: str,
        data: Tensor,
        shape: Sequence[int] | None = None,
        *,
        convert: Callable[[Tensor], Tensor] | None = None,
        held: range | Sequence[range] | None = None,
        is_matrix: bool = False,
    ) -> None:
        """shape: of the whole tensor in the checkpoint; held: its rows that this rank has, None if it has all.

        convert: from the form of the checkpoint; is_matrix: whether rows are multiplied with it.
        """
        self.name = name
        self.data = data
        self._shape = tuple(data.shape if shape is None else shape)
        self._convert = convert
        self._held = [held] if isinstance(held, range) else held
        self._is_matrix = is_matrix

    def own_slots(self) -> NamedSlots:
        shape = self._shape if self._held is None else (sum(map(len, self._held)), *self._shape[1:])
        yield self.name, WeightSlot(self.data, shape, self._convert)

    def own_tensors(self) -> NamedTensors:
        tensor = CheckpointTensor(self._shape)
        yield self.name, tensor if self._held is None else tensor._replace(held=(self._held, ()))

    def own_matrix_weights(self) -> Weights:
        return Weights(self.data.numel(), self.data.nbytes) if self._is_matrix else Weights()

    def own_vector_weights(self) -> Weights:
        return Weights() if self._is_matrix else Weights(self.data.numel(), self.data.nbytes)
