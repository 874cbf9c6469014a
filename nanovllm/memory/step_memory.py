"""What is known of a step's memory before any step runs. No torch."""

from __future__ import annotations

from nanovllm.config import EngineConfig
from nanovllm.data.memory_checks import check_fits
from nanovllm.memory.layout import layout_of
from nanovllm.models.spec import DecoderSpec

ID_BYTES = 8  # of a token id or position
LOGIT_BYTES = 4


def check_step_fits(spec: DecoderSpec, itemsize: int, config: EngineConfig, free: int) -> None:
    """Raise ConfigError if the largest step alone takes more than the `free` bytes that the weights leave.

    Called before that step is run to measure it. itemsize: bytes of an element of the model's dtype.
    """
    tokens, seqs = config.max_num_batched_tokens, config.max_num_seqs
    if not sized_from_memory(config):  # no step has more than all blocks hold
        blocks = config.num_gpu_blocks + max(config.num_cpu_blocks, 0)
        block_size = layout_of(config, spec, itemsize).block_size
        tokens, seqs = min(tokens, blocks * block_size), min(seqs, blocks)
    what = f"max_num_batched_tokens={config.max_num_batched_tokens}, max_num_seqs={config.max_num_seqs}: a step takes"
    least = least_step_bytes(spec, itemsize, tokens, seqs)
    check_fits(what, least, free, "next to the weights the device has", "lower them")


def least_step_bytes(spec: DecoderSpec, itemsize: int, tokens: int, seqs: int) -> int:
    """A lower bound in bytes of a step of `tokens` tokens that samples for `seqs` sequences.

    For each token its residual stream, q, k, v and ids; for each sequence its logits.
    """
    row = (spec.hidden_size + spec.q_size + 2 * spec.kv_size) * itemsize + 2 * ID_BYTES
    return tokens * row + min(seqs, tokens) * spec.vocab_size * LOGIT_BYTES


def sized_from_memory(config: EngineConfig) -> bool:
    """Whether either tier has no given number of blocks, but what memory or a size in bytes holds."""
    return config.num_gpu_blocks == -1 or (config.enable_cpu_offload and config.num_cpu_blocks == -1)


def needs_activation_peak(config: EngineConfig) -> bool:
    """Whether a tier or layer-by-layer prefill is sized from the memory that a step leaves."""
    return sized_from_memory(config) or config.enable_cpu_offload
