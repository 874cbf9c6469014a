"""Beam search against Transformers' own on small random models, and on the model of KV content."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from block_helpers import check_blocks
from checkpoints import make_checkpoint
from content_model import expected_beams, logprob_of
from engine_helpers import Bench, prompt_of
from engines import beam_reference, offloaded, random_prompt
from fast import fast_only

from nanovllm import LLM, EngineClient, RequestOutput, SamplingParams
from nanovllm.errors import EngineError, RequestError
from nanovllm.text.prompts import PromptParts

BLOCK = 16
VOCAB = 61
ENGINES: dict[str, dict[str, Any]] = {
    "resident": {"kvcache_block_size": BLOCK, "num_gpu_blocks": 120},
    "offloaded, in chunks": offloaded(BLOCK, 6, 110, max_num_batched_tokens=21),
}


def beams_of(output: RequestOutput, penalty: float) -> list[tuple[list[int], float]]:
    found = []
    for beam in output.outputs:
        assert beam.cumulative_logprob is not None
        found.append((beam.token_ids, beam.cumulative_logprob / len(beam.token_ids) ** penalty))
    return found


SEARCHES = [(penalty, stopping) for penalty in (0.0, 1.0, -1.0, 2.0) for stopping in (True, False, "never")]


@pytest.mark.parametrize(
    ("family", "seed", "ends"),
    fast_only(
        [("qwen3", 0, []), ("qwen2", 2, [3, 9, 15, 31])],
        [("qwen3", 0, []), ("llama", 1, [7]), ("qwen2", 2, [3, 9, 15, 31]), ("llama", 3, [0, 5])],
    ),
)
def test_same_sequences_and_scores(tmp_path: Path, family: str, seed: int, ends: list[int]) -> None:
    model = make_checkpoint(
        tmp_path, family, seed, vocab=VOCAB, layers=1, hidden=32, intermediate=32, eos_token_id=ends
    )
    model.generation_config.eos_token_id = None  # given to each call
    cases = [(2 + 2 * (index % 2), 6 + index % 5, *search) for index, search in enumerate(SEARCHES)]
    prompts = [random_prompt(3 + 4 * index, VOCAB, seed=index) for index in range(len(cases))]
    expected = [
        beam_reference(model, prompt, width, max_tokens, ends, length_penalty=penalty, early_stopping=stopping)
        for prompt, (width, max_tokens, penalty, stopping) in zip(prompts, cases, strict=True)
    ]
    params = [
        SamplingParams(
            n=width, use_beam_search=True, temperature=0.0, max_tokens=max_tokens,
            length_penalty=penalty, early_stopping=stopping,
        )
        for width, max_tokens, penalty, stopping in cases
    ]  # fmt: skip
    for arguments in ENGINES.values():
        with LLM(tmp_path, dtype="float32", **arguments) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert llm.prefix_cache_stats().hit_tokens > 0
        for case, output, beams in zip(cases, outputs, expected, strict=True):
            scored = beams_of(output, case[2])
            assert [tokens for tokens, _ in scored] == [tokens for tokens, _ in beams], case
            assert [score for _, score in scored] == pytest.approx([score for _, score in beams], abs=2e-4), case


# ---- on the model of KV content, without torch


class Searches:
    """Beam searches of a client, on an engine that checks every KV entry that a step reads."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.client = EngineClient(bench.engine)
        self.outputs: dict[str, RequestOutput] = {}
        bench.engine.step = partial(self._step, bench.engine.step)  # type: ignore[method-assign]

    def add(
        self, name: str, prompt: list[int], max_tokens: int, width: int = 3, priority: int = 0, **params: Any
    ) -> None:
        everything = {"temperature": 0.0, "n": width, "use_beam_search": True, "max_tokens": max_tokens, **params}
        sampling = SamplingParams(**everything)
        self.client.add(self.bench.engine.make_request(name, PromptParts(None, prompt), sampling, priority=priority))

    def _step(self, step: Callable[[], list[RequestOutput]]) -> list[RequestOutput]:
        self.bench.tell_histories()
        return step()

    def take(self, outputs: Iterable[RequestOutput]) -> None:
        self.outputs |= {output.request_id: output for output in outputs}

    def run(self) -> None:
        while self.client.pending:
            self.take(self.client.step())
            check_blocks(self.bench.manager)
        assert not self.bench.engine.has_unfinished_requests() and not self.bench.engine.inboxes
        assert self.bench.manager.pool.num_used == self.bench.manager.pool.num_swapped == 0

    def tokens(self, name: str) -> list[list[int]]:
        return [beam.token_ids for beam in self.outputs[name].outputs]


@pytest.mark.parametrize(
    "bench",
    [
        {"device": 64},
        {"device": 5, "host": 40, "budget": 10},
        {"device": 0, "host": 12, "max_num_seqs": 4},  # all beams do not fit at once
        {"device": 10, "caching": False, "mode": "swap", "swap": 20},
    ],
)
def test_searches_side_by_side_are_those_of_complete_histories(bench: dict[str, Any]) -> None:
    searches = Searches(Bench(**bench))
    cases = {
        f"{penalty} {stopping}": (prompt_of(5 + 3 * index, index), 3 + index, penalty, stopping)
        for index, (penalty, stopping) in enumerate([(0.0, True), (1.0, False), (-1.0, "never"), (2.5, "never")])
    }
    for index, (name, (prompt, max_tokens, penalty, stopping)) in enumerate(cases.items()):
        more = {"n": 2, "best_of": 3, "length_penalty": penalty, "early_stopping": stopping}
        searches.add(name, prompt, max_tokens, priority=index % 2, stop_token_ids=[3, 9], **more)
    searches.run()
    for name, (prompt, max_tokens, penalty, stopping) in cases.items():
        expected = expected_beams(prompt, 3, max_tokens, [3, 9], penalty=penalty, early_stopping=stopping)
        assert searches.tokens(name) == expected[:2], name
        output = searches.outputs[name]
        assert output.metrics.prefill_tokens == len(prompt) and output.finished and output.error is None
        assert [beam.index for beam in output.outputs] == [0, 1]
        for beam in output.outputs:
            assert beam.cumulative_logprob == pytest.approx(logprob_of(prompt, beam.token_ids))
            ends_by = (beam.finish_reason, beam.stop_reason)
            last = beam.token_ids[-1]
            assert ends_by == (("stop", last) if last in (3, 9) else ("length", None))


def test_no_beam_ends_before_min_tokens() -> None:
    prompt = prompt_of(5)
    stop = sorted({token for beam in expected_beams(prompt, 4, 3) for token in beam[:2]})
    searches = Searches(Bench())
    search: dict[str, Any] = {"width": 4, "stop_token_ids": stop, "length_penalty": 0.0}
    searches.add("early", prompt, 6, **search)
    searches.add("late", prompt, 6, min_tokens=3, **search)
    searches.run()
    assert searches.tokens("early") == expected_beams(prompt, 4, 6, stop, penalty=0.0)
    assert min(map(len, searches.tokens("early"))) < 3
    assert all(not set(tokens[:3]) & set(stop) for tokens in searches.tokens("late"))


def test_an_abort_and_a_failed_step_end_a_search_with_the_beams_so_far() -> None:
    searches = Searches(Bench(max_num_seqs=9, budget=48))
    for index, name in enumerate(("aborted", "fails", "other")):
        searches.add(name, prompt_of(5, index), 9)
    for _ in range(4):
        searches.take(searches.client.step())
    searches.take(searches.client.abort(["aborted", "unknown"]))
    searches.bench.executor.fail_next = True
    with pytest.raises(EngineError, match="on fire") as failure:
        searches.client.step()
    assert not searches.client.pending
    searches.take(output for output in failure.value.outputs if isinstance(output, RequestOutput))
    assert {name: output.error is not None for name, output in searches.outputs.items()} == {
        "aborted": False, "fails": True, "other": True,
    }  # fmt: skip
    for name, output in searches.outputs.items():
        assert output.finished and output.step_failed is (name != "aborted")
        assert {beam.finish_reason for beam in output.outputs} == {"abort" if name == "aborted" else "error"}
        assert [len(beam.token_ids) for beam in output.outputs] == [4, 4, 4]
    searches.add("again", prompt_of(5, 5), 9)
    searches.client.step()
    searches.client.close()
    searches.run()
    assert "again" not in searches.outputs


def test_the_engine_itself_refuses_a_search() -> None:
    with pytest.raises(RequestError, match="use_beam_search=True, which runs many requests"):
        Bench().add("a", prompt_of(5), 4, n=2, use_beam_search=True)
