"""Which layers stream: the plan for any sizes and budgets, and the one that an engine makes by itself."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanovllm.config import engine_config
from nanovllm.data.network import ExpertSpec, WeightSizes
from nanovllm.errors import ConfigError
from nanovllm.memory.shares import KVWish
from nanovllm.memory.weights import (
    CACHE_SHARE,
    HOST_PLACES,
    LEAST_ROWS,
    MOST_SLOTS,
    WeightPlan,
    plan_weights,
    spread,
    weight_plan,
    with_disk,
)

GIB = 2**30


def sizes(
    stored: list[int], others: int, experts: list[int] | None = None, spec: ExpertSpec | None = None
) -> WeightSizes:
    """others: bytes of what stays on the device; experts: what is in experts of the bytes of each layer."""
    return WeightSizes(
        num_weights=0,
        num_bytes=sum(stored) + others,
        layer_bytes=sum(stored),
        stored_bytes=tuple(stored),
        stored_expert_bytes=tuple(experts or [0] * len(stored)),
        layer_matrix_weights=0,
        expert_weights=0,
        expert_bytes=sum(experts or []),
        head_bytes=0,
        num_experts=spec.num_experts if spec else 0,
        experts_per_token=spec.num_experts_per_tok if spec else 0,
    )


ANY_SIZES = st.builds(sizes, st.lists(st.integers(1, 1000), min_size=1, max_size=40), st.integers(0, 3000))
ANY_BUDGET = st.integers(0, 50_000)


@given(ANY_SIZES, ANY_BUDGET)
def test_a_plan_is_within_the_budget_or_the_smallest(found: WeightSizes, budget: int) -> None:
    plan = plan_weights(found, budget)
    num_layers = len(found.stored_bytes)
    if plan.device_bytes > budget:
        assert len(plan.streamed) == (num_layers if num_layers > 1 else 0)
    else:
        assert plan.streamed == () or found.num_bytes > budget
    assert plan.device_bytes + plan.host_bytes == found.num_bytes + plan.num_slots * plan.slot_bytes
    assert all(found.stored_bytes[layer] <= plan.slot_bytes for layer in plan.streamed)
    assert plan.loaded_bytes(1, None) == plan.host_bytes


@given(ANY_SIZES, ANY_BUDGET)
def test_no_plan_with_fewer_streamed_layers_is_within_the_budget(found: WeightSizes, budget: int) -> None:
    """Of those where the last streamed layer and the first one have different slots."""
    plan = plan_weights(found, budget)
    num_layers = len(found.stored_bytes)
    if found.num_bytes <= budget:
        assert plan.streamed == ()
    for count in range(MOST_SLOTS + 1, len(plan.streamed)):
        fewer = WeightPlan(found, spread(count, num_layers))
        assert count % MOST_SLOTS or fewer.device_bytes > budget


@given(st.integers(1, 500), st.integers(1, 40), st.integers(0, 3000), ANY_BUDGET, ANY_BUDGET)
def test_more_memory_streams_no_more(size: int, num_layers: int, others: int, budget: int, other_budget: int) -> None:
    found = sizes([size] * num_layers, others)
    less, more = sorted((budget, other_budget))
    assert plan_weights(found, more).host_bytes <= plan_weights(found, less).host_bytes


@given(st.data(), st.integers(1, 200))
def test_streamed_layers_are_spread_evenly(data: st.DataObject, num_layers: int) -> None:
    count = data.draw(st.integers(1, num_layers))
    layers = spread(count, num_layers)
    assert len(layers) == count and layers == tuple(sorted(set(layers)))
    # The distances go round to the first layer of the next pass.
    distances = [later - layer for layer, later in pairwise((*layers, layers[0] + num_layers))]
    assert max(distances) - min(distances) <= 1


def test_a_layer_alone_keeps_its_weights() -> None:
    """With one slot of its own it would take as much."""
    plan = plan_weights(sizes([100], 10), 50)
    assert plan.streamed == () and plan.device_bytes == 110
    both = plan_weights(sizes([100, 100], 10), 50)
    assert both.streamed == (0, 1) and both.num_slots == 1 and both.device_bytes == 110


# ---- a file behind the host


@given(ANY_SIZES, ANY_BUDGET, ANY_BUDGET)
def test_what_the_host_may_not_take_is_in_a_file(found: WeightSizes, budget: int, host_budget: int) -> None:
    streams = plan_weights(found, budget)
    plan = with_disk(streams, host_budget)
    assert (plan.streamed, plan.device_bytes) == (streams.streamed, streams.device_bytes)
    if streams.streamed_bytes <= host_budget:
        assert plan.on_disk == ()
    elif plan.host_bytes > host_budget:
        assert plan.on_disk == plan.streamed and plan.host_places == min(HOST_PLACES, len(plan.streamed)), "the least"
    assert set(plan.on_disk) <= set(plan.streamed)
    kept = plan.streamed_bytes - plan.disk_bytes
    assert plan.host_bytes == kept + plan.host_places * plan.host_place_bytes
    assert all(found.stored_bytes[layer] <= plan.host_place_bytes for layer in plan.on_disk)
    assert plan.read_bytes(1, None) == plan.disk_bytes


@given(st.integers(1, 500), st.integers(2, 40), ANY_BUDGET, ANY_BUDGET)
def test_a_larger_host_reads_no_more(size: int, num_layers: int, host_budget: int, other_budget: int) -> None:
    streams = plan_weights(sizes([size] * num_layers, 0), 0)
    less, more = sorted((host_budget, other_budget))
    assert with_disk(streams, more).disk_bytes <= with_disk(streams, less).disk_bytes


def test_layers_that_are_read_lie_evenly_among_those_that_stay_on_the_host() -> None:
    streams = plan_weights(sizes([100] * 12, 0), 0)
    assert with_disk(streams, 1000).on_disk == (2, 5, 8, 11), "of four 200 bytes are in places"
    assert with_disk(streams, 1100).on_disk == (3, 7, 11)
    assert with_disk(streams, 1199).on_disk == (3, 7, 11), "two would fill the places and stay there"
    assert with_disk(streams, 1).on_disk == streams.streamed


SPEC = ExpertSpec(num_experts=16, num_experts_per_tok=2)
MIXTURE = sizes([1800] * 6, 10, [1600] * 6, SPEC)  # an expert has 100 bytes


def test_of_layers_with_experts_these_stream_alone() -> None:
    plan = plan_weights(MIXTURE, 0)
    assert plan.streamed == tuple(range(6)) and plan.host_bytes == 6 * 1600 and plan.expert_bytes == 100
    assert plan.cached_experts == LEAST_ROWS * 2, "what two rows choose"
    assert plan.device_bytes == 6 * 200 + 10 + 2 * 1600 + 4 * 100
    roomy = plan_weights(MIXTURE, plan.device_bytes + 5 * 100)
    assert (roomy.streamed, roomy.cached_experts) == (plan.streamed, 9)
    half = plan_weights(MIXTURE, MIXTURE.num_bytes - 100)
    assert half.cached_experts == 16 * len(half.streamed) // CACHE_SHARE, "then further layers stay"


def test_a_pass_of_few_rows_loads_the_experts_that_they_choose() -> None:
    plan = plan_weights(MIXTURE, 0)
    assert plan.loaded_bytes(1, SPEC) == 6 * 1600 // 8 * 23 // 24, "two of sixteen, of which the cache has 4 / 96"
    assert plan.loaded_bytes(2, SPEC) == round(6 * 1600 * (1 - (7 / 8) ** 2) * 23 / 24)
    assert plan.loaded_bytes(3, SPEC) == plan.host_bytes, "the cache is too small for what three rows choose"
    assert plan.loaded_bytes(1000, SPEC) == plan.loaded_bytes(1000, None) == plan.host_bytes == 6 * 1600


def test_of_experts_the_host_has_a_cache() -> None:
    streams = replace(plan_weights(MIXTURE, 0), cached_experts=48)  # half of them
    plan = with_disk(streams, 2450)
    assert plan.on_disk == tuple(range(6)) and plan.disk_bytes == 6 * 1600 and plan.disk_experts == 96
    assert (plan.host_experts, plan.host_places, plan.host_bytes) == (24, 0, 2400)
    assert plan.read_bytes(1000, SPEC) == plan.read_bytes(1000, None) == 6 * 1600 * 3 // 4
    assert plan.read_bytes(1, SPEC) == round(plan.chosen_bytes(1, SPEC) * 3 / 4) > 0
    assert with_disk(streams, 0).host_experts == LEAST_ROWS * 2
    assert with_disk(streams, 9599).host_experts == 95 and with_disk(streams, 9600).on_disk == ()


def test_layers_without_experts_come_first_on_the_host() -> None:
    mixture = sizes([400] * 2 + [1800] * 4, 10, [0] * 2 + [1600] * 4, SPEC)
    streams = plan_weights(mixture, 0)
    assert with_disk(streams, 1300).on_disk == (2, 3, 4, 5)
    assert with_disk(streams, 1300).host_experts == 5
    assert with_disk(streams, 0).on_disk == tuple(range(6)) and with_disk(streams, 0).host_places == 2


# ---- what an engine plans by itself: a device of 24 GiB, 23 of which are free

LAYERS = 32
SMALL = sizes([GIB // 4] * LAYERS, GIB)  # 9 GiB
LARGE = sizes([GIB] * LAYERS, 2 * GIB)  # 34 GiB
STEP = GIB
LONGEST = 6 * GIB  # of K and V


def planned(found: WeightSizes, *, on_cpu: bool = False, step: int = STEP, **arguments: Any) -> WeightPlan:
    config = engine_config(Path(__file__).parent, {"gpu_memory_utilization": 1.0, **arguments})
    wish = KVWish(config.num_bytes("kv_cache_memory_bytes"), LONGEST)
    return weight_plan(config, found, 24 * GIB, 23 * GIB, 128 * GIB, on_cpu, lambda: step, wish)


def test_what_fits_stays() -> None:
    assert planned(SMALL, enable_cpu_offload=True).streamed == ()
    assert planned(LARGE).streamed == (), "without offload the check of sizes refuses it"
    assert planned(LARGE, enable_cpu_offload=True, on_cpu=True).streamed == ()


def test_what_does_not_fit_streams_and_leaves_room_for_kv_and_a_step() -> None:
    plan = planned(LARGE, enable_cpu_offload=True)
    assert 0 < len(plan.streamed) < LAYERS
    left = 23 * GIB - plan.device_bytes
    assert left >= STEP + 23 * GIB // 8
    assert left < STEP + 23 * GIB // 8 + 3 * GIB, "one layer or two, and the slots"


def test_beside_experts_there_is_room_for_the_longest_sequence() -> None:
    mixture = sizes([GIB] * LAYERS, 2 * GIB, [GIB - 2**20] * LAYERS, SPEC)
    left = 23 * GIB - planned(mixture, enable_cpu_offload=True).device_bytes
    assert STEP + LONGEST <= left < STEP + LONGEST + 2 * GIB


def test_kv_that_is_asked_for_is_left_and_large_steps_too() -> None:
    asked = {"enable_cpu_offload": True, "kv_cache_memory_bytes": "8GiB"}
    for step in (GIB // 2, 4 * GIB):
        plan = planned(LARGE, step=step, **asked)
        left = 23 * GIB - plan.device_bytes - 8 * GIB - step
        assert 0 <= left < 3 * GIB
    nearly = sizes([GIB // 2] * LAYERS, 3 * GIB)  # 19 GiB: without the step it would fit
    assert planned(nearly, step=0, enable_cpu_offload=True).streamed == ()
    assert planned(nearly, step=2 * GIB, enable_cpu_offload=True).streamed != ()


def test_less_of_the_device_is_used_if_asked() -> None:
    plan = planned(LARGE, enable_cpu_offload=True, gpu_memory_utilization=0.5)
    assert plan.device_bytes <= 11 * GIB - STEP - 11 * GIB // 8


def test_what_is_asked_for_is_planned_on_any_device() -> None:
    for on_cpu in (False, True):
        assert planned(LARGE, on_cpu=on_cpu, weights_memory_bytes="12GiB").device_bytes <= 12 * GIB
        half = planned(LARGE, on_cpu=on_cpu, weights_memory_bytes="50%")
        assert LARGE.num_bytes // 2 - 2 * GIB <= half.device_bytes <= LARGE.num_bytes // 2
        assert planned(LARGE, on_cpu=on_cpu, weights_memory_bytes="100%").streamed == ()
    with pytest.raises(ConfigError, match=rf"weights_memory_bytes=1GiB: .* raise it to at least {4 * GIB}$"):
        planned(LARGE, weights_memory_bytes="1GiB")
    assert len(planned(LARGE, weights_memory_bytes="1%").streamed) == LAYERS
