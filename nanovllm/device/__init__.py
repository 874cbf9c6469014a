"""Devices behind one interface. Code above this package does not depend on the kind of device."""

from __future__ import annotations

import logging
from typing import Protocol, cast

import torch

from nanovllm.device.base import Busy, CallStream, CopyKind, Device, Event, Graph, HostTask, Mark, PitchedCopy, Stream
from nanovllm.device.busy import BusyMeter
from nanovllm.device.cpu import CpuDevice
from nanovllm.errors import ConfigError
from nanovllm.ops import select_backend
from nanovllm.side_modules import find_side

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
    "Stream",
    "create_device",
]

USUAL_HEAD_DIM = 128  # CUDA is the default only if an attention backend supports this head size

logger = logging.getLogger(__name__)


class CudaSide(Protocol):
    """Drives NVIDIA GPUs. Without it the CPU computes, and device="cuda" is refused."""

    def CudaDevice(self) -> Device: ...

    def check_cuda(self) -> None:
        """Raise ConfigError if no CUDA device can be used."""
        ...


def create_device(name: str | None) -> Device:
    """The device called `name`. None selects CUDA if it is usable and the CPU otherwise. Raises ConfigError."""
    if name not in (None, "cpu", "cuda"):
        raise ConfigError(f"device={name!r}: must be one of cpu, cuda")
    cuda = cast("CudaSide | None", find_side("nanovllm.device.cuda"))
    if name == "cuda" and cuda is None:
        raise ConfigError(
            "device='cuda': needs nanovllm.device.cuda, which this installation does not have; leave it out"
        )
    if cuda is None or name == "cpu" or (name is None and not _can_drive(cuda)):
        return CpuDevice()
    return cuda.CudaDevice()


def _can_drive(cuda: CudaSide) -> bool:
    """Whether a CUDA device, the CUDA build of the extension and an attention backend are available."""
    if not torch.cuda.is_available():
        return False
    try:
        cuda.check_cuda()
        select_backend(torch.device("cuda", torch.cuda.current_device()), USUAL_HEAD_DIM)
    except ConfigError as error:
        logger.warning("running on the CPU although a CUDA device is present: %s", error)
        return False
    return True
