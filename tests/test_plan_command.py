"""`nanovllm plan` from the command line, and the measurement of this machine's rates."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from engines import offloaded
from plans import parameter_bytes

import nanovllm
from benchmarks.transfers import predict_request
from nanovllm import LLM
from nanovllm.apps.cli.arguments import engine_arguments
from nanovllm.apps.cli.main import _parse, main
from nanovllm.config import engine_config
from nanovllm.device import create_device
from nanovllm.features.planner import measure
from nanovllm.features.planner.measure import Probe, ProbeSizes, link_during_computation, measure_rates, random_model
from nanovllm.features.planner.predict import Link, Rates
from nanovllm.features.planner.units import show_seconds
from nanovllm.memory.layerwise import LayerwiseMemory, prefill_steps
from nanovllm.memory.layout import KVLayout
from nanovllm.models.hf_config import load_decoder_spec, read_decoder_spec
from nanovllm.ops import select_cpu_backend

CONFIGS = Path(nanovllm.__file__).parent / "apps" / "planner" / "configs"
QWEN_1M = ["--model", str(CONFIGS / "qwen2.5-7b-1m.json"), "--prompt-len", "1000000"]
GIVEN = ["--gpu-mem", "48GB", "--host-mem", "256GB", "--link", "50GB/s"]
SPEEDS = ["--compute", "400TFLOPS", "--device-bandwidth", "3TB/s"]
SMALL = ProbeSizes(weight_bytes=1 << 16, kv_bytes=1 << 16, keys=128, rounds=2, seconds=0.01)


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path, vocab=97, layers=3)
    (tmp_path / "model.safetensors").unlink()  # the config is enough
    return tmp_path


def run_json(capsys: pytest.CaptureFixture[str], *options: str, status: int = 0) -> dict[str, Any]:
    assert main(["plan", "--json", *options]) == status
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


# ---- a machine that is not here


TRANSFER_KEYS = {"h2d_copies", "h2d_bytes", "d2h_copies", "d2h_bytes", "cpu_attention_blocks", "cpu_attention_bytes"}
PHASE_KEYS = {"seconds", "tokens_per_second", "limit", "seconds_by_resource", "rates_not_known", "transfers"}


def test_the_json_has_these_parts(capsys: pytest.CaptureFixture[str]) -> None:
    """Programs read it: keys are added, never renamed."""
    report = run_json(capsys, *QWEN_1M, *GIVEN, *SPEEDS)
    assert set(report) == {
        "model", "memory", "rates", "engine", "kv_cache", "longest_prompt", "chunk_that_hides_the_link", "prompt_len",
        "fits", "in_the_way", "as_if", "changes_that_fit", "request",
    }  # fmt: skip
    assert set(report["kv_cache"]) == {
        "resident_blocks", "ring_slots", "host_blocks", "device_bytes", "host_bytes", "device_tokens", "cache_tokens",
        "layer_buffer_blocks", "max_span_tokens", "working_bytes",
    }  # fmt: skip
    assert set(report["request"]) == {
        "output_len", "num_blocks", "kv_bytes", "resident_bytes", "streamed_bytes", "prefill", "decode",
        "most_kv_bytes", "layer_by_layer_tokens", "cpu_attention", "drafts", "restore_from_disk",
    }  # fmt: skip
    for phase in ("prefill", "decode"):
        assert set(report["request"][phase]) == PHASE_KEYS
        assert set(report["request"][phase]["transfers"]) == TRANSFER_KEYS
    assert set(report["rates"]) == {field.name for field in fields(Rates)}


def test_decode_with_drafts_is_planned(capsys: pytest.CaptureFixture[str], model_dir: Path) -> None:
    def planned(**config: Any) -> dict[str, Any]:
        fields = {"num_speculative_tokens": 4, **config}
        options = ["--speculative-config", json.dumps(fields), "--acceptance", "0.5"]
        return run_json(capsys, *QWEN_1M, *GIVEN, *SPEEDS, *options)

    ngram = planned(method="ngram")
    model = planned(method="draft_model", model=str(model_dir))
    drafts = ngram["request"]["drafts"]
    decode = ngram["request"]["decode"]
    assert drafts["tokens_in_a_pass"] == 1 + 0.5 + 0.25 + 0.125 + 0.0625
    assert decode["seconds"] <= drafts["seconds"] < 1.1 * decode["seconds"], "what is streamed is read once"
    assert model["request"]["drafts"]["seconds"] > drafts["seconds"]
    assert ngram["engine"]["speculative_config"] == {"num_speculative_tokens": 4, "method": "ngram"}
    assert model["memory"]["device_free"] < ngram["memory"]["device_free"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["qwen3-8b"], "method='mtp': of a Qwen3ForCausalLM no head for multi-token prediction is read"),
        (["qwen3.5-0.8b", "--tensor-parallel-size", "2"], "method='mtp' is not supported with tensor_parallel_size=2"),
    ],
)
def test_drafts_that_an_engine_refuses_are_not_planned(
    capsys: pytest.CaptureFixture[str], options: list[str], sentence: str
) -> None:
    config = '{"method": "mtp", "num_speculative_tokens": 2}'
    assert main(["plan", "--model", *options, *GIVEN, "--speculative-config", config]) == 2
    assert sentence in capsys.readouterr().err


def test_a_million_tokens_of_a_published_model(capsys: pytest.CaptureFixture[str]) -> None:
    """By hand: 28 layers of 4 KV heads of 128, K and V, 2 bytes each: 57,344 bytes a token."""
    report = run_json(capsys, *QWEN_1M, *GIVEN, *SPEEDS, "--output-len", "11")
    assert report["model"]["kv_bytes_per_token"] == 57_344
    assert report["model"]["weight_bytes"] == pytest.approx(15.23e9, rel=1e-3)
    cache = report["kv_cache"]
    request = report["request"]
    assert report["engine"]["enable_cpu_offload"] and report["engine"]["kvcache_block_size"] == 512
    budget = int(48e9 * 0.9) - report["model"]["weight_bytes"] - report["memory"]["activation_peak"]
    block_bytes = 512 * 57_344
    # An eighth for layer-by-layer prefill: one layer of all blocks, and 3584 hidden values and an id per token.
    layerwise_memory = LayerwiseMemory(cache["layer_buffer_blocks"], cache["max_span_tokens"])
    layerwise_bytes = layerwise_memory.buffer_blocks * block_bytes // 28 + layerwise_memory.max_tokens * (2 * 3584 + 8)
    assert layerwise_memory.buffer_blocks >= 1_000_000 // 512 and 0.99 * budget < 8 * layerwise_bytes <= budget
    assert cache["working_bytes"] == report["memory"]["activation_peak"] + layerwise_bytes
    budget -= layerwise_bytes
    assert report["engine"]["num_gpu_blocks"] == budget // block_bytes == cache["resident_blocks"] + 1
    assert cache["device_bytes"] == cache["resident_blocks"] * block_bytes + cache["ring_slots"] * block_bytes // 28
    assert request["kv_bytes"] == 1_000_010 * 57_344
    assert request["resident_bytes"] == cache["resident_blocks"] * block_bytes
    layout = KVLayout(28, 4, 128, 512, 2)
    steps = prefill_steps(512, cache["resident_blocks"], 1_000_000, 16_384, layerwise_memory)
    moved = predict_request(layout, cache["resident_blocks"], 1_000_000, 1, 16_384, prefill=steps)
    assert 1_000_000 - 98 * 4096 < request["layer_by_layer_tokens"] < 1_000_000, "what stays costs nothing anyway"
    assert 5 * moved.h2d_bytes < predict_request(layout, cache["resident_blocks"], 1_000_000, 1, 16_384).h2d_bytes
    assert request["prefill"]["transfers"] == {name: getattr(moved, name) for name in TRANSFER_KEYS}
    assert request["prefill"]["limit"] == "compute" and request["decode"]["limit"] == "link"
    # Each token loads what does not stay, and nothing is known that would make it wait longer.
    streamed = 1_000_005 * 57_344 - request["resident_bytes"]
    assert request["decode"]["seconds"] == pytest.approx(streamed / 50e9, rel=0.02)


def test_reading_a_prompt_from_disk(capsys: pytest.CaptureFixture[str]) -> None:
    """By hand: all whole units of 256 tokens but the last token's, at the rate of the disk."""
    report = run_json(capsys, *QWEN_1M, *GIVEN, *SPEEDS, "--disk-bandwidth", "2GB/s")["request"]
    restore = report["restore_from_disk"]
    size = 999_999 // 256 * 256 * 57_344
    assert restore == {
        "bytes": size,
        "seconds": pytest.approx(size / 2e9),
        "faster_than_prefill_from_bytes_per_second": pytest.approx(size / report["prefill"]["seconds"]),
    }
    assert main(["plan", *QWEN_1M, *GIVEN, *SPEEDS]) == 0 and "from disk" not in capsys.readouterr().out
    assert main(["plan", *QWEN_1M, *GIVEN, *SPEEDS, "--disk-bandwidth", "2GB/s"]) == 0
    assert "28.67 s   instead of the prefill, where kv_cache_dir has the prompt: 57.3 GB" in capsys.readouterr().out


def test_the_cpu_takes_its_share_where_its_rate_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    """By hand: the link's 50 GB/s and the CPU's 100 GB/s part what is on the host as one to two, all but."""
    alone = run_json(capsys, *QWEN_1M, *GIVEN, *SPEEDS)
    assert alone["request"]["cpu_attention"] == {"bytes_per_decode_step": None, "rates_not_known": ["host_bandwidth"]}
    shared = run_json(capsys, *QWEN_1M, *GIVEN, *SPEEDS, "--host-bandwidth", "100GB/s")
    decode = shared["request"]["decode"]
    cpu_attention_bytes = shared["request"]["cpu_attention"]["bytes_per_decode_step"]
    assert cpu_attention_bytes == pytest.approx(2 / 3 * alone["request"]["streamed_bytes"], rel=0.03)
    assert decode["transfers"]["cpu_attention_bytes"] == pytest.approx(127 * cpu_attention_bytes)
    assert decode["seconds"] == pytest.approx(alone["request"]["decode"]["seconds"] / 3, rel=0.05)
    assert decode["seconds_by_resource"]["host memory bandwidth"] == pytest.approx(cpu_attention_bytes / 100e9)
    assert shared["request"]["prefill"] == alone["request"]["prefill"], "its chunks are long"
    streamed = run_json(capsys, *QWEN_1M, *GIVEN, *SPEEDS, "--host-bandwidth", "100GB/s", "--no-cpu-attention")
    assert streamed["request"]["decode"] == alone["request"]["decode"]
    assert not streamed["engine"]["cpu_attention"] and shared["engine"]["cpu_attention"]
    assert streamed["request"]["cpu_attention"] == {"bytes_per_decode_step": 0, "rates_not_known": []}


def test_offload_is_planned_where_it_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    model = ["--model", str(CONFIGS / "qwen3-8b.json"), "--gpu-mem", "24GB"]
    short = run_json(capsys, *model, "--host-mem", "64GB", "--prompt-len", "4000")
    long = run_json(capsys, *model, "--host-mem", "64GB", "--prompt-len", "40000")
    assert (short["engine"]["enable_cpu_offload"], long["engine"]["enable_cpu_offload"]) == (False, True)
    assert long["fits"] and long["request"]["streamed_bytes"] > 0
    forbidden = run_json(
        capsys, *model, "--host-mem", "64GB", "--prompt-len", "40000", "--no-enable-cpu-offload", status=1
    )
    assert not forbidden["fits"] and {"enable_cpu_offload": True} in forbidden["changes_that_fit"]
    assert forbidden["request"] == long["request"] and forbidden["as_if"] == ["with enable_cpu_offload=True"]
    alone = run_json(capsys, *model, "--prompt-len", "40000", status=1)
    assert not alone["fits"] and alone["as_if"] == ["with 3 GB of host memory"]
    (obstacle,) = alone["in_the_way"]
    assert obstacle["remedies"][0]["machine"] == "--enable-cpu-offload --host-mem 3GB"
    assert alone["request"]["prefill"] == long["request"]["prefill"] and alone["engine"]["enable_cpu_offload"]


def test_the_longest_prompt_is_planned_where_none_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    model = ["--model", str(CONFIGS / "qwen3-0.6b.json")]
    report = run_json(capsys, *model, "--host-mem", "16GB", "--gpu-mem", "5GB")
    assert report["prompt_len"] == report["longest_prompt"]["tokens"] == 40_960
    assert report["longest_prompt"]["limit"] == "positions" and report["engine"]["enable_cpu_offload"]
    assert report["request"]["output_len"] == 1, "the longest sequence ends there"
    main(["plan", *model, "--host-mem", "16GB", "--gpu-mem", "5GB", "--gpu", "RTX 4090"])
    page = capsys.readouterr().out
    assert "1 token of output instead of 128, since no longer sequence fits" in page
    copied = re.findall("copying .*", page)[-1]
    assert copied.startswith("copying 2.4 GB in and 114.7 KB out"), "a step of decode moves what is on the host"
    small = run_json(capsys, *model, "--gpu-mem", "4GB")
    assert small["longest_prompt"]["limit"] == "KV memory" and not small["engine"]["enable_cpu_offload"]


# ---- by name, with what is in the way, and the command to run

QWEN_YARN = {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}}


def test_times_are_in_a_unit_that_is_read_easily() -> None:
    assert [show_seconds(seconds) for seconds in (0.0015, 1, 120, 35_160)] == ["1.50 ms", "1.00 s", "2.0 min", "9.8 h"]


def test_every_obstacle_is_named_with_its_flags(capsys: pytest.CaptureFixture[str]) -> None:
    """The positions, a limit and the memory; the flags together make the prompt fit."""
    options = ["--model", "qwen3-8b", "--prompt-len", "128k", "--gpu-mem", "24G", "--host-mem", "64"]
    assert main(["plan", *options, "--max-model-len", "9000", "--num-gpu-blocks", "40", "--num-cpu-blocks", "9"]) == 1
    table = capsys.readouterr().out
    assert "positions end at 40,960" in table and "accuracy, of short prompts too" in table
    assert "max_model_len=9,000 is given" in table and "The KV cache of 128,000 tokens takes up to 18.9 GB" in table
    assert "a model with more positions: llama-3.1-8b, " in table and "a prompt of at most 40,960 tokens" in table
    command = table.splitlines()[-1]
    together = shlex.split(command[command.index("--max-tokens 128") + len("--max-tokens 128") :])
    report = run_json(capsys, *options, *together)
    assert report["fits"] and f"--hf-overrides {shlex.quote(json.dumps(QWEN_YARN))}" in table


@pytest.mark.parametrize(
    "positions",
    [
        pytest.param([], marks=pytest.mark.slow),
        ["--hf-overrides", '{"max_position_embeddings": 1048576}'],
    ],
)
def test_8_bits_are_found_where_nothing_else_fits(capsys: pytest.CaptureFixture[str], positions: list[str]) -> None:
    """800,000 tokens of 128 KiB are 98 GiB; in int8 with scales they are 50 GiB. The authors name no longer RoPE."""
    options = ["--model", "llama-3.1-8b", "--prompt-len", "800k", "--gpu-mem", "24GB", "--host-mem", "64GB", *positions]
    assert main(["plan", *options]) == 1
    table = capsys.readouterr().out
    assert ": --kv-cache-dtype int8\n" in table and "--host-mem 114GB" in table
    assert ("describe no RoPE scaling" in table) == (not positions) and "upper bound" not in table
    if positions:
        assert run_json(capsys, *options, "--kv-cache-dtype", "int8")["fits"]
        assert run_json(capsys, *options[:-4], "--host-mem", "114GB", *positions)["fits"]
        assert not run_json(capsys, *options[:-4], "--host-mem", "113GB", *positions, status=1)["fits"]


@pytest.mark.parametrize(
    "model",
    [
        ["llama-3.1-8b", "--enable-lora", "--max-lora-rank", "256", "--max-cpu-loras", "8", "--host-mem", "13GB"],
        ["qwen3.8-27b", "--gpu-mem", "64GB", "--host-mem", "2GB"],  # with states of recurrent layers
        ["llama-3.1-8b", "--gpu-mem", "16GB", "--host-mem", "2GB", "--tensor-parallel-size", "2"],
    ],
    ids=["adapters", "states", "ranks"],
)
def test_the_host_memory_that_is_named_holds_all_that_is_there(
    capsys: pytest.CaptureFixture[str], model: list[str]
) -> None:
    options = ["--gpu-mem", "24GB", "--model", *model, "--prompt-len", "131000"]
    assert main(["plan", *options]) == 1
    least = int(re.findall(r"--enable-cpu-offload --host-mem (\d+)GB\n", capsys.readouterr().out)[0])
    assert run_json(capsys, *options, "--enable-cpu-offload", "--host-mem", f"{least}GB")["fits"]
    assert not run_json(capsys, *options, "--enable-cpu-offload", "--host-mem", f"{least - 1}GB", status=1)["fits"]


@pytest.mark.parametrize("prompt", ["20k", "128k"])
def test_the_command_to_run_has_the_flags_of_the_plan(capsys: pytest.CaptureFixture[str], prompt: str) -> None:
    """The engine's parser reads them back, and with them the plan is the same."""
    overrides = ["--hf-overrides", json.dumps(QWEN_YARN)] if prompt == "128k" else []
    options = ["--model", "qwen3-8b", "--prompt-len", prompt, "--gpu", "RTX 4090", "--host-mem", "64GB", *overrides]
    assert main(["plan", *options]) == 0
    command = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert command[:4] == ["nanovllm", "generate", "--model", "MODEL_DIR"]
    parsed = engine_arguments(_parse(command[1:]))
    config = engine_config(CONFIGS, parsed)
    flags = command[command.index("128") + 1 :]
    report = run_json(capsys, *options, *(flags if not overrides else flags[2:]))
    assert report["fits"] and config.enable_cpu_offload == report["engine"]["enable_cpu_offload"] == bool(overrides)
    assert config.num_gpu_blocks == report["engine"]["num_gpu_blocks"] > 0
    if overrides:
        assert report["engine"]["hf_overrides"] == QWEN_YARN
        assert config.num_cpu_blocks == report["engine"]["num_cpu_blocks"] and config.hf_overrides == QWEN_YARN


# ---- what does not fit, and the page


@pytest.mark.parametrize("name", ["Llama-3.1-8B", "LLAMA-3.1-8b"])
def test_the_page_of_the_readme(capsys: pytest.CaptureFixture[str], name: str) -> None:
    """README shows a command that fits, and these lines of its output; names and cards are known in any case."""
    readme = (Path(nanovllm.__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    shown = readme[readme.index("```text\nA prompt of") + len("```text\n") :].split("\n```")[0].splitlines()
    command = next(line for line in readme.splitlines() if line.startswith("nanovllm plan "))
    words = [name if word == "llama-3.1-8b" else word for word in shlex.split(command, comments=True)[1:]]
    assert name in words and len(shown) == 10
    assert main([word.replace("RTX", "rtx") for word in words]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line in shown]
    assert lines == shown


@pytest.mark.parametrize(
    ("model", "sizes", "numbers_for"),
    [
        ("qwen3-30b-a3b", (61.1, 16.9), "for 4-bit weights on RTX 4090 (24.0 GB)"),
        ("glm-4.5-air", (213.8, 57.8), "for the weights in 4 bits on H100 (80.0 GB)"),
        ("gpt-oss-120b", (65.2, None), "for the weights as they are on H100 (80.0 GB)"),
    ],
)
def test_a_mixture_beyond_the_device(
    capsys: pytest.CaptureFixture[str], model: str, sizes: tuple[float, float | None], numbers_for: str
) -> None:
    """The sizes as they are and in 4 bits, the smallest card, and times of what is named."""
    options = [model, "--prompt-len", "32k", "--gpu", "RTX 4090", "--host-mem", "64GB"]
    assert main(["plan", *options]) == 1
    page = capsys.readouterr().out
    plain, packed = sizes
    assert f"The weights take {plain} GB, and the device has 24.0 GB." in page
    assert (f"4-bit weights (GPTQ, AWQ or GGUF): {packed} GB" in page) == (packed is not None)
    assert ("quantized already (mxfp4)" in page) == (packed is None)
    assert '--gpu "H100"' in page or "more than 141 GB: none is known" in page
    assert f"The numbers below are {numbers_for} with 64.0 GB of host memory" in page
    assert page.count("tokens/s is the upper bound") == 2 and "To run it" not in page
    report = run_json(capsys, *options, status=1)
    assert report["request"]["prefill"]["seconds"] > 0 and report["in_the_way"] and report["as_if"][0] in page


def test_the_size_in_4_bits_is_that_of_the_formula(capsys: pytest.CaptureFixture[str]) -> None:
    """By hand: half a byte a weight, 3 bytes for 128 of them, two tables of 128,256 rows and 65 norms in 16 bits."""
    matrices = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    size = matrices // 2 + matrices // 128 * 3 + 2 * (2 * 128_256 + 65) * 4096
    report = run_json(capsys, "llama-3.1-8b", "--gpu", "h100", "--prompt-len", "1000")
    assert report["model"]["four_bit_weight_bytes"] == size


# ---- this machine


def test_this_machine_is_planned_as_the_engine_runs(
    model_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "ProbeSizes", lambda: SMALL)
    arguments = offloaded(16, 5, 9, max_num_batched_tokens=50)
    options = [f"--{name.replace('_', '-')}={value}" for name, value in arguments.items() if value is not True]
    report = run_json(capsys, "--model", str(model_dir), "--prompt-len", "150", *options)
    assert report["engine"] == arguments | {"dtype": "float32", "max_num_seqs": 512, "cpu_attention": True}
    assert report["rates"]["host_bandwidth"] > 0 and report["request"]["cpu_attention"]["bytes_per_decode_step"] > 0
    with LLM(model_dir, load_format="dummy", **arguments) as llm:
        stats = llm.kv_stats()
        assert report["longest_prompt"]["tokens"] == llm.max_model_len
        assert f"A prompt of {llm.max_model_len:,} tokens fits" in str(llm.plan())
        assert report["memory"]["device_total"] == llm.plan().sizing.memory.device_total
        assert report["model"]["weight_bytes"] == parameter_bytes(llm._runner.model)
    assert report["kv_cache"]["device_bytes"] == stats.device_bytes
    assert report["kv_cache"]["host_bytes"] == stats.host_bytes
    for phase in ("prefill", "decode"):
        assert report["request"][phase]["seconds"] > 0
    unmeasured = run_json(capsys, "--model", str(model_dir), "--no-measure", *options)
    assert unmeasured["rates"]["compute"] is None


# ---- refusals

WRONG: dict[str, tuple[list[str], str]] = {
    "an unknown card": (["plan", *QWEN_1M, "--gpu", "RTX 4095"], "the nearest are RTX 4090"),
    "a size for a rate": (["plan", *QWEN_1M, "--gpu-mem", "80GB", "--link", "50GB"], "a rate such as 50GB/s"),
    "blocks beyond the memory": (["plan", *QWEN_1M, *GIVEN, "--num-gpu-blocks", "10000"], "\n--num-gpu-blocks 1116\n"),
    "a model that is none": (["plan", "qwen3-8", "--gpu-mem", "8GB"], "'qwen3-8': did you mean 'qwen3-8b'"),
    "a dtype": (["plan", *QWEN_1M, "--dtype", "int8"], "bfloat16"),
    "host memory alone": (["plan", *QWEN_1M, "--host-mem", "8GB"], "--host-mem needs --gpu-mem"),
    "offload without a host": (["plan", *QWEN_1M, "--gpu-mem", "24GB", "--enable-cpu-offload"], "--host-mem"),
    "a host size without offload": (
        ["plan", *QWEN_1M, *GIVEN, "--kv-offloading-size", "9", "--no-enable-cpu-offload"],
        "--kv-offloading-size is the memory of offloaded KV: leave one out",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_cost_one_sentence(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, told = WRONG[case]
    try:
        status: object = main(arguments)
    except SystemExit as stopped:
        status = stopped.code
    printed = capsys.readouterr()
    assert status == 2 and printed.out == ""
    flags = printed.err.splitlines()[1:]
    assert told in printed.err and len(flags) <= 1 and all(line.startswith("--") for line in flags)


# ---- measuring


def test_the_effective_link_during_a_computation() -> None:
    """100 bytes at 10 bytes/s are 10 s of copying, during 4 s of computing."""
    lone = Link(h2d=10.0, d2h=20.0)
    assert link_during_computation(lone, 100, 4.0, measured=10.0).overlap == 1.0
    assert link_during_computation(lone, 100, 4.0, measured=9.0).overlap == 1.0
    assert link_during_computation(lone, 100, 4.0, measured=12.0).overlap == pytest.approx(0.5)
    assert link_during_computation(lone, 100, 4.0, measured=14.0).overlap == pytest.approx(0.0)
    slowed = link_during_computation(lone, 100, 4.0, measured=24.0)  # 20 s are left for the copies
    assert (slowed.h2d, slowed.d2h, slowed.overlap) == (pytest.approx(5.0), pytest.approx(10.0), 0.0)


def test_adapters_take_memory_on_both_sides(capsys: pytest.CaptureFixture[str]) -> None:
    """Of rank 16 an adapter of all linear layers of Qwen2.5-7B has 40.4 million weights of 2 bytes."""
    plain = run_json(capsys, *QWEN_1M, *GIVEN, *SPEEDS)
    lora = ["--enable-lora", "--max-loras", "4", "--max-cpu-loras", "100"]
    report = run_json(capsys, *QWEN_1M, *GIVEN, *SPEEDS, *lora)
    one = 80_740_352
    assert report["memory"]["adapter_bytes"] == 4 * one and plain["memory"]["adapter_bytes"] == 0
    assert report["memory"]["device_free"] == plain["memory"]["device_free"] - 4 * one
    assert report["memory"]["host_free"] == plain["memory"]["host_free"] - 100 * one
    assert report["kv_cache"]["device_bytes"] < plain["kv_cache"]["device_bytes"]
    assert report["engine"]["max_loras"] == 4 and "max_loras" not in plain["engine"]
    assert main(["plan", *QWEN_1M, "--gpu-mem", "48GB", *lora]) == 2
    assert "--host-mem is not given, and adapters are in host memory too" in capsys.readouterr().err


def test_a_plan_of_several_ranks_is_of_one_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    llama = ["--model", str(CONFIGS / "llama-3.1-8b.json"), *GIVEN, *SPEEDS, "--prompt-len", "32768"]
    one = run_json(capsys, *llama)
    ranks = ["--tensor-parallel-size", "8", "--interconnect", "400GB/s", "--all-reduce", "10us"]
    eight = run_json(capsys, *llama, *ranks)
    assert eight["model"]["weight_bytes"] == pytest.approx(one["model"]["weight_bytes"] / 8, rel=0.01)
    assert eight["model"]["kv_bytes_per_token"] * 8 == one["model"]["kv_bytes_per_token"]
    assert eight["engine"]["tensor_parallel_size"] == 8 and "tensor_parallel_size" not in one["engine"]
    assert eight["memory"]["host_free"] == 256 * 10**9 // 8
    # 2 * 32 + 1 sums of a row of 4,096 numbers in bfloat16, which seven ranks send
    sums = eight["request"]["decode"]["seconds_by_resource"]["interconnect"]
    assert sums == pytest.approx(65 * (10e-6 + 7 * 8192 / 400e9))
    parts = read_decoder_spec(str(CONFIGS / "llama-3.1-8b.json")).of_ranks(3)  # of 2, 3 and 3 KV heads
    three = run_json(capsys, *llama, "--tensor-parallel-size", "3")["model"]["weight_bytes"]
    assert three == max(part.weight_bytes(2) for part in parts) > parts[0].weight_bytes(2)
    unknown = run_json(capsys, *llama, "--tensor-parallel-size", "8")
    assert unknown["request"]["decode"]["rates_not_known"] == ["interconnect"]


def test_rates_are_measured_without_offload(model_dir: Path) -> None:
    spec = load_decoder_spec(model_dir)
    device = create_device("cpu")
    model = random_model(spec, torch.float32, device, SMALL)
    rates = measure_rates(Probe(device, model, select_cpu_backend(spec.head_dim), 16, 0, 64, SMALL))
    device.close()
    for name in ("compute", "attention", "weight_bandwidth", "head_bandwidth", "device_bandwidth"):
        assert getattr(rates, name) > 0
    assert min(rates.step_seconds, rates.layer_seconds) >= 0
    assert rates.link is None and not rates.block_read_seconds and not rates.host_bandwidth
