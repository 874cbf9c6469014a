"""Graphs of decode steps: the logits of eager steps to the bit, whatever the batch; nothing written but what is due."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import FAMILIES, MIXES, checkpoint_fixture, make_checkpoint
from drafters import CheckedDrafter
from engines import greedy, logits_by_request, random_prompt, token_ids
from fast import fast_only
from graph_devices import (
    MODES,
    PROMPTS,
    VOCAB,
    CapturingDevice,
    arguments,
    measured_memory,
    use_graphs,
    use_grouped_adapters,
    watch_batches,
)
from kv_disk_helpers import finished_next
from lora_helpers import ALL, make_adapter
from ordering_check import OrderingCheck
from torch import Tensor

from nanovllm import LLM, SamplingParams, build
from nanovllm.config import EngineConfig
from nanovllm.data.batch import Batch, BlockMove
from nanovllm.engine.request import Sequence as Running
from nanovllm.features.cuda_graphs.decode_graphs import DecodeGraphs
from nanovllm.features.cuda_graphs.run_ahead import NextStep
from nanovllm.features.cuda_graphs.shapes import step_shapes
from nanovllm.features.kv_disk.policy import UNIT
from nanovllm.kvcache.chunked_attention import OffloadedKVCache
from nanovllm.kvcache.forward_pass import ComputedRows, FlatBatch
from nanovllm.kvcache.paged_cache import PagedKVCache
from nanovllm.memory import profiling

LAYERS = 2
Logits = dict[tuple[int, int], Tensor]


model_dir = checkpoint_fixture(vocab=VOCAB, hidden=32, intermediate=48, layers=LAYERS)


def graphed(monkeypatch: pytest.MonkeyPatch, mode: str, **options: Any) -> CapturingDevice:
    device = CapturingDevice(**options)
    use_graphs(monkeypatch, device, rows=mode == "full steps")
    return device


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


@pytest.mark.parametrize("mode", fast_only(MODES[:3:2], MODES))
def test_logits_are_those_of_eager_steps(
    mode: str, model_dir: Path, eager_logits: Logits, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = graphed(monkeypatch, mode)
    batches = watch_batches(monkeypatch)
    with LLM(model_dir, **arguments(mode)) as llm:
        assert same_logits(logits_in_turn(llm), eager_logits)
    assert set(batches) == set(range(1, 10)), "every batch size, also those between buckets"
    assert device.replays == len(batches) * (1 if mode == "full steps" else LAYERS + 1)


@pytest.mark.parametrize("mode", fast_only(MODES[:1], MODES[:3]))
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
        assert metrics.preemptions.recomputed > 0 and metrics.prefix_cache.hit_tokens > 0
    assert same_logits(found, expected)


@pytest.mark.parametrize(
    "options",
    [
        {"family": "mistral", "sliding_window": 20},
        {"family": "ministral3"},
        pytest.param({"family": "qwen2", "sliding_window": 17, "max_window_layers": 1}, marks=pytest.mark.slow),
        pytest.param({"family": "gemma3", "sliding_window": 17}, marks=pytest.mark.slow),
    ],
    ids=["windows in all layers", "scaled queries", "windows in some layers", "two RoPEs"],
)
@pytest.mark.parametrize("mode", MODES[:3:2])
def test_windows_and_rotary_embeddings(
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


# Every family, and what a network may have besides.
NETWORKS: dict[str, dict[str, Any]] = {
    **{family: {"family": family, "layers": 2} for family in FAMILIES},
    **MIXES,
    "shared K and V, inputs of layers": {
        **{"family": "gemma4", "layers": 6, "sliding_window": 24, "global_head_dim": 32, "kv_heads": 1},
        **{"layer_types": ["sliding_attention", "full_attention"] * 3, "num_kv_shared_layers": 2, "tie": True},
        **{"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB},
    },
}


# What the fast tests record: experts with sinks, recurrent layers, heads of two sizes, and all mixes. Recordings of CUT
# are cut at attention too.
CUT = ("gpt_oss", "qwen3_5", "gemma4")
FAST = {(network, MODES[0]) for network in NETWORKS if network in CUT or network not in FAMILIES}
FAST |= {(network, MODES[2]) for network in CUT}


@pytest.mark.parametrize(
    ("network", "mode"),
    fast_only(FAST, product(NETWORKS, MODES[:3:2])),
)
def test_every_family_is_recorded(network: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits, and tokens that the last graph chooses, with requests that join and end."""
    make_checkpoint(tmp_path, **{"vocab": VOCAB, "hidden": 32, "intermediate": 48, **NETWORKS[network]})
    prompts = [random_prompt(n, VOCAB, 5) for n in (60, 4, 33)]
    params = [greedy(4 + 3 * index) for index in range(3)]
    limits = {"max_model_len": 120}
    with LLM(tmp_path, **arguments("eager", **limits)) as llm:
        expected = logits_by_request(llm, prompts, 8)
        tokens = token_ids(llm, prompts, params)
    device = graphed(monkeypatch, mode)
    with LLM(tmp_path, **arguments(mode, **limits)) as llm:
        assert same_logits(logits_by_request(llm, prompts, 8), expected)
        replays = device.replays
        assert replays and token_ids(llm, prompts, params) == tokens and device.replays > replays


DRAFTED = 5  # tokens of a sequence in a step, at most


class Scripted(CheckedDrafter):
    """Drafts what is known to follow a prompt, one to DRAFTED tokens of it; every fourth time with an error."""

    def __init__(self, known: Mapping[tuple[int, ...], Sequence[int]]) -> None:
        self._known = known
        self._calls = 0

    def draft(self, seq: Running, most: int, rows: int, tokens: int) -> list[int]:
        self._calls += 1
        output = self._known[tuple(seq.token_ids[: seq.prompt_len])]
        found = list(output[seq.num_output_tokens :][: min(most, 1 + self._calls % DRAFTED)])
        if found and self._calls % 4 == 0:
            found[len(found) // 2] = (found[len(found) // 2] + 1) % VOCAB
        return found


@pytest.mark.parametrize(
    ("family", "mode"),
    fast_only(
        [("qwen3", MODES[0]), ("qwen3_5", MODES[0]), ("gemma4", MODES[2])],
        product(["qwen3", "qwen3_5", "gemma4"], MODES[:3:2]),
    ),
)
def test_steps_with_drafts_are_recorded(
    family: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone and with others, right and wrong drafts; recurrent layers replay the right ones."""
    make_checkpoint(tmp_path, family=family, vocab=VOCAB, hidden=32, intermediate=48, layers=4)
    prompts = [random_prompt(n, VOCAB, 5) for n in (60, 4, 33)]
    params = [SamplingParams(temperature=0.0, max_tokens=9 + 20 * n, ignore_eos=True) for n in range(3)]
    params[1].logprobs = 2
    limits = {"max_model_len": 120}
    with LLM(tmp_path, **arguments("eager", **limits)) as llm:
        expected = outputs(llm, prompts, params)
    known = {tuple(prompt): tokens for prompt, (tokens, _) in zip(prompts, expected, strict=True)}
    drafter = Scripted(known)
    monkeypatch.setattr(build, "_drafter", lambda *_: drafter)
    graphed(monkeypatch, mode)
    widths = Counter[int]()
    run = DecodeGraphs.run

    def watched(graphs: DecodeGraphs, batch: FlatBatch, kv_cache: Any) -> ComputedRows | None:
        computed = run(graphs, batch, kv_cache)
        widths[max(seq.query_len for seq in batch.sequences)] += computed is not None
        return computed

    monkeypatch.setattr(DecodeGraphs, "run", watched)
    config = {"method": "ngram", "num_speculative_tokens": DRAFTED}
    with LLM(tmp_path, **arguments(mode, **limits, speculative_config=config)) as llm:
        assert outputs(llm, prompts, params) == expected
    assert drafter.accepted > 20 and sum(widths[rows] > 0 for rows in range(2, DRAFTED + 2)) > 2, widths


def outputs(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[Any]:
    found = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in found]


@pytest.mark.parametrize("mode", MODES[:3:2])
def test_steps_with_adapters_are_recorded(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of three adapters, of which one leaves modules as they are, and rows of none; two slots on the device."""
    model = make_checkpoint(tmp_path / "model", vocab=VOCAB, hidden=32, intermediate=48)
    targets = [ALL, ("k_proj", "o_proj"), ALL]
    adapters = [make_adapter(tmp_path / f"a{n}", model, n + 1, targets[n]) for n in range(3)]
    names = [None, *adapters, adapters[0], None]
    prompts = [random_prompt(n, VOCAB, 5) for n in (40, 4, 33, 2, 9, 17)]
    params = [greedy(6 + 3 * index) for index in range(len(prompts) - 1)] + [greedy(60)]
    limits = {"max_model_len": 120, "enable_lora": True, "max_loras": 2, "max_lora_rank": 4}

    def tokens(llm: LLM) -> list[Any]:
        found = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], params, lora_request=names, use_tqdm=False
        )
        return [output.outputs[0].token_ids for output in found]

    with LLM(tmp_path / "model", **arguments("eager", **limits)) as llm:
        expected = tokens(llm)
    device = graphed(monkeypatch, mode)
    use_grouped_adapters(monkeypatch, device)
    adapted = Counter[bool]()
    run = DecodeGraphs.run

    def watched(graphs: DecodeGraphs, batch: FlatBatch, kv_cache: Any) -> ComputedRows | None:
        computed = run(graphs, batch, kv_cache)
        adapted[any(seq.adapter is not None for seq in batch.scheduled)] += computed is not None
        return computed

    monkeypatch.setattr(DecodeGraphs, "run", watched)
    with LLM(tmp_path / "model", **arguments(mode, **limits)) as llm:
        assert tokens(llm) == expected
    assert adapted[True] > 10 and adapted[False] > 4


# ---- the next step, begun before the host has the tokens


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many steps were "begun" ahead, and "taken": asked for next."""
    found = Counter[str]()
    after = NextStep.after
    is_step = NextStep.is_step

    def watched_after(batch: FlatBatch, groups: Any) -> NextStep | None:
        step = after(batch, groups)
        found["begun"] += step is not None
        return step

    def watched_is_step(step: NextStep, batch: FlatBatch, token_ids: Sequence[int]) -> bool:
        is_asked = is_step(step, batch, token_ids)
        found["taken"] += is_asked
        return is_asked

    monkeypatch.setattr(NextStep, "after", watched_after)
    monkeypatch.setattr(NextStep, "is_step", watched_is_step)
    return found


def test_steps_begun_ahead_change_no_token(
    model_dir: Path, ahead: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that join, end, are preempted, draw at random, or report log-probabilities; prefix hits."""
    shared = random_prompt(40, VOCAB, 3)
    prompts = [shared + random_prompt(n, VOCAB, 4) for n in (1, 9, 2, 30, 7)]
    params = [SamplingParams(temperature=0.0, max_tokens=8 * n + 44, ignore_eos=True) for n in range(5)]
    params[2].logprobs = 1
    params[3].temperature = 1.0
    params[3].seed = 5
    small = {"num_gpu_blocks": 16, "max_model_len": 150}
    with LLM(model_dir, **arguments("eager", **small)) as llm:
        expected = outputs(llm, prompts, params)
    graphed(monkeypatch, "full steps")
    with LLM(model_dir, **arguments("full steps", **small)) as llm:
        assert outputs(llm, prompts, params) == expected
        assert outputs(llm, prompts, params) == expected, "from the prefix cache"
        assert llm.metrics().preemptions.recomputed > 0
    assert ahead["begun"] > ahead["taken"] > 20


def test_a_step_begun_ahead_is_dropped_where_another_one_is_asked_for(
    model_dir: Path, ahead: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request is aborted, and another one gets its blocks: what was written ahead in them is not seen."""
    prompts = [random_prompt(n, VOCAB, 8) for n in (20, 35, 19)]
    with LLM(model_dir, **arguments("eager")) as llm:
        expected = [token_ids(llm, [prompt], greedy(20))[0] for prompt in prompts]
    graphed(monkeypatch, "full steps")
    with LLM(
        model_dir, **arguments("full steps", num_gpu_blocks=7, max_model_len=80, enable_prefix_caching=False)
    ) as llm:
        for name, prompt in zip("ab", prompts, strict=False):
            llm.engine.add_request(name, None, greedy(20), prompt)
        found: dict[str, list[int]] = {}
        for step in range(60):
            if step == 8:
                assert ahead["taken"] > 2
                llm.engine.abort_request("a")
                llm.engine.add_request("c", None, greedy(20), prompts[2])
            for output in llm.engine.step():
                found[output.request_id] = output.outputs[0].token_ids
            if not llm.engine.has_unfinished_requests():
                break
    assert found["b"] == expected[1] and found["c"] == expected[2] and found["a"] == expected[0][: len(found["a"])]
    assert ahead["begun"] > ahead["taken"] > 10


def test_a_step_that_moved_blocks_or_failed_forgets_what_was_begun(
    model_dir: Path, ahead: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    graphed(monkeypatch, "full steps")
    with LLM(model_dir, **arguments("full steps")) as llm:
        chunked = llm._runner.passes[0]
        llm.engine.add_request("r", None, greedy(20), random_prompt(20, VOCAB, 9))
        while chunked.decode_runner._ahead is None:
            llm.engine.step()
        chunked.begin_step(Batch((), moves=[BlockMove(5, 6)]))
        assert chunked.decode_runner._ahead is None
        llm.engine.step()
        assert chunked.decode_runner._ahead is not None and not ahead["taken"]
        chunked.abandon_step()
        assert chunked.decode_runner._ahead is None


def test_a_step_begun_ahead_is_of_its_request_alone(
    tmp_path: Path, ahead: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another request has the blocks, the positions and the token of an aborted one's next step, with K/V from disk."""
    limits = {
        "kvcache_block_size": 4 * UNIT,
        "num_gpu_blocks": 4,
        "max_model_len": 4 * UNIT - 1,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 4 * UNIT,
        "kv_cache_dir": str(tmp_path / "kv"),
        "enable_prefix_caching": True,
    }
    model = tmp_path / "model"
    make_checkpoint(model, vocab=VOCAB, hidden=32, intermediate=48, layers=LAYERS, max_positions=4 * UNIT)
    first = random_prompt(2 * UNIT - 4, VOCAB, 1)
    with LLM(model, **arguments("eager", **limits)) as llm:
        drawn = token_ids(llm, [first], greedy(5))[0]
        other = [*random_prompt(2 * UNIT, VOCAB, 2), drawn[4]]
        expected = token_ids(llm, [other], greedy(8))[0]
    graphed(monkeypatch, "full steps")
    with LLM(model, **arguments("full steps", **limits)) as llm:
        llm.engine.reset_prefix_cache()
        llm.engine.add_request("first", None, greedy(30), first)
        while ahead["begun"] < 4:  # the fourth has the fifth token, at position 2 * UNIT
            llm.engine.step()
        llm.engine.abort_request("first")
        llm.engine.reset_prefix_cache()
        taken = ahead["taken"]
        llm.engine.add_request("other", None, greedy(8), other)
        llm.engine.step()
        assert ahead["taken"] == taken
        output = finished_next(llm)
        assert output.num_cached_tokens == 2 * UNIT and output.outputs[0].token_ids == expected


def test_logits_that_are_not_finite_end_a_request_also_ahead(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step that follows reads the embedding of no token."""
    graphed(monkeypatch, "full steps")
    with LLM(model_dir, **arguments("full steps")) as llm:
        llm.engine.add_request("r", None, greedy(20), random_prompt(20, VOCAB, 9))
        for _ in range(4):
            llm.engine.step()
        llm._runner.model.norm.data.fill_(float("nan"))
        results = [output for _ in range(2) for output in llm.engine.step()]
    assert "NaN or infinity" in str(results[-1].error) and results[-1].finished


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
        for pool in pools(llm):
            pool.fill_(7.0)  # memory of an earlier engine may hold the very rows that this one writes
        for index in range(5):
            llm.engine.add_request(str(index), None, greedy(30), random_prompt(3 + 7 * index, VOCAB, 6))
        while not batches:
            llm.engine.step()
        llm._runner.kv_cache.pools.order.synchronize()  # stores of the prompts may still be under way
        for pool in pools(llm):
            pool[pool.isnan()] = 0.0
        before = [pool.clone() for pool in pools(llm)]
        for _ in range(3):
            llm.engine.step()
        llm._runner.kv_cache.pools.order.synchronize()
        changed = 0
        for pool, old in zip(pools(llm), before, strict=True):
            changed += int((pool != old).any(dim=-1).sum())  # rows: of one head's K or V of a token
    assert batches[-3:] == [5, 5, 5] and changed == 3 * 5 * LAYERS * 2 * 2


@pytest.mark.parametrize("mode", MODES[:3])
def test_graphs_are_part_of_what_is_sized(mode: str, model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The estimate is what they take in the end, and nothing of the trial is left."""
    each = 64 << 20
    device = graphed(monkeypatch, mode, graph_bytes=each)
    facts = measured_memory(monkeypatch)
    sizes = {"num_gpu_blocks": -1, "gpu_memory_utilization": 0.7}
    with LLM(model_dir, **arguments(mode, max_num_seqs=40, **sizes)) as llm:
        # 1, 2, 4, 8, 16, 24, 32, 40, in pieces without 24; each has a graph for the tokens besides.
        count = {"full steps": 8 * 2, "pieces, resident": 7 * (LAYERS + 2), "pieces, offloaded": 7 * (LAYERS + 2)}[mode]
        graphs = llm._runner.passes[0].decode_runner
        assert graphs is not None and graphs.num_graphs == len(device.live) == count
        eager = profiling.activation_peak(llm._runner.model, llm.config)
    assert facts[0].activation_peak == eager + count * each
    assert facts[0].device_free == device._free


@pytest.mark.parametrize("drafts", [0, 3, 64])
@pytest.mark.parametrize("most", [1, 7, 256, 4096])
def test_the_number_of_graphs_does_not_grow_with_the_limits(most: int, drafts: int, model_dir: Path) -> None:
    config = EngineConfig(model=str(model_dir), max_num_seqs=most, max_num_batched_tokens=8192, enable_lora=True)
    if drafts:
        config = replace(config, speculative_config={"method": "ngram", "num_speculative_tokens": drafts})
    ways = (True, False, 512, 2 * 27), (False, False, 64, 2 * 18), (True, True, 64, 2 * 18)
    for records_attention, weights_stream, largest, limit in ways:
        shapes = step_shapes(config, records_attention, recurrent=True, weights_stream=weights_stream)
        assert len(shapes) <= limit and shapes == sorted(shapes, key=lambda shape: shape.rows)
        for rows in range(1, min(most, largest) + 1):
            found = next(shape for shape in shapes if shape.takes(rows, rows, 1, adapters=False))
            assert found.rows <= max(4, 2 * rows)
        assert not weights_stream or all(shape.rows <= largest for shape in shapes)
        alone = [shape for shape in shapes if shape.sequences == 1 and not shape.adapters]
        assert [shape.rows for shape in alone][:8] == [*range(1, min(8, 1 + drafts) + 1)]


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
    mode: str, model_dir: Path, ahead: Counter[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    dropped = ahead["begun"] - ahead["taken"]
    assert names["decode graph"] == (len(batches) + dropped if mode == "full steps" else 0)
    assert names["attend"] > 0
