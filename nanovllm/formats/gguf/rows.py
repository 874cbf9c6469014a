"""The order of rows and columns of a file's matrices where it is not that of a checkpoint, and the changed values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from nanovllm.errors import ModelError

Indices = Any  # an array of int64
Shape = tuple[int, ...]


class Change(NamedTuple):
    """What is undone of llama.cpp's conversion: of the numbers, and of the shape."""

    numbers: Callable[[Tensor], Tensor]
    shape: Callable[[Shape], Shape] = lambda shape: shape


def _log_of_negative(numbers: Tensor) -> Tensor:
    if not bool((numbers < 0).all()):
        raise ModelError("it must hold numbers below 0, since a state decays.")
    return numbers.float().neg().log()


MINUS_ONE = Change(lambda numbers: numbers.float() - 1)
LOG_OF_NEGATIVE = Change(_log_of_negative)
CHANNELS = Change(lambda numbers: numbers[:, None], lambda shape: (shape[0], 1, *shape[1:]))  # [channels, 1, kernel]
ONE_ROW = Change(lambda numbers: numbers.reshape(1, -1), lambda shape: (1, shape[-1]))


def rows_of_pairs(heads: int, num_rows: int) -> Indices | None:
    """Of each row its place in a file in which the two rows of a rotated pair are neighbours."""
    if num_rows % (2 * heads):
        return None  # a shape that the loader refuses
    return np.arange(num_rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


@dataclass(frozen=True, slots=True)
class ValueHeads:
    """The value heads of a recurrent layer: `repeats` for each key head.

    A checkpoint has those of the first key head first. llama.cpp has the first ones of all key heads first, then the
    second ones, if `tiled`.
    """

    key_heads: int
    repeats: int
    value_dim: int
    key_rows: int  # of queries and keys, in front of the values
    tiled: bool

    def order(self, width: int) -> Indices:
        """Of each of `width` numbers of every value head its place in the file."""
        places = np.arange(self.key_heads * self.repeats * width)
        if self.tiled:
            places = places.reshape(self.repeats, self.key_heads, width).swapaxes(0, 1).reshape(-1)
        return places

    def rows(self, module: str) -> Indices | None:
        """Of each row of a module, named as in the file, its place in the file; None if it is its own."""
        if module in ("attn_qkv", "ssm_conv1d"):
            return np.concatenate((np.arange(self.key_rows), self.key_rows + self.order(self.value_dim)))
        if module == "attn_gate":
            return self.order(self.value_dim)
        return self.order(1) if module in ("ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt") else None

    def columns(self, module: str, block_size: int) -> Indices | None:
        """The same of each column. None too if heads are no whole blocks, so that these stay in the file's order."""
        return self.order(self.value_dim) if module == "ssm_out" and self.moves(block_size) else None

    def moves(self, block_size: int) -> bool:
        """Whether columns of a head can be moved in a matrix whose rows are blocks of so many numbers."""
        return block_size > 0 and self.value_dim % block_size == 0

    def merged_rows(self) -> tuple[Indices, Indices]:
        """Of b and of a their rows in one matrix that has both of each key head."""
        both = np.arange(2 * self.key_heads * self.repeats).reshape(self.key_heads, 2, self.repeats)
        return both[:, 0].reshape(-1), both[:, 1].reshape(-1)
