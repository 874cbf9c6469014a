"""The engine's metrics, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from nanovllm.engine.prefix_cache import PrefixCacheStats
from nanovllm.engine.request import Request


@dataclass(slots=True)
class PreemptionStats:
    """Totals since the engine was created; shared tokens and blocks count once."""

    recomputed: int = 0  # preemptions by recompute
    swapped: int = 0  # preemptions by swap
    tokens_lost: int = 0  # computed tokens whose blocks were freed; the prefix cache may still hold some of them
    blocks_swapped_out: int = 0
    blocks_swapped_in: int = 0

    @property
    def total(self) -> int:
        return self.recomputed + self.swapped


@dataclass(slots=True)
class DraftStats:
    """Totals since the engine was created."""

    drafts: int = 0  # how often a step verified drafts of a sequence
    drafted_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RequestCounts:
    """Requests by what they do now."""

    waiting: int
    loading: int
    swapped: int
    running: int


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """KV blocks by what they hold now."""

    used: int  # a running request references them
    cached: int  # only the prefix cache knows them
    free: int
    swapped: int
    copied_on_write: int  # since the engine was created


@dataclass(slots=True)
class EngineMetrics:
    """Requests and blocks now; all other numbers are totals since the engine was created. `asdict` exports them."""

    requests: RequestCounts
    blocks: BlockCounts
    preemptions: PreemptionStats
    prefix_cache: PrefixCacheStats
    drafts: DraftStats
    prompt_tokens_computed: int
    tokens_generated: int


class MetricsReader(Protocol):
    """The engine's metrics in vLLM's shapes."""

    def observe(self, request: Request) -> None:
        """Count a request that has ended."""
        ...

    def read(self, engine: EngineMetrics) -> list[Any]: ...
