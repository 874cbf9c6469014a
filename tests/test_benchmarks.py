"""The benchmark scripts from end to end on a tiny network: what they promise to report is there, and adds up."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from nanovllm.ops.cpu_linear import available
from nanovllm.planner.measure import ProbeSizes

ROOT = Path(__file__).resolve().parent.parent
PROMPT_LEN, OUTPUT_LEN, LAYERS, KV_HEADS, HEAD_DIM, VOCAB, HIDDEN, INTERMEDIATE = 160, 5, 3, 2, 16, 101, 64, 96
TOKEN_BYTES = LAYERS * 2 * KV_HEADS * HEAD_DIM * 2  # bfloat16
MACHINE_FIELDS = {"date", "device", "cpu", "threads", "python", "torch", "nanovllm", "commit"}
SMALL = ["--output-len", str(OUTPUT_LEN), "--repeats", "2", "--warmup", "1", "--dtype", "bfloat16"]


@pytest.fixture(autouse=True)
def scripts_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)


@pytest.fixture(autouse=True)
def small_peaks(scripts_can_be_imported: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's peaks are not what is tested, and take a second each."""
    peaks = importlib.import_module("benchmarks.peaks")
    for name, value in (("MATRIX", 64), ("BUFFER_BYTES", 4096), ("ROUNDS", 1)):
        monkeypatch.setattr(peaks, name, value)
    sizes = ProbeSizes(weight_bytes=1 << 16, kv_bytes=1 << 16, keys=128, rounds=2, seconds=0.01)
    monkeypatch.setattr(importlib.import_module("benchmarks.plan_accuracy"), "ProbeSizes", lambda: sizes)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory that holds nothing but a config."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }
    path = tmp_path / "tiny"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    return path


def main_of(script: str) -> Callable[[list[str]], int]:
    main: Callable[[list[str]], int] = importlib.import_module(script).main
    return main


def report_of(script: str, model: Path, *options: str) -> dict[str, Any]:
    """Run a script to its end and return what it wrote."""
    output = model.parent / f"{script}.json"
    status = main_of(script)(["--model", str(model), "--output-json", str(output), *options])
    assert status == 0
    report: dict[str, Any] = json.loads(output.read_text())
    assert set(report["machine"]) >= MACHINE_FIELDS
    assert report["model"]["num_layers"] <= LAYERS
    assert 0 <= report["other_load"] <= 1
    return report


def check_rates(rates: dict[str, Any], prompt_len: int) -> None:
    """Each figure lies between its extremes, and prefill and TTFT tell of the same seconds."""
    for name in ("prefill_tok_s", "decode_tok_s", "ttft_s", "tpot_s"):
        assert 0 < rates[name]["low"] <= rates[name]["median"] <= rates[name]["high"]
    assert prompt_len / rates["prefill_tok_s"]["high"] <= rates["ttft_s"]["low"]
    assert rates["decode_tok_s"]["high"] == pytest.approx(1 / rates["tpot_s"]["low"])


# ---- bench.py


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


# ---- bench_offload.py

OFFLOAD = ["--prompt-len", str(PROMPT_LEN), "--block-size", "16", "--max-num-batched-tokens", "48", "--num-layers", "3"]
OFFLOAD += ["--decode-steps", "0"]


def test_bench_offload_compares_and_counts(model: Path) -> None:
    report = report_of("bench_offload", model, *OFFLOAD, "--device-share", "0.4", *SMALL)
    assert report["outputs_equal"] is True
    for name in ("on device", "resident", "offload", "offload, chunk-major"):
        check_rates(report["rates"][name], PROMPT_LEN)
    for other in ("on device", "resident", "offload, chunk-major"):
        for phase in ("prefill", "decode"):
            ratio = report["ratios"][other][phase]
            assert 0 < ratio["low"] <= ratio["median"] <= ratio["high"]
    assert report["kv"]["on device"]["host_bytes"] == report["kv"]["resident"]["host_bytes"] == 0
    assert report["kv"]["offload"]["num_gpu_blocks"] == 4  # 0.4 of the 11 that hold prompt and output
    counts = {"h2d_bytes": "arm_bytes", "h2d_copies": "arm_blocks", "d2h_bytes": None, "d2h_copies": None}
    on_host = PROMPT_LEN + OUTPUT_LEN - 1 - report["kv"]["offload"]["resident_blocks"] * 16
    for traffic in report["traffic"].values():
        counted = traffic["counted"]
        for name, spared in counts.items():
            assert counted[name] + counted.get(spared, 0) == traffic["prefill"][name] + traffic["decode"][name] > 0
        assert counted["arm_blocks"] > 0
        assert counted["d2h_bytes"] == on_host * TOKEN_BYTES
        assert traffic["copy_peak_gb_s"]["h2d"] > 0 and traffic["copy_peak_gb_s"]["d2h"] > 0
    loads = {name: traffic["prefill"]["h2d_bytes"] for name, traffic in report["traffic"].items()}
    assert loads["offload"] == 0 < loads["offload, chunk-major"], "layer-major prefill loads nothing"


def test_bench_offload_shows_decode_by_share(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [*OFFLOAD, "--device-share", "0.4", *SMALL, "--decode-steps", "2"]
    by_share = report_of("bench_offload", model, *options)["by_share"]
    assert by_share["outputs_equal"] is True
    on_device, *results = by_share["results"]
    names = [result["name"] for result in results]
    assert names == ["share 0", "share 0.25", "share 0.5", "share 0.75", "share 1", "automatic"]
    assert on_device["h2d_bytes"] == on_device["arm_bytes"] == 0 and on_device["taken"] is None
    arm = [result["arm_bytes"] for result in results[:5]]
    assert arm == sorted(set(arm)) and arm[0] == 0, "more blocks with every share"
    assert all(result["as_predicted"] and result["token_ms"]["median"] > 0 for result in by_share["results"])
    assert results[4]["taken"] == results[5]["taken"] == 1.0, "on one processor"
    assert "DIFFERS" not in (shown := capsys.readouterr().out) and "automatic takes 100%" in shown


def test_bench_offload_fails_when_outputs_differ(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = importlib.import_module("bench_offload")
    generate = script.generate

    def lie_once(llm: Any, *rest: Any) -> Any:
        outputs = generate(llm, *rest)
        if llm.kv_stats().host_bytes:
            outputs[0].outputs[0].token_ids[-1] += 1
        return outputs

    monkeypatch.setattr(script, "generate", lie_once)
    assert script.main(["--model", str(model), *OFFLOAD, "--device-share", "2/5", *SMALL]) == 1


def test_bench_offload_fails_when_transfers_are_not_as_predicted(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = importlib.import_module("bench_offload")
    predict, one_more = script.predict_request, script.TransferCount(h2d_copies=1)
    monkeypatch.setattr(script, "predict_request", lambda *a, **named: predict(*a, **named) + one_more)
    assert script.main(["--model", str(model), *OFFLOAD, "--device-share", "2/5", *SMALL]) == 1
    assert "DIFFERS" in capsys.readouterr().out


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


# ---- linear layers


@pytest.mark.skipif(not available(), reason="this processor has no AVX512-bf16")
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
        for name in ("kernel_gb_s", "torch_gb_s", "read_gb_s"):
            assert 0 < result[name]["low"] <= result[name]["median"] <= result[name]["high"]
        assert not (result["rows"] == 99 and result["kernel_is_used"])


def test_cpu_linear_says_what_it_needs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    script = importlib.import_module("benchmarks.cpu_linear")
    monkeypatch.setattr(script.cpu_linear, "available", lambda: False)
    assert script.main([]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "AVX512-bf16" in error


# ---- plan accuracy


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
        assert (result["arm_bytes"] > 0) == (result["placement"] == "offload" and result["prompt_len"] == 100)
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
    assert {result["streams"] for result in results} == {"a stream for each slot", "a stream for each direction"}


def test_bench_offload_writes_a_timeline(model: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    quick = [*SMALL, "--repeats", "1", "--warmup", "0", "--output-len", "2"]
    report_of("bench_offload", model, *OFFLOAD, "--device-share", "2/5", *quick, "--trace", str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    assert {"h2d copy", "d2h copy", "attend", "step"} <= {event["name"] for event in events}
