"""Beam search against Transformers' own on small random models: the same sequences and scores."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from engines import beam_reference, offloaded, random_prompt

from nanovllm import LLM, RequestOutput, SamplingParams
from nanovllm.data.batch import TokenLogprobs
from nanovllm.features.sequence_groups.beams import BeamSearch, Candidate

BLOCK, VOCAB = 16, 61
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
    [("qwen3", 0, []), ("llama", 1, [7]), ("qwen2", 2, [3, 9, 15, 31]), ("llama", 3, [0, 5])],
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
            assert llm.engine.scheduler.block_manager.num_copied_blocks > 0
        for case, output, beams in zip(cases, outputs, expected, strict=True):
            found = beams_of(output, case[2])
            assert [tokens for tokens, _ in found] == [tokens for tokens, _ in beams], case
            assert [score for _, score in found] == pytest.approx([score for _, score in beams], abs=2e-4), case


# ---- the search alone


class Ended:
    """A beam that has finished."""

    def __init__(self, total: float, length: int) -> None:
        self.cumulative_logprob = total
        self.num_output_tokens = length


def search(**others: Any) -> BeamSearch:
    return BeamSearch(**{"width": 2, "max_length": 5, "end_token_ids": {9}, **others})


def top(token_ids: list[int], logprobs: list[float]) -> TokenLogprobs:
    return TokenLogprobs(logprobs[0], 1, token_ids, logprobs)


def test_a_step_keeps_the_best_continuations_of_all_beams() -> None:
    beams = [(-1.0, top([4, 9, 5, 6], [-0.1, -0.2, -0.3, -4.0])), (-1.15, top([4, 7, 8, 9], [-0.1, -0.3, -2.0, -3.0]))]
    running, finished = search().expand(beams, 2)
    assert [(c.beam, c.token_id) for c in running] == [(0, 4), (1, 4)]
    assert [(c.beam, c.token_id, c.rank) for c in finished] == [(0, 9, 1)]


@pytest.mark.parametrize(
    ("length", "expected"),
    [(1, ([4, 5], [])), (5, ([], [4, 5]))],
    ids=["what ends below the best is dropped", "at max_length the best finish whatever their token"],
)
def test_what_ends(length: int, expected: tuple[list[int], list[int]]) -> None:
    running, finished = search().expand([(0.0, top([4, 5, 9, 6], [-0.1, -0.2, -0.3, -0.4]))], length)
    assert ([c.token_id for c in running], [c.token_id for c in finished]) == expected


def test_there_are_candidates_enough_for_every_end_token() -> None:
    assert search(end_token_ids=set()).num_candidates == 4
    assert search(end_token_ids={1, 2, 3}).num_candidates == 8
    assert search(end_token_ids={1, 2, 3}, vocab_size=6).num_candidates == 6


@pytest.mark.parametrize(
    ("early_stopping", "penalty", "running", "ends"),
    [
        (True, 1.0, -0.1, True),  # enough are finished
        (False, 1.0, -1.5, False),  # at length 2: -0.75 beats the worst finished, -1
        (False, 1.0, -2.5, True),
        ("never", 1.0, -2.5, False),  # at length 5: -0.5
        ("never", -1.0, -0.6, True),  # longer scores worse: -1.2 now
    ],
)
def test_when_a_search_ends(early_stopping: Any, penalty: float, running: float, ends: bool) -> None:
    beams = search(early_stopping=early_stopping, length_penalty=penalty)
    candidate = Candidate(0, 0, 4, -0.1, running, False)
    beams.keep(Ended(-0.5, 1))
    assert not beams.has_ended([candidate], 2), "one of two has finished"
    beams.keep(Ended(-1.0, 1))
    assert beams.has_ended([candidate], 2) is ends
    assert beams.has_ended([], 2)


def test_the_worst_result_gives_way() -> None:
    beams = search()
    for total, length in ((-3.0, 1), (-4.0, 2), (-1.0, 1), (-9.0, 3)):
        beams.keep(Ended(total, length))
    assert [score for score, _ in beams.results] == [-1.0, -2.0]
    cut_off = Ended(-3.0, 2)
    assert beams.ranked([cut_off])[1] is cut_off


@pytest.mark.parametrize(("penalty", "score"), [(1e6, 0.0), (-1e6, -math.inf)])
def test_no_penalty_is_too_large_for_a_float(penalty: float, score: float) -> None:
    assert search(length_penalty=penalty).score(-2.0, 3) == score
