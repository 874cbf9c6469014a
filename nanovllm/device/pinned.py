"""Page-locked host memory of exact size, which the copy engines of the device reach directly.

torch's pinned allocator rounds up to a power of two, which may double hundreds of GiB, and locks the memory with one
call, which fails at that size. Here the memory is one anonymous mapping, with huge pages where the kernel has them and
on the NUMA node of the device. Several threads touch it, and it is locked in pieces.
"""

from __future__ import annotations

import math
import mmap
import os
import time
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from nanovllm.comm import _sgdma
from nanovllm.data.memory_checks import gib
from nanovllm.device import memory
from nanovllm.errors import ConfigError

MAX_PIECE = 64 << 30  # bytes locked by one call; one call for more than 512 GiB fails
MAX_TOUCHING_THREADS = 16
PAGE = mmap.PAGESIZE
TOUCHED_STEP = 64 << 20  # bytes touched at a time when more memory is needed than the system reports as free
GROWTH_SECONDS = 1.0  # time limit for a virtual machine to grow


class PageLock:
    """cudaHostRegister and cudaHostUnregister, which raise RuntimeError, with a record of the locked pieces."""

    def __init__(self) -> None:
        self._locked: dict[int, int] = {}  # start -> bytes

    def lock(self, start: int, size: int) -> None:
        _sgdma.lock_pages(start, size)
        self._locked[start] = size

    def unlock(self, start: int) -> None:
        del self._locked[start]
        _sgdma.unlock_pages(start)

    def covers(self, start: int, size: int) -> bool:
        """Whether `size` bytes from `start`, the start of a locked piece, are all locked."""
        while size > 0:
            piece = self._locked.get(start)
            if piece is None:
                return False
            start = start + piece
            size = size - piece
        return True


class LockedMapping(mmap.mmap):
    """An anonymous mapping that unlocks and unmaps itself when the last reference goes."""

    _lock: PageLock
    _locked: list[int]  # starts of the locked pieces

    def __new__(cls, size: int, lock: PageLock) -> LockedMapping:
        mapping = super().__new__(cls, -1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        mapping._lock = lock
        mapping._locked = []
        return mapping

    def lock_piece(self, start: int, size: int) -> None:
        self._lock.lock(start, size)
        self._locked.append(start)

    def release(self) -> None:
        """Unlock all pieces. The memory must not be in use."""
        while self._locked:
            with suppress(RuntimeError):  # a failed kernel broke the CUDA context: the process end unlocks the pages
                self._lock.unlock(self._locked.pop())

    def __del__(self) -> None:
        if hasattr(self, "_locked"):  # the mapping succeeded
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
    """A page-locked tensor of zeros, unlocked and freed with its last view.

    node: the preferred NUMA node. No `tensor[i]` crosses the border of two pieces, since CUDA refuses such copies.
    Raises ConfigError, with nothing left locked or mapped, if the memory cannot be allocated.
    """
    size = math.prod(shape) * dtype.itemsize
    if not size:
        return torch.empty(shape, dtype=dtype)
    free = memory.container_free_bytes()
    if free is not None and size > free:
        raise ConfigError(_refusal(name, size, f"the container leaves {gib(free)}"))
    try:
        mapping = LockedMapping(size, lock)
    except (OSError, OverflowError) as error:
        raise ConfigError(_refusal(name, size, f"it cannot be mapped ({error})")) from error
    with suppress(OSError):  # the kernel has no huge pages
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
    """The number of `tensor[i]` per locked piece of a tensor from `empty_pinned`. No copy may cross two pieces."""
    row = tensor[:1].nbytes
    return _piece_size(row, max_piece) // row if row else 1


def nearest_node(device_index: int) -> int | None:
    """The NUMA node of a CUDA device; None on machines with one node or if it is unknown."""
    try:
        address = _sgdma.pci_bus_id(device_index).lower()
        node = int(Path(f"/sys/bus/pci/devices/{address}/numa_node").read_text())
    except (RuntimeError, OSError, ValueError):
        return None
    return node if node >= 0 else None


def _lock_all(mapping: LockedMapping, start: int, size: int, piece: int) -> str | None:
    """Lock the mapping piece by piece. Returns None, or the error after unlocking everything."""
    try:
        for offset in range(0, size, piece):
            mapping.lock_piece(start + offset, min(piece, size - offset))
    except RuntimeError as error:
        mapping.release()
        return f"page-locking failed ({str(error).rstrip('.')})"
    return None


def _piece_size(row_bytes: int, max_piece: int) -> int:
    """The largest common multiple of rows and pages up to `max_piece`, or the least common multiple if it is larger."""
    step = math.lcm(row_bytes, mmap.PAGESIZE)
    return max(max_piece // step, 1) * step


def _touch_all(start: int, size: int) -> str | None:
    """Make the system allocate the pages. Returns None, or the reason why it cannot allocate all.

    A virtual machine may grow only when its memory is used. So the memory that it reports as free is touched at once,
    and the rest in small steps, until a step neither fits nor makes the machine grow.
    """
    threads = min(MAX_TOUCHING_THREADS, os.cpu_count() or 1)
    done = 0
    while done < size:
        free = memory.available_bytes()
        total = memory.total_bytes()
        left = size - done
        step = left if left + TOUCHED_STEP <= free else min(left, max(TOUCHED_STEP, free // 2 // PAGE * PAGE))
        _sgdma.touch_pages(start + done, step, threads)
        done += step
        if free < TOUCHED_STEP and not _has_grown(total):
            return f"{gib(done)} of it were taken, and no more are free"
    return None


def _has_grown(total: int) -> bool:
    """Whether the machine gets more memory than `total`, or has enough free memory, within GROWTH_SECONDS."""
    until = time.monotonic() + GROWTH_SECONDS
    while memory.total_bytes() <= total and memory.available_bytes() < TOUCHED_STEP:
        if time.monotonic() > until:
            return False
        time.sleep(GROWTH_SECONDS / 20)
    return True


def _refusal(name: str, size: int, reason: str) -> str:
    return f"{name}: {gib(size)} of page-locked host memory cannot be had: {reason}; lower num_cpu_blocks"
