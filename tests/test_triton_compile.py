"""Every Triton kernel compiles for the GPUs that it is meant for, within their memory, without any of them there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from triton_compile import FEW, engine_launches, product_launches

from benchmarks.kernel_variants import decode_variants, few_rows_variants, prefill_variants
from nanovllm.ops.triton_routing import FEW_ROWS

# Bytes that a program may have (CUDA C++ Guide, 16.2): A100, RTX 4090, H100 and H200, RTX 5090.
SHARED_LIMIT = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 120: 99 << 10}
REGISTERS = 65536  # of a multiprocessor
FEW_SPILLED = 96  # bytes of a thread that a variant may spill: a few of its 255 registers
# Launches for sm_80 that spill a register or two.
SPILLING = {
    "float16": ("packed, 16 rows, int4 float32 64", "packed, 16 rows, int4 channel"),
    "bfloat16": ("gguf q6_k, experts", "gguf q6_k, experts, one row"),
}
KERNELS = {"_prefill_kernel", "_decode_kernel", "_reduce_kernel", "_merge_kernel", "_store_kernel",
           "_norm_kernel", "_heads_kernel", "_gated_unit_kernel", "_draw_kernel", "_packed_kernel",
           "_grouped_kernel", "_weighted_sum_kernel", "_quantize_kernel", "_shrink_kernel",
           "_expand_kernel", "_gather_kernel", "_merge_segments_kernel", "_inputs_kernel",
           "_keep_kernel", "_recurrence_kernel", "_solve_kernel", "_advance_kernel",
           "_gated_norm_kernel", "_few_rows_kernel", "_packed_experts_kernel", "_gguf_kernel",
           "_gguf_values_kernel", "_sum_splits_kernel", "_dequantize_kernel", "_route_kernel",
           "_place_kernel"}  # fmt: skip


OTHER_TRITON = os.environ.get("NANOVLLM_OTHER_TRITON", "")  # pip install --target DIR triton==3.6.0 --no-deps
needs_other_triton = pytest.mark.skipif(
    not Path(OTHER_TRITON, "triton").is_dir(), reason="NANOVLLM_OTHER_TRITON names no directory with another Triton"
)
RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"


def compiled(
    arch: int, dtype: str, head_dims: tuple[int, ...], cache: Path, *options: str, triton: str = ""
) -> list[dict[str, Any]]:
    """The table of triton_compile.py, compiled afresh by the compiler and not the interpreter.

    triton: the directory of another Triton than the installed one.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(Path(__file__).with_name("triton_compile.py")), str(arch), dtype]
    command += [*map(str, head_dims), *options]
    paths = os.pathsep.join(path for path in [triton, *sys.path] if path)
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": paths}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1800, check=False)
    assert result.returncode == 0, result.stderr
    table: list[dict[str, Any]] = json.loads(result.stdout)
    return table


def check_fit(table: list[dict[str, Any]], arch: int, most_spilled: int) -> None:
    for row in table:
        assert row["spilled"] <= most_spilled or row["dtype"] == "float32", f"registers spill: {row}"
        assert row["shared"] <= SHARED_LIMIT[arch], f"too much shared memory: {row}"
        assert row["registers"] * row["threads"] <= REGISTERS, f"too many registers: {row}"


def check_launches_fit(table: list[dict[str, Any]], arch: int) -> None:
    """Attention over an 8-bit KV cache may spill a few registers: its tiles are widened in registers. So may decode of
    large heads, which the compiler holds at half of a thread's registers for the sake of more threads, products of int8
    weights with zeros and of Q5_K, which it holds at 80 to 170, and prefill with a window on 12.0, by 32 bytes. On 8.0
    it spills 8 bytes in fp16 of two kinds of int4 weights, and of experts in Q6_K."""
    few = [row for row in table if row["launch"].endswith(" KV") or is_large_decode(row) or is_tight(row, arch)]
    spilling = [row for row in table if arch == 80 and row["launch"] in SPILLING.get(row["dtype"], ())]
    check_fit(few, arch, FEW_SPILLED)
    check_fit(spilling, arch, most_spilled=8)
    check_fit([row for row in table if row not in few + spilling], arch, most_spilled=0)
    assert not any(row["fused_over_lanes"] for row in table), "what a kernel carries on differs between lanes"


def is_tight(row: dict[str, Any], arch: int) -> bool:
    if row["kernel"] == "_prefill_kernel":
        return arch == 120 and "window" in row["launch"]
    return row["launch"].startswith("gguf q5_k") or (
        row["kernel"] == "_packed_kernel" and "int8 zeros" in row["launch"]
    )


def is_large_decode(row: dict[str, Any]) -> bool:
    return row["kernel"] == "_decode_kernel" and row["head_dim"] > 128


@pytest.mark.parametrize(
    "arch, dtype, head_dims, options",
    [
        (90, "bfloat16", (128,), ()),
        (80, "float16", (256,), ("--few",)),
        (89, "bfloat16", (128,), ("--few",)),
        (120, "bfloat16", (128, 256), ("--few",)),
    ],
    ids=str,
)
@pytest.mark.slow
def test_kernels_compile_and_fit(
    arch: int, dtype: str, head_dims: tuple[int, ...], options: tuple[str, ...], tmp_path: Path
) -> None:
    table = compiled(arch, dtype, head_dims, tmp_path, *options)
    rounds_inputs = arch >= 89 and dtype != "float32"
    others = {"_packed_experts_kernel"} if "--few" in options else set()  # which few rows take
    assert {row["kernel"] for row in table} == KERNELS - others | ({"_round_inputs_kernel"} if rounds_inputs else set())
    assert {row["head_dim"] for row in table} == set(head_dims)
    check_launches_fit(table, arch)
    if arch == 90 and dtype == "bfloat16" and 128 in head_dims:
        check_loads_stay_in_flight([row for row in table if row["head_dim"] == 128])


@pytest.mark.slow
@pytest.mark.parametrize("arch", [89, 120])
def test_a_step_of_decode_fits_small_cards(arch: int, tmp_path: Path) -> None:
    """A part of the above that takes seconds."""
    for launch in ("decode without a state, blocks", "few rows"):
        table = compiled(arch, "bfloat16", (128,), tmp_path, f"--only={launch}")
        assert table and all(row["launch"].startswith(launch) for row in table)
        check_launches_fit(table, arch)


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90])
def test_prefill_of_the_largest_heads_fits(arch: int, tmp_path: Path) -> None:
    """Those of Gemma 4's full attention. A few registers may spill."""
    table = compiled(arch, "bfloat16", (512,), tmp_path, "--only=prefill, window")
    assert table and max(row["shared"] for row in table) <= SHARED_LIMIT[arch]


def check_loads_stay_in_flight(table: list[dict[str, Any]]) -> None:
    """Prefill has a loop for tiles that every row sees and one for the others, both over all blocks; the reduction of
    decode, which feeds no matrix product, sums partitions in one and merges blocks in another, which is pipelined."""
    rows = {(row["launch"], row["kernel"]): row for row in table}
    prefill = rows["prefill", "_prefill_kernel"]
    reduction = rows["decode", "_reduce_kernel"]
    assert prefill["loops"] == 2 and prefill["loads_in_flight"] == 2, "K and V of the next tile"
    assert reduction["loops"] == 2 and reduction["loads_in_flight"] >= 8, "two loads of each of the next four blocks"


@pytest.mark.parametrize(("arch", "head_dim", "options"), [(80, 256, ()), (90, 128, ("--few",))])
@pytest.mark.slow
def test_variants_of_a_sweep_compile_and_fit(
    arch: int, head_dim: int, options: tuple[str, ...], tmp_path: Path
) -> None:
    """Every third of those for heads of 128, of which the committed tables have all."""
    table = compiled(arch, "bfloat16", (head_dim,), tmp_path, "--variants", *options)
    assert {row["launch"] for row in table} == set(variant_names(arch, head_dim)[:: FEW if options else 1])
    check_fit(table, arch, FEW_SPILLED)


@pytest.mark.parametrize("arch", [80, 90])
def test_the_committed_table_has_every_variant(arch: int) -> None:
    """Written by `triton_compile.py ARCH bfloat16 128 --variants`, for one Triton each."""
    for path in RESULTS.glob(f"triton-variants-sm{arch}-*.json"):
        table = json.loads(path.read_text())
        assert {row["launch"] for row in table} == set(variant_names(arch, 128)), f"{path.name} is of other variants"
        check_fit(table, arch, FEW_SPILLED)
    assert len(list(RESULTS.glob(f"triton-variants-sm{arch}-*.json"))) == 2


@pytest.mark.parametrize("arch", [80, 90])
def test_the_committed_table_has_every_launch(arch: int) -> None:
    """Written by `triton_compile.py ARCH bfloat16 128`."""
    table = json.loads((RESULTS / f"triton-launches-sm{arch}.json").read_text())
    launches = {*engine_launches(arch, 128, torch.bfloat16), *product_launches(arch, torch.bfloat16)}
    assert {row["launch"] for row in table} == launches
    check_launches_fit(table, arch)


def variant_names(arch: int, head_dim: int) -> list[str]:
    """As triton_compile.py names them."""
    prefill = prefill_variants(head_dim, torch.bfloat16, divmod(arch, 10))
    names = [json.dumps({"prefill": asdict(config)}) for config in prefill]
    names += [json.dumps({"decode": asdict(config)}) for config in decode_variants(head_dim, torch.bfloat16)]
    return names + [json.dumps({"few_rows": asdict(config)}) for config in few_rows_variants()]


@needs_other_triton
@pytest.mark.parametrize("arch", [80, 90])
def test_kernels_compile_with_another_triton(arch: int, tmp_path: Path) -> None:
    table = compiled(arch, "bfloat16", (128,), tmp_path, triton=OTHER_TRITON)
    assert {row["kernel"] for row in table} >= KERNELS
    check_fit(table, arch, FEW_SPILLED)
    check_fit(compiled(arch, "bfloat16", (128,), tmp_path, "--variants", triton=OTHER_TRITON), arch, FEW_SPILLED)


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "dtype"), [(90, "bfloat16"), (80, "float32")], ids=str)
def test_every_kernel_compiles_and_no_batch_compiles_one_again(arch: int, dtype: str, tmp_path: Path) -> None:
    """Rows, chunks, blocks, vocabulary: one kernel each serves every size, 1 and multiples of 16 among them.

    fp32 is not for speed, and may spill registers.
    """
    table = compiled(arch, dtype, (64,), tmp_path, "--counts")
    kernels = [row["kernel"] for row in table]
    # Other kernels of these names: for runs of one row each; for one row and for a few.
    others_again = ["_inputs_kernel", *["_route_kernel"] * len(FEW_ROWS)]
    others = {"_sum_splits_kernel"} if dtype == "float32" else set()  # whose products are not split
    assert sorted(kernels) == sorted([*(KERNELS - others), *others_again]), table
    check_fit(table, arch, most_spilled=0)
