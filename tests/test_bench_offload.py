"""bench_offload.py from end to end on a tiny network: what it compares, counts, draws and refuses."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark_helpers import (
    OFFLOAD,
    OUTPUT_LEN,
    SMALL,
    TOKEN_BYTES,
    check_rates,
    main_of,
    make_config,
    make_scripts_small,
    report_of,
)

QUICK = [*SMALL, "--repeats", "1", "--warmup", "0"]


@pytest.fixture(autouse=True)
def scripts_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    make_scripts_small(monkeypatch)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_config(tmp_path / "tiny")


def test_bench_offload_compares_and_counts_every_length(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [*OFFLOAD, "--device-share", "0.4", *SMALL, "--prompt-len", "200", "160", "200"]
    report = report_of("bench_offload", model, *options)
    assert [result["prompt_len"] for result in report["results"]] == [160, 200], "each once, the longest last"
    assert all(rate > 0 for rate in (report["ceilings"]["matmul_gflop_s"], *report["ceilings"]["copy_gb_s"].values()))
    for result in report["results"]:
        check_result(result, num_gpu_blocks=4 if result["prompt_len"] == 160 else 5)  # 0.4 of those that hold it all
    shown = capsys.readouterr().out
    for words in ("prefill: copies overlapped", "decode: computation waits", "% of a lone large copy", "of torch.mm"):
        assert shown.count(words) >= 2
    assert "a lone large copy, h2d" in shown and "peak process memory" in shown


def check_result(result: dict[str, Any], num_gpu_blocks: int) -> None:
    """Of one prompt length, against a count by hand."""
    assert result["outputs_equal"] is True and result["as_predicted"] is True
    for name in ("on device", "resident", "offload", "offload, chunk-major"):
        check_rates(result["rates"][name], result["prompt_len"])
    for other in ("on device", "resident", "offload, chunk-major"):
        for phase in ("prefill", "decode"):
            ratio = result["ratios"][other][phase]
            assert 0 < ratio["low"] <= ratio["median"] <= ratio["high"]
    assert result["kv"]["on device"]["host_bytes"] == result["kv"]["resident"]["host_bytes"] == 0
    assert result["kv"]["offload"]["num_gpu_blocks"] == num_gpu_blocks
    counts = {
        "h2d_bytes": "cpu_attention_bytes",
        "h2d_copies": "cpu_attention_blocks",
        "d2h_bytes": None,
        "d2h_copies": None,
    }
    on_host = result["prompt_len"] + OUTPUT_LEN - 1 - result["kv"]["offload"]["resident_blocks"] * 16
    for traffic in result["traffic"].values():
        counted = traffic["counted"]
        for name, spared in counts.items():
            assert counted[name] + counted.get(spared, 0) == traffic["prefill"][name] + traffic["decode"][name] > 0
        assert counted["cpu_attention_blocks"] > 0
        assert counted["d2h_bytes"] == on_host * TOKEN_BYTES
    loads = {name: traffic["prefill"]["h2d_bytes"] for name, traffic in result["traffic"].items()}
    assert loads["offload"] == 0 < loads["offload, chunk-major"], "layer-major prefill loads nothing"
    counted = result["traffic"]["offload"]["counted"]
    copied = sum(overlap["copied_bytes"] for overlap in result["overlap"].values())
    assert copied == counted["h2d_bytes"] + counted["d2h_bytes"], "the traced run moves the same"
    for overlap in result["overlap"].values():
        assert 0 <= overlap["hidden_s"] <= overlap["copies_s"] and 0 <= overlap["waits_s"] < overlap["steps_s"]
    assert result["kernel_gaps"] is None, "of a GPU only"


def test_bench_offload_opens_no_engine_that_is_not_compared(model: Path) -> None:
    options = [*OFFLOAD, "--device-share", "2/5", *QUICK, "--against", "on-device"]
    (result,) = report_of("bench_offload", model, *options)["results"]
    assert list(result["rates"]) == list(result["kv"]) == ["on device", "offload"]
    assert list(result["ratios"]) == ["on device"]


def test_bench_offload_keeps_the_trace_of_the_longest_prompt(model: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    options = [*OFFLOAD, "--device-share", "1", *QUICK, "--output-len", "2", "--trace", str(trace)]
    options += ["--no-cpu-attention", "--prompt-len", "200", "64"]
    longest = report_of("bench_offload", model, *options)["results"][-1]
    events = json.loads(trace.read_text())["traceEvents"]
    assert {"write K/V", "attend", "step"} <= {event["name"] for event in events}
    assert sum(event["name"] == "step" for event in events) >= 200 // 48
    assert longest["overlap"]["decode"]["steps_s"] > 0


def test_gaps_between_kernels_are_measured_for_prefill_and_decode_apart(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a profiler that sees a kernel for each step, a millisecond long and two apart."""
    engine, timeline = importlib.import_module("benchmarks.engine"), importlib.import_module("benchmarks.timeline")
    steps: list[float] = []

    class Profiler(AbstractContextManager[Any]):
        def __init__(self, activities: Any) -> None:
            steps.clear()

        def __exit__(self, *_: object) -> None:
            return

        def export_chrome_trace(self, path: str) -> None:
            events = [{"cat": "kernel", "ts": at, "dur": 1e3} for at in steps]
            Path(path).write_text(json.dumps({"traceEvents": events}))

    monkeypatch.setattr(torch.profiler, "profile", Profiler)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    args = argparse.Namespace(block_size=16, max_num_batched_tokens=48, device="cpu", seed=0)
    with importlib.import_module("benchmarks.shapes").open_shape(str(model), None, "bfloat16") as shape:
        work = engine.Work.of(shape, args, 100, 4)
        with work.open(**work.on_device()) as llm:
            step = llm.engine.step
            monkeypatch.setattr(llm.engine, "step", lambda: (steps.append(len(steps) * 3e3), step())[1])
            found = timeline.kernel_gaps(llm, shape.prompts(1, 100, 0)[0], 4)
            assert not llm.engine.has_unfinished_requests()
    assert {phase: gaps.kernels for phase, gaps in found.items()} == {"prefill": 3, "decode": 3}, "48 + 48 + 4 tokens"
    assert found["decode"].idle_s == pytest.approx(4e-3) and found["decode"].span_s == pytest.approx(7e-3)


def test_bench_offload_refuses_a_picture_before_the_work_without_matplotlib(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not installed
    options = ["--model", str(model), *OFFLOAD, *SMALL, "--plot", str(tmp_path / "p.png")]
    assert main_of("bench_offload")(options) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.count("\n") == 1 and "pip install 'nanovllm[plot]'" in told.err


def test_bench_offload_draws_what_it_wrote(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures take matplotlib")
    picture = tmp_path / "p.png"
    options = [*OFFLOAD, "--device-share", "2/5", *QUICK, "--decode-steps", "1", "--plot", str(picture)]
    report_of("bench_offload", model, *options)
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_bench_offload_shows_decode_by_share(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [*OFFLOAD, "--device-share", "0.4", *SMALL, "--decode-steps", "2"]
    (result,) = report_of("bench_offload", model, *options)["results"]
    by_share = result["by_share"]
    assert by_share["outputs_equal"] is True
    on_device, *results = by_share["results"]
    names = [result["name"] for result in results]
    assert names == ["share 0", "share 0.25", "share 0.5", "share 0.75", "share 1", "automatic"]
    assert on_device["h2d_bytes"] == on_device["cpu_attention_bytes"] == 0 and on_device["taken"] is None
    attended = [result["cpu_attention_bytes"] for result in results[:5]]
    assert attended == sorted(set(attended)) and attended[0] == 0, "more blocks with every share"
    assert all(result["as_predicted"] and result["token_ms"]["median"] > 0 for result in by_share["results"])
    assert results[4]["taken"] == results[5]["taken"] == 1.0, "on one processor"
    assert "DIFFERS" not in (shown := capsys.readouterr().out) and "automatic takes 100%" in shown


def test_bench_offload_fails_when_outputs_differ(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = importlib.import_module("benchmarks.offload")
    generate = script.generate

    def lie_once(llm: Any, *rest: Any) -> Any:
        outputs = generate(llm, *rest)
        if llm.kv_stats().host_bytes:
            outputs[0].outputs[0].token_ids[-1] += 1
        return outputs

    monkeypatch.setattr(script, "generate", lie_once)
    assert main_of("bench_offload")(["--model", str(model), *OFFLOAD, "--device-share", "2/5", *SMALL]) == 1


def test_bench_offload_fails_when_transfers_are_not_as_predicted(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = importlib.import_module("benchmarks.offload")
    predict, one_more = script.predict_request, script.TransferCount(h2d_copies=1)
    monkeypatch.setattr(script, "predict_request", lambda *a, **named: predict(*a, **named) + one_more)
    assert main_of("bench_offload")(["--model", str(model), *OFFLOAD, "--device-share", "2/5", *SMALL]) == 1
    assert "DIFFERS" in capsys.readouterr().out
