"""What the tests of the benchmark scripts share: a tiny network, small peaks, and a script's report."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nanovllm.features.planner.measure import ProbeSizes

ROOT = Path(__file__).resolve().parent.parent
LAYERS, KV_HEADS, HEAD_DIM, VOCAB, HIDDEN, INTERMEDIATE = 3, 2, 16, 101, 64, 96
PROMPT_LEN, OUTPUT_LEN = 160, 5
TOKEN_BYTES = LAYERS * 2 * KV_HEADS * HEAD_DIM * 2  # bfloat16
MACHINE_FIELDS = {"date", "device", "cpu", "threads", "python", "torch", "nanovllm", "commit"}
SMALL = ["--output-len", str(OUTPUT_LEN), "--repeats", "2", "--warmup", "1", "--dtype", "bfloat16"]
OFFLOAD = ["--prompt-len", str(PROMPT_LEN), "--block-size", "16", "--max-num-batched-tokens", "48", "--num-layers", "3"]
OFFLOAD += ["--decode-steps", "0"]


def make_scripts_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts can be imported; the machine's peaks, which are not what is tested and take a second each, are quick."""
    monkeypatch.syspath_prepend(ROOT)
    peaks = importlib.import_module("benchmarks.peaks")
    for name, value in (("MATRIX", 64), ("BUFFER_BYTES", 4096), ("ROUNDS", 1)):
        monkeypatch.setattr(peaks, name, value)
    sizes = ProbeSizes(weight_bytes=1 << 16, kv_bytes=1 << 16, keys=128, rounds=2, seconds=0.01)
    monkeypatch.setattr(importlib.import_module("benchmarks.plan_accuracy"), "ProbeSizes", lambda: sizes)


def make_config(path: Path) -> Path:
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
    assert all(0 <= found["other_load"] <= 1 for found in (report, *report.get("results", [])) if "other_load" in found)
    return report


def check_rates(rates: dict[str, Any], prompt_len: int) -> None:
    """Each figure is between its extremes, and prefill and TTFT describe the same time."""
    for name in ("prefill_tok_s", "decode_tok_s", "ttft_s", "tpot_s"):
        assert 0 < rates[name]["low"] <= rates[name]["median"] <= rates[name]["high"]
    assert prompt_len / rates["prefill_tok_s"]["high"] <= rates["ttft_s"]["low"]
    assert rates["decode_tok_s"]["high"] == pytest.approx(1 / rates["tpot_s"]["low"])
