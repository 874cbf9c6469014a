"""What a step puts on the device, counted at the seam: launches, copies, waits, and that the host never waits.

The bounds are per layer and per host block visited (`visits`), of which `written` get new tokens. A prefill is held to
the sum over its chunks, also where it goes layer by layer and visits fewer:

    kernels declared    visits of all blocks + written blocks
    copies              visits + written: one load for each, one store for each that is written
    waits               3 visits + 2 written
    records             2 visits + 2 written
    host waits          none; a step reads its sampled tokens, and nothing else

A decode step with graphs, on the host: of a whole step one replay, one kernel declared and a copy to the device for the
inputs, one for the slots and one for each table, however many layers there are; under offload a replay for each layer
and one more, one copy for the inputs, and between replays what is said above.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from engines import greedy, offloaded, random_prompt
from graph_devices import CapturingDevice, RowsOnCpu
from torch.utils._python_dispatch import TorchDispatchMode

from nanovllm import LLM
from nanovllm.device import Device, Event, PitchedCopy, Stream
from nanovllm.device.cpu import CpuDevice
from nanovllm.device.wrapper import DeviceWrapper, StreamWrapper
from nanovllm.engine import model_runner
from nanovllm.engine.decode_graphs import DecodeGraphs
from nanovllm.kvcache import decode_tables
from nanovllm.models.decoder import DecoderLayer
from nanovllm.ops.store_kv import store_kv

BLOCK, VOCAB, LAYERS = 16, 97, 3
# On CUDA these make the host wait for the device. (So does making a tensor there, which on the CPU cannot be told from
# making one on the host; `test_cuda_device.py` finds it on a GPU.)
WAITING_OPERATORS = ("_local_scalar_dense", "nonzero", "masked_select", "repeat_interleave", "unique")


class CountedStream(StreamWrapper):
    def __init__(self, inner: Stream, counts: Counter[str]) -> None:
        super().__init__(inner)
        self._counts = counts

    def record(self, event: Event) -> None:
        self._counts["records"] += 1
        super().record(event)

    def wait(self, event: Event) -> None:
        self._counts["waits"] += 1
        super().wait(event)

    def synchronize(self) -> None:
        self._counts["host waits"] += 1
        super().synchronize()


class CountedDevice(DeviceWrapper):
    def __init__(self, inner: Device) -> None:
        super().__init__(inner)
        self.counts: Counter[str] = Counter()
        self.compute_stream = CountedStream(inner.compute_stream, self.counts)

    def new_stream(self, name: str) -> Stream:
        return CountedStream(self.inner.new_stream(name), self.counts)

    def copy_2d(self, copy: PitchedCopy, stream: Stream) -> int:
        assert isinstance(stream, CountedStream)
        self.counts[copy.kind] += 1
        return self.inner.copy_2d(copy, stream.inner)

    def declare_kernel(self, name: str, *accesses: Any, **named: Any) -> None:
        self.counts["kernels"] += 1


class Operators(TorchDispatchMode):
    """Counts the operators that torch is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(path, vocab=VOCAB, hidden=32, intermediate=32, layers=LAYERS)
    return path


@pytest.fixture
def llm(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    """Steps of 32 tokens, so two blocks each; some blocks are resident, the others stream."""
    monkeypatch.setattr(model_runner, "create_device", lambda name: CountedDevice(CpuDevice()))
    sizes = {"num_gpu_blocks": 5, "num_cpu_blocks": 12, "max_num_batched_tokens": 2 * BLOCK}
    arguments = offloaded(BLOCK, **sizes, cpu_attention=False)
    with LLM(model_dir, dtype="float32", **arguments) as llm:
        yield llm


def counted_step(llm: LLM) -> Counter[str]:
    device = llm._runner.device
    assert isinstance(device, CountedDevice)
    device.counts.clear()
    llm.engine.step()
    return Counter(device.counts)


def bounds(resident: int, context: int, query: int) -> Counter[str]:
    """Of a step of one sequence alone whose first `resident` blocks are on the device."""
    begin, end = context // BLOCK, -(-(context + query) // BLOCK)
    visits, written = max(0, end - resident), max(0, end - max(begin, resident))
    most = {
        "kernels": end + (end - begin),
        "h2d": visits,
        "d2h": written,
        "waits": 3 * visits + 2 * written,
        "records": 2 * visits + 2 * written,
    }
    return Counter({name: LAYERS * count for name, count in most.items()})


def check(counts: Counter[str], most: Counter[str]) -> None:
    assert counts["host waits"] == 0
    assert all(count <= most[name] for name, count in counts.items() if name != "host waits"), (counts, most)


def test_prefill_and_decode_stay_within_their_bounds(llm: LLM) -> None:
    prompt_len, output_len = 8 * BLOCK, 4
    llm.engine.add_request("r", None, greedy(output_len), random_prompt(prompt_len, VOCAB, 1))
    resident = llm.kv_stats().resident_blocks
    chunks = [bounds(resident, context, 2 * BLOCK) for context in range(0, prompt_len, 2 * BLOCK)]
    counts = sum((counted_step(llm) for _ in chunks), Counter[str]())
    check(counts, sum(chunks, Counter[str]()))
    assert counts["d2h"] > 0
    for context in range(prompt_len, prompt_len + output_len - 1):
        counts = counted_step(llm)
        check(counts, bounds(resident, context, 1))
        assert counts["h2d"] > 0 and counts["d2h"] > 0
    assert not llm.engine.has_unfinished_requests()


def test_nothing_in_the_forward_pass_makes_the_host_wait(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    forward_, operators, layers = DecoderLayer.forward_, Operators(), []

    def watched(layer: DecoderLayer, *arguments: Any) -> None:
        layers.append(layer.index)
        with operators:
            forward_(layer, *arguments)

    monkeypatch.setattr(DecoderLayer, "forward_", watched)
    llm.engine.add_request("r", None, greedy(3), random_prompt(5 * BLOCK, VOCAB, 2))
    while llm.engine.has_unfinished_requests():
        llm.engine.step()
    assert set(layers) == set(range(LAYERS)) and operators.seen["mul"] >= len(layers)
    waiting = {name: count for name, count in operators.seen.items() if name.startswith(WAITING_OPERATORS)}
    assert not waiting


def test_the_counter_of_operators_sees_what_would_wait() -> None:
    with Operators() as operators:
        torch.ones(3).sum().item()
        torch.ones(3).nonzero()
    assert set(operators.seen) >= {"_local_scalar_dense", "nonzero"}


# ---- with graphs


def graph_step(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, rows: bool, **arguments: Any
) -> tuple[Counter[str], Counter[str], int]:
    """Of a decode step of three sequences: counts at the seam, operators outside the replays, replays."""
    capturing, operators = CapturingDevice(), Operators()
    device = CountedDevice(capturing)
    monkeypatch.setattr(model_runner, "create_device", lambda name: device)
    if rows:
        monkeypatch.setattr(model_runner, "select_backend", lambda *_: RowsOnCpu(capturing))
        monkeypatch.setattr(decode_tables, "store_kv", capturing.kernel(store_kv))
    run = DecodeGraphs.run

    def watched(*arguments: Any) -> torch.Tensor:
        operators.seen.clear()
        with operators:
            return run(*arguments)

    monkeypatch.setattr(DecodeGraphs, "run", watched)
    with LLM(model_dir, dtype="float32", max_num_seqs=4, max_num_batched_tokens=2 * BLOCK, **arguments) as llm:
        for index in range(3):
            llm.engine.add_request(str(index), None, greedy(4), random_prompt(2 * BLOCK - 4, VOCAB, index))
        while not capturing.replays:
            llm.engine.step()
        replays = capturing.replays
        counts = counted_step(llm)
        return counts, operators.seen, capturing.replays - replays


def test_a_whole_step_is_one_replay(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = {"kvcache_block_size": BLOCK, "num_gpu_blocks": 20}
    counts, operators, replays = graph_step(model_dir, monkeypatch, True, **engine)
    assert replays == 1 and counts == {"kernels": 1}
    assert operators["copy_"] == 3, "inputs, slots, the table of all layers"
    assert sum(operators.values()) <= 40, operators  # on the host: lists to tensors, padding, views


def test_pieces_are_a_replay_for_each_layer_and_one_more(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = offloaded(BLOCK, num_gpu_blocks=5, num_cpu_blocks=12, cpu_attention=False)
    counts, operators, replays = graph_step(model_dir, monkeypatch, False, **engine)
    assert replays == LAYERS + 1 and counts["host waits"] == 0
    # Each sequence has two blocks, of which the second is written.
    most = {"kernels": 9, "h2d": 6, "d2h": 3, "waits": 3 * 6 + 2 * 3, "records": 2 * 6 + 2 * 3}
    assert all(counts[name] <= LAYERS * count for name, count in most.items()), counts
    assert not any(name.startswith(WAITING_OPERATORS) for name in operators), operators
