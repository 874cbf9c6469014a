"""Compile every Triton kernel for a GPU that need not be there, as its launcher would launch it; JSON to stdout.

    python triton_compile.py ARCH DTYPE HEAD_DIM...

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
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from nanovllm.ops.attention import AttentionState, KVSegment, SegmentTable
from nanovllm.ops.triton_activation import silu_and_mul_triton
from nanovllm.ops.triton_decode import decode_
from nanovllm.ops.triton_gumbel import draw_triton
from nanovllm.ops.triton_heads import place_heads_triton
from nanovllm.ops.triton_merge import merge_parts_triton
from nanovllm.ops.triton_norm import add_rms_norm_triton_, rms_norm_triton
from nanovllm.ops.triton_prefill import prefill_, prefill_config
from nanovllm.ops.triton_store import store_kv_triton

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
    """What a compiled kernel takes: registers and local memory of a thread, shared memory of a program."""
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
    }


def attention(arch: int, head_dim: int, dtype: torch.dtype) -> Launches:
    """Prefill and decode; decode of one row as well, since the compiler takes a size of 1 for a constant."""
    rows = 200
    q = torch.zeros(rows + 1, HEADS, head_dim, dtype=dtype)
    pool = torch.empty(3, 2, KV_HEADS, BLOCK, head_dim, dtype=dtype)
    one = KVSegment(0, 1, 100, 0, 101, [0])
    table = SegmentTable([one, KVSegment(1, rows, 0, 0, rows, [1, 2])]).on(q.device)
    state = AttentionState.empty(q)
    alone, alone_state = SegmentTable([one]).on(q.device), AttentionState.empty(q[:1, :KV_HEADS])
    config = prefill_config(head_dim, dtype, divmod(arch, 10))
    return {
        "prefill": lambda: prefill_(q, pool, table, state, 0.1, None, config),
        "prefill, window": lambda: prefill_(q, pool, table, state, 0.1, 1024, config),
        "decode": lambda: decode_(q, pool, table, state, 0.1, None),
        "decode, window, ALiBi": lambda: decode_(q, pool, table, state, 0.1, 1024, torch.ones(HEADS)),
        "decode, one row": lambda: decode_(q[:1, :KV_HEADS], pool, alone, alone_state, 0.1, None),
    }


def others(rows: int, head_dim: int, dtype: torch.dtype) -> Launches:
    """Everything beside attention, for this many tokens."""
    x, weight = torch.empty(rows, HEADS * head_dim, dtype=dtype), torch.empty(HEADS * head_dim, dtype=dtype)
    heads = torch.empty(rows, HEADS + 2 * KV_HEADS, head_dim, dtype=dtype)
    q, k, v = (torch.empty(rows, count, head_dim, dtype=dtype) for count in (HEADS, KV_HEADS, KV_HEADS))
    pool = torch.empty(3, 2, KV_HEADS, BLOCK, head_dim, dtype=dtype)
    state = AttentionState.empty(q)
    cos, sin = torch.empty(rows, 1, head_dim), torch.empty(rows, 1, head_dim // 2)
    norm_weight = torch.empty(HEADS + KV_HEADS, head_dim, dtype=dtype)
    slots, scores, tokens = torch.zeros(rows, dtype=torch.int64), torch.empty(rows, 1000), torch.arange(1000)
    return {
        "merge": lambda: merge_parts_triton(state.out, state.lse, state.out, state.lse, q[None], state.lse[None]),
        "store_kv": lambda: store_kv_triton(pool, k, v, slots),
        "rms_norm": lambda: rms_norm_triton(x, weight, 1e-6),
        "add_rms_norm": lambda: add_rms_norm_triton_(x, x, weight, 1e-6),
        "heads": lambda: place_heads_triton(heads, norm_weight, 1e-6, cos, sin, q, k, v),
        "silu_and_mul": lambda: silu_and_mul_triton(x),
        "draw": lambda: draw_triton(scores, tokens, slots),
    }


def main() -> None:
    arch, dtype, head_dims = int(sys.argv[1]), getattr(torch, sys.argv[2]), [int(text) for text in sys.argv[3:]]
    driver.set_active(NoDriver(arch))
    table: list[dict[str, Any]] = []
    for head_dim in head_dims:
        launches = attention(arch, head_dim, dtype) | others(200, head_dim, dtype)
        launches |= {f"{name}, one row": launch for name, launch in others(1, head_dim, dtype).items()}
        for name, launch in launches.items():
            compiled: list[Any] = []

            def compile_only(self: JITFunction, grid: object, compiled: list[Any] = compiled) -> object:
                return lambda *args, **options: compiled.append(self.run(*args, grid=grid, warmup=True, **options))

            JITFunction.__getitem__ = compile_only
            launch()
            for kernel in compiled:
                row = {"launch": name, "kernel": kernel.name, "head_dim": head_dim, "dtype": sys.argv[2]}
                table.append(row | resources(kernel))
    json.dump(table, sys.stdout)


if __name__ == "__main__":
    main()
