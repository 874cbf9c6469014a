"""Which layers keep their matrices on the device, and which have them in host memory, from where they stream. No torch.

A streamed layer is computed in a *weight slot* of the device, into which its matrices are copied before. Slots take
turns: while a layer is computed in one, the matrices of the next streamed layer are copied into the other. Norms,
routers, embedding and output projection stay on the device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from nanovllm.config import EngineConfig
from nanovllm.data.memory_checks import gib
from nanovllm.data.network import ExpertSpec, WeightSizes
from nanovllm.errors import ConfigError

logger = logging.getLogger(__name__)

MOST_SLOTS = 2
KV_SHARE = 8  # 1 / KV_SHARE of the device's memory is left for KV blocks where nothing says how much they get


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """Where the weights of a network lie, or of a rank's part."""

    sizes: WeightSizes
    streamed: tuple[int, ...] = ()  # layers, ascending, whose matrices are in host memory

    @property
    def num_slots(self) -> int:
        """Of two streamed layers one is loaded after the other is computed: a second slot would hold them for good."""
        return min(MOST_SLOTS, len(self.streamed) - 1) if self.streamed else 0

    @property
    def slot_bytes(self) -> int:
        return max((self.sizes.stored_bytes[layer] for layer in self.streamed), default=0)

    @property
    def host_bytes(self) -> int:
        return sum(self.sizes.stored_bytes[layer] for layer in self.streamed)

    def loaded_bytes(self, rows: int, experts: ExpertSpec | None) -> int:
        """What a pass of so many rows copies to the device: of experts, those that any row is expected to choose."""
        unread = 0.0 if experts is None else 1.0 - experts.share_read(rows)
        return self.host_bytes - round(unread * sum(self.sizes.stored_expert_bytes[layer] for layer in self.streamed))

    @property
    def device_bytes(self) -> int:
        return self.sizes.num_bytes - self.host_bytes + self.num_slots * self.slot_bytes


def plan_weights(sizes: WeightSizes, budget: int) -> WeightPlan:
    """The plan with the fewest streamed layers that takes at most `budget` bytes of the device.

    Streamed layers are spread evenly among the others, so that each is copied while others are computed. All of them
    stream if no plan is so small.
    """
    num_layers = len(sizes.stored_bytes)
    if sizes.num_bytes <= budget:
        return WeightPlan(sizes)
    for count in range(MOST_SLOTS + 1, num_layers):
        if count % MOST_SLOTS:  # else the last layer and the first one of the next pass would have the same slot
            continue
        plan = WeightPlan(sizes, spread(count, num_layers))
        if plan.device_bytes <= budget:
            return plan
    return WeightPlan(sizes, tuple(range(num_layers)) if num_layers > 1 else ())


def spread(count: int, num_layers: int) -> tuple[int, ...]:
    """`count` of the layers, at distances that differ by at most one."""
    return tuple(
        layer for layer in range(num_layers) if (layer + 1) * count // num_layers > layer * count // num_layers
    )


def weight_plan(
    config: EngineConfig,
    sizes: WeightSizes,
    device_total: int,
    device_free: int,
    tiers_share_memory: bool,
    step_bytes: Callable[[], int],
) -> WeightPlan:
    """The plan that the arguments ask for.

    sizes: of this rank. device_total, device_free: bytes, before the weights are loaded; tiers_share_memory: on the
    CPU, where nothing streams unless it is asked for. step_bytes: of the largest step. Raises ConfigError for fewer
    bytes than streaming layers take.
    """
    if config.weights_memory_bytes is not None:
        return _asked_plan(config, sizes)
    if not config.enable_cpu_offload or tiers_share_memory:
        return WeightPlan(sizes)
    usable = int(device_total * config.gpu_memory_utilization) - (device_total - device_free)
    for_kv = config.num_bytes("kv_cache_memory_bytes") or usable // KV_SHARE
    if sizes.num_bytes + for_kv <= usable and sizes.num_bytes + for_kv + step_bytes() <= usable:
        return WeightPlan(sizes)
    return plan_weights(sizes, usable - for_kv - step_bytes())


def _asked_plan(config: EngineConfig, sizes: WeightSizes) -> WeightPlan:
    """The plan for `weights_memory_bytes`. A share gets what streaming layers take, if that is more."""
    part = config.weights_share
    asked = config.num_bytes("weights_memory_bytes") if part is None else int(part * sizes.num_bytes)
    assert asked is not None
    plan = plan_weights(sizes, asked)
    if plan.device_bytes <= asked:
        return plan
    says = f"embedding, norms and slots for streamed layers take {gib(plan.device_bytes)}"
    if part is None:
        raise ConfigError(
            f"weights_memory_bytes={config.weights_memory_bytes}: {says}; raise it to at least {plan.device_bytes}"
        )
    logger.warning("weights_memory_bytes=%s: %s, more than the share", config.weights_memory_bytes, says)
    return plan
