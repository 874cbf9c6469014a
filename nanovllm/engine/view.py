"""What applications see of a running engine: its queues, blocks, progress and limits, as plain data. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nanovllm.data.kv_groups import HOLE
from nanovllm.engine.block_pool import KVBlockState
from nanovllm.engine.layerwise_scheduler import Part, part_of
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.prefix_cache import PrefixCacheStats
from nanovllm.engine.request import Request, Sequence

if TYPE_CHECKING:  # torch
    from nanovllm.kvcache.base import KVStats


@dataclass(frozen=True, slots=True)
class RequestView:
    """A request that has not ended."""

    request_id: str
    prompt_tokens: int
    prompt_tokens_computed: int  # or found in the prefix cache
    output_tokens: int  # of all its sequences
    blocks: tuple[int, ...]  # physical ids


@dataclass(frozen=True, slots=True)
class PrefillView:
    """The running prompts that are not yet computed."""

    tokens: int
    tokens_done: float
    layer: int  # layers that have begun: of the step, or of a layer-by-layer prefill; 0 if neither is under way
    layer_by_layer: bool
    uncounted: int  # of tokens_done, what `EngineMetrics.prompt_tokens_computed` does not count yet


class EngineView:
    """To be read by the thread that steps the engine, between steps or from `LLM.watch_steps` in a step.

    Physical ids number the blocks across the tiers, in the order of `tiers`. step_share, where a method takes it, is
    the share of the running step that is done; None between steps.
    """

    def __init__(self, engine: LLMEngine, kv_stats: Callable[[], KVStats]) -> None:
        self._scheduler = engine.scheduler
        self._manager = engine.scheduler.block_manager
        self.progress = engine.progress
        self.metrics = engine.metrics
        self.kv_stats = kv_stats
        self.prefix_cache: PrefixCacheStats = self._manager.stats  # totals since the engine was created
        self.limits = engine.limits  # such as max_model_len, max_num_seqs and num_layers
        tiers = self._manager.pool.tiers
        self.tiers = {"device": tiers.num_device_blocks, "host": tiers.num_host_blocks, "swap": tiers.num_swap_blocks}

    @property
    def waiting(self) -> list[RequestView]:
        return [self._request(request) for request in self._scheduler.waiting]

    @property
    def loading(self) -> list[RequestView]:
        """Requests whose blocks are being read from disk."""
        return [self._request(request) for request in self._scheduler.pending]

    @property
    def running(self) -> list[RequestView]:
        return [self._request(request) for request in self._scheduler.running]

    @property
    def swapped(self) -> list[RequestView]:
        """Preempted requests, whose blocks are in swap space."""
        return [self._request(request) for request in self._scheduler.swapped]

    def block_states(self, step_share: float | None = None) -> bytes:
        """A `KVBlockState` for each physical block."""
        states = bytearray(self._manager.pool.block_states())
        groups = self._manager.groups
        for seq in self._computing():
            for table, group in zip(seq.block_tables, groups, strict=True):
                for block in self._physical(table[seq.num_computed // group.block_size :]):
                    states[block] = KVBlockState.FILLING
            if (part := part_of(self._scheduler.hooks, seq)) is None:
                continue
            # The tokens whose K/V is in the layer buffer, and is stored to the host.
            layer_chunk = self._layer_chunk(part, step_share)
            index, _ = groups.of_layer[part.prefill.layer(layer_chunk)]
            chunk = part.prefill.positions(layer_chunk)
            size = groups[index].block_size
            for block in self._physical(seq.block_tables[index][chunk.start // size : -(-chunk.stop // size)]):
                if block >= self.tiers["device"]:
                    states[block] = KVBlockState.IN_FLIGHT
        for block in self.kv_stats().blocks_in_flight:
            states[block] = KVBlockState.IN_FLIGHT
        return bytes(states)

    def prefill(self, step_share: float | None = None) -> PrefillView:
        progress = self.progress(step_share or 0.0)
        num_layers = self.limits.num_layers
        tokens = progress.prompt_tokens
        done = progress.prompt_tokens_done
        unfilled = [seq for seq in self._computing() if seq.num_computed < seq.prompt_len]
        layer = 0 if step_share is None else min(int(step_share * num_layers), num_layers - 1) + 1
        parts = [part for seq in unfilled if (part := part_of(self._scheduler.hooks, seq)) is not None]
        layers = [part.prefill.layer(self._layer_chunk(part, step_share)) + 1 for part in parts]
        uncounted = int(done) - sum(seq.num_computed for seq in unfilled)
        return PrefillView(tokens, done, next(iter(layers), layer), bool(layers), uncounted)

    def _computing(self) -> list[Sequence]:
        return [seq for request in self._scheduler.running for seq in request.computing]

    def _physical(self, block_ids: Iterable[int]) -> list[int]:
        return [self._manager.pool.tiers.physical_ids[block_id] for block_id in block_ids if block_id != HOLE]

    def _request(self, request: Request) -> RequestView:
        computed = max((seq.num_computed for seq in request.live), default=0)
        blocks = dict.fromkeys(block for seq in request.live for block in self._physical(seq.blocks))
        output_tokens = sum(seq.num_output_tokens for seq in request.sequences)
        prompt_len = request.prompt_len
        return RequestView(request.request_id, prompt_len, min(computed, prompt_len), output_tokens, tuple(blocks))

    def _layer_chunk(self, part: Part, step_share: float | None) -> int:
        """The layer chunk that a layer-by-layer prefill has reached: an estimate, since others share the step."""
        in_step = self.limits.max_num_batched_tokens * self.limits.num_layers // part.prefill.chunk
        last = part.prefill.num_chunks * self.limits.num_layers - 1
        return min(part.done + int((step_share or 0.0) * in_step), last)
