"""The inputs of the KV cache's sizes, and what to say of a sequence that it does not hold."""

from __future__ import annotations

from dataclasses import dataclass

from nanovllm.config import EngineConfig
from nanovllm.data.memory_checks import gib
from nanovllm.memory.layout import KVLayout
from nanovllm.memory.sizing import KVPlan, MemoryFacts, larger_cache, longer_positions, longest_sequence, plan_kv_cache
from nanovllm.memory.weights import WeightPlan


@dataclass(frozen=True, slots=True)
class KVSizing:
    """What decides how large the KV cache of an engine is."""

    config: EngineConfig
    layout: KVLayout
    model_max_len: int  # tokens: where the model's positions end
    memory: MemoryFacts
    watermark: float  # the share of the blocks that stays free
    yarn_positions: int | None = None  # the trained length, if YaRN can extend it; see `Network.yarn_positions`
    weights: WeightPlan | None = None  # where they lie; None: all of them stay on the device

    def plan(self) -> KVPlan:
        """Size the KV cache. Raises ConfigError, with numbers and what to change, if that is impossible."""
        return plan_kv_cache(
            self.config, self.layout, self.model_max_len, self.memory, self.watermark, self.yarn_positions
        )

    def longest_limit(self, plan: KVPlan) -> str:
        """The name of the limit that ends the longest prompt of `plan`."""
        if plan.max_model_len == longest_sequence(self.config, self.layout, plan.num_sequence_blocks, self.watermark):
            return "KV memory"
        return "positions" if plan.max_model_len == self.model_max_len else "max_model_len"

    def kv_bytes(self, tokens: int) -> int:
        """The most K and V that a sequence of `tokens` tokens keeps at once."""
        return self.layout.held_bytes(tokens, self.config.chunk)

    def advice(self, tokens: int) -> str:
        """What to do about a sequence of more tokens than the plan holds, as the end of an error message."""
        plan = self.plan()
        fits = f"as things are, prompts of up to {plan.max_model_len} tokens fit"
        if tokens > self.model_max_len:
            longer = longer_positions(tokens, self.yarn_positions)
            return f"the model's positions end at {self.model_max_len}, so shorten the prompt{longer}; {fits}"
        if self.longest_limit(plan) == "max_model_len":
            return f"shorten the prompt, or raise max_model_len; {fits}"
        return (
            f"its KV cache takes {gib(self.kv_bytes(tokens))}, and the engine has {plan.split.resident_blocks} blocks "
            f"of {self.layout.block_size} tokens on the device and {plan.num_cpu_blocks} on the host; shorten the "
            f"prompt, {larger_cache(self.config)}; {fits}"
        )
