"""Devices behind one seam. Nothing above this package knows which one it runs on."""

from __future__ import annotations

import logging

import torch

from nanovllm.device.base import CallStream, CopyKind, Device, Event, Graph, HostTask, Mark, PitchedCopy, Stream
from nanovllm.device.busy import Busy, BusyMeter
from nanovllm.device.cpu import CpuDevice
from nanovllm.device.cuda import CudaDevice, check_cuda
from nanovllm.device.lanes import SharedLanes
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
    "Stream",
    "create_device",
]

USUAL_HEAD_DIM = 128  # that an attention backend must take for CUDA to be the default

logger = logging.getLogger(__name__)


def create_device(name: str | None, *, shared_lanes: bool = False) -> Device:
    """The device called `name`; for None CUDA where it can be driven, else the CPU. Raises ConfigError.

    shared_lanes: all transfers of the device share one stream each way, see `device/lanes.py`. By default groups of
    slots take turns on four streams; no GPU has been asked yet which is faster (`benchmarks/transfer_streams.py` asks).
    """
    if name not in (None, "cpu", "cuda"):
        raise ConfigError(f"device={name!r}: must be one of cpu, cuda")
    device = CudaDevice() if name == "cuda" or (name is None and _can_drive_cuda()) else CpuDevice()
    return SharedLanes(device) if shared_lanes else device


def _can_drive_cuda() -> bool:
    """Whether there is a CUDA device, an extension for it and an attention backend."""
    if not torch.cuda.is_available():
        return False
    try:
        check_cuda()
        select_backend(torch.device("cuda", torch.cuda.current_device()), USUAL_HEAD_DIM)
    except ConfigError as error:
        logger.warning("running on the CPU, though there is a CUDA device: %s", error)
        return False
    return True
