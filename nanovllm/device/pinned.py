"""Page-locked host memory of exactly the size asked for, which the device's copy engines reach directly.

torch's pinned allocator rounds up to a power of two and locks in one piece; at hundreds of GiB the first doubles the
memory and the second fails. Here the memory is one anonymous mapping, on huge pages where the kernel has them, near the
device, touched by several threads and locked piece by piece.
"""

from __future__ import annotations

import math
import mmap
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from nanovllm.comm import _sgdma
from nanovllm.device import memory
from nanovllm.errors import ConfigError

MAX_PIECE = 64 << 30  # bytes locked by one call: a single one over 512 GiB fails
MAX_TOUCHING_THREADS = 16
PAGE = mmap.PAGESIZE
TOUCHED_STEP = 64 << 20  # bytes taken at a time of memory that is not known to be there
GROWTH_SECONDS = 1.0  # in which a machine grows that can


class PageLock(Protocol):
    """Locks and unlocks ranges of pages. Raises RuntimeError when it cannot."""

    def lock(self, start: int, size: int) -> None: ...
    def unlock(self, start: int) -> None: ...


class CudaPageLock:
    """cudaHostRegister and cudaHostUnregister, and what is locked through it."""

    def __init__(self) -> None:
        self._locked: dict[int, int] = {}  # bytes from each start

    def lock(self, start: int, size: int) -> None:
        _sgdma.lock_pages(start, size)
        self._locked[start] = size

    def unlock(self, start: int) -> None:
        del self._locked[start]
        _sgdma.unlock_pages(start)

    def covers(self, start: int, size: int) -> bool:
        """Whether all of the memory from `start`, where a locked piece begins, is locked."""
        while size > 0:
            piece = self._locked.get(start)
            if piece is None:
                return False
            start, size = start + piece, size - piece
        return True


class LockedMapping(mmap.mmap):
    """An anonymous mapping that unlocks and unmaps itself when nothing refers to it any more."""

    _lock: PageLock
    _locked: list[int]  # where the locked pieces begin

    def __new__(cls, size: int, lock: PageLock) -> LockedMapping:
        mapping = super().__new__(cls, -1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        mapping._lock, mapping._locked = lock, []
        return mapping

    def lock_piece(self, start: int, size: int) -> None:
        self._lock.lock(start, size)
        self._locked.append(start)

    def release(self) -> None:
        """Unlock everything. Nothing may use the memory any more."""
        while self._locked:
            with suppress(RuntimeError):  # of a context that a kernel has broken: the pages go with the process
                self._lock.unlock(self._locked.pop())

    def __del__(self) -> None:
        if hasattr(self, "_locked"):  # it was mapped
            self.release()


def empty_pinned(
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    lock: PageLock,
    *,
    node: int | None = None,
    max_piece: int = MAX_PIECE,
) -> Tensor:
    """A page-locked tensor, zero at first; unlocked and given back with its last view.

    node: the NUMA node to take pages from if it has any left. No `tensor[i]` lies across two pieces, since CUDA refuses
    a copy that does. Raises ConfigError, with nothing left locked or mapped, when the memory cannot be had.
    """
    size = math.prod(shape) * dtype.itemsize
    if not size:
        return torch.empty(shape, dtype=dtype)
    _check_container(name, size)
    try:
        mapping = LockedMapping(size, lock)
    except (OSError, OverflowError) as error:
        raise ConfigError(_refusal(name, size, f"it cannot be mapped ({error})")) from error
    with suppress(OSError):  # a kernel without huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    start = torch.frombuffer(mapping, dtype=torch.uint8).data_ptr()
    if node is not None:
        _sgdma.prefer_node(start, size, node)
    failure = _touch_all(start, size)
    if failure is None:
        failure = _lock_all(mapping, start, size, _piece_size(size // shape[0], max_piece))
    if failure is not None:
        mapping.close()
        raise ConfigError(_refusal(name, size, failure))
    return torch.frombuffer(mapping, dtype=dtype).view(shape)


def rows_in_reach(tensor: Tensor, max_piece: int = MAX_PIECE) -> int:
    """Of a tensor from `empty_pinned`: how many `tensor[i]` a piece holds. No copy may reach from one into the next."""
    unit = tensor[:1].nbytes
    return _piece_size(unit, max_piece) // unit if unit else 1


def nearest_node(device_index: int) -> int | None:
    """The NUMA node that a CUDA device hangs on; None where there is one node only, or nobody knows."""
    try:
        address = _sgdma.pci_bus_id(device_index).lower()
        node = int(Path(f"/sys/bus/pci/devices/{address}/numa_node").read_text())
    except (RuntimeError, OSError, ValueError):
        return None
    return node if node >= 0 else None


def _lock_all(mapping: LockedMapping, start: int, size: int, piece: int) -> str | None:
    """Lock the mapping piece by piece. Returns None, or what went wrong, with nothing locked any more."""
    try:
        for offset, length in _pieces(size, piece):
            mapping.lock_piece(start + offset, length)
    except RuntimeError as error:
        mapping.release()
        return f"page-locking failed ({str(error).rstrip('.')})"
    return None


def _pieces(size: int, piece: int) -> Iterator[tuple[int, int]]:
    """(offset, length) of consecutive pieces that cover [0, size)."""
    for offset in range(0, size, piece):
        yield offset, min(piece, size - offset)


def _piece_size(unit: int, max_piece: int) -> int:
    """The largest multiple of whole units and whole pages up to `max_piece`, at least one of them."""
    step = math.lcm(unit, mmap.PAGESIZE)
    return max(max_piece // step, 1) * step


def _check_container(name: str, size: int) -> None:
    free = memory.container_free_bytes()
    if free is not None and size > free:
        raise ConfigError(_refusal(name, size, f"the container leaves {free / 2**30:.2f} GiB"))


def _touch_all(start: int, size: int) -> str | None:
    """Make the pages exist. Returns None, or why not all of them can.

    A virtual machine may grow as its memory is used, and say so only then. So memory that is free by its own account is
    touched at once, and beyond that a small step at a time, until a step neither fits nor makes the machine grow.
    """
    threads, done = min(MAX_TOUCHING_THREADS, os.cpu_count() or 1), 0
    while done < size:
        free, total = memory.available_bytes(), memory.total_bytes()
        left = size - done
        step = left if left + TOUCHED_STEP <= free else min(left, max(TOUCHED_STEP, free // 2 // PAGE * PAGE))
        _sgdma.touch_pages(start + done, step, threads)
        done += step
        if free < TOUCHED_STEP and not _has_grown(total):
            return f"{done / 2**30:.2f} GiB of it were taken, and no more are free"
    return None


def _has_grown(total: int) -> bool:
    """Whether the machine has more memory than `total`, or is free of want, now or in a moment."""
    until = time.monotonic() + GROWTH_SECONDS
    while memory.total_bytes() <= total and memory.available_bytes() < TOUCHED_STEP:
        if time.monotonic() > until:
            return False
        time.sleep(GROWTH_SECONDS / 20)
    return True


def _refusal(name: str, size: int, reason: str) -> str:
    return f"{name}: {size / 2**30:.2f} GiB of page-locked host memory cannot be had: {reason}; lower num_cpu_blocks"
