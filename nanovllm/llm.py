"""The offline API: a model directory and engine arguments in, text out."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from nanovllm.build import build_engine
from nanovllm.client import EngineClient
from nanovllm.config import engine_config
from nanovllm.device import Busy
from nanovllm.engine.block_manager import PrefixCacheStats
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.metrics import EngineMetrics
from nanovllm.engine.request import Request
from nanovllm.engine.view import EngineView
from nanovllm.errors import RequestError, as_request_error
from nanovllm.features.progress_bar import MakeBar, Meter, ProgressBar
from nanovllm.kvcache.base import KVStats
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.chat_template import ChatTemplate
from nanovllm.text.prompts import (
    Message,
    Prompt,
    PromptParts,
    check_use_tqdm,
    final_only,
    lora_request_for_each,
    params_for_each,
    priority_for_each,
    prompt_parts,
)

if TYPE_CHECKING:
    from nanovllm.features.planner.plan import Plan
    from nanovllm.features.planner.predict import Rates
    from nanovllm.features.vllm_api.beam_search import BeamSearchOutput, BeamSearchParams
    from nanovllm.features.vllm_api.choices import ChoiceScore
    from nanovllm.features.vllm_api.metrics_reader import Metric
    from nanovllm.lora_request import LoRARequest


class LLM:
    """A model ready to generate. One thread at a time may use it; a second one is refused with EngineError.

    model: a local directory in Hugging Face format, or the name of a model on the Hugging Face hub. Engine arguments:
    see `nanovllm.config.EngineConfig`, and `nanovllm.vllm_names` for vLLM's names that are taken too. Unknown ones and
    values that cannot be honoured raise ConfigError, damaged or unsupported checkpoints ModelError.
    """

    def __init__(self, model: str | Path, **engine_args: Any) -> None:
        self.config = engine_config(model, engine_args)
        self.engine, self._runner = build_engine(self.config)
        self.max_model_len = self._runner.plan.max_model_len
        self._request_ids = (f"request-{i}" for i in itertools.count())

    @classmethod
    def from_engine_args(cls, engine_args: Any) -> LLM:
        """The LLM that `EngineArgs` describe."""
        return cls(**vars(engine_args))

    @property
    def llm_engine(self) -> LLMEngine:
        """The engine, under vLLM's name."""
        return self.engine

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | MakeBar = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Run prompts to their end. Returns their complete outputs, in the order of the prompts, for any `output_kind`.

        prompts: one or several; each is text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}, the
        dicts optionally with a "cache_salt" (see `LLMEngine.add_request`). sampling_params: one for all prompts or one
        for each; None takes `get_default_sampling_params`. use_tqdm: whether to show progress; or what makes the bar,
        called as tqdm is. lora_request: the `LoRARequest` of all or of each, None for the model alone; needs
        enable_lora=True. priority: one for all or for each; lower values run first.

        Raises RequestError, before anything runs, if a prompt or its parameters cannot be used. An interrupt aborts the
        call's requests.
        """
        with self.engine.guard.call("generate"):
            requests = self._requests(
                lambda: prompt_parts(prompts), sampling_params, priority, lora_request, is_final=True
            )
            return self._complete(requests, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | MakeBar = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        *,
        priority: int | Sequence[int] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str | None = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of several, rendered to prompts by the tokenizer's chat template.

        A conversation is a list of messages with a "role" and a "content". chat_template: the text of a template to use
        instead. chat_template_content_format: "string" gives the template contents as text, "openai" as lists of parts,
        "auto" as lists where it shows the texts of parts. add_generation_prompt appends the beginning of an answer;
        continue_final_message leaves the last message open instead. tools and chat_template_kwargs are passed to the
        template. Everything else is as in `generate`; the rendered text is the output's `prompt`.
        """
        with self.engine.guard.call("chat"):
            template = ChatTemplate(
                self.engine.tokenizer,
                chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                template_kwargs=chat_template_kwargs,
                content_format=chat_template_content_format,
            )
            read = partial(template.prompts, messages)
            requests = self._requests(read, sampling_params, priority, lora_request, is_final=True)
            return self._complete(requests, use_tqdm)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | Sequence[int] | None = None,
    ) -> Iterator[RequestOutput]:
        """As `generate`, but yields the outputs of every step as they come, in the form of `output_kind`.

        The requests start with the first `next`, and are aborted when the iterator is closed or deleted. Between two
        outputs the LLM may be used for other calls.
        """
        with self.engine.guard.operation("stream"):
            requests = self._requests(
                lambda: prompt_parts(prompts), sampling_params, priority, lora_request, is_final=False
            )
        return self._stream(requests)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """See `vllm_api.beam_search`. concurrency_limit: most prompts at a time."""
        from nanovllm.features.vllm_api.beam_search import beam_search

        return beam_search(self, prompts, params, lora_request, use_tqdm, concurrency_limit)

    def score_choices(
        self, prompt: str | Sequence[int], choices: Sequence[str | Sequence[int]], use_tqdm: bool = False
    ) -> list[ChoiceScore]:
        """How likely each choice is after the prompt, in the order of the choices; see `vllm_api.choices`."""
        from nanovllm.features.vllm_api.choices import score_choices

        return score_choices(self, prompt, choices, use_tqdm)

    def get_tokenizer(self) -> Any:
        """The Hugging Face tokenizer itself. Raises RequestError if none was loaded."""
        return self.engine.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """The default sampling parameters: those that the checkpoint's generation_config.json recommends."""
        return self.engine.get_default_sampling_params()

    def get_metrics(self) -> list[Metric]:
        """All metrics in vLLM's shapes: `Counter`, `Gauge` and `Histogram` of `vllm_api.metrics_reader`."""
        return self.engine.get_metrics()

    def get_world_size(self, include_dp: bool = True) -> int:
        """The number of devices that compute the model."""
        return self.config.tensor_parallel_size

    def plan(self, rates: Rates | None = None) -> Plan:
        """The plan of this engine: what its memory holds, what a prompt takes and moves and, with `rates`, how long."""
        from nanovllm.features.planner.page import engine_plan  # which most programs do not need

        runner = self._runner
        return engine_plan(runner.network, runner.sizing, runner.plan, rates)

    def watch_steps(self, on_layer: Callable[[float], None] | None) -> Callable[[float], None] | None:
        """Call `on_layer` before each layer's attention with the share of the step that is done; None ends that.

        Returns the function that was called before. The function may read `metrics`, `engine.progress(share)` and the
        like, and may not run requests. If it raises, the error is logged and the function is not called again.
        """
        return self._runner.watch_steps(on_layer)

    def kv_stats(self) -> KVStats:
        """Sizes of the KV memory, bytes copied between its tiers so far; of several processes, those of the first."""
        manager = self.engine.scheduler.block_manager
        stats = self._runner.kv_stats()
        most = manager.pool.most_used
        on_device = manager.pool.most_used_on_device
        return replace(stats, most_used_blocks=most, most_used_device_blocks=on_device)

    def link_busy(self) -> Busy:
        """Bytes copied to the device so far, or in a sample of the copies, and the seconds during which they ran."""
        return self._runner.link_busy()

    def prefix_cache_stats(self) -> PrefixCacheStats:
        """Tokens looked up in the prefix cache so far, and how many of them were found."""
        return self.engine.scheduler.block_manager.stats

    def reset_prefix_cache(self) -> bool:
        """See `LLMEngine.reset_prefix_cache`."""
        return self.engine.reset_prefix_cache()

    def metrics(self) -> EngineMetrics:
        """Counts since the start: preemptions by kind, blocks copied and swapped, hits of the prefix cache."""
        return self.engine.metrics()

    def view(self) -> EngineView:
        """Queues, blocks, progress and limits of the running engine, for displays."""
        return EngineView(self.engine, self.kv_stats)

    def close(self) -> None:
        """Release weights and KV memory and end the transfer streams. Safe to call twice.

        Raises EngineError while another thread's call runs. In a fork of the process that made it, it does nothing.
        """
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # ---- helpers

    def _requests(
        self,
        read_prompts: Callable[[], list[PromptParts]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int] | None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None,
        is_final: bool,
    ) -> list[Request]:
        """Make a request of each prompt. is_final: each has one output, at its end.

        Raises RequestError, which names the prompt's index if there are several.
        """
        self.engine.check_open()
        with as_request_error("the prompts cannot be read"):
            parts = read_prompts()
            given = sampling_params if sampling_params is not None else self.get_default_sampling_params()
            params = params_for_each(given, len(parts))
            params = final_only(params) if is_final else params
            priorities = priority_for_each(priority, len(parts))
            lora_requests = lora_request_for_each(lora_request, len(parts))
            now = self.engine.arrival_time()
            requests = list[Request]()
            for index, part in enumerate(parts):
                try:
                    requests.append(
                        self.engine.make_request(
                            next(self._request_ids), part, params[index], now, priorities[index], lora_requests[index]
                        )
                    )
                except RequestError as error:
                    if len(parts) == 1:
                        raise
                    raise RequestError(f"prompts[{index}]: {error}") from None
            return requests

    def _complete(self, requests: Sequence[Request], use_tqdm: bool | MakeBar) -> list[RequestOutput]:
        """The final outputs of the requests, in order. `client.step` is `LLMEngine.step` for one of its callers."""
        check_use_tqdm(use_tqdm)
        finished: dict[str, RequestOutput] = {}
        make = use_tqdm if callable(use_tqdm) else tqdm if use_tqdm else None
        bar = ProgressBar(make, len(requests), Meter(), self)
        with bar, closing(EngineClient(self.engine)) as client:
            for request in requests:
                client.add(request)
            while client.pending:
                outputs = client.step()
                finished.update((output.request_id, output) for output in outputs)
                bar.update(outputs)
        return [finished[request.request_id] for request in requests]

    def _stream(self, requests: Sequence[Request]) -> Iterator[RequestOutput]:
        """Add the requests and run them to their end; yields their outputs. Closing it aborts the rest."""
        with closing(EngineClient(self.engine)) as client:
            for request in requests:
                client.add(request)
            while client.pending:
                yield from client.step()
