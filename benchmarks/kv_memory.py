"""The KV memory that a long prompt holds, beside the formula and beside every layer's K and V of all tokens.

    python -m benchmarks.kv_memory [--model gemma-4-31b gpt-oss-120b] [--prompt-len 32768] [--output-json FILE]

A network has the layers, windows and proportions of KV heads of a published one, but small heads and matrices, so that
a long prompt takes a minute. Its weights are random. Of a KV cache with exactly the blocks that the formula asks for,
the blocks held in the fullest step are counted. The exit status is 1 if a request did not run to its end in them.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import Any

from benchmarks.report import machine_facts, write_json
from benchmarks.shapes import Shape, open_shape
from nanovllm import LLM, SamplingParams
from nanovllm.config import MIN_GPU_BLOCKS
from nanovllm.data.batch import Batch, StepResult
from nanovllm.data.kv_groups import HOLE
from nanovllm.engine.block_manager import WATERMARK
from nanovllm.memory.layout import KVLayout

HEADS = ("num_attention_heads", "num_key_value_heads", "num_global_key_value_heads")
# of the small network; heads of another size keep their proportion
HEAD_DIM = 16
EXPERTS = 4
SMALL = {"hidden_size": 64, "intermediate_size": 32, "vocab_size": 512, "num_local_experts": EXPERTS}


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes of one request. allocated: for exactly the blocks that it may need; peak: held in the fullest step."""

    model: str
    groups: str
    tokens: int
    chunk: int
    block_size: str
    formula: int  # K and V that layers see, see `KVLayout.held_bytes`
    peak: int
    allocated: int
    whole: int  # every layer keeps all tokens
    preemptions: int
    of_published_sizes: tuple[int, int]  # formula and whole with the published heads, in the model's dtype


def small_config(config: dict[str, Any], positions: int) -> dict[str, Any]:
    """The same layers with small heads and matrices, for at least `positions` positions."""
    fewer = gcd(*(config[name] for name in HEADS if config.get(name)))
    narrower = config["head_dim"] // HEAD_DIM
    small = {name: value for name, value in config.items() if name != "quantization_config"}
    small |= {name: value for name, value in SMALL.items() if name in config}
    small |= {name: config[name] // fewer for name in HEADS if config.get(name)}
    small |= {name: config[name] // narrower for name in ("head_dim", "global_head_dim") if name in config}
    return small | {"max_position_embeddings": max(positions, config["max_position_embeddings"])}


def held(published: Shape, prompt_len: int, output_len: int, chunk: int, block_size: int) -> Held:
    """Run one prompt in as many blocks as it may need."""
    tokens = prompt_len + output_len - 1  # the last token's K and V are never computed
    config = small_config(json.loads((published.path / "config.json").read_text()), prompt_len + output_len)
    with tempfile.TemporaryDirectory(prefix="nanovllm-bench-") as directory:
        (Path(directory) / "config.json").write_text(json.dumps(config))
        with open_shape(directory, None, "bfloat16") as small:
            layout = small.network.layout(block_size)
            num_blocks = layout.groups.most_blocks(prompt_len + output_len, chunk)
            num_blocks = max(MIN_GPU_BLOCKS, num_blocks + 1 + int(WATERMARK * num_blocks / (1 - WATERMARK)))
            peak, preemptions, allocated = run(small, num_blocks, chunk, block_size, prompt_len, output_len)
    published_layout = published.network.layout(block_size)
    return Held(
        model=published.name,
        groups=str(layout.groups),
        tokens=tokens,
        chunk=chunk,
        block_size=layout.groups.block_sizes,
        formula=layout.held_bytes(tokens, chunk),
        peak=peak * layout.block_bytes,
        allocated=allocated,
        whole=whole(layout, tokens),
        preemptions=preemptions,
        of_published_sizes=(published_layout.held_bytes(tokens, chunk), whole(published_layout, tokens)),
    )


def whole(layout: KVLayout, tokens: int) -> int:
    """K and V of all tokens in every layer."""
    return tokens * layout.token_bytes


def run(
    shape: Shape, num_blocks: int, chunk: int, block_size: int, prompt_len: int, output_len: int
) -> tuple[int, int, int]:
    """Most blocks held in a step, preemptions, and bytes allocated."""
    arguments = {"load_format": "dummy", "skip_tokenizer_init": True, "max_num_seqs": 1, "enable_prefix_caching": False}
    sizes = {"num_gpu_blocks": num_blocks, "kvcache_block_size": block_size, "max_num_batched_tokens": chunk}
    with LLM(str(shape.path), device="cpu", dtype="bfloat16", **arguments, **sizes) as llm:
        peak = 0
        execute = llm.engine.executor.execute

        def watched(batch: Batch) -> StepResult:
            nonlocal peak
            tables = (table for seq in batch.sequences for table in seq.block_tables)
            peak = max(peak, sum(block != HOLE for table in tables for block in table))
            return execute(batch)

        llm.engine.executor.execute = watched  # type: ignore[method-assign]
        params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
        llm.generate(shape.prompts(1, prompt_len, seed=0), params, use_tqdm=False)
        metrics = llm.metrics()
        return peak, metrics.preemptions_by_recompute + metrics.preemptions_by_swap, llm.kv_stats().device_bytes


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", nargs="+", default=["gemma-4-31b", "gpt-oss-120b"], help="published configs (default: %(default)s)")
    add("--prompt-len", type=int, default=32_768, help="tokens (default: %(default)s)")
    add("--output-len", type=int, default=16, help="tokens (default: %(default)s)")
    add("--max-num-batched-tokens", type=int, default=2048, help="tokens in a chunk (default: %(default)s)")
    add("--block-size", type=int, default=256, help="tokens in a block (default: %(default)s)")
    add("--output-json", type=Path)
    args = parser.parse_args(argv)
    results = []
    for model in args.model:
        with open_shape(model, None, "bfloat16") as shape:
            sizes = (args.prompt_len, args.output_len, args.max_num_batched_tokens, args.block_size)
            results.append(found := held(shape, *sizes))
        print(f"{found.model}: {found.groups}; {found.tokens:,} tokens, chunks of {found.chunk:,}")
        for name in ("formula", "peak", "allocated", "whole"):
            number = getattr(found, name)
            print(f"  {name:10} {number:>14,} bytes   {number / found.whole:6.1%}")
        formula, all_layers = found.of_published_sizes
        print(f"  with the published heads by the formula {formula / 2**30:.2f} of {all_layers / 2**30:.2f} GiB")
    write_json(args.output_json, args, machine_facts("cpu"), results=results)
    return 0 if all(found.preemptions == 0 and found.peak <= found.allocated for found in results) else 1


if __name__ == "__main__":
    sys.exit(main())
