"""The comparison with other engines, without them: checkpoint, turns, failures, and the arithmetic of the report."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import __main__ as script
from benchmarks.peers.checkpoint import make_checkpoint
from benchmarks.peers.driver import Findings, Plan, Workshop, take_turns
from benchmarks.peers.env import EngineFailure
from benchmarks.peers.runner import Job
from benchmarks.shapes import open_shape
from nanovllm import LLM, SamplingParams

LAYERS, HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 2, 64, 96, 4, 2, 16, 300
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}
RECURRENT = CONFIG | {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "full_attention_interval": 2,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}
FAILED = "vllm failed with exit status 1: ValueError: no"
CEILING = {"matmul_flop_s": 1e9, "read_bytes_s": 1e6}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "tiny"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


def result(prefill_s: float, tpot_s: float | None = 0.1, *, peak: int = 10**9, tokens: list[int] | None = None) -> Any:
    tokens = [1, 2, 3, 4] if tokens is None else tokens
    figures = {"prefill_s": prefill_s, "tpot_s": tpot_s, "peak_rss_bytes": peak}
    return {"version": "1", "tokens": tokens, "ceiling": dict(CEILING), **figures}


# ---- checkpoint


@pytest.mark.parametrize(("config", "kind"), [(CONFIG, "BF16"), (CONFIG, "Q8_0"), (RECURRENT, "BF16")])
def test_gguf_is_loaded_by_nanovllm(model: Path, tmp_path: Path, config: dict[str, Any], kind: str) -> None:
    pytest.importorskip("gguf", reason="the package gguf is not installed")
    (model / "config.json").write_text(json.dumps(config))
    with open_shape(str(model), None, "bfloat16") as shape:
        checkpoint = make_checkpoint(shape, tmp_path / "checkpoint", seed=0)
    gguf = Workshop(tmp_path, ()).gguf(checkpoint, Path(sys.executable), kind)
    assert gguf == Workshop(tmp_path, ()).gguf(checkpoint, Path("no-such-python"), kind), "written once"
    with open_shape(str(gguf), None, "auto", "auto") as stored:
        assert (stored.weight_bytes < 0.6 * shape.weight_bytes) == (kind == "Q8_0")
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    tokens = []
    for model in (gguf, checkpoint):
        with LLM(model, dtype="bfloat16", num_gpu_blocks=8, kvcache_block_size=64, skip_tokenizer_init=True) as llm:
            tokens.append(llm.generate([[5, 6, 7]], params, use_tqdm=False)[0].outputs[0].token_ids)
    assert len(tokens[0]) == 4 and (tokens[0] == tokens[1] or kind != "BF16")


# ---- turns


def job() -> Job:
    return Job("model", None, [1], [2], 4, "bfloat16", 1, 0)


def turns(plan: Plan, run: Any) -> Findings:
    findings = Findings()
    jobs = {n: job() for n in plan.prompt_lens}
    assert sum(1 for _ in take_turns(plan, jobs, run, lambda: dict(CEILING), findings)) == plan.repeats
    return findings


# ---- report


def test_the_script_from_end_to_end(model: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    def run(engine: str, job: Job) -> dict[str, Any]:
        if engine == "vllm":
            raise EngineFailure(FAILED)
        return result(0.5 if engine == "nanovllm" else 1.0)

    monkeypatch.setattr(Workshop, "pythons", lambda self, engines, failures: dict.fromkeys(engines, Path("python")))
    monkeypatch.setattr(Workshop, "runner", lambda self, pythons: run)
    monkeypatch.setattr(Workshop, "ceilings", lambda self: dict(CEILING))
    out = tmp_path / "out"
    arguments = ["--engines", "nanovllm", "vllm", "transformers", "--prompt-lens", "64", "512", "--output-len", "4"]
    paths = ["--model", str(model), "--work-dir", str(tmp_path / "work"), "--output-dir", str(out)]
    assert script.main([*arguments, *paths]) == 1
    report = json.loads((out / "peers.json").read_text())
    assert report["failures"] == dict.fromkeys(("vllm at 64", "vllm at 512"), FAILED)
    measured = [(row["engine"], row["prompt_len"]) for row in report["rows"]]
    assert measured == [(engine, n) for n in (64, 512) for engine in ("nanovllm", "transformers")]
    assert len(report["ceilings"]) == 1 + 2 * 2 * 3  # engines that give results, lengths, rounds
    text = (out / "peers.md").read_text()
    assert text.strip() in capsys.readouterr().out
    assert "| 512    | transformers  | 2.00    | 1.00   |" in text
    assert f"- vllm at 512: {FAILED}" in text
