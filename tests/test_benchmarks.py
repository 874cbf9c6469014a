"""The benchmark scripts from end to end on a tiny network: what they report is there, and verdicts follow from it.

Those that are parts of the GPU check run in its dry run (`make gpu-check DRY=1`).
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from benchmark_helpers import (
    HIDDEN,
    MACHINE_FIELDS,
    OFFLOAD,
    OUTPUT_LEN,
    ROOT,
    SMALL,
    main_of,
    make_config,
    make_scripts_small,
    report_of,
)


@pytest.fixture(autouse=True)
def scripts_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    make_scripts_small(monkeypatch)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_config(tmp_path / "tiny")


TINY = ["--prompt-len", "20", "--output-len", "3"]
SCRIPTS: dict[str, tuple[str, list[str]]] = {  # the key of its results, and options
    "benchmarks.two_trees": ("results", [str(ROOT), *TINY, "--rounds", "2"]),
    "benchmarks.contention": ("results", [*TINY, "--rounds", "2"]),
    "benchmarks.plan_accuracy": ("results", [*SMALL, "--num-layers", "2", "--prompt-len", "100", "--block-size", "16"]),
    "benchmarks.kv_memory": ("results", ["--prompt-len", "200", "--max-num-batched-tokens", "64"]),
    "benchmarks.cpu_linear": ("results", ["--rows", "1", "99", "--rounds", "2"]),
    "benchmarks.serving": (
        "tokens_per_second",
        ["--prompt-len", "20", "--output-len", "8", "--requests", "2", "--long-prompt-len", "64", "--repeats", "1",
         "--block-size", "16", "--max-num-batched-tokens", "32", "--load-format", "dummy"],
    ),
    "benchmarks.ranks": ("one_rank_step_s", [*TINY, "--dtype", "float32", "--device", "cpu"]),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_runs_and_writes_figures(script: str, model: Path) -> None:
    key, options = SCRIPTS[script]
    output = model.parent / "report.json"
    assert main_of(script)([*options, "--model", str(model), "--output-json", str(output)]) == 0
    report = json.loads(output.read_text())
    assert report[key] and set(report.get("machine", report.get("facts"))) >= MACHINE_FIELDS


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
