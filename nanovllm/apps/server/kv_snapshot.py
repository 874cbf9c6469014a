"""A snapshot of the KV cache: the state of every block, and the numbers that go with it. Plain data, without torch."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from nanovllm import KVBlockState

if TYPE_CHECKING:  # torch comes with it
    from nanovllm import LLM


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """What stays the same while an engine lives. Cells are numbered across the tiers, in their order."""

    block_size: int  # tokens
    block_bytes: int  # all layers
    tiers: dict[str, int]  # blocks of each
    num_layers: int
    max_model_len: int
    states: tuple[str, ...] = tuple(state.name.lower() for state in KVBlockState)

    @classmethod
    def of(cls, llm: LLM) -> KVGeometry:
        stats, view = llm.kv_stats(), llm.view()
        return cls(
            stats.block_size, stats.bytes_per_block, view.tiers, view.limits.num_layers, view.limits.max_model_len
        )


@dataclass(frozen=True, slots=True)
class Requests:
    running: int
    waiting: int
    swapped: int


@dataclass(frozen=True, slots=True)
class Prefill:
    """Progress of the prompts that are being computed. `layer` counts the layers that have begun: of this step, or of a
    layer-by-layer prefill; 0 if neither is under way."""

    tokens: int
    tokens_done: float
    layer: int
    layer_by_layer: bool


@dataclass(frozen=True, slots=True)
class Totals:
    """Since the engine was created. A client divides differences by the time between two snapshots."""

    h2d_bytes: int
    d2h_bytes: int
    cpu_attention_bytes: int  # host blocks that the CPU attended to in place
    prompt_tokens: int  # computed
    cached_tokens: int  # prompt tokens found in the prefix cache instead
    output_tokens: int


@dataclass(frozen=True, slots=True)
class KVSnapshot:
    """`states` has one `KVBlockState` byte for each physical block. `time`: seconds on the monotonic clock."""

    time: float
    states: bytes
    requests: Requests
    prefill: Prefill
    totals: Totals

    @classmethod
    def take(cls, llm: LLM, step_share: float | None = None) -> KVSnapshot:
        """To be called by the thread that steps the engine, between steps or from `LLM.watch_steps`.

        step_share: the share of the layers that are done, within a step; None between steps.
        """
        view = llm.view()
        metrics, moved, prefill = view.metrics(), view.kv_stats().transfers, view.prefill(step_share)
        return cls(
            time=time.monotonic(),
            states=view.block_states(step_share),
            requests=Requests(metrics.running_requests, metrics.waiting_requests, metrics.swapped_requests),
            prefill=Prefill(prefill.tokens, prefill.tokens_done, prefill.layer, prefill.layer_by_layer),
            totals=Totals(
                moved.h2d_bytes,
                moved.d2h_bytes,
                moved.cpu_attention_bytes,
                metrics.prompt_tokens_computed + prefill.uncounted,
                metrics.prefix_cache_hit_tokens,
                metrics.tokens_generated,
            ),
        )

    def is_like(self, other: KVSnapshot) -> bool:
        """Whether nothing but the time differs."""
        return all(getattr(self, name) == getattr(other, name) for name in ("totals", "requests", "prefill", "states"))

    def message(self, before: KVSnapshot | None) -> dict[str, Any]:
        """As JSON data: the numbers, and the states as runs `[first cell, number of cells, state]`.

        Runs cover the cells that have changed since `before`; all cells if there is no `before`.
        """
        return {
            "time": self.time,
            "runs": changed_runs(self.states, before.states if before is not None else None),
            "requests": asdict(self.requests),
            "prefill": asdict(self.prefill),
            "totals": asdict(self.totals),
        }


def changed_runs(states: bytes, before: bytes | None) -> list[list[int]]:
    """Runs `[first, count, state]` of equal states, among the cells whose state differs from `before`."""
    cells = np.frombuffer(states, np.uint8).astype(np.int16)
    if before is not None:
        cells[cells == np.frombuffer(before, np.uint8)] = -1
    first = np.flatnonzero(np.diff(cells, prepend=-2))
    runs = np.stack([first, np.diff(first, append=len(cells)), cells[first]], axis=1)
    found: list[list[int]] = runs[runs[:, 2] >= 0].tolist()
    return found
