"""The memory of a network that drafts: which engine arguments it has of its own, and how large its KV cache is."""

from __future__ import annotations

from dataclasses import dataclass, replace

from nanovllm.config import MIN_GPU_BLOCKS, EngineConfig, engine_config
from nanovllm.data.memory_checks import check_fits
from nanovllm.data.network import Network
from nanovllm.memory.layout import layout_of
from nanovllm.memory.sizing import MemoryFacts
from nanovllm.speculative_config import SpeculativeConfig, speculative_config

BLOCK_SIZE = 256  # tokens, unless those of the engine are smaller: sequences of all lengths share the blocks
SPARE = 1.05  # of the blocks, for those that the block manager keeps free


@dataclass(frozen=True, slots=True)
class DraftMemory:
    """What a network that drafts takes of the device."""

    what: str  # the beginning of a message, such as "the draft model takes"
    weight_bytes: int
    kv_bytes: int
    longest: int  # tokens of the longest sequence that it drafts for
    row_bytes: int = 0  # of hidden states that it reads

    @property
    def device_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes + self.row_bytes

    def without(self, memory: MemoryFacts) -> MemoryFacts:
        """What is left of the memory. Raises ConfigError if there is too little."""
        taken = self.device_bytes
        remedy = "take a smaller one, or lower the max_model_len of speculative_config"
        check_fits(self.what, taken, memory.device_free, "the device has", remedy)
        shared = taken if memory.tiers_share_memory else 0
        return replace(memory, device_free=memory.device_free - taken, host_free=memory.host_free - shared)


def asked_mtp(config: EngineConfig) -> SpeculativeConfig | None:
    """What the arguments ask of the model's own head; None if they do not ask for it."""
    asked = None if config.speculative_config is None else speculative_config(config.speculative_config)
    return None if asked is None or asked.method != "mtp" else asked


def mtp_memory(config: EngineConfig, asked: SpeculativeConfig, head: Network) -> DraftMemory:
    """Of the head of a model, which is allocated after its KV cache is sized. asked: as of `asked_mtp`."""
    engine, longest = mtp_engine(config, asked, head, config.max_model_len or head.max_model_len)
    return DraftMemory(
        "the head for multi-token prediction takes",
        head.weight_bytes,
        engine.num_gpu_blocks * layout_of(engine, head).block_bytes,
        longest,
        2 * config.max_num_batched_tokens * head.hidden_size * head.itemsize,  # those of a step, and a copy
    )


def mtp_engine(config: EngineConfig, asked: SpeculativeConfig, head: Network, longest: int) -> tuple[EngineConfig, int]:
    """The arguments of the part of an engine with `config` that is the head of its model, as `sized_draft_engine`."""
    engine = draft_engine(config, replace(asked, model=str(config.model)))
    return sized_draft_engine(engine, head, asked, longest)


def draft_engine(config: EngineConfig, asked: SpeculativeConfig) -> EngineConfig:
    """The arguments of the draft model's part of an engine with `config`, before its KV cache has a size."""
    arguments = {
        "dtype": config.dtype,
        "device": config.device,
        "load_format": "dummy" if config.load_format == "dummy" else "auto",
        "seed": config.seed,
        "kvcache_block_size": min(config.kvcache_block_size or BLOCK_SIZE, BLOCK_SIZE),
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "max_num_seqs": config.max_num_seqs,
        "enforce_eager": config.enforce_eager,
        "enable_prefix_caching": config.enable_prefix_caching,
        "enable_cpu_offload": False,
        "swap_space": 0,
        "download_dir": config.download_dir,
        "hf_token": config.hf_token,
    }
    return engine_config(asked.model, arguments)


def sized_draft_engine(
    engine: EngineConfig, network: Network, asked: SpeculativeConfig, longest: int
) -> tuple[EngineConfig, int]:
    """The arguments with the number of KV blocks, and the tokens of the longest sequence that is drafted for.

    network: of the draft model. longest: tokens of the longest sequence of the engine.
    """
    longest = min(longest, network.max_model_len, asked.max_model_len or longest)
    groups = layout_of(engine, network).groups
    blocks = max(MIN_GPU_BLOCKS, int(SPARE * groups.most_blocks(longest, engine.chunk)) + 1)
    return replace(engine, num_gpu_blocks=blocks, max_model_len=longest), longest
