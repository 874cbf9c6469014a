"""What a step puts on the device, counted at the seam: launches, copies, waits, and that the host never waits.

Host blocks are attended in groups, which are at least 16 MiB where the ring can hold two of them
(`DeviceSplit.group_slots`). The bounds are per layer, for a sequence alone whose host blocks are neighbours; `written`
blocks get new tokens, and `written groups` have one of them:

    attention calls     groups, and one for all resident blocks; each is two launches at most with few query rows
    kernels declared    as many, and written blocks
    loads               groups, and one for a block of which only a part is stored
    stores              written blocks
    waits               2 groups + 2 written groups
    records             2 groups + 2 written groups
    host waits          none; a step reads its sampled tokens, and nothing else

So a group without new tokens, which is 16 MiB or more, takes 2 launches, 2 waits, 2 records and 1 copy. A step waits
once for what was stored before it: 2 waits and 2 records.

A layer-by-layer prefill reads blocks one by one, and is held to the sum over chunks of

    waits               3 reads + 3 written
    records             2 reads + 3 written

A decode step with graphs, on the host: of a whole step one replay, one kernel declared and a copy to the device for the
inputs, one for the slots and one for each table, however many layers there are; under offload a replay for each layer
and one more, one copy for the inputs, and between replays what is said above. Where all rows are greedy, one more
replay gives their tokens.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import checkpoint_fixture
from cpu_attention_helpers import kv_cache
from engines import PREFILL_WAYS, greedy, offloaded, random_prompt, set_prefill, set_ring
from graph_devices import CapturingDevice, RowsOnCpu, record_kernels
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nanovllm import LLM, build
from nanovllm.device import Device, Event, PitchedCopy, Stream
from nanovllm.device.cpu import CpuDevice
from nanovllm.device.wrapper import DeviceWrapper, StreamWrapper
from nanovllm.features.cuda_graphs import decode_tables
from nanovllm.features.cuda_graphs.decode_graphs import DecodeGraphs
from nanovllm.layers.attention import Attention
from nanovllm.layers.decoder_layer import DecoderLayer
from nanovllm.ops.attention import (
    AttentionMetadata,
    AttentionState,
    SequenceMetadata,
)
from nanovllm.ops.cpu_attention import MAX_STEP_ROWS, PagedStep
from nanovllm.ops.row_kernels import store_kv

BLOCK = 16
VOCAB = 97
LAYERS = 3
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


model_dir = checkpoint_fixture(vocab=VOCAB, hidden=32, intermediate=32, layers=LAYERS)


@pytest.fixture
def llm(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    """Steps of 32 tokens, so two blocks each; some blocks are resident, the others stream."""
    monkeypatch.setattr(build, "create_device", lambda name: CountedDevice(CpuDevice()))
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


def bounds(llm: LLM, context: int, query: int, way: str = "chunk-major") -> Counter[str]:
    """Of a step of one sequence alone whose first blocks are on the device."""
    resident = llm.kv_stats().resident_blocks
    engine = kv_cache(llm).engine
    begin = context // BLOCK
    end = -(-(context + query) // BLOCK)
    reads = max(0, end - resident)
    written = max(0, end - max(begin, resident))
    groups = -(-reads // engine.group_slots)
    is_part = context % BLOCK > 0 and context // BLOCK >= resident
    written_groups = min(written, groups)
    most = {
        "kernels": 1 + groups + (end - begin),
        "attends": 1 + groups,
        "h2d": groups + is_part,
        "d2h": written,
        "waits": 2 * groups + 2 * written_groups,
        "records": 2 * groups + 2 * written_groups,
    }
    if way == "layer-major":
        most |= {"kernels": end + (end - begin), "h2d": reads}
        most |= {"waits": 3 * reads + 3 * written, "records": 2 * reads + 3 * written}
    once = Counter({"waits": 2, "records": 2})
    return Counter({name: LAYERS * count for name, count in most.items()}) + once


def check(counts: Counter[str], most: Counter[str]) -> None:
    assert counts["host waits"] == 0
    assert all(count <= most[name] for name, count in counts.items() if name != "host waits"), (counts, most)


def count_attention(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of the backend count as well from now on."""
    device = llm._runner.device
    backend = kv_cache(llm)._backend
    assert isinstance(device, CountedDevice)
    attend = backend.attend

    def counted(*arguments: Any) -> None:
        device.counts["attends"] += 1
        attend(*arguments)

    monkeypatch.setattr(backend, "attend", counted)


@pytest.mark.parametrize("way", PREFILL_WAYS)
def test_prefill_and_decode_stay_within_their_bounds(llm: LLM, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt_len = 8 * BLOCK
    output_len = 4
    set_prefill(llm, way)
    count_attention(llm, monkeypatch)
    llm.engine.add_request("r", None, greedy(output_len), random_prompt(prompt_len, VOCAB, 1))
    chunks = [bounds(llm, context, 2 * BLOCK, way) for context in range(0, prompt_len, 2 * BLOCK)]
    counts = sum((counted_step(llm) for _ in chunks), Counter[str]())
    check(counts, sum(chunks, Counter[str]()))
    assert counts["d2h"] > 0 and counts["attends"] > 0
    for context in range(prompt_len, prompt_len + output_len - 1):
        counts = counted_step(llm)
        check(counts, bounds(llm, context, 1))
        assert counts["h2d"] > 0 and counts["d2h"] > 0
    assert not llm.engine.has_unfinished_requests()


@pytest.mark.parametrize(("ring_slots", "group_slots"), [(4, 2), (8, 4)])
def test_a_group_of_a_decode_step_is_a_copy_two_waits_and_two_records(
    model_dir: Path, ring_slots: int, group_slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What more groups add to a step, exactly: the host's work grows with them and not with blocks."""
    set_ring(monkeypatch, ring_slots)
    monkeypatch.setattr(build, "create_device", lambda name: CountedDevice(CpuDevice()))
    found = []
    ring_blocks = -(-ring_slots // LAYERS)
    sizes = {"num_gpu_blocks": ring_blocks + 1, "num_cpu_blocks": 60, "max_num_batched_tokens": 64}
    for groups in (1, 3):  # and the block that is being written, in a group of its own
        prompt = random_prompt((1 + groups * group_slots) * BLOCK + 3, VOCAB, 1)
        with LLM(model_dir, dtype="float32", **offloaded(BLOCK, **sizes, cpu_attention=False)) as llm:
            assert kv_cache(llm).engine.group_slots == group_slots and llm.kv_stats().resident_blocks == 1
            count_attention(llm, monkeypatch)
            set_prefill(llm, "chunk-major")
            llm.engine.add_request("r", None, greedy(4), prompt)
            for _ in range(-(-len(prompt) // 64)):
                llm.engine.step()
            counted_step(llm)
            found.append(counted_step(llm))
    more = found[1] - found[0]
    once = {name: more.pop(name) - 2 * 2 * LAYERS for name in ("waits", "records")}
    assert more == {"attends": 2 * LAYERS, "kernels": 2 * LAYERS, "h2d": 2 * LAYERS}
    assert all(abs(count) <= 2 for count in once.values()), "of the step: for what was stored before it"


def test_attention_over_a_group_is_two_launches_with_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("launches are counted in Triton's interpreter, which does not run where there is a GPU")
    from triton.runtime import interpreter

    from nanovllm.ops.triton_attention import TritonAttention

    launches = []
    launch = interpreter.GridExecutor.__call__

    def counted(executor: Any, *arguments: Any, **named: Any) -> None:
        launches.append(executor)
        launch(executor, *arguments, **named)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", counted)
    q = torch.randn(2, 4, 16)
    pool = torch.randn(4, 2, 2, BLOCK, 16)
    rows = (
        SequenceMetadata(0, 1, 4 * BLOCK, 0, 4 * BLOCK, range(4)),
        SequenceMetadata(1, 1, 2 * BLOCK, 0, 2 * BLOCK, (3, 1)),
    )
    TritonAttention().attend(q, pool, AttentionMetadata(rows), AttentionState.empty(q), 0.25, None)
    assert 1 <= len(launches) <= 2


def test_few_rows_without_offload_attend_in_one_call_a_layer(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attend = PagedStep.attend
    layers = []

    def counted(step: PagedStep, layer: int, *arguments: Tensor) -> Tensor:
        layers.append(layer)
        return attend(step, layer, *arguments)

    monkeypatch.setattr(PagedStep, "attend", counted)
    with LLM(model_dir, kvcache_block_size=BLOCK, num_gpu_blocks=20) as llm:
        for length in (MAX_STEP_ROWS, MAX_STEP_ROWS + 1):
            llm.generate(random_prompt(length, VOCAB, length), greedy(1), use_tqdm=False)
            assert layers == list(range(LAYERS)), length


def test_nothing_in_the_forward_pass_makes_the_host_wait(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    forward_ = DecoderLayer.forward_
    operators = Operators()
    layers = []

    def watched(layer: DecoderLayer, *arguments: Any) -> None:
        assert isinstance(layer.mixer, Attention)
        layers.append(layer.mixer.kv_layer)
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
    capturing = CapturingDevice()
    operators = Operators()
    device = CountedDevice(capturing)
    monkeypatch.setattr(build, "create_device", lambda name: device)
    record_kernels(monkeypatch, capturing)  # without them replays compute on arbitrary memory; NaN ends the requests
    if rows:
        monkeypatch.setattr(build, "select_backend", lambda *_: RowsOnCpu(capturing))
        monkeypatch.setattr(decode_tables, "store_kv", capturing.kernel(store_kv))
    part = "_fill_rows" if rows else "run"  # a whole step is filled in ahead of its time, while the one before runs
    run = getattr(DecodeGraphs, part)

    def watched(*arguments: Any) -> Any:
        operators.seen.clear()
        with operators:
            return run(*arguments)

    monkeypatch.setattr(DecodeGraphs, part, watched)
    with LLM(model_dir, dtype="float32", max_num_seqs=4, max_num_batched_tokens=2 * BLOCK, **arguments) as llm:
        for index in range(3):
            llm.engine.add_request(str(index), None, greedy(9), random_prompt(BLOCK + 2, VOCAB, index))
        while not capturing.replays:
            llm.engine.step()
        replays = capturing.replays
        counts = counted_step(llm)
        return counts, operators.seen, capturing.replays - replays


def test_a_whole_step_is_one_replay(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = {"kvcache_block_size": BLOCK, "num_gpu_blocks": 20}
    counts, operators, replays = graph_step(model_dir, monkeypatch, True, **engine)
    assert replays == 2 and counts == {"kernels": 1}
    assert operators["copy_"] == 3, "inputs, slots, the table of all layers"
    assert sum(operators.values()) <= 40, operators  # on the host: lists to tensors, padding, views


def test_pieces_are_a_replay_for_each_layer_and_one_more(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = offloaded(BLOCK, num_gpu_blocks=5, num_cpu_blocks=12, cpu_attention=False)
    counts, operators, replays = graph_step(model_dir, monkeypatch, False, **engine)
    assert replays == LAYERS + 2 and counts["host waits"] == 0
    # Each sequence has two blocks, of which the second is written: three groups of two at most.
    most = {"kernels": 1 + 3 + 3, "h2d": 6, "d2h": 3, "waits": 2 * 3 + 2 * 3, "records": 2 * 3 + 2 * 3}
    once = {"waits": 2, "records": 2}
    assert all(counts[name] <= LAYERS * count + once.get(name, 0) for name, count in most.items()), counts
    assert not any(name.startswith(WAITING_OPERATORS) for name in operators), operators
