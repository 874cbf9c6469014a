"""Graphs of decode steps while weights stream: the bits of eager steps, and nothing else is copied."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch
from cpu_attention_helpers import DeviceOfItsOwn
from engines import greedy, offloaded, token_ids
from fast import fast_only
from graph_devices import CapturingDevice, measured_memory, use_graphs, watch_batches
from ordering_check import OrderingError
from streamed_engines import (
    FAMILIES,
    PROMPTS,
    Made,
    answers,
    budget,
    checkpoints,
    failing_copies,
    interrupt_each_copy,
    stream_of,
    weight_sizes,
)

from nanovllm import LLM
from nanovllm.errors import EngineError
from nanovllm.features.streamed_weights.host_products import Chosen, HostExchange, HostExperts, chosen_numbers
from nanovllm.features.streamed_weights.host_share import HostShare
from nanovllm.kvcache.transfer_order import WeightOrder
from nanovllm.layers.experts import Routing

BLOCK = 16
LAYERS = 4
STEP = {"max_num_batched_tokens": 100, "max_model_len": 160, "max_num_seqs": 6}
RESIDENT: dict[str, Any] = {"kvcache_block_size": BLOCK, "num_gpu_blocks": 120, **STEP}
OFFLOADED = offloaded(BLOCK, 8, 200, cpu_attention=False, **STEP)
KV: dict[str, dict[str, Any]] = {"full steps": RESIDENT, "resident": RESIDENT, "offloaded": OFFLOADED}
LEAST: dict[str, Any] = {"weights_memory_bytes": "1%"}
COPIED: dict[str, Any] = {**LEAST, "host_products": False}


def recorded(monkeypatch: pytest.MonkeyPatch, kv: str = "resident", **options: Any) -> CapturingDevice:
    """Engines made from now on record steps, on a device that does not share the host's memory."""
    device = CapturingDevice(DeviceOfItsOwn(), **options)
    use_graphs(monkeypatch, device, rows=kv == "full steps")
    return device


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return checkpoints(tmp_path_factory, layers=LAYERS)


@pytest.fixture(scope="module")
def expected(made: Made) -> Callable[[str], list[Any]]:
    """What engines answer whose weights stay on the device, and which record nothing."""
    found: dict[str, list[Any]] = {}

    def of_family(family: str) -> list[Any]:
        if family not in found:
            with LLM(made(family), dtype="float32", **RESIDENT) as llm:
                found[family] = answers(llm)
        return found[family]

    return of_family


# ---- the same bits

CASES = [(family, kv, host) for family in FAMILIES for kv in KV for host in (False, True)]
FAST = [("qwen3", "offloaded", False), ("qwen3_moe", "full steps", False)]
FAST += [("qwen3_moe", "offloaded", True), ("qwen3_5", "resident", False)]


@pytest.mark.parametrize(("family", "kv", "host_products"), fast_only(FAST, CASES))
def test_bits_are_those_of_weights_that_stay(
    made: Made,
    expected: Callable[[str], list[Any]],
    family: str,
    kv: str,
    host_products: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = expected(family)
    recorded(monkeypatch, kv)
    batches = watch_batches(monkeypatch)
    for asked in ("1%", "60%"):
        given = {"weights_memory_bytes": asked, "host_products": host_products, **KV[kv]}
        with LLM(made(family), dtype="float32", **given) as llm:
            assert answers(llm) == wanted
            assert (stream_of(llm).host_bytes > 0) == host_products
            is_replayed = not host_products or bool(llm._runner.model.experts)  # else the host multiplies some layer
    if is_replayed:
        assert len(set(batches)) > 2


def test_steps_in_which_the_host_multiplies_layers_are_eager(
    made: Made, expected: Callable[[str], list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others are replayed in turn with them, whatever layers they copy."""
    wanted = expected("qwen3")
    recorded(monkeypatch)
    batches = watch_batches(monkeypatch)
    shares = cycle([(), (1, 2, 4), ()])
    monkeypatch.setattr(HostShare, "layers", lambda share, rows: next(shares))
    with LLM(made("qwen3"), dtype="float32", **LEAST, **RESIDENT) as llm:
        assert answers(llm) == wanted
        assert len(batches) > 3
        assert stream_of(llm).host_bytes > 0


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_padded_rows_bring_nothing(made: Made, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three sequences have graphs of four rows, of which the last chooses experts too."""
    recorded(monkeypatch)
    batches = watch_batches(monkeypatch)
    loaded = []
    for is_eager in (True, False):
        given = {**COPIED, **RESIDENT, "enforce_eager": is_eager}
        with LLM(made(family), dtype="float32", **given) as llm:
            token_ids(llm, PROMPTS, greedy(9))
            loaded.append(stream_of(llm).loaded_bytes)
    assert 3 in batches
    assert loaded[0] == loaded[1]


def test_preempted_requests(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    few = {**RESIDENT, "num_gpu_blocks": 6, "max_model_len": 64}
    prompts = PROMPTS[1:] * 2
    with LLM(made("qwen3_moe"), dtype="float32", **few) as llm:
        wanted = token_ids(llm, prompts, greedy(16))
    recorded(monkeypatch, "full steps")
    batches = watch_batches(monkeypatch)
    for way in (LEAST, COPIED):
        with LLM(made("qwen3_moe"), dtype="float32", **way, **few) as llm:
            assert token_ids(llm, prompts, greedy(16)) == wanted
            assert llm.metrics().preemptions.recomputed > 0
    assert batches


# ---- which experts are on the device


def grouped(chosen: torch.Tensor, num_experts: int) -> Any:
    """The grouping of choices [rows, k]."""
    triton_routing = pytest.importorskip("nanovllm.ops.triton_routing")
    rows, k = chosen.shape
    order = chosen.flatten().argsort(stable=True)
    entries = torch.empty_like(order)
    entries[order] = torch.arange(rows * k)
    ends = chosen.flatten().bincount(minlength=num_experts).cumsum(0)
    parts = (ends, order // k, entries.view(rows, k))
    return triton_routing.Grouping(*(part.int() for part in parts))


def test_the_device_has_of_a_grouping_what_the_first_rows_choose_of_it() -> None:
    chosen = torch.tensor([[4, 1], [0, 4], [2, 1], [3, 5]])
    whole = grouped(chosen, 6)
    routing = Routing(torch.rand(4, 2)[:3], whole._replace(entries=whole.entries[:3]))
    assert chosen_numbers(routing) == [0, 1, 2, 4]
    exchange = HostExchange(DeviceOfItsOwn(), 1024)
    known = Chosen(exchange, torch.rand(3, 7), routing)
    assert known.numbers == [0, 1, 2, 4] and torch.equal(known.experts, chosen[:3])
    part = HostExperts(known, {1, 4}, (None, None), exchange)  # type: ignore[arg-type]
    weights, of_device = part.of_device(routing)
    assert weights is routing.weights
    assert [tensor.shape for tensor in of_device] == [tensor.shape for tensor in routing.chosen]
    assert of_device.ends.tolist() == [1, 1, 2, 2, 2, 2]
    assert of_device.rows[:2].tolist() == [1, 2]
    assert of_device.entries.tolist() == [[8, 8], [0, 8], [1, 8]]


# ---- recording


def test_graphs_end_where_something_is_copied(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before layers that stream, and those behind them, and where experts are chosen. Recording copies nothing."""
    device = recorded(monkeypatch, "full steps")
    for family, asked in (("qwen3", budget(weight_sizes(made("qwen3")), 2)), ("qwen3_moe", "1%")):
        given = {**RESIDENT, **COPIED, "weights_memory_bytes": asked, "max_num_seqs": 1}
        with LLM(made(family), dtype="float32", **given) as llm:
            stream = stream_of(llm)
            behind = {(index + 1) % LAYERS for index in stream.streamed}
            cuts = len(stream.streamed if family == "qwen3_moe" else behind.union(stream.streamed))
            graphs = llm._runner.passes[0].decode_runner
            assert graphs is not None and graphs.num_graphs == len(device.live) == cuts + 2  # and one for the token
            assert stream.loaded_bytes == 0 and llm._runner.model.layer_weights is stream
            assert all(experts.loads is stream for experts in llm._runner.model.experts)
        del graphs, llm
        gc.collect()


def test_graphs_are_part_of_what_is_sized(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    each = 8 << 20
    device = recorded(monkeypatch, "full steps", graph_bytes=each)
    facts = measured_memory(monkeypatch)
    sizes = {**RESIDENT, "num_gpu_blocks": -1, "gpu_memory_utilization": 0.5, "max_num_seqs": 3}
    with LLM(made("qwen3"), dtype="float32", **COPIED, **sizes) as llm:
        graphs = llm._runner.passes[0].decode_runner
        assert graphs is not None and graphs.num_graphs == len(device.live) == 3 * (LAYERS + 2)
        assert facts[0].activation_peak > graphs.num_graphs * each
        assert stream_of(llm).loaded_bytes == 0


def test_a_failed_recording_is_one_warning(
    made: Made, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with LLM(made("qwen3_moe"), dtype="float32", **RESIDENT) as llm:
        wanted = token_ids(llm, PROMPTS, greedy(5))
    device = recorded(monkeypatch, fails_at=1)
    with LLM(made("qwen3_moe"), dtype="float32", **LEAST, **RESIDENT) as llm:
        assert token_ids(llm, PROMPTS, greedy(5)) == wanted
    warned = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warned[-1] == (
        "decode runs without CUDA graphs, recording them failed: operation not permitted when stream is capturing"
    )
    assert not device.replays


# ---- failures


@pytest.mark.parametrize(
    ("family", "given", "fails_at"), [("qwen3", COPIED, 3), ("qwen3_moe", COPIED, 1), ("qwen3_moe", LEAST, 1)]
)
def test_a_failing_copy_ends_the_running_requests_and_not_the_engine(
    made: Made, family: str, given: dict[str, Any], fails_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a step that is replayed: the prompts are known."""
    recorded(monkeypatch)
    batches = watch_batches(monkeypatch)
    prompts = [prompt[:1] for prompt in PROMPTS]
    with LLM(made(family), dtype="float32", **given, **RESIDENT) as llm:
        wanted = token_ids(llm, prompts, greedy(8))
        before = len(batches)
        with failing_copies(fails_at), pytest.raises(EngineError, match="the link is down"):
            llm.generate([prompt[:1] for prompt in (PROMPTS[1], [5, 1], [8, 2])], greedy(40), use_tqdm=False)
        assert not llm.engine.has_unfinished_requests()
        assert before > 0
        assert token_ids(llm, prompts, greedy(8)) == wanted


def test_after_an_interrupt_no_part_of_a_copy_is_taken_for_a_whole(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded(monkeypatch, "full steps")
    batches = watch_batches(monkeypatch)
    prompt = [PROMPTS[2][:1]]
    given = {**RESIDENT, **COPIED, "enable_prefix_caching": False}
    with LLM(made("qwen3_moe"), dtype="float32", **given) as llm:
        interrupt_each_copy(llm, prompt, greedy(5), (1, 2, 5))
    assert batches


@pytest.mark.parametrize("forgetful", ["before_compute", "after_compute"])
def test_weight_slots_of_which_one_is_not_ordered_are_noticed(
    made: Made, forgetful: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a step that is replayed."""
    recorded(monkeypatch, "full steps")
    every = getattr(WeightOrder, forgetful)
    with LLM(made("qwen3"), dtype="float32", **COPIED, **RESIDENT) as llm:
        llm.engine.add_request("r", None, greedy(5), PROMPTS[2])
        llm.engine.step()
        monkeypatch.setattr(WeightOrder, forgetful, lambda order, slot: slot and every(order, slot))
        with pytest.raises(EngineError) as failed:
            for _ in range(4):
                llm.engine.step()
    assert isinstance(failed.value.__cause__, OrderingError)
    assert "a slot for streamed layers" in str(failed.value.__cause__)
