"""Where Triton kernels are tested: on the GPU if there is one, else in Triton's interpreter (see conftest.py)."""

from __future__ import annotations

import pytest
import torch

from benchmarks import interpreted_ptx

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter's products of bf16 tiles are garbage, and it cuts fp32 off where it should round to bf16.
NARROW = torch.bfloat16 if DEVICE == "cuda" else torch.float16
DTYPES = (torch.float32, torch.float16, torch.bfloat16) if DEVICE == "cuda" else (torch.float32, torch.float16)
if DEVICE == "cpu":
    interpreted_ptx.install()
# For tests of Triton kernels: among the CUDA tests where they run on a GPU.
TRITON_MARKS = [pytest.mark.cuda] if DEVICE == "cuda" else []
