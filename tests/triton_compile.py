"""Compile every Triton kernel for a GPU that need not be there, as its launcher would launch it; JSON to stdout.

    python triton_compile.py ARCH DTYPE HEAD_DIM...
    python triton_compile.py ARCH DTYPE HEAD_DIM... --variants    what a sweep tries, and nothing else
    python triton_compile.py ARCH DTYPE HEAD_DIM... --counts      many batches, a row for each kernel compiled

The launchers run with CPU tensors, whose types, alignment and sizes are all that the compiler looks at. To be run with
TRITON_INTERPRET unset.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import triton
from packed_cases import random_weight
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from nanovllm.ops import triton_packed, triton_rows
from nanovllm.ops.attention import AttentionMetadata, AttentionState, SequenceMetadata
from nanovllm.ops.kernel_config import prefill_config
from nanovllm.ops.packed_weights import PackedWeight
from nanovllm.ops.triton_decode import decode_
from nanovllm.ops.triton_experts import grouped_linear, weighted_sum
from nanovllm.ops.triton_merge import merge_parts_triton
from nanovllm.ops.triton_prefill import prefill_

Launches = dict[str, Callable[[], object]]
BLOCK, HEADS, KV_HEADS = 4096, 8, 2


class NoDriver:
    """What a launch asks of the driver before it compiles."""

    def __init__(self, arch: int) -> None:
        self._target = GPUTarget("cuda", arch, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


def resources(kernel: Any) -> dict[str, Any]:
    """What a compiled kernel takes: registers and local memory of a thread, shared memory of a program; its loops, and
    how many loads may still be on their way where it waits for others."""
    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [cuobjdump, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return {
        "registers": found["REG"],
        "spilled": found["STACK"] + found["LOCAL"],
        "shared": kernel.metadata.shared,
        "threads": kernel.metadata.num_warps * 32,
        "loops": kernel.asm["ttgir"].count("scf.for "),
        "loads_in_flight": max(map(int, re.findall(r"async_wait.*{num = (\d+)", kernel.asm["ttgir"])), default=0),
    }


def attention(arch: int, head_dim: int, dtype: torch.dtype) -> Launches:
    """Prefill and decode; decode without grouped heads as well, since the compiler takes a size of 1 for a constant."""
    rows = 200
    q = torch.zeros(rows + 1, HEADS, head_dim, dtype=dtype)
    pool = torch.empty(3, 2, KV_HEADS, BLOCK, head_dim, dtype=dtype)
    one = SequenceMetadata(0, 1, 100, 0, 101, [0])
    table = AttentionMetadata([one, SequenceMetadata(1, rows, 0, 0, rows, [1, 2])]).on(q.device)
    state = AttentionState.empty(q)
    alone, alone_state = AttentionMetadata([one]).on(q.device), AttentionState.empty(q[:1, :KV_HEADS])
    config = prefill_config(head_dim, dtype, divmod(arch, 10))
    return {
        "prefill": lambda: prefill_(q, pool, table, state, 0.1, None, config),
        "prefill, window": lambda: prefill_(q, pool, table, state, 0.1, 1024, config),
        "decode": lambda: decode_(q, pool, table, state, 0.1, None),
        "decode, window, ALiBi": lambda: decode_(q, pool, table, state, 0.1, 1024, torch.ones(HEADS)),
        "decode, one row": lambda: decode_(q[:1, :KV_HEADS], pool, alone, alone_state, 0.1, None),
    }


def variants(arch: int, head_dim: int, dtype: torch.dtype) -> Launches:
    """Every configuration that a sweep tries, by its fields."""
    sys.path.append(str(Path(__file__).parent.parent))
    from benchmarks.kernel_variants import decode_variants, prefill_variants

    q, pool = torch.zeros(201, HEADS, head_dim, dtype=dtype), torch.empty(3, 2, KV_HEADS, BLOCK, head_dim, dtype=dtype)
    few = AttentionMetadata([SequenceMetadata(0, 1, 100, 0, 101, [0])]).on(q.device)
    many = AttentionMetadata([SequenceMetadata(1, 200, 0, 0, 200, [1, 2])]).on(q.device)
    state = AttentionState.empty(q)
    found: Launches = {}
    for prefill in prefill_variants(head_dim, dtype, divmod(arch, 10)):
        found[json.dumps({"prefill": asdict(prefill)})] = lambda c=prefill: prefill_(q, pool, many, state, 0.1, None, c)
    for decode in decode_variants(head_dim, dtype):
        found[json.dumps({"decode": asdict(decode)})] = lambda c=decode: decode_(
            q, pool, few, state, 0.1, None, None, c
        )
    return found


def counts(head_dim: int, dtype: torch.dtype) -> Launches:
    """Batches that differ in everything that differs from step to step, through every kernel."""
    pool = torch.empty(40, 2, KV_HEADS, 16, head_dim, dtype=dtype)
    found: Launches = {}
    for few, many, blocks in ((1, 0, 1), (2, 0, 3), (16, 0, 16), (17, 0, 17), (0, 1, 6), (3, 2, 7), (32, 1, 32)):

        def launch(few: int = few, many: int = many, blocks: int = blocks) -> None:
            rows = few + 81 * many
            q, k = torch.zeros(rows, HEADS, head_dim, dtype=dtype), torch.zeros(rows, KV_HEADS, head_dim, dtype=dtype)
            state, end = AttentionState.empty(q), 16 * blocks - 3
            sequences = [SequenceMetadata(i, 1, end - 1, 0, end, range(blocks)) for i in range(few)]
            sequences += [SequenceMetadata(few + 81 * i, 81, end - 81, 0, end, range(blocks)) for i in range(many)]
            table = AttentionMetadata(sequences).on(q.device)
            decode_(q, pool, table, state, 0.1, None)
            prefill_(q, pool, table, state, 0.1, None)
            merge_parts_triton(state.out, state.lse, state.out, state.lse, q[None], state.lse[None])
            merge_parts_triton(
                state.out[1:], state.lse[:, 1:], state.out[1:], state.lse[:, 1:], q[None, 1:], state.lse[None, :, 1:]
            )
            triton_rows.store_kv(pool, k, k, torch.zeros(rows, dtype=torch.int64))
            triton_rows.draw(
                torch.empty(rows, 1000 + rows), torch.arange(1000 + rows), torch.zeros(rows, dtype=torch.int64)
            )

        found[f"{few} rows of decode, {many} chunks, {blocks} blocks"] = launch
    return found


def others(rows: int, head_dim: int, dtype: torch.dtype) -> Launches:
    """Everything beside attention, for this many tokens."""
    x, weight = torch.empty(rows, HEADS * head_dim, dtype=dtype), torch.empty(HEADS * head_dim, dtype=dtype)
    heads = torch.empty(rows, HEADS + 2 * KV_HEADS, head_dim, dtype=dtype)
    q, k, v = (torch.empty(rows, count, head_dim, dtype=dtype) for count in (HEADS, KV_HEADS, KV_HEADS))
    pool = torch.empty(3, 2, KV_HEADS, BLOCK, head_dim, dtype=dtype)
    state = AttentionState.empty(q)
    cos, sin = torch.empty(rows, 1, head_dim), torch.empty(rows, 1, head_dim // 2)
    norm_weight = torch.empty(HEADS + KV_HEADS, head_dim, dtype=dtype)
    packed = {
        variant: random_weight(variant, 1024, HEADS * head_dim)
        for variant in ("int4", "int4 zeros", "int8 zeros", "fp8 channel", "fp8 blocks")
    }
    slots, scores, tokens = torch.zeros(rows, dtype=torch.int64), torch.empty(rows, 1000), torch.arange(1000)
    return {
        "merge": lambda: merge_parts_triton(state.out, state.lse, state.out, state.lse, q[None], state.lse[None]),
        "store_kv": lambda: triton_rows.store_kv(pool, k, v, slots),
        "rms_norm": lambda: triton_rows.rms_norm(x, weight, 1e-6),
        "add_rms_norm": lambda: triton_rows.add_rms_norm_(x, x, weight, 1e-6),
        "heads": lambda: triton_rows.place_heads(heads, norm_weight, 1e-6, cos, sin, q, k, v),
        "rms_norm, fp32 weights": lambda: triton_rows.rms_norm(x, weight.float(), 1e-6),
        "heads, fp32 weights": lambda: triton_rows.place_heads(heads, norm_weight.float(), 1e-6, cos, sin, q, k, v),
        "silu_and_mul": lambda: triton_rows.silu_and_mul(x),
        "gelu_tanh_and_mul": lambda: triton_rows.gelu_tanh_and_mul(x),
        "draw": lambda: triton_rows.draw(scores, tokens, slots),
        **{f"packed {variant}": lambda w=weight: multiply(x, w) for variant, weight in packed.items()},
        **experts(rows, head_dim, dtype),
    }


def experts(rows: int, width: int, dtype: torch.dtype) -> Launches:
    """The products of 2 of 8 experts for each row, and the sum of their outputs."""
    x, weights = torch.empty(rows, width, dtype=dtype), torch.empty(8, 3 * width, width, dtype=dtype)
    entries, ends = torch.zeros(2 * rows, dtype=torch.int64), torch.zeros(8, dtype=torch.int64)
    y, of_rows = torch.empty(2 * rows, width, dtype=dtype), torch.empty(rows, 2)
    return {
        "experts": lambda: grouped_linear(x, weights, ends, entries),
        "experts, own rows": lambda: grouped_linear(y, weights, ends),
        "experts, weighted sum": lambda: weighted_sum(y, entries.view(rows, 2), of_rows),
    }


def multiply(x: Tensor, weight: PackedWeight) -> None:
    """As `packed_weights.packed_linear` does on CUDA."""
    assert weight.scales is not None
    group_size = weight.group_size if weight.scales.shape[1] > 1 else weight.in_features
    triton_packed.packed_linear(x, weight.scheme, weight.data, weight.scales, weight.zeros, group_size)


def main() -> None:
    arch, dtype = int(sys.argv[1]), getattr(torch, sys.argv[2])
    head_dims = [int(text) for text in sys.argv[3:] if not text.startswith("--")]
    driver.set_active(NoDriver(arch))
    table: list[dict[str, Any]] = []
    for head_dim in head_dims:
        if "--variants" in sys.argv:
            launches = variants(arch, head_dim, dtype)
        elif "--counts" in sys.argv:
            launches = counts(head_dim, dtype)
        else:
            launches = attention(arch, head_dim, dtype) | others(200, head_dim, dtype)
            launches |= {f"{name}, one row": launch for name, launch in others(1, head_dim, dtype).items()}
        seen: set[str] = set()
        for name, launch in launches.items():
            for kernel in compiled_by(launch):
                row = {"launch": name, "kernel": kernel.name, "head_dim": head_dim, "dtype": sys.argv[2]}
                if "--counts" not in sys.argv:
                    table.append(row | resources(kernel))
                elif kernel.hash not in seen:
                    table.append(row)
                seen.add(kernel.hash)
    json.dump(table, sys.stdout)


def compiled_by(launch: Callable[[], object]) -> list[Any]:
    """The kernels that it launches, compiled and not run."""
    compiled: list[Any] = []

    def compile_only(self: JITFunction, grid: object) -> object:
        return lambda *args, **options: compiled.append(self.run(*args, grid=grid, warmup=True, **options))

    JITFunction.__getitem__ = compile_only
    launch()
    return compiled


if __name__ == "__main__":
    main()
