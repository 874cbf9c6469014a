"""--preset: what it sets, what overrides it, and where it is refused."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from benchmark_helpers import main_of, make_config, make_scripts_small, report_of

from nanovllm.config import EngineConfig
from nanovllm.engine.block_manager import WATERMARK
from nanovllm.kvcache.budget import DeviceSplit
from nanovllm.kvcache.layout import KVLayout
from nanovllm.kvcache.sizing import MemoryFacts, plan_kv_cache

SCRIPTS = ("bench", "bench_offload", "bench_vllm")


@pytest.fixture(autouse=True)
def scripts_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    make_scripts_small(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def parse(monkeypatch: pytest.MonkeyPatch) -> Callable[..., argparse.Namespace]:
    """The arguments of a script, on a machine with CUDA."""

    def parsed(script: str, *options: str) -> argparse.Namespace:
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda: True)
            args: argparse.Namespace = importlib.import_module(script).parse_args(list(options))
        return args

    return parsed


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_preset_sets_what_is_not_said(script: str, parse: Callable[..., argparse.Namespace]) -> None:
    args = parse(script, "--preset", "h200")
    assert args.model == "llama-3.1-8b" and args.num_layers is None and args.prompt_len == [32768, 130048]
    assert args.max_num_batched_tokens == 16384
    said = parse(script, "--prompt-len", "2048", "--preset", "h200", "--num-layers", "4", "--repeats", "1")
    assert said.prompt_len == [2048] and said.num_layers == 4 and said.repeats == 1
    assert said.model == args.model and said.output_len == args.output_len
    assert parse(script).model == "qwen3-0.6b", "no preset, no change"


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_says_what_it_sets(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main_of(script)(["--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert stopped.value.code == 0 and "--model llama-3.1-8b --num-layers all --prompt-len 32768 130048" in told


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("overridden", [[], ["--device", "cpu", "--prompt-len", "64"], ["--model", "qwen3-0.6b"]])
def test_without_cuda_a_sentence_says_what_to_override(
    script: str, overridden: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    if script == "bench_vllm" and "--device" in overridden:
        overridden = overridden[2:]  # the device is vLLM's
    with pytest.raises(SystemExit) as stopped:
        main_of(script)(["--preset", "h200", *overridden])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and error.count("\n") == 1 and "--preset h200 needs a CUDA device" in error
    assert ("--model llama-3.1-8b" in error) == ("--model" not in overridden)
    assert ("--prompt-len 32768" in error) == ("--prompt-len" not in overridden)


def test_with_everything_overridden_it_runs_without_cuda(tmp_path: Path) -> None:
    options = ["--preset", "h200", "--device", "cpu", "--prompt-len", "40", "--output-len", "2", "--repeats", "1"]
    report = report_of("bench", make_config(tmp_path / "tiny"), *options, "--block-size", "16", "--warmup", "0")
    assert report["arguments"]["max_num_batched_tokens"] == 16384 and report["arguments"]["preset"] == "h200"


def test_the_gpu_check_runs_the_same_work(parse: Callable[..., argparse.Namespace]) -> None:
    check = importlib.import_module("benchmarks.gpu_check")
    for script in ("bench", "bench_offload"):
        for part in check.PARTS:
            if part.command[0] == f"{script}.py":
                args, full = parse(script, *part.command[1:]), parse(script, "--preset", "h200")
                for name in ("model", "num_layers", "device", "block_size", "max_num_batched_tokens"):
                    assert getattr(args, name) == getattr(full, name), f"{part.name}: {name}"


def test_every_preset_prompt_fits_its_model_and_its_device_share() -> None:
    presets, work = importlib.import_module("benchmarks.presets"), importlib.import_module("benchmarks.engine").Work
    settings = dict(presets.OFFLOAD)
    shares = len(importlib.import_module("benchmarks.offload").SHARES) + 2  # and the automatic one, and on the device
    by_share = 1 + settings["decode_steps"] * shares * (settings["repeats"] + 1)
    with importlib.import_module("benchmarks.shapes").open_shape(settings["model"], None, "auto") as shape:
        args = argparse.Namespace(seed=0, **settings)
        for prompt_len in settings["prompt_len"]:
            placed = work.of(shape, args, prompt_len, settings["output_len"]).offloaded(settings["device_share"])
            assert placed["num_gpu_blocks"] >= 4 and placed["num_cpu_blocks"] > 0
            assert prompt_len + max(settings["output_len"], by_share) <= shape.spec.max_position_embeddings


def test_blocks_of_4096_go_at_32k_with_an_eighth_on_the_device() -> None:
    """Which is the ring alone: nine blocks hold the sequence, and an eighth of them is one."""
    presets, work = importlib.import_module("benchmarks.presets"), importlib.import_module("benchmarks.engine").Work
    with importlib.import_module("benchmarks.shapes").open_shape("llama-3.1-8b", None, "auto") as shape:
        args = argparse.Namespace(seed=0, **{**presets.OFFLOAD, "block_size": 4096})
        placed = work.of(shape, args, presets.PROMPT_32K, 33).offloaded(Fraction(1, 8))
        assert (placed["num_gpu_blocks"], placed["num_cpu_blocks"]) == (1, 9)
        layout = KVLayout(32, 8, 128, 4096, 2)
    config = EngineConfig(model=".", kvcache_block_size=4096, swap_space=0, max_num_seqs=1, **placed)
    facts = MemoryFacts(80 << 30, 60 << 30, 100 << 30, tiers_share_memory=False, activation_peak=0)
    plan = plan_kv_cache(config, layout, 131072, facts, WATERMARK)
    assert plan.split == DeviceSplit(ring_slots=16, resident_blocks=0)
    assert plan.split.group_slots(layout.block_layer_bytes) == 4 and plan.max_model_len >= presets.PROMPT_32K + 33


# ---- weights of a checkpoint


def test_a_checkpoint_is_measured_with_its_own_weights(tmp_path: Path) -> None:
    from checkpoints import make_checkpoint

    make_checkpoint(tmp_path / "model", vocab=97, hidden=32, intermediate=32)
    options = ["--prompt-len", "20", "--output-len", "2", "--repeats", "1", "--warmup", "0", "--block-size", "16"]
    shapes = importlib.import_module("benchmarks.shapes")
    with shapes.open_shape(str(tmp_path / "model"), None, "auto", "auto") as shape:
        assert shape.path == tmp_path / "model" and shape.facts()["load_format"] == "auto"
    report = report_of("bench", tmp_path / "model", *options, "--load-format", "auto")
    assert report["model"]["name"] == "model"


@pytest.mark.parametrize(
    ("script", "options", "told"),
    [
        ("bench", ["--num-layers", "1"], "--num-layers all"),
        ("bench_offload", [], "--num-layers all"),
        ("bench", ["--model", "qwen3-0.6b"], "needs the directory of a checkpoint"),
        ("bench", [], "no model.safetensors"),
    ],
)
def test_what_is_no_whole_checkpoint_is_refused(
    script: str, options: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_config(tmp_path / "tiny")
    assert main_of(script)(["--model", str(model), "--load-format", "auto", "--prompt-len", "20", *options]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and told in error
