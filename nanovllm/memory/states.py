"""The memory of recurrent states, which is decided before KV blocks are sized: how many state slots each tier has, and
for how many rows with drafts the device keeps what a replay needs.
"""

from __future__ import annotations

from dataclasses import replace

from nanovllm.config import EngineConfig
from nanovllm.data.memory_checks import check_fits
from nanovllm.data.network import Network
from nanovllm.memory.sizing import CPU_KV_BYTES, MemoryFacts, StateSlots, cache_budget

STATE_SHARE = 4  # states take at most 1 / STATE_SHARE of the device's memory for the cache, if more than are needed fit
HOST_STATE_SHARE = 8  # and 1 / HOST_STATE_SHARE of the host's free memory
SNAPSHOTS_PER_SEQUENCE = 2  # slots beside those of running sequences, on either tier, where memory allows


def plan_states(config: EngineConfig, network: Network, memory: MemoryFacts) -> StateSlots | None:
    """The state slots of a network with recurrent layers; None for others.

    Raises ConfigError if the device has no memory for the state of one sequence.
    """
    if network.recurrent is None:
        return None
    one = network.state_bytes
    most = config.max_num_seqs
    budget = max(0, cache_budget(config, memory)) // STATE_SHARE
    host_budget = memory.host_free // HOST_STATE_SHARE
    if memory.tiers_share_memory:
        budget = min(budget, CPU_KV_BYTES // STATE_SHARE)
        host_budget = min(host_budget, CPU_KV_BYTES // STATE_SHARE)
    check_fits("a recurrent state takes", one, memory.device_free, "the device has", "free device memory")
    snapshots = most * SNAPSHOTS_PER_SEQUENCE if config.enable_prefix_caching else 0
    drafts = config.num_speculative_tokens
    # A step with drafts holds the states from before it, and snapshots leave the device for them.
    spare = max(snapshots, min(most, drafts))
    least = 2 if drafts and budget >= one else 1
    device = max(least, min(most + spare, budget // one))
    running = min(most, device - device // 3 if spare else device)
    draft_rows = running + drafts if drafts else 0  # as `Scheduler._draft` bounds them
    return StateSlots(device, min(most + snapshots, host_budget // one), running, one, draft_rows)


def without_states(memory: MemoryFacts, config: EngineConfig, network: Network) -> MemoryFacts:
    """What is left of the memory besides the states, which are allocated before KV blocks are sized."""
    slots = plan_states(config, network, memory)
    if slots is None:
        return memory
    on_device, on_host = (count * network.state_bytes for count in (slots.device, slots.host))
    rows = slots.draft_rows * network.draft_row_bytes
    remedy = "lower num_speculative_tokens or max_num_seqs"
    check_fits("rows with drafts take", rows, memory.device_free - on_device, "the device has", remedy)
    on_device += rows
    taken = on_device + on_host if memory.tiers_share_memory else on_device
    return replace(
        memory,
        device_free=memory.device_free - taken,
        host_free=memory.host_free - (taken if memory.tiers_share_memory else on_host),
        states=slots,
    )
