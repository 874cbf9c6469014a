"""`nanovllm plan` from the command line: figures by hand, what does not fit, README's page, refusals."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from engines import offloaded
from plans import parameter_bytes

import nanovllm
from benchmarks.transfers import predict_request
from nanovllm import LLM
from nanovllm.apps.cli.arguments import engine_arguments
from nanovllm.apps.cli.main import _parse, main
from nanovllm.features.planner.units import show_seconds
from nanovllm.memory.layerwise import LayerwiseMemory, prefill_steps
from nanovllm.memory.layout import KVLayout
from nanovllm.models.hf_config import read_network_config

CONFIGS = Path(nanovllm.__file__).parent / "apps" / "planner" / "configs"
QWEN_1M = ["--model", str(CONFIGS / "qwen2.5-7b-1m.json"), "--prompt-len", "1000000"]
GIVEN = ["--gpu-mem", "48GB", "--host-mem", "256GB", "--link", "50GB/s"]
SPEEDS = ["--compute", "400TFLOPS", "--device-bandwidth", "3TB/s"]


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
    layerwise_memory = LayerwiseMemory(**cache["layerwise_memory"])
    layerwise_bytes = layerwise_memory.buffer_blocks * block_bytes // 28 + layerwise_memory.max_tokens * (2 * 3584 + 8)
    assert layerwise_memory.buffer_blocks >= 1_000_000 // 512 and 0.99 * budget < 8 * layerwise_bytes <= budget
    assert cache["working_bytes"] == report["memory"]["activation_peak"] + layerwise_bytes
    budget -= layerwise_bytes
    resident_blocks = cache["split"]["resident_blocks"]
    assert cache["num_gpu_blocks"] == budget // block_bytes == resident_blocks + 1
    assert cache["device_bytes"] == resident_blocks * block_bytes + cache["split"]["ring_slots"] * block_bytes // 28
    assert request["kv_bytes"] == 1_000_010 * 57_344
    assert request["resident_bytes"] == resident_blocks * block_bytes
    layout = KVLayout(28, 4, 128, 512, 2)
    steps = prefill_steps(512, resident_blocks, 1_000_000, 16_384, layerwise_memory)
    moved = predict_request(layout, resident_blocks, 1_000_000, 1, 16_384, prefill=steps)
    assert 1_000_000 - 98 * 4096 < request["layer_by_layer"] < 1_000_000, "what stays costs nothing anyway"
    assert 5 * moved.h2d_bytes < predict_request(layout, resident_blocks, 1_000_000, 1, 16_384).h2d_bytes
    assert request["prefill_transfers"] == asdict(moved)
    assert request["prefill"]["limit"] == "compute" and request["decode"]["limit"] == "link"
    assert 0 < cache["working_bytes"] < budget
    # Each token loads what does not stay, and nothing is known that would make it wait longer.
    streamed = 1_000_005 * 57_344 - request["resident_bytes"]
    assert request["decode"]["seconds"] == pytest.approx(streamed / 50e9, rel=0.02)


def test_the_cpu_takes_its_share_where_its_rate_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    """By hand: the link's 50 GB/s and the CPU's 100 GB/s part what is on the host as one to two, all but."""
    short = ["--output-len", "3"]
    alone = run_json(capsys, *QWEN_1M, *GIVEN, *SPEEDS, *short)["request"]
    assert alone["no_cpu_attention"] == ["host_bandwidth"] and not alone["step_transfers"]["cpu_attention_bytes"]
    shared = run_json(capsys, *QWEN_1M, *GIVEN, *SPEEDS, *short, "--host-bandwidth", "100GB/s")["request"]
    decode = shared["decode"]
    cpu_bytes = shared["step_transfers"]["cpu_attention_bytes"]
    assert cpu_bytes == pytest.approx(2 / 3 * alone["streamed_bytes"], rel=0.03)
    assert decode["seconds"] == pytest.approx(alone["decode"]["seconds"] / 3, rel=0.05)
    assert decode["terms"]["host memory bandwidth"] == pytest.approx(cpu_bytes / 100e9)
    assert shared["prefill"] == alone["prefill"], "its chunks are long"
    streamed = run_json(capsys, *QWEN_1M, *GIVEN, *SPEEDS, *short, "--host-bandwidth", "100GB/s", "--no-cpu-attention")
    assert streamed["request"]["decode"] == alone["decode"]


def test_offload_is_planned_where_it_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    model = ["--model", str(CONFIGS / "qwen3-8b.json"), "--gpu-mem", "24GB"]
    short = run_json(capsys, *model, "--host-mem", "64GB", "--prompt-len", "4000")
    long = run_json(capsys, *model, "--host-mem", "64GB", "--prompt-len", "40000")
    assert (short["engine"]["enable_cpu_offload"], long["engine"]["enable_cpu_offload"]) == (False, True)
    assert long["fits"] and long["request"]["streamed_bytes"] > 0
    forbidden = run_json(
        capsys, *model, "--host-mem", "64GB", "--prompt-len", "40000", "--no-enable-cpu-offload", status=1
    )
    alone = run_json(capsys, *model, "--prompt-len", "40000", status=1)
    for report in (forbidden, alone):
        assert not report["fits"] and "enable_cpu_offload=True" in report["advice"]
        assert report["request"]["prompt_len"] == report["kv_cache"]["max_model_len"] < 40_000


def test_the_longest_prompt_is_planned_where_none_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    model = ["--model", str(CONFIGS / "qwen3-0.6b.json")]
    report = run_json(capsys, *model, "--host-mem", "16GB", "--gpu-mem", "5GB")
    assert report["request"]["prompt_len"] == report["kv_cache"]["max_model_len"] == 40_960
    assert report["kv_cache"]["limit"] == "positions" and report["engine"]["enable_cpu_offload"]
    assert report["request"]["output_len"] == 1, "the longest sequence ends there"
    main(["plan", *model, "--host-mem", "16GB", "--gpu-mem", "5GB", "--gpu", "RTX 4090"])
    page = capsys.readouterr().out
    assert "1 token of output instead of 128, since no longer sequence fits" in page
    copied = re.findall("copying .*", page)[-1]
    assert copied.startswith("copying 2.4 GB in and 114.7 KB out"), "a step of decode moves what is on the host"
    small = run_json(capsys, *model, "--gpu-mem", "4GB")
    assert small["kv_cache"]["limit"] == "KV memory" and not small["engine"]["enable_cpu_offload"]


def test_a_quantized_network_has_scratch_on_a_gpu(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A product of many rows writes weights in 16 bits first, up to 256 MiB."""
    plain = json.loads((CONFIGS / "llama-3.1-8b.json").read_text())
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
    (tmp_path / "config.json").write_text(json.dumps(plain | {"quantization_config": awq}))
    options = ["--prompt-len", "1000", "--gpu", "h100"]
    of_plain = run_json(capsys, "llama-3.1-8b", *options)
    quantized = run_json(capsys, str(tmp_path), *options)
    # half a byte a weight, 3 bytes for 128 of them, two tables of 128,256 rows and 65 norms in 16 bits
    matrices = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    size = matrices // 2 + matrices // 128 * 3 + 2 * (2 * 128_256 + 65) * 4096
    assert quantized["model"]["weight_bytes"] == size
    peaks = [report["memory"]["activation_peak"] for report in (of_plain, quantized)]
    assert peaks[1] >= peaks[0] + (256 << 20)


# ---- by name, and the command to run

QWEN_YARN = {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}}


def test_times_are_in_a_unit_that_is_read_easily() -> None:
    assert [show_seconds(seconds) for seconds in (0.0015, 1, 120, 35_160)] == ["1.50 ms", "1.00 s", "2.0 min", "9.8 h"]


def test_the_command_to_run_has_the_flags_of_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """The engine's parser reads them back."""
    options = ["qwen3-8b", "--prompt-len", "128k", "--gpu", "RTX 4090", "--host-mem", "64GB"]
    assert main(["plan", *options, "--hf-overrides", json.dumps(QWEN_YARN)]) == 0
    command = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert command[:4] == ["nanovllm", "generate", "--model", "MODEL_DIR"]
    assert engine_arguments(_parse(command[1:])) == {"hf_overrides": QWEN_YARN, "enable_cpu_offload": True}


# ---- what does not fit, and the page


@pytest.mark.parametrize(
    ("name", "begin"),
    [("Llama-3.1-8B", "A prompt of"), ("LLAMA-3.1-8b", "A prompt of"), ("gpt-oss-120b", "  in all      ")],
)
def test_the_page_of_the_readme(capsys: pytest.CaptureFixture[str], name: str, begin: str) -> None:
    """README shows commands that fit, and lines of their output; names and cards are known in any case."""
    readme = (Path(nanovllm.__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    shown = readme[readme.index(f"```text\n{begin}") + len("```text\n") :].split("\n```")[0].splitlines()
    command = next(line for line in readme.splitlines() if line.startswith(f"nanovllm plan {name.lower()}"))
    words = [name if word == name.lower() else word for word in shlex.split(command, comments=True)[1:]]
    assert name in words and 10 <= len(shown) <= 13
    assert main([word.replace("RTX", "rtx") for word in words]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line in shown]
    assert lines == shown


def test_what_does_not_fit_is_told_with_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    card = ["--gpu", "RTX 4090"]
    on = [*card, "--host-mem", "64GB"]
    assert main(["plan", "qwen3-30b-a3b", "--prompt-len", "32k", *card]) == 1
    page = capsys.readouterr().out
    assert "the weights take 61.1 GB, and the device has 24.0 GB" in page and "with --host-mem and" in page
    small = run_json(capsys, "llama-3.1-8b", "--gpu-mem", "8GB", "--host-mem", "8GB", status=1)
    told = "12.2 GB of the weights' 16.1 GB have to be in host memory, of which 8.0 GB are free"
    assert small["fits"] is False and told in small["advice"]
    tiny = run_json(capsys, "llama-3.1-8b", "--gpu-mem", "2GB", "--host-mem", "64GB", status=1)
    assert "what stays of 16.1 GB of weights takes 3.0 GB, and the device has 2.0 GB" in tiny["advice"]
    assert main(["plan", "qwen3-8b", "--prompt-len", "128k", *on]) == 1
    page = capsys.readouterr().out
    assert "128,000 tokens does not fit: the model's positions end at 40960" in page and str(QWEN_YARN) in page
    assert "The numbers below are for 40,960 tokens" in page and "To run it" not in page
    assert main(["plan", "llama-3.1-8b", "--prompt-len", "120k", "--gpu", "RTX 4090", "--host-mem", "8GB"]) == 1
    page = capsys.readouterr().out
    assert "its KV cache takes 14.64 GiB" in page and "kv_cache_dtype='int8'" in page


# ---- weights that stream

# By hand: a layer of Llama 3.1 8B has so many weights of 2 bytes in matrices, and all weights take 16.06 GB.
LLAMA_LAYER = 2 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14_336)
LLAMA = ["llama-3.1-8b", "--gpu", "RTX 4090", "--host-mem", "64GB"]


def test_weights_that_do_not_fit_stream(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--weights-memory-bytes", "6G", "--no-host-products", "--prompt-len", "30000", "--output-len", "3"]
    report = run_json(capsys, *LLAMA, *asked)
    weights = report["weights"]
    count = len(weights["streamed_layers"])
    total = report["model"]["weight_bytes"]
    assert weights["host_bytes"] == count * LLAMA_LAYER and weights["slot_bytes"] == LLAMA_LAYER
    assert weights["device_bytes"] == total - (count - 2) * LLAMA_LAYER <= 6 * 2**30 < total - (count - 4) * LLAMA_LAYER
    memory = report["memory"]
    assert memory["device_free"] == memory["device_total"] - weights["device_bytes"]
    assert memory["host_free"] == 64 * 10**9 - weights["host_bytes"]
    request = report["request"]
    assert not report["engine"]["enable_cpu_offload"] and request["streamed_bytes"] == 0
    # Two chunks of at most 16,384 tokens, and one token: each copies the layers once.
    assert request["prefill_weight_bytes"] == 2 * weights["host_bytes"]
    assert request["step_weight_bytes"] == weights["host_bytes"]
    copied = weights["host_bytes"] / 31.5e9
    assert request["decode"]["terms"]["link"] == request["decode"]["seconds"] == pytest.approx(copied)
    assert (request["prefill"]["limit"], request["decode"]["limit"]) == ("compute", "link")
    four_bits, link, device = request["faster"]
    assert four_bits["change"] == "a checkpoint in 4 bits" and four_bits["times"] > link["times"]
    assert link["times"] == pytest.approx(2.0, rel=0.01)
    assert device["change"] == "a device of 35.6 GB, which holds all weights" and device["times"] > 15


def test_link_and_host_read_a_dense_model_together(capsys: pytest.CaptureFixture[str]) -> None:
    """And take the same time; without its rate the host is as fast as the link."""
    asked = ["--weights-memory-bytes", "6G", "--prompt-len", "30000", "--output-len", "3"]
    for rate, given in ((31.5e9, []), (60e9, ["--host-bandwidth", "60GB/s"])):
        report = run_json(capsys, *LLAMA, *asked, *given)
        streamed = report["weights"]["host_bytes"]
        request = report["request"]
        assert request["step_weight_bytes"] + request["step_multiplied_bytes"] == streamed
        terms = request["decode"]["terms"]
        together = streamed / (rate + 31.5e9)
        assert terms["link"] == pytest.approx(together) == pytest.approx(terms["host memory bandwidth"])
        assert together < request["decode"]["seconds"] < 1.1 * together
        assert request["decode"]["limit"] == "host memory bandwidth"
    assert "host memory twice as fast" in [change["change"] for change in request["faster"]]


def test_the_page_says_where_weights_lie(capsys: pytest.CaptureFixture[str]) -> None:
    """On 8 GB they are on the host without being asked to, and with 24 GB they are not."""
    assert main(["plan", *LLAMA, "--gpu-mem", "8GB", "--prompt-len", "1k"]) == 0
    page = capsys.readouterr().out
    for line in (
        "copied in                     12.2 GB   for the prompt, and 6.1 GB for each token after it",
        "read on the host               6.1 GB   for each token after the prompt; the host multiplies with them, at",
    ):
        assert line in page
    assert main(["plan", *LLAMA, "--gpu-mem", "8GB", "--prompt-len", "1k", "--no-host-products"]) == 0
    page = capsys.readouterr().out
    for line in (
        "weights                        4.7 GB",
        "on the host                   12.2 GB   the matrices of 28 layers, which stream",
        "in slots                     872.4 MB   2 on the device, each for one of these layers",
        "copied in                     12.2 GB   for the prompt, and 12.2 GB for each token after it",
        "copying 12.2 GB in 387.74 ms; meanwhile reading the memory of the device 15.03 ms",
        "faster                                7.1 times with a checkpoint in 4 bits; 2.0 times with a link twice as",
        "--max-tokens 128 --no-host-products --enable-cpu-offload",
    ):
        assert line in page
    assert main(["plan", *LLAMA, "--prompt-len", "1k"]) == 0
    page = capsys.readouterr().out
    assert "weights                       16.1 GB\n" in page and "in slots" not in page and "faster" not in page


def test_what_the_host_has_no_room_for_is_read_from_disk(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    small = [*LLAMA, "--gpu-mem", "8GB", "--host-mem", "8GB", "--prompt-len", "8k"]
    assert main(["plan", *small]) == 1
    assert "or let the rest be on a local disk with --weights-dir" in capsys.readouterr().out
    disk = ["--weights-dir", str(tmp_path / "none"), "--disk-bandwidth", "7GB/s"]
    report = run_json(capsys, *small, *disk)
    weights, request = report["weights"], report["request"]
    layers = len(weights["streamed_layers"])
    assert weights["disk_bytes"] % LLAMA_LAYER == 0 and weights["disk_bytes"] > 2 * LLAMA_LAYER
    assert weights["host_bytes"] == (layers + 2) * LLAMA_LAYER - weights["disk_bytes"] <= 7 * 10**9, "with two places"
    assert request["prefill_read_bytes"] == request["step_read_bytes"] == weights["disk_bytes"]
    assert request["decode"]["limit"] == "disk"
    assert request["decode"]["seconds"] == pytest.approx(weights["disk_bytes"] / 7e9)
    changes = {change["change"]: change["times"] for change in request["faster"]}
    assert changes["a disk twice as fast"] == pytest.approx(2.0, rel=0.01)
    assert f"{layers * LLAMA_LAYER / 1e9:.1f} GB of host memory for weights" in changes
    assert main(["plan", *small, *disk]) == 0
    page = capsys.readouterr().out
    for line in (
        "   the matrices of 14 of these layers",
        "and 2 places for layers that are read from disk",
        "read from disk",
    ):
        assert line in page
    assert not (tmp_path / "none").exists()


def test_each_rank_has_its_part_of_the_layers_that_stream(capsys: pytest.CaptureFixture[str]) -> None:
    report = run_json(capsys, *LLAMA, "--weights-memory-bytes", "3G", "--tensor-parallel-size", "2")
    weights = report["weights"]
    assert weights["slot_bytes"] == LLAMA_LAYER // 2
    assert weights["host_bytes"] == len(weights["streamed_layers"]) * LLAMA_LAYER // 2
    assert report["memory"]["host_free"] == 32 * 10**9 - weights["host_bytes"]


# ---- this machine


def test_this_machine_is_planned_as_the_engine_runs(model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = offloaded(16, 5, 9, max_num_batched_tokens=50, weights_memory_bytes="25%")
    options = [f"--{name.replace('_', '-')}={value}" for name, value in arguments.items() if value is not True]
    report = run_json(capsys, "--model", str(model_dir), "--prompt-len", "150", *options)
    assert report["request"]["step_transfers"]["cpu_attention_bytes"] > 0
    assert report["request"]["prefill"]["missing"] == ["compute", "device_bandwidth", "link"]
    with LLM(model_dir, load_format="dummy", **arguments) as llm:
        stats = llm.kv_stats()
        assert report["kv_cache"]["max_model_len"] == llm.max_model_len
        assert f"A prompt of {llm.max_model_len:,} tokens fits" in str(llm.plan())
        assert report["memory"]["device_total"] == llm.plan().sizing.memory.device_total
        assert report["model"]["weight_bytes"] == parameter_bytes(llm._runner.model)
        weights = llm.plan().weights
        assert report["weights"]["streamed_layers"] == list(weights.streamed) == [0, 1, 2]
        assert report["weights"]["device_bytes"] == weights.device_bytes
    assert report["kv_cache"]["device_bytes"] == stats.device_bytes
    assert report["kv_cache"]["host_bytes"] == stats.host_bytes


# ---- refusals

WRONG: dict[str, tuple[list[str], str]] = {
    "an unknown card": (["plan", *QWEN_1M, "--gpu", "RTX 4095"], "the nearest are RTX 4090"),
    "a size for a rate": (["plan", *QWEN_1M, "--gpu-mem", "80GB", "--link", "50GB"], "a rate such as 50GB/s"),
    "blocks beyond the memory": (
        ["plan", *QWEN_1M, *GIVEN, "--num-gpu-blocks", "10000"],
        "at most 2232 blocks of 256 tokens fit",
    ),
    "a model that is none": (["plan", "qwen3-8", "--gpu-mem", "8GB"], "'qwen3-8': did you mean 'qwen3-8b'"),
    "a dtype": (["plan", *QWEN_1M, "--dtype", "int8"], "bfloat16"),
    "too little memory for weights": (["plan", *LLAMA, "--weights-memory-bytes", "2G"], "raise it to at least 2974"),
    "weights that stream from no host": (
        ["plan", "llama-3.1-8b", "--gpu", "RTX 4090", "--weights-memory-bytes", "25%"],
        "--host-mem is not given, and weights that stream need it",
    ),
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
    assert told in printed.err


# ---- adapters and ranks


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
    assert main(["plan", *QWEN_1M, "--gpu-mem", "48GB", *lora]) == 2
    assert "--host-mem is not given, and adapters are in host memory too" in capsys.readouterr().err


def test_a_plan_of_several_ranks_is_of_one_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    llama = ["--model", str(CONFIGS / "llama-3.1-8b.json"), *GIVEN, *SPEEDS, "--prompt-len", "32768"]
    one = run_json(capsys, *llama)
    ranks = ["--tensor-parallel-size", "8", "--interconnect", "400GB/s", "--all-reduce", "10us"]
    eight = run_json(capsys, *llama, *ranks)
    assert eight["model"]["weight_bytes"] == pytest.approx(one["model"]["weight_bytes"] / 8, rel=0.01)
    assert eight["model"]["kv_bytes_per_token"] * 8 == one["model"]["kv_bytes_per_token"]
    assert eight["memory"]["host_free"] == 256 * 10**9 // 8
    # 2 * 32 + 1 sums of a row of 4,096 numbers in bfloat16, which seven ranks send
    sums = eight["request"]["decode"]["terms"]["interconnect"]
    assert sums == pytest.approx(65 * (10e-6 + 7 * 8192 / 400e9))
    parts = read_network_config(CONFIGS / "llama-3.1-8b.json").of_ranks(3)  # of 2, 3 and 3 KV heads
    three = run_json(capsys, *llama, "--tensor-parallel-size", "3")["model"]["weight_bytes"]
    assert three == max(part.weight_bytes for part in parts) > parts[0].weight_bytes
    unknown = run_json(capsys, *llama, "--tensor-parallel-size", "8")
    assert unknown["request"]["decode"]["missing"] == ["interconnect"]
