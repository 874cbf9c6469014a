"""Engines on the emulated GPU have the tokens of the CPU, whatever the order in which its streams happen to run."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import emulated_gpu
import pytest
import torch
from checkpoints import make_checkpoint
from emulated_engines import CASES, CHECKPOINT, Model, Tokens
from engines import PREFILL_WAYS, greedy, logits_by_request, random_prompt, set_prefill

from nanovllm import LLM
from nanovllm.errors import EngineError
from nanovllm.ops.prefill_libraries import VARIABLE

LONGEST = {"copies": 3000, "kernels": 100, "host_tasks": 3000, "events": 300}  # delays, in microseconds
SEEDS = (1, 2, 3)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Model, Tokens]]:
    """A case's model and the CPU's tokens, made once."""

    @cache
    def prepare(name: str) -> tuple[Model, Tokens]:
        model = Model(CASES[name], tmp_path_factory.mktemp("case"))
        with model.engine("cpu") as llm:
            return model, model.generate(llm)

    return prepare


@pytest.mark.parametrize("seed", [None, *SEEDS])
@pytest.mark.parametrize("name", CASES)
def test_tokens_are_those_of_the_cpu(
    name: str, seed: int | None, prepared: Callable[[str], tuple[Model, Tokens]]
) -> None:
    """Without delays, and with random ones."""
    model, tokens = prepared(name)
    with (
        nullcontext() if seed is None else emulated_gpu.delays(seed, **LONGEST),
        model.engine("cuda") as llm,
        emulated_gpu.default_stream_watched() as on_default,
    ):
        assert llm._runner.device.name == "cuda"  # type: ignore[union-attr]
        is_eager = llm._runner.passes[0].decode_runner is None  # type: ignore[union-attr]
        assert is_eager == bool(model.case.arguments.get("enforce_eager")), "recording failed: see the log"
        assert model.generate(llm) == tokens
        assert CASES[name].happened(llm)
    assert not on_default, on_default[0]
    gc.collect()


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "weights_memory_bytes" in case.arguments])
def test_tokens_are_those_of_weights_that_stay(name: str, prepared: Callable[[str], tuple[Model, Tokens]]) -> None:
    model, tokens = prepared(name)
    with model.engine("cuda", weights_memory_bytes=None, host_weights_bytes=None, weights_dir=None) as llm:
        assert llm._runner.model.layer_weights is None  # type: ignore[union-attr]
        assert model.generate(llm) == tokens


@pytest.mark.parametrize("seed", [None, *SEEDS])
@pytest.mark.parametrize("name", ["resident, graphs", "offloaded", "recurrent states", "int8 KV"])
def test_kv_on_disk(name: str, seed: int | None, tmp_path: Path) -> None:
    """Written by one engine, and read by the next beside a request that runs: the tokens of the CPU."""
    case = CASES[name]
    model = Model(replace(case, model={**CHECKPOINT, **case.model, "max_positions": 1024}), tmp_path)
    prompts = [random_prompt(length, 256, length) for length in (600, 20, 300)]
    sizes = {"max_model_len": 700, "num_cpu_blocks" if name == "offloaded" else "num_gpu_blocks": 90}

    def tokens_of(device: str, **others: Any) -> tuple[Tokens, int]:
        with model.engine(device, **sizes, **others) as llm, emulated_gpu.default_stream_watched() as on_default:
            found = llm.generate(prompts, greedy(6), use_tqdm=False)
            stored = llm.metrics().prefix_cache.hit_tokens_on_disk
        assert not on_default, on_default[0]
        return [[each.token_ids for each in output.outputs] for output in found], stored

    expected, _ = tokens_of("cpu")
    with nullcontext() if seed is None else emulated_gpu.delays(seed, **LONGEST):
        for stored in (0, 512 + 256):
            assert tokens_of("cuda", kv_cache_dir=tmp_path / "kv") == (expected, stored)


@pytest.mark.parametrize("seed", [None, SEEDS[0]])
def test_prefill_through_cudnn_has_the_same_logits_for_every_budget(
    seed: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Segments of two blocks, resident, through the ring and from the layer buffer."""
    monkeypatch.setenv(VARIABLE, "cudnn:32")
    make_checkpoint(tmp_path, vocab=97, dtype="bfloat16", head_dim=64, layers=2)
    sizes = {"device": "cuda", "max_num_batched_tokens": 72, "max_model_len": 200, "kvcache_block_size": 16}
    few = {"enable_cpu_offload": True, "num_gpu_blocks": 4, "num_cpu_blocks": 40, "cpu_attention": False}
    found = []
    with nullcontext() if seed is None else emulated_gpu.delays(seed, **LONGEST):
        for way, budget in ((None, {"num_gpu_blocks": 40}), *((way, few) for way in PREFILL_WAYS)):
            with LLM(tmp_path, **sizes, **budget) as llm:
                if way is not None:
                    set_prefill(llm, way)
                assert "cuDNN on segments of 32 tokens" in llm._runner.kv_cache.backend.name  # type: ignore[union-attr]
                found.append(torch.stack([*logits_by_request(llm, [random_prompt(151, 97, 4)], 3).values()]))
    assert torch.isfinite(found[0]).all() and all(torch.equal(logits, found[0]) for logits in found)


# ---- what happens to an engine


@pytest.fixture
def offloaded_model(prepared: Callable[[str], tuple[Model, Tokens]]) -> tuple[Model, Tokens]:
    return prepared("offloaded")


def test_engines_one_after_the_other_and_two_at_once(offloaded_model: tuple[Model, Tokens]) -> None:
    """With more streams in all than torch's 32."""
    model, tokens = offloaded_model
    for _ in range(5):
        with model.engine("cuda") as llm:
            assert model.generate(llm) == tokens
    with model.engine("cuda") as first, model.engine("cuda") as second:
        assert model.generate(first) == model.generate(second) == tokens == model.generate(first)


def test_an_aborted_request_changes_no_other(offloaded_model: tuple[Model, Tokens]) -> None:
    """Its stores may be under way, and its blocks are used again at once."""
    model, tokens = offloaded_model
    with emulated_gpu.delays(1, copies=5000, kernels=50), model.engine("cuda") as llm:
        for steps in (1, 2, 4):
            llm.engine.add_request(str(steps), None, greedy(20), random_prompt(60, 256, steps))
            for _ in range(steps):
                llm.engine.step()
            llm.engine.abort_request(str(steps))
            assert model.generate(llm) == tokens


def failing(llm: LLM, call: int) -> Callable[[], None]:
    """The model's attention fails once, at this call. Returns what makes it well again."""
    kv_cache = llm._runner.kv_cache  # type: ignore[union-attr]
    attend = kv_cache.attend
    count = [0]

    def fail(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        if count[0] == call:
            raise RuntimeError("a failure in the middle of a step")
        return attend(*args, **kwargs)

    kv_cache.attend = fail
    return lambda: setattr(kv_cache, "attend", attend)


# Of the engine with chosen experts the second token, in the first layer and a later one.
@pytest.mark.parametrize(
    ("name", "call"), [*(("offloaded", call) for call in (1, 4, 6)), ("chosen experts", 13), ("chosen experts", 15)]
)
def test_a_step_that_fails_leaves_the_engine_usable(
    prepared: Callable[[str], tuple[Model, Tokens]], name: str, call: int
) -> None:
    model, tokens = prepared(name)
    with emulated_gpu.delays(2, copies=5000), model.engine("cuda", enforce_eager=True) as llm:
        mend = failing(llm, call)
        with pytest.raises(EngineError, match="a failure in the middle of a step"):
            llm.generate([random_prompt(60, 256, 9)], greedy(4), use_tqdm=False)
        mend()
        assert model.generate(llm) == tokens


def test_a_trace_names_steps_and_kernels(offloaded_model: tuple[Model, Tokens], tmp_path: Path) -> None:
    model, tokens = offloaded_model
    with model.engine("cuda", trace=tmp_path / "trace.json") as llm:
        assert model.generate(llm) == tokens
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {"step", "attend"} <= {event["name"] for event in events if event["ph"] == "X"}
