"""Random sessions of agents: answers are those of a fresh engine to the bit, and few old tokens are computed again."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from itertools import count, product
from pathlib import Path
from typing import Any

import pytest
from block_helpers import check_states, states_of
from checkpoints import make_checkpoint
from content_model import VOCAB, expected_output
from engine_helpers import Bench
from engines import for_groups
from fast import fast_only
from hypothesis import given, settings
from hypothesis import strategies as st
from random_sessions import KINDS, LONGEST_ANSWER, ROUNDS, Act, Bound, Past, Sessions

from benchmarks.session_patterns import OTHER_BOUND, Asked, Tokens
from nanovllm import LLM
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams

TIMES = int(os.environ.get("NANOVLLM_FUZZ_TIMES", "1"))  # as many examples
MANY = 20  # examples, which meet all kinds of acts
BLOCK = 16  # tokens, of real engines
LONGEST = 600  # tokens of a prompt
SIZES: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "kvcache_block_size": BLOCK,
    "max_model_len": LONGEST + LONGEST_ANSWER,
    "max_num_seqs": 4,
}
REAL: dict[str, dict[str, Any]] = {
    "windows": {
        "family": "gemma3",
        "layers": 3,
        "layer_types": ["sliding_attention"] * 2 + ["full_attention"],
        "sliding_window": 24,
    },
    "recurrent layers": {"family": "qwen3_5"},
}
TIGHT = LONGEST // BLOCK + 4  # blocks of each KV group
MEMORIES: dict[str, dict[str, Any]] = {
    "room for all": {"num_gpu_blocks": 1000},
    "too few blocks": {"num_gpu_blocks": TIGHT, "preemption_mode": "recompute"},
    "swap": {"num_gpu_blocks": TIGHT, "preemption_mode": "swap", "swap_space": "8M"},
    "offload": {"enable_cpu_offload": True, "num_gpu_blocks": 4, "num_cpu_blocks": TIGHT},
}
# Of the model of KV content: blocks of each group on device, host and in swap, and slots for states on device and host.
CONTENT_MEMORIES = {
    "room for all": (500, 0, 0, (200, 0)),
    "too few blocks": (11, 0, 0, (8, 2)),
    "swap": (11, 0, 40, (8, 8)),
    "offload": (4, 9, 0, (6, 6)),
}
# As these, for a few requests.
LITTLE = {"few blocks": (30, 0, 0, (24, 0)), "few states": (60, 0, 0, (4, 12)), "offload": (8, 24, 0, (4, 20))}


def all_kept(block: int) -> Bound:
    """The bound where memory keeps everything: a block where prompts or answers ended, or prompts parted."""
    return lambda asked, _prompt, _past: block if asked.is_known else OTHER_BOUND


class LastUsed:
    """The bound in any memory (docs/memory-and-ordering.md, "Prefixes"), of prompts that come one after the other.

    A prompt that goes on where an earlier prompt or its answer ended computes at most a block before that again, if all
    tokens of the requests since then fit, those of the longest twice, and eight states of each.
    """

    def __init__(self, engine: ContentEngine) -> None:
        pool = engine.bench.manager.pool
        states = states_of(engine.bench.manager)
        assert states is not None
        self.num_promised = 0  # prompts of which some tokens must be found, although not all requests fit
        self._block = engine.block
        self._groups = len(pool.groups)
        self._num_blocks = pool.num_blocks
        self._num_slots = states.slots.num_device_slots + states.slots.num_host_slots

    def __call__(self, asked: Asked, prompt: Tokens, past: Sequence[Past]) -> int:
        first = next(begin for begin in range(len(past) + 1) if self._fit(past[begin:]))
        kept = [end for each in past[first:] for end in each.ends if each.tokens[:end] == prompt[:end]]
        self.num_promised += first > 0 and bool(kept)
        return asked.old - max(kept, default=0) + self._block

    def _fit(self, requests: Sequence[Past]) -> bool:
        blocks = [self._groups * (1 + -(-each.longest // self._block)) for each in requests]
        return sum(blocks) + max(blocks, default=0) <= self._num_blocks and 8 * len(blocks) <= self._num_slots


class RealEngine:
    """A tiny model, whose blocks outlive restarts on disk."""

    vocab = 199
    block = BLOCK
    system = 300  # a unit of 256 tokens is found on disk
    message = 4 * BLOCK
    longest = LONGEST

    def __init__(self, model: Path, alone: LLM, directory: Path, memory: Mapping[str, Any]) -> None:
        """alone: an engine of the model without a prefix cache."""
        self._alone = alone
        self._arguments = {**SIZES, **for_groups(model, dict(memory)), "max_num_batched_tokens": 200}
        self._model = model
        self._directory = directory
        self._start()

    def _start(self) -> None:
        self.llm = LLM(self._model, kv_cache_dir=self._directory, **self._arguments)

    @property
    def engine(self) -> LLMEngine:
        return self.llm.engine

    def step(self) -> list[RequestOutput]:
        return self.engine.step()

    def restart(self) -> None:
        self.llm.close()
        self._start()

    def answer(self, output: RequestOutput) -> Any:
        """Tokens and log-probabilities."""
        completion = output.outputs[0]
        rows = [{token: entry.logprob for token, entry in row.items()} for row in completion.logprobs or ()]
        return completion.token_ids, rows

    def expected(self, prompt: Tokens, params: SamplingParams) -> Any:
        return self.answer(self._alone.generate([prompt], params, use_tqdm=False)[0])


class ContentEngine:
    """The model of KV content with windows and recurrent layers. A restart forgets everything."""

    vocab = VOCAB
    block = 4
    system = 13
    message = 12
    longest = 48

    def __init__(self, device: int, host: int, swap: int, states: tuple[int, int]) -> None:
        windows = (7, None, 3)
        sizes = [len(windows) * count for count in (device, host)]
        self.bench = Bench(
            *sizes,
            swap=len(windows) * swap,
            windows=windows,
            states=states,
            max_num_seqs=4,
            budget=8,
            max_model_len=self.longest + LONGEST_ANSWER,
            mode="swap" if swap else None,
        )

    @property
    def engine(self) -> LLMEngine:
        return self.bench.engine

    def step(self) -> list[RequestOutput]:
        outputs = self.bench.step()
        scheduler = self.bench.scheduler
        queues = scheduler.waiting, scheduler.pending, scheduler.swapped, scheduler.running
        check_states(self.bench.manager, [seq for queue in queues for request in queue for seq in request.live])
        return outputs

    def restart(self) -> None:
        self.engine.reset_prefix_cache()

    def answer(self, output: RequestOutput) -> Any:
        return output.outputs[0].token_ids

    def expected(self, prompt: Tokens, params: SamplingParams) -> Any:
        return expected_output(prompt, params.max_tokens or 0, seed=params.seed)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], tuple[Path, LLM]]]:
    """The directory of a model of REAL, and an engine of it without a prefix cache."""
    with ExitStack() as engines:

        @cache
        def of(name: str) -> tuple[Path, LLM]:
            path = tmp_path_factory.mktemp("sessions") / "model"
            make_checkpoint(path, seed=5, max_positions=2048, **REAL[name])
            blocks = for_groups(path, {"num_gpu_blocks": 50})
            return path, engines.enter_context(LLM(path, enable_prefix_caching=False, **SIZES, **blocks))

        yield of


@pytest.fixture(autouse=True)
def without_warnings() -> Iterator[None]:
    """Every preemption logs one."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def bound_of(memory: str, block: int) -> Bound | None:
    """None: requests run at once, and answers alone are compared."""
    return all_kept(block) if memory == "room for all" else None


def check_counts(memory: str, counts: Counter[str]) -> None:
    """A run of many examples has met what it is for."""
    met = {"too few blocks": "recomputed", "swap": "swapped"}.get(memory, "cached tokens")
    assert min(counts[kind] for kind in (*KINDS, met)) > 0, counts


@pytest.mark.parametrize(
    "memory, examples", fast_only([*product(CONTENT_MEMORIES, (6,))], product(CONTENT_MEMORIES, (6, 4 * MANY * TIMES)))
)
def test_random_sessions_on_windows_and_recurrent_layers(memory: str, examples: int) -> None:
    counts = Counter[str]()

    @settings(max_examples=examples)
    @given(rounds=ROUNDS, seed=st.integers(0, 99))
    def check(rounds: Sequence[Sequence[Act]], seed: int) -> None:
        engine = ContentEngine(*CONTENT_MEMORIES[memory])
        sessions = Sessions(engine, seed, bound_of(memory, engine.block))
        sessions.play(rounds)
        counts.update(sessions.counts)
        pool = engine.bench.manager.pool
        assert pool.num_used == pool.num_swapped == 0

    check()
    if examples >= MANY:
        check_counts(memory, counts)


@pytest.mark.parametrize(
    "memory, examples", fast_only([*product(LITTLE, (6,))], product(LITTLE, (6, 4 * MANY * TIMES)))
)
def test_the_session_used_last_stays_in_little_memory(memory: str, examples: int) -> None:
    """Whatever other sessions do before it, and whatever it did itself."""
    num_promised = 0

    @settings(max_examples=examples)
    @given(rounds=ROUNDS, seed=st.integers(0, 99))
    def check(rounds: Sequence[Sequence[Act]], seed: int) -> None:
        nonlocal num_promised
        engine = ContentEngine(*LITTLE[memory])
        bound = LastUsed(engine)
        Sessions(engine, seed, bound).play(rounds)
        num_promised += bound.num_promised

    check()
    assert num_promised > 0


FAST = [("recurrent layers", "too few blocks", 2)]
CASES = [*product(REAL, MEMORIES, (2, 6 * TIMES))]


@pytest.mark.parametrize("model, memory, examples", fast_only(FAST, CASES))
def test_random_sessions_on_real_engines(
    models: Callable[[str], tuple[Path, LLM]], tmp_path: Path, model: str, memory: str, examples: int
) -> None:
    """Also across restarts, after which a new engine finds old tokens on disk."""
    path, alone = models(model)
    counts = Counter[str]()
    numbers = count()

    @settings(max_examples=examples)
    @given(rounds=ROUNDS, seed=st.integers(0, 99))
    def check(rounds: Sequence[Sequence[Act]], seed: int) -> None:
        engine = RealEngine(path, alone, tmp_path / str(next(numbers)), MEMORIES[memory])
        with closing_last(engine):
            sessions = Sessions(engine, seed, bound_of(memory, engine.block))
            sessions.play(rounds)
        counts.update(sessions.counts)

    check()
    assert counts["cached tokens"] > 0, counts


@contextmanager
def closing_last(engine: RealEngine) -> Iterator[None]:
    """Close the engine that runs at the end, which a restart may have made."""
    try:
        yield
    finally:
        engine.llm.close()
