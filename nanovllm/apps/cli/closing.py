"""What a command says at its end on a terminal: where KV was, what was copied, what to do about cut answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from nanovllm.features.progress_bar import of
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm import LLM, KVStats


def kv_line(stats: KVStats, tokens: int) -> str:
    """Where the KV of so many tokens was, such as `5,789 tokens: at most 29.5 MB of KV on the device, 113 MB out, ...`.

    Tokens whose KV was shared or freed take less than that.
    """
    blocks = min(-(-tokens // stats.block_size), stats.resident_blocks)
    parts = [f"at most {_size(blocks * stats.bytes_per_block)} of KV on the device"]
    moved = stats.transfers
    if moved.d2h_bytes or moved.h2d_bytes:
        parts += [f"{_size(moved.d2h_bytes)} copied out to the host", f"{_size(moved.h2d_bytes)} copied in"]
    if moved.cpu_attention_bytes:
        parts.append(f"the CPU attended to {_size(moved.cpu_attention_bytes)}")
    return f"{tokens:,} tokens: {', '.join(parts)}"


def cut_hints(llm: LLM, total: int, at_default: int, plain: int) -> Iterator[str]:
    """What to do about cut answers: of `total`, how many were cut at the default, and how many had no chat template."""
    if at_default:
        default = SamplingParams.max_tokens
        yield f"{of(at_default, total)} cut at the default of {default} tokens: --max-tokens 200 allows more"
    if plain and getattr(llm.get_tokenizer(), "chat_template", None):
        yield "the model has a chat template, and plain text was completed: --chat asks it as a user would"


def _size(num_bytes: int) -> str:
    """Such as `29.5 MB`, `113 MB` or `6.8 GB`."""
    value, unit = (num_bytes / 1e9, "GB") if num_bytes >= 1e9 else (num_bytes / 1e6, "MB")
    return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.1f} {unit}"
