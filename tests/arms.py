"""What the tests of the CPU arm share: a device that has one on threads of its own, and shares that are forced."""

from __future__ import annotations

import pytest

from nanovllm import LLM
from nanovllm.device.cpu import CpuDevice
from nanovllm.device.ordering import OrderingCheck
from nanovllm.engine import model_runner
from nanovllm.kvcache.decode_shares import arm_query_len
from nanovllm.kvcache.host_arm import ForcedShare, HostArm
from nanovllm.kvcache.offloaded_cache import OffloadedKVCache

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)


class DeviceOfItsOwn(CpuDevice):
    """Stands for a device beside the host: the CPU arm has a thread, buffers and copies, as on a GPU's host."""

    shares_host = False


def put_arm_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines made from now on have an arm that works beside the device."""
    monkeypatch.setattr(model_runner, "create_device", lambda name: OrderingCheck(DeviceOfItsOwn()))


def room(llm: LLM) -> OffloadedKVCache:
    kv_cache = llm._runner.kv_cache
    assert isinstance(kv_cache, OffloadedKVCache)
    return kv_cache


def arm(llm: LLM) -> HostArm:
    found = room(llm).arm
    assert found is not None
    return found


def force_share(llm: LLM, share: float) -> None:
    arm(llm).policy = ForcedShare(share)


def most_arm_tokens(llm: LLM) -> int:
    spec = llm._runner.spec
    return arm_query_len(spec.num_heads, spec.num_kv_heads)
