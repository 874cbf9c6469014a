"""The emulated GPU as tests see it: delays, the watch over the default stream, work on a stream's thread."""

from __future__ import annotations

import ctypes
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

COPY, KERNEL, HOST_TASK, EVENT = range(4)  # `Kind` of runtime/streams.h
Call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
Watch = ctypes.CFUNCTYPE(None, ctypes.c_char_p)


@cache
def runtime() -> ctypes.CDLL:
    (path,) = Path(os.environ["EMULATED_GPU"]).glob("libcudart.so.*")
    library = ctypes.CDLL(str(path))
    library.emulation_view.restype = ctypes.c_void_p
    library.emulation_view.argtypes = [ctypes.c_void_p]
    library.emulation_push.argtypes = [ctypes.c_void_p, Call, ctypes.c_void_p, Call]
    library.emulation_fail.argtypes = [ctypes.c_char_p]
    library.emulation_watch_default_stream.argtypes = [ctypes.c_void_p]
    return library


def install_operators() -> None:
    library = ctypes.CDLL(str(Path(os.environ["EMULATED_GPU"]) / "libemulated_aten.so"), ctypes.RTLD_GLOBAL)
    assert library.emulation_install() > 1000


def failed() -> bool:
    """Whether work on a stream failed, which breaks the device for the rest of the process."""
    return bool(runtime().emulation_failed())


def cpu_alias(tensor: Any) -> Any:
    """A CPU tensor over the memory of a tensor of the device."""
    import torch

    storage = tensor.untyped_storage()
    if storage.nbytes() == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    memory = (ctypes.c_char * storage.nbytes()).from_address(runtime().emulation_view(storage.data_ptr()))
    whole = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=tensor.dtype).set_(whole, tensor.storage_offset(), tensor.shape, tensor.stride())


_waiting: dict[int, Callable[[], None]] = {}  # Python work of streams and graphs, by its number
_numbers = iter(range(1, 1 << 62))


@Call
def _run(number: int) -> None:
    try:
        _waiting[number]()
    except BaseException:
        text = traceback.format_exc()
        runtime().emulation_fail(f"Python work failed on a stream:\n{text}".encode())


@Call
def _drop(number: int) -> None:
    _waiting.pop(number, None)


def push(stream: int, work: Callable[[], None]) -> None:
    """The stream's thread runs the work, in order with all else; a graph that is being recorded keeps it instead."""
    number = next(_numbers)
    _waiting[number] = work
    runtime().emulation_push(stream, _run, number, _drop)


@contextmanager
def delays(seed: int, *, copies: int = 0, kernels: int = 0, host_tasks: int = 0, events: int = 0) -> Iterator[None]:
    """In this context each piece of work waits for a random time up to so many microseconds before it runs."""
    longest = {COPY: copies, KERNEL: kernels, HOST_TASK: host_tasks, EVENT: events}
    runtime().emulation_seed(seed)
    for kind, microseconds in longest.items():
        runtime().emulation_delay(kind, microseconds)
    try:
        yield
    finally:
        for kind in longest:
            runtime().emulation_delay(kind, 0)


@contextmanager
def default_stream_watched() -> Iterator[list[str]]:
    """What is put on the default stream in this context, each with its stack."""
    found: list[str] = []

    @Watch
    def watch(what: bytes) -> None:
        stack = traceback.format_stack(sys._getframe(1))[-12:]
        found.append(f"{what.decode()} on the default stream:\n" + "".join(stack))

    runtime().emulation_watch_default_stream(watch)
    try:
        yield found
    finally:
        runtime().emulation_watch_default_stream(None)
