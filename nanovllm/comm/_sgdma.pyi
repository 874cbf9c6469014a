"""
Memory copies on raw addresses, sizes and pitches in bytes. Use nanovllm.comm, which checks them.
"""

from __future__ import annotations

import collections.abc

__all__: list[str] = [
    "PolledCalls",
    "create_stream",
    "cuda_version",
    "destroy_stream",
    "device_address",
    "launch_host_copy",
    "launch_host_task",
    "lock_pages",
    "max_pitch",
    "memcpy_2d_async",
    "memcpy_batch_async",
    "memory_of",
    "pci_bus_id",
    "prefer_node",
    "run_host_task",
    "touch_pages",
    "unlock_pages",
]

class PolledCalls:
    """
    Host tasks on a stream, run by a thread that polls.
    """
    def __init__(self, words: int, on_device: int) -> None:
        """
        128 bytes of page-locked memory, at the host's address and at the device's.
        """
    def close(self) -> None:
        """
        End the thread. Streams no longer wait for it.
        """
    def launch(self, function: int, data: int, stream: int) -> None:
        """
        As `launch_host_task`, on a thread of its own.
        """

def create_stream() -> int:
    """
    The handle of a new stream of the current device, for this caller alone. It ignores the default stream.
    """

def cuda_version() -> int:
    """
    Of the CUDA runtime that is linked in, 13000 for 13.0. 0 in a build without CUDA.
    """

def destroy_stream(stream: int) -> None:
    """
    The work on it still runs.
    """

def device_address(address: int) -> int:
    """
    Where kernels of the current device find page-locked host memory.
    """

def launch_host_copy(
    dst_ptr: int, src_ptr: int, dpitch: int, spitch: int, width: int, height: int, stream: int
) -> None:
    """
    Copy rows within host memory when `stream` gets to it.
    """

def launch_host_task(function: int, data: int, stream: int) -> None:
    """
    The same on a thread of CUDA's when `stream` gets to it. The function must use neither CUDA nor Python.
    """

def lock_pages(start: int, size: int) -> None:
    """
    cudaHostRegister.
    """

def max_pitch(device: int) -> int:
    """
    Bytes: the largest pitch that the device copies with.
    """

def memcpy_2d_async(
    dst_ptr: int, src_ptr: int, dpitch: int, spitch: int, width: int, height: int, kind: str, stream: int
) -> None:
    """
    Copy `height` rows of `width` bytes. h2h is done on return; the other kinds are queued on `stream`.
    """

def memcpy_batch_async(
    dst_ptrs: collections.abc.Sequence[int],
    src_ptrs: collections.abc.Sequence[int],
    sizes: collections.abc.Sequence[int],
    kind: str,
    stream: int,
) -> int:
    """
    Copy sizes[i] bytes for each i, in any order. Returns the number of copies after joining neighbours.
    """

def memory_of(address: int) -> tuple[str, int]:
    """
    (kind of memory, device): pinned, device, managed, or (pageable, -1), also where there is no CUDA.
    """

def pci_bus_id(device: int) -> str:
    """
    Such as 0000:17:00.0.
    """

def prefer_node(start: int, size: int, node: int) -> bool:
    """
    Place pages that are not there yet on a NUMA node. False where that cannot be had.
    """

def run_host_task(function: int, data: int) -> None:
    """
    Call the C function at `function` with `data`.
    """

def touch_pages(start: int, size: int, threads: int) -> None:
    """
    Write 0 into every page.
    """

def unlock_pages(start: int) -> None:
    """
    cudaHostUnregister, once the device is idle.
    """
