"""Each stand-in of a Triton kernel computes what the interpreter does, at every kind of launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import emulated_triton
import pytest
import test_chunked_attention
import test_segment_attention
import test_triton_delta
import test_triton_experts
import test_triton_few_rows
import test_triton_gguf
import test_triton_kernels
import test_triton_lora
import test_triton_packed
import torch
from attention_cases import Case, Shape, split
from stand_ins import STAND_INS
from test_delta_rule import SHAPES
from test_kv_cache_dtype import difficult_rows
from torch import Tensor

from nanovllm.ops import triton_lora
from nanovllm.ops.kv_quantization import quantize_rows_torch
from nanovllm.ops.triton_attention import TritonAttention
from nanovllm.ops.triton_kv import quantize_rows_triton
from nanovllm.ops.triton_support import triton_runs

# Relative and absolute: sums in another order, and weights rounded to 16 bits of another maximum.
BOUNDS = {4: 1e-4, 2: 2e-2, 1: 2e-2}  # by the bytes of the shortest floating dtype


@contextmanager
def compared() -> Iterator[set[str]]:
    """Computes each launch in this context twice, on the same memory. Yields the names of the kernels."""
    names: set[str] = set()
    differences: list[str] = []

    def both(kernel: Any, args: list[Any], grid: Any, options: dict[str, Any]) -> None:
        names.add(kernel.fn.__name__)
        copies = with_copies(args)
        emulated_triton.stand_in(kernel, args, grid, options)
        emulated_triton.interpret(kernel, copies, grid, options)
        differences.extend(f"{kernel.fn.__name__}: {each}" for each in differences_of(args, copies))

    with emulated_triton.computed_by(both):
        yield names
        torch.cuda.synchronize()
    assert not differences, differences


def with_copies(args: list[Any]) -> list[Any]:
    """The arguments over copies of their memory; those that share memory share the copy."""
    copies: dict[int, Any] = {}

    def copied(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        storage = value.untyped_storage()
        whole = copies.setdefault(storage.data_ptr(), storage.clone())
        return torch.empty(0, dtype=value.dtype).set_(whole, value.storage_offset(), value.shape, value.stride())

    return [copied(each) for each in args]


def differences_of(ours: list[Any], theirs: list[Any]) -> Iterator[str]:
    pairs = [(index, one, other) for index, (one, other) in enumerate(zip(ours, theirs, strict=True)) if is_tensor(one)]
    bound = BOUNDS[min((one.itemsize for _, one, _ in pairs if one.dtype.is_floating_point), default=4)]
    for index, one, other in pairs:
        allowed = bound if one.dtype.is_floating_point else 0.0
        if not torch.allclose(one.double(), other.double(), rtol=allowed, atol=allowed, equal_nan=True):
            worst = (one.double() - other.double()).abs().nan_to_num(torch.inf).max()
            yield f"argument {index} of {tuple(one.shape)} differs by {worst}"


def is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


@pytest.mark.parametrize("stored", [None, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(("dtype", "window"), [(torch.float32, 21), (torch.bfloat16, None)], ids=str)
def test_attention(dtype: torch.dtype, window: int | None, stored: torch.dtype | None) -> None:
    """Of many rows, of few and of one, in a padded head, in one call and a block at a time."""
    case = Case(Shape(24, 2, 2, 32, window, ((40, 66), (50, 3), (0, 1))), dtype, 1, "cuda")
    if stored is not None:
        case.pool = quantize_rows_torch(case.pool.cpu(), stored).cuda()
    with compared() as names:
        case.attend(TritonAttention())
        case.attend(TritonAttention(), [[piece] for seq in case.sequences for piece in split(seq, [1], 32)])
    assert names == ATTENTION


def rows_in_8_bits() -> None:
    for dtype in (torch.int8, torch.float8_e4m3fn):
        quantize_rows_triton(difficult_rows(torch.float32, 24)[:, :2].cuda(), dtype)


def partitions_and_slopes() -> None:
    with pytest.MonkeyPatch.context() as patch:
        test_triton_kernels.test_few_programs_take_several_partitions_to_the_same_bits(7, 20, patch)
        test_triton_kernels.test_attention_without_a_state_gives_the_bits_of_an_empty_one(
            torch.bfloat16, None, 16, None, patch
        )
    test_triton_kernels.test_alibi_slopes_lower_the_scores_of_distant_keys(torch.bfloat16)


def merges() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        test_chunked_attention.test_shapes_and_dtypes("cuda", (33, 4, 80), dtype)
        test_chunked_attention.test_edges("cuda", dtype)


def segments() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for stored in (None, torch.int8, torch.float8_e4m3fn):
            test_segment_attention.test_gathered_rows_are_those_of_the_blocks(stored, dtype)
    test_segment_attention.test_one_merge_of_many_parts_is_as_many_merges(3)


def experts() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        test_triton_experts.test_grouped_products((1, 0, 17, 16, 0), dtype)
        test_triton_experts.test_weighted_sums(dtype)
        for variant in ("int4 zeros", "fp8 blocks", "mxfp4"):
            for config in (test_triton_experts.SMALL, test_triton_experts.LARGE):
                test_triton_experts.check_packed(variant, dtype, (3, 0, 17, 1), config)
    test_triton_experts.test_the_shared_expert_is_added_last()
    test_triton_experts.test_rows_of_fp8_inputs_are_rounded_once((2, 0, 5))


def routers() -> None:
    for name in test_triton_experts.ROUTERS:
        with pytest.MonkeyPatch.context() as patch:
            test_triton_experts.test_routers_choose_and_group_as_torch(patch, name)


def adapters() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_lora, "MOST_RANKS", 16)
        for dtype in (torch.float32, torch.bfloat16):
            test_triton_lora.test_each_row_gets_its_own_adapter(3, 640, dtype)


def packed_weights() -> None:
    for variant in ("int4 zeros", "int8", "fp8 blocks", "mxfp4"):
        test_triton_packed.test_products_are_those_of_the_dequantized_weights(variant, torch.bfloat16)
        test_triton_packed.test_weights_in_16_bits_are_the_dequantized_ones_rounded(variant, torch.bfloat16)
    test_triton_packed.test_inputs_may_be_summed_in_parts("int4 zeros")
    test_triton_packed.test_products_of_fp8_inputs("fp8 blocks", 1)


def gguf_weights() -> None:
    for scheme in ("q4_1", "q5_k", "q6_k", "q8_0"):
        test_triton_gguf.test_products_are_those_of_the_dequantized_weights(scheme, torch.bfloat16)
    test_triton_gguf.test_values_are_those_of_the_file("q6_k")
    test_triton_gguf.test_experts("q4_k")


def few_rows() -> None:
    test_triton_few_rows.test_products_are_exact_and_rows_alone(33, 88, True)


def rows() -> None:
    for dtype, wide in ((torch.float32, False), (torch.bfloat16, True)):
        test_triton_kernels.test_rms_norm(96, wide, dtype)
        test_triton_kernels.test_add_rms_norm(dtype)
        test_triton_kernels.test_place_heads(14, 2, 80, "wide" if wide else None, dtype)
        test_triton_kernels.test_gated_units(1500, dtype)
        test_triton_kernels.test_store_kv_writes_the_slots_and_nothing_else(3, 80, 16, dtype)
    for ordered in (False, True):
        test_triton_kernels.test_tokens_drawn(5000, ordered)


def recurrences() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        test_triton_delta.test_rows_and_states_are_those_of_torch(SHAPES[0], dtype)
        test_triton_delta.test_padded_rows_of_a_decode_step_write_no_state(dtype)
        test_triton_delta.test_the_gated_norm_is_that_of_torch(dtype)
    test_triton_delta.test_whole_chunks_are_those_of_torch(test_triton_delta.CHUNK_SHAPES[0], torch.float32)


ATTENTION = {"_prefill_kernel", "_decode_kernel", "_reduce_kernel"}
LAUNCHES: dict[Callable[[], None], set[str]] = {
    rows_in_8_bits: {"_quantize_kernel"},
    partitions_and_slopes: ATTENTION - {"_prefill_kernel"},
    merges: {"_merge_kernel"},
    segments: {"_gather_kernel", "_merge_segments_kernel", "_merge_kernel"},
    experts: {"_grouped_kernel", "_packed_experts_kernel", "_weighted_sum_kernel", "_round_inputs_kernel"},
    routers: {"_route_kernel", "_place_kernel"},
    adapters: {"_shrink_kernel", "_expand_kernel"},
    few_rows: {"_few_rows_kernel"},
    gguf_weights: {"_gguf_kernel", "_gguf_values_kernel"},
    packed_weights: {"_packed_kernel", "_sum_splits_kernel", "_dequantize_kernel", "_round_inputs_kernel"},
    rows: {"_norm_kernel", "_heads_kernel", "_gated_unit_kernel", "_store_kernel", "_draw_kernel"},
    recurrences: {
        "_inputs_kernel",
        "_keep_kernel",
        "_recurrence_kernel",
        "_solve_kernel",
        "_advance_kernel",
        "_gated_norm_kernel",
    },
}


@pytest.mark.parametrize("launch", LAUNCHES, ids=lambda launch: launch.__name__)
def test_launches(launch: Callable[[], None]) -> None:
    assert triton_runs()  # which is tested once, by a launch
    with compared() as names:
        launch()
    assert names == LAUNCHES[launch]


def test_every_stand_in_is_compared() -> None:
    assert set().union(ATTENTION, *LAUNCHES.values()) == set(STAND_INS)
