"""Suggests engine arguments that make a longer sequence fit the KV cache, found by planning with them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nanovllm.config import EngineConfig
from nanovllm.data.memory_checks import gib
from nanovllm.errors import Advice, ConfigError
from nanovllm.memory.budget import split_device
from nanovllm.memory.layout import KVLayout, block_size_of
from nanovllm.memory.sizing import (
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

GB = 10**9
MOST_HOST_GB = 1 << 16  # of no machine is more advised
LEAST_STEP = 256  # tokens; the weights would be read too often
MEMORY_TAKERS = ("max_num_batched_tokens", "enable_cpu_offload")  # arguments that decide what else takes memory
MOST_YARN = 4  # times the trained length; what Qwen's model cards recommend


@dataclass(frozen=True, slots=True)
class KVSizing:
    """The inputs of the KV cache's sizes. `watermark`: the share of the blocks that stays free.

    yarn_positions: the trained length in tokens, if YaRN can extend it; see `DecoderSpec.yarn_positions`.
    memory_of: the memory with other engine arguments, where that can be told. host_left: what is left for the KV blocks
    of a rank of so much host memory, where that is to be told.
    """

    config: EngineConfig
    layout: KVLayout
    model_max_len: int
    memory: MemoryFacts
    watermark: float
    yarn_positions: int | None = None
    memory_of: Callable[[EngineConfig], MemoryFacts] | None = None
    host_left: Callable[[int], int] | None = None

    def plan(self) -> KVPlan:
        """Size the KV cache. Raises ConfigError, with numbers and what to change, if that is impossible."""
        try:
            return self._plan()
        except CacheTooSmallError as error:
            wanted = self.config.max_model_len
            held = error.plan.max_model_len
            ways = [{"max_model_len": held}] if wanted and held else []
            ways += self.changes_for(wanted or 1)
            raise ConfigError(f"{error}; {' or '.join(map(spelled, ways)) or 'more memory'} would do", ways) from None
        except NoMemoryError as error:
            raise NoMemoryError(str(error), [*self._larger_shares(1), *self._smaller_steps(1)]) from None
        except PositionsError as error:
            held = self._changed({"max_model_len": None}).plan().max_model_len
            longer = self._longer_positions(self.config.max_model_len or 1)
            says = f"{error}; lower max_model_len to that{_extended(longer)}"
            fits = f"as things are, prompts of up to {held} tokens fit"
            raise ConfigError(f"{says}; {fits}", [{"max_model_len": held}, *longer]) from None

    def longest_limit(self, plan: KVPlan) -> str:
        """The name of the limit that ends the longest prompt of `plan`."""
        if plan.max_model_len == longest_sequence(self.config, self.layout, plan.num_sequence_blocks, self.watermark):
            return "KV memory"
        return "positions" if plan.max_model_len == self.model_max_len else "max_model_len"

    def changes_for(self, tokens: int) -> list[dict[str, Any]]:
        """Sets of engine arguments that each make a sequence of `tokens` tokens fit, the smallest change first.

        Block counts and memory shares are the smallest that suffice. In the order of what they cost: more memory, on
        one tier or on both; with it steps of fewer tokens; K and V in 8 bits, with more memory, and with shorter steps
        too. Empty if the model's positions, also with YaRN, or the memory do not allow such a sequence.
        """
        if tokens > self.model_max_len:
            return self._longer_positions(tokens)
        return self._more_tokens(tokens) or self._smaller_steps(tokens) or self._eight_bits(tokens)

    def blocks_for(self, tokens: int) -> int:
        """The fewest blocks that a sequence of `tokens` tokens fits."""
        blocks = needed = self.layout.groups.most_blocks(tokens, self.config.chunk)
        while blocks - int(self.watermark * blocks) < needed:
            blocks += 1
        return blocks

    def kv_bytes(self, tokens: int) -> int:
        """The most K and V that a sequence of `tokens` tokens keeps at once."""
        return self.layout.held_bytes(tokens, self.config.chunk)

    def host_memory_for(self, tokens: int) -> int | None:
        """The bytes of host memory, in whole GB, with which offload holds `tokens` tokens; None if none do."""
        if self.host_left is None:
            return None
        left = self.host_left
        offloaded = self._changed({"enable_cpu_offload": True, "max_model_len": None})
        offloaded = replace(offloaded, model_max_len=max(tokens, self.model_max_len))

        def holds(size: int) -> bool:
            return replace(offloaded, memory=replace(offloaded.memory, host_free=left(size * GB)))._holds(tokens, {})

        size = bisect_left(range(MOST_HOST_GB), True, key=holds)
        return size * GB if size < MOST_HOST_GB else None

    def _more_tokens(self, tokens: int) -> list[dict[str, Any]]:
        """Changes of lengths, blocks and memory shares."""
        limit = self.config.max_model_len
        lifted: dict[str, Any] = {} if limit is None or limit >= tokens else {"max_model_len": tokens}
        if lifted and self._holds(tokens, lifted):
            return [lifted]
        free = self._changed(lifted)
        found = (lifted | change for change in free._larger_caches(tokens))
        fitting = [change for change in found if self._holds(tokens, change)]
        return fitting or [lifted | change for change in free._both_tiers(tokens)]

    def _both_tiers(self, tokens: int) -> list[dict[str, Any]]:
        """As much on the host as it holds, and more on the device, where neither suffices alone."""
        config = self.config
        host_free = self.memory.host_free
        if self.memory.tiers_share_memory or not host_free:
            return []
        first = {} if config.enable_cpu_offload else self._offload(tokens)
        try:
            on = self._changed(first)
            if on.config.num_cpu_blocks != -1 or on.config.kv_offloading_size is not None:
                first |= host_size(on.config, on.layout, host_free // on.layout.block_bytes)
            with_host = self._changed(first)
            found = list(with_host._larger_caches(tokens)) if first else []  # else the host has all that there is
        except ConfigError:
            return []
        return [first | more for more in found if with_host._holds(tokens, more)]

    def _smaller_steps(self, tokens: int) -> list[dict[str, Any]]:
        """The largest step, halved and halved again, whose activations leave enough memory."""
        steps = [self.config.max_num_batched_tokens >> halvings for halvings in range(1, 7)]
        if self.memory_of is None:
            return []
        changes = ({"max_num_batched_tokens": step} for step in steps if step >= LEAST_STEP)
        return next((found[:1] for change in changes if (found := self._with(change, tokens))), [])

    def _eight_bits(self, tokens: int) -> list[dict[str, Any]]:
        """K and V in one byte each, if need be with shorter steps."""
        changes = [] if self.layout.scale_bytes else [{"kv_cache_dtype": dtype} for dtype in ("int8", "fp8")]
        found = [each for change in changes for each in self._with(change, tokens)[:1]]
        return found or [
            change | steps for change in changes for steps in self._changed(change)._smaller_steps(tokens)[:1]
        ]

    def _with(self, change: dict[str, Any], tokens: int) -> list[dict[str, Any]]:
        """`change`, alone or with the memory that a sequence of `tokens` tokens then needs."""
        if self._holds(tokens, change):
            return [change]
        try:
            return [change | more for more in self._changed(change)._more_tokens(tokens)]
        except ConfigError:
            return []

    def advice(self, tokens: int) -> Advice:
        """What to do about a sequence of too many tokens, with the plan's numbers, as part of an error message."""
        plan = self._plan()
        memory = self.memory
        fits = f"as things are, prompts of up to {plan.max_model_len} tokens fit"
        if tokens > self.model_max_len:
            longer = self._longer_positions(tokens)
            end = self.model_max_len
            says = f"the model's positions end at {end}, so shorten the prompt{_extended(longer)}"
            return Advice(f"{says}; {fits}", longer)
        held = (
            f"its KV cache takes {gib(self.kv_bytes(tokens))}, and the engine has "
            f"{plan.split.resident_blocks} blocks of {self.layout.block_size} tokens on the device and "
            f"{plan.num_cpu_blocks} on the host"
        )
        changes = self.changes_for(tokens)
        if changes == [{"max_model_len": tokens}]:  # the memory is there
            return Advice(f"shorten the prompt, or {spelled(changes[0])} would make it fit; {fits}", changes)
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
        old = self.layout
        memory = self.memory
        if config.kv_cache_dtype != self.config.kv_cache_dtype:
            old = old.stored_as(config.kv_cache_dtype)
        if self.memory_of is not None and any(name in arguments for name in MEMORY_TAKERS):
            memory = self.memory_of(config)
        block_size = block_size_of(config, old.token_layer_bytes, self.model_max_len)
        return replace(self, config=config, layout=old.with_block_size(block_size), memory=memory)

    def _holds(self, tokens: int, change: Mapping[str, Any]) -> bool:
        try:
            return self._changed(change)._plan().max_model_len >= tokens
        except ConfigError:
            return False

    def _longer_positions(self, tokens: int) -> list[dict[str, Any]]:
        """YaRN for positions up to `tokens`, and what else such a sequence needs."""
        found = extended_with_yarn(tokens, self.yarn_positions, self.config.hf_overrides)
        if found is None:
            return []
        change, reach = found
        longer = replace(self, model_max_len=reach)
        if longer._holds(tokens, {}):
            return [change]
        return [change | more for more in longer.changes_for(tokens)]

    def _larger_caches(self, tokens: int) -> Iterator[dict[str, Any]]:
        """Changes that could make the cache large enough. Does not check whether the memory allows them.

        Raises a given block count, or the memory share of a tier that is sized from memory.
        """
        config = self.config
        counts = self._counts()
        lacking = self.blocks_for(tokens) - counts.num_sequence_blocks
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
        config = self.config
        switch = {"enable_cpu_offload": True}
        if config.num_gpu_blocks == -1:
            return switch if self._holds(tokens, switch) else switch | {"kvcache_block_size": self.layout.block_size}
        resident = split_device(config.num_gpu_blocks, self.layout.planes).resident_blocks
        counted = switch | {"num_cpu_blocks": self.blocks_for(tokens) - resident}
        return counted if config.kvcache_block_size else counted | {"kvcache_block_size": self.layout.block_size}


def extended_with_yarn(
    tokens: int, trained: int | None, overrides: Mapping[str, Any]
) -> tuple[dict[str, Any], int] | None:
    """The argument that extends the positions to `tokens` with YaRN, and where they then end; None if it cannot.

    trained: `KVSizing.yarn_positions`; overrides: `hf_overrides`, which stay.
    """
    if trained is None or tokens > MOST_YARN * trained:
        return None
    factor = -(-tokens // trained)
    rope = {"rope_type": "yarn", "factor": float(factor), "original_max_position_embeddings": trained}
    others = {name: value for name, value in overrides.items() if name != "rope_scaling"}
    return {"hf_overrides": {**others, "rope_parameters": rope}}, factor * trained


def _extended(longer: Sequence[Mapping[str, Any]]) -> str:
    if not longer:
        return ": the model's authors document no RoPE scaling that reaches further"
    return f", or extend them at some cost of accuracy, of short prompts too: {spelled(longer[0])}"


def spelled(change: Mapping[str, Any]) -> str:
    """The change as it is written in a call."""
    first, *others = (f"{name}={value!r}" for name, value in change.items())
    return f"{first} with {', '.join(others)}" if others else first
