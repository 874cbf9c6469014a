"""The input processor: turns what the user gives into a checked `Request`."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Protocol

from nanovllm.data.batch import Adapter
from nanovllm.engine.request import Request
from nanovllm.engine.resolved_sampling import SamplingFacts, resolve_sampling
from nanovllm.engine.scheduling_budget import SchedulerLimits
from nanovllm.errors import RequestError, as_request_error, quoted
from nanovllm.sampling_params import SamplingParams, derived_seed
from nanovllm.sampling_rules import check_characters
from nanovllm.text.prompts import PromptParts
from nanovllm.text.tokenizer import Tokenizer


class Adapters(Protocol):
    """Finds the adapters that requests name."""

    def find(self, lora_request: object) -> Adapter:
        """The adapter of a `LoRARequest`. Raises RequestError if it cannot be used with the model."""
        ...


@dataclass(slots=True)
class InputProcessor:
    """Tokenizes and checks prompts and sampling parameters. Every method raises RequestError for invalid input.

    advise: returns advice for a prompt of more tokens than max_model_len. adapters: None refuses every lora_request.
    """

    limits: SchedulerLimits
    vocab_size: int
    sampling: SamplingFacts
    seed: int
    advise: Callable[[int], str]
    adapters: Adapters | None = None
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _seq_ids: Iterator[int] = field(default_factory=itertools.count)

    def request(
        self,
        request_id: str,
        prompt: PromptParts,
        sampling_params: SamplingParams | None,
        arrival_time: float,
        priority: int = 0,
        lora_request: object | None = None,
    ) -> Request:
        """The request; arguments as in `LLMEngine.add_request`."""
        params = sampling_params if sampling_params is not None else SamplingParams()
        salt = prompt.cache_salt
        if not isinstance(request_id, str):
            raise RequestError(f"request_id={quoted(request_id)}: must be a string")
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling_params must be SamplingParams, got {quoted(params)}")
        if type(priority) is not int:
            raise RequestError(f"priority={quoted(priority)}: must be a whole number; lower ones run first")
        is_time = isinstance(arrival_time, int | float) and abs(arrival_time) <= sys.float_info.max
        if not is_time:
            raise RequestError(f"arrival_time={quoted(arrival_time)}: must be seconds as of time.time()")
        if salt is not None and (not isinstance(salt, str) or not salt):
            raise RequestError(f"cache_salt={quoted(salt)}: must be None or a string that is not empty")
        params = replace(params)  # the caller may change theirs, and what they have changed is checked
        check_num_sequences(request_id, params.num_sequences, self.limits)
        token_ids = self.check_prompt(prompt.text, prompt.token_ids, params)
        adapter = self.check_lora_request(lora_request)
        number = next(self._numbers)
        return Request(
            request_id,
            token_ids,
            params,
            number=number,
            seq_ids=self._seq_ids,
            # Without a seed, requests differ from each other, and the engine's seed reproduces all of them.
            seed=params.seed if params.seed is not None else derived_seed(self.seed, "prompt", number),
            arrival_time=arrival_time,
            priority=priority,
            prompt=prompt.text,
            cache_salt=_cache_salt(salt, adapter),
            sampling=resolve_sampling(params, token_ids, self.sampling),
            lora_request=lora_request,
            ext={} if adapter is None else {self.adapters: adapter},
        )

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.sampling.tokenizer

    def prepare(self, params: SamplingParams) -> None:
        """Compile what the requests with these parameters need, which can take seconds, in any thread."""
        if params.structured_outputs is not None and self.sampling.grammars is not None:
            self.sampling.grammars.prepare(params.structured_outputs)

    def check_lora_request(self, lora_request: object | None) -> Adapter | None:
        """The LoRA adapter that a request names; None if it names none."""
        if lora_request is None:
            return None
        if self.adapters is None:
            raise RequestError(
                f"lora_request={quoted(lora_request)}: the engine was made without LoRA; make it with enable_lora=True"
            )
        return self.adapters.find(lora_request)

    def check_prompt(
        self, prompt: str | None, prompt_token_ids: Seq[int] | None, params: SamplingParams | None = None
    ) -> list[int]:
        """The token ids of a prompt that can be served; those of its end that `truncate_prompt_tokens` keeps."""
        token_ids = self._tokenize(prompt, prompt_token_ids)
        if params is not None and params.truncate_prompt_tokens is not None:
            token_ids = token_ids[-self._num_kept(params) :]
        if not token_ids:
            raise RequestError("the prompt is empty: give at least one token")
        if len(token_ids) > self.limits.max_model_len:
            lengths = f"the prompt has {len(token_ids)} tokens and max_model_len is {self.limits.max_model_len}"
            raise RequestError(f"{lengths}: {self.advise(len(token_ids))}")
        vocab_size = self.vocab_size
        # A loop over a million ids would keep the running requests waiting.
        if set(map(type, token_ids)) != {int} or min(token_ids) < 0 or max(token_ids) >= vocab_size:
            wrong = next(token for token in token_ids if type(token) is not int or not 0 <= token < vocab_size)
            raise RequestError(
                f"token id {quoted(wrong)} in the prompt is not one of the model's: ids are of type int, from 0 to "
                f"{vocab_size - 1}"
            )
        return token_ids

    def _num_kept(self, params: SamplingParams) -> int:
        """How many tokens `truncate_prompt_tokens` keeps. -1 leaves a position to generate at, if that is asked for."""
        asked = params.truncate_prompt_tokens
        longest = self.limits.max_model_len
        if asked == -1:
            return max(1, longest - (params.max_tokens != 0))
        assert asked is not None
        if asked > longest:
            raise RequestError(
                f"truncate_prompt_tokens={quoted(asked)}: must be at most max_model_len={longest}, or -1 for as many "
                "as the model can take"
            )
        return asked

    def _tokenize(self, prompt: str | None, prompt_token_ids: Seq[int] | None) -> list[int]:
        if prompt is not None:
            check_characters("the prompt", prompt)
        if prompt_token_ids is not None:
            if isinstance(prompt_token_ids, str) or not isinstance(prompt_token_ids, Seq):
                raise RequestError(f"prompt_token_ids must be a list of token ids, got {quoted(prompt_token_ids)}")
            return list(prompt_token_ids)
        if prompt is None:
            raise RequestError("a request needs a prompt: give text or token ids")
        if self.sampling.tokenizer is None:
            raise RequestError(
                "the model directory has no tokenizer files (or skip_tokenizer_init=True left them out), so a text "
                "prompt cannot be read: give token ids, or add the tokenizer's files to the directory"
            )
        with as_request_error("the tokenizer cannot read the prompt"):
            return self.sampling.tokenizer.encode(prompt)


def _cache_salt(salt: str | None, adapter: Adapter | None) -> bytes:
    """What K/V depend on besides the tokens: the adapter, and the caller's salt."""
    number = 0 if adapter is None else adapter.number
    return number.to_bytes(8, "little") + (salt or "").encode("utf-8", "surrogatepass")


def check_num_sequences(request_id: str, count: int, limits: SchedulerLimits) -> None:
    """Raise RequestError for more sequences than fit in one step. Needs no request, which would hold them all."""
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        limit = getattr(limits, name)
        if count > limit:
            raise RequestError(
                f"request {request_id!r} asks for {count} sequences, which run together, and {name} is {limit}: "
                f"lower n or best_of, or raise {name}"
            )


def salt_of_content(cache_salt: bytes, adapter: bytes) -> bytes:
    """A request's cache salt with a digest of its adapter's files, b"" for none, in place of the adapter's number.

    Another engine may give the same number to another adapter.
    """
    return len(adapter).to_bytes(8, "little") + adapter + cache_salt[8:]
