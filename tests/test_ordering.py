"""The ordering check, and the proof that it sees: every wait and record of the engine, taken out one by one."""

from __future__ import annotations

import ast
import ctypes
import inspect
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import MIXES, checkpoint_fixture, make_checkpoint
from cpu_attention_helpers import DeviceOfItsOwn, add_cpu_attention_streams, force_share
from engines import (
    for_groups,
    greedy,
    offloaded,
    random_prompt,
    recorded_batches,
    run_random_requests,
    set_prefill,
    set_ring,
    several,
)
from fast import fast_only, fast_pairs
from host_tasks import PythonTask
from ordering_check import OrderingCheck, OrderingError
from resident_memory import rss_bytes
from streamed_engines import stream_of

from nanovllm import LLM
from nanovllm.device import Event, Mark, PitchedCopy
from nanovllm.device.cpu import CpuDevice
from nanovllm.errors import EngineError
from nanovllm.features.streamed_weights import stream
from nanovllm.kvcache import pools, transfer_order

BLOCK = 16
VOCAB = 97
SHAPE = (4, 2, 1, BLOCK, 16)  # four pieces


# ---- the check


@pytest.fixture
def device() -> Iterator[OrderingCheck]:
    device = OrderingCheck(CpuDevice())
    yield device
    device.close()


def copy(device: OrderingCheck, dst: torch.Tensor, src: torch.Tensor, stream: object) -> None:
    device.copy_2d(PitchedCopy(dst, src, src.nbytes, src.nbytes, src.nbytes, 1, "h2d"), stream)  # type: ignore[arg-type]


def test_a_load_must_be_waited_for_before_it_is_read(device: OrderingCheck) -> None:
    ring = device.empty("ring", SHAPE, torch.float32)
    host = device.empty_host("host", SHAPE, torch.float32)
    stream = device.new_stream("loads")
    event = device.new_event()
    copy(device, ring[1], host[2], stream)
    with pytest.raises(
        OrderingError, match=r"kernel 'attend' on stream compute reads ring\[1\].*h2d copy on stream loads"
    ):
        device.declare_kernel("attend", reads=(ring[1],))
    device.declare_kernel("attend", reads=(ring[0],))  # another piece
    stream.record(event)
    device.compute_stream.wait(event)
    device.declare_kernel("attend", reads=(ring[1],))


def test_memory_must_not_be_overwritten_while_it_is_read(device: OrderingCheck) -> None:
    ring = device.empty("ring", SHAPE, torch.float32)
    host = device.empty_host("host", SHAPE, torch.float32)
    stream = device.new_stream("loads")
    event = device.new_event()
    device.declare_kernel("attend", reads=(ring[3],))
    with pytest.raises(OrderingError, match=r"h2d copy on stream loads writes ring\[3\].*kernel 'attend'"):
        copy(device, ring[3], host[0], stream)
    device.compute_stream.record(event)
    stream.wait(event)
    copy(device, ring[3], host[0], stream)


def test_a_wait_takes_the_record_at_the_time_of_the_call(device: OrderingCheck) -> None:
    ring = device.empty("ring", SHAPE, torch.float32)
    host = device.empty_host("host", SHAPE, torch.float32)
    stream = device.new_stream("loads")
    event = device.new_event()
    stream.record(event)
    device.compute_stream.wait(event)
    copy(device, ring[0], host[0], stream)
    stream.record(event)  # after the wait: it orders nothing for compute
    with pytest.raises(OrderingError):
        device.declare_kernel("attend", reads=(ring[0],))


def test_order_passes_through_other_streams_and_the_host(device: OrderingCheck) -> None:
    ring = device.empty("ring", SHAPE, torch.float32)
    host = device.empty_host("host", SHAPE, torch.float32)
    first = device.new_stream("first")
    second = device.new_stream("second")
    event = device.new_event()
    copy(device, ring[0], host[0], first)
    first.record(event)
    second.wait(event)
    second.record(event)
    device.compute_stream.wait(event)
    device.declare_kernel("attend", reads=(ring[0],))
    copy(device, ring[1], host[1], first)
    first.synchronize()
    device.declare_kernel("attend", reads=(ring[1],))


def test_disjoint_tokens_of_one_block_do_not_conflict(device: OrderingCheck) -> None:
    ring = device.empty("ring", SHAPE, torch.float32)
    stream = device.new_stream("loads")
    host = device.empty_host("host", SHAPE, torch.float32)
    device.declare_kernel("write", writes=(ring[0][:, :, 4:6],))
    row = 16 * 4
    device.copy_2d(PitchedCopy(ring[0], host[0], BLOCK * row, BLOCK * row, 4 * row, 2, "h2d"), stream)  # tokens 0 to 3
    with pytest.raises(OrderingError):
        device.copy_2d(PitchedCopy(ring[0], host[0], BLOCK * row, BLOCK * row, 5 * row, 2, "h2d"), stream)  # and 4


def test_a_call_is_ordered_like_a_kernel() -> None:
    device = OrderingCheck(DeviceOfItsOwn())
    pool = device.empty_host("pool", SHAPE, torch.float32)
    done = device.new_event()
    calls = device.new_call_stream("calls")
    ran = []
    device.declare_kernel("fill", writes=(pool[0],), stream=calls)
    calls.launch(PythonTask(lambda: ran.append(1)))
    with pytest.raises(OrderingError, match=r"kernel 'read' on stream compute reads pool\[0\].*'fill' on stream calls"):
        device.declare_kernel("read", reads=(pool[0],))
    calls.record(done)
    device.compute_stream.wait(done)
    device.declare_kernel("read", reads=(pool[0],))
    assert ran == [1]
    device.close()


def free_memory_in_the_heap(num_bytes: int) -> int:
    """Memory that the C library keeps for itself without pages of the system. Returns what to free after it."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    size = 120_000  # less than what is mapped by itself
    pieces = [libc.malloc(size) for _ in range(num_bytes // size)]
    last: int = libc.malloc(size)
    for piece in pieces:
        libc.free(piece)
    libc.malloc_trim(0)
    return last


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library is not glibc")
def test_the_check_takes_no_memory_for_what_is_not_used(device: OrderingCheck) -> None:
    """Or a pool of which a prompt fills a tenth would take more than was planned."""
    last = free_memory_in_the_heap(200 << 20)  # calloc fills it with zeros
    before = rss_bytes()
    ring = device.empty("ring", SHAPE, torch.float32)
    pool = device.empty_host("host", (64, 2, 1, 1024, 512), torch.float32)  # 256 MiB, of which nothing is touched
    copy(device, ring[0], pool[0, 0, 0, :BLOCK].view(-1)[: ring[0].numel()], device.new_stream("loads"))
    taken = rss_bytes() - before
    ctypes.CDLL(None).free(ctypes.c_void_p(last))
    assert taken < 32 << 20


def test_an_event_that_was_never_recorded_is_reported(device: OrderingCheck) -> None:
    with pytest.raises(OrderingError, match="stream compute waits for an event that was never recorded"):
        device.compute_stream.wait(device.new_event())


# ---- the engine, and the engine with one wait or record less


model_dir = checkpoint_fixture(vocab=VOCAB, hidden=32, intermediate=32)
streamed_dir = checkpoint_fixture(vocab=VOCAB, hidden=32, intermediate=32, layers=3)
# Steps of one row or two choose experts.
MIXTURE: dict[str, Any] = {"family": "qwen3_moe", "vocab": VOCAB, "hidden": 32, "intermediate": 32, "layers": 4}
MIXTURE |= {"head_dim": 16, "experts": 16}
mixture_dir = checkpoint_fixture(**MIXTURE)
STREAMED = {"weights_memory_bytes": "1%", "host_products": False}  # the weights of all layers stream


def stress(model_dir: Path, share: float | None = None, num_requests: int = 60, **given: Any) -> tuple[int, int, int]:
    """Prefill, decode, groups, prefix hits, preemption, aborts, block moves, copies and swaps, in three engines.

    share: of the host blocks for CPU attention; None without it. given: further engine arguments. Returns how often
    requests were preempted, how many blocks were moved, and how many accesses were checked.
    """
    preemptions = moves = checked = 0
    for num_gpu_blocks, num_cpu_blocks, way in ((4, 14, "layer-major"), (9, 9, "layer-major"), (4, 14, "chunk-major")):
        has_cpu_attention = share is not None
        arguments = offloaded(
            BLOCK, num_gpu_blocks, num_cpu_blocks, max_num_batched_tokens=45, cpu_attention=has_cpu_attention, **given
        )
        with LLM(model_dir, dtype="float32", max_model_len=120, **for_groups(model_dir, arguments)) as llm:
            set_prefill(llm, way)
            if share is not None:
                force_share(llm, share)
            recorded_moves: list[object] = []
            pools = llm._runner.kv_cache.pools
            pools.move_blocks = lambda m, *s, r=recorded_moves, f=pools.move_blocks: (r.extend(m), f(m, *s))  # type: ignore[method-assign]
            run_random_requests(llm, VOCAB, num_requests)
            preemptions += llm.engine.scheduler.preemption.stats.total
            moves += len(recorded_moves)
            assert isinstance(llm._runner.device, OrderingCheck)
            checked += llm._runner.device.num_checked
    return preemptions, moves, checked


def order_calls(*, of_store: bool = False) -> list[tuple[int, int, str]]:
    """Every call that waits or records in `transfer_order`, as (line, column, source).

    of_store: those that order the block store's copies instead, which tests/test_kv_disk.py takes out.
    """
    source = inspect.getsource(transfer_order)
    calls = [
        node.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Attribute)
    ]
    found = [(call.lineno, call.col_offset, ast.unparse(call), call.func.attr) for call in calls]  # type: ignore[attr-defined]
    if of_store:
        words = ("_outside_stream", "settled", "_gather(computed=True")
        return [call[:3] for call in found if any(word in call[2] for word in words)]
    return [call[:3] for call in found if call[3] in ("wait", "record") and "settled" not in call[2]]


def in_every_step(calls: list[tuple[int, int, str]]) -> list[tuple[int, int, str]]:
    """Without those for experts that are copied behind, and for units of weights that are read from disk."""
    return [call for call in calls if "(arrived)" not in call[2] and "(copied)" not in call[2]]


def without_call(line: int, column: int) -> types.ModuleType:
    """`transfer_order` with one call replaced by nothing."""

    class Remove(ast.NodeTransformer):
        def visit_Expr(self, node: ast.Expr) -> ast.AST:
            is_it = (node.value.lineno, node.value.col_offset) == (line, column)
            return ast.copy_location(ast.Pass(), node) if is_it else node

    module = types.ModuleType("mutant")
    tree = ast.fix_missing_locations(Remove().visit(ast.parse(inspect.getsource(transfer_order))))
    exec(compile(tree, "mutant", "exec"), module.__dict__)
    return module


CPU_ATTENTION_SHARES = {
    "no CPU attention": None,
    "in order": 0.5,
    "concurrent": 0.5,
    "all concurrent": 1.0,
}


FAST = [("no CPU attention", 8, 25)]
RINGS = fast_pairs(FAST, CPU_ATTENTION_SHARES, (3, 4, 8), (25, 40))  # slots: in groups of up to 1, 2 and 4


@pytest.mark.parametrize(("name", "ring_slots", "num_requests"), RINGS)
def test_the_engine_orders_everything(
    model_dir: Path, name: str, ring_slots: int, num_requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_ring(monkeypatch, ring_slots)
    if "concurrent" in name:
        add_cpu_attention_streams(monkeypatch)
    preemptions, moves, checked = stress(model_dir, CPU_ATTENTION_SHARES[name], num_requests)
    assert min(preemptions, moves) > 0 and checked > 1000


def of_mix(path: Path, mix: str) -> Path:
    make_checkpoint(path, vocab=VOCAB, hidden=32, intermediate=32, **MIXES[mix])
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mix", "name"),
    [
        *((mix, "concurrent") for mix in MIXES),
        ("full attention and windows", "in order"),
        ("full attention and states", "no CPU attention"),
    ],
)
def test_every_mix_of_layers_is_ordered(tmp_path: Path, mix: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "concurrent":
        add_cpu_attention_streams(monkeypatch)
    of_mix(tmp_path, mix)
    few = {"max_num_seqs": 6} if "states" in mix else {}  # and as few state slots
    preemptions, moves, checked = stress(tmp_path, CPU_ATTENTION_SHARES[name], 30, **few)
    assert min(preemptions, moves) > 0 and checked > 1000


@pytest.mark.slow
@pytest.mark.parametrize("name", ["no CPU attention", "concurrent"])
def test_weights_that_stream_are_ordered_beside_the_kv(
    streamed_dir: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "concurrent":
        add_cpu_attention_streams(monkeypatch)
    preemptions, moves, checked = stress(streamed_dir, CPU_ATTENTION_SHARES[name], 20, **STREAMED)
    assert min(preemptions, moves) > 0 and checked > 1000


@pytest.mark.parametrize("forgetful", ["before_compute", "after_compute"])
def test_weight_slots_of_which_one_is_not_ordered_are_noticed(
    streamed_dir: Path, forgetful: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = getattr(transfer_order.WeightOrder, forgetful)

    def all_but_one(order: transfer_order.WeightOrder, slot: int) -> None:
        if slot != 0:  # the one of the first layer and the last
            every(order, slot)

    monkeypatch.setattr(transfer_order.WeightOrder, forgetful, all_but_one)
    with pytest.raises(EngineError) as failed:
        stress(streamed_dir, num_requests=1, **STREAMED)
    assert isinstance(failed.value.__cause__, OrderingError)
    assert "a slot for streamed layers" in str(failed.value.__cause__)


def forget_cache(monkeypatch: pytest.MonkeyPatch, forgetful: str) -> None:
    """Leave out a call of `WeightOrder` for the expert cache."""
    every = getattr(transfer_order.WeightOrder, forgetful)

    def all_but_the_cache(order: transfer_order.WeightOrder, slot: int) -> object:
        return every(order, slot) if slot != order.cache else order._loads

    monkeypatch.setattr(transfer_order.WeightOrder, forgetful, all_but_the_cache)


@pytest.mark.parametrize("forgetful", ["", "before_fill", "before_compute", "after_compute"])
def test_an_expert_cache_that_is_not_ordered_is_noticed(
    mixture_dir: Path, forgetful: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if forgetful:
        forget_cache(monkeypatch, forgetful)
    given = {"kvcache_block_size": BLOCK, "num_gpu_blocks": 20, "max_model_len": 120, **STREAMED}
    with LLM(mixture_dir, dtype="float32", **given) as llm:
        prompt = random_prompt(2, VOCAB, seed=1)
        if not forgetful:
            llm.generate([prompt], greedy(5), use_tqdm=False)
            return
        with pytest.raises(EngineError) as failed:
            llm.generate([prompt], greedy(5), use_tqdm=False)
    assert isinstance(failed.value.__cause__, OrderingError)
    assert "the expert cache" in str(failed.value.__cause__)


@pytest.mark.parametrize(
    ("taken_out", "says"), [("", ""), ("record(arrived)", "never recorded"), ("wait(arrived)", "the expert cache")]
)
def test_experts_that_are_copied_behind_are_used_in_order(
    mixture_dir: Path, taken_out: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each copy has ended before the next layer asks, so that what it brought is used."""
    add_cpu_attention_streams(monkeypatch)
    order = transfer_order
    if taken_out:
        (call,) = [call for call in order_calls() if taken_out in call[2]]
        order = without_call(*call[:2])
    monkeypatch.setattr(stream, "WeightOrder", order.WeightOrder)
    after_fill_behind = order.WeightOrder.after_fill_behind

    def ended(order: transfer_order.WeightOrder) -> tuple[Event, Mark]:
        event, mark = after_fill_behind(order)
        while mark.seconds() is None:
            time.sleep(0.001)
        return event, mark

    monkeypatch.setattr(order.WeightOrder, "after_fill_behind", ended)
    given = {"kvcache_block_size": BLOCK, "num_gpu_blocks": 20, "max_model_len": 120, "weights_memory_bytes": "50%"}
    with LLM(mixture_dir, dtype="float32", **given) as llm:
        prompt = random_prompt(2, VOCAB, seed=1)
        if not taken_out:
            llm.generate([prompt], greedy(30), use_tqdm=False)
            weights = stream_of(llm)
            assert 0 < weights.host_bytes < 31 * 4 * 2 * weights.streamed_bytes // (4 * 16)
            return
        with pytest.raises(EngineError) as failed:
            llm.generate([prompt], greedy(30), use_tqdm=False)
    assert isinstance(failed.value.__cause__, OrderingError)
    assert says in str(failed.value.__cause__)


@pytest.mark.parametrize("forgetful", ["before_compute", "after_compute"])
def test_a_ring_of_which_one_group_is_not_ordered_is_noticed(
    model_dir: Path, forgetful: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_ring(monkeypatch, 8)
    every = getattr(transfer_order.TransferOrder, forgetful)

    def all_but_one(order: transfer_order.TransferOrder, group: int) -> None:
        if group != 1:  # the second of two in the ring; the layer buffer's come after them
            every(order, group)

    monkeypatch.setattr(transfer_order.TransferOrder, forgetful, all_but_one)
    with pytest.raises(EngineError) as failed:
        stress(model_dir)
    assert isinstance(failed.value.__cause__, OrderingError)


def test_there_are_as_many_mutants_as_the_design_has_orderings() -> None:
    sources = [source for _, _, source in order_calls()]
    of_slots = ("ring_slot_ready", "ring_slot_compute_done", "ring_slot_stored")
    of_the_ring = ("kv_written", "stored", "host_ready", *of_slots)
    of_moves = ("moves_begin", "moves_end")
    of_cpu_attention = ("queries_written", "partial_written")
    of_weights = ("weights_ready", "weights_used")
    for event in of_the_ring + of_moves + of_cpu_attention + of_weights:
        assert any(f"self._{event}" in source and "record" in source for source in sources), event
        assert any(f"self._{event}" in source and "wait" in source for source in sources), event


def is_cpu_attention(source: str) -> bool:
    return any(word in source for word in ("_cpu_attention", "_queries", "_partial"))


def is_of_weights(source: str) -> bool:
    return "_weights_" in source


@pytest.mark.parametrize(("line", "column", "source"), in_every_step(order_calls()), ids=lambda value: str(value))
def test_every_wait_and_record_taken_out_is_noticed(
    model_dir: Path, line: int, column: int, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_cpu_attention(source):
        add_cpu_attention_streams(monkeypatch)
    mutant = without_call(line, column)
    monkeypatch.setattr(pools, "TransferOrder", mutant.TransferOrder)
    monkeypatch.setattr(stream, "WeightOrder", mutant.WeightOrder)
    given = STREAMED if is_of_weights(source) else {}
    with pytest.raises(EngineError) as failed:
        stress(model_dir, 1.0 if is_cpu_attention(source) else None, **given)
    assert isinstance(failed.value.__cause__, OrderingError), source


def is_wait_for_stores(source: str) -> bool:
    return source.startswith("self._cpu_attention.wait(self._host_ready")


@pytest.mark.slow
@pytest.mark.parametrize("call", in_every_step(order_calls()), ids=lambda call: f"{call[0]}-{call[2]}")
@pytest.mark.parametrize("mix", MIXES)
def test_every_wait_and_record_taken_out_is_noticed_in_every_mix(
    tmp_path: Path, mix: str, call: tuple[int, int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if mix == "heads of two sizes" and is_wait_for_stores(call[2]):
        pytest.skip("loads of six groups order this one too in `stress`; the next test has a step without loads")
    test_every_wait_and_record_taken_out_is_noticed(of_mix(tmp_path, mix), *call, monkeypatch)


@pytest.mark.parametrize("has_wait", [True, False])
def test_cpu_attention_waits_for_stores_in_a_step_without_loads(
    tmp_path: Path, has_wait: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second prompt has blocks on the host; its next token takes the device blocks that the first leaves."""
    add_cpu_attention_streams(monkeypatch)
    if not has_wait:
        (wait,) = [call for call in order_calls() if is_wait_for_stores(call[2])]
        monkeypatch.setattr(pools, "TransferOrder", without_call(*wait[:2]).TransferOrder)
    arguments = offloaded(BLOCK, num_gpu_blocks=14, max_num_batched_tokens=64, enable_prefix_caching=False)
    of_mix(tmp_path, "heads of two sizes")
    with LLM(tmp_path, dtype="float32", max_model_len=120, cpu_attention=True, **arguments) as llm:
        force_share(llm, 1.0)
        prompts = [random_prompt(length, VOCAB, seed=length) for length in (BLOCK, 2 * BLOCK)]
        if has_wait:
            llm.generate(prompts, [greedy(1), greedy(3)], use_tqdm=False)
            return
        with pytest.raises(EngineError) as failed:
            llm.generate(prompts, [greedy(1), greedy(3)], use_tqdm=False)
        assert isinstance(failed.value.__cause__, OrderingError)


# ---- the KV cache without offload, which only moves blocks


def stress_resident(model_dir: Path) -> int:
    """Groups that copy on write and are swapped out and in. Returns how many accesses were checked."""
    arguments = {"kvcache_block_size": BLOCK, "num_gpu_blocks": 12, "max_model_len": 80, "swap_space": "64M"}
    with LLM(model_dir, dtype="float32", **arguments) as llm:
        prompts = [random_prompt(length, VOCAB, seed=1) for length in (20, 33, 25)]
        llm.generate(prompts, [several(2, 30, index) for index in range(3)], use_tqdm=False)
        assert llm.engine.scheduler.preemption.stats.swapped > 0
        assert llm.engine.scheduler.block_manager.num_copied_blocks > 0
        assert isinstance(llm._runner.device, OrderingCheck)
        return llm._runner.device.num_checked


def test_the_paged_cache_orders_everything(model_dir: Path) -> None:
    assert stress_resident(model_dir) > 200


MOVE_CALLS = [call for call in order_calls() if "_moves_" in call[2]]


@pytest.mark.parametrize(("line", "column", "source"), MOVE_CALLS, ids=lambda value: str(value))
def test_the_paged_cache_notices_every_missing_order_of_moves(
    model_dir: Path, line: int, column: int, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(MOVE_CALLS) == 4
    monkeypatch.setattr(pools, "TransferOrder", without_call(line, column).TransferOrder)
    with pytest.raises(EngineError) as failed:
        stress_resident(model_dir)
    assert isinstance(failed.value.__cause__, OrderingError), source


# ---- states of recurrent layers, without any block move


def stress_states(path: Path) -> None:
    """States are copied to a second sequence, and snapshots leave for the host and come back."""
    arguments = {"kvcache_block_size": BLOCK, "num_gpu_blocks": 40, "max_num_seqs": 2}
    with LLM(of_mix(path, "full attention and states"), dtype="float32", **arguments) as llm:
        batches = recorded_batches(llm)
        for seed in (*range(5), 0):
            prompt = random_prompt(2 * BLOCK, VOCAB, seed)
            llm.generate(prompt, several(2, 4, seed), use_tqdm=False)
        assert not any(batch.moves for batch, _, _ in batches)
        assert llm.kv_stats().transfers.d2h_bytes > 0 and llm.kv_stats().transfers.h2d_bytes > 0


def test_states_are_ordered(tmp_path: Path) -> None:
    stress_states(tmp_path)


@pytest.mark.parametrize(("line", "column", "source"), fast_only(MOVE_CALLS[-1:], MOVE_CALLS))
def test_every_missing_order_of_states_is_noticed(
    tmp_path: Path, line: int, column: int, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "TransferOrder", without_call(line, column).TransferOrder)
    with pytest.raises(EngineError) as failed:
        stress_states(tmp_path)
    assert isinstance(failed.value.__cause__, OrderingError), source
