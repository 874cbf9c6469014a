"""Graphs of decode steps: the logits of eager steps to the bit, whatever the batch; nothing written but what is due."""

from __future__ import annotations

import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import ROPES, checkpoint_fixture, make_checkpoint
from engines import greedy, logits_by_request, random_prompt, token_ids
from graph_devices import MODES, PROMPTS, VOCAB, CapturingDevice, arguments, measured_memory, use_graphs
from ordering_check import OrderingCheck
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nanovllm import LLM
from nanovllm.features.cuda_graphs.decode_graphs import (
    DecodeGraphs,
    StepMemory,
    run_piece,
)
from nanovllm.kvcache.chunked_attention import OffloadedKVCache
from nanovllm.kvcache.paged_cache import PagedKVCache
from nanovllm.memory import profiling
from nanovllm.models.decoder import Decoder
from nanovllm.models.hf_config import load_decoder_spec

LAYERS = 2
Logits = dict[tuple[int, int], Tensor]


model_dir = checkpoint_fixture(vocab=VOCAB, hidden=32, intermediate=48, layers=LAYERS)


def graphed(monkeypatch: pytest.MonkeyPatch, mode: str, **options: Any) -> CapturingDevice:
    device = CapturingDevice(**options)
    use_graphs(monkeypatch, device, rows=mode == "full steps")
    return device


def watch_batches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many sequences each step had that graphs were replayed for, from now on."""
    batches: list[int] = []
    run = DecodeGraphs.run

    def watched(graphs: DecodeGraphs, inputs: Tensor, sequences: Any, kv_cache: Any) -> Tensor:
        batches.append(len(sequences))
        return run(graphs, inputs, sequences, kv_cache)

    monkeypatch.setattr(DecodeGraphs, "run", watched)
    return batches


def same_logits(found: Logits, expected: Logits) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in expected)


# ---- the same logits


@pytest.fixture(scope="module")
def eager_logits(model_dir: Path) -> Logits:
    """Of prompts that end one after the other, while others wait for their turn."""
    with LLM(model_dir, **arguments("eager")) as llm:
        assert llm._runner.passes[0].decode_runner is None, "the CPU records nothing"
        return logits_in_turn(llm)


def logits_in_turn(llm: LLM) -> Logits:
    found: Logits = {}
    for index, prompt in enumerate(PROMPTS):
        llm.engine.add_request(str(index), None, greedy(4 + 3 * index), prompt)
    # `logits_by_request` adds one more prompt, and runs all of them.
    found.update(logits_by_request(llm, [random_prompt(20, VOCAB, 2)], 40))
    return found


@pytest.mark.parametrize("mode", MODES)
def test_logits_are_those_of_eager_steps(
    mode: str, model_dir: Path, eager_logits: Logits, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, batches = graphed(monkeypatch, mode), watch_batches(monkeypatch)
    with LLM(model_dir, **arguments(mode)) as llm:
        assert same_logits(logits_in_turn(llm), eager_logits)
    assert set(batches) == set(range(1, 10)), "every batch size, also those between buckets"
    assert device.replays == len(batches) * (1 if mode == "full steps" else LAYERS + 1)


@pytest.mark.parametrize("mode", MODES[:3])
def test_preempted_requests_with_common_prefixes(mode: str, model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = random_prompt(40, VOCAB, 3)
    prompts = [shared + random_prompt(n, VOCAB, 4) for n in (1, 9, 2, 30, 7)]
    with LLM(model_dir, **arguments("eager")) as llm:
        expected = logits_by_request(llm, prompts, 50)
    graphed(monkeypatch, mode)
    small = {"num_gpu_blocks": 16} if "offloaded" not in mode else {"num_gpu_blocks": 5, "num_cpu_blocks": 12}
    with LLM(model_dir, **arguments(mode, **{"max_model_len": 150, **small})) as llm:
        found = logits_by_request(llm, prompts, 50)
        metrics = llm.metrics()
        assert metrics.preemptions_by_recompute > 0 and metrics.prefix_cache_hit_tokens > 0
    assert same_logits(found, expected)


@pytest.mark.parametrize(
    "options",
    [
        {"family": "mistral", "sliding_window": 20},
        {"family": "ministral3"},
        pytest.param({"family": "qwen2", "sliding_window": 17, "max_window_layers": 1}, marks=pytest.mark.slow),
        {"family": "llama", "rope": ROPES["dynamic"], "max_positions": 64},
        pytest.param({"family": "gemma3", "sliding_window": 17}, marks=pytest.mark.slow),
    ],
    ids=["windows in all layers", "scaled queries", "windows in some layers", "dynamic RoPE", "two RoPEs"],
)
@pytest.mark.parametrize("mode", MODES[:3:2])
def test_windows_and_rope_lengths(
    mode: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path, vocab=VOCAB, hidden=32, intermediate=48, **options)
    prompts = [random_prompt(n, VOCAB, 5) for n in (60, 4, 33)]
    limits = {"max_model_len": 120}
    with LLM(tmp_path, **arguments("eager", **limits)) as llm:
        expected = logits_by_request(llm, prompts, 20)
    graphed(monkeypatch, mode)
    with LLM(tmp_path, **arguments(mode, **limits)) as llm:
        assert same_logits(logits_by_request(llm, prompts, 20), expected)


# ---- memory


def pools(llm: LLM) -> list[Tensor]:
    """Everything that holds KV blocks for good."""
    kv_cache = llm._runner.kv_cache
    if isinstance(kv_cache, OffloadedKVCache):
        return [kv_cache.engine.resident, kv_cache.engine.host.transpose(0, 1)]
    assert isinstance(kv_cache, PagedKVCache)
    return [kv_cache._pools[0]]


@pytest.mark.parametrize("mode", MODES[:3])
def test_padded_rows_leave_every_block_as_it_is(mode: str, model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five sequences in a bucket of eight: five tokens are written in all of the KV memory."""
    graphed(monkeypatch, mode)
    batches = watch_batches(monkeypatch)
    with LLM(model_dir, **arguments(mode)) as llm:
        for index in range(5):
            llm.engine.add_request(str(index), None, greedy(30), random_prompt(3 + 7 * index, VOCAB, 6))
        while not batches:
            llm.engine.step()
        for pool in pools(llm):
            pool[pool.isnan()] = 0.0
        before = [pool.clone() for pool in pools(llm)]
        for _ in range(3):
            llm.engine.step()
        llm._runner.device.compute_stream.synchronize()
        changed = 0
        for pool, old in zip(pools(llm), before, strict=True):
            changed += int((pool != old).any(dim=-1).sum())  # rows: of one head's K or V of a token
    assert batches[-3:] == [5, 5, 5] and changed == 3 * 5 * LAYERS * 2 * 2


def test_pieces_touch_nothing_of_the_host(tmp_path: Path) -> None:
    """A graph could not record a copy from the host; on a device of its own every tensor has to be there."""
    for kind, rope in ROPES.items():
        make_checkpoint(tmp_path, "qwen3", vocab=VOCAB, rope=rope)
        meta = torch.device("meta")
        model = Decoder(load_decoder_spec(tmp_path), torch.float32, meta)
        step, inputs = StepMemory.of(model, 4), torch.zeros(3, 4, dtype=torch.int64, device=meta)

        class Watch(TorchDispatchMode):
            def __init__(self) -> None:
                super().__init__()
                self.seen: set[str] = set()

            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                result = func(*args, **(kwargs or {}))
                self.seen.update(t.device.type for t in tree_leaves((args, kwargs, result)) if isinstance(t, Tensor))
                return result

        with Watch() as watch:
            for index in range(model.spec.num_layers + 1):
                run_piece(model, index, step, inputs)
        assert watch.seen == {"meta"}, kind


@pytest.mark.parametrize("mode", MODES[:3])
def test_graphs_are_part_of_what_is_sized(mode: str, model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The estimate is what they take in the end, and nothing of the trial is left."""
    each = 64 << 20
    device = graphed(monkeypatch, mode, graph_bytes=each)
    facts = measured_memory(monkeypatch)
    sizes = {"num_gpu_blocks": -1, "gpu_memory_utilization": 0.7}
    with LLM(model_dir, **arguments(mode, max_num_seqs=40, **sizes)) as llm:
        # 1, 2, 4, 8, 16, 24, 32, 40, under offload without 24
        count = {"full steps": 8, "pieces, resident": 8 * (LAYERS + 1), "pieces, offloaded": 7 * (LAYERS + 1)}[mode]
        graphs = llm._runner.passes[0].decode_runner
        assert graphs is not None and graphs.num_graphs == len(device.live) == count
        eager = profiling.activation_peak(llm._runner.model, llm.config)
    assert facts[0].activation_peak == eager + count * each
    assert facts[0].device_free == device._free


# ---- when there are none


def test_enforce_eager_records_nothing(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = graphed(monkeypatch, "full steps")
    with LLM(model_dir, **arguments("eager", enforce_eager=True, num_gpu_blocks=-1)) as llm:
        token_ids(llm, PROMPTS[:3], greedy(5))
        assert llm._runner.passes[0].decode_runner is None
    assert not device.replays and not device.live


@pytest.mark.parametrize("num_gpu_blocks", [-1, 80])
@pytest.mark.parametrize("mode", MODES[:3])
def test_a_failed_recording_is_one_warning(
    mode: str,
    num_gpu_blocks: int,
    model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with LLM(model_dir, **arguments("eager")) as llm:
        expected = token_ids(llm, PROMPTS[:5], greedy(5))
    device = graphed(monkeypatch, mode, fails_at=1)
    limits = {"num_gpu_blocks": num_gpu_blocks, "max_num_seqs": 4, "gpu_memory_utilization": 0.5}
    with LLM(model_dir, **arguments(mode, **limits)) as llm:
        assert token_ids(llm, PROMPTS[:5], greedy(5)) == expected
    warned = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warned == [
        "decode runs without CUDA graphs, recording them failed: operation not permitted when stream is capturing"
    ]
    assert not device.replays and not device.live


# ---- devices around devices


@pytest.mark.parametrize("mode", MODES[:3])
def test_replayed_steps_are_checked_and_traced(
    mode: str, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphed(monkeypatch, mode)
    batches = watch_batches(monkeypatch)
    path = tmp_path / "trace.json"
    with LLM(model_dir, **arguments(mode, trace=path)) as llm:
        device = llm._runner.device.inner  # type: ignore[attr-defined]
        assert isinstance(device, OrderingCheck)
        llm.engine.add_request("r", None, greedy(5), random_prompt(60, VOCAB, 7))
        while not batches:
            llm.engine.step()
        checked = device.num_checked
        llm.engine.step()
        assert device.num_checked > checked
    names = Counter(event["name"] for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X")
    assert names["decode graph"] == (len(batches) if mode == "full steps" else 0)
    assert names["attend"] > 0
