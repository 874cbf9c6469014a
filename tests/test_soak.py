"""The soak itself: a round of it passes, and it notices what it is there to notice."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
import soak
from checkpoints import make_checkpoint
from engines import greedy
from soak_requests import MAX_MODEL_LEN, VOCAB, Asked, answer_alone, difference, random_request
from tokenizer_files import write_byte_level

from nanovllm import LLM, RequestOutputKind, SamplingParams


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(path, vocab=VOCAB, max_positions=256, eos_token_id=[VOCAB - 1])
    write_byte_level(Path(path))
    return str(path)


@pytest.fixture(scope="module")
def alone(model: str) -> Iterator[LLM]:
    with LLM(model, dtype="float32", num_gpu_blocks=20, max_model_len=MAX_MODEL_LEN) as llm:
        yield llm


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.slow
def test_a_round(model: str, alone: LLM) -> None:
    totals = soak.Totals()
    soak.run_round(0, 1, model, alone, totals)
    assert totals.differences == []
    assert totals.counts["compared"] > 0 and totals.counts["steps"] > 0 and totals.counts["engines"] > 0


@pytest.mark.slow
def test_for_minutes(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """NANOVLLM_SOAK_MINUTES, half a minute if unset."""
    minutes = float(os.environ.get("NANOVLLM_SOAK_MINUTES", "0.5"))
    status = soak.soak(model, minutes, seed=13, first_round=0, rounds=None)
    printed = capsys.readouterr().out
    assert status == 0, printed
    with capsys.disabled():
        print(printed.splitlines()[-1])


def ask(llm: LLM, **params: object) -> Asked:
    asked = Asked([1, 2, 3], SamplingParams(max_tokens=6, ignore_eos=True, **params), None, 0)  # type: ignore[arg-type]
    for output in llm.stream(asked.prompt, asked.params):
        asked.hear(output)
    return asked


def test_what_was_said_is_compared_to_the_last_word(alone: LLM) -> None:
    for kind in RequestOutputKind:
        for params in ({"temperature": 0.0}, {"n": 2, "seed": 3}, {"logprobs": 2, "prompt_logprobs": 1, "seed": 4}):
            asked = ask(alone, output_kind=kind, **params)
            expected = answer_alone(alone, asked)
            assert difference(asked, expected) is None
            asked.pieces[0].token_ids[-1] ^= 1
            assert "tokens" in (difference(asked, expected) or "")
            asked.pieces[0].token_ids[-1] ^= 1
            asked.pieces[0].text += "!"
            assert "text" in (difference(asked, expected) or "")
    asked = ask(alone, seed=5, logprobs=1)
    expected = answer_alone(alone, asked)
    asked.pieces[0].token_ids[2:] = []
    assert "tokens" in (difference(asked, expected) or "")
    asked.pieces[0].finish_reason = "abort"
    assert difference(asked, expected) is None, "a beginning is all that an aborted request has"
    asked.last = None
    assert difference(asked, expected) == "the request never ended"


def test_what_is_left_at_idle_is_noticed(model: str) -> None:
    with LLM(model, kvcache_block_size=16, num_gpu_blocks=20, max_model_len=MAX_MODEL_LEN) as llm:
        driver = soak.Driver(llm, Random(1), soak.Totals(), [[1] * 50])
        assert driver.check_idle() is None
        llm.engine.executor.execute = driver.llm.engine.executor.execute._execute  # type: ignore[attr-defined]
        llm.engine.add_request("left", None, greedy(5), [1] * 20)
        llm.engine.step()
        left = driver.check_idle()
        assert left is not None and left.startswith("used blocks: 2, requests: ")
        llm.engine.abort_request("left")


def test_requests_are_of_every_kind() -> None:
    random = Random(1)
    asked = [random_request(random, [[1] * 50]) for _ in range(300)]
    for name, off in (("n", 1), ("logprobs", None), ("stop", ()), ("bad_words", ()), ("min_tokens", 0), ("top_k", 0)):
        assert len([each for each in asked if getattr(each.params, name) != off]) > 5, name
    assert {each.params.output_kind for each in asked} == set(RequestOutputKind)
    assert any(each.params.use_beam_search for each in asked) and any(each.salt for each in asked)
