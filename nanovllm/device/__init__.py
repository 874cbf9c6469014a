"""Devices behind one interface. Code above this package does not depend on the kind of device."""

from __future__ import annotations

import logging

import torch

from nanovllm.device.base import (
    Busy,
    CallStream,
    CopyKind,
    Device,
    Event,
    Graph,
    HostTask,
    Mark,
    PitchedCopy,
    RecordedWork,
    Stream,
)
from nanovllm.device.busy import BusyMeter
from nanovllm.device.cpu import CpuDevice
from nanovllm.device.cuda import CudaDevice, check_cuda, use_all_connections
from nanovllm.errors import ConfigError
from nanovllm.ops import select_backend

__all__ = [
    "Busy",
    "BusyMeter",
    "CallStream",
    "CopyKind",
    "Device",
    "Event",
    "Graph",
    "HostTask",
    "Mark",
    "PitchedCopy",
    "RecordedWork",
    "Stream",
    "create_device",
]

USUAL_HEAD_DIM = 128  # CUDA is the default only if an attention backend supports this head size

logger = logging.getLogger(__name__)


def create_device(name: str | None) -> Device:
    """The device called `name`. None selects CUDA if it is usable and the CPU otherwise. Raises ConfigError."""
    if name not in (None, "cpu", "cuda"):
        raise ConfigError(f"device={name!r}: must be one of cpu, cuda")
    if name != "cpu":
        use_all_connections()  # before the first call of CUDA
    if name == "cuda" or (name is None and _can_use_cuda()):
        return CudaDevice()
    return CpuDevice()


def _can_use_cuda() -> bool:
    """Whether a CUDA device, the CUDA build of the extension and an attention backend are available."""
    if not torch.cuda.is_available():
        return False
    try:
        check_cuda()
        select_backend(torch.device("cuda", torch.cuda.current_device()), USUAL_HEAD_DIM)
    except ConfigError as error:
        logger.warning("running on the CPU although a CUDA device is present: %s", error)
        return False
    return True
