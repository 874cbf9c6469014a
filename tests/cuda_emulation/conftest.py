"""The tests of this folder run in the environment that `make cuda-emulated` makes, and are not collected elsewhere.

They need torch's CUDA build over the emulated GPU: see docs/cuda-emulation.md.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

collect_ignore_glob = [] if "EMULATED_GPU" in os.environ else ["test_*.py"]


@pytest.fixture(autouse=True)
def device_is_well() -> Iterator[None]:
    yield
    if "EMULATED_GPU" in os.environ:
        import emulated_gpu

        assert not emulated_gpu.failed(), "work on a stream failed: see stderr"
