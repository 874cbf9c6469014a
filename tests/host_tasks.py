"""Host tasks for tests: Python behind a C function, which no thread of CUDA's may run."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from nanovllm.comm import _sgdma
from nanovllm.device import HostTask


class PythonTask:
    """A task that calls `call`."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._failure: str | None = None
        self._function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._run)

    def take(self) -> tuple[int, int]:
        address = ctypes.cast(self._function, ctypes.c_void_p).value
        assert address is not None
        return address, 0

    def drop(self, data: int) -> None:
        return

    def failure(self) -> str | None:
        return self._failure

    def _run(self, data: int) -> None:
        try:
            self._call()
        except Exception as error:
            self._failure = str(error)


def run(task: HostTask) -> None:
    """Run a task on this thread. Raises OSError if it fails."""
    _sgdma.run_host_task(*task.take())
    failure = task.failure()
    if failure is not None:
        raise OSError(failure)
