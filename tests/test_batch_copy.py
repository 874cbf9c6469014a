"""Many copies in one call, and pitched copies whose pitch is too large for one: what they move and what they refuse."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanovllm.comm import CopyError, copy_pitched, memcpy_batch_async
from nanovllm.comm.sgdma import MAX_PITCH
from nanovllm.data.batch import BlockMove
from nanovllm.device import cpu
from nanovllm.device.cpu import CpuDevice
from nanovllm.kvcache.offload_engine import OffloadEngine
from nanovllm.memory.budget import DeviceSplit, TransferCount
from nanovllm.memory.layout import KVLayout

SENTINEL = 0xA5


def sentinels(size: int) -> Tensor:
    return torch.full((size,), SENTINEL, dtype=torch.uint8)


def random_bytes(size: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def as_batch(dst: Tensor, src: Tensor, pieces: list[tuple[int, int, int]]) -> tuple[list[Tensor], list[Tensor], Any]:
    """(offset in dst, offset in src, size) of each piece as the call takes them."""
    return [dst[a:] for a, _, _ in pieces], [src[b:] for _, b, _ in pieces], [size for _, _, size in pieces]


@settings(max_examples=100)
@given(sizes=st.lists(st.integers(0, 40), max_size=12), seed=st.integers(0, 1000))
def test_equals_a_loop_of_slices_and_leaves_the_rest(sizes: list[int], seed: int) -> None:
    random = Random(seed)
    pieces, dst_at, src_at = [], 1, 1
    for size in sizes:
        dst_at, src_at = dst_at + random.choice([0, 0, 3]), src_at + random.choice([0, 0, 5])
        pieces.append((dst_at, src_at, size))
        dst_at, src_at = dst_at + size, src_at + size
    random.shuffle(pieces)
    dst, src = sentinels(dst_at + 9), random_bytes(src_at + 9, seed)
    expected, source = dst.clone(), src.clone()
    for a, b, size in pieces:
        expected[a : a + size] = src[b : b + size]
    count = memcpy_batch_async(*as_batch(dst, src, pieces), "h2h")
    assert torch.equal(dst, expected) and torch.equal(src, source)
    assert count <= sum(size > 0 for size in sizes)


@pytest.mark.parametrize(
    ("pieces", "copies"),
    [
        ([(0, 0, 8), (8, 8, 8), (16, 16, 8)], 1),
        ([(0, 0, 8), (8, 9, 8)], 2),  # a gap in the source only
        ([(0, 0, 8), (9, 8, 8)], 2),  # a gap in the destination only
        ([(8, 8, 8), (0, 0, 8)], 2),  # neighbours, but not in this order
        ([(0, 0, 8), (30, 30, 0), (8, 8, 8)], 1),
        ([(0, 0, 0), (5, 5, 0)], 0),
        ([], 0),
    ],
)
def test_only_what_is_contiguous_on_both_sides_is_joined(pieces: list[tuple[int, int, int]], copies: int) -> None:
    dst, src = sentinels(64), random_bytes(64)
    assert memcpy_batch_async(*as_batch(dst, src, pieces), "h2h") == copies
    for a, b, size in pieces:
        assert torch.equal(dst[a : a + size], src[b : b + size])


def refusals() -> list[tuple[dict[str, Any], str]]:
    memory = random_bytes(64)
    return [
        ({"sizes": [4]}, "of one length, got 2, 2 and 1"),
        ({"sizes": [4, -1]}, r"sizes\[1\] must be an int of at least 0, got -1"),
        ({"srcs": [memory, torch.empty(8, device="meta")]}, r"needs srcs\[1\] on cpu, but it is on meta"),
        ({"kind": "x"}, "kind must be one of h2h, h2d, d2h, d2d, got 'x'"),
        ({"kind": "d2h"}, r"A d2h copy needs dsts\[0\] in pinned host memory, but its memory is pageable"),
        ({"dsts": [memory, memory[60:]], "sizes": [4, 5]}, r"past the end of dsts\[1\]"),
        ({"srcs": [memory[61:], memory]}, r"past the end of srcs\[0\]"),
        ({"dsts": [memory, memory[3:]]}, r"dsts\[1\] and dsts\[0\] do"),
        ({"dsts": [memory[40:], memory], "srcs": [memory[43:], memory[20:]]}, r"srcs\[0\] and dsts\[0\] do"),
    ]


@pytest.mark.parametrize(("change", "message"), refusals(), ids=[message[:40] for _, message in refusals()])
def test_refusals_name_the_copy_and_move_nothing(change: dict[str, Any], message: str) -> None:
    dst, src = sentinels(64), random_bytes(64)
    batch = {"dsts": [dst, dst[8:]], "srcs": [src, src[8:]], "sizes": [4, 4], "kind": "h2h"}
    with pytest.raises(CopyError, match=message) as caught:
        memcpy_batch_async(**{**batch, **change})
    assert str(caught.value).endswith(".") and "\n" not in str(caught.value)
    assert bool((dst == SENTINEL).all())


def test_one_source_may_be_read_by_several_copies() -> None:
    dst, src = sentinels(16), random_bytes(8)
    assert memcpy_batch_async([dst, dst[8:]], [src, src], [8, 8], "h2h") == 2
    assert torch.equal(dst, torch.cat((src, src)))


def test_a_device_with_a_smaller_pitch_gets_rows_earlier() -> None:
    dst, src = sentinels(64), random_bytes(64)
    assert copy_pitched(dst, src, 16, 16, 8, 4, "h2h", rows_above=16) == 1
    expected = dst.clone()
    dst.fill_(SENTINEL)
    assert copy_pitched(dst, src, 16, 16, 8, 4, "h2h", rows_above=15) == 4
    assert torch.equal(dst, expected)
    assert copy_pitched(dst, src, 16, 16, 0, 4, "h2h", rows_above=15) == 0


@pytest.mark.parametrize(("max_pitch", "copies"), [(MAX_PITCH, 1), (64, 3)])
def test_block_moves_of_a_pool_too_large_for_the_pitch_go_by_rows_and_are_counted(
    max_pitch: int, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "MAX_PITCH", max_pitch)
    layout = KVLayout(num_layers=3, num_kv_heads=1, head_dim=4, block_size=2, itemsize=4)
    device = CpuDevice()
    engine = OffloadEngine(device, layout, torch.float32, DeviceSplit(ring_slots=4, resident_blocks=5), 6)
    engine.resident.normal_()
    engine.host.normal_()
    out, back = engine.resident[:, 3].clone(), engine.host[5].clone()
    engine.move_blocks([BlockMove(3, 5 + 2), BlockMove(5 + 5, 3)])
    engine.synchronize()
    device.close()
    assert torch.equal(engine.host[2], out) and torch.equal(engine.resident[:, 3], back)
    assert engine.transfers == TransferCount(copies, layout.block_bytes, copies, layout.block_bytes)


# ---- on a GPU


@pytest.mark.cuda
@pytest.mark.parametrize("default_stream", [False, True])
def test_a_batch_goes_there_and_back_through_the_device(default_stream: bool) -> None:
    stream = torch.cuda.default_stream() if default_stream else torch.cuda.Stream()
    src, back = random_bytes(1 << 16).pin_memory(), sentinels(1 << 16).pin_memory()
    device = torch.zeros(1 << 16, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    pieces = [(i * 1024, (63 - i) * 1024, 1000) for i in range(64)]
    assert memcpy_batch_async(*as_batch(device, src, pieces), "h2d", stream) == 64
    assert memcpy_batch_async(*as_batch(back, device, [(a, a, size) for a, _, size in pieces]), "d2h", stream) == 64
    stream.synchronize()
    expected = sentinels(1 << 16)
    for a, b, size in pieces:
        expected[a : a + size] = src[b : b + size]
    assert torch.equal(back, expected)


@pytest.mark.cuda
def test_rows_further_apart_than_the_largest_pitch_reach_the_device() -> None:
    pitch, width, stream = MAX_PITCH + 1, 4096, torch.cuda.Stream()
    near = random_bytes(3 * width).pin_memory()
    far = torch.zeros(2 * pitch + width, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    assert copy_pitched(far, near, pitch, width, width, 3, "h2d", stream) == 3
    stream.synchronize()
    assert torch.equal(torch.cat([far[row * pitch :][:width] for row in range(3)]).cpu(), near)
