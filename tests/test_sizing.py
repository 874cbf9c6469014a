"""Memory in numbers: split of the device, sizing of both tiers and of the swap space, weights. No torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from block_helpers import one_group
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.config import engine_config
from nanovllm.data.network import WeightSizes
from nanovllm.engine.block_manager import WATERMARK, BlockManager
from nanovllm.errors import ConfigError
from nanovllm.memory.budget import DeviceSplit, split_device
from nanovllm.memory.fitting import KVSizing
from nanovllm.memory.layerwise import NO_LAYERWISE, LayerwiseMemory
from nanovllm.memory.layout import KVLayout, block_size_of
from nanovllm.memory.sizing import KVPlan, MemoryFacts, StateSlots
from nanovllm.memory.swap import asked_swap_bytes, plan_swap_space
from nanovllm.memory.weights import plan_weights

LAYOUT = KVLayout(num_layers=8, num_kv_heads=2, head_dim=16, block_size=16, itemsize=2)
BLOCK = LAYOUT.block_bytes
# Of 1000 blocks of memory 100 are taken, and a step needs 50.
MEMORY = MemoryFacts(
    device_total=1000 * BLOCK,
    device_free=900 * BLOCK,
    host_free=5000 * BLOCK,
    tiers_share_memory=False,
    activation_peak=50 * BLOCK,
)
SHARED = replace(MEMORY, host_free=900 * BLOCK, tiers_share_memory=True)
MODEL_LEN = 16_000  # 1000 blocks


def sizing(
    memory: MemoryFacts = MEMORY, layout: KVLayout = LAYOUT, model_max_len: int = MODEL_LEN, **arguments: Any
) -> KVSizing:
    config = engine_config(Path(__file__).parent, {"kvcache_block_size": layout.block_size, **arguments})
    return KVSizing(config, layout, model_max_len, memory, WATERMARK)


def plan(
    memory: MemoryFacts = MEMORY, layout: KVLayout = LAYOUT, model_max_len: int = MODEL_LEN, **arguments: Any
) -> KVPlan:
    return sizing(memory, layout, model_max_len, **arguments).plan()


# ---- the device


@given(num_gpu_blocks=st.integers(4, 1000), num_layers=st.integers(1, 130))
@settings(max_examples=100)
def test_ring_and_resident_blocks_stay_within_the_device(num_gpu_blocks: int, num_layers: int) -> None:
    split = split_device(num_gpu_blocks, num_layers)
    ring_blocks = num_gpu_blocks - split.resident_blocks
    assert 0 <= split.resident_blocks < num_gpu_blocks
    assert 4 <= split.ring_slots <= 16
    assert (ring_blocks - 1) * num_layers < split.ring_slots <= ring_blocks * num_layers


# ---- the block size where none is named


def picked(token_layer_bytes: int, model_max_len: int, **arguments: Any) -> int:
    config = engine_config(Path(__file__).parent, {"enable_cpu_offload": True, **arguments})
    return block_size_of(config, token_layer_bytes, model_max_len)


@pytest.mark.parametrize(
    ("token_layer_bytes", "max_len", "expected"),
    [
        (4 * 1024, 131_072, 256),  # Llama 3.1 8B, and all Qwen3: one layer of 256 tokens is 1 MiB
        (2 * 1024, 1_010_000, 512),  # Qwen2.5 7B 1M: the link decides
        (512, 32_768, 256),  # Qwen2.5 0.5B: the length decides
        (512, 1 << 20, 2048),
        (64, 1 << 30, 4096),
    ],
)
def test_the_link_and_the_lengths_decide(token_layer_bytes: int, max_len: int, expected: int) -> None:
    assert picked(token_layer_bytes, max_len) == expected
    assert picked(512, 1 << 20, max_model_len=32_768) == 256
    assert picked(512, 1 << 20, kvcache_block_size=48) == 48
    assert picked(512, 1 << 20, enable_cpu_offload=False) == 256


# ---- sizes in bytes

GIB = 2**30


def test_bytes_and_gib_are_blocks() -> None:
    assert plan(kv_cache_memory_bytes=101 * BLOCK - 1).num_gpu_blocks == 100
    assert plan(kv_cache_memory_bytes=100 * BLOCK) == plan(num_gpu_blocks=100)
    offloaded = plan(kv_cache_memory_bytes=100 * BLOCK, kv_offloading_size=50 * BLOCK / GIB)
    assert offloaded == plan(enable_cpu_offload=True, num_gpu_blocks=100, num_cpu_blocks=50)
    two_ranks = plan(kv_offloading_size=100 * BLOCK / GIB, tensor_parallel_size=2)
    assert two_ranks.num_cpu_blocks == 50, "the size is that of all ranks, as in vLLM"


@given(blocks=st.integers(2, 300), chunk=st.sampled_from([16, 64, 256]))
@settings(max_examples=60)
def test_bytes_of_the_device_include_the_layer_buffer(blocks: int, chunk: int) -> None:
    facts = replace(MEMORY, layerwise_token_bytes=40)
    asked = blocks * BLOCK + BLOCK // 2
    found = plan(facts, kv_cache_memory_bytes=asked, kv_offloading_size=400 * BLOCK / GIB, max_num_batched_tokens=chunk)
    taken = found.num_gpu_blocks * BLOCK + found.layerwise_memory.buffer_bytes(LAYOUT)
    assert asked // 2 < taken <= asked and found.num_gpu_blocks >= blocks * 7 // 8
    if blocks > 100 and chunk == 16:
        assert found.layerwise_memory.buffer_blocks > 0


def test_a_size_that_holds_no_block_is_refused_with_numbers() -> None:
    for arguments, told in (
        (
            {"kv_cache_memory_bytes": 4 * BLOCK - 1},
            f"the device needs at least 4 KV blocks of 16 tokens, {4 * BLOCK:,}",
        ),
        ({"kv_offloading_size": (BLOCK - 1) / GIB}, f"hold no KV block of 16 tokens, which takes {BLOCK:,} bytes;"),
        ({"kv_cache_memory_bytes": 5000 * BLOCK}, f"kv_cache_memory_bytes={5000 * BLOCK}: its KV cache takes"),
    ):
        with pytest.raises(ConfigError) as refusal:
            plan(**arguments)
        assert told in str(refusal.value)


# ---- sizing from memory


def test_device_blocks_are_what_utilization_leaves() -> None:
    resident = plan()  # 0.9 * 1000 - 100 - 50
    assert (resident.num_gpu_blocks, resident.num_cpu_blocks) == (750, 0)
    assert (resident.split.resident_blocks, resident.split.ring_slots) == (750, 0)
    assert plan(gpu_memory_utilization=0.5).num_gpu_blocks == 350
    assert plan(replace(MEMORY, activation_peak=0)).num_gpu_blocks == 800


def test_host_blocks_are_what_utilization_leaves_of_the_host() -> None:
    offloaded = plan(enable_cpu_offload=True)
    assert (offloaded.num_gpu_blocks, offloaded.num_cpu_blocks) == (750, 4500)
    assert (offloaded.split.ring_slots, offloaded.split.resident_blocks) == (8, 749)
    assert offloaded.num_sequence_blocks == 749 + 4500


def test_tiers_that_share_memory_are_not_given_it_twice() -> None:
    shared = plan(SHARED, enable_cpu_offload=True)
    assert shared.num_gpu_blocks == 375, "half of the budget"
    assert shared.num_cpu_blocks == int(0.9 * (900 - 375 - 50))
    assert plan(SHARED).num_gpu_blocks == 750
    named = plan(SHARED, enable_cpu_offload=True, num_gpu_blocks=100)
    assert (named.num_gpu_blocks, named.num_cpu_blocks) == (100, int(0.9 * (900 - 100 - 50)))


def test_no_more_is_taken_than_sequences_can_use() -> None:
    few = plan(max_num_seqs=2, max_model_len=160)  # two sequences of 10 blocks, and a margin
    assert 20 <= few.num_gpu_blocks <= 26
    both = plan(max_num_seqs=2, max_model_len=160, enable_cpu_offload=True)
    assert 20 <= both.num_sequence_blocks <= 26 and both.num_cpu_blocks == 0
    assert few.max_model_len == both.max_model_len == 160


def test_the_cpu_takes_no_more_than_a_default_or_one_full_sequence() -> None:
    """Other programs use its memory too. A named number of blocks is taken as it is."""
    gib = 2**30
    large = KVLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_size=256, itemsize=4)
    machine = MemoryFacts(24 * gib, 23 * gib, 23 * gib, tiers_share_memory=True, activation_peak=gib // 2)
    for offload in ({}, {"enable_cpu_offload": True, "kvcache_block_size": 256}):
        made = plan(machine, large, 8192, **offload)
        held = (made.num_gpu_blocks + made.num_cpu_blocks) * large.block_bytes
        assert 4 * gib - large.block_bytes < held < 4.2 * gib and made.max_model_len == 8192
        few = plan(machine, large, 8192, max_num_seqs=2, max_model_len=1000, **offload)
        assert (few.num_gpu_blocks + few.num_cpu_blocks) * large.block_bytes < 0.2 * gib
        long = plan(machine, large, 300_000, **offload)  # 12.9 GiB
        assert long.max_model_len == 300_000 and long.num_sequence_blocks * large.block_bytes < 13.5 * gib
    assert plan(machine, large, 8192, num_gpu_blocks=1000).num_gpu_blocks == 1000
    gpu = replace(machine, tiers_share_memory=False)
    assert plan(gpu, large, 8192).num_gpu_blocks * large.block_bytes > 20 * gib, "a GPU has no other use for it"


ROW = 128  # bytes that layer-by-layer prefill keeps for a token: as much as K and V of one layer
LAYERWISE = replace(MEMORY, layerwise_token_bytes=ROW)
SHARED_LAYERWISE = replace(LAYERWISE, host_free=900 * BLOCK, tiers_share_memory=True)
FOR_ALL = LayerwiseMemory(buffer_blocks=1000, max_tokens=MODEL_LEN)  # 250 blocks


def plan_with_layerwise(memory: MemoryFacts = LAYERWISE, **arguments: Any) -> KVPlan:
    return plan(memory, **{"enable_cpu_offload": True, "max_num_batched_tokens": 64, **arguments})


def layerwise_blocks(made: KVPlan) -> float:
    """The memory for layer-by-layer prefill, in KV blocks."""
    return made.layerwise_memory.num_bytes(LAYOUT, ROW) / BLOCK


def test_spans_are_given_memory_before_blocks_are_sized() -> None:
    made = plan_with_layerwise()  # prompts of any length would take 250 blocks; an eighth of 750 is 93.75
    assert 93 < layerwise_blocks(made) <= 93.75 and made.num_gpu_blocks == 750 - 94
    assert made.working_bytes == int((50 + layerwise_blocks(made)) * BLOCK)
    short = plan_with_layerwise(max_model_len=1600, num_cpu_blocks=10)
    assert (short.layerwise_memory, short.num_gpu_blocks) == (LayerwiseMemory(100, 1600), 750 - 25), (
        "what the longest prompt needs"
    )
    shared = plan_with_layerwise(SHARED_LAYERWISE)
    assert shared.num_gpu_blocks == 328, "half of what is left"
    assert shared.num_cpu_blocks == int(0.9 * (900 - 328 - 50 - layerwise_blocks(made)))


def test_resident_blocks_of_a_network_with_states_go_before_layer_by_layer_prefill() -> None:
    """Where they save more loads. What named sizes leave is of no other use."""
    memory = replace(LAYERWISE, states=StateSlots(device=2, host=2, running=2, slot_bytes=100, draft_rows=0))
    made = plan_with_layerwise(memory)
    assert (made.layerwise_memory, made.num_gpu_blocks) == (NO_LAYERWISE, 750)
    assert plan_with_layerwise(memory, num_gpu_blocks=500, num_cpu_blocks=900).layerwise_memory == LayerwiseMemory(
        1000, MODEL_LEN
    )
    sizes: dict[str, Any] = {"max_num_batched_tokens": 64, "max_model_len": 4000}
    deep = plan(memory, replace(LAYOUT, num_layers=64), enable_cpu_offload=True, **sizes)
    assert deep.layerwise_memory == LayerwiseMemory(250, 4000), "a layer of many takes little of them"


def test_spans_never_cost_a_prompt_its_blocks() -> None:
    """With it the cache would be too small for max_model_len, or smaller than the smallest cache."""
    wanted = 16 * 690
    assert plan_with_layerwise(num_cpu_blocks=4).num_gpu_blocks < 690
    tight = plan_with_layerwise(num_cpu_blocks=4, max_model_len=wanted)
    assert (tight.max_model_len, tight.layerwise_memory, tight.num_gpu_blocks) == (wanted, NO_LAYERWISE, 750)
    smallest = plan_with_layerwise(replace(LAYERWISE, activation_peak=795 * BLOCK))
    assert (smallest.num_gpu_blocks, smallest.layerwise_memory) == (5, NO_LAYERWISE)


@given(gpu=st.integers(4, 700), cpu=st.integers(0, 700), layers=st.integers(1, 30), offload=st.booleans())
@settings(max_examples=80)
def test_the_longest_sequence_is_the_block_managers(gpu: int, cpu: int, layers: int, offload: bool) -> None:
    layout = replace(LAYOUT, num_layers=layers)
    tiers: dict[str, Any] = {"num_gpu_blocks": gpu}
    if offload:
        tiers |= {"num_cpu_blocks": cpu, "enable_cpu_offload": True}
    try:
        made = plan(replace(MEMORY, device_free=10**12, host_free=10**12), layout, 10**9, **tiers)
    except ConfigError as error:
        assert offload and gpu == 4 and cpu == 0 and layers == 1 and "num_cpu_blocks" in str(error)
        return
    manager = BlockManager(made.split.resident_blocks, made.num_cpu_blocks, one_group(layout.block_size))
    assert made.num_sequence_blocks == manager.pool.num_blocks
    assert made.max_model_len == manager.capacity.max_sequence_tokens >= layout.block_size


def test_max_model_len_is_the_models_or_what_the_cache_holds() -> None:
    assert plan(model_max_len=3000).max_model_len == 3000
    assert plan(num_gpu_blocks=100).max_model_len == 99 * 16, "the watermark keeps a block"
    assert plan(num_gpu_blocks=100, max_model_len=99 * 16).max_model_len == 99 * 16
    assert plan(max_model_len=50).max_model_len == 50


# ---- refusals


def test_a_ring_needs_as_many_blocks_as_its_slots_take() -> None:
    offload = {"enable_cpu_offload": True, "num_cpu_blocks": 9}
    with pytest.raises(ConfigError, match=r"num_gpu_blocks=1: .* a model with 2 layers takes 2 blocks; raise num_gpu"):
        plan(layout=replace(LAYOUT, num_layers=2), num_gpu_blocks=1, **offload)
    small = plan(layout=replace(LAYOUT, num_layers=16), num_gpu_blocks=1, **offload)
    assert (small.split.ring_slots, small.split.resident_blocks, small.num_cpu_blocks) == (16, 0, 9)


def test_a_host_that_may_grow_is_not_refused_by_what_is_free_now() -> None:
    """Whether there is as much shows when it is allocated; what is sized from memory takes what there is."""
    growing = replace(MEMORY, host_may_grow=True)
    assert plan(growing, enable_cpu_offload=True, num_cpu_blocks=5001).num_cpu_blocks == 5001
    assert plan(growing, enable_cpu_offload=True).num_cpu_blocks == plan(enable_cpu_offload=True).num_cpu_blocks


REFUSALS: list[tuple[MemoryFacts, dict[str, Any], tuple[str, ...]]] = [
    (MEMORY, {"max_model_len": MODEL_LEN + 1}, ("max_model_len=16001", "positions end at 16000")),
    (MEMORY, {"num_gpu_blocks": 901}, ("num_gpu_blocks=901", "at most 900 blocks of 16 tokens", "0.01 GiB")),
    (
        SHARED,
        {"enable_cpu_offload": True, "num_gpu_blocks": 800, "num_cpu_blocks": 51},
        ("num_cpu_blocks=51", "at most 50 blocks"),
    ),
    (
        replace(MEMORY, device_free=105 * BLOCK),
        {},
        (
            "no memory for the KV cache",
            "gpu_memory_utilization=0.9",
            "raise gpu_memory_utilization",
            "kvcache_block_size",
        ),
    ),
    (
        MEMORY,
        {"num_gpu_blocks": 100, "max_model_len": 99 * 16 + 1},
        ("max_model_len=1585", "100 blocks of 16 tokens", "1584 tokens", "enable_cpu_offload=True", "num_gpu_blocks"),
    ),
    (
        MEMORY,
        {"enable_cpu_offload": True, "num_gpu_blocks": 11, "num_cpu_blocks": 20, "max_model_len": 481},
        ("max_model_len=481", "30 blocks of 16 tokens", "480 tokens", "raise num_cpu_blocks or num_gpu_blocks"),
    ),
]


@pytest.mark.parametrize("memory, arguments, says", REFUSALS, ids=[says[0] for _, _, says in REFUSALS])
def test_what_cannot_be_sized_is_refused_with_numbers_and_a_way_out(
    memory: MemoryFacts, arguments: dict[str, Any], says: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as refusal:
        plan(memory, **arguments)
    for words in says:
        assert words in str(refusal.value)
    assert ("enable_cpu_offload=True" in str(refusal.value)) == ("enable_cpu_offload=True" in says)


# ---- the swap space

LARGE = KVLayout(num_layers=4, num_kv_heads=8, head_dim=128, block_size=1024, itemsize=2)  # 16 MiB a block
GIB_BLOCKS = GIB // LARGE.block_bytes


def swap_blocks(
    host_gib: int, resident: int, host: int = 0, *, shared: bool = False, longest: int = 1 << 20, **arguments: Any
) -> int:
    total = host_gib * GIB
    memory = MemoryFacts(total, total, total, tiers_share_memory=shared, activation_peak=0)
    made = KVPlan(resident, host, DeviceSplit(0, resident), longest, NO_LAYERWISE, working_bytes=0)
    return plan_swap_space(engine_config(Path(__file__).parent, arguments), LARGE, memory, made)


def test_by_default_4_gib_or_half_of_what_is_left_or_the_size_of_the_cache() -> None:
    assert swap_blocks(100, resident=1000) == 4 * GIB_BLOCKS
    assert swap_blocks(4, resident=1000) == 2 * GIB_BLOCKS
    assert swap_blocks(100, resident=10) == 10
    assert swap_blocks(100, resident=10, host=5) == 15
    assert swap_blocks(1, resident=1000, host=GIB_BLOCKS) == 0
    assert swap_blocks(4, resident=2 * GIB_BLOCKS, shared=True) == GIB_BLOCKS
    assert swap_blocks(100, resident=1000, longest=17_000) == 2 * 17, "two sequences of full length"
    assert swap_blocks(100, resident=1000, longest=17_000, preemption_mode="swap") == 4 * GIB_BLOCKS


def test_what_was_asked_for_is_set_aside_or_refused_with_numbers() -> None:
    assert asked_swap_bytes(engine_config(Path(__file__).parent, {"swap_space": 1.5})) == 3 * 2**29
    assert asked_swap_bytes(engine_config(Path(__file__).parent, {})) == 0
    assert swap_blocks(8, resident=1000, swap_space=1.5) == GIB_BLOCKS * 3 // 2
    assert swap_blocks(8, resident=1000, swap_space=0) == 0
    assert swap_blocks(100, resident=20, swap_space=50) == 20, "more could never be swapped out"
    with pytest.raises(ConfigError, match=r"swap_space=7: that is 7.00 GiB and .* the host has 6.00 GiB free"):
        swap_blocks(8, resident=1000, host=2 * GIB_BLOCKS, swap_space=7)


# ---- weights

MIXTURE = WeightSizes(  # 12 layers with 8 experts of 100 bytes, of which a token uses one
    num_weights=12_500,
    num_bytes=12_500,
    layer_bytes=12_000,
    layer_matrix_weights=12_000,
    expert_weights=9_600,
    expert_bytes=9_600,
    head_bytes=250,
    stored_bytes=(900,) * 12,
    stored_expert_bytes=(800,) * 12,
    num_experts=8,
    experts_per_token=1,
)


def test_a_small_host_gets_fewer_layers_beside_a_smaller_cache() -> None:
    """What stays takes 2,900 bytes and 800 for each layer, two slots 1,600, and a place of the cache 100."""
    roomy = plan_weights(MIXTURE, 7_000)
    assert (len(roomy.streamed), roomy.cached_experts, roomy.device_bytes) == (12, 24, 6_900)
    assert plan_weights(MIXTURE, 7_000, 9_600) == roomy
    tight = plan_weights(MIXTURE, 7_000, 8_500)
    assert (len(tight.streamed), tight.cached_experts, tight.device_bytes, tight.host_bytes) == (10, 9, 7_000, 8_000)
    assert plan_weights(MIXTURE, 7_000, 100) == tight, "no more layers fit the device"
    assert plan_weights(MIXTURE, 4_000, 8_500) == plan_weights(MIXTURE, 4_000), "nor any of these"
