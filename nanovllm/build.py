"""The engine of a model directory: its tokenizer, executor and scheduler, assembled from the engine arguments."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from nanovllm.config import EngineConfig
from nanovllm.engine import llm_engine, sides
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.input_processor import ModelFacts
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.scheduling_budget import SchedulerLimits
from nanovllm.errors import ConfigError, RequestError, as_request_error, quoted
from nanovllm.models.hf_config import ModelConfig
from nanovllm.models.spec import DecoderSpec
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.prompts import Prompt, prompt_part
from nanovllm.text.tokenizer import HuggingFaceTokenizer, Tokenizer, load_tokenizer
from nanovllm.vllm_arguments import own_arguments

if TYPE_CHECKING:  # for annotations only: the metrics in vLLM's shapes are a side
    from nanovllm.features.vllm_api.metrics_reader import Metric

logger = logging.getLogger(__name__)
ADD_REQUEST_ARGUMENTS = (
    "sampling_params",
    "params",
    "prompt_token_ids",
    "arrival_time",
    "priority",
    "cache_salt",
    "lora_request",
)


class MakesConfig(Protocol):
    """What `LLMEngine.from_engine_args` needs of EngineArgs."""

    def create_engine_config(self) -> EngineConfig: ...


@dataclass(frozen=True, slots=True)
class ModelView:
    """What programs written for vLLM ask the engine's `model_config`. max_model_len: tokens of the longest sequence."""

    model: str
    max_model_len: int


class LLMEngine(llm_engine.LLMEngine):
    """Adds, steps and aborts requests, with vLLM's names: `add_request`, `step`, `has_unfinished_requests`.

    Raises ConfigError for arguments that cannot be honoured, and ModelError for damaged or unsupported checkpoints.
    """

    def __init__(self, config: EngineConfig) -> None:
        # The smallest files first: no other is opened if one of them cannot be used.
        model = ModelConfig(config.model, config.hf_overrides, config.generation_config)
        eos_token_ids = frozenset(model.eos_token_ids())
        self.sampling_defaults = model.sampling_defaults(config.override_generation_config)
        self.get_default_sampling_params()  # refuses those that cannot be used
        if config.trust_remote_code:
            logger.warning("trust_remote_code=True changes nothing: code that a model directory holds is never run")
        tokenizer = _tokenizer(config, model.model_type)
        self.config = config
        self.runner = _runner(config, model.spec)
        plan, spec, structured = self.runner.plan, self.runner.spec, sides.structured_outputs()
        lora = sides.lora() if config.enable_lora else None
        self._vllm_api = sides.vllm_api()
        self._histograms = self._vllm_api.RequestHistograms(plan.max_model_len) if self._vllm_api else None
        super().__init__(
            SchedulerLimits(
                config.max_num_seqs,
                config.max_num_batched_tokens,
                plan.max_model_len,
                eos_token_ids,
                config.long_prefill_token_threshold,
                config.preemption_mode,
                num_layers=spec.num_layers,
                layerwise_memory=plan.layerwise_memory,
                max_loras=config.max_loras if config.enable_lora else 0,
            ),
            ModelFacts(spec.vocab_size, spec.rope.length_dependent_above, spec.rope.recomputed_above),
            BlockManager(
                plan.split.resident_blocks,
                plan.num_cpu_blocks,
                self.runner.sizing.layout.block_size,
                config.enable_prefix_caching,
                self.runner.num_swap_blocks,
            ),
            self.runner,
            tokenizer,
            seed=config.seed,
            max_logprobs=config.max_logprobs,
            advise=self.runner.advise,
            grammars=structured.GrammarCompiler(tokenizer, spec.vocab_size, eos_token_ids) if structured else None,
            on_finish=None if self._histograms is None else self._histograms.observe,
            adapters=lora.AdapterRegistry(spec, config.max_lora_rank) if lora is not None else None,
        )

    @classmethod
    def from_engine_args(cls, engine_args: MakesConfig, **vllm_arguments: Any) -> LLMEngine:
        """The engine that `EngineArgs` describe. vllm_arguments: vLLM's others, see `vllm_names`."""
        _refuse_others("from_engine_args", vllm_arguments)
        return cls(engine_args.create_engine_config())

    def add_request(self, request_id: str, prompt: Prompt | None = None, *args: Any, **arguments: Any) -> None:
        """Queue a request; see `engine.llm_engine.LLMEngine.add_request`.

        prompt: text, a list of token ids, or a dict as for `LLM.generate`. params: vLLM's name of sampling_params.
        vLLM's other arguments: see `vllm_names`.
        """
        arguments = own_arguments(
            "argument of add_request", arguments, ADD_REQUEST_ARGUMENTS, "ENGINE_CALL_ARGUMENTS", RequestError
        )
        if "params" in arguments:
            arguments["sampling_params"] = arguments.pop("params")
        if prompt is None or isinstance(prompt, str):
            super().add_request(request_id, prompt, *args, **arguments)
            return
        with as_request_error("the request cannot be taken"):
            part = prompt_part(prompt)
            for name, value in (("prompt_token_ids", part.token_ids), ("cache_salt", part.cache_salt)):
                if value is not None and arguments.get(name) is not None:
                    raise RequestError(f"{name} is given twice, in the prompt and as an argument: give it once")
                if value is not None:
                    arguments[name] = value
            super().add_request(request_id, part.text, *args, **arguments)

    def abort_request(self, request_id: str | Iterable[str], internal: bool = False) -> RequestOutput | None:
        """End a request, and return its output if it was unfinished. Several ids, as vLLM has them, return None."""
        _refuse_others("abort_request", {"internal": internal} if internal else {})
        if isinstance(request_id, str):
            return super().abort_request(request_id)
        for each in request_id:
            super().abort_request(each)
        return None

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Empty the prefix cache. Unfinished requests keep their blocks. Returns True, as vLLM's does."""
        others = {"reset_running_requests": reset_running_requests, "reset_connector": reset_connector}
        _refuse_others("reset_prefix_cache", {name: value for name, value in others.items() if value})
        return super().reset_prefix_cache()

    def check_health(self) -> None:
        """Raise EngineError if no step can run any more, as when a tensor-parallel rank has failed."""
        with self.guard.operation("check_health"):
            self.check_open()
            self.runner.check_health()

    @property
    def model_config(self) -> ModelView:
        """The model and its longest sequence, under vLLM's names."""
        return ModelView(str(self.config.model), self.runner.plan.max_model_len)

    def get_num_unfinished_requests(self) -> int:
        return len(self._requests)

    def get_tokenizer(self) -> Any:
        """The Hugging Face tokenizer itself. Raises RequestError if none was loaded."""
        if not isinstance(self.tokenizer, HuggingFaceTokenizer):
            raise RequestError(
                "no tokenizer was loaded: the model directory has no tokenizer files, or skip_tokenizer_init=True left "
                "them out; add them, or work with token ids"
            )
        return self.tokenizer.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The default sampling parameters: those that the checkpoint's generation_config.json recommends."""
        return SamplingParams(**self.sampling_defaults)

    def get_metrics(self) -> list[Metric]:
        """All metrics in vLLM's shapes: `Counter`, `Gauge` and `Histogram` of `vllm_api.metrics_reader`."""
        side = sides.installed(self._vllm_api, "get_metrics", "vllm_api")
        return side.snapshot(self.metrics(), self._histograms, self.config.model_name)


def _runner(config: EngineConfig, spec: DecoderSpec) -> sides.Runner:
    """The executor that the arguments ask for."""
    sides.check_arguments(config)
    side = sides.distributed()
    if config.tensor_parallel_size == 1 or side is None:
        return ModelRunner(config, spec)
    return side.TensorParallelExecutor(config, spec)


def _refuse_others(method: str, arguments: Mapping[str, Any]) -> None:
    """Raise RequestError for vLLM's arguments that mean something else than what the engine does."""
    own_arguments(f"argument of {method}", arguments, (), "ENGINE_CALL_ARGUMENTS", RequestError)


def _tokenizer(config: EngineConfig, model_type: str) -> Tokenizer | None:
    """The tokenizer that the arguments name; None if the model has none, or if it is not wanted."""
    if config.skip_tokenizer_init:
        return None
    directory = config.tokenizer if config.tokenizer is not None else config.model
    tokenizer = load_tokenizer(directory, model_type)
    if tokenizer is None and config.tokenizer is not None:
        raise ConfigError(f"tokenizer={quoted(config.tokenizer)}: the directory holds no tokenizer files")
    return tokenizer
