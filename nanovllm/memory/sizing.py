"""How many KV blocks each tier gets, the longest sequence that they hold, and what a step takes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from nanovllm.config import MIN_GPU_BLOCKS, EngineConfig
from nanovllm.data.batch import StateMove
from nanovllm.data.kv_groups import ANY_LENGTH
from nanovllm.data.memory_checks import check_fits, gib
from nanovllm.data.network import Network
from nanovllm.errors import ConfigError
from nanovllm.memory.budget import DeviceSplit, TransferCount, split_device
from nanovllm.memory.layerwise import ID_BYTES, NO_LAYERWISE, LayerwiseMemory, divide_memory, prefill_loads
from nanovllm.memory.layout import KVLayout, layout_of

CPU_KV_BYTES = 4 * 2**30  # of KV blocks on the CPU by default; vLLM's
CPU_HOST_SEQUENCES = 4  # of full length for which the CPU's host tier has blocks by default
LOGIT_BYTES = 4
MOST_YARN = 4  # times the trained length; what Qwen's model cards recommend
LAYERWISE_SHARE = 8  # layer-by-layer prefill takes at most 1 / LAYERWISE_SHARE of the memory for KV blocks,
WEIGHTS_SHARE = 4  # or 1 / WEIGHTS_SHARE where weights stream, each of which it reads once


class StateSlots(NamedTuple):
    """State slots of both tiers."""

    device: int  # slots
    host: int  # slots
    running: int  # sequences that may run at once; the other slots hold snapshots
    slot_bytes: int
    draft_rows: int  # of a step with drafts, of which the device keeps what the layers' input projections give

    def transfers(self, moves: Iterable[StateMove]) -> TransferCount:
        """What these moves copy between the tiers."""
        ends = [(move.src >= self.device, move.dst >= self.device) for move in moves if move.src is not None]
        h2d = ends.count((True, False))
        d2h = ends.count((False, True))
        return TransferCount(h2d, h2d * self.slot_bytes, d2h, d2h * self.slot_bytes)


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """Bytes of memory once the weights are loaded and before any KV memory is allocated."""

    device_total: int
    device_free: int
    host_free: int
    tiers_share_memory: bool  # on the CPU, "device" and host are the same memory
    activation_peak: int  # of the largest batch, including CUDA graphs; 0 if nothing is sized from memory
    host_may_grow: bool = False  # more than `host_free` may be available: only an allocation can tell
    adapter_bytes: int = 0  # of LoRA adapters on the device, which neither tier counts as free
    layerwise_token_bytes: int = 0  # of layer-by-layer prefill; 0 if no prompt goes that way
    states: StateSlots | None = None  # of recurrent layers, which neither tier counts as free
    streamed_bytes: int = 0  # of the weights that stream from host memory, which neither tier counts as free


def smallest(facts: Sequence[MemoryFacts], local_size: int) -> MemoryFacts:
    """What every tensor-parallel rank has at least, so that all of them can allocate the same blocks.

    The `local_size` ranks of a machine share its host memory, and on the CPU the device's too.
    """
    device_share = local_size if facts[0].tiers_share_memory else 1
    return replace(
        facts[0],
        device_total=min(fact.device_total for fact in facts) // device_share,
        device_free=min(fact.device_free for fact in facts) // device_share,
        host_free=min(fact.host_free for fact in facts) // local_size,
        activation_peak=max(fact.activation_peak for fact in facts),
    )


@dataclass(frozen=True, slots=True)
class KVPlan:
    """The KV memory to allocate. Without offload every device block is resident and there is no ring."""

    num_gpu_blocks: int
    num_cpu_blocks: int
    split: DeviceSplit
    max_model_len: int
    layerwise_memory: LayerwiseMemory  # limits of layer-by-layer prefill
    working_bytes: int  # beyond weights and KV blocks: activations, memory of layer-by-layer prefill

    @property
    def num_sequence_blocks(self) -> int:
        """Blocks that sequences can hold, on both tiers."""
        return self.split.resident_blocks + self.num_cpu_blocks


class NoMemoryError(ConfigError):
    """The memory holds no KV cache at all."""


def plan_kv_cache(
    config: EngineConfig,
    layout: KVLayout,
    model_max_len: int,
    memory: MemoryFacts,
    watermark: float,
    yarn_positions: int | None = None,
) -> KVPlan:
    """Size both tiers. Raises ConfigError, with numbers and the arguments that matter, if that is impossible."""
    wanted_len = config.max_model_len or model_max_len
    if wanted_len > model_max_len:
        longer = longer_positions(wanted_len, yarn_positions)
        raise ConfigError(
            f"max_model_len={wanted_len}: the model's positions end at {model_max_len}; lower max_model_len to "
            f"that{longer}"
        )
    reserved = _layerwise_memory(config, layout, memory, wanted_len)
    plan = _plan_tiers(config, layout, memory, wanted_len, watermark, reserved)
    if reserved != NO_LAYERWISE and plan.max_model_len < (config.max_model_len or 1):  # rather fit the prompt
        plan = _plan_tiers(config, layout, memory, wanted_len, watermark, NO_LAYERWISE)
    elif plan.layerwise_memory != NO_LAYERWISE and memory.states is not None:
        # Where few layers have K and V, the memory of a layer of them, as resident blocks, may save more.
        without = _plan_tiers(config, layout, memory, wanted_len, watermark, NO_LAYERWISE)
        weights = memory.streamed_bytes // layout.token_bytes
        if _loads(config, layout, without, weights) < _loads(config, layout, plan, weights):
            plan = without
    _check_capacity(config, layout, plan)
    return plan


def _loads(config: EngineConfig, layout: KVLayout, plan: KVPlan, weights: int) -> int:
    """Tokens that each layer loads while the longest prompt is prefilled. weights: what they count for in each pass."""
    resident = plan.split.resident_blocks
    longest = plan.max_model_len
    return prefill_loads(layout.block_size, resident, longest, config.chunk, plan.layerwise_memory, weights)


def _plan_tiers(
    config: EngineConfig,
    layout: KVLayout,
    memory: MemoryFacts,
    wanted_len: int,
    watermark: float,
    reserved: LayerwiseMemory,
) -> KVPlan:
    """The blocks that both tiers get besides what is reserved for layer-by-layer prefill."""
    token_bytes = memory.layerwise_token_bytes
    reserved_bytes = reserved.num_bytes(layout, token_bytes)
    left = replace(memory, activation_peak=memory.activation_peak + reserved_bytes)
    useful, for_host = _useful_blocks(config, layout, memory, wanted_len, watermark)
    num_gpu_blocks = _device_blocks(config, layout, left, useful, reserved.buffer_bytes(layout))
    num_cpu_blocks = 0
    split = DeviceSplit(ring_slots=0, resident_blocks=num_gpu_blocks)
    if config.enable_cpu_offload:
        split = split_device(num_gpu_blocks, layout.planes, layout.block_layer_bytes)
        num_cpu_blocks = _host_blocks(config, layout, left, num_gpu_blocks, max(for_host - split.resident_blocks, 0))
    longest = min(wanted_len, longest_sequence(config, layout, split.resident_blocks + num_cpu_blocks, watermark))
    used = NO_LAYERWISE
    if reserved_bytes and num_cpu_blocks:  # else no KV is ever copied
        chunk = config.max_num_batched_tokens
        used = divide_memory(layout, token_bytes, reserved_bytes, longest, chunk, memory.streamed_bytes)
    working_bytes = memory.activation_peak + used.num_bytes(layout, token_bytes)
    return KVPlan(num_gpu_blocks, num_cpu_blocks, split, longest, used, working_bytes)


def _useful_blocks(
    config: EngineConfig, layout: KVLayout, memory: MemoryFacts, wanted_len: int, watermark: float
) -> tuple[int, int]:
    """The most blocks to take where none are named: what max_num_seqs sequences of full length can use.

    On the CPU other programs use the memory too. There it is CPU_KV_BYTES, or one sequence of full length if that is
    more; and with the host's blocks, which are the second number, at most CPU_HOST_SEQUENCES sequences.
    """

    def blocks_of(sequences: int) -> int:
        return int(sequences * layout.groups.most_blocks(wanted_len, config.chunk) * (1 + 2 * watermark)) + 1

    useful = blocks_of(config.max_num_seqs)
    if not memory.tiers_share_memory:
        return useful, useful
    useful = min(useful, max(CPU_KV_BYTES // layout.block_bytes, blocks_of(1)))
    return useful, min(useful, blocks_of(CPU_HOST_SEQUENCES))


def longest_sequence(config: EngineConfig, layout: KVLayout, num_blocks: int, watermark: float) -> int:
    """Tokens of the longest sequence that fits `num_blocks` blocks, of which the share `watermark` stays free."""
    return layout.groups.longest_sequence(num_blocks - int(watermark * num_blocks), config.chunk)


def _layerwise_memory(config: EngineConfig, layout: KVLayout, memory: MemoryFacts, longest: int) -> LayerwiseMemory:
    """Memory for layer-by-layer prefill, so that the longest prompt is prefilled that way if memory allows.

    If KV blocks are sized from the same memory, or kv_cache_memory_bytes is the memory of both, it is at most
    1 / LAYERWISE_SHARE of that, or 1 / WEIGHTS_SHARE, and leaves the smallest cache. If all block counts are given, it
    is what they leave.
    """
    if not config.enable_cpu_offload or not memory.layerwise_token_bytes:
        return NO_LAYERWISE
    left = cache_budget(config, memory)
    part = WEIGHTS_SHARE if memory.streamed_bytes else LAYERWISE_SHARE
    shared = memory.tiers_share_memory
    named_bytes = config.num_bytes("kv_cache_memory_bytes")
    if shared:  # the swap space and the host's blocks are taken from the same memory
        left -= max(0, memory.device_free - memory.host_free)
        left -= max(_named_host_blocks(config, layout), 0) * layout.block_bytes
    if named_bytes is not None:
        share = min(named_bytes // part, named_bytes - fewest_blocks(config, layout) * layout.block_bytes)
        left = share + min(0, left - named_bytes)
    else:
        left -= max(config.num_gpu_blocks, 0) * layout.block_bytes
        if config.num_gpu_blocks == -1 or (shared and _named_host_blocks(config, layout) == -1):
            smallest = MIN_GPU_BLOCKS * layout.block_bytes * (2 if shared else 1)
            left = min(left // part, left - smallest)
    chunk = config.max_num_batched_tokens
    return divide_memory(layout, memory.layerwise_token_bytes, left, longest, chunk, memory.streamed_bytes)


def cache_budget(config: EngineConfig, memory: MemoryFacts) -> int:
    """Device memory for the KV cache: total * gpu_memory_utilization - memory in use - memory of a step."""
    held = memory.device_total - memory.device_free
    return int(memory.device_total * config.gpu_memory_utilization) - held - memory.activation_peak


def _named_host_blocks(config: EngineConfig, layout: KVLayout) -> int:
    """The host blocks of a rank that are asked for; -1 if they are sized from memory."""
    num_bytes = config.num_bytes("kv_offloading_size")
    ranks = config.tensor_parallel_size
    if num_bytes is None:
        return config.num_cpu_blocks
    blocks = num_bytes // ranks // layout.block_bytes
    if blocks < 1:
        of_rank = f" for each of {ranks} ranks" if ranks > 1 else ""
        least = -(-layout.block_bytes * ranks * 10**6 // 2**30) / 10**6
        raise ConfigError(
            f"kv_offloading_size={config.kv_offloading_size}: {num_bytes:,} bytes hold no KV block of "
            f"{layout.block_size} tokens, which takes {layout.block_bytes:,} bytes{of_rank}; raise it to at least "
            f"{least}"
        )
    return blocks


def fewest_blocks(config: EngineConfig, layout: KVLayout) -> int:
    """The fewest blocks of the device: under offload the ring."""
    return -split_device(0, layout.planes).resident_blocks if config.enable_cpu_offload else MIN_GPU_BLOCKS


def _named_device_blocks(config: EngineConfig, layout: KVLayout, buffer_bytes: int) -> int:
    """The device blocks that are asked for; -1 if they are sized from memory."""
    fewest = fewest_blocks(config, layout)
    given = config.num_bytes("kv_cache_memory_bytes")
    if given is not None:
        blocks = (given - buffer_bytes) // layout.block_bytes
        if blocks < fewest:
            least = fewest * layout.block_bytes
            raise ConfigError(
                f"kv_cache_memory_bytes={config.kv_cache_memory_bytes}: the device needs at least {fewest} KV blocks "
                f"of {layout.block_size} tokens, {least:,} bytes; raise kv_cache_memory_bytes to that, or lower "
                "kvcache_block_size"
            )
        return blocks
    if config.enable_cpu_offload and -1 != config.num_gpu_blocks < fewest:
        raise ConfigError(
            f"num_gpu_blocks={config.num_gpu_blocks}: under offload the ring of a model with {layout.planes} "
            f"layers{'' if len(layout.groups) == 1 else ' in a block'} takes {fewest} blocks; raise num_gpu_blocks to "
            "at least that, or use -1"
        )
    return config.num_gpu_blocks


def _device_blocks(config: EngineConfig, layout: KVLayout, memory: MemoryFacts, useful: int, buffer_bytes: int) -> int:
    """blocks = (total * gpu_memory_utilization - memory in use - memory of a step) // bytes per block.

    buffer_bytes: of the layer buffer, which is a part of kv_cache_memory_bytes.
    """
    named = _named_device_blocks(config, layout, buffer_bytes)
    if named != -1:
        _check_blocks_fit(_device_argument(config), config, named, layout, memory.device_free, "the device has")
        return named
    held = memory.device_total - memory.device_free
    budget = cache_budget(config, memory)
    if memory.tiers_share_memory and config.enable_cpu_offload:
        budget //= 2
    blocks = min(budget // layout.block_bytes, useful + MIN_GPU_BLOCKS)
    if blocks < MIN_GPU_BLOCKS:
        raise NoMemoryError(
            f"no memory for the KV cache: of {gib(memory.device_total)} at gpu_memory_utilization="
            f"{config.gpu_memory_utilization}, {gib(held)} are taken and a step needs {gib(memory.activation_peak)}, "
            f"which leaves {gib(max(budget, 0))} for blocks of {gib(layout.block_bytes)}; raise "
            "gpu_memory_utilization, or lower max_num_batched_tokens or kvcache_block_size"
        )
    return blocks


def _host_blocks(config: EngineConfig, layout: KVLayout, memory: MemoryFacts, num_gpu_blocks: int, useful: int) -> int:
    free = memory.host_free
    if memory.tiers_share_memory:
        free -= num_gpu_blocks * layout.block_bytes + memory.activation_peak
    named = _named_host_blocks(config, layout)
    if named != -1:
        if not memory.host_may_grow:
            _check_blocks_fit(_host_argument(config), config, named, layout, free, "the host has")
        return named
    return max(0, min(int(free * config.gpu_memory_utilization) // layout.block_bytes, useful))


def _check_blocks_fit(name: str, config: EngineConfig, blocks: int, layout: KVLayout, free: int, where: str) -> None:
    """name: the argument that asks for the blocks."""
    most = max(free, 0) // layout.block_bytes
    longest = layout.groups.longest_sequence(most, config.chunk)
    tokens = f"{longest} tokens" if longest < ANY_LENGTH else "sequences of any length"
    remedy = f"at most {most} blocks of {layout.block_size} tokens fit, {tokens}"
    what = f"{name}={getattr(config, name)}: its KV cache takes"
    check_fits(what, blocks * layout.block_bytes, free, where, remedy)


def _check_capacity(config: EngineConfig, layout: KVLayout, plan: KVPlan) -> None:
    left = plan.num_sequence_blocks
    if plan.max_model_len < 1:
        names = (_device_argument(config), _host_argument(config))
        given = ", ".join(f"{name}={getattr(config, name)}" for name in names)
        least = layout.groups.most_blocks(1, config.chunk)
        leaves = f"{left}, and a sequence needs {least}" if left else "none for a sequence"
        raise ConfigError(
            f"{given}: the ring takes all KV blocks of {layout.block_size} tokens and leaves {leaves}; "
            f"{larger_cache(config)}"
        )
    if config.max_model_len is not None and plan.max_model_len < config.max_model_len:
        raise ConfigError(
            f"max_model_len={config.max_model_len}: the KV cache holds {left} blocks of {layout.block_size} tokens, "
            f"which is {plan.max_model_len} tokens for the longest sequence; lower max_model_len to that, or "
            f"{larger_cache(config)}"
        )


# ---- what messages advise


def _device_argument(config: EngineConfig) -> str:
    """The engine argument that names the size of the device's KV cache, in the unit that `config` has."""
    return "num_gpu_blocks" if config.kv_cache_memory_bytes is None else "kv_cache_memory_bytes"


def _host_argument(config: EngineConfig) -> str:
    """The same of the host's KV cache."""
    return "num_cpu_blocks" if config.kv_offloading_size is None else "kv_offloading_size"


def larger_cache(config: EngineConfig) -> str:
    """The engine arguments that decide how many tokens the KV cache holds."""
    device_from_memory = config.num_gpu_blocks == -1 and config.kv_cache_memory_bytes is None
    device = "gpu_memory_utilization" if device_from_memory else _device_argument(config)
    smaller = "kv_cache_dtype='int8' halves what a token takes"
    if not config.enable_cpu_offload:
        return f"set enable_cpu_offload=True, or raise {device}; {smaller}"
    host_from_memory = config.num_cpu_blocks == -1 and config.kv_offloading_size is None
    host = "gpu_memory_utilization" if host_from_memory else _host_argument(config)
    names = host if host == device else f"{host} or {device}"
    return f"raise {names}; {smaller}"


def longer_positions(tokens: int, trained: int | None) -> str:
    """The end of a sentence: the argument that extends the positions to `tokens` with YaRN, if it can.

    trained: `Network.yarn_positions`.
    """
    if trained is None or tokens > MOST_YARN * trained:
        return ": the model's authors document no RoPE scaling that reaches further"
    rope = {
        "rope_type": "yarn",
        "factor": float(-(-tokens // trained)),
        "original_max_position_embeddings": trained,
    }
    argument = f"hf_overrides={ {'rope_parameters': rope}!r}"
    return f", or extend them at some cost of accuracy, of short prompts too: {argument}"


# ---- a step


def check_step_fits(network: Network, config: EngineConfig, free: int) -> None:
    """Raise ConfigError if the largest step alone takes more than the `free` bytes that the weights leave.

    Called before that step is run to measure it.
    """
    tokens = config.max_num_batched_tokens
    seqs = config.max_num_seqs
    if not sized_from_memory(config):  # no step has more than all blocks hold
        blocks = config.num_gpu_blocks + max(config.num_cpu_blocks, 0)
        layout = layout_of(config, network)
        blocks //= len(layout.groups)  # each token is in a block of every group
        tokens = min(tokens, blocks * layout.block_size)
        seqs = min(seqs, blocks)
    what = f"max_num_batched_tokens={config.max_num_batched_tokens}, max_num_seqs={config.max_num_seqs}: a step takes"
    least = least_step_bytes(network, tokens, seqs)
    check_fits(what, least, free, "next to the weights the device has", "lower them")


def least_step_bytes(network: Network, tokens: int, seqs: int) -> int:
    """A lower bound in bytes of a step of `tokens` tokens that samples for `seqs` sequences.

    For each token its residual stream, q, k, v and ids; for each sequence its logits.
    """
    row = (network.hidden_size + network.token_features) * network.itemsize + 2 * ID_BYTES
    return tokens * row + min(seqs, tokens) * network.vocab_size * LOGIT_BYTES


def sized_from_memory(config: EngineConfig) -> bool:
    """Whether either tier has no given number of blocks, but what memory or a size in bytes holds."""
    return config.num_gpu_blocks == -1 or (config.enable_cpu_offload and config.num_cpu_blocks == -1)


def needs_activation_peak(config: EngineConfig) -> bool:
    """Whether a tier or layer-by-layer prefill is sized from the memory that a step leaves."""
    return sized_from_memory(config) or config.enable_cpu_offload
