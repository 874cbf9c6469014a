"""Random engines, requests and drafts: whatever happens, outputs are those without speculation, to the bit."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
from block_helpers import check_states
from checkpoints import make_checkpoint
from drafters import CheckedDrafter
from engines import for_groups
from fast import fast_only
from hypothesis import given, settings
from hypothesis import strategies as st
from random_requests import BLOCK, BLOCK_GIB, VOCAB, Asked, Driver, difference, random_engine, random_request
from tokenizer_files import write_byte_level

from nanovllm import LLM, build
from nanovllm.engine.prefix_cache import PrefixCache
from nanovllm.engine.request import Sequence as Running
from nanovllm.memory import states
from nanovllm.outputs import RequestOutput

MODELS: dict[str, dict[str, Any]] = {
    "dense": {"family": "llama"},
    "windows": {"family": "gpt_oss", "layers": 3},
    "windows of other sizes": {"family": "gemma4", "sliding_window": 21},
    "recurrent": {"family": "qwen3_5"},
}
TIMES = int(os.environ.get("NANOVLLM_FUZZ_TIMES", "8"))  # rounds of each model
SHORT = 80  # tokens of the longest sequence
KINDS = ("right", "right", "right", "mistake", "mistake", "anything", "nothing")


class Drafts(CheckedDrafter):
    """Drafts what follows, the same but for one token, any tokens, or none.

    follows: the output of a request by its name, and what would follow its end.
    """

    def __init__(self, random: Random) -> None:
        self.follows: Callable[[str], Sequence[int]] = lambda name: ()
        self._random = random

    def draft(self, seq: Running, most: int, rows: int, tokens: int) -> list[int]:
        random = self._random
        kind = self._random.choice(KINDS)
        if kind == "nothing":
            return []
        drafts = [random.randrange(VOCAB) for _ in range(random.randint(most // 2, most))]
        if kind != "anything":
            right = self.follows(seq.request.request_id)[seq.num_output_tokens :][: len(drafts)]
            drafts[: len(right)] = right
        if kind == "mistake":
            at = random.randrange(len(drafts))
            drafts[at] = (drafts[at] + random.randrange(1, VOCAB)) % VOCAB
        return drafts


class Plain:
    """A model, and engines of it without speculation, by the length and the type of their KV."""

    def __init__(self, model: Path) -> None:
        self.model = model
        self._open = ExitStack()
        self.engine = cache(self._start)

    def _start(self, max_model_len: int, kv_cache_dtype: str) -> LLM:
        sizes = for_groups(self.model, {"kvcache_block_size": BLOCK, "num_gpu_blocks": 200})
        facts = {"max_model_len": max_model_len, "kv_cache_dtype": kv_cache_dtype}
        return self._open.enter_context(LLM(self.model, **sizes, **facts, enable_prefix_caching=False))

    def close(self) -> None:
        self._open.close()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Plain]]:
    """The engines of a model by its name in MODELS."""

    @cache
    def of(model: str) -> Plain:
        path = tmp_path_factory.mktemp("fuzz") / "model"
        make_checkpoint(path, seed=5, **{"vocab": VOCAB, "eos_token_id": [VOCAB - 1], **MODELS[model]})
        write_byte_level(path)
        made.append(Plain(path))
        return made[-1]

    made: list[Plain] = []
    yield of
    for each in made:
        each.close()


def small_engine(random: Random) -> dict[str, Any]:
    """A random engine; most of them hold few short sequences, so that these are preempted often."""
    arguments = random_engine(random)
    arguments |= {"kv_cache_dtype": random.choice(["auto", "auto", "auto", "int8"])}
    if random.random() < 0.75:
        arguments |= {"max_model_len": SHORT, "max_num_seqs": 8, "swap_space": 60 * BLOCK_GIB}
        arguments |= {"preemption_mode": random.choice(["swap", "recompute"])}
        arguments["num_cpu_blocks" if "num_cpu_blocks" in arguments else "num_gpu_blocks"] = 6
    return arguments


def request(random: Random, earlier: list[list[int]]) -> Asked:
    """A random request, mostly of one sequence that goes on for a while, and often with an earlier prompt."""
    asked = random_request(random, earlier)
    if random.random() < 0.4:
        asked.prompt = random.choice(earlier)
        asked.salt = None
    asked.prompt = asked.prompt[: random.choice([1, 5, 12, 40, 40])]
    earlier.append(asked.prompt)
    if random.random() < 0.8 and asked.params.max_tokens != 0:
        one = {"n": 1, "best_of": None, "use_beam_search": False, "length_penalty": 1.0, "early_stopping": False}
        longer = {"max_tokens": random.choice([12, 30, None]), "stop_token_ids": random.choice([None, [7, 8, 9]])}
        asked.params = replace(asked.params, **one, **longer)
    return asked


def answers(engine: LLM, requests: Sequence[Asked]) -> tuple[list[RequestOutput], list[Sequence[int]]]:
    """What they should be told, and the tokens that follow the prompts, also where a request ends before them."""
    prompts = [asked.prompt for asked in requests]
    found = engine.generate(prompts, [replace(asked.params) for asked in requests], use_tqdm=False)
    outputs = [output.outputs[0] for output in found]
    longer = [
        replace(asked.params, max_tokens=len(output.token_ids) + BLOCK, stop=None, stop_token_ids=None, ignore_eos=True)
        if output.finish_reason == "stop" and asked.params.structured_outputs is None
        else replace(asked.params)
        for asked, output in zip(requests, outputs, strict=True)
    ]
    return found, [each.outputs[0].token_ids for each in engine.generate(prompts, longer, use_tqdm=False)]


def run_round(plain: Plain, seed: int, most: int) -> tuple[Counter[str], list[str]]:
    """A random engine, and up to `most` random requests to their end. Returns counts, and what was wrong."""
    random = Random(seed)
    earlier = [[random.randrange(VOCAB - 20) for _ in range(SHORT // 2)] for _ in range(2)]
    requests = [request(random, earlier) for _ in range(random.randint(most // 2, most))]
    arguments = for_groups(plain.model, small_engine(random))
    expected, follows = answers(plain.engine(arguments["max_model_len"], arguments["kv_cache_dtype"]), requests)
    config = {"method": "ngram", "num_speculative_tokens": random.choice([1, 3, 8, 40])}
    drafts = Drafts(random)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "_drafter", lambda *_: drafts)
        patch.setattr(states, "SNAPSHOTS_PER_SEQUENCE", random.choice([0, 1, 2]))
        llm = LLM(plain.model, **arguments, speculative_config=config)
    with llm:
        scheduler = llm.engine.scheduler
        manager = llm.engine.scheduler.block_manager
        manager.pool.prefix_cache = PrefixCache(manager.groups, manager.prefix_cache.enabled, random.choice([4, 8, 16]))
        number = {id(asked): index for index, asked in enumerate(requests)}
        driver = Driver(llm, random, len(requests), iter(requests).__next__)
        drafts.follows = lambda name: follows[number[id(driver.asked[name])]]
        while driver.go_on():
            queues = scheduler.waiting, scheduler.pending, scheduler.swapped, scheduler.running
            check_states(manager, [seq for queue in queues for each in queue for seq in each.live])
        wrong = [left for left in [driver.check_idle()] if left is not None]
        for name, asked in driver.asked.items():
            due = expected[number[id(asked)]]
            found = difference(asked, due)
            pieces = [asked.pieces[index] for index in sorted(asked.pieces)]
            if found is None and not asked.is_cut and pieces != due.outputs:
                found = f"{pieces} instead of {due.outputs}"
            if found is not None:
                wrong.append(f"request {name}, {asked.params}: {found}")
        metrics = llm.metrics()
    counts = Counter[str](
        accepted=metrics.drafts.accepted_tokens,
        rejected=metrics.drafts.drafted_tokens - metrics.drafts.accepted_tokens,
        recomputed=metrics.preemptions.recomputed,
        swapped=metrics.preemptions.swapped,
        cached=metrics.prefix_cache.hit_tokens,
    )
    return counts, wrong


CASES = [("dense", 2, 4), ("recurrent", 2, 4), *((model, TIMES, 14) for model in MODELS)]


@pytest.mark.parametrize(("model", "rounds", "most"), fast_only(CASES[:2], CASES))
def test_outputs_are_those_without_speculation(
    plain: Callable[[str], Plain], model: str, rounds: int, most: int
) -> None:
    """Rounds that a seed gives; also right where steps fail, where requests are aborted, preempted or found cached."""
    totals = Counter[str]()
    engines = plain(model)

    @settings(max_examples=rounds)
    @given(seed=st.integers(0, 2**32 - 1))
    def check(seed: int) -> None:
        counts, wrong = run_round(engines, seed, most)
        totals.update(counts)
        assert not wrong, wrong

    logging.disable(logging.ERROR)  # of every preemption and every failed step
    try:
        check()
    finally:
        logging.disable(logging.NOTSET)
    assert rounds < 8 or min(totals["accepted"], totals["rejected"]) > 0, totals
    assert rounds < 20 or min(totals.values()) > 0, totals
