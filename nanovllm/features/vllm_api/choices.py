"""Multiple choice: how likely each of several answers to a prompt is."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nanovllm.errors import RequestError, quoted
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams

Text = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class ChoiceScore:
    """The log-probability (natural log, of the raw logits) of a choice after the prompt."""

    choice: Text
    token_ids: list[int]  # its tokens after the prompt
    logprobs: list[float]  # of each of them

    @property
    def logprob(self) -> float:
        """Of the whole choice."""
        return math.fsum(self.logprobs)

    @property
    def mean_logprob(self) -> float:
        """Per token, which compares choices of different lengths."""
        return self.logprob / len(self.logprobs)


def score_choices(llm: Any, prompt: Text, choices: Sequence[Text], use_tqdm: bool = False) -> list[ChoiceScore]:
    """The score of each choice, in order. Texts are joined before they are tokenized, as in a text that holds both.

    Where prompt and choice share a token, that token counts as the choice's. Raises RequestError for a prompt or a
    choice that cannot be used.
    """
    if isinstance(choices, str) or not isinstance(choices, Sequence) or not choices:
        raise RequestError(f"choices must be a list of at least one text or list of token ids, got {quoted(choices)}")
    prompt_ids = _token_ids(llm, "prompt", prompt)
    joined = [_joined(llm, prompt, prompt_ids, choice) for choice in choices]
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    outputs = llm.generate(joined, params, use_tqdm=use_tqdm)
    return [_score(choice, prompt_ids, output) for choice, output in zip(choices, outputs, strict=True)]


def _joined(llm: Any, prompt: Text, prompt_ids: list[int], choice: Text) -> list[int]:
    if isinstance(prompt, str) and isinstance(choice, str):
        joined = _token_ids(llm, "prompt", prompt + choice)
    else:
        joined = [*prompt_ids, *_token_ids(llm, "choice", choice, add_special_tokens=False)]
    if _num_shared(prompt_ids, joined) == len(joined):
        raise RequestError(f"the choice {quoted(choice)} adds no token to the prompt: give a text that does")
    return joined


def _token_ids(llm: Any, what: str, text: Text, *, add_special_tokens: bool = True) -> list[int]:
    if isinstance(text, str):
        if llm.engine.tokenizer is None:
            raise RequestError(f"no tokenizer was loaded, so a {what} cannot be text: give token ids")
        return llm.engine.tokenizer.encode(text, add_special_tokens=add_special_tokens)
    if not isinstance(text, Sequence) or not all(type(token) is int for token in text):
        raise RequestError(f"a {what} must be text or a list of token ids, got {quoted(text)}")
    return [int(token) for token in text]


def _num_shared(prompt_ids: Sequence[int], joined: Sequence[int]) -> int:
    """Tokens at the beginning that are the prompt's alone. The first token of all has no probability."""
    pairs = zip(prompt_ids, joined, strict=False)
    return max(1, sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))


def _score(choice: Text, prompt_ids: list[int], output: RequestOutput) -> ChoiceScore:
    if output.error is not None or output.prompt_logprobs is None:
        raise RequestError(f"the choice {quoted(choice)} cannot be scored: {output.error}")
    tokens = output.prompt_token_ids
    start = _num_shared(prompt_ids, tokens)
    of_positions = [output.prompt_logprobs[position] or {} for position in range(start, len(tokens))]
    logprobs = [entries[token].logprob for token, entries in zip(tokens[start:], of_positions, strict=True)]
    return ChoiceScore(choice, tokens[start:], logprobs)
