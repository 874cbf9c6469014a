"""Beam search with vLLM's parameters and results, by `generate` with use_beam_search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from typing import Any

from nanovllm.errors import RequestError, quoted
from nanovllm.outputs import Logprob, RequestOutput
from nanovllm.rules import FLAG, Rule, argument, check_fields, number, whole
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.prompts import Prompt, lora_request_for_each, prompt_list


def _only(value: object, rule: str) -> Rule:
    return Rule(lambda given: given == value, rule)


@dataclass
class BeamSearchParams:
    """Parameters of `LLM.beam_search`, which raises RequestError for invalid ones. Those with one value are vLLM's."""

    beam_width: int = argument(MISSING, whole(1), "beams to follow and to return")
    max_tokens: int = argument(MISSING, whole(0, also=(None,), most=None), "most generated tokens")
    ignore_eos: bool = argument(False, FLAG, "do not end beams at the model's end tokens")
    temperature: float = argument(
        0.0, _only(0.0, "beams are ranked by the raw log-probabilities, which no temperature changes"), "0"
    )
    length_penalty: float = argument(
        1.0,
        number("must be a number"),
        "beams are ranked by cumulative log-probability / length ** length_penalty; length counts generated tokens",
    )
    include_stop_str_in_output: bool = argument(
        False, _only(False, "beams end with a token: skip_special_tokens=False shows it"), "False"
    )
    structured_outputs: object | None = argument(
        None, _only(None, "not supported with beam search: use generate()"), "None"
    )
    skip_special_tokens: bool = argument(True, FLAG, "leave special tokens out of the text")
    watermarking: bool | None = argument(None, _only(None, "not supported: the engine does not mark its text"), "None")


@dataclass
class BeamSearchSequence:
    """A beam."""

    orig_prompt: Prompt
    tokens: list[int]  # of the prompt and of what was generated
    logprobs: list[Mapping[int, Logprob]]  # of the generated tokens
    cum_logprob: float = 0.0
    text: str | None = None  # of all tokens; None without a tokenizer
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class BeamSearchOutput:
    """The best beams of a prompt, the best first."""

    sequences: list[BeamSearchSequence] = field(default_factory=list)


def beam_search(
    llm: Any,
    prompts: Prompt | Sequence[Prompt],
    params: BeamSearchParams,
    lora_request: Any = None,
    use_tqdm: bool = False,
    concurrency_limit: int | None = None,
) -> list[BeamSearchOutput]:
    """The best beams of each prompt, in order. concurrency_limit: most prompts at a time; None for no limit.

    Raises RequestError for parameters and prompts that cannot be used. A beam that fails raises RequestError too.
    """
    sampling_params = _sampling_params(params, llm.config.max_logprobs)
    if concurrency_limit is not None and (type(concurrency_limit) is not int or concurrency_limit < 1):
        rule = "must be None or a whole number of at least 1"
        raise RequestError(f"concurrency_limit={quoted(concurrency_limit)}: {rule}")
    given = prompt_list(prompts)
    at_once = concurrency_limit or max(len(given), 1)
    adapters = lora_request_for_each(lora_request, len(given))
    outputs: list[RequestOutput] = []
    for start in range(0, len(given), at_once):
        end = start + at_once
        outputs += llm.generate(given[start:end], sampling_params, use_tqdm=use_tqdm, lora_request=adapters[start:end])
    return [_result(llm.engine.tokenizer, *pair, params) for pair in zip(given, outputs, strict=True)]


def _sampling_params(params: BeamSearchParams, max_logprobs: int) -> SamplingParams:
    """The parameters with which the engine searches."""
    if not isinstance(params, BeamSearchParams):
        raise RequestError(f"params must be BeamSearchParams, got {quoted(params)}")
    check_fields(params, RequestError)
    width = params.beam_width
    return SamplingParams(
        n=width,
        use_beam_search=width > 1,  # one beam is greedy decoding
        temperature=0.0,
        max_tokens=params.max_tokens,
        ignore_eos=params.ignore_eos,
        length_penalty=params.length_penalty if width > 1 else 1.0,
        early_stopping="never" if width > 1 else False,
        logprobs=2 * width if max_logprobs < 0 else min(2 * width, max_logprobs),
        skip_special_tokens=params.skip_special_tokens,
    )


def _result(tokenizer: Any, prompt: Prompt, output: RequestOutput, params: BeamSearchParams) -> BeamSearchOutput:
    if output.error is not None:
        raise RequestError(f"the beam search of request {output.request_id} failed: {output.error}")
    sequences = []
    for beam in output.outputs:
        tokens = [*output.prompt_token_ids, *beam.token_ids]
        text = None
        if tokenizer is not None:
            text = tokenizer.decode(tokens, skip_special_tokens=params.skip_special_tokens)
        logprobs = list(beam.logprobs or ())
        total = beam.cumulative_logprob or 0.0
        sequences.append(
            BeamSearchSequence(prompt, tokens, logprobs, total, text, beam.finish_reason, beam.stop_reason)
        )
    return BeamSearchOutput(sequences)
