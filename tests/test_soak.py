"""The soak itself: a round of it passes, and it notices what it is there to notice."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import soak
from checkpoints import make_checkpoint
from soak_requests import MAX_MODEL_LEN, VOCAB, Asked, answer_alone, difference
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
