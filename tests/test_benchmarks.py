"""The benchmark scripts from end to end on a tiny network: what they promise to report is there, and adds up."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from benchmark_helpers import (
    HEAD_DIM,
    HIDDEN,
    INTERMEDIATE,
    KV_HEADS,
    LAYERS,
    MACHINE_FIELDS,
    OUTPUT_LEN,
    PROMPT_LEN,
    ROOT,
    SMALL,
    TOKEN_BYTES,
    VOCAB,
    check_rates,
    main_of,
    make_config,
    make_scripts_small,
    report_of,
)

from nanovllm.device.memory import rss_bytes


@pytest.fixture(autouse=True)
def scripts_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    make_scripts_small(monkeypatch)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_config(tmp_path / "tiny")


# ---- bench.py


@pytest.mark.slow
def test_bench_runs_as_a_script(model: Path) -> None:
    """From the repository root, as the manual has it, with everything that the report promises."""
    output = model.parent / "report.json"
    command = [sys.executable, "bench.py", "--model", str(model), "--prompt-len", "33", str(PROMPT_LEN), *SMALL]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([*command, "--output-json", str(output)], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for word in ("prefill", "decode", "TTFT", "TPOT", "KV cache", "peak process memory", "torch", "threads"):
        assert word in done.stdout
    report = json.loads(output.read_text())
    assert [result["prompt_len"] for result in report["results"]] == [33, PROMPT_LEN]
    for result in report["results"]:
        check_rates(result["rates"], result["prompt_len"])
        assert result["kv_bytes"] == (result["prompt_len"] + OUTPUT_LEN - 1) * TOKEN_BYTES
    assert report["kv_device_bytes"] <= report["peak_rss_bytes"]
    assert report["peaks"]["matmul_gflop_s"] > 0 and report["peaks"]["read_gb_s"] > 0


def test_bench_runs_several_prompts_at_once(model: Path) -> None:
    report = report_of("bench", model, "--prompt-len", "40", "--num-prompts", "3", "--num-layers", "2", *SMALL)
    (result,) = report["results"]
    assert result["num_prompts"] == 3
    assert result["kv_bytes"] == 3 * (40 + OUTPUT_LEN - 1) * TOKEN_BYTES * 2 // 3
    assert result["decode_gb_s"] is None  # how much of it the three share is not known
    assert report["model"]["num_layers"] == 2


def test_bench_has_no_decode_for_one_token(model: Path) -> None:
    report = report_of("bench", model, "--prompt-len", "20", *SMALL, "--output-len", "1")
    (result,) = report["results"]
    assert result["rates"]["decode_tok_s"] is None and result["rates"]["tpot_s"] is None


# ---- two trees


@pytest.mark.slow
def test_two_trees_run_in_turns(model: Path) -> None:
    output = model.parent / "trees.json"
    options = ["--model", str(model), "--prompt-len", "20", "33", "--output-len", "3", "--rounds", "2"]
    assert main_of("benchmarks.two_trees")([str(ROOT), *options, "--output-json", str(output)]) == 0
    report = json.loads(output.read_text())
    assert len(report["commits"]) == 2 and report["commits"][0] == report["commits"][1]
    assert [result["prompt_len"] for result in report["results"]] == [20, 33]
    for result in report["results"]:
        assert len(result["this"]) == len(result["other"]) == 2
        assert result["prefill_ratio"] > 0 and result["decode_ratio"] > 0


@pytest.mark.slow
def test_a_tree_without_the_engine_is_named(model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main_of("benchmarks.two_trees")([str(tmp_path), "--model", str(model), "--prompt-len", "20"]) == 2
    assert f"the bench.py of {tmp_path} ended with status 1" in capfd.readouterr().err


# ---- prefill memory


@pytest.mark.parametrize("placement", [[], ["--device-share", "1/2"]])
def test_prefill_memory_adds_up(model: Path, placement: list[str]) -> None:
    options = ["--prompt-len", str(PROMPT_LEN), "--block-size", "16", "--max-num-batched-tokens", "48", *placement]
    report = report_of("benchmarks.prefill_memory", model, *options, "--dtype", "bfloat16")
    memory = report["memory"]
    assert memory["peak"] >= memory["peak_before"] >= memory["before"] > 0
    assert memory["peak"] == (
        memory["weights"] + memory["kv_device"] + memory["kv_host"] + report["beyond_weights_and_kv"]
    )
    assert (memory["kv_host"] > 0) == bool(placement)


def test_a_peak_is_never_less_than_memory_was_before(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's own figure may be: it counts in batches of pages."""
    script = importlib.import_module("benchmarks.prefill_memory")
    monkeypatch.setattr(script, "peak_rss_bytes", lambda: rss_bytes() - (1 << 20))
    memory = report_of("benchmarks.prefill_memory", model, "--prompt-len", "20", "--block-size", "16")["memory"]
    assert memory["peak"] >= memory["peak_before"] >= memory["before"] > 0


# ---- linear layers


def test_cpu_linear_measures_every_projection(model: Path) -> None:
    output = model.parent / "linear.json"
    options = ["--model", str(model), "--rows", "1", "99", "--rounds", "2", "--output-json", str(output)]
    assert main_of("benchmarks.cpu_linear")(options) == 0
    report = json.loads(output.read_text())
    assert set(report["machine"]) >= MACHINE_FIELDS
    heads = 4 * HEAD_DIM
    shapes = {
        "qkv": (HIDDEN, heads + 2 * KV_HEADS * HEAD_DIM),
        "o": (heads, HIDDEN),
        "gate_up": (HIDDEN, 2 * INTERMEDIATE),
        "down": (INTERMEDIATE, HIDDEN),
        "lm_head": (HIDDEN, VOCAB),
    }
    measured = [(r["projection"], r["rows"], r["in_features"], r["out_features"]) for r in report["results"]]
    assert measured == [(name, rows, *shape) for name, shape in shapes.items() for rows in (1, 99)]
    for result in report["results"]:
        for name in ("kernel_seconds", "torch_seconds", "torch_fp32_seconds", "read_gb_s"):
            assert 0 < result[name]["low"] <= result[name]["median"] <= result[name]["high"]


def test_cpu_packed_measures_every_scheme(tmp_path: Path) -> None:
    from nanovllm.ops.packed_weights import SCHEMES

    output = tmp_path / "packed.json"
    sizes = ["--in-features", "512", "--out-features", "40", "--rows", "1", "99", "--rounds", "2"]
    assert main_of("benchmarks.cpu_packed")([*sizes, "--output-json", str(output)]) == 0
    report = json.loads(output.read_text())
    assert set(report["machine"]) >= MACHINE_FIELDS
    assert [(r["scheme"], r["rows"]) for r in report["results"]] == [(s, rows) for s in SCHEMES for rows in (1, 99)]
    for result in report["results"]:
        assert result["weight_bytes"] >= 40 * 512 // 2
        for name in ("packed_seconds", "dense_seconds", "read_gb_s"):
            assert 0 < result[name]["low"] <= result[name]["median"] <= result[name]["high"]


# ---- plan accuracy


@pytest.mark.slow
def test_plan_accuracy_puts_predictions_beside_measurements(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = importlib.import_module("benchmarks.plan_accuracy")
    output = model.parent / "accuracy.json"
    options = [
        "--num-layers",
        "2",
        "3",
        "--prompt-len",
        "40",
        "100",
        "--block-size",
        "16",
        "--output-json",
        str(output),
    ]
    assert script.main(["--model", str(model), *options, *SMALL]) == 0
    report = json.loads(output.read_text())
    cases = [(r["num_layers"], r["placement"], r["prompt_len"]) for r in report["results"]]
    assert cases == [(n, p, length) for n in (2, 3) for p in script.PLACEMENTS for length in (40, 100)]
    for result in report["results"]:
        assert (result["streamed_bytes"] > 0) == (result["placement"] != "resident")
        assert (result["cpu_attention_bytes"] > 0) == (result["placement"] == "offload" and result["prompt_len"] == 100)
        for phase in (result["prefill"], result["decode"]):
            assert phase["predicted"]["median"] > 0 and 0 < phase["measured"]["low"] <= phase["measured"]["high"]
            assert -1 < phase["error"]["low"] <= phase["error"]["median"] <= phase["error"]["high"]
    assert len(report["errors"]) == 24 and "within" in capsys.readouterr().out


# ---- bench_vllm.py


def fake_vllm(seen: dict[str, Any]) -> dict[str, ModuleType]:
    """Modules with as much of vLLM's offline API as bench_vllm.py uses."""

    class LLM:
        def __init__(self, **arguments: Any) -> None:
            seen.update(arguments)
            assert json.loads((Path(arguments["model"]) / "config.json").read_text())["hidden_size"] == HIDDEN

        def generate(self, prompts: list[dict[str, list[int]]], params: Any, use_tqdm: bool) -> list[Any]:
            start = time.monotonic()
            stamps = SimpleNamespace(
                queued_ts=start, scheduled_ts=start + 1, first_token_ts=start + 3, last_token_ts=start + 4
            )
            tokens = SimpleNamespace(token_ids=[0] * params.max_tokens)
            return [
                SimpleNamespace(prompt_token_ids=p["prompt_token_ids"], outputs=[tokens], metrics=stamps)
                for p in prompts
            ]

    vllm, platforms = ModuleType("vllm"), ModuleType("vllm.platforms")
    vars(vllm).update(LLM=LLM, SamplingParams=lambda **params: SimpleNamespace(**params), __version__="0.0")
    vars(platforms).update(current_platform=SimpleNamespace(device_type="cpu"))
    return {"vllm": vllm, "vllm.platforms": platforms}


def test_bench_vllm_reports_what_bench_reports(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    for name, module in fake_vllm(seen).items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    report = report_of("bench_vllm", model, "--prompt-len", "20", "40", *SMALL)
    assert [result["prompt_len"] for result in report["results"]] == [20, 40]
    for result in report["results"]:
        assert result["rates"]["prefill_tok_s"]["median"] == pytest.approx(result["prompt_len"] / 2)
        assert result["rates"]["ttft_s"]["median"] == pytest.approx(3)
        assert result["rates"]["tpot_s"]["median"] == pytest.approx(1 / (OUTPUT_LEN - 1))
    assert report["machine"]["vllm"] == "0.0"
    assert seen["max_model_len"] == 40 + OUTPUT_LEN and seen["dtype"] == "bfloat16"
    assert seen["enable_prefix_caching"] is False and "block_size" not in seen


def test_bench_vllm_without_vllm_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)  # as if it were not installed
    assert main_of("bench_vllm")([]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "pip install vllm" in error


# ---- refusals

REFUSED: dict[str, tuple[str, list[str], str]] = {
    "a model of no such name": ("bench", ["--model", "qwen9"], "qwen3-0.6b"),
    "more layers than there are": ("bench", ["--num-layers", "99"], "28 layers"),
    "no tokens": ("bench", ["--prompt-len", "0"], "whole number"),
    "beyond the model's positions": ("bench", ["--prompt-len", "50000", "--num-layers", "1"], "40960"),
    "nowhere to write": ("bench", ["--output-json", "/no/such/place.json"], "directory that exists"),
    "an unknown option": ("bench", ["--prompt-length", "5"], "--prompt-length"),
    "too small a share": ("bench_offload", ["--device-share", "1/1000"], "larger share"),
    "a share above one": ("bench_offload", ["--device-share", "9/8"], "at most 1"),
    "a share of nothing": ("bench_offload", ["--device-share", "1/0"], "at most 1"),
    "too small a block": ("benchmarks.prefill_memory", ["--block-size", "3"], "16"),
    "no decode to predict": ("benchmarks.plan_accuracy", ["--output-len", "1"], "at least 2"),
    "an unknown dtype": ("bench_vllm", ["--dtype", "int3"], "bfloat16"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_arguments_cost_one_sentence(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    script, options, told = REFUSED[case]
    try:
        status: object = main_of(script)(options)
    except SystemExit as stopped:
        status = stopped.code
    error = capsys.readouterr().err
    assert status == 2
    assert error.count("\n") == 1 and told in error


# ---- shapes


def test_every_shape_is_a_model_that_the_engine_knows() -> None:
    """Parameter counts as published, so that a typing error in a config shows."""
    shapes = importlib.import_module("benchmarks.shapes")
    billions = {"llama-3.1-8b": 8.03, "qwen2.5-7b-1m": 7.62, "qwen3-0.6b": 0.596, "qwen3-4b": 4.02, "qwen3-8b": 8.19}
    assert shapes.shape_names() == sorted(billions)
    for name, published in billions.items():
        with shapes.open_shape(name, None, "auto") as shape:
            assert shape.weight_bytes / shape.dtype.itemsize / 1e9 == pytest.approx(published, rel=0.002)


def test_operations_and_bytes_of_a_tiny_model(model: Path) -> None:
    """Against a count by hand, projection by projection and row by row."""
    shapes = importlib.import_module("benchmarks.shapes")
    with shapes.open_shape(str(model), None, "bfloat16") as shape:
        per_token = 2 * HIDDEN * (4 * HEAD_DIM + 2 * KV_HEADS * HEAD_DIM + 4 * HEAD_DIM + 3 * INTERMEDIATE)
        attention = sum(2 * 2 * 4 * HEAD_DIM * row for row in range(1, 8))
        assert shape.prefill_operations(7) == LAYERS * (7 * per_token + attention) + 2 * VOCAB * HIDDEN
        assert shape.kv_token_bytes == TOKEN_BYTES
        assert shape.decode_bytes(50) == shape.weight_bytes + 50 * TOKEN_BYTES


# ---- benchmarks of parts


def test_copies_are_compared_with_torch_and_with_a_contiguous_one(tmp_path: Path) -> None:
    output = tmp_path / "copies.json"
    options = ["--mib", "1", "--row-bytes", "4096", "--repeats", "2", "--device", "cpu", "--output-json", str(output)]
    assert main_of("benchmarks.copy_bandwidth")(options) == 0
    report = json.loads(output.read_text())
    assert {result["way"] for result in report["results"]} == {
        "contiguous",
        "strided",
        "torch, strided",
        "batch",
        "row by row",
    }
    assert all(result["gb_s"]["median"] > 0 for result in report["results"])
    assert report["results"][0]["of_contiguous"]["median"] == 1


def test_copies_that_are_wrong_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    script = importlib.import_module("benchmarks.copy_bandwidth")
    monkeypatch.setattr(script, "memcpy_batch_async", lambda *arguments: None)
    with pytest.raises(AssertionError, match="batch moved the wrong bytes"):
        script.main(["--mib", "1", "--row-bytes", "4096", "--device", "cpu"])


def test_rows_must_fill_the_copy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main_of("benchmarks.copy_bandwidth")(["--mib", "1", "--row-bytes", "3", "--device", "cpu"]) == 2
    assert "each must divide 1048576 bytes" in capsys.readouterr().err


def test_both_stream_layouts_are_measured(model: Path, tmp_path: Path) -> None:
    output = tmp_path / "streams.json"
    options = ["--model", str(model), "--blocks", "3", "--block-size", "16", "--repeats", "1", "--num-layers", "3"]
    assert main_of("benchmarks.transfer_streams")([*options, "--device", "cpu", "--output-json", str(output)]) == 0
    results = json.loads(output.read_text())["results"]
    assert len(results) == 6 and all(result["gb_s"]["median"] > 0 for result in results)
    assert {result["streams"] for result in results} == {"streams for groups of slots", "a stream for each direction"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "options", "shown"),
    [
        ("test_sgdma.py", ["--mib", "1", "--row-bytes", "4096", "--repeats", "1", "--device", "cpu"], "row by row"),
        ("test_attention_offload.py", ["-k", "32 and Native", "-p", "no:cacheprovider"], "of which merges"),
    ],
)
def test_some_tests_are_benchmarks_by_hand(script: str, options: list[str], shown: str) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / script), *options],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert shown in done.stdout


# ---- beside other work


def test_torch_waits_as_it_does_under_the_engine() -> None:
    """A benchmark whose torch spins after each operator takes the cores from the kernels that it measures."""
    code = "import os, sys, benchmarks; print('torch' in sys.modules, os.environ['OMP_WAIT_POLICY'])"
    chosen = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    environment = {name: value for name, value in os.environ.items() if name not in chosen}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ["False", "passive"], done.stderr


@pytest.mark.slow
def test_contention_measures_alone_beside_a_busy_process_and_beside_a_second_engine(model: Path) -> None:
    output = model.parent / "contention.json"
    options = ["--model", str(model), "--prompt-len", "20", "--output-len", "3", "--rounds", "2"]
    assert main_of("benchmarks.contention")([*options, "--output-json", str(output)]) == 0
    (result,) = json.loads(output.read_text())["results"]
    assert len(result["rounds"]) == 2 and set(result["rounds"][0]) == {"alone", "busy", "one_of_two", "other_of_two"}
    assert all(result[name] > 0 for name in ("prefill_cost", "decode_cost", "prefill_together", "decode_together"))
