"""The pitched copy: what it moves, what it leaves alone, what it refuses, and how it is built.

As a benchmark, on a GPU where there is one, with the options of benchmarks/copy_bandwidth.py:

    python tests/test_sgdma.py
"""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanovllm.comm import CopyError, _sgdma, copy_on_host_async, copy_pitched, memcpy_2d_async
from nanovllm.comm import sgdma as sgdma_module
from nanovllm.comm.sgdma import MAX_PITCH
from nanovllm.data.batch import BlockMove
from nanovllm.device import cpu
from nanovllm.kvcache.offload_engine import OffloadEngine
from nanovllm.memory.budget import DeviceSplit, TransferCount
from nanovllm.memory.layout import KVLayout
from nanovllm.ops.cpu_attention import empty_task

REPO = Path(__file__).resolve().parent.parent
DTYPES = (torch.uint8, torch.int16, torch.float32, torch.bfloat16, torch.float64)
SENTINEL = 0xA5


def sentinel_tensor(elements: int, dtype: torch.dtype) -> Tensor:
    return torch.full((elements * dtype.itemsize,), SENTINEL, dtype=torch.uint8).view(dtype)


def random_tensor(elements: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = elements * dtype.itemsize
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator).view(dtype)


def strided_copy(dst: Tensor, src: Tensor, dpitch: int, spitch: int, width: int, height: int) -> None:
    """The same copy through torch: both byte vectors seen as `height` rows of `width`."""
    dst.as_strided((height, width), (dpitch, 1)).copy_(src.as_strided((height, width), (spitch, 1)))


@st.composite
def copies(draw: st.DrawFn) -> dict[str, Any]:
    """A valid copy: its sizes in bytes, and the elements around the span on each side."""
    width = draw(st.integers(0, 70))
    height = draw(st.integers(0, 9))
    least = width if height > 1 else 0
    pitch = st.one_of(st.just(width), st.integers(least, width + 50))
    dtype = draw(st.sampled_from(DTYPES))
    dpitch = draw(pitch)
    spitch = draw(pitch)
    margins = [draw(st.integers(0, 5)) for _ in range(4)]
    sizes = (dpitch, spitch, width, height)
    return {"dtype": dtype, "sizes": sizes, "margins": margins, "seed": draw(st.integers(0, 9))}


def elements_for(pitch: int, width: int, height: int, dtype: torch.dtype) -> int:
    span = (height - 1) * pitch + width if width and height else 0
    return -(-span // dtype.itemsize)


@settings(max_examples=200)
@given(copies())
def test_equals_torch_strided_copy_and_leaves_the_rest(case: dict[str, Any]) -> None:
    sizes: tuple[int, int, int, int] = case["sizes"]
    dpitch, spitch, width, height = sizes
    dtype = case["dtype"]
    (dst_before, dst_after, src_before, src_after) = case["margins"]
    # One element at least: torch gives an empty tensor no address.
    dst_elements = elements_for(dpitch, width, height, dtype) + dst_after + 1
    src_elements = elements_for(spitch, width, height, dtype) + src_after + 1
    dst = sentinel_tensor(dst_before + dst_elements, dtype)
    src = random_tensor(src_before + src_elements, dtype, case["seed"])
    expected = dst.clone()
    source = src.clone()
    strided_copy(expected[dst_before:].view(torch.uint8), src[src_before:].view(torch.uint8), *sizes)

    memcpy_2d_async(dst[dst_before:], src[src_before:], *sizes, "h2h")

    assert torch.equal(dst.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(src.view(torch.uint8), source.view(torch.uint8))


@pytest.mark.parametrize(
    ("width", "height", "dpitch", "spitch"),
    [(1, 40_000, 3, 2), (1 << 20, 3, 1 << 20, (1 << 20) + 7), (1 << 21, 2, 1 << 21, 1 << 21)],
)
def test_large_copies(width: int, height: int, dpitch: int, spitch: int) -> None:
    dst = sentinel_tensor((height - 1) * dpitch + width, torch.uint8)
    src = random_tensor((height - 1) * spitch + width, torch.uint8, seed=1)
    expected = dst.clone()
    strided_copy(expected, src, dpitch, spitch, width, height)
    memcpy_2d_async(dst, src, dpitch, spitch, width, height, "h2h")
    assert torch.equal(dst, expected)


def test_layers_of_a_block_move_between_two_pool_layouts() -> None:
    """[layers, blocks, bytes] to [blocks, layers, bytes]: one call moves every layer of one block."""
    layers = 5
    blocks = 7
    size = 48
    device_pool = random_tensor(layers * blocks * size, torch.uint8, seed=2).view(layers, blocks, size)
    host_pool = sentinel_tensor(layers * blocks * size, torch.uint8).view(blocks, layers, size)
    memcpy_2d_async(host_pool[3], device_pool[0, 6], size, blocks * size, size, layers, "h2h")
    assert torch.equal(host_pool[3], device_pool[:, 6])
    assert bool((host_pool[[0, 1, 2, 4, 5, 6]] == SENTINEL).all())


BASE: dict[str, Any] = {"dpitch": 10, "spitch": 10, "width": 8, "height": 4, "kind": "h2h"}
REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"dst": [1, 2]}, "dst must be a torch.Tensor, got list"),
    ({"src": torch.zeros(2, 2).to_sparse()}, "src must be a strided tensor, got layout torch.sparse_coo"),
    ({"src": torch.empty(64, device="meta")}, "needs src on cpu, but it is on meta"),
    ({"kind": ["h2h"]}, r"kind must be one of h2h, h2d, d2h, d2d, got \['h2h'\]"),
    ({"width": 8.0}, "width must be an int of at least 0, got 8.0"),
    ({"height": True}, "height must be an int of at least 0, got True"),
    ({"dpitch": -10}, "dpitch must be an int of at least 0, got -10"),
    ({"spitch": 7}, "pitch of src must be at least the width of 8 bytes, got 7"),
    ({"dpitch": 2**31, "height": 1}, "pitch of dst must be at most 2147483647 bytes .*, got 2147483648"),
    ({"src": torch.zeros(60).byte()[23:]}, "past the end of src: .* span 38 bytes, .* has 37 bytes"),
    ({"dst": torch.zeros(60).byte()[:0]}, "past the end of dst: .* has 0 bytes"),
    ({"kind": "h2d"}, "A h2d copy needs dst on cuda, but it is on cpu"),
    ({"kind": "d2h"}, "A d2h copy needs dst in pinned host memory, but its memory is pageable"),
    ({"stream": 7}, "An h2h copy runs on the calling thread, so stream must be 0, got 7"),
]


@pytest.mark.parametrize(("change", "message"), REFUSALS)
def test_refusals_name_the_value_and_move_nothing(change: dict[str, Any], message: str) -> None:
    dst = sentinel_tensor(64, torch.uint8)
    src = random_tensor(64, torch.uint8, seed=3)
    with pytest.raises(CopyError, match=message) as caught:
        memcpy_2d_async(**{"dst": dst, "src": src, **BASE, **change})
    assert str(caught.value).endswith(".") and "\n" not in str(caught.value)
    assert bool((dst == SENTINEL).all())


def test_overlapping_spans_are_refused_and_touching_ones_are_copied() -> None:
    memory = random_tensor(128, torch.uint8, seed=4)
    expected = memory.clone()
    for shift in (0, 1, 37, -37):
        with pytest.raises(CopyError, match="must not overlap"):
            memcpy_2d_async(memory[40 + shift :], memory[40:], **BASE)
        assert torch.equal(memory, expected)
    for shift in (38, -38):
        strided_copy(expected[40 + shift :], memory[40:], 10, 10, 8, 4)
        memcpy_2d_async(memory[40 + shift :], memory[40:], **BASE)
        assert torch.equal(memory, expected)


def test_empty_copy_is_a_no_op_on_any_memory() -> None:
    memory = sentinel_tensor(4, torch.uint8)
    for size in ({"width": 0}, {"height": 0}):
        for src in (memory[2:], torch.empty(0)):
            memcpy_2d_async(memory, src, **BASE | size)
    assert bool((memory == SENTINEL).all())


@pytest.mark.parametrize("side", ["dst", "src"])
def test_rows_too_far_apart_for_one_copy_go_one_by_one(side: str) -> None:
    """The pool of one layer may be larger than the largest pitch; memory that is not touched costs nothing."""
    pitch = MAX_PITCH + 1 + 4096
    width = 512
    far = torch.empty(2 * pitch + width, dtype=torch.uint8)
    near = random_tensor(3 * width, torch.uint8, seed=1)
    rows = [far[row * pitch :][:width] for row in range(3)]
    if side == "dst":
        copies = copy_pitched(far, near, pitch, width, width, 3, "h2h")
    else:
        for row in rows:
            row.copy_(random_tensor(width, torch.uint8, seed=2))
        copies = copy_pitched(near, far, width, pitch, width, 3, "h2h")
    assert copies == 3 and torch.equal(torch.cat(rows), near)


@pytest.mark.parametrize(("max_pitch", "copies"), [(MAX_PITCH, 1), (64, 3)])
def test_block_moves_of_a_pool_too_large_for_the_pitch_go_by_rows_and_are_counted(
    max_pitch: int, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "MAX_PITCH", max_pitch)
    layout = KVLayout(num_layers=3, num_kv_heads=1, head_dim=4, block_size=2, itemsize=4)
    device = cpu.CpuDevice()
    engine = OffloadEngine(device, layout, torch.float32, DeviceSplit(ring_slots=4, resident_blocks=5), 6)
    engine.resident.normal_()
    engine.host.normal_()
    out = engine.resident[:, 3].clone()
    back = engine.host[5].clone()
    engine.move_blocks([BlockMove(3, 5 + 2), BlockMove(5 + 5, 3)])
    engine.synchronize()
    device.close()
    assert torch.equal(engine.host[2], out) and torch.equal(engine.resident[:, 3], back)
    assert engine.transfers == TransferCount(copies, layout.block_bytes, copies, layout.block_bytes)


def test_extension_needs_neither_torch_nor_cuda_libraries() -> None:
    script = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("_sgdma", {_sgdma.__file__!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
assert type(module.cuda_version()) is int
mapped = open("/proc/self/maps").read()
print([name for name in ("libtorch", "libcuda", "libcudart") if name in mapped])
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, env={"CUDA_VISIBLE_DEVICES": ""})
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


def test_missing_extension_is_named_with_the_command_that_builds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nanovllm.comm._sgdma", None)
    with pytest.raises(ImportError, match=r"`python setup\.py build_ext --inplace`"):
        runpy.run_path(str(sgdma_module.__file__))


@pytest.mark.skipif(_sgdma.cuda_version(), reason="the extension was built with CUDA")
def test_a_build_without_cuda_refuses_device_copies_and_tasks() -> None:
    dst = torch.zeros(8)
    src = torch.zeros(8)
    with pytest.raises(RuntimeError, match=r"A h2d copy of 2 rows of 4 bytes failed: this build .* has no CUDA"):
        _sgdma.memcpy_2d_async(dst.data_ptr(), src.data_ptr(), 4, 4, 4, 2, "h2d", 0)
    with pytest.raises(RuntimeError, match=r"cudaLaunchHostFunc failed: this build .* has no CUDA"):
        _sgdma.launch_host_task(*empty_task().take(), 0)


@pytest.mark.cuda
@pytest.mark.skipif(not _sgdma.cuda_version(), reason="the extension was built without CUDA")
def test_copies_within_host_memory_run_in_the_order_of_the_stream() -> None:
    stream = torch.cuda.Stream()
    size = 1 << 20
    device = torch.full((size,), 7, dtype=torch.uint8, device="cuda")
    host, other = (torch.zeros(size, dtype=torch.uint8).pin_memory() for _ in range(2))
    torch.cuda.synchronize()
    memcpy_2d_async(host, device, size, size, size, 1, "d2h", stream)
    copy_on_host_async(other, host, 1024, 1024, 512, 1024, stream)
    memcpy_2d_async(device, other, size, size, size, 1, "h2d", stream)
    stream.synchronize()
    rows = device.cpu().view(1024, 1024)
    assert bool((rows[:, :512] == 7).all()) and not rows[:, 512:].any()


def test_a_copy_on_a_stream_within_host_memory_is_checked() -> None:
    good: dict[str, Any] = {"dst": torch.zeros(8), "src": torch.zeros(8), "dpitch": 4, "spitch": 4, "width": 4}
    for change, message in (({"height": 9}, "past the end of dst"), ({"stream": None}, "must be a torch.cuda.Stream")):
        with pytest.raises(CopyError, match=message):
            copy_on_host_async(**good | {"height": 8, "stream": 0} | change)


@pytest.mark.cuda
@pytest.mark.skipif(not _sgdma.cuda_version(), reason="the extension was built without CUDA")
def test_there_and_back_through_the_device() -> None:
    stream = torch.cuda.Stream()
    src = random_tensor(4096, torch.uint8, seed=6).pin_memory()
    back = sentinel_tensor(4096, torch.uint8).pin_memory()
    first, second = (torch.zeros(4096, dtype=torch.uint8, device="cuda") for _ in range(2))
    torch.cuda.synchronize()
    memcpy_2d_async(first, src, 100, 64, 48, 30, "h2d", stream)
    memcpy_2d_async(second, first, 48, 100, 48, 30, "d2d", stream.cuda_stream)
    memcpy_2d_async(back, second, 80, 48, 48, 30, "d2h", stream)
    stream.synchronize()
    expected = sentinel_tensor(4096, torch.uint8)
    strided_copy(expected, src, 80, 64, 48, 30)
    assert torch.equal(back, expected)


@pytest.mark.cuda
def test_pageable_memory_is_refused() -> None:
    device = torch.zeros(64, device="cuda")
    host = torch.zeros(64)
    with pytest.raises(CopyError, match="needs src in pinned host memory"):
        memcpy_2d_async(device, host, 8, 8, 8, 4, "h2d")


@pytest.mark.cuda
def test_rows_further_apart_than_the_largest_pitch_reach_the_device() -> None:
    pitch = MAX_PITCH + 1
    width = 4096
    stream = torch.cuda.Stream()
    near = random_tensor(3 * width, torch.uint8, seed=7).pin_memory()
    far = torch.zeros(2 * pitch + width, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    assert copy_pitched(far, near, pitch, width, width, 3, "h2d", stream) == 3
    stream.synchronize()
    assert torch.equal(torch.cat([far[row * pitch :][:width] for row in range(3)]).cpu(), near)


if __name__ == "__main__":
    sys.path.insert(0, str(REPO))
    from benchmarks.copy_bandwidth import main

    sys.exit(main())
