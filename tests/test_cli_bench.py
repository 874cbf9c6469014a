"""`nanovllm bench`: what it measures and says."""

from __future__ import annotations

import json

import pytest
from checkpoints import make_checkpoint

from nanovllm import CompletionOutput, RequestMetrics, RequestOutput
from nanovllm.apps.cli.bench import figures_of
from nanovllm.apps.cli.main import main

WORK = ["--prompt-len", "40", "90", "--num-prompts", "2", "--repeats", "2", "--output-len", "4"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(path, vocab=97)
    (path / "model.safetensors").unlink()  # the config is enough
    return str(path)


def bench_words(model: str, *options: str) -> list[str]:
    return ["bench", "--model", model, "--load-format", "dummy", "--num-gpu-blocks", "8", *WORK, *options]


def bench(model: str, *options: str) -> int:
    return main(bench_words(model, *options))


def test_rates_are_of_the_phases() -> None:
    """Two prompts of 30 tokens: scheduled at 1 and 2, first tokens at 4 and 5, ended at 8 and 9 with 3 and 5 tokens."""
    outputs = []
    for offset, tokens in ((0.0, 3), (1.0, 5)):
        metrics = RequestMetrics(0.0, 1 + offset, 4 + offset, 8 + offset, decode_tokens=tokens - 1)
        outputs.append(RequestOutput("", None, [1] * 30, [CompletionOutput(0, "", [1] * tokens)], True, metrics))
    assert list(figures_of(outputs).values()) == [60 / (5 - 1), 6 / (9 - 4), 4.5, (4 / 2 + 4 / 4) / 2]
    alone = RequestOutput("", None, [1], [], True, RequestMetrics(0.0, 1.0, 2.0, 2.0))
    assert figures_of([alone])["decode_tok_s"] is None and figures_of([alone])["tpot_s"] is None


def test_figures_for_programs(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(model, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["engine"]["load_format"] == "dummy" and report["kv"]["num_gpu_blocks"] == 8
    assert report["engine"]["enable_prefix_caching"] is False
    assert [result["prompt_len"] for result in report["results"]] == [40, 90]
    for result in report["results"]:
        assert len(result["runs"]) == 2
        for name in ("prefill_tok_s", "decode_tok_s", "ttft_s", "tpot_s"):
            figures = [run[name] for run in result["runs"]]
            assert 0 < result[name]["low"] == min(figures) <= result[name]["median"] <= max(figures)


def test_a_sequence_that_does_not_fit_is_refused_with_flags(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(model, "--num-gpu-blocks", "4", "--kvcache-block-size", "16", "--prompt-len", "100") == 2
    sentence, flags, *rest = capsys.readouterr().err.splitlines()
    assert "make 104 tokens, and max_model_len is 64" in sentence and "prompts of up to 64 tokens fit" in sentence
    assert flags.startswith("--enable-cpu-offload --num-cpu-blocks") and rest == []
