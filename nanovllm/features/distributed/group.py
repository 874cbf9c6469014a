"""The collectives of a rank, on torch.distributed: NCCL between GPUs, gloo between CPUs.

A sum is the same to the bit whatever the number of rows: every element is added in the order of the ranks, in fp32.
NCCL's and gloo's own all-reduce choose that order by the size of the message and the position in it. Few elements are
sent to every rank, which adds them. Of many, each rank adds a part and sends that on, so that the bytes per rank are
those of a ring, 2 (N - 1) / N of the tensor.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from nanovllm.errors import EngineError, told
from nanovllm.layers.parallel import GATHERED_BYTES

T = TypeVar("T")
# torch 2.13 gave the collective a new name and deprecates the old one.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class CollectiveError(EngineError):
    """The ranks could not communicate, most likely because another one has failed."""


class ProcessGroup:
    """Implements `layers.parallel.RankGroup` for the default process group of torch.distributed."""

    def __init__(self, rank: int, size: int, local_size: int, store: dist.Store) -> None:
        """local_size: ranks on this machine. store: of all ranks, through which `exchange` exchanges."""
        self.rank = rank
        self.size = size
        self._store = store
        self._num_exchanges = 0
        self.local_size = max(self.exchange(local_size))  # the same on every rank, since plans depend on it

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `RankGroup`."""
        x = x.contiguous()
        if self.size > 2 and x.nbytes > GATHERED_BYTES:
            return self._reduce_in_parts(x)
        parts = x.new_empty(self.size * x.shape[0], x.shape[1])
        self._gather_all(parts, x)
        return _sum_in_order(parts.view(self.size, *x.shape))

    def gather_columns(self, x: Tensor, widths: Sequence[int]) -> Tensor | None:
        """See `RankGroup`."""
        padded = F.pad(x, (0, max(widths) - x.shape[1])).contiguous()
        parts = [torch.empty_like(padded) for _ in widths] if self.rank == 0 else None
        with _communication(self.rank, "the logits were collected"):
            dist.gather(padded, parts, dst=0)
        return None if parts is None else torch.cat([part[:, :n] for part, n in zip(parts, widths, strict=True)], dim=1)

    def exchange(self, value: T) -> list[T]:
        """See `RankGroup`."""
        self._num_exchanges += 1
        keys = [f"exchange {self._num_exchanges} of rank {rank}" for rank in range(self.size)]
        self._store.set(keys[self.rank], pickle.dumps(value))  # type: ignore[arg-type]  # bytes are fine
        return [pickle.loads(self._store.get(key)) for key in keys]

    def _reduce_in_parts(self, x: Tensor) -> Tensor:
        share = -(-x.numel() // self.size)
        flat = F.pad(x.flatten(), (0, share * self.size - x.numel()))
        parts = torch.empty_like(flat)
        with _communication(self.rank, "a sum was computed"):
            dist.all_to_all_single(parts, flat)
        self._gather_all(flat, _sum_in_order(parts.view(self.size, share)))
        return flat[: x.numel()].view(x.shape)

    def _gather_all(self, out: Tensor, x: Tensor) -> None:
        with _communication(self.rank, "a sum was computed"):
            _all_gather(out, x)


def _sum_in_order(parts: Tensor) -> Tensor:
    """The sum over the first axis in fp32, in that order, rounded once. May overwrite `parts`."""
    total = parts[0].float()
    for part in parts[1:]:
        total += part
    return total.to(parts.dtype)


@contextmanager
def _communication(rank: int, when: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # of any backend
        raise CollectiveError(f"rank {rank} lost the other ranks while {when}: {told(error)}") from error
