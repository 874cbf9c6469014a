"""How to undo what llama.cpp's conversion changes in tensors: the order of rows and columns, and some values."""

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
    """How to undo a change of llama.cpp's conversion."""

    numbers: Callable[[Tensor], Tensor]  # from the file's numbers to the checkpoint's
    shape: Callable[[Shape], Shape] = lambda shape: shape  # from the file's shape to the checkpoint's


def _log_of_negative(numbers: Tensor) -> Tensor:
    if not bool((numbers < 0).all()):
        raise ModelError("it must hold numbers below 0, since a state decays.")
    return numbers.float().neg().log()


MINUS_ONE = Change(lambda numbers: numbers.float() - 1)
LOG_OF_NEGATIVE = Change(_log_of_negative)
CHANNELS = Change(lambda numbers: numbers[:, None], lambda shape: (shape[0], 1, *shape[1:]))  # [channels, 1, kernel]
ONE_ROW = Change(lambda numbers: numbers.reshape(1, -1), lambda shape: (1, shape[-1]))


def rows_of_pairs(heads: int, num_rows: int) -> Indices | None:
    """The place of each row in a file in which the two rows that RoPE rotates together are neighbours: [num_rows]."""
    if num_rows % (2 * heads):
        return None  # a shape that the loader refuses
    return np.arange(num_rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


@dataclass(frozen=True, slots=True)
class ValueHeads:
    """The value heads of a recurrent layer. Several of them belong to each key head.

    A checkpoint stores all value heads of the first key head, then all of the second, and so on. A tiled file stores
    the first value head of every key head, then the second of every key head, and so on.
    """

    key_heads: int
    repeats: int  # value heads of each key head
    value_dim: int
    key_rows: int  # of queries and keys, in front of the values
    tiled: bool

    def order(self, width: int) -> Indices:
        """The place in the file of each of the `width` numbers of every value head: [heads * width]."""
        places = np.arange(self.key_heads * self.repeats * width)
        if self.tiled:
            places = places.reshape(self.repeats, self.key_heads, width).swapaxes(0, 1).reshape(-1)
        return places

    def rows(self, module: str) -> Indices | None:
        """The place in the file of each row of `module`, a name in the file; None if the order is the same."""
        if module in ("attn_qkv", "ssm_conv1d"):
            return np.concatenate((np.arange(self.key_rows), self.key_rows + self.order(self.value_dim)))
        if module == "attn_gate":
            return self.order(self.value_dim)
        return self.order(1) if module in ("ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt") else None

    def columns(self, module: str, block_size: int) -> Indices | None:
        """The same for columns. None too if a head is no whole number of blocks: then columns keep the file's order."""
        return self.order(self.value_dim) if module == "ssm_out" and self.moves(block_size) else None

    def moves(self, block_size: int) -> bool:
        """Whether the columns of a head can move in a matrix whose rows consist of blocks of `block_size` numbers."""
        return block_size > 0 and self.value_dim % block_size == 0

    def merged_rows(self) -> tuple[Indices, Indices]:
        """The rows of b and the rows of a in one matrix that stores b and then a of each key head."""
        both = np.arange(2 * self.key_heads * self.repeats).reshape(self.key_heads, 2, self.repeats)
        return both[:, 0].reshape(-1), both[:, 1].reshape(-1)
