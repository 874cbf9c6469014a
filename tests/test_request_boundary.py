"""Whatever one request causes is that request's error, in one sentence of a few lines; the engine goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import checkpoint_fixture
from cli_helpers import TEMPLATE
from engines import greedy, token_ids

from nanovllm import LLM, SamplingParams
from nanovllm.errors import EngineError, RequestError

VOCAB = 300
QUESTION = "what is known"
HUGE = 10**5000  # Python does not write numbers of more than 4,300 digits


model_dir = checkpoint_fixture(vocab=VOCAB, max_positions=512, tokenizer={"chat_template": TEMPLATE})


@pytest.fixture(scope="module")
def llm(model_dir: Path) -> Iterator[LLM]:
    with LLM(model_dir, num_gpu_blocks=40, kvcache_block_size=16, max_logprobs=-1) as llm:
        yield llm


@pytest.fixture(scope="module")
def answer(llm: LLM) -> list[list[int]]:
    return token_ids(llm, QUESTION, greedy(8))


def goes_on(llm: LLM, answer: list[list[int]]) -> None:
    assert not llm.engine.has_unfinished_requests()
    assert llm.engine.scheduler.block_manager.pool.num_used == 0
    assert token_ids(llm, QUESTION, greedy(8)) == answer


class Hostile:
    """An object whose every method fails."""

    def __eq__(self, other: object) -> bool:
        raise ArithmeticError("no comparison")

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        raise ArithmeticError("no text")

    def __len__(self) -> int:
        raise ArithmeticError("no length")


class HostileList(list[Any]):
    def __iter__(self) -> Any:
        raise ArithmeticError("no items")


PARAMETERS: list[dict[str, Any]] = [
    {"stop": [str(i) for i in range(100_000)] + [""]},
    {"bad_words": ["a\ud800"]},
    {"logit_bias": {"9" * 5000: 1.0}},
    {"seed": HUGE},
    {"temperature": Hostile()},
    {"stop_token_ids": HostileList([1])},
    {"x" * 50_000: 1},
]


@pytest.mark.parametrize("params", PARAMETERS, ids=lambda params: "-".join(params)[:20])
def test_parameters_are_refused_in_a_sentence_of_a_few_lines(params: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as refused:
        SamplingParams(**params)
    assert type(refused.value) is RequestError and len(str(refused.value)) < 1500 and "\n" not in str(refused.value)


REQUESTS: list[tuple[Any, Any]] = [
    (QUESTION, SamplingParams(stop_token_ids=[HUGE])),
    ([[1, VOCAB] * 50_000], None),
    ({"x" * 50_000: 1}, None),
    ([Hostile()], None),
    ({"prompt_token_ids": HostileList([1])}, None),
    (QUESTION, SamplingParams(best_of=2**31 - 1)),
]


@pytest.mark.parametrize("prompts, params", REQUESTS, ids=range(len(REQUESTS)))
def test_requests_are_refused_in_a_sentence_of_a_few_lines(
    llm: LLM, answer: list[list[int]], prompts: Any, params: Any
) -> None:
    with pytest.raises(RequestError) as refused:
        llm.generate(prompts, params, use_tqdm=False)
    assert len(str(refused.value)) < 1500 and "\n" not in str(refused.value)
    goes_on(llm, answer)


@pytest.mark.parametrize("what", ["encode", "add", "chat"])
def test_any_error_of_a_request_is_its_own(
    llm: LLM, answer: list[list[int]], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise MemoryError("of the library")

    with monkeypatch.context() as patch:
        if what == "encode":
            patch.setattr(llm.engine.tokenizer, "encode", fails)
        elif what == "add":
            patch.setattr("nanovllm.engine.input_processor.resolve_sampling", fails)
        else:
            patch.setattr("nanovllm.text.chat_template.ChatTemplate._render", fails)
        with pytest.raises(RequestError, match=r"of the library.*\(MemoryError\)"):
            if what == "chat":
                llm.chat([{"role": "user", "content": "x"}], greedy(1), use_tqdm=False)
            else:
                llm.generate("x", greedy(1), use_tqdm=False)
    goes_on(llm, answer)


def test_a_closed_engine_takes_no_request(model_dir: Path) -> None:
    llm = LLM(model_dir, num_gpu_blocks=8)
    llm.engine.close()
    for use in (
        lambda: llm.engine.add_request("q", None, greedy(1), [1]),
        lambda: llm.generate("x", greedy(1), use_tqdm=False),
        lambda: llm.chat([{"role": "user", "content": "x"}], greedy(1), use_tqdm=False),
        lambda: llm.stream("x", greedy(1)),
    ):
        with pytest.raises(EngineError, match="the engine is closed: make a new LLM"):
            use()
    assert not llm.engine.has_unfinished_requests() and llm.engine.step() == []
    llm.close()


BAN_ALL = dict.fromkeys(range(VOCAB), float("-inf"))


@pytest.mark.parametrize("kind", [{"temperature": 0.0}, {"top_k": 5, "n": 2}], ids=str)
def test_bans_that_leave_nothing_later_end_with_an_error(
    llm: LLM, answer: list[list[int]], kind: dict[str, Any]
) -> None:
    """A bad word of two tokens bans the only one that is left, once the first of them is there."""
    left = llm.get_tokenizer().encode("a")[0]
    bans = {token: bias for token, bias in BAN_ALL.items() if token != left}
    params = SamplingParams(max_tokens=5, logit_bias=bans, bad_words=["aaa"], ignore_eos=True, **kind)
    failed, good = llm.generate([QUESTION, QUESTION], [params, greedy(8)], use_tqdm=False)
    for completion in failed.outputs:
        assert (completion.token_ids, completion.finish_reason) == ([left, left], "error")
    assert failed.error == (
        "no token is left to choose: logit_bias, bad_words, min_tokens, allowed_token_ids, structured_outputs and "
        "logits_processors together ban all of them; ban fewer"
    )
    assert [good.outputs[0].token_ids] == answer
    goes_on(llm, answer)
