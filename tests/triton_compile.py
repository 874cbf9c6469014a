"""Compile every Triton kernel for a GPU that need not be there, as its launcher would launch it; JSON to stdout.

    python triton_compile.py ARCH DTYPE HEAD_DIM...               every launch of the engine
    python triton_compile.py ARCH DTYPE HEAD_DIM... --few         those for many rows and blocks of whole tiles
    python triton_compile.py ARCH DTYPE HEAD_DIM... --only=NAME   those whose names begin so
    python triton_compile.py ARCH DTYPE HEAD_DIM... --variants    what a sweep tries, and nothing else
    python triton_compile.py ARCH DTYPE HEAD_DIM... --variants --few    every third of them
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
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import triton
from packed_cases import VARIANTS, random_weight
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from nanovllm.data.network import ExpertSpec, RecurrentSpec
from nanovllm.layers.state_rows import runs_of_rows
from nanovllm.ops import triton_delta, triton_delta_chunks, triton_gguf, triton_packed, triton_rows, triton_unpack
from nanovllm.ops.attention import AttentionMetadata, AttentionState, SequenceMetadata
from nanovllm.ops.delta_inputs import DecayWeights
from nanovllm.ops.gguf_planes import PLANES
from nanovllm.ops.kernel_config import FEW_ROWS, FewRowsConfig, prefill_config
from nanovllm.ops.kv_quantization import LARGEST, SCALE_BYTES, dtype_name, has_scales
from nanovllm.ops.merge import MAX_PARTS
from nanovllm.ops.packed_weights import PackedWeight
from nanovllm.ops.triton_decode import decode_, decode_whole
from nanovllm.ops.triton_experts import grouped_linear, weighted_sum
from nanovllm.ops.triton_few_rows import few_rows_linear
from nanovllm.ops.triton_kv import quantize_rows_triton
from nanovllm.ops.triton_lora import FIELDS, add_low_rank_
from nanovllm.ops.triton_merge import merge_parts_triton
from nanovllm.ops.triton_prefill import prefill_
from nanovllm.ops.triton_routing import route
from nanovllm.ops.triton_segments import gather_, merge_segments_

sys.path.append(str(Path(__file__).parent.parent))
from benchmarks.kernel_variants import decode_variants, few_rows_variants, prefill_variants

Launches = dict[str, Callable[[], object]]
BLOCK = 4096
HEADS = 8
KV_HEADS = 2
FEW = 3  # of so many variants one is compiled: no field has so many values in turn


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
    how many loads may still be on their way where it waits for others; see also `fused_over_lanes`."""
    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [cuobjdump, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    numbers = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return {
        "registers": numbers["REG"],
        "spilled": numbers["STACK"] + numbers["LOCAL"],
        "shared": kernel.metadata.shared,
        "threads": kernel.metadata.num_warps * 32,
        "loops": kernel.asm["ttgir"].count("scf.for "),
        "loads_in_flight": max(map(int, re.findall(r"async_wait.*{num = (\d+)", kernel.asm["ttgir"])), default=0),
        "fused_over_lanes": fused_over_lanes(kernel.asm["ptx"]),
    }


def fused_over_lanes(ptx: str) -> int:
    """How often a product is added to a value of another lane without being rounded, unlike what that lane adds: lanes
    then differ in the last bit of a sum that they all have."""
    from_others = set(re.findall(r"shfl\.sync\.\S+\s+(%\w+)", ptx))
    return sum(addend in from_others for addend in re.findall(r"fma\.\S+\s+%\w+, \S+, \S+, (%\w+);", ptx))


def attention(arch: int, head_dim: int, dtype: torch.dtype, kv: torch.dtype | None = None) -> Launches:
    """Prefill and decode over KV blocks of dtype `kv`; decode without grouped heads as well, since the compiler takes a
    size of 1 for a constant."""
    rows = 200
    q = torch.zeros(rows + 1, HEADS, head_dim, dtype=dtype)
    pool = empty_pool(head_dim, kv or dtype)
    one = SequenceMetadata(0, 1, 100, 0, 101, [0])
    table = AttentionMetadata([one, SequenceMetadata(1, rows, 0, 0, rows, [1, 2])]).on(q.device)
    state = AttentionState.empty(q)
    alone = AttentionMetadata([one]).on(q.device)
    alone_state = AttentionState.empty(q[:1, :KV_HEADS])
    uneven = empty_pool(head_dim, kv or dtype, BLOCK - 8)  # blocks that are no whole number of tiles
    small = empty_pool(head_dim, kv or dtype, 256)
    config = prefill_config(head_dim, dtype, divmod(arch, 10))
    launches: Launches = {
        "prefill": lambda: prefill_(q, pool, table, state, 0.1, None, config),
        "prefill, window": lambda: prefill_(q, pool, table, state, 0.1, 1024, config),
        "prefill, uneven blocks": lambda: prefill_(q, uneven, table, state, 0.1, None, config),
        "decode": lambda: decode_(q, pool, table, state, 0.1, None),
        "decode, window, ALiBi": lambda: decode_(q, pool, table, state, 0.1, 1024, torch.ones(HEADS)),
        "decode without a state": lambda: decode_whole(q, pool, table, q, 0.1, None),
        "decode without a state, blocks of 256": lambda: decode_whole(q, small, table, q, 0.1, None, torch.ones(HEADS)),
        "decode, one row": lambda: decode_(q[:1, :KV_HEADS], pool, alone, alone_state, 0.1, None),
    }
    return {name if kv is None else f"{name}, {dtype_name(kv)} KV": launch for name, launch in launches.items()}


def empty_pool(head_dim: int, kv: torch.dtype, block: int = BLOCK) -> Tensor:
    row = head_dim + (SCALE_BYTES if has_scales(kv) else 0)
    return torch.empty(3, 2, KV_HEADS, block, row, dtype=kv)


def variants(arch: int, head_dim: int, dtype: torch.dtype) -> Launches:
    """Every configuration that a sweep tries, by its fields."""
    q = torch.zeros(201, HEADS, head_dim, dtype=dtype)
    pool = torch.empty(3, 2, KV_HEADS, BLOCK, head_dim, dtype=dtype)
    few = AttentionMetadata([SequenceMetadata(0, 1, 100, 0, 101, [0])]).on(q.device)
    many = AttentionMetadata([SequenceMetadata(1, 200, 0, 0, 200, [1, 2])]).on(q.device)
    state = AttentionState.empty(q)
    launches: Launches = {}
    for prefill in prefill_variants(head_dim, dtype, divmod(arch, 10)):
        launches[json.dumps({"prefill": asdict(prefill)})] = lambda c=prefill: prefill_(
            q, pool, many, state, 0.1, None, c
        )
    for decode in decode_variants(head_dim, dtype):
        launches[json.dumps({"decode": asdict(decode)})] = lambda c=decode: decode_(
            q, pool, few, state, 0.1, None, None, c
        )
    x = torch.zeros(8, 4096, dtype=dtype)
    weight = torch.zeros(4096, 4096, dtype=dtype)
    for product in few_rows_variants():
        launches[json.dumps({"few_rows": asdict(product)})] = lambda c=product: few_rows_linear(x, weight, None, c)
    return launches


def counts(head_dim: int, dtype: torch.dtype) -> Launches:
    """Batches that differ in everything that differs from step to step, through every kernel in one configuration."""
    pool = torch.empty(40, 2, KV_HEADS, 16, head_dim, dtype=dtype)
    memory = torch.empty(4, 4096, dtype=dtype)
    table_of_adapters = torch.zeros(4, 3, FIELDS, dtype=torch.int64)
    packed_weight = random_weight("int4 zeros", 64, 1024)
    weights = torch.empty(32, 64, 64, dtype=dtype)
    packed_experts = random_weight("mxfp4", 32 * 64, 64)
    planes = random_weight("q4_k", 64, 1024).in_planes()
    launches: Launches = {}
    for few, many, blocks in ((1, 0, 1), (2, 0, 3), (16, 0, 16), (17, 0, 17), (0, 1, 6), (3, 2, 7), (32, 1, 32)):

        def launch(few: int = few, many: int = many, blocks: int = blocks) -> None:
            rows = few + 81 * many
            heads = torch.zeros(rows, HEADS + 2 * KV_HEADS, head_dim, dtype=dtype)
            q = heads.new_zeros(rows, HEADS, head_dim)
            k = heads.new_zeros(rows, KV_HEADS, head_dim)
            state = AttentionState.empty(q)
            end = 16 * blocks - 3
            sequences = [SequenceMetadata(i, 1, end - 1, 0, end, range(blocks)) for i in range(few)]
            sequences += [SequenceMetadata(few + 81 * i, 81, end - 81, 0, end, range(blocks)) for i in range(many)]
            table = AttentionMetadata(sequences).on(q.device)
            decode_(q, pool, table, state, 0.1, None)
            prefill_(q, pool, table, state, 0.1, None)
            merge_parts_triton(state.out, state.lse, state.out, state.lse, q[None], state.lse[None])
            sides = [(q, state.lse.clone())] * 2
            merge_segments_(state.out, state.lse, sides)
            merge_segments_(state.out[1:], state.lse[:, 1:], [(o[1:], side[:, 1:]) for o, side in sides])
            gather_(pool, torch.zeros(few + many, 3, dtype=torch.int32), q.new_empty(1, 2, KV_HEADS, 640, head_dim))
            merge_parts_triton(
                state.out[1:], state.lse[:, 1:], state.out[1:], state.lse[:, 1:], q[None, 1:], state.lse[None, :, 1:]
            )
            numbers = torch.zeros(rows, dtype=torch.int64)
            triton_rows.store_kv(pool, k, k, numbers)
            quantize_rows_triton(k, torch.int8)
            triton_rows.draw(torch.empty(rows, 1000 + rows), torch.arange(1000 + rows), numbers)
            x = q[:, 0]
            angles = torch.empty(rows, 1, head_dim)
            triton_rows.rms_norm(x, x[0], 1e-6)
            triton_rows.silu_and_mul(x)
            triton_rows.place_heads(heads, heads[0, KV_HEADS:], 1e-6, angles, angles[..., ::2].contiguous(), q, k, k)
            few_rows_linear(k[:FEW_ROWS, 0, :64], weights[0], None, FewRowsConfig(16, 32, 1, 2))
            multiply(torch.empty(min(rows, 8), 1024, dtype=dtype), packed_weight)
            dequantize_(torch.empty(64, 1024, dtype=dtype), packed_weight)
            triton_gguf.gguf_linear(torch.empty(min(rows, 8), 1024, dtype=dtype), planes)
            triton_gguf.gguf_dequantize_(planes, torch.empty(rows, 1024, dtype=dtype), numbers)
            y = grouped_linear(k[:, 0, :64], weights, torch.zeros(32, dtype=torch.int64), numbers)
            weighted_sum(y, torch.zeros(rows, 2, dtype=torch.int64), torch.zeros(rows, 2))
            grouped_linear(k[:, 0, :64], packed_experts, torch.zeros(32, dtype=torch.int64), numbers)
            route(ExpertSpec(32, 2), x[:, :32].contiguous())
            of_adapters = torch.zeros(4 + rows, dtype=torch.int64)  # beginning at addresses of any alignment
            for run in recurrent(rows, dtype).values():
                run()
            add_low_rank_(y, y, memory, table_of_adapters, of_adapters[4 - few % 2 :][:rows], of_adapters[:4], 16)

        launches[f"{few} rows of decode, {many} chunks, {blocks} blocks"] = launch
    return launches


def others(rows: int, head_dim: int, dtype: torch.dtype) -> Launches:
    """Everything beside attention and products, for this many tokens."""
    x = torch.empty(rows, HEADS * head_dim, dtype=dtype)
    weight = torch.empty(HEADS * head_dim, dtype=dtype)
    heads = torch.empty(rows, HEADS + 2 * KV_HEADS, head_dim, dtype=dtype)
    q, k, v = (torch.empty(rows, count, head_dim, dtype=dtype) for count in (HEADS, KV_HEADS, KV_HEADS))
    pool = empty_pool(head_dim, dtype)
    bytes_pool = empty_pool(head_dim, torch.int8).view(torch.uint8)
    rounded = torch.empty(rows, KV_HEADS, head_dim + SCALE_BYTES, dtype=torch.uint8)
    state = AttentionState.empty(q)
    cos = torch.empty(rows, 1, head_dim)
    sin = torch.empty(rows, 1, head_dim // 2)
    norm_weight = torch.empty(HEADS + KV_HEADS, head_dim, dtype=dtype)
    slots = torch.zeros(rows, dtype=torch.int64)
    scores = torch.empty(rows, 1000)
    tokens = torch.arange(1000)
    return {
        **segments(pool, bytes_pool, q, state),
        "merge": lambda: merge_parts_triton(state.out, state.lse, state.out, state.lse, q[None], state.lse[None]),
        "store_kv": lambda: triton_rows.store_kv(pool, k, v, slots),
        "store_kv, 8 bits": lambda: triton_rows.store_kv(bytes_pool, rounded, rounded, slots),
        "quantize_rows, int8": lambda: quantize_rows_triton(k, torch.int8),
        "quantize_rows, fp8": lambda: quantize_rows_triton(k, torch.float8_e4m3fn),
        "rms_norm": lambda: triton_rows.rms_norm(x, weight, 1e-6),
        "add_rms_norm": lambda: triton_rows.add_rms_norm_(x, x, weight, 1e-6),
        "heads": lambda: triton_rows.place_heads(heads, norm_weight, 1e-6, cos, sin, q, k, v),
        "rms_norm, fp32 weights": lambda: triton_rows.rms_norm(x, weight.float(), 1e-6),
        "heads, fp32 weights": lambda: triton_rows.place_heads(heads, norm_weight.float(), 1e-6, cos, sin, q, k, v),
        "silu_and_mul": lambda: triton_rows.silu_and_mul(x),
        "gelu_tanh_and_mul": lambda: triton_rows.gelu_tanh_and_mul(x),
        "clamped_swiglu": lambda: triton_rows.clamped_swiglu(x),
        "draw": lambda: triton_rows.draw(scores, tokens, slots),
    }


def segments(pool: Tensor, bytes_pool: Tensor, q: Tensor, state: AttentionState) -> Launches:
    """Keys gathered from blocks of every dtype, and merges of one part, of some and of most."""
    head_dim = q.shape[2]
    keys = q.new_empty(1, 2, KV_HEADS, 2 * BLOCK, head_dim)
    entries = torch.zeros(2, 3, dtype=torch.int32)
    wide = q.new_empty(1, 2, HEADS, 2 * BLOCK, head_dim)
    launches: Launches = {
        f"gather, {dtype_name(kv)} KV": lambda kv=kv: gather_(bytes_pool.view(kv), entries, keys) for kv in LARGEST
    }
    launches |= {
        f"merge of {parts} segments": lambda parts=parts: merge_segments_(
            state.out, state.lse, [(q, state.lse)] * parts
        )
        for parts in (1, 4, MAX_PARTS)
    }
    return launches | {
        "gather": lambda: gather_(pool, entries, keys),
        "gather, expanded heads": lambda: gather_(pool, entries, wide),
    }


def recurrent(rows: int, dtype: torch.dtype) -> Launches:
    """The operations of a recurrent layer with heads of Qwen3.5's shape: of one row, or of the next token of a sequence
    and of a part of a prompt that begins and ends within a chunk."""
    spec = RecurrentSpec(16, 32, 128, 128, 4)
    wide = torch.empty(rows, spec.channels + 2 * spec.num_value_heads, dtype=dtype)
    x, b, a = wide.split((spec.channels, spec.num_value_heads, spec.num_value_heads), dim=1)
    weight = torch.empty(spec.conv_kernel, spec.channels, dtype=dtype)
    numbers = torch.zeros(rows, dtype=torch.int64)
    lengths = [1, rows - 1] if rows > 1 else [1]
    where = runs_of_rows(lengths, numbers[: len(lengths)], [200, 5][: len(lengths)])
    conv = torch.empty(3, *spec.conv_shape, dtype=dtype)
    states = torch.empty(3, *spec.state_shape)
    decay = DecayWeights(torch.empty(spec.num_value_heads), torch.empty(spec.num_value_heads))
    inputs = triton_delta.empty_inputs(spec, x)
    y = torch.empty(rows, spec.value_size, dtype=dtype)
    return {
        "delta inputs": lambda: triton_delta.delta_inputs_(spec, where, x, weight, conv, b, a, decay),
        "delta rule": lambda: triton_delta.delta_rule_(spec, where, inputs, states),
        "gated norm": lambda: triton_delta.gated_rms_norm(y, y, weight[0, : spec.value_dim].contiguous(), 1e-6),
    }


def products(arch: int, rows: int, dtype: torch.dtype) -> Launches:
    """Products of this many rows with packed weights, experts and adapters."""
    x = torch.empty(rows, 1024, dtype=dtype)
    return packed(arch, x) | gguf(x) | experts(arch, rows, 128, dtype) | low_rank(x) | few_rows(x[:FEW_ROWS])


def few_rows(x: Tensor) -> Launches:
    """With dense weights, in the first configuration that a sweep tries."""
    weight = torch.empty(4096, x.shape[1], dtype=x.dtype)
    config = few_rows_variants()[0]
    bias = torch.empty(4096, dtype=x.dtype)
    return {
        "few rows": lambda: few_rows_linear(x, weight, None, config),
        "few rows, bias": lambda: few_rows_linear(x, weight, bias, config),
    }


def packed(arch: int, x: Tensor) -> Launches:
    """Products with packed weights by each tile of rows, with inputs in fp8 where the GPU multiplies fp8; their values
    in 16 bits."""
    weights = {
        variant: random_weight(variant, 1024, x.shape[1])
        for variant in VARIANTS
        if variant.split()[0] in triton_unpack.SCHEMES
    }
    bias = torch.empty(1024, dtype=x.dtype)
    values = torch.empty(1024, x.shape[1], dtype=x.dtype)
    launches: Launches = {"packed int4, bias": lambda: multiply(x, weights["int4"], bias)}
    for rows in [1] if len(x) == 1 else [16, 32, 64]:
        name = "packed" if rows == 1 else f"packed, {rows} rows,"
        some = x[:rows]
        for variant, weight in weights.items():
            launches[f"{name} {variant}"] = lambda x=some, w=weight: multiply(x, w)
            if arch >= 89 and x.dtype != torch.float32 and variant in ("fp8 channel", "fp8 blocks"):
                launches[f"{name} {variant}, fp8 inputs"] = lambda x=some, w=weight: multiply(x, w, fp8_inputs=True)
    if len(x) > 1:
        for variant, weight in weights.items():
            launches[f"dequantize {variant}"] = lambda w=weight: dequantize_(values, w)
    return launches


def gguf(x: Tensor) -> Launches:
    """Products with GGUF weights, of few rows in any case, and their values; with a mixture of eight experts."""
    x, bias = x[: triton_gguf.MOST_ROWS], torch.empty(1024, dtype=x.dtype)
    ends = torch.zeros(8, dtype=torch.int64)
    entries = torch.zeros(2 * len(x), dtype=torch.int64)
    weights = {scheme: random_weight(scheme, 1024, x.shape[1]).in_planes() for scheme in PLANES}
    launches: Launches = {}
    for scheme, weight in weights.items():
        launches[f"gguf {scheme}"] = lambda w=weight: triton_gguf.gguf_linear(x, w)
        launches[f"gguf {scheme}, values"] = lambda w=weight: triton_gguf.gguf_dequantize_(w, x.new_empty(w.shape))
        launches[f"gguf {scheme}, experts"] = lambda w=weight: triton_gguf.gguf_grouped_linear(x, w, ends, entries)
    launches["gguf q4_k, bias"] = lambda: triton_gguf.gguf_linear(x, weights["q4_k"], bias)
    rows = x.new_empty(len(x), x.shape[1])
    launches["gguf q4_k, rows"] = lambda: triton_gguf.gguf_dequantize_(weights["q4_k"], rows, entries[: len(x)])
    return launches


def experts(arch: int, rows: int, width: int, dtype: torch.dtype) -> Launches:
    """The router, the products of 2 of 8 experts for each row, and the sum of their outputs."""
    x = torch.empty(rows, width, dtype=dtype)
    weights = torch.empty(8, 3 * width, width, dtype=dtype)
    entries = torch.zeros(2 * rows, dtype=torch.int32)
    ends = torch.zeros(8, dtype=torch.int32)
    y = torch.empty(2 * rows, width, dtype=dtype)
    of_rows = torch.empty(rows, 3)
    many = torch.empty(2000, width, dtype=dtype)
    shared = torch.empty(rows, width, dtype=dtype)
    launches: Launches = {
        "experts": lambda: grouped_linear(x, weights, ends, entries),
        "experts, many rows": lambda: grouped_linear(many, weights, ends),
        "experts, own rows": lambda: grouped_linear(y, weights, ends),
        "experts, biases": lambda: grouped_linear(y, weights, ends, bias=weights[:, :, 0].contiguous()),
        "experts, weighted sum": lambda: weighted_sum(y, entries.view(rows, 2), of_rows, shared),
    }
    for variant in ("int4", "int4 zeros", "int4 bfloat16 zeros 128", "int8", "fp8 channel", "fp8 blocks", "mxfp4"):
        packed = random_weight(variant, 8 * 3 * width, width)
        launches |= {
            f"experts, {variant}": lambda w=packed: grouped_linear(x, w, ends, entries),
            f"experts, {variant}, many rows": lambda w=packed: grouped_linear(many, w, ends),
        }
        if variant.startswith("fp8") and arch >= 89 and dtype != torch.float32:
            launches[f"experts, {variant}, fp8 inputs"] = lambda w=packed: grouped_linear(x, w, ends, fp8_inputs=True)
            launches[f"experts, {variant}, fp8 inputs, many rows"] = lambda w=packed: grouped_linear(
                many, w, ends, fp8_inputs=True
            )
    return launches | routers(rows, dtype)


def routers(rows: int, dtype: torch.dtype) -> Launches:
    """Of Qwen3-30B-A3B, gpt-oss, GLM-4.5 with groups, and Qwen3-Next."""
    softmax = ExpertSpec(128, 8)
    grouped = replace(softmax, scoring="sigmoid", num_groups=8, chosen_groups=4)
    specs = {
        "softmax": softmax,
        "softmax of chosen": replace(softmax, num_experts=32, num_experts_per_tok=4, scoring="softmax_of_chosen"),
        "sigmoid, groups": grouped,
        "shared, 512": replace(softmax, num_experts=512, num_experts_per_tok=10, has_shared=True),
    }
    logits = torch.empty(rows, 512, dtype=dtype)
    share = torch.empty(rows, 1, dtype=dtype)
    bias = torch.empty(512)
    return {
        f"router, {name}": lambda spec=spec: route(
            spec,
            logits[:, : spec.num_experts].contiguous(),
            share if spec.has_shared else None,
            bias if spec.scoring == "sigmoid" else None,
        )
        for name, spec in specs.items()
    }


def low_rank(x: Tensor) -> Launches:
    """LoRA adapters of one rank tile and of several."""
    memory = torch.empty(4, 1 << 12, dtype=x.dtype)
    rows = torch.zeros(len(x), dtype=torch.int64)
    table = torch.zeros(4, 3, FIELDS, dtype=torch.int64)
    ends = torch.zeros(4, dtype=torch.int64)
    return {
        f"adapters of rank {rank}": lambda rank=rank: add_low_rank_(x, x, memory, table, rows, ends, rank)
        for rank in (16, 256)
    }


def multiply(x: Tensor, weight: PackedWeight, bias: Tensor | None = None, fp8_inputs: bool = False) -> None:
    """As `packed_weights.packed_linear` does on CUDA."""
    assert weight.scales is not None
    parts = (weight.scheme, weight.data, weight.scales, weight.zeros, weight.group_size)
    triton_packed.packed_linear(x, *parts, bias, fp8_inputs=fp8_inputs)


def dequantize_(out: Tensor, weight: PackedWeight) -> None:
    assert weight.scales is not None
    triton_packed.dequantize_(out, weight.scheme, weight.data, weight.scales, weight.zeros, weight.group_size)


def engine_launches(arch: int, head_dim: int, dtype: torch.dtype) -> Launches:
    """What the engine can launch for a model of this dtype and head size, with any KV cache."""
    launches = attention(arch, head_dim, dtype)
    for kv in LARGEST:
        launches |= attention(arch, head_dim, dtype, kv)
    launches |= others(200, head_dim, dtype) | one_row(others(1, head_dim, dtype))
    return launches | recurrent(200, dtype) | one_row(recurrent(1, dtype))


def product_launches(arch: int, dtype: torch.dtype) -> Launches:
    """What it can launch for products, which do not depend on the head size."""
    return products(arch, 200, dtype) | one_row(products(arch, 1, dtype))


def one_row(launches: Launches) -> Launches:
    return {f"{name}, one row": launch for name, launch in launches.items()}


def chosen(arch: int, head_dim: int, dtype: torch.dtype, with_products: bool) -> Launches:
    """The launches that the options choose."""
    if "--counts" in sys.argv:
        return counts(head_dim, dtype)
    few = "--few" in sys.argv
    if "--variants" in sys.argv:
        return dict(list(variants(arch, head_dim, dtype).items())[:: FEW if few else 1])
    launches = engine_launches(arch, head_dim, dtype)
    launches |= product_launches(arch, dtype) if with_products else {}
    begin = next((option.removeprefix("--only=") for option in sys.argv if option.startswith("--only=")), "")
    return {
        name: launch for name, launch in launches.items() if name.startswith(begin) and not (few and is_special(name))
    }


def is_special(name: str) -> bool:
    """Whether it compiles a kernel that others compile too, for a size that the compiler takes for a constant."""
    return name.endswith(", one row") or "uneven blocks" in name


def main() -> None:
    arch = int(sys.argv[1])
    dtype = getattr(torch, sys.argv[2])
    head_dims = [int(text) for text in sys.argv[3:] if not text.startswith("--")]
    driver.set_active(NoDriver(arch))
    triton_delta_chunks.compute_capability = lambda device: arch
    table: list[dict[str, Any]] = []
    for head_dim in head_dims:
        launches = chosen(arch, head_dim, dtype, with_products=head_dim == head_dims[0])
        seen: set[str] = set()
        for name, launch in launches.items():
            for kernel in compiled_by(launch):
                row = {"launch": name, "kernel": kernel.name, "head_dim": head_dim, "dtype": sys.argv[2]}
                if "--counts" not in sys.argv or kernel.hash not in seen:
                    table.append(row | resources(kernel))
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
