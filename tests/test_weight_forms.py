"""Weights in the order of the CPU's kernels that become those of a GPU's kernels: the bits of loading them there.

No GPU is needed: its orders are made on the CPU.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from device_bytes import DeviceBytes
from fast import fast_only
from hypothesis import given
from hypothesis import strategies as st
from packed_cases import VARIANTS as SCHEMES
from packed_cases import input_multiple, random_weight
from quantized_checkpoints import VARIANTS, make_plain, quantize
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nanovllm.formats.gguf.model import GgufMethod, ReorderedInputs
from nanovllm.layers import expert_weights as stored_experts
from nanovllm.layers.build_context import BuildContext, Split
from nanovllm.layers.expert_weights import ExpertWeights
from nanovllm.layers.linear_method import LinearMethod, StoredWeight
from nanovllm.layers.module import Module
from nanovllm.models.hf_config import load_network_config
from nanovllm.models.loader import load_model
from nanovllm.ops import cpu_kernels, panel_conversion
from nanovllm.ops.packed_weights import GGUF_BLOCKS, PackedWeight
from nanovllm.ops.panel_conversion import take_, take_panels_

JUNK = 0x5A


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def same(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    pairs = list(zip(ours, theirs, strict=True))
    return all(own.shape == other.shape and torch.equal(as_bytes(own), as_bytes(other)) for own, other in pairs)


def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.clone() for tensor in tensors]


def spoil(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        tensor.view(torch.uint8).fill_(JUNK)


def orders(weight: PackedWeight) -> Iterator[PackedWeight]:
    """The weight in each order of a GPU's kernels."""
    yield weight
    if weight.scheme in GGUF_BLOCKS:
        yield replace(weight, data=weight.data.clone()).in_planes()


def finished_on_gpu(weight: PackedWeight) -> PackedWeight:
    return weight.in_planes() if weight.scheme in GGUF_BLOCKS else weight


@contextmanager
def made(on_gpu: bool) -> Iterator[None]:
    """Weights that are made inside lie as on a GPU, or on the CPU, but that plain numbers are not interleaved."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_kernels, "can_interleave", lambda weight: False)
        if on_gpu:
            patch.setattr(stored_experts, "stacked_on", lambda device: True)
            patch.setattr(PackedWeight, "for_kernels", finished_on_gpu)
        yield


# ---- one packed weight


@given(st.data())
def test_panels_become_the_rows_or_planes_that_they_come_from(draw: st.DataObject) -> None:
    variant = draw.draw(st.sampled_from(SCHEMES))
    out_features = draw.draw(st.sampled_from([1, 15, 16, 17, 64]) | st.integers(1, 100))
    inputs = draw.draw(st.integers(1, 12)) * (40 if "fp8" in variant else input_multiple(variant))
    piece = draw.draw(st.sampled_from([1, 3000, panel_conversion.PIECE_BYTES]))
    stored = random_weight(variant, out_features, inputs, seed=draw.draw(st.integers(0, 99)))
    panels = stored.in_panels()
    for expected in orders(stored):
        memory = copies(expected.parts)
        spoil(memory)
        weight = expected.read_from(memory)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(panel_conversion, "PIECE_BYTES", piece)
            take_(weight, panels)
        assert same(memory, expected.parts)
        assert all(ours is given for ours, given in zip(weight.parts, memory, strict=True))


def test_a_weight_is_read_from_another_device() -> None:
    """In panels too. Products with weights in planes count arrivals there."""
    for variant in SCHEMES:
        stored = random_weight(variant, 20, 512)
        for weight in (*orders(stored), stored.in_panels()):
            moved = weight.read_from([part.to("meta") for part in weight.parts])
            assert moved.shape == weight.shape and all(part.is_meta for part in moved.parts)
            assert (moved.arrivals is None) == (not weight.planes)
            assert moved.arrivals is None or moved.arrivals.is_meta
            assert weight.read_from(weight.parts).arrivals is weight.arrivals


def test_a_weight_in_the_same_order_is_copied_and_one_of_another_form_refused() -> None:
    for variant in SCHEMES:
        stored = random_weight(variant, 20, 512)
        for expected in (*orders(stored), stored.in_panels()):
            weight = expected.read_from([torch.zeros_like(part) for part in expected.parts])
            take_(weight, expected)
            assert same(weight.parts, expected.parts)
    weight = random_weight("int4", 20, 512)
    others = (
        ("int4", 20, 256),
        ("int4", 24, 512),
        ("int4 zeros", 20, 512),
        ("int4 float32 64", 20, 512),
        ("mxfp4", 20, 512),
    )
    for other in others:
        for found in (random_weight(*other), random_weight(*other).in_panels()):
            with pytest.raises(ValueError, match=r"int4 \[20, 512\] in rows cannot become .* in (rows|panels)"):
                take_(weight, found)
    with pytest.raises(ValueError, match=r"in panels cannot become int4 \[20, 512\] in rows"):
        take_(weight.in_panels(), weight)


def test_some_matrices_of_a_stack_are_taken_and_the_others_stay() -> None:
    """From a buffer that has the parts of a matrix side by side, with bytes between matrices."""
    size = 20
    for variant in SCHEMES:
        matrices = [random_weight(variant, size, 512, seed) for seed in range(7)]
        numbers = [5, 0, 6]
        parts = side_by_side([matrices[number].in_panels().parts for number in numbers])
        for expected in orders(stack_of(matrices)):
            memory = copies(expected.parts)
            spoil(memory)
            take_panels_(expected.read_from(memory), parts, size, numbers)
            for ours, right in zip(memory, expected.parts, strict=True):
                for number, (own, other) in enumerate(zip(ours.split(size), right.split(size), strict=True)):
                    is_taken = number in numbers
                    assert torch.equal(as_bytes(own), as_bytes(other)) if is_taken else as_bytes(own).eq(JUNK).all()
            take_panels_(expected.read_from(memory), parts, size, [])


def stack_of(matrices: Sequence[PackedWeight]) -> PackedWeight:
    parts = zip(*(weight.parts for weight in matrices), strict=True)
    stacked = [torch.cat([as_bytes(part) for part in found]).view(found[0].dtype) for found in parts]
    (data, *others) = stacked
    scales, zeros = (*others, None, None)[:2]
    return replace(matrices[0], data=data, scales=scales, zeros=zeros)


def side_by_side(tensors: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """The tensors of n experts, each [n, *shape] in one buffer [n, bytes of an expert and a few more]."""
    sizes = [tensor.nbytes for tensor in tensors[0]]
    buffer = torch.full((len(tensors), sum(sizes) + 16), JUNK, dtype=torch.uint8)
    begin = 0
    parts = []
    for index, size in enumerate(sizes):
        part = buffer[:, begin : begin + size].view(tensors[0][index].dtype).unflatten(1, tensors[0][index].shape)
        for row, expert in zip(part, tensors, strict=True):
            row.copy_(expert[index])
        parts.append(part)
        begin += size
    return parts


# ---- checkpoints


def gguf(kind: str | Callable[[str], str], family: str = "qwen3_moe", **options: Any) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        pytest.importorskip("gguf", reason="the package gguf is not installed")
        from gguf_files import WIDE, write_gguf

        model = make_checkpoint(folder / "plain", family, **{**WIDE, "layers": 1, "intermediate": 512, **options})
        return write_gguf(folder / "model.gguf", model, kind)

    return make


def quantized(variant: str, family: str | None = None) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        if family is None:
            make_plain(folder / "plain")
        else:
            make_checkpoint(folder / "plain", family, layers=1, hidden=128, intermediate=256, heads=8, kv_heads=4)
        return quantize(folder / "plain", folder / variant, variant)

    return make


def plain(family: str, **options: Any) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        make_checkpoint(folder, family, layers=2, **options)
        return folder

    return make


def by_part(name: str) -> str:
    return next((kind for part, kind in {"gate": "Q4_0", "down": "F16"}.items() if part in name), "Q8_0")


def mixed(name: str) -> str:
    return next((kind for part, kind in {"attn_v": "Q6_K", "attn_k": "F16"}.items() if part in name), "Q4_K")


GGUF_TYPES = [scheme.upper() for scheme in GGUF_BLOCKS]
CHECKPOINTS: dict[str, Callable[[Path], Path]] = {
    **{variant: quantized(variant) for variant in VARIANTS},
    **{f"{variant} experts": quantized(variant, "qwen3_moe") for variant in VARIANTS},
    **{kind: gguf(kind) for kind in GGUF_TYPES},
    "several types": gguf(mixed, "qwen3"),
    "a type for each part": gguf(by_part),
    "mxfp4": plain("gpt_oss"),
    "plain": plain("qwen3", hidden=72, intermediate=40),
    "plain experts": plain("mixtral", experts=3),
    "inputs in a file's order": gguf("Q5_1", "qwen3_5", layers=4, linear_num_value_heads=8),
}
FAST = ["gptq-32-asymmetric", "pack-quantized-asymmetric experts", "fp8 experts", "Q6_K", "Q5_0", "several types"]
FAST += ["a type for each part", "plain experts"]


@pytest.mark.parametrize("name", fast_only(FAST, CHECKPOINTS))
def test_every_matrix_of_a_checkpoint_is_as_loaded_for_a_gpu(tmp_path: Path, name: str) -> None:
    path = CHECKPOINTS[name](tmp_path)
    interleaved = loaded(path)
    with made(on_gpu=True):
        device = loaded(path)
    with made(on_gpu=False):
        host = loaded(path)
    taken = 0
    for mine, *others in zip(*(model.modules() for model in (device, interleaved, host)), strict=True):
        if isinstance(mine, ExpertWeights):
            assert isinstance(others[1], ExpertWeights)
            check_experts(mine, others[1])
            taken += 1
            continue
        for weight, *same_weights in zip(mine.own_weights(), *(other.own_weights() for other in others), strict=True):
            for other in same_weights:
                check_weight(weight, other)
                taken += 1
    assert taken > 5
    reordered = any(isinstance(weight, ReorderedInputs) for model in device.modules() for weight in model.own_weights())
    assert reordered == (name == "inputs in a file's order")


def loaded(path: Path) -> Module:
    return load_model(path, load_network_config(path), torch.float32, torch.device("cpu"))


def check_weight(weight: StoredWeight, other: StoredWeight) -> None:
    tensors = list(weight.tensors())
    expected = copies(tensors)
    spoil(tensors)
    staged = copies(list(other.tensors()))
    moved = other.read_from(staged)
    assert all(ours is given for ours, given in zip(moved.tensors(), staged, strict=True))
    weight.take_(moved)
    assert same(tensors, expected)
    assert all(ours is given for ours, given in zip(weight.tensors(), tensors, strict=True))


def check_experts(weights: ExpertWeights, others: ExpertWeights, numbers: Sequence[int] | None = None) -> None:
    tensors = list(weights.own_weight_tensors())
    expected = copies(tensors)
    spoil(tensors)
    every = range(len(others._parts))
    parts = side_by_side([copies(list(others.tensors_of(number))) for number in every])
    weights.take_(None, parts)
    assert same(tensors, expected)
    spoil(tensors)
    numbers = every[::-2] if numbers is None else numbers
    weights.take_(numbers, [part[list(numbers)] for part in parts])
    for ours, right in zip(tensors, expected, strict=True):
        pairs = zip(ours.chunk(len(every)), right.chunk(len(every)), strict=True)
        for number, (own, other) in enumerate(pairs):
            assert torch.equal(as_bytes(own), as_bytes(other)) if number in numbers else as_bytes(own).eq(JUNK).all()


# ---- experts of any sizes

EXPERTS = 5
PARTS = ("gate", "up")
# The types of a GGUF file by part, where others are plain numbers, and of how many inputs there is a multiple.
FORMS: dict[str, tuple[dict[str, str], int]] = {
    **{kind: (dict.fromkeys(PARTS, kind), GGUF_BLOCKS[kind.lower()].inputs) for kind in GGUF_TYPES},
    "mxfp4": (dict.fromkeys(PARTS, "MXFP4"), 32),
    "two types": ({"gate": "Q5_1", "up": "Q8_0"}, 32),
    "one part": ({"gate": "MXFP4"}, 32),
    "plain": ({}, 1),
}


def method_of(types: Mapping[str, str]) -> GgufMethod:
    return GgufMethod({f"{expert}.{part}": kind for expert in range(EXPERTS) for part, kind in types.items()})


def expert_weights(method: LinearMethod | None, rows: int, columns: int, dtype: torch.dtype) -> ExpertWeights:
    """Gate and up of experts, with random bytes."""
    names = [[f"{expert}.{part}" for part in PARTS] for expert in range(EXPERTS)]
    build = BuildContext(dtype, torch.device("cpu"), method)
    weights = ExpertWeights(names, Split.whole(rows), Split.whole(columns), build, bias=True)
    for name, slot in weights.slots():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        shape = (*slot.view.shape, slot.view.itemsize)
        values = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        slot.view.copy_(values.view(slot.view.dtype).squeeze(-1))
    weights.finish_loading()
    return weights


@given(st.data())
def test_experts_of_any_sizes_become_a_stack(draw: st.DataObject) -> None:
    types, unit = FORMS[draw.draw(st.sampled_from(list(FORMS)))]
    rows = draw.draw(st.sampled_from([8, 16, 20]) | st.integers(1, 50))
    columns = unit * draw.draw(st.integers(1, 2000 // unit // 8 + 1))
    dtype = draw.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    numbers = draw.draw(st.permutations(range(EXPERTS)))[: draw.draw(st.integers(0, EXPERTS))]
    with made(on_gpu=True):
        device = expert_weights(method_of(types), rows, columns, dtype)
    with made(on_gpu=False):
        host = expert_weights(method_of(types), rows, columns, dtype)
    biases = copies([biases for biases in device._biases if biases is not None])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(panel_conversion, "PIECE_BYTES", draw.draw(st.sampled_from([1, 5000, 1 << 24])))
        check_experts(device, host, numbers)
    assert same([biases for biases in device._biases if biases is not None], biases)


def test_weights_of_another_form_are_refused() -> None:
    method = method_of({"gate": "Q4_0", "up": "Q8_0"})
    parts = ("0.gate", "0.up"), ("0.gate",), ("0.up",), ("plain",)
    stacked, packed, other, plain = (
        method.create(dict.fromkeys(names, 20), 64, torch.float32, torch.device("cpu")) for names in parts
    )
    kinds = [type(weight).__name__ for weight in (stacked, packed, other, plain)]
    assert kinds == ["StackedWeights", "GgufWeight", "GgufWeight", "DenseWeight"]
    for weight, wrong in ((stacked, packed), (packed, stacked), (packed, other), (packed, plain), (plain, packed)):
        with pytest.raises(ValueError, match="cannot become"):
            weight.take_(wrong)
    interleaved = method.create({"plain": 20}, 64, torch.float32, torch.device("cpu"))
    interleaved.finish_loading()
    with pytest.raises(ValueError, match="cannot become"):
        interleaved.take_(plain)


# ---- memory and launches


class Launches(TorchDispatchMode):
    """The names of operations that read or write content."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and "empty" not in func.name():
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("variant", SCHEMES)
def test_pieces_bound_the_memory(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside both forms there are at most four of them at a time."""
    piece = 32 * 1024
    monkeypatch.setattr(panel_conversion, "PIECE_BYTES", piece)
    one = random_weight(variant, 40, 512)
    experts = range(40)
    parts = [part.expand(len(experts), *part.shape).clone() for part in one.in_panels().parts]
    for stack in orders(stack_of([one for _ in experts])):
        assert stack.nbytes > 10 * piece
        for numbers in (None, experts):
            with DeviceBytes() as counted:
                both = [part.view_as(part) for part in (*stack.parts, *parts)]  # from now on it has seen them
                take_panels_(stack, parts, one.out_features, numbers)
            assert counted.peak <= sum(part.nbytes for part in both) + 4 * piece


@pytest.mark.parametrize("variant", SCHEMES)
def test_many_experts_take_no_more_launches_than_one(variant: str) -> None:
    """If they fit into a piece."""
    one = random_weight(variant, 40, 512)
    for stack in orders(stack_of([one] * 40)):
        for all_of_them in (True, False):
            counts = set()
            for number in (1, 40):
                parts = [part.expand(number, *part.shape).clone() for part in one.in_panels().parts]
                numbers = None if all_of_them else range(number)
                some = stack.rows(slice(0, number * one.out_features))
                with Launches() as launches:
                    take_panels_(some, parts, one.out_features, numbers)
                counts.add(len(launches.names))
            assert len(counts) == 1 and counts.pop() <= 70
