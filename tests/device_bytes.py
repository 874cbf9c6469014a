"""The memory that tensors take while torch's operators run."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class DeviceBytes(TorchDispatchMode):
    """The most bytes that tensors of the device had at once, but for host memory, while torch's operators ran."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._seen: dict[int, weakref.ref[Tensor]] = {}
        self.hosts: set[int] = set()  # addresses of host memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.device.type != "meta":
                self._seen[id(tensor)] = weakref.ref(tensor)
        self.peak = max(self.peak, sum(self._storages().values()))
        return result

    def _storages(self) -> dict[int, int]:
        alive = (reference() for reference in self._seen.values())
        storages = [tensor.untyped_storage() for tensor in alive if tensor is not None]
        return {storage._cdata: storage.nbytes() for storage in storages if storage.data_ptr() not in self.hosts}
