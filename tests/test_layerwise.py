"""Layer-by-layer prefill in an engine: cached prefixes, aborts, failures, moved blocks, memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import checkpoint_fixture, make_checkpoint
from engines import (
    PREFILL_WAYS,
    greedy,
    greedy_reference,
    offloaded,
    random_prompt,
    set_prefill,
    token_ids,
    watch_layerwise,
)
from fast import fast_pairs
from ordering_check import OrderingError
from torch import Tensor

from nanovllm import LLM
from nanovllm.apps.recall import make_document, make_prompt, write_recall_checkpoint
from nanovllm.errors import EngineError
from nanovllm.kvcache.forward_pass import ComputedRows, PassHook
from nanovllm.kvcache.layerwise_cache import LayerwiseKVCache
from nanovllm.kvcache.layerwise_pass import LayerwisePass, LayerwiseState
from nanovllm.kvcache.offload_engine import OffloadEngine
from nanovllm.memory.profiling import _LiveBytes, activation_peak

BLOCK = 16
VOCAB = 97
LAYERS = 3


model_dir = checkpoint_fixture(vocab=VOCAB, layers=LAYERS, dtype="float32")


def open_llm(model_dir: Path, num_gpu_blocks: int = 4, num_cpu_blocks: int = 60, chunk: int = 40, **more: Any) -> LLM:
    return LLM(model_dir, **offloaded(BLOCK, num_gpu_blocks, num_cpu_blocks, max_num_batched_tokens=chunk, **more))


def expected_tokens(model_dir: Path, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    with LLM(model_dir, kvcache_block_size=BLOCK, num_gpu_blocks=100) as llm:
        return token_ids(llm, prompts, greedy(max_tokens))


def state_of(llm: LLM) -> LayerwiseState | None:
    order = llm._runner.passes[-1]
    assert isinstance(order, LayerwisePass)
    return order.state


# ---- what is computed


def test_a_cached_prefix_comes_in_once_per_layer(model_dir: Path) -> None:
    document = random_prompt(6 * BLOCK, VOCAB, 1)
    question = document + random_prompt(90, VOCAB, 2)
    (expected,) = expected_tokens(model_dir, [question], 1)
    with open_llm(model_dir, chunk=20) as llm:
        token_ids(llm, [*document, 1], greedy(1))
        layerwise = watch_layerwise(llm)
        before = llm.kv_stats().transfers
        (output,) = llm.generate(question, greedy(1), use_tqdm=False)
        moved = llm.kv_stats().transfers - before
        stats = llm.kv_stats()
    assert output.outputs[0].token_ids == expected and output.num_cached_tokens == 6 * BLOCK
    assert len(layerwise) == 5 and layerwise[0].context_len == 6 * BLOCK
    on_host = [physical_id >= stats.resident_blocks for physical_id in layerwise[0].block_tables[0]]
    assert sum(on_host[:6]) >= 4, "most of the document is on the host"
    assert moved.h2d_copies == LAYERS * sum(on_host[:6])
    assert moved.h2d_bytes == sum(on_host[:6]) * stats.bytes_per_block
    assert moved.d2h_copies == LAYERS * sum(on_host[6:])
    assert moved.h2d_bytes == output.metrics.h2d_bytes and moved.d2h_bytes == output.metrics.d2h_bytes


def test_a_layer_waits_once_for_each_load(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in each of its chunks: a prompt of a million tokens has 500 chunks and 4,000 blocks."""
    waits: list[int] = []
    acquire = OffloadEngine.acquire_buffer

    def counted(engine: OffloadEngine, index: int) -> None:
        waits.append(index)
        acquire(engine, index)

    monkeypatch.setattr(OffloadEngine, "acquire_buffer", counted)
    with open_llm(model_dir, chunk=20) as llm:
        watched = watch_layerwise(llm)
        token_ids(llm, random_prompt(200, VOCAB, 1), greedy(1))
        resident = llm.kv_stats().resident_blocks
    on_host = [index for index, physical_id in enumerate(watched[-1].block_tables[0]) if physical_id >= resident]
    assert len(on_host) > 8 and waits == LAYERS * on_host


SHAPES: list[tuple[str, dict[str, Any]]] = [
    ("qwen2", {}),
    ("mistral", {"sliding_window": 21}),
    ("qwen2", {"sliding_window": 40, "max_window_layers": 2}),  # full attention below, windows above
    ("ministral3", {}),  # queries are scaled by their positions
]


@pytest.mark.parametrize(("shape", "chunk"), fast_pairs([(0, 33), (1, 7), (2, 33)], range(4), (7, 33)))
def test_same_tokens_as_transformers(tmp_path: Path, shape: int, chunk: int) -> None:
    family, options = SHAPES[shape]
    reference = make_checkpoint(tmp_path, family, seed=3, vocab=VOCAB, layers=LAYERS, **options)
    prompts = [random_prompt(length, VOCAB, 5) for length in (230, 97, 12)]
    prompts.append(prompts[0][: 5 * BLOCK] + random_prompt(120, VOCAB, 6))
    expected = [greedy_reference(reference, prompt, 5) for prompt in prompts]
    with open_llm(tmp_path, chunk=chunk, dtype="float32") as llm:
        layerwise = watch_layerwise(llm)
        for _ in range(2):
            assert token_ids(llm, prompts, greedy(5)) == expected
        assert layerwise


# ---- what is kept


def test_the_hidden_states_are_kept_while_the_prefill_runs_and_no_longer(model_dir: Path) -> None:
    with open_llm(model_dir) as llm:
        llm.engine.add_request("long", None, greedy(2), random_prompt(200, VOCAB, 1))
        while not llm.engine.step()[0].outputs[0].token_ids:
            state = state_of(llm)
            assert state is not None and state.x.shape == (200, 64)
        assert state_of(llm) is None


class KeptRows(PassHook):
    def __init__(self) -> None:
        self.rows: list[Tensor] = []

    def computed(self, rows: ComputedRows) -> None:
        self.rows.append(rows.hidden.clone())


def test_the_last_chunk_gives_its_rows(model_dir: Path) -> None:
    """Heads for multi-token prediction read them, as they read those of a chunk through all layers."""
    prompt = random_prompt(190, VOCAB, 1)
    chunk = 40
    found = []
    for way in PREFILL_WAYS:
        with open_llm(model_dir, chunk=chunk) as llm:
            set_prefill(llm, way)
            hook = KeptRows()
            llm._runner.pass_hooks = [hook]  # type: ignore[misc]
            token_ids(llm, prompt, greedy(1))
            found.append(hook.rows[-1])
    assert found[0].shape[0] == 190 % chunk and torch.equal(*found)


def test_aborts_at_every_step_of_a_prefill_leave_others_alone(model_dir: Path) -> None:
    prompts = [random_prompt(length, VOCAB, 4) for length in (150, 140, 30)]
    expected = expected_tokens(model_dir, prompts, 6)
    with open_llm(model_dir, num_gpu_blocks=5, num_cpu_blocks=26) as llm:
        for steps in range(1, 6):
            for index, prompt in enumerate(prompts):
                llm.engine.add_request(str(index), None, greedy(6), prompt)
            for _ in range(steps):
                llm.engine.step()
            aborted = llm.engine.abort_request("0")
            assert aborted is not None and aborted.finished
            finished = {}
            while llm.engine.has_unfinished_requests():
                finished |= {o.request_id: o.outputs[0].token_ids for o in llm.engine.step() if o.finished}
            assert [finished["1"], finished.get("2", expected[2])] == expected[1:]
            assert state_of(llm) is None and llm.engine.scheduler.block_manager.pool.num_used == 0
            llm.engine.scheduler.block_manager.reset_prefix_cache()


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()])
def test_a_failure_within_a_prefill_ends_it_and_not_the_engine(
    model_dir: Path, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = random_prompt(180, VOCAB, 8)
    expected = expected_tokens(model_dir, [prompt], 5)
    with open_llm(model_dir) as llm:
        forward = llm._runner.model.forward_layers_
        calls = []

        def fail_once(*arguments: Any) -> None:
            calls.append(arguments)
            if len(calls) == 7:
                raise error
            forward(*arguments)

        monkeypatch.setattr(llm._runner.model, "forward_layers_", fail_once)
        with pytest.raises((EngineError, KeyboardInterrupt)):
            token_ids(llm, prompt, greedy(5))
        assert state_of(llm) is None and llm.engine.scheduler.block_manager.pool.num_used == 0
        assert token_ids(llm, prompt, greedy(5)) == expected


def test_a_prefix_block_may_move_to_the_device_during_the_prefill(model_dir: Path) -> None:
    """A request that shares the prefix decodes, another one ends and frees device blocks: host blocks move there."""
    document = random_prompt(5 * BLOCK, VOCAB, 1)
    prompts = [random_prompt(40, VOCAB, 9), document + random_prompt(150, VOCAB, 2), [*document, 1, 2, 3]]
    expected = expected_tokens(model_dir, prompts, 12)
    with open_llm(model_dir, num_gpu_blocks=5, chunk=24, enable_prefix_caching=True) as llm:
        token_ids(llm, [*document, 1], greedy(1))
        llm.engine.scheduler.block_manager.stats.hit_tokens = 0
        layerwise = watch_layerwise(llm)
        moved_in = 0
        execute = llm.engine.executor.execute

        def watch(batch: Any) -> Any:
            nonlocal moved_in
            resident = llm.kv_stats().resident_blocks
            if batch.layerwise is not None and batch.layerwise.layerwise.first_layer_chunk > 0:
                moved_in += sum(
                    move.src >= resident and move.dst in batch.layerwise.block_tables[0] for move in batch.moves
                )
            return execute(batch)

        llm.engine.executor.execute = watch  # type: ignore[method-assign]
        finished = {}
        for index, prompt in enumerate(prompts):
            llm.engine.add_request(str(index), None, greedy(12), prompt)
            for _ in range(1 + index):
                finished |= {o.request_id: o.outputs[0].token_ids for o in llm.engine.step() if o.finished}
        llm.engine.abort_request("0")
        while llm.engine.has_unfinished_requests():
            finished |= {o.request_id: o.outputs[0].token_ids for o in llm.engine.step() if o.finished}
    assert moved_in > 0 and layerwise
    assert [finished["1"], finished["2"]] == expected[1:]


# ---- memory


@pytest.mark.slow
def test_a_long_prompt_takes_no_more_memory_than_planned(tmp_path: Path) -> None:
    """Every tensor made while the prompt runs is counted; the layer buffer and the KV pools were made before."""
    length = 32768
    write_recall_checkpoint(tmp_path, length + 2, length + 4, seed=1, dtype="bfloat16")
    prompt = make_prompt(make_document(length + 2, length, seed=2), length // 3)
    blocks = -(-(length + 4) // 1024)
    memory = offloaded(1024, blocks // 8, blocks, max_num_batched_tokens=4096, max_model_len=length + 4)
    with LLM(tmp_path, **memory) as llm:
        layerwise = watch_layerwise(llm)
        plan = llm._runner.plan
        stats = llm.kv_stats()
        with _LiveBytes() as counter:
            llm.generate(prompt, greedy(1), use_tqdm=False)
        activations = activation_peak(llm._runner.model, llm.config)
        hidden_size = llm._runner.network.hidden_size
    assert len(layerwise[0].token_ids) == length + 1, "all of it is one prefill"
    hidden_states = (length + 1) * hidden_size * 2
    assert hidden_states < counter.peak <= plan.working_bytes - stats.layer_buffer_bytes
    assert plan.working_bytes == activations + (length + 4) * (hidden_size * 2 + 8) + stats.layer_buffer_bytes


# ---- order


def run_layerwise(model_dir: Path) -> None:
    """A cached document on the host, followed by layer-by-layer prefills that end or are aborted within a layer."""
    document = random_prompt(6 * BLOCK, VOCAB, 1)
    with open_llm(model_dir, chunk=24) as llm:
        llm.engine.add_request("talker", None, greedy(150), random_prompt(5, VOCAB, 3))
        llm.engine.add_request("document", None, greedy(1), [*document, 1])
        for _ in range(8):
            llm.engine.step()
        for index in range(5):
            llm.engine.add_request(str(index), None, greedy(2), document + random_prompt(100, VOCAB, index))
            for _ in range(1 + index):
                llm.engine.step()
            if index % 2 == 0:
                llm.engine.abort_request(str(index))
        while llm.engine.has_unfinished_requests():
            llm.engine.step()


def fill_before_release(cache: LayerwiseKVCache, layer: int) -> None:
    if (layer + 1) * cache._part.layerwise.num_chunks < cache._part.end_layer_chunk:
        cache._fill(layer + 1)
    cache._release(layer)


MUTANTS: dict[str, tuple[type, str, Callable[..., Any]]] = {
    "blocks are used before they are loaded": (OffloadEngine, "acquire_buffer", lambda *_: None),
    "blocks are never released": (OffloadEngine, "release_buffer", lambda *_: None),
    "the next layer is loaded before this one is released": (LayerwiseKVCache, "_end_layer", fill_before_release),
    "a part that ends within a layer releases nothing": (LayerwiseKVCache, "end_part", lambda *_: None),
}


def test_layerwise_prefill_is_ordered(model_dir: Path) -> None:
    run_layerwise(model_dir)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_missing_wait_or_release_is_found(model_dir: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*MUTANTS[name])
    with pytest.raises(EngineError) as failed:
        run_layerwise(model_dir)
    assert isinstance(failed.value.__cause__, OrderingError)
