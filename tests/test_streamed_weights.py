"""Weights that stream: the tokens of Transformers, and the same bits for every budget and beside every feature."""

from __future__ import annotations

import gc
import json
import logging
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from checkpoints import checkpoint_fixture, make_checkpoint
from device_bytes import DeviceBytes
from engines import greedy, greedy_reference, offloaded, random_prompt, set_prefill, token_ids, watch_layerwise
from fast import fast_only
from hypothesis import given, settings
from hypothesis import strategies as st
from lora_helpers import make_adapter
from mtp_heads import add_mtp_head
from ordering_check import OrderingCheck
from quantized_checkpoints import VARIANTS, quantize
from rank_processes import kept_rank_processes
from safetensors.torch import load_file, save_file
from streamed_engines import (
    GREEDY,
    MAX_TOKENS,
    PARAMS,
    PROMPTS,
    VOCAB,
    answers,
    bits,
    budget,
    interrupt_each_copy,
    stream_of,
    weight_sizes,
)
from torch import Tensor

from nanovllm import LLM, build
from nanovllm.device import cpu, create_device
from nanovllm.errors import ConfigError, EngineError
from nanovllm.features.speculation import draft_model, drafter
from nanovllm.features.streamed_weights.host_layers import HostLayers
from nanovllm.features.streamed_weights.storages import SPAN_ALIGNMENT
from nanovllm.features.streamed_weights.stream import WeightStream
from nanovllm.memory.weights import plan_weights

TIMES = int(os.environ.get("NANOVLLM_FUZZ_TIMES", "1"))  # as many examples
LAYERS = 7
BLOCK = 16
COPIED = {"max_num_batched_tokens": 40, "host_products": False}  # all passes copy what they need
RESIDENT: dict[str, Any] = {"kvcache_block_size": BLOCK, "num_gpu_blocks": 120, **COPIED}
OFFLOADED = offloaded(BLOCK, 8, 200, **COPIED)
KV: dict[str, dict[str, Any]] = {"resident": RESIDENT, "layer by layer": OFFLOADED, "chunk by chunk": OFFLOADED}


@pytest.fixture(autouse=True)
def drafts_do_not_follow_measured_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (drafter, draft_model):
        monkeypatch.setattr(module, "draft_length", lambda acceptance, most, *costs: most)


model_dir = checkpoint_fixture(vocab=VOCAB, hidden=32, intermediate=48, layers=LAYERS)


# ---- against Transformers


FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "gpt_oss": {"sliding_window": 24},
    "qwen3_5": {},
    "gemma3": {"sliding_window": 24},
}


MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"experts": 16},
    "mixtral": {"experts": 16},
    "glm4_moe": {"experts": 16},
}


class Made(NamedTuple):
    """A checkpoint, Transformers' tokens, and what an engine answers that has all weights on the device."""

    path: Path
    tokens: list[list[int]]
    answers: list[Any]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    found: dict[str, Made] = {}

    def of_family(family: str) -> Made:
        if family not in found:
            path = tmp_path_factory.mktemp(family)
            model = make_checkpoint(path, family, vocab=VOCAB, layers=LAYERS, **FAMILIES[family])
            tokens = [greedy_reference(model, prompt, MAX_TOKENS) for prompt in PROMPTS]
            with LLM(path, dtype="float32", **RESIDENT) as llm:
                found[family] = Made(path, tokens, answers(llm))
        return found[family]

    return of_family


FAST = [("qwen3", 7, "layer by layer"), ("gpt_oss", 6, "resident"), ("qwen3_5", 4, "layer by layer")]
FAST += [("gemma3", 7, "chunk by chunk")]
CASES = [(family, count, kv) for family in FAMILIES for count in (0, 4, 6, 7) for kv in KV]


@pytest.mark.parametrize(("family", "count", "kv"), fast_only(FAST, CASES))
def test_tokens_are_those_of_transformers_and_bits_those_of_any_budget(
    made: Callable[[str], Made], family: str, count: int, kv: str
) -> None:
    path, tokens, expected = made(family)
    sizes = weight_sizes(path)
    asked = budget(sizes, count) if count else sizes.num_bytes
    with LLM(path, dtype="float32", weights_memory_bytes=asked, **KV[kv]) as llm:
        if kv == "chunk by chunk":
            set_prefill(llm, "chunk-major")
        layerwise = watch_layerwise(llm)
        found = answers(llm)
        if count:
            assert len(stream_of(llm).streamed) == count
        else:
            assert llm._runner.model.layer_weights is None
        assert bool(layerwise) == (kv == "layer by layer")
    assert [ones[0][0] for _, ones in found[:: len(found) // len(PROMPTS)]] == tokens
    assert found == expected


# ---- beside other features


class Feature(NamedTuple):
    """A checkpoint and engine arguments. stored: makes the checkpoint in a folder."""

    stored: Callable[[Path], Path]
    given: Mapping[str, Any] = MappingProxyType({})
    dtype: str = "float32"
    kv: str = "resident"


def plain(family: str = "qwen3", **options: Any) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        make_checkpoint(folder / "plain", family, **{"vocab": VOCAB, "layers": 4, **options})
        return folder / "plain"

    return make


def packed(variant: str, family: str = "qwen3") -> Callable[[Path], Path]:
    sizes = {"hidden": 128, "intermediate": 256, "heads": 8, "kv_heads": 4}
    return lambda folder: quantize(plain(family, **sizes)(folder), folder / variant, variant)


def gguf(kind: str | None = None, **options: Any) -> Callable[[Path], Path]:
    """kind: of all matrices; None for several types."""

    def make(folder: Path) -> Path:
        pytest.importorskip("gguf", reason="the package gguf is not installed")
        from gguf_files import WIDE, write_gguf

        model = make_checkpoint(folder / "plain", **{**WIDE, "layers": 4, **options})
        return write_gguf(folder / "model.gguf", model, kind or mixed)

    return make


def mixed(name: str) -> str:
    """Types of a GGUF file as llama.cpp mixes them, in layers with other types than the first ones."""
    others = {"attn_v": "Q6_K", "token_embd": "Q6_K", "blk.1.ffn_down": "F16", "blk.3.": "Q8_0"}
    return next((kind for part, kind in others.items() if part in name), "Q4_K")


def with_mtp_head(folder: Path) -> Path:
    path = plain("qwen3_5", hidden=128)(folder)
    add_mtp_head(path, predicts=True)
    return path


NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
KINDS = ["sliding_attention", "full_attention"]
MTP = {"method": "mtp", "num_speculative_tokens": 4}
FEATURES: dict[str, Feature] = {
    "bfloat16": Feature(plain(), dtype="bfloat16"),
    "float16, layer by layer": Feature(plain("gemma3"), dtype="float16", kv="layer by layer"),
    "torch's products": Feature(plain(), {"batch_invariant": False}, dtype="bfloat16"),
    **{variant: Feature(packed(variant)) for variant in VARIANTS},
    "experts in GPTQ": Feature(packed("gptq-64", "qwen3_moe")),
    "experts in FP8": Feature(packed("fp8-channel", "mixtral"), dtype="bfloat16"),
    "GGUF of several types": Feature(gguf(family="llama")),
    "GGUF, recurrent, layer by layer": Feature(gguf("Q8_0", family="qwen3_5"), kv="layer by layer"),
    "GGUF of experts": Feature(gguf(family="qwen3_moe", intermediate=512)),
    "random weights": Feature(plain(), {"load_format": "dummy"}),
    "n-grams": Feature(plain(), {"speculative_config": NGRAM}),
    "the model's own head": Feature(with_mtp_head, {"speculative_config": MTP}),
    "8-bit KV": Feature(plain(), {"kv_cache_dtype": "int8"}, kv="layer by layer"),
    "recomputed": Feature(plain(), {"num_gpu_blocks": 12, "preemption_mode": "recompute"}),
    "swapped": Feature(plain("qwen3_5"), {"num_gpu_blocks": 12, "preemption_mode": "swap", "swap_space": 0.01}),
    "shared K and V": Feature(plain("gemma4", layers=6, num_kv_shared_layers=2, layer_types=KINDS * 3)),
    "inputs of layers": Feature(plain("gemma4", layers=6, hidden_size_per_layer_input=8)),
    "a mixture with a dense layer": Feature(plain("glm4_moe", layers=5), kv="layer by layer"),
}


@pytest.mark.parametrize(
    "name", fast_only(["bfloat16", "gptq-32-asymmetric", "GGUF of several types", "the model's own head"], FEATURES)
)
def test_bits_are_those_of_resident_weights_beside(name: str, tmp_path: Path) -> None:
    feature = FEATURES[name]
    path = feature.stored(tmp_path)
    arguments = {**KV[feature.kv], **feature.given, "dtype": feature.dtype}
    with LLM(path, **arguments) as llm:
        expected = answers(llm)
        drafts = llm.metrics().drafts
    for share, products in (("1%", False), ("80%", True)):
        with LLM(path, **{**arguments, "weights_memory_bytes": share, "host_products": products}) as llm:
            found = answers(llm)
            assert llm.metrics().drafts == drafts
            assert answers(llm) == expected, "from the prefix cache"
            preemptions = llm.metrics().preemptions
        assert found == expected, share
    assert (drafts.drafted_tokens > 0) == ("speculative_config" in feature.given)
    preempted = {"recomputed": preemptions.recomputed, "swapped": preemptions.swapped}
    assert preempted.get(name) != 0


@pytest.mark.parametrize("kv", fast_only(["layer by layer"], KV))
def test_adapters_are_of_layers_that_stream_too(kv: str, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", vocab=VOCAB, layers=4)
    adapter = make_adapter(tmp_path / "adapter", model)
    found = []
    for asked, products in ((None, False), ("1%", False), ("1%", True)):
        given = {**KV[kv], "weights_memory_bytes": asked, "host_products": products}
        with LLM(tmp_path / "model", dtype="float32", enable_lora=True, **given) as llm:
            users = [adapter if index % 2 else None for index in range(len(PROMPTS))]
            found.append(answers(llm, [GREEDY], lora_request=users))
    assert found[0] == found[1] == found[2]


RANKS = {"resident": RESIDENT, "offloaded": OFFLOADED}


@pytest.mark.slow
@pytest.mark.parametrize("kv", RANKS)
@pytest.mark.parametrize("family", FAMILIES | MIXTURES)
def test_ranks_stream_their_parts(family: str, kv: str, tmp_path: Path) -> None:
    """Of few rows the host of each rank multiplies with its parts, or its device has all that is chosen."""
    make_checkpoint(tmp_path, family, vocab=VOCAB, layers=5, **(FAMILIES | MIXTURES)[family])
    given = {"dtype": "float32", "tensor_parallel_size": 2, **RANKS[kv]}
    with kept_rank_processes():
        with LLM(tmp_path, **given) as llm:
            expected = answers(llm)
        budgets = [("1%", True), ("1%", False), ("80%", True)]
        if family in ("gpt_oss", *MIXTURES):
            budgets += [("25%", True), ("50%", False), ("100%", True)]
        for asked, host_products in budgets:
            own = {"weights_memory_bytes": asked, "host_products": host_products}
            with LLM(tmp_path, **{**given, **own}) as llm:
                assert answers(llm) == expected, own


def test_engines_of_one_process_stream_beside_each_other(model_dir: Path) -> None:
    with LLM(model_dir, dtype="float32", **OFFLOADED) as llm:
        expected = token_ids(llm, PROMPTS[0], greedy(9))
    engines = [LLM(model_dir, dtype="float32", weights_memory_bytes=share, **OFFLOADED) for share in ("1%", "75%")]
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


def test_a_trace_has_the_copies_of_weights(model_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with LLM(model_dir, dtype="float32", **RESIDENT) as llm:
        expected = token_ids(llm, PROMPTS, greedy(3))
    with LLM(model_dir, dtype="float32", trace=path, weights_memory_bytes="1%", **RESIDENT) as llm:
        assert token_ids(llm, PROMPTS, greedy(3)) == expected
        loaded = stream_of(llm).loaded_bytes
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    copied = [int(event["name"].split()[2]) for event in events if event["name"].startswith("h2d copy")]
    assert sum(copied) == loaded > 0
    assert any(event["name"] == "the products of a streamed layer" for event in events)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SmolLM2", "Gemma 3"])
def test_a_real_model_says_the_same_with_a_tenth_of_its_weights_and_kv(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or with its embedding and two slots, where that is more. Without the ordering check, which is slow with so much
    memory."""
    from nanovllm.apps.real_models import UnavailableError, gemma3
    from nanovllm.apps.real_models.reading import story

    try:
        path = request.getfixturevalue("smollm2_dir") if name == "SmolLM2" else gemma3.checkpoint()
    except UnavailableError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(build, "create_device", create_device)
    text = story(is_short=True)[:2500]
    params = replace(greedy(20), ignore_eos=False)
    given = {"max_model_len": 1000, "max_num_batched_tokens": 256, "kvcache_block_size": 16}
    few = {"weights_memory_bytes": "10%", "kv_cache_memory_bytes": "10%", "kv_offloading_size": "512M"}
    said = []
    for memory in ({"num_gpu_blocks": 500}, few):
        with LLM(path, **given, **memory) as llm:
            (output,) = llm.generate(text, params, use_tqdm=False)
            said.append(output.outputs[0].text)
    assert said[0] == said[1] and len(said[0]) > 20


# ---- the end of an engine


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("where", [{}, {"host_weights_bytes": "50%", "host_products": True}], ids=["host", "disk"])
def test_an_engine_that_is_closed_or_refused_keeps_no_weights(
    family: str, where: Mapping[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor the space of its file. Nothing waits for the garbage collector, which may come late."""
    monkeypatch.setattr(build, "create_device", create_device)
    make_checkpoint(tmp_path / "model", family, vocab=VOCAB, layers=4)
    files = {"weights_dir": tmp_path / "disk"} if where else {}
    given = {**RESIDENT, "dtype": "float32", "weights_memory_bytes": "1%", **where, **files}

    def kept() -> set[str]:
        return {type(found).__name__ for found in gc.get_objects() if isinstance(found, (WeightStream, HostLayers))}

    gc.collect()
    gc.disable()
    try:
        with LLM(tmp_path / "model", **given) as llm:
            token_ids(llm, PROMPTS, greedy(2))
            assert kept() == {"WeightStream"}
        del llm
        assert not kept()
        files_before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(ConfigError, match="num_gpu_blocks=1000000000: its KV cache takes"):
            LLM(tmp_path / "model", **{**given, "num_gpu_blocks": 10**9})
        assert not kept()
        assert len(os.listdir("/proc/self/fd")) == files_before
    finally:
        gc.enable()


# ---- what is copied


@pytest.mark.parametrize("num_streamed", [4, 6, 7])
def test_a_pass_copies_each_streamed_layer_once(model_dir: Path, num_streamed: int) -> None:
    sizes = weight_sizes(model_dir)
    plan = plan_weights(sizes, budget(sizes, num_streamed))
    given = {**RESIDENT, "enable_prefix_caching": False}
    with LLM(model_dir, dtype="float32", weights_memory_bytes=plan.device_bytes, **given) as llm:
        stream = stream_of(llm)
        token_ids(llm, PROMPTS[1], greedy(1))
        first = stream.loaded_bytes
        token_ids(llm, PROMPTS[0], greedy(6))  # three chunks and five tokens
        copied = stream.loaded_bytes - first
    assert copied % 8 == 0
    padding = num_streamed * SPAN_ALIGNMENT * 8  # tensors of a layer, at most
    assert plan.loaded_bytes(rows=1, experts=None) <= copied // 8 < plan.loaded_bytes(rows=1, experts=None) + padding
    assert copied // 8 <= first < 2 * copied // 8, "the first layers of the next pass are on the way"


@pytest.mark.parametrize("family", fast_only(["qwen3_moe"], ["qwen3_moe", "gpt_oss"]))
def test_a_token_copies_chosen_experts_that_the_cache_lacks(tmp_path: Path, family: str) -> None:
    name = {"qwen3_moe": "num_experts", "gpt_oss": "num_local_experts"}[family]
    make_checkpoint(tmp_path, family, vocab=VOCAB, layers=8, **{name: 16})
    given = {**RESIDENT, "enable_prefix_caching": False, "dtype": "float32"}
    params = replace(GREEDY, max_tokens=10)

    def answer(llm: LLM) -> Any:
        (output,) = llm.generate([PROMPTS[2]], params, use_tqdm=False)
        return output.outputs[0].token_ids, bits(output.outputs[0].logprobs or ())

    with LLM(tmp_path, **given) as llm:
        expected = answer(llm)
    least = plan_weights(weight_sizes(tmp_path), 0)
    says = rf"=1000: all but the experts, the slots .* cache of experts take .* to at least {least.device_bytes}$"
    with pytest.raises(ConfigError, match=says):
        LLM(tmp_path, weights_memory_bytes=1000, **given)
    assert (len(least.streamed), least.cached_experts) == (8, 4), "of two rows"
    copied = []
    for plan in (least, replace(least, cached_experts=32)):
        with LLM(tmp_path, weights_memory_bytes=plan.device_bytes, **given) as llm:
            stream = stream_of(llm)
            assert len(stream.streamed) == 8 and llm._runner.sizing.weights.cached_experts == plan.cached_experts
            assert answer(llm) == expected
            before = stream.loaded_bytes
            assert answer(llm) == expected
            copied.append(stream.loaded_bytes - before)
    tokens = 9 * 8 * 2 * least.expert_bytes
    assert copied[0] <= 2 * least.host_bytes + tokens, "with the prompt, and what was copied ahead of a pass"
    assert 0 < copied[1] < copied[0]


def test_a_prompt_goes_on_in_the_layer_in_which_a_token_has_ended(tmp_path: Path) -> None:
    """A step has one row of an answer, which chooses experts of the last layer, and then many rows in that layer."""
    make_checkpoint(tmp_path, "qwen3_moe", vocab=VOCAB, layers=3, experts=16)
    found = []
    for asked in (None, "1%"):
        with LLM(tmp_path, dtype="float32", weights_memory_bytes=asked, **OFFLOADED) as llm:
            layerwise = watch_layerwise(llm)
            llm.engine.add_request("answer", None, greedy(30), PROMPTS[2])
            for _ in range(3):
                llm.engine.step()
            llm.engine.add_request("prompt", None, greedy(3), [*PROMPTS[0], *PROMPTS[0]])
            outputs = []
            while llm.engine.has_unfinished_requests():
                outputs += [output for output in llm.engine.step() if output.finished]
            found.append({output.request_id: output.outputs[0].token_ids for output in outputs})
            parts = [part.layerwise for part in layerwise if part.layerwise is not None]
            assert any(part.first_layer_chunk >= 2 * part.layerwise.num_chunks for part in parts), "in the last layer"
    assert found[0] == found[1]


def test_layer_by_layer_a_prompt_copies_each_streamed_layer_once(model_dir: Path) -> None:
    given = {**OFFLOADED, "num_gpu_blocks": 4, "enable_prefix_caching": False, "weights_memory_bytes": "1%"}
    with LLM(model_dir, dtype="float32", **given) as llm:
        stream = stream_of(llm)
        token_ids(llm, PROMPTS[1], greedy(1))
        first = stream.loaded_bytes
        token_ids(llm, PROMPTS[1], greedy(1))
        one_pass = stream.loaded_bytes - first
        before = stream.loaded_bytes
        layerwise = watch_layerwise(llm)
        token_ids(llm, PROMPTS[0], greedy(1))
        assert len(layerwise) > 1 and len({part.layerwise.layerwise for part in layerwise if part.layerwise}) == 1
        assert stream.loaded_bytes - before == one_pass
        set_prefill(llm, "chunk-major")
        before = stream.loaded_bytes
        token_ids(llm, PROMPTS[0], greedy(1))
        assert stream.loaded_bytes - before == 3 * one_pass


# ---- loading


@pytest.mark.parametrize("stored", fast_only(["plain"], ["plain", "gptq-64", "experts"]))
def test_loading_takes_what_stays_and_one_layer(tmp_path: Path, stored: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one tensor of the checkpoint."""
    made = {"plain": plain(hidden=128, layers=9), "experts": plain("mixtral", hidden=128, layers=9)}
    path = made.get(stored, packed(stored))(tmp_path)
    sizes = weight_sizes(path)
    plan = plan_weights(sizes, 1)
    counted = DeviceBytes()
    empty_host = OrderingCheck.empty_host

    def host(device: OrderingCheck, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        memory = empty_host(device, name, shape, dtype)
        counted.hosts.add(memory.data_ptr())
        return memory

    monkeypatch.setattr(OrderingCheck, "empty_host", host)
    load = build.load_model

    def counting(*given: Any, **named: Any) -> Any:
        with counted:
            return load(*given, **named)

    monkeypatch.setattr(build, "load_model", counting)
    with LLM(path, dtype="float32", weights_memory_bytes="1%", **RESIDENT) as llm:
        assert len(stream_of(llm).streamed) == len(sizes.stored_bytes)
    stays = sizes.num_bytes - plan.host_bytes
    largest = max(tensor.nbytes for file in path.glob("*.safetensors") for tensor in load_file(file).values())
    most = stays + max(plan.slot_bytes * (1 + plan.num_slots), plan.slot_bytes + 3 * largest)
    assert stays + plan.slot_bytes <= counted.peak <= most + 64 * 1024
    assert most + 64 * 1024 < sizes.num_bytes + plan.slot_bytes


# ---- what is refused, and what fails


def test_too_few_bytes_are_refused_with_the_least_number(model_dir: Path) -> None:
    least = budget(weight_sizes(model_dir), LAYERS)
    with LLM(model_dir, dtype="float32", weights_memory_bytes=least, **RESIDENT) as llm:
        assert stream_of(llm).loaded_bytes == 0
    says = rf"weights_memory_bytes={least - 1}: embedding, norms and the slots .* raise it to at least {least}$"
    with pytest.raises(ConfigError, match=says):
        LLM(model_dir, dtype="float32", weights_memory_bytes=least - 1, **RESIDENT)


def test_a_share_below_the_least_gets_the_least_and_says_so(model_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), LLM(model_dir, dtype="float32", weights_memory_bytes="1%", **RESIDENT):
        pass
    (said,) = [record.getMessage() for record in caplog.records if "weights_memory_bytes" in record.getMessage()]
    assert said.startswith("weights_memory_bytes=1%: embedding, norms and the slots") and "more than the share" in said


def test_one_layer_does_not_stream(tmp_path: Path) -> None:
    """It would have one slot, in which it would stay."""
    make_checkpoint(tmp_path, vocab=VOCAB, layers=1)
    with LLM(tmp_path, dtype="float32", weights_memory_bytes="1%", **RESIDENT) as llm:
        assert llm._runner.model.layer_weights is None
    with pytest.raises(ConfigError, match="weights_memory_bytes=1000: a model of one layer does not stream, and its "):
        LLM(tmp_path, dtype="float32", weights_memory_bytes=1000, **RESIDENT)


@pytest.mark.parametrize("layer", [0, 4, LAYERS - 1])
def test_damaged_weights_of_a_layer_that_streams_are_named(tmp_path: Path, layer: int) -> None:
    make_checkpoint(tmp_path, vocab=VOCAB, hidden=32, intermediate=48, layers=LAYERS)
    name = f"model.layers.{layer}.mlp.down_proj.weight"
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[name][3, 2] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    with LLM(tmp_path, dtype="float32", weights_memory_bytes="1%", **RESIDENT) as llm:
        (output,) = llm.generate([PROMPTS[2]], greedy(3), use_tqdm=False)
        assert output.error is not None and f"the weights, in {name}: get the checkpoint anew" in output.error
        assert stream_of(llm).loaded_bytes > 0
        (output,) = llm.generate([PROMPTS[2]], greedy(3), use_tqdm=False)
        assert output.error is not None and name in output.error


@pytest.mark.parametrize("fails_at", [1, 2, 9, 12])
def test_a_failing_copy_ends_the_running_requests_and_not_the_engine(
    model_dir: Path, fails_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fails_at: the copy that fails. In a pass there are seven, and all copies are of weights."""
    with LLM(model_dir, dtype="float32", weights_memory_bytes="1%", **RESIDENT) as llm:
        expected = token_ids(llm, PROMPTS, greedy(5))
        copies = count(1)
        copy_pitched = cpu.copy_pitched

        def broken(*given: Any, **named: Any) -> None:
            if next(copies) == fails_at:
                raise OSError("the link is down")
            copy_pitched(*given, **named)

        monkeypatch.setattr(cpu, "copy_pitched", broken)
        with pytest.raises(EngineError, match="the link is down"):
            llm.generate(PROMPTS, greedy(5), use_tqdm=False)
        assert not llm.engine.has_unfinished_requests()
        assert llm.engine.scheduler.block_manager.pool.num_used == 0
        assert token_ids(llm, PROMPTS, greedy(5)) == expected


@pytest.fixture(scope="module")
def mixture_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plain("qwen3_moe", experts=16)(tmp_path_factory.mktemp("mixture"))


@pytest.mark.parametrize("layer", [0, 2])
def test_a_token_that_fails_after_experts_are_chosen_leaves_the_engine_usable(mixture_dir: Path, layer: int) -> None:
    """The next pass is a prompt, which needs all experts of the first layer."""
    with LLM(mixture_dir, dtype="float32", weights_memory_bytes="1%", **RESIDENT) as llm:
        expected = token_ids(llm, PROMPTS, greedy(5))
        kv_cache = llm._runner.kv_cache  # type: ignore[union-attr]
        attend = kv_cache.attend
        calls = count()

        def fail(*given: Any, **named: Any) -> Tensor:
            if next(calls) == 2 * 4 + layer:  # in the second token: the first has layers of which the prompt left all
                raise RuntimeError("a failure in the middle of a step")
            return attend(*given, **named)

        kv_cache.attend = fail  # type: ignore[method-assign]
        with pytest.raises(EngineError, match="a failure in the middle of a step"):
            token_ids(llm, PROMPTS[2], greedy(5))
        assert token_ids(llm, PROMPTS, greedy(5)) == expected


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_after_an_interrupt_no_part_of_a_copy_is_taken_for_a_whole(tmp_path: Path, family: str) -> None:
    make_checkpoint(tmp_path, family, vocab=VOCAB, layers=3, experts=16)
    prompt = [PROMPTS[2][:1]]  # whose one row chooses experts
    given = {**RESIDENT, "enable_prefix_caching": False, "weights_memory_bytes": "1%"}
    with LLM(tmp_path, dtype="float32", **given) as llm:
        interrupt_each_copy(llm, prompt, greedy(5), range(1, 6))


def test_an_engine_is_closed_while_weights_are_copied(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layer of a pass that never comes is on the way when the engine is closed."""
    asked = budget(weight_sizes(model_dir), LAYERS - 1)
    others = set(threading.enumerate())
    llm = LLM(model_dir, dtype="float32", weights_memory_bytes=asked, **RESIDENT)
    started = threading.Event()
    goes_on = threading.Event()
    copies = count(1)
    copy_pitched = cpu.copy_pitched
    close = cpu.WorkerStream.close

    def slow(*given: Any, **named: Any) -> None:
        if next(copies) >= LAYERS:
            started.set()
            goes_on.wait()
        copy_pitched(*given, **named)

    def closing(stream: cpu.WorkerStream) -> None:
        goes_on.set()
        close(stream)

    monkeypatch.setattr(cpu, "copy_pitched", slow)
    monkeypatch.setattr(cpu.WorkerStream, "close", closing)
    token_ids(llm, PROMPTS[2], greedy(1))
    started.wait()
    llm.close()
    assert not any(thread.name == "weight-loads" for thread in {*threading.enumerate()} - others)


# ---- any budget, batch, abort and preemption


@given(data=st.data())
@settings(max_examples=3 * TIMES)
def test_random_engines_answer_as_with_resident_weights(model_dir: Path, data: st.DataObject) -> None:
    draw = data.draw
    seed = draw(st.integers(0, 2**20), "seed")
    given = {
        "kvcache_block_size": BLOCK,
        "max_model_len": 120,
        "max_num_batched_tokens": draw(st.sampled_from([16, 45, 200]), "tokens of a step"),
        "max_num_seqs": draw(st.sampled_from([2, 8]), "sequences"),
        "enable_prefix_caching": draw(st.booleans(), "prefix cache"),
        "preemption_mode": draw(st.sampled_from(["swap", "recompute"]), "preemption"),
        "swap_space": 0.01,
        "num_gpu_blocks": draw(st.sampled_from([9, 14, 40]), "blocks of the device"),
        "host_products": draw(st.booleans(), "products on the host"),
    }
    if draw(st.booleans(), "offload"):
        given |= {"enable_cpu_offload": True, "num_gpu_blocks": 4, "num_cpu_blocks": draw(st.sampled_from([10, 40]))}
    sizes = weight_sizes(model_dir)
    asked = draw(st.integers(budget(sizes, LAYERS), sizes.num_bytes), "weights_memory_bytes")
    with LLM(model_dir, dtype="float32", **given) as llm:
        expected = random_answers(llm, Random(seed), aborts=False)
    with LLM(model_dir, dtype="float32", weights_memory_bytes=asked, **given) as llm:
        found = random_answers(llm, Random(seed), aborts=True)
    for name, (is_whole, sequences) in found.items():
        for mine, others in zip(sequences, expected[name][1], strict=True):
            assert mine == others if is_whole else others[: len(mine)] == mine


def random_answers(llm: LLM, random: Random, *, aborts: bool) -> dict[str, tuple[bool, list[list[Any]]]]:
    """What requests answer that come at random times, and some of which are aborted.

    By request: whether it was left alone, and of each of its sequences the tokens with their log-probabilities.
    """
    found: dict[str, tuple[bool, list[list[Any]]]] = {}

    def step() -> None:
        for output in llm.engine.step():
            sequences = [
                [(token, sorted(bits([row]))) for token, row in zip(one.token_ids, one.logprobs or (), strict=True)]
                for one in output.outputs
            ]
            found[output.request_id] = (True, sequences)

    for index in range(random.randrange(2, 12)):
        prompt = random_prompt(random.choice([3, 17, 64, 90]), VOCAB, seed=index % 3)
        params = replace(random.choice(PARAMS), prompt_logprobs=None, logprobs=2, max_tokens=random.randrange(1, 12))
        llm.engine.add_request(str(index), None, params, prompt)
        for _ in range(random.randrange(4)):
            step()
        unlucky = str(random.randrange(index + 1))
        if random.random() < 0.3 and aborts:
            llm.engine.abort_request(unlucky)
            if unlucky in found:
                found[unlucky] = (False, found[unlucky][1])
    while llm.engine.has_unfinished_requests():
        step()
    return found
