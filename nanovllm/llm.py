"""The offline API: a model directory and engine arguments in, text out."""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, cast

from tqdm import tqdm

from nanovllm.config import engine_config
from nanovllm.engine.block_manager import BlockManager, PrefixCacheStats
from nanovllm.engine.limits import SchedulerLimits
from nanovllm.engine.llm_engine import LLMEngine, ModelFacts
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.errors import EngineError, RequestError
from nanovllm.kvcache.room import KVStats
from nanovllm.models.hf_config import load_eos_token_ids
from nanovllm.outputs import RequestOutput
from nanovllm.planner.machine import Rates
from nanovllm.planner.plan import Plan
from nanovllm.sampling_params import SamplingParams
from nanovllm.tokenizer import load_tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]


class LLM:
    """A model ready to generate.

    model: a local directory in Hugging Face format. Engine arguments: see `nanovllm.config.EngineConfig`; unknown ones
    and values that cannot be honoured raise ConfigError, damaged or unsupported checkpoints ModelError.
    """

    def __init__(self, model: str | Path, **engine_args: Any) -> None:
        config = engine_config(model, engine_args)
        tokenizer = load_tokenizer(config.model)
        eos_token_ids = frozenset(load_eos_token_ids(config.model))
        self._runner = ModelRunner(config)
        plan, spec = self._runner.plan, self._runner.spec
        self.engine = LLMEngine(
            SchedulerLimits(
                config.max_num_seqs,
                config.max_num_batched_tokens,
                plan.max_model_len,
                eos_token_ids,
                config.long_prefill_token_threshold,
                config.preemption_mode,
                num_layers=spec.num_layers,
                spans=plan.spans,
            ),
            ModelFacts(spec.vocab_size, spec.rope.length_dependent_above),
            BlockManager(
                plan.split.resident_blocks,
                plan.num_cpu_blocks,
                config.block_size,
                config.enable_prefix_caching,
                self._runner.num_swap_blocks,
            ),
            self._runner,
            tokenizer,
            seed=config.seed,
            max_logprobs=config.max_logprobs,
            advise=self._runner.advise,
        )
        self.config = config
        self.max_model_len = plan.max_model_len
        self._request_ids = (f"request-{i}" for i in itertools.count())
        self._closed = False

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Run prompts to their end; outputs stand in the order of the prompts.

        A prompt is text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}; give one or a sequence of
        them, with one SamplingParams for all or one for each. Every prompt is checked before any is run: RequestError
        means that nothing was started. If the call is interrupted, its requests are aborted.
        """
        self._check_open()
        texts_and_ids = [_prompt_parts(prompt) for prompt in _as_prompts(prompts)]
        params = _params_for_each(sampling_params, len(texts_and_ids))
        checked = [(text, self.engine.check_prompt(text, ids)) for text, ids in texts_and_ids]
        request_ids: list[str] = []
        with self._aborted_on_error(request_ids):
            for (text, token_ids), param in zip(checked, params, strict=True):
                request_ids.append(next(self._request_ids))
                self.engine.add_request(request_ids[-1], text, param, prompt_token_ids=token_ids)
            finished = self._run(set(request_ids), use_tqdm)
        return [finished[request_id] for request_id in request_ids]

    def plan(self, rates: Rates | None = None) -> Plan:
        """What this engine's memory holds, and what any prompt takes and moves; with `rates`, how long it lasts."""
        return self._runner.whole_plan(rates or Rates())

    def kv_stats(self) -> KVStats:
        """Sizes of the KV memory and bytes copied between its tiers so far."""
        return self._runner.kv_stats()

    def prefix_cache_stats(self) -> PrefixCacheStats:
        """Tokens looked up in the prefix cache so far, and how many were found."""
        return self.engine.scheduler.block_manager.stats

    def close(self) -> None:
        """Release weights and KV memory and end the transfer streams. Safe to call twice."""
        self._closed = True
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # ---- helpers

    def _run(self, pending: set[str], use_tqdm: bool) -> dict[str, RequestOutput]:
        finished: dict[str, RequestOutput] = {}
        with tqdm(total=len(pending), desc="Processed prompts", disable=not use_tqdm) as bar:
            start = time.monotonic()
            while len(finished) < len(pending):
                for output in self.engine.step():
                    if output.finished and output.request_id in pending:
                        finished[output.request_id] = output
                        bar.set_postfix_str(_rates(finished.values(), time.monotonic() - start), refresh=False)
                        bar.update()
        return finished

    @contextmanager
    def _aborted_on_error(self, request_ids: list[str]) -> Iterator[None]:
        try:
            yield
        except BaseException:
            for request_id in request_ids:
                self.engine.abort_request(request_id)
            raise

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("this LLM is closed: make a new one")


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many: a list of integers is one prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise RequestError(f"prompts must be text, token ids, a dict or a sequence of those, got {prompts!r:.100}")
    if prompts and all(isinstance(item, int) for item in prompts):
        return [cast(Sequence[int], prompts)]
    return list(cast(Sequence[Prompt], prompts))


def _prompt_parts(prompt: Prompt) -> tuple[str | None, Sequence[int] | None]:
    """(text, token ids), one of them None."""
    if isinstance(prompt, str):
        return prompt, None
    if isinstance(prompt, Mapping):
        keys = set(prompt)
        if keys == {"prompt"} and isinstance(prompt["prompt"], str):
            return prompt["prompt"], None
        if keys == {"prompt_token_ids"}:
            return None, prompt["prompt_token_ids"]
        raise RequestError(
            f"a prompt dict needs exactly one key, 'prompt' (text) or 'prompt_token_ids' (ids), got {prompt!r:.100}"
        )
    if isinstance(prompt, Sequence) and all(isinstance(token, int) for token in prompt):
        return None, cast(Sequence[int], prompt)
    raise RequestError(f"a prompt must be text, a list of token ids or a dict, got {prompt!r:.100}")


def _params_for_each(
    sampling_params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams]:
    if sampling_params is None:
        sampling_params = SamplingParams()
    if isinstance(sampling_params, SamplingParams):
        return [sampling_params] * num_prompts
    if not isinstance(sampling_params, Sequence):
        raise RequestError(f"sampling_params must be SamplingParams or a list of them, got {sampling_params!r:.100}")
    params = list(sampling_params)
    if len(params) != num_prompts:
        raise RequestError(
            f"{num_prompts} prompts and {len(params)} sampling_params: give one SamplingParams for all, or one for each"
        )
    for param in params:
        if not isinstance(param, SamplingParams):
            raise RequestError(f"sampling_params must be SamplingParams, got {param!r:.100}")
    return params


def _rates(finished: Collection[RequestOutput], seconds: float) -> str:
    read = sum(len(output.prompt_token_ids) for output in finished)
    written = sum(len(output.outputs[0].token_ids) for output in finished)
    return f"input {read / seconds:.1f} tok/s, output {written / seconds:.1f} tok/s"
