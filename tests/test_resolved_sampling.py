"""What parameters mean for a model and a tokenizer: refusals with field, value and range, rows, bans, targets."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from block_helpers import request

from nanovllm.data.batch import LogitAdjustments, Sample
from nanovllm.engine.request import Sequence
from nanovllm.engine.resolved_sampling import SamplingFacts, resolve_sampling
from nanovllm.errors import RequestError
from nanovllm.sampling_params import SamplingParams

VOCAB, EOS = 60, (50, 51, 10**6)  # some configurations name end tokens beyond the vocabulary


class Pieces:
    """A tokenizer of letters, with tokens of their own for a few pieces of text."""

    PIECES = (" cat", "cat", " do", "do")

    def __repr__(self) -> str:
        return "Pieces()"  # the same in every process, for the names of tests

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        found = [58] if add_special_tokens else []
        while text:
            piece = next((p for p in self.PIECES if text.startswith(p)), text[0])
            found.append(40 + self.PIECES.index(piece) if piece in self.PIECES else ord(piece) % 32)
            text = text[len(piece) :]
        return found

    def decode(self, token_ids: Any) -> str:
        return "".join(map(self.token_text, token_ids))

    def token_text(self, token_id: int) -> str:
        return f"<{token_id}>"


FACTS = SamplingFacts(VOCAB, EOS, Pieces())


def sequence(prompt: list[int], output: list[int], **params: Any) -> Sequence:
    given = SamplingParams(**params)
    made = request(prompt, params=given, sampling=resolve_sampling(given, prompt, FACTS)).sequences[0]
    for token in output:
        made.append(Sample(token))
    return made


def adjustments(prompt: list[int], output: list[int], **params: Any) -> LogitAdjustments | None:
    return sequence(prompt, output, **params).sampling_rows()[0].adjustments


REFUSED: list[tuple[dict[str, Any], SamplingFacts, str]] = [
    ({"stop_token_ids": [3, 60]}, FACTS, "stop_token_ids=60: must hold token ids of the model, from 0 to 59"),
    ({"logit_bias": {3: 1.0, 99: 1}}, FACTS, "logit_bias=99: must hold token ids of the model, from 0 to 59"),
    ({"logprobs": 21}, FACTS, "Cannot request more than 20 logprobs. logprobs=21: "),
    (
        {"prompt_logprobs": -1},
        SamplingFacts(VOCAB, EOS, None, 5),
        "Cannot request more than 5 logprobs. prompt_logprobs=-1 asks for all 60: ",
    ),
    ({"bad_words": ["cat"]}, SamplingFacts(VOCAB, EOS), "bad_words=['cat']: needs a tokenizer"),
    ({"bad_words": ["x", "  "]}, FACTS, "bad_words='  ': must hold words of at least one token"),
    ({"bad_words": ["cat"]}, SamplingFacts(41, EOS, Pieces()), "bad_words='cat': the tokenizer gives token 41"),
]


@pytest.mark.parametrize(("params", "facts", "message"), REFUSED, ids=str)
def test_what_a_model_cannot_honour_is_refused(params: dict[str, Any], facts: SamplingFacts, message: str) -> None:
    with pytest.raises(RequestError) as refusal:
        resolve_sampling(SamplingParams(**params), [1], facts)
    assert str(refusal.value).startswith(message)


def test_logprobs_up_to_the_cap_and_the_vocabulary() -> None:
    def counts(facts: SamplingFacts, logprobs: int | None, prompt: int | None) -> tuple[int | None, int | None]:
        found = resolve_sampling(SamplingParams(logprobs=logprobs, prompt_logprobs=prompt), [1], facts)
        return found.num_logprobs, found.num_prompt_logprobs

    assert counts(FACTS, 20, None) == (20, None)
    assert counts(FACTS, None, 0) == (None, 0)
    assert counts(SamplingFacts(VOCAB, max_logprobs=-1), -1, 1000) == (VOCAB, VOCAB)
    assert counts(SamplingFacts(VOCAB, max_logprobs=60), -1, 60) == (VOCAB, VOCAB)


def test_bad_words_are_those_at_the_start_and_after_a_space() -> None:
    def words(*bad_words: str) -> tuple[tuple[int, ...], ...]:
        return resolve_sampling(SamplingParams(bad_words=bad_words), [1], FACTS).bad_words

    assert words("cat") == ((41,), (40,))
    assert words(" cat") == ((41,), (40,)), "a space before it makes it no other word"
    assert words("dog") == ((43, 7), (42, 7))
    assert words("ab") == ((1, 2),), "with the space a token more: another word in vLLM's eyes"
    assert words("cat", "cat") == words("cat")


def test_penalties_carry_the_history_that_they_need() -> None:
    prompt, output = [5, 5, 6], [7, 7, 8]
    found = adjustments(prompt, output, repetition_penalty=1.5)
    assert found is not None
    assert sorted(found.prompt_tokens) == [5, 6] and list(found.output_tokens) == output
    found = adjustments(prompt, output, frequency_penalty=0.5)
    assert found is not None
    assert list(found.prompt_tokens) == [] and list(found.output_tokens) == output
    found = adjustments(prompt, output, logit_bias={3: 1e300, 4: float("-inf")})
    assert found is not None and list(found.output_tokens) == []
    assert (list(found.biased), list(found.biases)) == ([3, 4], [1e9, float("-inf")])
    assert pickle.loads(pickle.dumps(found)) == found


def test_prompt_targets_cover_each_row_once() -> None:
    """In chunks, and again from any point after a preemption: the rows that are known already are left out."""
    prompt = list(range(10))
    seq = sequence(prompt, [], prompt_logprobs=2)
    found: list[int] = []
    for start, chunk in ((0, 3), (3, 1), (0, 2), (2, 4), (4, 20), (0, 20)):
        seq.num_computed = start
        targets = seq.prompt_targets(chunk)
        if targets is not None:
            assert targets.num_logprobs == 2
            assert [start + targets.first_row + i + 1 for i in range(len(targets.token_ids))] == targets.token_ids
            found += targets.token_ids
            seq.request.prompt_logprobs += [None] * len(targets.token_ids)  # type: ignore[list-item]
        assert seq.num_cacheable == len(found)  # at the end all but the last token, as without prompt_logprobs
    assert found == prompt[1:]
    assert sequence(prompt, []).prompt_targets(10) is None
    assert sequence([1], [], prompt_logprobs=2).prompt_targets(1) is None
