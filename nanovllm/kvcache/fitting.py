"""Suggests engine arguments that make a longer sequence fit the KV cache, found by planning with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nanovllm.config import EngineConfig
from nanovllm.errors import Advice, ConfigError
from nanovllm.kvcache.block_size import block_size_of
from nanovllm.kvcache.budget import split_device
from nanovllm.kvcache.layout import KVLayout
from nanovllm.kvcache.sizing import (
    LAYERWISE_SHARE,
    CacheTooSmallError,
    KVPlan,
    MemoryFacts,
    NoMemoryError,
    PositionsError,
    device_size,
    host_size,
    longest_sequence,
    plan_kv_cache,
    uses_utilization,
)
from nanovllm.memory_checks import gib

MOST_YARN = 4  # times the trained length; what Qwen's model cards recommend


@dataclass(frozen=True, slots=True)
class KVSizing:
    """The inputs of the KV cache's sizes. `watermark`: the share of the blocks that stays free.

    yarn_positions: the trained length in tokens, if YaRN can extend it; see `DecoderSpec.yarn_positions`.
    """

    config: EngineConfig
    layout: KVLayout
    model_max_len: int
    memory: MemoryFacts
    watermark: float
    yarn_positions: int | None = None

    def plan(self) -> KVPlan:
        """Size the KV cache. Raises ConfigError, with numbers and what to change, if that is impossible."""
        try:
            return self._plan()
        except CacheTooSmallError as error:
            wanted, held = self.config.max_model_len, error.plan.max_model_len
            ways = [{"max_model_len": held}] if wanted and held else []
            ways += self.changes_for(wanted or 1)
            raise ConfigError(f"{error}; {' or '.join(map(spelled, ways)) or 'more memory'} would do", ways) from None
        except NoMemoryError as error:
            raise ConfigError(str(error), list(self._larger_shares(1))) from None
        except PositionsError as error:
            held = self._changed({"max_model_len": None}).plan().max_model_len
            longer = self._longer_positions(self.config.max_model_len or 1)
            says = f"{error}; lower max_model_len to that, or {_extended(longer)}"
            fits = f"as things are, prompts of up to {held} tokens fit"
            raise ConfigError(f"{says}; {fits}", [{"max_model_len": held}, *longer]) from None

    def longest_limit(self, plan: KVPlan) -> str:
        """The name of the limit that ends the longest prompt of `plan`."""
        if plan.max_model_len == longest_sequence(plan.num_sequence_blocks, self.layout.block_size, self.watermark):
            return "KV memory"
        return "positions" if plan.max_model_len == self.model_max_len else "max_model_len"

    def changes_for(self, tokens: int) -> list[dict[str, Any]]:
        """Sets of engine arguments that each make a sequence of `tokens` tokens fit, the smallest change first.

        Block counts and memory shares are the smallest that suffice. Empty if the model's positions, also with YaRN, or
        the memory do not allow such a sequence.
        """
        if tokens > self.model_max_len:
            return self._longer_positions(tokens)
        limit = self.config.max_model_len
        lifted: dict[str, Any] = {} if limit is None or limit >= tokens else {"max_model_len": tokens}
        if lifted and self._holds(tokens, lifted):
            return [lifted]
        found = (lifted | change for change in self._changed(lifted)._larger_caches(tokens))
        return [change for change in found if self._holds(tokens, change)]

    def advice(self, tokens: int) -> Advice:
        """What to do about a sequence of too many tokens, with the plan's numbers, as part of an error message."""
        plan, memory = self._plan(), self.memory
        fits = f"as things are, prompts of up to {plan.max_model_len} tokens fit"
        if tokens > self.model_max_len:
            longer, end = self._longer_positions(tokens), self.model_max_len
            says = f"the model's positions end at {end}, so shorten the prompt, or {_extended(longer)}"
            return Advice(f"{says}; {fits}", longer)
        held = (
            f"its KV cache takes {gib(tokens * self.layout.token_bytes)}, and the engine has "
            f"{plan.split.resident_blocks} blocks of {self.layout.block_size} tokens on the device and "
            f"{plan.num_cpu_blocks} on the host"
        )
        changes = self.changes_for(tokens)
        if not changes:
            free = memory.device_free + (0 if memory.tiers_share_memory else memory.host_free)
            return Advice(
                f"{held}; no setting fits it into the {gib(free)} that are free, so shorten the prompt; {fits}"
            )
        return Advice(f"{held}; {' or '.join(map(spelled, changes))} would make it fit; {fits}", changes)

    # ---- helpers

    def _plan(self) -> KVPlan:
        return plan_kv_cache(self.config, self.layout, self.model_max_len, self.memory, self.watermark)

    def _counts(self) -> KVPlan:
        """The plan, even if it holds no sequence of the requested length."""
        try:
            return self._plan()
        except CacheTooSmallError as error:
            return error.plan

    def _changed(self, arguments: Mapping[str, Any]) -> KVSizing:
        config = replace(self.config, **arguments)
        block_size = block_size_of(config, self.layout.token_layer_bytes, self.model_max_len)
        return replace(self, config=config, layout=replace(self.layout, block_size=block_size))

    def _holds(self, tokens: int, change: Mapping[str, Any]) -> bool:
        try:
            return self._changed(change)._plan().max_model_len >= tokens
        except ConfigError:
            return False

    def _blocks_for(self, tokens: int) -> int:
        """The fewest blocks that a sequence of `tokens` tokens fits."""
        block_size = self.layout.block_size
        blocks = -(-tokens // block_size)
        while longest_sequence(blocks, block_size, self.watermark) < tokens:
            blocks += 1
        return blocks

    def _longer_positions(self, tokens: int) -> list[dict[str, Any]]:
        """YaRN for positions up to `tokens`, and what else such a sequence needs."""
        if self.yarn_positions is None or tokens > MOST_YARN * self.yarn_positions:
            return []
        factor = -(-tokens // self.yarn_positions)
        rope = {
            "rope_type": "yarn",
            "factor": float(factor),
            "original_max_position_embeddings": self.yarn_positions,
        }
        others = {name: value for name, value in self.config.hf_overrides.items() if name != "rope_scaling"}
        change: dict[str, Any] = {"hf_overrides": {**others, "rope_parameters": rope}}
        longer = replace(self, model_max_len=factor * self.yarn_positions)
        if longer._holds(tokens, {}):
            return [change]
        return [change | more for more in longer.changes_for(tokens)]

    def _larger_caches(self, tokens: int) -> Iterator[dict[str, Any]]:
        """Changes that could make the cache large enough. Does not check whether the memory allows them.

        Raises a given block count, or the memory share of a tier that is sized from memory.
        """
        config, counts = self.config, self._counts()
        lacking = self._blocks_for(tokens) - counts.num_sequence_blocks
        if not config.enable_cpu_offload:
            yield self._offload(tokens)
        elif config.num_cpu_blocks != -1 or config.kv_offloading_size is not None:
            yield host_size(config, self.layout, counts.num_cpu_blocks + lacking)
        if config.num_gpu_blocks != -1:
            yield {"num_gpu_blocks": counts.num_gpu_blocks + lacking}
        elif config.kv_cache_memory_bytes is not None:
            yield self._larger_device(tokens, counts.num_gpu_blocks + lacking)
        if uses_utilization(config):
            yield from self._larger_shares(tokens)

    def _larger_device(self, tokens: int, blocks: int) -> dict[str, int]:
        """Bytes for so many blocks on the device, and for a layer buffer if that leaves too little."""
        exact = device_size(self.config, self.layout, blocks)
        if self._holds(tokens, exact):
            return exact
        return device_size(self.config, self.layout, -(-blocks * LAYERWISE_SHARE // (LAYERWISE_SHARE - 1)))

    def _larger_shares(self, tokens: int) -> Iterator[dict[str, Any]]:
        """The smallest share of the memory that suffices, if any does."""
        for percent in range(int(self.config.gpu_memory_utilization * 100) + 1, 101):
            share = {"gpu_memory_utilization": percent / 100}
            if self._holds(tokens, share):
                yield share
                return

    def _offload(self, tokens: int) -> dict[str, Any]:
        """Switch offload on. With a given number of device blocks, keep their size and give the host blocks too.

        Otherwise use the default block size of offload, unless the device is too small for it.
        """
        config, switch = self.config, {"enable_cpu_offload": True}
        if config.num_gpu_blocks == -1:
            return switch if self._holds(tokens, switch) else switch | {"kvcache_block_size": self.layout.block_size}
        resident = split_device(config.num_gpu_blocks, self.layout.num_layers).resident_blocks
        counted = switch | {"num_cpu_blocks": self._blocks_for(tokens) - resident}
        return counted if config.kvcache_block_size else counted | {"kvcache_block_size": self.layout.block_size}


def _extended(longer: Sequence[Mapping[str, Any]]) -> str:
    if not longer:
        return "give the model a RoPE scaling that reaches further"
    return f"extend them at some cost of accuracy: {spelled(longer[0])}"


def spelled(change: Mapping[str, Any]) -> str:
    """The change as it is written in a call."""
    first, *others = (f"{name}={value!r}" for name, value in change.items())
    return f"{first} with {', '.join(others)}" if others else first
