"""The sides: optional parts of the engine, and the place where the engine looks for them. No torch.

The core imports no side and runs without any. Each function below finds one side by its module's name and returns that
module, or None where its files are not installed: the feature is then off or refused. The protocols say what the core
calls.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from nanovllm.config import EngineConfig, PreemptionMode
from nanovllm.data.batch import Executor
from nanovllm.errors import Advice, ConfigError, EngineError
from nanovllm.side_modules import find_side

if TYPE_CHECKING:  # for annotations only: some of these modules import torch, others are sides
    import torch

    from nanovllm.data.adapter import Adapters
    from nanovllm.data.batch import ScheduledSequence
    from nanovllm.data.grammar import GrammarCompiler
    from nanovllm.data.layerwise import LayerwiseSizing, LayerwiseStep
    from nanovllm.data.layout import KVLayout
    from nanovllm.data.progress import Progress, WatchSteps
    from nanovllm.device import Busy, Device
    from nanovllm.engine.block_manager import BlockManager
    from nanovllm.engine.execution_order import AdapterManager, DecodeRunner, ExecutionOrder
    from nanovllm.engine.preemption import Preemption
    from nanovllm.engine.request import Request
    from nanovllm.engine.request import Sequence as TokenSequence
    from nanovllm.engine.scheduling_budget import SchedulerLimits
    from nanovllm.features.planner.machine import Rates
    from nanovllm.features.planner.plan import Plan
    from nanovllm.kvcache import chunked_attention
    from nanovllm.kvcache.base import AttentionGeometry, KVCacheBase, KVStats
    from nanovllm.kvcache.offload_engine import OffloadEngine
    from nanovllm.memory.fitting import KVSizing
    from nanovllm.memory.sizing import KVPlan, MemoryFacts
    from nanovllm.models.decoder import Decoder
    from nanovllm.models.spec import DecoderSpec
    from nanovllm.ops.attention import AttentionBackend
    from nanovllm.outputs import RequestOutput
    from nanovllm.sampling_params import SamplingParams
    from nanovllm.text import chat_template
    from nanovllm.text.tokenizer import Tokenizer

T = TypeVar("T")


class SequenceGroups(Protocol):
    """Requests of several sequences (n, best_of, beam search), and preemption by swapping.

    Without it such requests and `preemption_mode="swap"` are refused.
    """

    def request_factory(
        self, request_id: str, params: SamplingParams, limits: SchedulerLimits, vocab_size: int
    ) -> Callable[..., Request]:
        """Makes the request from `Request`'s arguments. Raises RequestError for more sequences than fit in a step."""
        ...

    def SwapPreemption(self, manager: BlockManager, mode: PreemptionMode | None) -> Preemption: ...

    def asked_swap_bytes(self, config: EngineConfig) -> int: ...

    def plan_swap_space(self, config: EngineConfig, layout: KVLayout, memory: MemoryFacts, plan: KVPlan) -> int: ...


class LayerwisePrefill(Protocol):
    """Prefills long prompts layer by layer where that moves less KV. Without it every prompt goes chunk by chunk."""

    def Sizing(self, token_bytes: int) -> LayerwiseSizing: ...

    def plan(self, seq: TokenSequence, manager: BlockManager, limits: SchedulerLimits) -> None:
        """Set `seq.layerwise`: what is prefilled layer by layer next, or None for a chunk in all layers."""
        ...

    def scheduled_part(
        self, scheduled: ScheduledSequence, seq: TokenSequence, tokens: int, num_layers: int
    ) -> ScheduledSequence: ...

    def advance(self, seq: TokenSequence, done: LayerwiseStep, num_layers: int) -> int: ...


class LayerwiseRunner(Protocol):
    """Runs what `LayerwisePrefill` schedules."""

    def LayerwiseOrder(
        self,
        model: Decoder,
        engine: OffloadEngine,
        geometry: AttentionGeometry,
        backend: AttentionBackend,
        adapters: AdapterManager | None,
    ) -> ExecutionOrder: ...


class CudaGraphs(Protocol):
    """Replays recorded decode steps. Without it every step is eager."""

    def record_decode_graphs(
        self, device: Device, model: Decoder, kv_cache: KVCacheBase, max_len: int, config: EngineConfig
    ) -> DecodeRunner | None: ...

    def graph_bytes(self, device: Device, model: Decoder, backend: AttentionBackend, config: EngineConfig) -> int: ...


class CpuAttention(Protocol):
    """Lets CPU cores attend to host blocks. Without it every host block is copied to the device."""

    def make_cpu_attention(
        self, engine: OffloadEngine, geometry: AttentionGeometry, backend: AttentionBackend, layer_weight_bytes: int
    ) -> chunked_attention.CpuAttention | None: ...


class ChatTemplates(Protocol):
    """Turns conversations into prompts. Without it `LLM.chat` and messages on the command line are refused."""

    def TemplateProcess(self) -> chat_template.TemplateProcess: ...

    def ChatTemplate(
        self,
        tokenizer: Tokenizer | None,
        template: str | None = None,
        *,
        process: chat_template.TemplateProcess | None,
        **options: Any,
    ) -> chat_template.ChatTemplate: ...


class Planner(Protocol):
    """Predicts what a prompt takes, moves and lasts. Without it `LLM.plan` is refused."""

    def engine_plan(self, spec: DecoderSpec, dtype: str, sizing: KVSizing, kv: KVPlan, rates: Rates | None) -> Plan: ...


class StructuredOutputs(Protocol):
    """Keeps outputs to JSON schemas, regular expressions, choices and grammars. Without it they are refused."""

    def GrammarCompiler(
        self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: Collection[int]
    ) -> GrammarCompiler: ...


class LoRA(Protocol):
    """Finds the LoRA adapters that requests name. Without it `enable_lora=True` is refused."""

    def LoRARequest(self, lora_name: str, lora_int_id: int, lora_path: str, base_model_name: str | None) -> Any: ...

    def AdapterRegistry(self, spec: DecoderSpec, max_lora_rank: int) -> Adapters: ...

    def reserved(self, memory: MemoryFacts, config: EngineConfig, spec: DecoderSpec, itemsize: int) -> MemoryFacts:
        """What is left of the memory besides adapters; itemsize: bytes of an element of a weight."""
        ...


class LoRARunner(Protocol):
    """Holds adapters on the device and applies them."""

    def LoRAManager(self, model: Decoder, config: EngineConfig) -> AdapterManager: ...


class Trace(Protocol):
    """Writes a timeline of copies and kernels. Without it the engine argument `trace` is refused."""

    def TracedDevice(self, inner: Device, path: str | Path) -> Device: ...

    def trace_model(self, device: Device, model: Decoder) -> None: ...

    def begin_step(self, device: Device, sequences: Sequence[ScheduledSequence]) -> None: ...


class ProgressBars(Protocol):
    """Shows the progress of `LLM.generate`. Without it nothing is shown."""

    def ProgressBar(
        self, num_prompts: int, progress: Callable[[float], Progress], watch_steps: WatchSteps
    ) -> ProgressBar: ...


class ProgressBar(AbstractContextManager[object], Protocol):
    """Shown while it is entered."""

    def update(self, outputs: Sequence[RequestOutput]) -> None:
        """Count the requests that a step has finished."""
        ...


class Runner(Executor, Protocol):
    """The executor of a model directory: `engine.model_runner.ModelRunner`, or one for several ranks.

    Of several ranks the sizes, `spec` and statistics are those of the first.
    """

    spec: DecoderSpec
    dtype: torch.dtype
    sizing: KVSizing
    plan: KVPlan
    num_swap_blocks: int

    def check_health(self) -> None:
        """Raise EngineError if no step can run any more."""
        ...

    def advise(self, num_tokens: int) -> Advice: ...

    def watch_steps(self, on_layer: Callable[[float], None] | None) -> Callable[[float], None] | None: ...

    def kv_stats(self) -> KVStats: ...

    def link_busy(self) -> Busy: ...


class Distributed(Protocol):
    """Computes one model on several ranks. Without it `tensor_parallel_size` above 1 is refused."""

    def TensorParallelExecutor(self, config: EngineConfig, spec: DecoderSpec) -> Runner: ...


class VllmApi(Protocol):
    """vLLM's beam search and metrics, and scores of choices. Without it those methods of LLM are refused."""

    def beam_search(
        self, llm: Any, prompts: Any, params: Any, lora_request: Any, use_tqdm: bool, concurrency_limit: int | None
    ) -> list[Any]: ...

    def score_choices(self, llm: Any, prompt: Any, choices: Any, use_tqdm: bool) -> list[Any]: ...

    def RequestHistograms(self, max_model_len: int) -> Any: ...

    def snapshot(self, engine: Any, requests: Any, model_name: str) -> list[Any]: ...


def sequence_groups() -> SequenceGroups | None:
    return cast("SequenceGroups | None", find_side("nanovllm.features.sequence_groups"))


def layerwise_prefill() -> LayerwisePrefill | None:
    return cast("LayerwisePrefill | None", find_side("nanovllm.features.layerwise_prefill.schedule"))


def layerwise_runner() -> LayerwiseRunner | None:
    return cast("LayerwiseRunner | None", find_side("nanovllm.features.layerwise_prefill.runner"))


def cuda_graphs() -> CudaGraphs | None:
    return cast("CudaGraphs | None", find_side("nanovllm.features.cuda_graphs"))


def cpu_attention() -> CpuAttention | None:
    return cast("CpuAttention | None", find_side("nanovllm.features.cpu_attention.host_blocks"))


def chat_templates() -> ChatTemplates | None:
    return cast("ChatTemplates | None", find_side("nanovllm.text.chat_template"))


def planner() -> Planner | None:
    """The planner, which predicts with CPU attention's shares and so needs that side too."""
    if cpu_attention() is None:
        return None
    return cast("Planner | None", find_side("nanovllm.features.planner.plan"))


def structured_outputs() -> StructuredOutputs | None:
    return cast("StructuredOutputs | None", find_side("nanovllm.features.structured_outputs"))


def lora() -> LoRA | None:
    return cast("LoRA | None", find_side("nanovllm.features.lora.registry"))


def lora_runner() -> LoRARunner | None:
    return cast("LoRARunner | None", find_side("nanovllm.features.lora.manager"))


def trace() -> Trace | None:
    return cast("Trace | None", find_side("nanovllm.device.trace"))


def progress_bar() -> ProgressBars | None:
    return cast("ProgressBars | None", find_side("nanovllm.features.progress_bar"))


def distributed() -> Distributed | None:
    return cast("Distributed | None", find_side("nanovllm.features.distributed.executor"))


def vllm_api() -> VllmApi | None:
    return cast("VllmApi | None", find_side("nanovllm.features.vllm_api"))


def installed(side: T | None, method: str, module: str) -> T:
    """The side. Raises EngineError if it is None: `method` needs nanovllm.`module`."""
    if side is None:
        raise EngineError(f"{method}() needs nanovllm.{module}, which this installation does not have")
    return side


def check_arguments(config: EngineConfig) -> None:
    """Raise ConfigError for engine arguments that need a side which is not installed."""
    if config.tensor_parallel_size > 1 and distributed() is None:
        raise ConfigError(_missing(f"tensor_parallel_size={config.tensor_parallel_size}", "nanovllm.features.distributed"))  # noqa: E501
    if config.trace is not None and trace() is None:
        raise ConfigError(_missing(f"trace={str(config.trace)!r}", "nanovllm.device.trace"))
    if config.enable_lora and (lora() is None or lora_runner() is None):
        raise ConfigError(_missing("enable_lora=True", "nanovllm.features.lora"))
    if sequence_groups() is None:
        if config.preemption_mode == "swap":
            raise ConfigError(_missing("preemption_mode='swap'", "nanovllm.features.sequence_groups"))
        if config.swap_space:
            raise ConfigError(_missing(f"swap_space={config.swap_space}", "nanovllm.features.sequence_groups"))


def _missing(argument: str, module: str) -> str:
    return f"{argument}: needs {module}, which this installation does not have; leave it out"
