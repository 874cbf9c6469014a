"""Engines of models with recurrent layers: tokens of Transformers, and bits that depend on tokens alone."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, product
from pathlib import Path
from typing import Any

import pytest
import torch
from block_helpers import check_states
from checkpoints import GATED_DELTA, make_checkpoint, refusal
from engines import (
    PREFILL_WAYS,
    greedy,
    greedy_reference,
    logits_by_request,
    offloaded,
    random_prompt,
    set_prefill,
    token_ids,
    watch_layerwise,
)
from fast import fast_only, fast_pairs
from lora_helpers import ALL, make_adapter, merge_adapter
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from nanovllm import LLM, SamplingParams
from nanovllm.config import engine_config
from nanovllm.engine import branch_points
from nanovllm.errors import ConfigError
from nanovllm.features.recurrent import states as recurrent_states
from nanovllm.layers.forward_context import ForwardContext
from nanovllm.layers.state_rows import parts_of_states
from nanovllm.memory.sizing import MemoryFacts
from nanovllm.memory.states import plan_states, without_states
from nanovllm.models.hf_config import load_network_config
from nanovllm.ops.attention import SequenceMetadata

VOCAB = 199
BLOCK = 16
RESIDENT: dict[str, Any] = {"kvcache_block_size": BLOCK, "num_gpu_blocks": 60}
CHUNKS: dict[str, Any] = {**RESIDENT, "max_num_batched_tokens": 29}
OFFLOADED: dict[str, Any] = offloaded(BLOCK, 4, 40, max_num_batched_tokens=31, cpu_attention=False)
ENGINES = {"resident": RESIDENT, "chunks": CHUNKS, "offloaded": OFFLOADED, "CPU attention": offloaded(BLOCK, 4, 40)}
LENGTHS = (1, BLOCK, 3 * BLOCK - 1, 3 * BLOCK + 1, 90)


def prompts(*lengths: int) -> list[list[int]]:
    return [random_prompt(length, VOCAB, seed=length) for length in lengths]


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3.5 in bfloat16."""
    path = tmp_path_factory.mktemp("half")
    make_checkpoint(path, "qwen3_5", layers=4, dtype="bfloat16")
    return path


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    """A Qwen3.5 in float32, and Transformers' model of it."""
    path = tmp_path_factory.mktemp("exact")
    return path, make_checkpoint(path, "qwen3_5", layers=4)


@pytest.mark.parametrize(
    ("name", "family"),
    fast_only(
        [("resident", "qwen3_next"), ("chunks", "qwen3_5"), ("offloaded", "qwen3_5_moe"), ("CPU attention", "qwen3_5")],
        product(ENGINES, GATED_DELTA),
    ),
)
def test_tokens_are_those_of_transformers(name: str, family: str, tmp_path: Path) -> None:
    """Of prompts around the edges of blocks, together, and again from the prefix cache."""
    model = make_checkpoint(tmp_path, family, layers=4)
    given = prompts(*LENGTHS)
    expected = [greedy_reference(model, prompt, 8) for prompt in given]
    with LLM(tmp_path, dtype="float32", **ENGINES[name]) as llm:
        assert token_ids(llm, given, greedy(8)) == expected
        again = llm.generate(given, greedy(8), use_tqdm=False)
    assert [output.outputs[0].token_ids for output in again] == expected
    assert again[-1].num_cached_tokens > 0


def same(found: Mapping[Any, torch.Tensor], expected: Mapping[Any, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[key], each) for key, each in expected.items())


@pytest.mark.usefixtures("instruction_set")
def test_bits_do_not_depend_on_chunks_or_batch(half: Path) -> None:
    given = prompts(70, 3, 41)
    with LLM(half, **RESIDENT, max_num_seqs=1) as llm:
        alone = logits_by_request(llm, given, 5)
    for budget in (1, 7, 64):
        with LLM(half, **{**RESIDENT, "max_num_batched_tokens": budget, "max_num_seqs": min(budget, 4)}) as llm:
            assert same(logits_by_request(llm, given, 5), alone)
    with LLM(half, **OFFLOADED) as llm:
        assert same(logits_by_request(llm, given, 5), alone)


KINDS = ["linear_attention"] * 2 + ["full_attention", "linear_attention", "full_attention", "linear_attention"]


@pytest.mark.parametrize(
    ("family", "block", "chunk"),
    fast_pairs([("qwen3_5", 16, 40)], ("qwen3_5", "qwen3_next"), (16, 32, 64), (7, 21, 40)),
)
def test_bits_do_not_depend_on_the_order_of_prefill(tmp_path: Path, family: str, block: int, chunk: int) -> None:
    """Together, so that others decode between the layers of a long prompt, and again from the prefix cache."""
    make_checkpoint(tmp_path, family, layers=6, layer_types=KINDS, dtype="bfloat16")
    given = prompts(200, 150, 31, 3)
    given.append(given[0][:120] + given[1][:100])
    with LLM(tmp_path, kvcache_block_size=block, num_gpu_blocks=1600 // block) as llm:
        expected = logits_by_request(llm, given, 5)
    for way in PREFILL_WAYS:
        arguments = offloaded(block, 4, 1600 // block, max_num_batched_tokens=chunk, max_num_seqs=5)
        with LLM(tmp_path, cpu_attention=False, **arguments) as llm:
            set_prefill(llm, way)
            layerwise = watch_layerwise(llm)
            stats = llm.engine.scheduler.block_manager.stats
            assert same(logits_by_request(llm, given, 5), expected), way
            assert bool(layerwise) == (way == "layer-major")
            before = stats.hit_tokens
            assert same(logits_by_request(llm, given, 5), expected), way
            assert stats.hit_tokens > before + 200


def test_questions_about_a_long_document_begin_at_a_snapshot(half: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second where a chunk of the first ended, the others where the document ends; all layer by layer."""
    monkeypatch.setattr(branch_points, "LEAST_INTERVAL", 32)
    monkeypatch.setattr(recurrent_states, "SHARE_OF_PROMPT", 1)
    (document,) = prompts(150)
    given = [document + random_prompt(40, VOCAB, seed) for seed in range(4)]
    with LLM(half, **RESIDENT, enable_prefix_caching=False) as llm:
        fresh = [logits_by_request(llm, [prompt], 3) for prompt in given]
    with LLM(half, **{**OFFLOADED, "max_num_batched_tokens": 32, "max_num_seqs": 4}) as llm:
        layerwise = watch_layerwise(llm)
        hits = []
        for prompt, expected in zip(given, fresh, strict=True):
            assert same(logits_by_request(llm, [prompt], 3), expected)
            hits.append(llm.engine.scheduler.block_manager.stats.hit_tokens - sum(hits))
        check_states(llm.engine.scheduler.block_manager, [])
    begins = [part.layerwise for part in layerwise if part.layerwise and part.layerwise.first_layer_chunk == 0]
    kept = [[position for position, _ in part.layerwise.snapshots] for part in begins]
    assert hits == [0, 128, 144, 144] and kept == [[32, 64, 96, 128, 160], [144]]


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_a_prefill_that_is_cut_short_between_its_layers_leaves_nothing(mode: str, half: Path) -> None:
    """Aborted, and preempted when another request grows. It begins anew, and ends with the same tokens."""
    long, talker = prompts(190, 25)
    with LLM(half, **RESIDENT) as llm:
        expected = {"talker": token_ids(llm, [talker], greedy(40))[0], "long": token_ids(llm, [long], greedy(5))[0]}
    few = offloaded(BLOCK, 4, 12, max_num_batched_tokens=8, max_num_seqs=4, preemption_mode=mode, swap_space=0.01)
    with LLM(half, cpu_attention=False, **few) as llm:
        layerwise = watch_layerwise(llm)
        engine = llm.engine
        for count in (1, 3, 6):
            engine.add_request("aborted", None, greedy(5), long)
            for _ in range(count):
                engine.step()
            engine.abort_request("aborted")
            check_states(engine.scheduler.block_manager, [])
        engine.add_request("talker", None, greedy(40), talker)
        while not engine.step()[0].outputs[0].token_ids:
            pass
        engine.add_request("long", None, greedy(5), long)
        found = {}
        while engine.has_unfinished_requests():
            found |= {each.request_id: each.outputs[0].token_ids for each in engine.step() if each.finished}
        check_states(engine.scheduler.block_manager, [])
        assert engine.scheduler.preemption.stats.recomputed > 0
    begins = [part for part in layerwise if part.layerwise and part.layerwise.first_layer_chunk == 0]
    assert found == expected and len(begins) > 4, "three that were aborted, and one that began anew"


def test_bits_do_not_depend_on_a_snapshot(half: Path) -> None:
    """A prompt that goes on where another ended, by one token or many, and one that leaves it in the middle."""
    first, more = prompts(64, 40)
    given = [first, first + more[:1], first + more, first[:50] + more]
    with LLM(half, **CHUNKS, enable_prefix_caching=False) as llm:
        fresh = [logits_by_request(llm, [prompt], 4) for prompt in given]
    with LLM(half, **CHUNKS) as llm:
        for prompt, expected in zip(given, fresh, strict=True):
            assert same(logits_by_request(llm, [prompt], 4), expected)
            assert same(logits_by_request(llm, [prompt], 4), expected)
        assert llm.metrics().prefix_cache.hit_tokens > 64


def test_the_next_turn_goes_on_from_the_end_of_the_answer(half: Path) -> None:
    (question, more) = prompts(40, 30)
    with LLM(half, **CHUNKS) as llm:
        (answer,) = token_ids(llm, [question], greedy(30))
        (turn,) = llm.generate([question + answer + more], greedy(3), use_tqdm=False)
    assert turn.num_cached_tokens >= 64


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_preempted_requests_go_on_with_the_same_bits(mode: str, half: Path) -> None:
    given = prompts(30, 33, 41, 20)
    with LLM(half, **RESIDENT) as llm:
        expected = logits_by_request(llm, given, 40)
    few = {**RESIDENT, "num_gpu_blocks": 12, "preemption_mode": mode}
    with LLM(half, **few, **({"swap_space": 0.01} if mode == "swap" else {})) as llm:
        assert same(logits_by_request(llm, given, 40), expected)
        metrics = llm.metrics()
    assert (metrics.preemptions.swapped if mode == "swap" else metrics.preemptions.recomputed) > 0


@pytest.mark.parametrize("name", ["resident", "offloaded"])
def test_several_outputs_of_a_prompt_are_those_of_separate_requests(name: str, half: Path) -> None:
    """Each sample continues a copy of the prompt's state."""
    (prompt,) = prompts(45)
    params = SamplingParams(temperature=0.9, n=3, seed=4, max_tokens=12, ignore_eos=True)
    with LLM(half, **ENGINES[name]) as llm:
        (output,) = llm.generate([prompt], params, use_tqdm=False)
    with LLM(half, **RESIDENT, enable_prefix_caching=False) as llm:
        (expected,) = llm.generate([prompt], params, use_tqdm=False)
    texts = [each.token_ids for each in output.outputs]
    assert texts == [each.token_ids for each in expected.outputs] and len(set(map(tuple, texts))) == 3


def test_beams_are_those_of_an_engine_without_a_prefix_cache(exact: tuple[Path, PreTrainedModel]) -> None:
    path, _ = exact
    params = SamplingParams(temperature=0.0, use_beam_search=True, best_of=3, n=3, max_tokens=10, ignore_eos=True)
    found = []
    for arguments in (RESIDENT, {**OFFLOADED, "enable_prefix_caching": False}):
        with LLM(path, dtype="float32", **arguments) as llm:
            found.append([output.token_ids for output in llm.generate(prompts(37), params, use_tqdm=False)[0].outputs])
    assert found[0] == found[1]


def test_an_aborted_request_leaves_no_state(half: Path) -> None:
    with LLM(half, **CHUNKS) as llm:
        expected = token_ids(llm, prompts(50), greedy(4))
        for number in range(30):  # more than there are states
            llm.engine.add_request(str(number), None, greedy(5), prompts(60 + number)[0])
            llm.engine.step()
            llm.engine.abort_request(str(number))
        assert token_ids(llm, prompts(50), greedy(4)) == expected


def test_ranks_that_key_heads_cannot_be_divided_among_are_refused(half: Path) -> None:
    assert "has 2 key heads in a recurrent layer" in refusal(lambda: LLM(half, tensor_parallel_size=3), ConfigError)


@pytest.mark.parametrize("targets", [ALL, ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")], ids=len)
def test_adapters_of_recurrent_layers(targets: tuple[str, ...], tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", "qwen3_5", layers=4)
    given = prompts(50, 20)
    adapter = make_adapter(tmp_path / "adapter", model, 1, targets)
    plain = greedy_reference(model, given[1], 8)
    merge_adapter(model, tmp_path / "adapter")
    expected = [greedy_reference(model, given[0], 8), plain]
    with LLM(tmp_path / "model", dtype="float32", enable_lora=True, max_lora_rank=4, **CHUNKS) as llm:
        for _ in range(2):
            outputs = llm.generate(given, greedy(8), use_tqdm=False, lora_request=[adapter, None])
            assert [output.outputs[0].token_ids for output in outputs] == expected


def test_text_of_a_model_for_images_is_continued(
    exact: tuple[Path, PreTrainedModel], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What no text needs is left out with a line: the vision tower, and heads that predict further tokens."""
    text, model = exact
    fields = json.loads((text / "config.json").read_text())
    names = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": fields}
    (tmp_path / "config.json").write_text(json.dumps({**names, "vision_config": {"depth": 2}}))
    stored = load_file(text / "model.safetensors")
    whole = {name.replace("model.", "model.language_model.", 1): part for name, part in stored.items()}
    others = {name: torch.ones(4) for name in ("model.visual.pos_embed.weight", "mtp.norm.weight")}
    save_file({**whole, **others}, tmp_path / "model.safetensors", {"format": "pt"})
    (prompt,) = prompts(40)
    with caplog.at_level(logging.INFO), LLM(tmp_path, dtype="float32", **CHUNKS) as llm:
        assert token_ids(llm, [prompt], greedy(6)) == [greedy_reference(model, prompt, 6)]
    (line,) = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert "mtp.norm.weight" in line and "model.visual.pos_embed.weight" in line


@dataclass
class RowsToKeep:
    """Stands in for the states of a step and for the memory of its rows with drafts."""

    rows: Sequence[range]

    @property
    def kept(self) -> RowsToKeep:
        return self

    @property
    def slots(self) -> torch.Tensor:
        return torch.arange(len(self.rows))


@pytest.mark.parametrize("chunk", [1, 3, 4, 7, 12])
def test_each_row_with_drafts_is_kept_once_however_a_step_is_cut(chunk: int) -> None:
    lengths = [2, 5, 1, 4]
    kept = [range(0), range(5), range(0), range(5, 9)]
    starts = [*accumulate(lengths, initial=0)]
    sequences = tuple(SequenceMetadata.full(at, size, 0, ()) for at, size in zip(starts, lengths, strict=False))
    states: Any = RowsToKeep(kept)
    nothing: Any = None
    sizes = [min(chunk, starts[-1] - first) for first in range(0, starts[-1], chunk)]
    parts = parts_of_states(ForwardContext(nothing, sequences, nothing, states=states), sizes)
    found = {
        int(target): index * chunk + int(source)
        for index, part in enumerate(parts)
        if part.kept is not None
        for source, target in zip(*part.kept, strict=True)
    }
    assert found == {0: 2, 1: 3, 2: 4, 3: 5, 4: 6, 5: 8, 6: 9, 7: 10, 8: 11}


def test_rows_with_drafts_are_counted_where_memory_is_sized(half: Path) -> None:
    network = load_network_config(half).network
    drafts = {"method": "ngram", "num_speculative_tokens": 500}
    memory = MemoryFacts(2**30, 2**30, 2**30, tiers_share_memory=False, activation_peak=0)
    plain, drafting = (engine_config(half, {"speculative_config": each, "max_num_seqs": 6}) for each in (None, drafts))
    with_rows, without = (without_states(memory, config, network) for config in (drafting, plain))
    assert with_rows.states is not None and without.states is not None and without.states.draft_rows == 0
    assert with_rows.states.draft_rows == with_rows.states.running + 500
    taken = without.device_free - with_rows.device_free
    assert taken == with_rows.states.draft_rows * network.draft_row_bytes > 0
    alone = {"max_num_seqs": 1, "speculative_config": drafts}
    tight = replace(memory, device_total=6 * network.state_bytes, device_free=6 * network.state_bytes)
    for asked, facts, running in (
        (alone, memory, 1),
        (alone, tight, 1),  # of whose memory for the cache one state takes more than an eighth
        ({"max_num_seqs": 6, "enable_prefix_caching": False, "speculative_config": drafts}, memory, 6),
    ):
        slots = plan_states(engine_config(half, asked), network, facts)
        assert slots is not None and slots.device > slots.running == running  # one more for a state that is held
    few = 500 * network.draft_row_bytes
    small = replace(memory, device_total=few, device_free=few)
    with pytest.raises(ConfigError, match=r"rows with drafts take .*; lower num_speculative_tokens or max_num_seqs"):
        without_states(small, drafting, network)


def test_a_network_without_memory_computes_nothing(half: Path) -> None:
    """It is made at every start, and torch imports a compiler for many operations on the meta device."""
    done = set[str]()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.is_meta:
                done.add(str(func))
            return out

    config = load_network_config(half)
    with Watch():
        assert config.on_meta().network.num_weights > 0
    assert done == {
        "aten.empty.memory_format",
        "aten.permute.default",
        "aten.unsqueeze.default",
        "aten._to_copy.default",
    }
