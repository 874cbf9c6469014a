"""Everything a user can get wrong: one clear sentence with the numbers or names, nothing lost, the engine goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoints import checkpoint_fixture, edit_config, make_checkpoint
from engines import greedy, offloaded, random_prompt, token_ids

from nanovllm import LLM, SamplingParams
from nanovllm.errors import RequestError

VOCAB = 97
PROMPT = random_prompt(20, VOCAB, 1)


model_dir = checkpoint_fixture(vocab=VOCAB, max_positions=256)


def test_requests_that_cannot_be_served(model_dir: Path) -> None:
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
    with LLM(model_dir, **offloaded(16, 4, 14)) as llm:
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
