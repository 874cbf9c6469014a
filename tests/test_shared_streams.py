"""One stream for each direction: copies share two streams and keep every order that the engine asks for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from engines import greedy, offloaded, random_prompt, token_ids

from benchmarks.shared_streams import SharedStreams
from nanovllm import LLM, build
from nanovllm.device import CopyKind, Device, PitchedCopy, Stream
from nanovllm.device.cpu import CpuDevice
from nanovllm.device.ordering import OrderingCheck, OrderingError
from nanovllm.device.wrapper import DeviceWrapper

BLOCK, VOCAB = 16, 97
SHAPE = (4, 2, 1, 4, 4)  # four pieces


class Watched(DeviceWrapper):
    """Records the streams that copies ran on, by direction."""

    def __init__(self, inner: Device) -> None:
        super().__init__(inner)
        self.used: dict[CopyKind, set[int]] = {}

    def copy_2d(self, copy: PitchedCopy, stream: Stream) -> int:
        self.used.setdefault(copy.kind, set()).add(id(stream))
        return super().copy_2d(copy, stream)


@pytest.fixture
def device() -> Iterator[SharedStreams]:
    device = SharedStreams(OrderingCheck(CpuDevice()))
    yield device
    device.close()


def copy(device: Device, dst: torch.Tensor, src: torch.Tensor, kind: CopyKind, stream: Stream) -> None:
    device.copy_2d(PitchedCopy(dst, src, src.nbytes, src.nbytes, src.nbytes, 1, kind), stream)


def test_copies_of_one_stream_stay_in_order_in_both_directions(device: SharedStreams) -> None:
    """Out to the host and in again: the second copy, on the other shared stream, reads what the first writes."""
    ring, host = device.empty("ring", SHAPE, torch.float32), device.empty_host("host", SHAPE, torch.float32)
    ring.fill_(1)
    stream = device.new_stream("slot")
    for piece in range(3):
        copy(device, host[piece], ring[piece], "d2h", stream)
        copy(device, ring[piece + 1], host[piece], "h2d", stream)
    stream.synchronize()
    assert bool((host[:3] == 1).all())


def test_waits_and_records_hold_for_the_copies(device: SharedStreams) -> None:
    ring, host = device.empty("ring", SHAPE, torch.float32), device.empty_host("host", SHAPE, torch.float32)
    stream, event = device.new_stream("a"), device.new_event()
    device.declare_kernel("attend", reads=(ring[0],))
    device.compute_stream.record(event)
    stream.wait(event)
    copy(device, ring[0], host[0], "h2d", stream)
    with pytest.raises(OrderingError):
        device.declare_kernel("attend", reads=(ring[0],))
    stream.record(event)
    device.compute_stream.wait(event)
    device.declare_kernel("attend", reads=(ring[0],))


def test_an_engine_on_shared_streams_gives_the_same_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill, decode and swaps: every copy runs on one of two streams, and the ordering check passes."""
    make_checkpoint(tmp_path, vocab=VOCAB, hidden=32, intermediate=32)
    prompts = [random_prompt(length, VOCAB, 3) for length in (70, 33)]
    arguments = offloaded(BLOCK, 5, 12, max_num_batched_tokens=45)
    with LLM(tmp_path, dtype="float32", **arguments) as llm:
        expected = token_ids(llm, prompts, greedy(5))
        transfers = llm.kv_stats().transfers
    watched = Watched(OrderingCheck(CpuDevice()))
    monkeypatch.setattr(build, "create_device", lambda name: SharedStreams(watched))
    with LLM(tmp_path, dtype="float32", **arguments) as llm:
        assert token_ids(llm, prompts, greedy(5)) == expected
        assert llm.kv_stats().transfers == transfers
    assert {kind: len(streams) for kind, streams in watched.used.items()} == {"h2d": 1, "d2h": 1}
