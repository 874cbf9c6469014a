"""One stream for each direction: an engine whose copies share two streams keeps every order that it asks for."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from engines import greedy, offloaded, random_prompt, token_ids

from benchmarks.shared_streams import SharedStreams
from nanovllm import LLM, build
from nanovllm.device import CopyKind, Device, PitchedCopy, Stream
from nanovllm.device.cpu import CpuDevice
from nanovllm.device.ordering import OrderingCheck
from nanovllm.device.wrapper import DeviceWrapper

BLOCK, VOCAB = 16, 97


class Watched(DeviceWrapper):
    """Records the streams that copies ran on, by direction."""

    def __init__(self, inner: Device) -> None:
        super().__init__(inner)
        self.used: dict[CopyKind, set[int]] = {}

    def copy_2d(self, copy: PitchedCopy, stream: Stream) -> int:
        self.used.setdefault(copy.kind, set()).add(id(stream))
        return super().copy_2d(copy, stream)


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
