"""Which layers keep their weights on the device, and which have them in host memory, from where they stream. No torch.

Of a streamed layer the matrices are in host memory, and of one with experts those of the experts alone. Norms, routers,
embedding and output projection stay on the device. A layer is computed in a *weight slot* of the device, into which its
matrices are copied before. Slots take turns: while a layer is computed in one, the matrices of the next streamed layer
are copied into the other.

A step of few rows chooses few experts. They alone are copied, into an *expert cache* on the device, which keeps those
that were used most, of all streamed layers together.

What of the streamed layers is more than the host may take lies in a file. Its *units*, layers without experts and
single experts, are read into *host places*: layers into a few, one after the other, and experts into the host's cache.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from nanovllm.config import EngineConfig
from nanovllm.data.network import ExpertSpec, WeightSizes
from nanovllm.errors import ConfigError
from nanovllm.memory.shares import KVWish

logger = logging.getLogger(__name__)

MOST_SLOTS = 2
MOST_HOST_ROWS = 64  # of a pass with products on the host: for more rows they would take longer than the link
KV_SHARE = 8  # 1 / KV_SHARE of the memory is left for KV blocks where nothing says how much they get,
MIXTURE_KV_SHARE = 2  # and beside experts up to 1 / MIXTURE_KV_SHARE of the device, if the longest sequence takes it
CACHE_SHARE = 4  # 1 / CACHE_SHARE of the streamed experts fit into the cache, before further layers stay on the device
LEAST_ROWS = 2  # of a step, whose experts fit into the cache at least
BLOCK = 4096  # bytes of a disk, in multiples of which files are read
HOST_PLACES = 2  # for layers without experts that are read from disk: one is used while the next is read


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """Where the weights of a network lie, or of a rank's part."""

    sizes: WeightSizes
    streamed: tuple[int, ...] = ()  # layers, ascending, whose matrices or experts are in host memory
    cached_experts: int = 0  # places of the expert cache
    host_products: bool = False  # a pass of at most MOST_HOST_ROWS rows may multiply on the host
    in_place: bool = False  # and always does: device and host are one memory
    converts: bool = False  # slots hold the host's form, which is converted into memory of another layer
    on_disk: tuple[int, ...] = ()  # streamed layers, ascending, whose units lie in a file
    host_experts: int = 0  # host places for experts that lie in a file

    @property
    def num_slots(self) -> int:
        """One fewer than the streamed layers, at most MOST_SLOTS: with as many slots as layers nothing would stream."""
        return min(MOST_SLOTS, len(self.streamed) - 1) if self.streamed else 0

    @property
    def slot_bytes(self) -> int:
        """Bytes of the largest streamed layer, without what aligns its tensors."""
        return max(map(self.sizes.streamed_bytes, self.streamed), default=0)

    @property
    def expert_bytes(self) -> int:
        """Bytes of a place of the expert cache: of the largest expert that streams."""
        most = max((self.sizes.stored_expert_bytes[layer] for layer in self.streamed), default=0)
        return -(-most // max(1, self.sizes.num_experts))

    @property
    def streamed_bytes(self) -> int:
        """Bytes that are not on the device for good."""
        return sum(map(self.sizes.streamed_bytes, self.streamed))

    @property
    def disk_bytes(self) -> int:
        """Bytes in the file."""
        return sum(map(self.sizes.streamed_bytes, self.on_disk))

    @property
    def file_bytes(self) -> int:
        """Bytes of the file, whose units take whole blocks."""
        return self.disk_bytes + BLOCK * (len(self._whole_on_disk) + self.disk_experts)

    @property
    def host_places(self) -> int:
        """For layers without experts that lie in the file."""
        return min(HOST_PLACES, len(self._whole_on_disk))

    @property
    def host_place_bytes(self) -> int:
        """Bytes of the largest layer without experts in the file, without what aligns its tensors."""
        return max(map(self.sizes.streamed_bytes, self._whole_on_disk), default=0)

    @property
    def host_bytes(self) -> int:
        """Bytes in host memory, places included."""
        places = self.host_places * self.host_place_bytes + self.host_experts * self.expert_bytes
        return self.streamed_bytes - self.disk_bytes + places

    @property
    def device_bytes(self) -> int:
        """Bytes on the device, slots and expert cache included."""
        on_device = self.sizes.num_bytes - self.streamed_bytes
        num_layers = self.num_slots + (self.converts and self.num_slots > 0)
        return on_device + num_layers * self.slot_bytes + self.cached_experts * self.expert_bytes

    @property
    def num_streamed_experts(self) -> int:
        """Of all layers that stream."""
        return self.sizes.num_experts * sum(self.sizes.stored_expert_bytes[layer] > 0 for layer in self.streamed)

    def multiplies(self, rows: int) -> bool:
        """Whether a pass of so many rows may multiply on the host."""
        return self.host_products and rows <= MOST_HOST_ROWS

    def chooses(self, rows: int, experts: ExpertSpec) -> bool:
        """Whether only the experts that so many rows choose are read: at most half of all. Copied, they fit the cache.

        Where host and device are one memory they are read as long as the host multiplies.
        """
        if self.host_products:
            return self.multiplies(rows) and (self.in_place or 2 * experts.share_read(rows) <= 1)
        return rows * experts.num_experts_per_tok <= self.cached_experts and 2 * experts.share_read(rows) <= 1

    def chosen_bytes(self, rows: int, experts: ExpertSpec | None) -> int:
        """Of the experts that a pass of so many rows chooses, those that are not on the device; 0 if all are copied.

        As many as are expected if rows choose evenly and alone: of those that are chosen the cache has the share of
        all that it has places for. Where some experts are chosen more often than others it has more.
        """
        if experts is None or not self.num_streamed_experts or not self.chooses(rows, experts):
            return 0
        places = 0 if self.in_place and self.multiplies(rows) else self.cached_experts
        cached = min(1.0, places / self.num_streamed_experts)
        return round((1.0 - cached) * experts.share_read(rows) * self._streamed_expert_bytes)

    def multiplied_bytes(self, rows: int, experts: ExpertSpec | None) -> int:
        """With what a pass of so many rows multiplies on the host: chosen experts, and layers without experts where
        the link has no part in them, or of a network without experts all that may be divided between host and link."""
        if not self.multiplies(rows):
            return 0
        whole = self.streamed_bytes - self._streamed_expert_bytes if self.in_place or experts is None else 0
        return whole + self.chosen_bytes(rows, experts)

    def loaded_bytes(self, rows: int, experts: ExpertSpec | None) -> int:
        """What a pass of so many rows copies to the device: whole layers, or of those with experts the chosen ones.

        Of layers that may be divided between host and link all.
        """
        if self.in_place and self.multiplies(rows):
            return 0
        if experts is None or not self.chooses(rows, experts):
            return self.streamed_bytes
        whole = self.streamed_bytes - self._streamed_expert_bytes
        return whole if self.multiplies(rows) else whole + self.chosen_bytes(rows, experts)

    def read_bytes(self, rows: int, experts: ExpertSpec | None) -> int:
        """What a pass of so many rows reads from disk: layers without experts, and experts that the host lacks.

        Of what it copies of experts, the share that has no place on the host, as if all were used alike.
        """
        whole = sum(map(self.sizes.streamed_bytes, self._whole_on_disk))
        if experts is not None and self.chooses(rows, experts):
            return whole + self.chosen_read_bytes(rows, experts)
        return whole + self._share_read(self._streamed_expert_bytes)

    def chosen_read_bytes(self, rows: int, experts: ExpertSpec | None) -> int:
        """What a pass of so many rows reads from disk of chosen experts, after their routers."""
        return self._share_read(self.chosen_bytes(rows, experts))

    def _share_read(self, num_bytes: int) -> int:
        """Of bytes of experts, those that are read from disk."""
        return round(num_bytes * (1.0 - self.host_experts / self.disk_experts)) if self.disk_experts else 0

    @property
    def disk_experts(self) -> int:
        """Of all layers in the file."""
        return self.sizes.num_experts * (len(self.on_disk) - len(self._whole_on_disk))

    @property
    def _whole_on_disk(self) -> tuple[int, ...]:
        return tuple(layer for layer in self.on_disk if not self.sizes.stored_expert_bytes[layer])

    @property
    def _streamed_expert_bytes(self) -> int:
        return sum(self.sizes.stored_expert_bytes[layer] for layer in self.streamed)


def plan_weights(
    sizes: WeightSizes,
    budget: int,
    host_budget: int = sys.maxsize,
    *,
    host_products: bool = False,
    in_place: bool = False,
    converts: bool = False,
) -> WeightPlan:
    """The plan with the fewest streamed layers that takes at most `budget` bytes of the device.

    Streamed layers are spread evenly among the others, so that each is copied while others are computed. If no plan is
    so small, all of them stream, and the expert cache is as large as the budget allows, or as small as it can be. Where
    that is more than `host_budget` bytes of the host, fewer layers stream beside a smaller cache, if the device has
    room for them.
    """
    num_layers = len(sizes.stored_bytes)
    none = WeightPlan(sizes, host_products=host_products, in_place=in_place, converts=converts)
    if sizes.num_bytes <= budget or num_layers == 1:
        return none
    # Even numbers: else the last layer and the first one of the next pass would have the same slot.
    counts = [*range(2 * MOST_SLOTS, num_layers, MOST_SLOTS), num_layers]
    plans = [replace(none, streamed=spread(count, num_layers)) for count in counts]
    all_of_them = _with_cache(plans[-1], budget - plans[-1].device_bytes)
    plan = next((plan for plan in map(_with_cache, plans) if plan.device_bytes <= budget), all_of_them)
    if plan.streamed_bytes <= host_budget:
        return plan
    smaller = [_with_cache(plan, budget - plan.device_bytes) for plan in plans]
    fitting = [plan for plan in smaller if plan.device_bytes <= budget]
    return next((plan for plan in reversed(fitting) if plan.streamed_bytes <= host_budget), [*fitting, plan][0])


def with_disk(plan: WeightPlan, host_budget: int) -> WeightPlan:
    """The plan that takes at most `host_budget` bytes of the host, with the rest in a file; the least if none does.

    Layers without experts come first, which every pass reads whole. They are used in turn, so that a cache of those
    used last would never hit: as many as fit stay on the host for good, spread evenly among those that are read. The
    others pass through `HOST_PLACES` places. Of experts, whose use differs, the host has a cache.
    """
    if plan.streamed_bytes <= host_budget:
        return plan
    with_experts = tuple(layer for layer in plan.streamed if plan.sizes.stored_expert_bytes[layer])
    whole = tuple(layer for layer in plan.streamed if layer not in with_experts)
    least = min(plan.num_streamed_experts, LEAST_ROWS * plan.sizes.experts_per_token)
    counts = [0, *range(HOST_PLACES + 1, len(whole)), len(whole)]
    for count in counts:  # that many layers without experts are in the file
        on_disk = tuple(whole[index] for index in spread(count, len(whole))) if count else ()
        plan = replace(plan, on_disk=tuple(sorted((*on_disk, *with_experts))), host_experts=least)
        if plan.host_bytes <= host_budget:
            break
    if not plan.expert_bytes:
        return plan
    places = least + max(0, host_budget - plan.host_bytes) // plan.expert_bytes
    return replace(plan, host_experts=min(places, plan.num_streamed_experts))


def _with_cache(plan: WeightPlan, budget: int | None = None) -> WeightPlan:
    """The plan with a cache of a share of its streamed experts, or of at most `budget` bytes."""
    if not plan.expert_bytes:
        return plan
    places = plan.num_streamed_experts // CACHE_SHARE
    if budget is not None:
        places = min(places, budget // plan.expert_bytes)
    return replace(plan, cached_experts=max(places, LEAST_ROWS * plan.sizes.experts_per_token))


def spread(count: int, num_layers: int) -> tuple[int, ...]:
    """`count` of the layers, at distances that differ by at most one."""
    before = [layer * count // num_layers for layer in range(num_layers + 1)]
    return tuple(layer for layer in range(num_layers) if before[layer + 1] > before[layer])


def weight_plan(
    config: EngineConfig,
    sizes: WeightSizes,
    device_total: int,
    device_free: int,
    host_free: int,
    tiers_share_memory: bool,
    step_bytes: Callable[[], int],
    kv: KVWish,
    other_form: bool = False,
) -> WeightPlan:
    """The plan that the arguments ask for. It may take more of the host than there is.

    sizes: of this rank. device_total, device_free, host_free: its bytes, before the weights are loaded;
    tiers_share_memory: on the CPU, where nothing streams unless it is asked for. step_bytes: of the largest step. kv:
    what the KV cache can use of the device. other_form: whether matrices have another form for kernels of the device
    than for those of the CPU. Raises ConfigError for fewer bytes than streaming layers take.
    """
    host_budget = _host_budget(config, host_free)
    products = config.host_products
    plan = partial(
        plan_weights,
        sizes,
        host_budget=host_budget,
        host_products=products,
        in_place=products and tiers_share_memory,
        converts=products and other_form,
    )
    if config.weights_memory_bytes is not None:
        return _within_host(config, _asked_plan(config, sizes, plan), host_budget)
    if not config.enable_cpu_offload or tiers_share_memory:
        return WeightPlan(sizes)
    usable = int(device_total * config.gpu_memory_utilization) - (device_total - device_free)
    for_kv = usable // KV_SHARE if kv.asked is None else kv.asked
    if kv.asked is None and sizes.num_experts:  # a token reads all of its KV, and few of the experts
        for_kv = max(for_kv, min(kv.longest, usable // MIXTURE_KV_SHARE))
    if sizes.num_bytes + for_kv <= usable and sizes.num_bytes + for_kv + step_bytes() <= usable:
        return WeightPlan(sizes)
    return _within_host(config, plan(usable - for_kv - step_bytes()), host_budget)


def _host_budget(config: EngineConfig, host_free: int) -> int:
    """Bytes of the host that weights may take; of a share, which follows from what streams, all of them."""
    named = config.num_bytes("host_weights_bytes")
    if named is not None:
        return named
    for_kv = 0
    if config.enable_cpu_offload:
        asked = config.num_bytes("kv_offloading_size")
        for_kv = host_free // KV_SHARE if asked is None else asked // config.tensor_parallel_size
    return host_free - for_kv


def _within_host(config: EngineConfig, plan: WeightPlan, host_budget: int) -> WeightPlan:
    """The plan with a file for what is beyond `host_weights_bytes`, or beyond the budget if there is a `weights_dir`.

    A share gets what places on the host take at least, if that is more.
    """
    asked = config.host_weights_bytes
    part = config.host_weights_share
    budget = host_budget if part is None else int(part * plan.streamed_bytes)
    if plan.streamed_bytes <= budget or (asked is None and config.weights_dir is None):
        return plan
    if config.weights_dir is None:
        raise ConfigError(
            f"host_weights_bytes={asked}: the weights that stream take {plan.streamed_bytes:,} bytes; raise it, or let "
            "the rest of them be on a local disk, in the directory weights_dir"
        )
    plan = with_disk(plan, budget)
    if plan.host_bytes <= budget or asked is None:
        return plan
    says = f"places for weights that are read from disk take {plan.host_bytes:,} bytes"
    if part is None:
        raise ConfigError(f"host_weights_bytes={asked}: {says}; raise it to at least {plan.host_bytes}")
    logger.warning("host_weights_bytes=%s: %s, more than the share", asked, says)
    return plan


def _asked_plan(config: EngineConfig, sizes: WeightSizes, plan_of: Callable[[int], WeightPlan]) -> WeightPlan:
    """The plan for `weights_memory_bytes`, by `plan_of` so many bytes.

    A share gets what streaming layers take, if that is more.
    """
    part = config.weights_share
    asked = config.num_bytes("weights_memory_bytes") if part is None else int(part * sizes.num_bytes)
    assert asked is not None
    plan = plan_of(asked)
    if plan.device_bytes <= asked:
        return plan
    says = f"{_least_parts(plan)} {plan.device_bytes:,} bytes"
    if part is None:
        raise ConfigError(
            f"weights_memory_bytes={config.weights_memory_bytes}: {says}; raise it to at least {plan.device_bytes}"
        )
    logger.warning("weights_memory_bytes=%s: %s, more than the share", config.weights_memory_bytes, says)
    return plan


def _least_parts(plan: WeightPlan) -> str:
    """What takes the memory of a plan that cannot take less, as the beginning of a sentence."""
    if not plan.streamed:
        return "a model of one layer does not stream, and its weights take"
    if plan.cached_experts:
        return "all but the experts, the slots of streamed layers and the least cache of experts take"
    return "embedding, norms and the slots of streamed layers take"
