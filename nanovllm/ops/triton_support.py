"""Whether Triton kernels can be used. Triton is optional: without it the torch versions run."""

from __future__ import annotations

import logging
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


def use_triton(tensor: Tensor) -> bool:
    """Whether a Triton kernel computes on this tensor."""
    return tensor.is_cuda and triton_runs()


@cache
def triton_runs() -> bool:
    """Whether Triton is installed and a kernel compiles and runs on the CUDA device; tested once."""
    if find_spec("triton") is None or not torch.cuda.is_available():
        return False
    try:
        from nanovllm.ops.triton_merge import merge_parts_triton

        out = torch.zeros(1, 1, 16, device="cuda")
        lse = torch.zeros(1, 1, device="cuda")
        merge_parts_triton(out, lse, out, lse, out.unsqueeze(0) + 1, lse.unsqueeze(0))
        works = bool((out == 0.5).all())
    except Exception as error:  # a missing compiler or driver raises any of a dozen types
        logger.warning("Triton does not run here, so torch kernels replace its kernels: %s", error)
        return False
    return works


@cache
def multiplies_fp8(device: torch.device) -> bool:
    """Whether the GPU's matrix units multiply fp8, which those of compute capability 8.9 and above do."""
    return torch.cuda.get_device_capability(device) >= (8, 9)


@cache
def compute_capability(device: torch.device) -> int:
    """As 90 for 9.0, which is also that of Triton's interpreter."""
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
    return 10 * major + minor
