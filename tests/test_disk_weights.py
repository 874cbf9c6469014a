"""Weights that are read from disk: the same bits for every budget of the host, and what goes wrong."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from cpu_attention_helpers import DeviceOfItsOwn
from engines import greedy, offloaded, token_ids
from fast import fast_only
from hypothesis import given, settings
from hypothesis import strategies as st
from ordering_check import OrderingCheck, OrderingError
from quantized_checkpoints import quantize, set_quantization
from rank_processes import kept_rank_processes
from safetensors.torch import load_file, save_file
from streamed_engines import FAMILIES, PROMPTS, VOCAB, Made, answers, checkpoints, stream_of
from test_ordering import order_calls, without_call

from nanovllm import LLM, build
from nanovllm.errors import ConfigError, EngineError
from nanovllm.features.streamed_weights import stream
from nanovllm.features.streamed_weights.host_layers import HostLayers
from nanovllm.features.streamed_weights.weight_file import WeightFile
from nanovllm.memory.weights import BLOCK as BLOCK_BYTES
from nanovllm.memory.weights import HOST_PLACES

TIMES = int(os.environ.get("NANOVLLM_FUZZ_TIMES", "1"))  # as many examples
BLOCK = 16
RESIDENT: dict[str, Any] = {"kvcache_block_size": BLOCK, "num_gpu_blocks": 120, "max_num_batched_tokens": 100}
NOT_CACHED = {**RESIDENT, "enable_prefix_caching": False}
LEAST = {**NOT_CACHED, "weights_memory_bytes": "1%", "host_weights_bytes": "1%"}
KV: dict[str, dict[str, Any]] = {
    "resident": RESIDENT,
    "offloaded": offloaded(BLOCK, 8, 200, max_num_batched_tokens=100),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return checkpoints(tmp_path_factory, layers=6)


CASES = [
    (family, kv, products, device)
    for family in FAMILIES
    for kv in KV
    for products in (True, False)
    for device in (True, False)
]
FAST = [("qwen3", "offloaded", True, False), ("glm4_moe", "offloaded", True, True)]


@pytest.mark.parametrize(("family", "kv", "products", "shares"), fast_only(FAST, CASES))
def test_bits_are_those_of_resident_weights(
    made: Made,
    family: str,
    kv: str,
    products: bool,
    shares: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """shares: whether the device shares the host's memory."""
    if not shares:
        monkeypatch.setattr(build, "create_device", lambda name: OrderingCheck(DeviceOfItsOwn()))
    path = made(family)
    arguments = {**KV[kv], "dtype": "float32", "host_products": products}
    if kv == "offloaded" and not shares:
        arguments["cpu_attention"] = False  # its share follows measured times, and decides bits
    with LLM(path, **arguments) as llm:
        expected = answers(llm)
    for host in ("1%", "50%", "90%"):
        given = {"weights_memory_bytes": "30%", "host_weights_bytes": host, "weights_dir": tmp_path / "disk"}
        with LLM(path, **given, **arguments) as llm:
            stream = stream_of(llm)
            assert llm._runner.sizing.weights.on_disk
            assert answers(llm) == expected
            assert answers(llm) == expected, "from the prefix cache"
            assert stream.read_bytes > 0 and llm.kv_stats().read_weight_bytes > 0
        assert list((tmp_path / "disk").iterdir()) == []


# ---- what is read


def num_passes(llm: LLM, prompt: list[int], max_tokens: int) -> int:
    """Chunks of the prompt, and a step for each token after the first."""
    token_ids(llm, prompt, greedy(max_tokens))
    return -(-len(prompt) // RESIDENT["max_num_batched_tokens"]) + max_tokens - 1


@pytest.mark.parametrize("products", [True, False])
def test_a_pass_reads_each_layer_once_that_has_no_place_on_the_host(made: Made, products: bool, tmp_path: Path) -> None:
    """With products on the host, but for those that the last prompt has left in slots."""
    given = {**RESIDENT, "enable_prefix_caching": False, "weights_memory_bytes": "1%", "host_weights_bytes": "60%"}
    with LLM(made("qwen3"), dtype="float32", weights_dir=tmp_path, host_products=products, **given) as llm:
        stream = stream_of(llm)
        plan = llm._runner.sizing.weights
        assert HOST_PLACES < len(plan.on_disk) < len(plan.streamed) == 6
        num_passes(llm, PROMPTS[2], 3)
        before = stream.read_bytes
        passes = num_passes(llm, PROMPTS[0], 8)
        read = stream.read_bytes - before
        most = plan.read_bytes(1, None) + BLOCK_BYTES * len(plan.on_disk)  # in whole blocks
        in_slots = plan.num_slots * (plan.slot_bytes + BLOCK_BYTES) if products else 0
        assert passes * (plan.read_bytes(1, None) - in_slots) <= read <= passes * most
        assert products or read % passes == 0
        stats = llm.kv_stats()
    assert 0 < stats.read_weight_bytes == llm.kv_stats().read_weight_bytes


def test_more_of_the_host_reads_fewer_experts(made: Made, tmp_path: Path) -> None:
    given = {**RESIDENT, "enable_prefix_caching": False, "weights_memory_bytes": "1%"}
    read = []
    for host in ("1%", "50%", "95%"):
        with LLM(made("qwen3_moe"), dtype="float32", host_weights_bytes=host, weights_dir=tmp_path, **given) as llm:
            stream = stream_of(llm)
            num_passes(llm, PROMPTS[0], 3)
            before = stream.read_bytes
            num_passes(llm, PROMPTS[2], 20)
            read.append(stream.read_bytes - before)
            assert read[-1] <= 20 * sum(size for units in stream._on_disk for _, size in units._spans.values())
    assert read[0] > read[1] > read[2]


@pytest.mark.parametrize("has_event", [True, False])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_the_ordering_check_notices_a_read_that_does_not_wait_for_copies(
    made: Made, family: str, has_event: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    says = pytest.raises((OrderingError, EngineError), match="host's 'read of weights' on stream host writes")
    if has_event:
        monkeypatch.setattr(OrderingCheck, "wait_for", lambda device, event: None)
    else:
        (call,) = [call for call in order_calls() if "record(copied)" in call[2]]
        monkeypatch.setattr(stream, "WeightOrder", without_call(*call[:2]).WeightOrder)
        says = pytest.raises((OrderingError, EngineError))
    with LLM(made(family), dtype="float32", weights_dir=tmp_path, host_products=False, **LEAST) as llm, says:
        token_ids(llm, PROMPTS, greedy(3))


def test_experts_that_differ_in_form_leave_the_others_fewer_places(tmp_path: Path) -> None:
    """Their layers are read whole, into larger places."""
    sizes: dict[str, Any] = {"hidden": 128, "intermediate": 256, "heads": 8, "kv_heads": 4, "layers": 4, "experts": 16}
    make_checkpoint(tmp_path / "plain", "qwen3_moe", vocab=VOCAB, **sizes)
    path = quantize(tmp_path / "plain", tmp_path / "packed", "pack-quantized-32")
    name = "model.layers.1.mlp.experts.3.down_proj"
    tensors = load_file(path / "model.safetensors")
    kept = {stored: tensor for stored, tensor in tensors.items() if not stored.startswith(f"{name}.")}
    plain = load_file(tmp_path / "plain" / "model.safetensors")[f"{name}.weight"]
    save_file({**kept, f"{name}.weight": plain}, path / "model.safetensors")
    set_quantization(path, ignore=["lm_head", name])
    with LLM(path, dtype="bfloat16", **RESIDENT) as llm:
        expected = answers(llm)
    given = {**RESIDENT, "weights_memory_bytes": "1%", "host_weights_bytes": "70%", "weights_dir": tmp_path / "disk"}
    with LLM(path, dtype="bfloat16", **given) as llm:
        assert answers(llm) == expected
        plan = llm._runner.sizing.weights
        places = [units._memory for units in stream_of(llm)._on_disk]
        assert sum(memory.nbytes for memory in places) <= plan.host_bytes + BLOCK_BYTES * sum(map(len, places))


# ---- what fails


def failing(monkeypatch: pytest.MonkeyPatch, fails_at: int) -> None:
    """Let a read fail, counted from now on."""
    reads = count(1)
    preadv = os.preadv

    def broken(file: int, into: list[memoryview], begin: int) -> int:
        if next(reads) == fails_at:
            raise OSError(errno.EIO, "Input/output error")
        return preadv(file, into, begin)

    monkeypatch.setattr(os, "preadv", broken)


FAST_FAILURES = [("qwen3", True, 3), ("qwen3", False, 3), ("qwen3_moe", True, 1), ("qwen3_moe", False, 3)]
# Of experts that the host computes most are there in the second run, so that fewer are read.
FAILURES = [*FAST_FAILURES, *((family, products, at) for family, products, _ in FAST_FAILURES[::3] for at in (1, 15))]


@pytest.mark.parametrize(("family", "products", "fails_at"), fast_only(FAST_FAILURES, FAILURES))
def test_a_failing_read_ends_the_running_requests_and_not_the_engine(
    made: Made, family: str, products: bool, fails_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {**LEAST, "weights_dir": tmp_path, "host_products": products}
    with LLM(made(family), dtype="float32", **given) as llm:
        expected = token_ids(llm, PROMPTS, greedy(5))
        failing(monkeypatch, fails_at)
        with pytest.raises(EngineError, match=r"weights cannot be read from weights_dir=.*Input/output error"):
            llm.generate(PROMPTS, greedy(5), use_tqdm=False)
        assert not llm.engine.has_unfinished_requests()
        assert llm.engine.scheduler.block_manager.pool.num_used == 0
        for _ in range(2):
            assert token_ids(llm, PROMPTS, greedy(5)) == expected


@pytest.mark.parametrize(("family", "caches"), [("qwen3", False), ("qwen3_moe", True)])
def test_after_an_interrupt_no_part_of_a_read_is_taken_for_a_whole(
    made: Made, family: str, caches: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """caches: prefixes, so that all passes have few rows, which choose experts."""
    given = {**LEAST, "weights_dir": tmp_path, "enable_prefix_caching": caches}
    with LLM(made(family), dtype="float32", **given) as llm:
        expected = token_ids(llm, PROMPTS, greedy(3))
        read = WeightFile.read
        for stops_at in (1, 2, 3, 4):
            reads = count(1)

            def interrupted(*given: Any, reads: Iterator[int] = reads, stops_at: int = stops_at) -> Any:
                begun = read(*given)
                if next(reads) == stops_at:
                    raise KeyboardInterrupt
                return begun

            with monkeypatch.context() as patched:
                patched.setattr(WeightFile, "read", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    llm.generate(PROMPTS, greedy(3), use_tqdm=False)
            assert token_ids(llm, PROMPTS, greedy(3)) == expected


def test_an_engine_is_closed_while_weights_are_read(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first layers of a pass that never comes are on the way when the engine is closed."""
    llm = LLM(made("qwen3"), dtype="float32", weights_dir=tmp_path, **LEAST)
    reading = threading.Event()
    goes_on = threading.Event()
    preadv = os.preadv
    settle = WeightFile.settle
    token_ids(llm, PROMPTS[2], greedy(3))
    stream = stream_of(llm)

    def slow(file: int, into: list[memoryview], begin: int) -> int:
        reading.set()
        goes_on.wait()
        return preadv(file, into, begin)

    def settling(file: WeightFile) -> None:
        goes_on.set()
        settle(file)

    assert stream._file is not None
    stream.reset()  # so that nothing is being read, and all places may be overwritten
    monkeypatch.setattr(os, "preadv", slow)
    monkeypatch.setattr(WeightFile, "settle", settling)
    for units in stream._on_disk:
        units.expect([unit for unit in units._spans if not units.has(unit)])
    reading.wait()
    llm.close()
    assert not any(thread.name.startswith("weight-reader") for thread in threading.enumerate())
    assert not stream._file._close_file.alive


def test_engines_of_one_process_read_beside_each_other(made: Made, tmp_path: Path) -> None:
    with LLM(made("qwen3_moe"), dtype="float32", **RESIDENT) as llm:
        expected = token_ids(llm, PROMPTS[0], greedy(9))
    engines = [LLM(made("qwen3_moe"), dtype="float32", weights_dir=tmp_path, **LEAST) for _ in range(2)]
    last: dict[int, list[int]] = {}
    for llm in engines:
        llm.engine.add_request("0", None, greedy(9), PROMPTS[0])
    while any(llm.engine.has_unfinished_requests() for llm in engines):
        for number, llm in enumerate(engines):
            for output in llm.engine.step():
                last[number] = output.outputs[0].token_ids
    for llm in engines:
        llm.close()
    assert list(last.values()) == expected * 2


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_ranks_have_files_of_their_own(made: Made, family: str, tmp_path: Path) -> None:
    with kept_rank_processes():
        found = []
        for given in (
            RESIDENT,
            {**LEAST, "weights_dir": tmp_path},
            {**LEAST, **KV["offloaded"], "weights_dir": tmp_path},
        ):
            with LLM(made(family), dtype="float32", tensor_parallel_size=2, **given) as llm:
                found.append(answers(llm))
        assert found[0] == found[1] == found[2] and list(tmp_path.iterdir()) == []


def test_a_trace_is_of_an_engine_that_reads_too(made: Made, tmp_path: Path) -> None:
    with LLM(made("qwen3"), dtype="float32", **RESIDENT) as llm:
        expected = token_ids(llm, PROMPTS, greedy(3))
    trace = tmp_path / "trace.json"
    with LLM(made("qwen3"), dtype="float32", trace=trace, weights_dir=tmp_path, **LEAST) as llm:
        assert token_ids(llm, PROMPTS, greedy(3)) == expected


def test_budgets_that_cannot_be_are_refused_before_anything_is_loaded(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loading(*given: Any) -> None:
        raise AssertionError("a layer is loaded")

    monkeypatch.setattr(HostLayers, "load", loading)
    given = {**RESIDENT, "weights_memory_bytes": "1%", "dtype": "float32"}
    path = made("qwen3")
    with pytest.raises(ConfigError, match=r"^host_weights_bytes=50%: the weights that stream take .* weights_dir$"):
        LLM(path, host_weights_bytes="50%", **given)
    with pytest.raises(ConfigError, match=r"^host_weights_bytes=5000: places for .* raise it to at least \d+$"):
        LLM(path, host_weights_bytes=5000, weights_dir=tmp_path, **given)

    def full(file: int, begin: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(
        ConfigError, match=r"^weights_dir='.*': the weights for which the host is too small take 0\.00 GiB"
    ):
        LLM(path, host_weights_bytes="50%", weights_dir=tmp_path, **given)
    assert list(tmp_path.iterdir()) == []


def test_a_share_below_the_least_gets_the_least_and_says_so(
    made: Made, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), LLM(made("qwen3"), weights_dir=tmp_path, **LEAST):
        pass
    said = [record.getMessage() for record in caplog.records if "host_weights_bytes" in record.getMessage()]
    assert len(said) == 1 and said[0].startswith("host_weights_bytes=1%: places for weights that are read from disk")


# ---- any budget


@given(data=st.data())
@settings(max_examples=3 * TIMES)
def test_random_budgets_give_the_same_bits(
    made: Made, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    draw = data.draw
    path = made(draw(st.sampled_from(["qwen3", "qwen3_moe", "glm4_moe"]), "family"))
    kv = {
        **KV[draw(st.sampled_from(list(KV)), "KV")],
        "max_num_batched_tokens": draw(st.sampled_from([16, 70]), "tokens"),
    }
    given = {
        "weights_memory_bytes": f"{draw(st.integers(1, 80), 'device')}%",
        "host_weights_bytes": f"{draw(st.integers(1, 100), 'host')}%",
        "weights_dir": tmp_path_factory.mktemp("disk"),
        "host_products": draw(st.booleans(), "host_products"),
    }
    with LLM(path, dtype="float32", **kv) as llm:
        expected = answers(llm)
    with LLM(path, dtype="float32", **given, **kv) as llm:
        for _ in range(draw(st.integers(1, 2), "times")):
            assert answers(llm) == expected
