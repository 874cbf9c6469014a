"""vLLM's examples of offline use, as tests: each does what the example does, and only the import differs."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from engines import greedy
from tokenizer_files import CHAT_TEMPLATE, write_byte_level

from nanovllm import (
    LLM,
    BeamSearchParams,
    EngineArgs,
    LLMEngine,
    RequestOutput,
    SamplingParams,
    TextPrompt,
    TokensPrompt,
)
from nanovllm.errors import RequestError
from nanovllm.features.vllm_api.metrics_reader import Counter, Gauge, Histogram, Metric, Vector

PROMPTS = [
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
]
SMALL: dict[str, Any] = {"kvcache_block_size": 16, "num_gpu_blocks": 120}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(path, vocab=300, max_positions=512, eos_token_id=299)
    write_byte_level(path, chat_template=CHAT_TEMPLATE)
    return str(path)


@pytest.fixture(scope="module")
def llm(model: str) -> Iterator[LLM]:
    with LLM(model, **SMALL) as made:
        yield made


# ---- llm_engine_example


def test_llm_engine_example(model: str) -> None:
    prompts = [
        ("A robot may not injure a human being", SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1)),
        ("To be or not to be,", SamplingParams(temperature=0.8, top_k=5, presence_penalty=0.2)),
        ("What is the meaning of life?", SamplingParams(n=2, temperature=0.8, top_p=0.95, frequency_penalty=0.1)),
    ]
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    args = parser.parse_args(["--model", model, "--block-size", "16", "--num-gpu-blocks", "60"])
    engine = LLMEngine.from_engine_args(EngineArgs.from_cli_args(args))
    finished: list[RequestOutput] = []
    request_id = 0
    while prompts or engine.has_unfinished_requests():
        if prompts:
            prompt, sampling_params = prompts.pop(0)
            engine.add_request(str(request_id), prompt, sampling_params)
            request_id += 1
        finished += [output for output in engine.step() if output.finished]
    engine.close()
    assert sorted(output.request_id for output in finished) == ["0", "1", "2"]
    assert {output.request_id: len(output.outputs) for output in finished} == {"0": 1, "1": 1, "2": 2}


def test_an_engine_takes_prompts_in_all_their_forms(model: str) -> None:
    engine = LLMEngine.from_engine_args(EngineArgs(model=model, block_size=16, num_gpu_blocks=60))
    ids = engine.get_tokenizer().encode("Hello")
    forms: list[Any] = ["Hello", ids, TokensPrompt(prompt_token_ids=ids, prompt="Hello"), TextPrompt(prompt="Hello")]
    for number, prompt in enumerate(forms):
        engine.add_request(str(number), prompt, params=greedy(3))
    engine.add_request("4", prompt_token_ids=ids, sampling_params=greedy(3))
    assert engine.get_num_unfinished_requests() == 5
    finished: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        finished.update({output.request_id: output for output in engine.step() if output.finished})
    assert len({tuple(output.outputs[0].token_ids) for output in finished.values()}) == 1 and len(finished) == 5
    assert [finished[str(i)].prompt for i in range(5)] == ["Hello", None, "Hello", "Hello", None]
    with pytest.raises(RequestError, match="prompt_token_ids is given twice"):
        engine.add_request("5", TokensPrompt(prompt_token_ids=ids), prompt_token_ids=ids)
    engine.close()


# ---- metrics


def test_metrics(model: str) -> None:
    with LLM(model=model, disable_log_stats=False, served_model_name=["tiny", "other"], **SMALL) as llm:
        llm.generate(PROMPTS, SamplingParams(temperature=0.8, max_tokens=6, ignore_eos=True), use_tqdm=False)
        llm.generate(PROMPTS, SamplingParams(temperature=0.0, n=1, max_tokens=2, ignore_eos=True), use_tqdm=False)
        metrics = llm.get_metrics()
    lines = []
    for metric in metrics:
        assert metric.labels["model_name"] == "tiny"
        if isinstance(metric, Gauge):
            lines.append(f"{metric.name} (gauge) = {metric.value}")
        elif isinstance(metric, Counter):
            lines.append(f"{metric.name} (counter) = {metric.value}")
        elif isinstance(metric, Vector):
            lines.append(f"{metric.name} (vector) = {metric.values}")
        elif isinstance(metric, Histogram):
            lines.append(f"{metric.name} (histogram)")
            assert metric.count == metric.buckets["+Inf"] == max(metric.buckets.values())
            assert list(metric.buckets.values()) == sorted(metric.buckets.values())
    assert len(lines) == len(metrics) > 20
    found = {metric.name: metric for metric in metrics if metric.labels.get("finished_reason", "length") == "length"}
    tokens = sum(map(len, PROMPTS)) * 2  # a token for each letter, merged ones apart

    def value(name: str) -> Any:
        metric: Metric = found[f"vllm:{name}"]
        return metric.sum if isinstance(metric, Histogram) else metric.value  # type: ignore[attr-defined]

    assert value("generation_tokens") == value("request_generation_tokens") == 4 * 6 + 4 * 2
    assert tokens * 0.7 < value("prompt_tokens") == value("request_prompt_tokens") <= tokens
    assert value("request_success") == 8 and value("num_requests_running") == 0 == value("num_requests_waiting")
    assert value("request_params_max_tokens") == 32 and 0 < value("time_to_first_token_seconds") < 100
    assert value("e2e_request_latency_seconds") >= value("request_inference_time_seconds") > 0
    assert 0 <= value("prefix_cache_hits") <= value("prefix_cache_queries")


# ---- context_extension


def test_context_extension(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3", vocab=300, max_positions=64)
    write_byte_level(tmp_path, chat_template=CHAT_TEMPLATE)
    rope_theta = 1000000
    original_max_position_embeddings = 64
    factor = 4.0
    hf_overrides = {
        "rope_parameters": {
            "rope_theta": rope_theta,
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original_max_position_embeddings,
        },
        "max_model_len": int(original_max_position_embeddings * factor),
    }
    conversation = [{"role": "user", "content": "Hello, " * 25}]
    with LLM(str(tmp_path), hf_overrides=hf_overrides, **SMALL) as llm:
        assert llm.max_model_len == 256
        (output,) = llm.chat(conversation, greedy(4), use_tqdm=False)
        assert len(output.prompt_token_ids) > 64 and len(output.outputs[0].token_ids) == 4
    with LLM(str(tmp_path), **SMALL) as llm, pytest.raises(RequestError, match="max_model_len is 64"):
        llm.chat(conversation, use_tqdm=False)


# ---- beam search


@pytest.mark.parametrize("width", [1, 3])
def test_beam_search(llm: LLM, width: int) -> None:
    params = BeamSearchParams(beam_width=width, max_tokens=5)
    ids = llm.get_tokenizer().encode(PROMPTS[1])
    prompts: list[Any] = [TextPrompt(prompt=PROMPTS[0]), TokensPrompt(prompt_token_ids=ids)]
    outputs = llm.beam_search(prompts, params)
    assert [output for limit in (1, 2) for output in llm.beam_search(prompts, params, concurrency_limit=limit)] == (
        outputs * 2
    )
    for output, text in zip(outputs, PROMPTS, strict=False):
        start = llm.get_tokenizer().encode(text)
        scores = [beam.cum_logprob / (len(beam.tokens) - len(start)) for beam in output.sequences]
        assert len(output.sequences) == width and scores == sorted(scores, reverse=True)
        for beam in output.sequences:
            generated = beam.tokens[len(start) :]
            assert beam.tokens[: len(start)] == start and 0 < len(generated) <= 5
            assert beam.text == llm.get_tokenizer().decode(beam.tokens, skip_special_tokens=True)
            chosen = [entry[token].logprob for entry, token in zip(beam.logprobs, generated, strict=True)]
            assert beam.cum_logprob == pytest.approx(sum(chosen), abs=1e-5)
    (greedy_output,) = llm.generate(PROMPTS[0], greedy(5), use_tqdm=False)
    if width == 1:
        assert outputs[0].sequences[0].tokens[-5:] == greedy_output.outputs[0].token_ids


# ---- multiple choice


def test_choices_are_scored_by_their_log_probabilities(llm: LLM) -> None:
    choices = [" Paris", " London", " a city of many bridges"]
    scores = llm.score_choices(PROMPTS[2], choices)
    start = llm.get_tokenizer().encode(PROMPTS[2])
    assert [score.choice for score in scores] == choices
    for choice, score in zip(choices, scores, strict=True):
        whole = llm.get_tokenizer().encode(PROMPTS[2] + choice)
        assert score.token_ids == whole[len(start) :]
        params = SamplingParams(max_tokens=1, prompt_logprobs=0)
        (output,) = llm.generate(TokensPrompt(prompt_token_ids=whole), params, use_tqdm=False)
        entries = (output.prompt_logprobs or [])[len(start) :]
        expected = [(entry or {})[token].logprob for token, entry in zip(score.token_ids, entries, strict=True)]
        assert score.logprobs == expected, "to the bit"
        assert score.mean_logprob == pytest.approx(sum(expected) / len(expected))
    ids = [score.token_ids for score in scores]
    assert [score.logprobs for score in llm.score_choices(start, ids)] == [score.logprobs for score in scores]
