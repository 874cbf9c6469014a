"""The memory of a draft model: which engine arguments it has of its own, and how large its KV cache is."""

from __future__ import annotations

from dataclasses import replace

from nanovllm.config import MIN_GPU_BLOCKS, EngineConfig, engine_config
from nanovllm.memory.layout import layout_of
from nanovllm.models.spec import DecoderSpec
from nanovllm.speculative_config import SpeculativeConfig

BLOCK_SIZE = 256  # tokens, unless those of the engine are smaller: sequences of all lengths share the blocks
SPARE = 1.05  # of the blocks, for those that the block manager keeps free


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
    engine: EngineConfig, spec: DecoderSpec, asked: SpeculativeConfig, longest: int
) -> tuple[EngineConfig, int]:
    """The arguments with the number of KV blocks, and the tokens of the longest sequence that is drafted for.

    spec: of the draft model. longest: tokens of the longest sequence of the engine.
    """
    longest = min(longest, spec.max_model_len, asked.max_model_len or longest)
    groups = layout_of(engine, spec, 2).groups  # sizes in tokens do not depend on bytes: the block size is given
    blocks = max(MIN_GPU_BLOCKS, int(SPARE * groups.most_blocks(longest, engine.chunk)) + 1)
    return replace(engine, num_gpu_blocks=blocks, max_model_len=longest), longest
