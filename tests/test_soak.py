"""The soak itself: rounds of it pass, and it notices what it is there to notice."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
from soak import MAX_MODEL_LEN, Asked, difference, make_model, soak

from nanovllm import LLM, RequestOutputKind, SamplingParams


@pytest.mark.slow
def test_for_minutes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """NANOVLLM_SOAK_MINUTES, half a minute if unset."""
    make_model(tmp_path)
    minutes = float(os.environ.get("NANOVLLM_SOAK_MINUTES", "0.5"))
    status = soak(str(tmp_path), minutes, seed=13, first_round=0, rounds=None)
    logging.disable(logging.NOTSET)
    printed = capsys.readouterr().out
    assert status == 0, printed
    with capsys.disabled():
        print(printed.splitlines()[-1])


def test_what_was_said_is_compared_to_the_last_word(tmp_path: Path) -> None:
    make_model(tmp_path)
    with LLM(tmp_path, dtype="float32", num_gpu_blocks=20, max_model_len=MAX_MODEL_LEN) as llm:
        for kind in RequestOutputKind:
            params = SamplingParams(n=2, seed=4, max_tokens=6, ignore_eos=True, logprobs=2, output_kind=kind)
            asked = Asked([1, 2, 3], params, None, 0)
            for output in llm.stream(asked.prompt, params):
                asked.hear(output)
            (expected,) = llm.generate(asked.prompt, params, use_tqdm=False)
            assert difference(asked, expected) is None
            piece = asked.pieces[0]
            piece.text += "!"
            assert "end and text" in (difference(asked, expected) or "")
            piece.token_ids[2:] = []
            assert "tokens" in (difference(asked, expected) or "")
            piece.finish_reason = "abort"
            assert difference(asked, expected) is None, "a beginning is all that an aborted request has"
            asked.last = None
            assert difference(asked, expected) == "the request never ended"
