"""Devices behind one seam. Nothing above this package knows which one it runs on."""

from __future__ import annotations

import logging

import torch

from nanovllm.device.base import CallStream, CopyKind, Device, Event, PitchedCopy, Stream
from nanovllm.device.busy import Busy, BusyMeter
from nanovllm.device.cpu import CpuDevice
from nanovllm.errors import ConfigError

__all__ = [
    "Busy",
    "BusyMeter",
    "CallStream",
    "CopyKind",
    "Device",
    "Event",
    "PitchedCopy",
    "Stream",
    "create_device",
]

logger = logging.getLogger(__name__)


def create_device(name: str | None) -> Device:
    """The device called `name`, or the best one that this version can drive."""
    if name not in (None, "cpu", "cuda"):
        raise ConfigError(f"device={name!r}: must be one of cpu, cuda")
    if name == "cuda":
        raise ConfigError("device='cuda': this version has no CUDA device yet; use device='cpu' or leave it out")
    if name is None and torch.cuda.is_available():
        logger.warning("a CUDA device is present, but this version cannot drive it yet: running on the CPU")
    return CpuDevice()
