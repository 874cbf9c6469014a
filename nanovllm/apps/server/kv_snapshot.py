"""A snapshot of the KV cache: the state of every block, and the numbers that go with it. Plain data, without torch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from nanovllm.engine.block_manager import BlockState
from nanovllm.engine.request import Sequence as TokenSequence
from nanovllm.engine.scheduling_budget import SchedulerLimits

if TYPE_CHECKING:  # torch comes with it
    from nanovllm.llm import LLM


class CellState(IntEnum):
    """What a cell of the picture shows: one physical block."""

    FREE = BlockState.FREE
    CACHED = BlockState.CACHED
    USED = BlockState.USED
    FILLING = 3  # a running request has it, and some of its tokens are still to be computed
    IN_FLIGHT = 4  # on the host, and a copy to or from a ring slot or the layer buffer is under way


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """What stays the same while an engine lives. Cells are numbered across the tiers, in their order."""

    block_size: int  # tokens
    block_bytes: int  # all layers
    tiers: dict[str, int]  # blocks of each
    num_layers: int
    max_model_len: int
    states: tuple[str, ...] = tuple(state.name.lower() for state in CellState)

    @classmethod
    def of(cls, llm: LLM) -> KVGeometry:
        stats, tiers = llm.kv_stats(), llm.engine.scheduler.block_manager.tiers
        sizes = {"device": tiers.num_device_blocks, "host": tiers.num_host_blocks, "swap": tiers.num_swap_blocks}
        return cls(stats.block_size, stats.bytes_per_block, sizes, llm.engine.limits.num_layers, llm.max_model_len)


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
    """`states` has one `CellState` byte for each physical block. `time`: seconds on the monotonic clock."""

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
        metrics, stats = llm.metrics(), llm.kv_stats()
        prefill, unfinished_tokens = _prefill(llm, step_share)
        return cls(
            time=time.monotonic(),
            states=_cell_states(llm, step_share or 0.0, stats.blocks_in_flight),
            requests=Requests(metrics.running_requests, metrics.waiting_requests, metrics.swapped_requests),
            prefill=prefill,
            totals=Totals(
                stats.transfers.h2d_bytes,
                stats.transfers.d2h_bytes,
                stats.transfers.cpu_attention_bytes,
                metrics.prompt_tokens_computed + unfinished_tokens,
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


# ---- what the engine knows


def _cell_states(llm: LLM, step_share: float, blocks_in_flight: Sequence[int]) -> bytes:
    scheduler, limits = llm.engine.scheduler, llm.engine.limits
    manager = scheduler.block_manager
    tiers, block_size = manager.tiers, manager.block_size
    states = bytearray(manager.block_states())
    for seq in (seq for request in scheduler.running for seq in request.computing):
        for block_id in seq.block_table[seq.num_computed // block_size :]:
            states[tiers.physical_ids[block_id]] = CellState.FILLING
        tokens = _layer_chunk_positions(seq, step_share, limits)
        for block_id in seq.block_table[tokens.start // block_size : -(-tokens.stop // block_size)]:
            if tiers.physical_ids[block_id] >= tiers.num_device_blocks:
                states[tiers.physical_ids[block_id]] = CellState.IN_FLIGHT
    for physical_id in blocks_in_flight:
        states[physical_id] = CellState.IN_FLIGHT
    return bytes(states)


def _layer_chunk(seq: TokenSequence, step_share: float, limits: SchedulerLimits) -> int:
    """The layer chunk that a layer-by-layer prefill has reached. Within a step it is an estimate: other sequences may
    have a part of the step's tokens."""
    assert seq.layerwise is not None
    in_step = limits.max_num_batched_tokens * limits.num_layers // seq.layerwise.chunk
    return min(seq.layerwise_done + int(step_share * in_step), seq.layerwise.num_chunks * limits.num_layers - 1)


def _layer_chunk_positions(seq: TokenSequence, step_share: float, limits: SchedulerLimits) -> range:
    """The tokens of that layer chunk: their K/V are in the layer buffer, and are stored to the host."""
    return range(0) if seq.layerwise is None else seq.layerwise.positions(_layer_chunk(seq, step_share, limits))


def _prefill(llm: LLM, step_share: float | None) -> tuple[Prefill, int]:
    """The progress, and how many tokens of it `EngineMetrics.prompt_tokens_computed` does not count yet."""
    limits, progress, share = llm.engine.limits, llm.engine.progress(), step_share or 0.0
    prefills = [s for r in llm.engine.scheduler.running for s in r.computing if s.num_computed < s.prompt_len]
    left = progress.prompt_tokens - progress.prompt_tokens_done
    done = progress.prompt_tokens_done + share * min(left, limits.max_num_batched_tokens)
    layerwise = next((seq for seq in prefills if seq.layerwise is not None), None)
    if layerwise is not None and layerwise.layerwise is not None:
        layer = layerwise.layerwise.layer(_layer_chunk(layerwise, share, limits)) + 1
    else:
        layer = 0 if step_share is None else min(int(share * limits.num_layers), limits.num_layers - 1) + 1
    counted = sum(seq.num_computed for seq in prefills)
    return Prefill(progress.prompt_tokens, done, layer, layerwise is not None), int(done) - counted
