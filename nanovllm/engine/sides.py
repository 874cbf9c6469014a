"""The sides: optional parts of the engine, and the only place where the core looks for them.

The core imports no side and runs without any. Each function below finds one side by its module's name and returns that
module, or None where its files are not installed: the feature is then off. The protocols say what the core calls.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from nanovllm.config import EngineConfig
from nanovllm.device import Device
from nanovllm.engine.execution_order import DecodeRunner, ExecutionOrder
from nanovllm.engine.grammar import GrammarCompiler
from nanovllm.engine.metrics import EngineMetrics
from nanovllm.kvcache import chunked_attention
from nanovllm.kvcache.base import AttentionGeometry, KVCacheBase
from nanovllm.kvcache.fitting import KVSizing
from nanovllm.kvcache.offload_engine import OffloadEngine
from nanovllm.kvcache.sizing import KVPlan
from nanovllm.models.decoder import Decoder
from nanovllm.models.spec import DecoderSpec
from nanovllm.ops.attention import AttentionBackend
from nanovllm.tokenizer import Tokenizer

if TYPE_CHECKING:  # for annotations only: the core runs without these modules
    from nanovllm.planner.machine import Rates
    from nanovllm.planner.plan import Plan


class CudaGraphs(Protocol):
    """Replays recorded decode steps. Without it every step is eager."""

    def record_decode_graphs(
        self, device: Device, model: Decoder, kv_cache: KVCacheBase, max_len: int, config: EngineConfig
    ) -> DecodeRunner | None: ...

    def graph_bytes(self, device: Device, model: Decoder, backend: AttentionBackend, config: EngineConfig) -> int: ...


class LayerwisePrefill(Protocol):
    """Prefills long prompts layer by layer where that moves less KV. Without it every prompt goes chunk by chunk."""

    def LayerwiseOrder(
        self, model: Decoder, engine: OffloadEngine, geometry: AttentionGeometry, backend: AttentionBackend
    ) -> ExecutionOrder: ...


class CpuAttention(Protocol):
    """Lets CPU cores attend to host blocks. Without it every host block is copied to the device."""

    def make_cpu_attention(
        self, engine: OffloadEngine, geometry: AttentionGeometry, backend: AttentionBackend, layer_weight_bytes: int
    ) -> chunked_attention.CpuAttention | None: ...


class Planner(Protocol):
    """Predicts what a prompt takes, moves and lasts. Without it `LLM.plan` is refused."""

    def engine_plan(self, spec: DecoderSpec, dtype: str, sizing: KVSizing, kv: KVPlan, rates: Rates | None) -> Plan: ...


class StructuredOutputs(Protocol):
    """Keeps outputs to JSON schemas, regular expressions, choices and grammars. Without it they are refused."""

    def GrammarCompiler(
        self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: Collection[int]
    ) -> GrammarCompiler: ...


class Trace(Protocol):
    """Writes a timeline of copies and kernels. Without it the engine argument `trace` is refused."""

    def TracedDevice(self, inner: Device, path: str | Path) -> Device: ...


class BeamSearch(Protocol):
    """Beam search with vLLM's parameters. Without it `LLM.beam_search` is refused."""

    def beam_search(
        self, llm: Any, prompts: Any, params: Any, use_tqdm: bool, concurrency_limit: int | None
    ) -> list[Any]: ...


class Choices(Protocol):
    """Scores answers to a prompt. Without it `LLM.score_choices` is refused."""

    def score_choices(self, llm: Any, prompt: Any, choices: Any, use_tqdm: bool) -> list[Any]: ...


class MetricsReader(Protocol):
    """The engine's metrics in vLLM's shapes. Without it `get_metrics` is refused."""

    def RequestHistograms(self, max_model_len: int) -> Any: ...

    def snapshot(self, engine: EngineMetrics, requests: Any, model_name: str) -> list[Any]: ...


def cuda_graphs() -> CudaGraphs | None:
    return cast("CudaGraphs | None", _find("nanovllm.cuda_graphs"))


def layerwise_prefill() -> LayerwisePrefill | None:
    return cast("LayerwisePrefill | None", _find("nanovllm.layerwise_prefill"))


def cpu_attention() -> CpuAttention | None:
    return cast("CpuAttention | None", _find("nanovllm.cpu_attention.host_blocks"))


def planner() -> Planner | None:
    return cast("Planner | None", _find("nanovllm.planner.plan"))


def structured_outputs() -> StructuredOutputs | None:
    return cast("StructuredOutputs | None", _find("nanovllm.structured_outputs"))


def trace() -> Trace | None:
    return cast("Trace | None", _find("nanovllm.device.trace"))


def beam_search() -> BeamSearch | None:
    return cast("BeamSearch | None", _find("nanovllm.beam_search"))


def choices() -> Choices | None:
    return cast("Choices | None", _find("nanovllm.choices"))


def metrics_reader() -> MetricsReader | None:
    return cast("MetricsReader | None", _find("nanovllm.metrics_reader"))


def _find(module: str) -> Any | None:
    """The module, or None if it is not installed. An error within an installed module is raised."""
    package, _, _ = module.rpartition(".")
    if importlib.util.find_spec(package) is None or importlib.util.find_spec(module) is None:
        return None
    return importlib.import_module(module)
