"""Everything a user can get wrong: one clear sentence with the numbers or names, nothing lost, the engine goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoints import edit_config, make_checkpoint
from engines import greedy, offloaded, random_prompt, token_ids

from nanovllm import LLM, SamplingParams
from nanovllm.errors import ConfigError, RequestError

VOCAB = 97
PROMPT = random_prompt(20, VOCAB, 1)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(path, vocab=VOCAB, max_positions=256)
    return path


def test_engine_arguments_that_cannot_be_honoured(model_dir: Path) -> None:
    arguments: dict[str, Any]
    for arguments, words in (
        ({"max_model_len": 257}, ["max_model_len=257", "256"]),
        (
            {"max_model_len": 200, "num_gpu_blocks": 10, "kvcache_block_size": 16},
            ["max_model_len=200", "160 tokens", "10 blocks", "enable_cpu_offload=True"],
        ),
        (offloaded(16, 4, 6, max_model_len=200), ["max_model_len=200", "128 tokens", "num_cpu_blocks"]),
        ({"num_gpu_blocks": 10**9}, ["num_gpu_blocks=1000000000", "GiB", "at most"]),
        (offloaded(16, 4, 10**9), ["num_cpu_blocks=1000000000", "GiB", "at most"]),
        ({"gpu_memory_utilization": 1e-9}, ["no memory for the KV cache", "gpu_memory_utilization"]),
        ({"device": "cuda"}, ["device='cuda'", "cpu"]),
        ({"tensor_parallel_size": 64}, ["tensor_parallel_size=64", "query heads", "lower it"]),
    ):
        with pytest.raises(ConfigError) as refused:
            LLM(model_dir, **arguments)
        for word in words:
            assert word in str(refused.value)


@pytest.mark.parametrize("arguments", [{"num_gpu_blocks": 16, "kvcache_block_size": 16}, offloaded(16, 4, 14)])
def test_requests_that_cannot_be_served(model_dir: Path, arguments: dict[str, Any]) -> None:
    bad: list[tuple[Any, Any, list[str]]] = [
        ([], None, []),  # no prompts: no outputs, no error
        ([[]], None, ["empty"]),
        (random_prompt(257, VOCAB, 1), None, ["257 tokens", "max_model_len is 256"]),
        ([PROMPT, random_prompt(257, VOCAB, 1)], None, ["prompts[1]: the prompt has 257 tokens"]),
        ([[1, VOCAB]], None, [str(VOCAB), f"0 to {VOCAB - 1}"]),
        ("some text", None, ["no tokenizer files"]),
        ({"prompt_ids": [1]}, None, ["prompt_token_ids", "prompt_ids"]),
        ([PROMPT, PROMPT], [greedy(1)] * 3, ["2 prompts", "3 sampling_params"]),
        ([PROMPT], ["greedy"], ["SamplingParams", "greedy"]),
        (5, None, ["5"]),
        (PROMPT, SamplingParams(stop_token_ids=[1, 500]), ["stop_token_ids=500", "from 0 to 96"]),
        (PROMPT, SamplingParams(bad_words=["word"]), ["bad_words=['word']", "no tokenizer files"]),
        ([PROMPT, PROMPT], [greedy(1), SamplingParams(prompt_logprobs=-1)], ["more than 20", "prompt_logprobs=-1"]),
    ]
    with LLM(model_dir, **arguments) as llm:
        expected = token_ids(llm, PROMPT, greedy(6))
        for prompts, params, words in bad:
            if not words:
                assert llm.generate(prompts, params, use_tqdm=False) == []
                continue
            with pytest.raises(RequestError) as refused:
                llm.generate(prompts, params, use_tqdm=False)
            for word in words:
                assert word in str(refused.value), (prompts, str(refused.value))
            assert not llm.engine.has_unfinished_requests(), "a refused call has started something"
        # One bad prompt among good ones: nothing runs.
        with pytest.raises(RequestError):
            llm.generate([PROMPT, []], greedy(1), use_tqdm=False)
        assert not llm.engine.has_unfinished_requests()
        assert token_ids(llm, PROMPT, greedy(6)) == expected


def test_generation_stops_at_the_longest_sequence(model_dir: Path) -> None:
    with LLM(model_dir, **offloaded(16, 4, 30)) as llm:
        for length in (250, 255, 256):
            (output,) = llm.generate(random_prompt(length, VOCAB, 2), greedy(50), use_tqdm=False)
            assert output.outputs[0].finish_reason == "length"
            assert len(output.outputs[0].token_ids) == max(256 - length, 1)
        (output,) = llm.generate(random_prompt(200, VOCAB, 2), greedy(None), use_tqdm=False)  # type: ignore[arg-type]
        assert len(output.outputs[0].token_ids) == 56


def test_every_end_token_of_config_and_generation_config_ends_a_request(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, vocab=VOCAB, eos_token_id=[90, 91])
    edit_config(tmp_path, "generation_config.json", eos_token_id=[91, 92])
    with LLM(tmp_path, num_gpu_blocks=8) as llm:
        assert llm.engine.limits.eos_token_ids == {90, 91, 92}
        (free,) = token_ids(llm, PROMPT, greedy(40))
    for end in set(free[2:30]):
        first = free.index(end)
        edit_config(tmp_path, "generation_config.json", eos_token_id=[91, end])
        with LLM(tmp_path, num_gpu_blocks=8) as llm:
            params = SamplingParams(temperature=0.0, max_tokens=40)
            (output,) = llm.generate(PROMPT, params, use_tqdm=False)
            assert output.outputs[0].token_ids == free[: first + 1]
            assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", None)
            stop = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, stop_token_ids=[end])
            (output,) = llm.generate(PROMPT, stop, use_tqdm=False)
            assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", end)
        break


def test_an_interrupted_call_leaves_nothing_behind(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(model_dir, dtype="float32", **offloaded(16, 4, 30, max_num_batched_tokens=30)) as llm:
        expected = token_ids(llm, [PROMPT, PROMPT[:5]], greedy(9))
        execute, calls = llm.engine.executor.execute, []

        def interrupted(batch: Any) -> Any:
            calls.append(batch)
            if len(calls) == 4:
                raise KeyboardInterrupt
            return execute(batch)

        with monkeypatch.context() as patch:
            patch.setattr(llm.engine.executor, "execute", interrupted)
            with pytest.raises(KeyboardInterrupt):
                llm.generate([PROMPT, PROMPT[:5], random_prompt(200, VOCAB, 4)], greedy(9), use_tqdm=False)
        assert not llm.engine.has_unfinished_requests()
        assert llm.engine.scheduler.block_manager.num_used == 0
        assert token_ids(llm, [PROMPT, PROMPT[:5]], greedy(9)) == expected


def test_offload_that_moves_nothing_is_said(model_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    with LLM(model_dir, enable_cpu_offload=True) as llm:
        assert llm.kv_stats().num_cpu_blocks == 0
    assert "enable_cpu_offload=True moves nothing to the host: the device's " in caplog.text
    caplog.clear()
    with LLM(model_dir, **offloaded(16, 4, 14)):
        pass
    assert caplog.text == ""
