"""A request's tokens depend on nothing but the request: not on its batch, the cache, preemption, chunks or offload."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random

import pytest
from checkpoints import checkpoint_fixture
from engines import greedy, offloaded, random_prompt, token_ids
from fast import fast_pairs

from nanovllm import LLM, SamplingParams

BLOCK, VOCAB = 16, 101


model_dir = checkpoint_fixture(vocab=VOCAB, seed=11)


def mixed_requests(count: int, seed: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts of 1 to 130 tokens, some with a common start; greedy ones and sampled ones of every kind."""
    random = Random(seed)
    start = random_prompt(70, VOCAB, seed=0)
    requests = []
    for index in range(count):
        prompt = random_prompt(random.choice([1, 7, 15, 16, 17, 31, 33, 64, 100, 130]), VOCAB, seed=index)
        if random.random() < 0.4:
            prompt = start[: random.choice([16, 32, 50, 70])] + prompt[:20]
        params = SamplingParams(
            temperature=random.choice([0.0, 0.5, 1.0]),
            top_k=random.choice([0, 5, 20]),
            top_p=random.choice([1.0, 0.8]),
            min_p=random.choice([0.0, 0.05]),
            seed=random.randrange(1000),
            max_tokens=random.choice([1, 5, 18]),
            ignore_eos=True,
        )
        requests.append((prompt, params))
    return requests


REQUESTS = mixed_requests(200, seed=1)


@pytest.fixture(scope="module")
def answer_alone(model_dir: Path) -> Callable[[int], list[int]]:
    """What a fresh engine answers to a request alone, by its index."""

    @cache
    def answer(index: int) -> list[int]:
        with LLM(model_dir, dtype="float32", kvcache_block_size=BLOCK, num_gpu_blocks=20) as llm:
            return token_ids(llm, *REQUESTS[index])[0]

    return answer


RESIDENT = {"kvcache_block_size": BLOCK, "num_gpu_blocks": 400}
ENGINES: dict[str, dict[str, object]] = {
    "all at once, resident": RESIDENT,
    "few blocks, so that some are preempted": {**RESIDENT, "num_gpu_blocks": 24},
    "no prefix cache": {**RESIDENT, "enable_prefix_caching": False},
    "small steps": {**RESIDENT, "max_num_batched_tokens": 23, "max_num_seqs": 7},
    "offloaded": offloaded(BLOCK, 4, 120),
    "offloaded, few blocks, small steps": offloaded(BLOCK, 6, 20, max_num_batched_tokens=33, cpu_attention=False),
}


FAST = ["few blocks, so that some are preempted", "offloaded"]


@pytest.mark.parametrize(("name", "count"), fast_pairs([(name, 30) for name in FAST], ENGINES, (30, 200)))
def test_requests_of_one_process_equal_fresh_engines(
    name: str, count: int, model_dir: Path, answer_alone: Callable[[int], list[int]]
) -> None:
    arguments, order = ENGINES[name], list(range(count))
    with LLM(model_dir, dtype="float32", **arguments) as llm:
        for repeat in range(2):  # then with a warm cache, in another order
            Random(repeat).shuffle(order)
            got = token_ids(llm, [REQUESTS[i][0] for i in order], [REQUESTS[i][1] for i in order])
            assert got == [answer_alone(i) for i in order]
        scheduler = llm.engine.scheduler
        if "few blocks" in name:
            assert scheduler.preemption.stats.total > 0
        if arguments.get("enable_prefix_caching", True):
            assert llm.prefix_cache_stats().hit_tokens > 0
        assert scheduler.block_manager.num_used == 0


def test_aborts_in_the_middle_leave_the_others_alone(model_dir: Path) -> None:
    """Aborted during chunked prefill and during decode, blocks reused at once: no other request changes."""
    prompts = [random_prompt(length, VOCAB, seed=9) for length in (150, 140, 90, 33)]
    with LLM(model_dir, dtype="float32", kvcache_block_size=BLOCK, num_gpu_blocks=60) as llm:
        expected = token_ids(llm, prompts, greedy(20))
    with LLM(model_dir, dtype="float32", **offloaded(BLOCK, 4, 30, max_num_batched_tokens=48)) as llm:
        for round_number in range(6):
            for index, prompt in enumerate(prompts):
                llm.engine.add_request(f"{index}", None, greedy(20), prompt)
            victim, steps = str(round_number % 3), 1 + 3 * round_number
            finished: dict[str, list[int]] = {}
            step = 0
            while llm.engine.has_unfinished_requests():
                for output in llm.engine.step():
                    if output.finished:
                        finished[output.request_id] = output.outputs[0].token_ids
                step += 1
                if step == steps and victim not in finished:
                    aborted = llm.engine.abort_request(victim)
                    assert aborted is not None and aborted.outputs[0].finish_reason == "abort"
                    done = aborted.outputs[0].token_ids
                    assert done == expected[int(victim)][: len(done)]
            assert finished | {victim: []} == {str(i): tokens for i, tokens in enumerate(expected)} | {
                victim: finished.get(victim, [])
            }
            assert llm.engine.scheduler.block_manager.num_used == 0


@pytest.mark.slow
def test_the_thousandth_request_is_like_the_first(model_dir: Path) -> None:
    requests = mixed_requests(20, seed=3)
    with LLM(model_dir, dtype="float32", **offloaded(BLOCK, 4, 25, max_num_batched_tokens=60)) as llm:
        first = [token_ids(llm, prompt, params)[0] for prompt, params in requests]
        for _ in range(50):
            got = token_ids(llm, [prompt for prompt, _ in requests], [params for _, params in requests])
            assert got == first
