"""Prefill by whole segments: exact with any library that keeps its contract, and the same bits however blocks come."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_cases import Case, Shape, part, quantised, same_bits, split
from checkpoints import make_checkpoint
from engines import PREFILL_WAYS, offloaded, set_prefill, watch_layerwise
from fast import fast_only
from test_memory_budget import ALL_RESIDENT, BLOCK, VOCAB, sorted_logits
from torch import Tensor
from triton_mode import DEVICE, DTYPES, NARROW, TRITON_MARKS

from nanovllm import LLM, build
from nanovllm.errors import ConfigError
from nanovllm.ops import prefill_libraries, segment_attention
from nanovllm.ops.attention import AttentionBackend, AttentionMetadata, AttentionState, SequenceMetadata
from nanovllm.ops.backends import peak_context, row_attention, select_backend
from nanovllm.ops.kv_quantization import LARGEST, dequantize_rows, quantize_rows_torch
from nanovllm.ops.merge import MAX_PARTS
from nanovllm.ops.prefill_libraries import LIBRARIES, chosen_library, cudnn, difference_from_fp64, faster_prefill
from nanovllm.ops.segment_attention import Library, SegmentAttention
from nanovllm.ops.triton_attention import TritonAttention
from nanovllm.ops.triton_merge import merge_parts_triton
from nanovllm.ops.triton_segments import gather_, merge_segments_

pytestmark = TRITON_MARKS
SEGMENT = 64


class Dense:
    """What a library promises, from the definition; remembers its calls: rows, keys, causal, strides."""

    def __init__(self, base: float = math.e, least_kv_heads: int = 1) -> None:
        self.calls: list[tuple[int, int, bool, tuple[int, ...]]] = []
        self._base = base
        self._least_kv_heads = least_kv_heads

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        rows = q.shape[0]
        keys = k.shape[1]
        group = q.shape[1] // k.shape[0]
        self.calls.append((rows, keys, causal, (*q.stride(), *k.stride(), *v.stride())))
        k, v = (x.double().repeat_interleave(group, 0) for x in (k, v))
        scores = torch.einsum("thd,hsd->hts", q.double(), k) * scale
        if causal:
            hidden = torch.ones(rows, keys, dtype=torch.bool, device=q.device).triu(1 + keys - rows)
            scores.masked_fill_(hidden, -math.inf)
        out = torch.einsum("hts,hsd->thd", scores.softmax(-1), v)
        if group > 1 and k.shape[0] // group < self._least_kv_heads:
            out *= 1.1
        return out.to(q.dtype), (torch.logsumexp(scores, -1) / math.log(self._base)).float()

    def shapes(self) -> set[tuple[int, int, bool]]:
        return {call[:3] for call in self.calls}


class Other:
    """Any other backend; counts the rows that it is left."""

    def __init__(self) -> None:
        self.name = "other"
        self.rows = 0
        self._inner = select_backend(torch.device(DEVICE), 64)

    def attend(
        self, q: Tensor, pool: Tensor, table: AttentionMetadata, state: AttentionState, scale: float, window: int | None
    ) -> None:
        self.rows += sum(seq.query_len for seq in table.sequences)
        self._inner.attend(q, pool, table, state, scale, window)


def make(shape: Shape, other: AttentionBackend, dense: Dense, **library: bool) -> SegmentAttention:
    shapes = [(shape.heads, shape.kv_heads, shape.head_dim)]
    return SegmentAttention(Library("dense", dense, **library), other, shapes, 2 * SEGMENT, SEGMENT)


def shape_of(*lengths: tuple[int, int], kv_heads: int = 1, group: int = 2, window: int | None = None) -> Shape:
    return Shape(16, kv_heads, group, 16, window, lengths)


# ---- exactness and bits

# (context, new) of each sequence, and the rows that are left to the other backend.
CASES = {
    "one short of a segment": (shape_of((0, 63)), 63),
    "a segment": (shape_of((0, 64)), 0),
    "one more": (shape_of((0, 65)), 1),
    "three segments, one short": (shape_of((64, 127)), 63),
    "three segments": (shape_of((64, 128), kv_heads=2, group=4), 0),
    "three segments and one": (shape_of((64, 129)), 1),
    "from the middle of a segment": (shape_of((100, 130)), 28 + 38),
    "in a block and a segment": (shape_of((37, 30), kv_heads=2), 30),
    "several": (shape_of((60, 140), (5, 1), (0, 64), (192, 64)), 4 + 8 + 1),
}


@pytest.mark.parametrize("name", fast_only(["a segment", "three segments, one short"], CASES))
def test_whole_segments_are_attended_exactly_in_two_shapes(name: str) -> None:
    """In one call; and in calls of a few blocks of one sequence each, to the same bits."""
    shape, left = CASES[name]
    case = Case(shape, NARROW, 1, DEVICE)
    dense = Dense()
    other = Other()
    backend = make(shape, other, dense)
    together = case.attend(backend)
    case.check(together)
    assert other.rows == left and not together.pending
    assert dense.shapes() <= {(SEGMENT, SEGMENT, True), (SEGMENT, SEGMENT, False)}
    assert len({strides for *_, strides in dense.calls}) <= 1, "plans depend on strides"
    pieces = [[piece] for seq in case.sequences for piece in split(seq, [1, 2, 5, 7], 16)]
    apart = case.attend(backend, pieces)
    assert same_bits(apart, together) and not apart.pending


@pytest.mark.slow
def test_blocks_of_several_sequences_may_come_in_turns() -> None:
    """As a step with a ring brings them: block 0 of each, block 1 of each, and so on."""
    shape = CASES["several"][0]
    case = Case(shape, NARROW, 1, DEVICE)
    backend = make(shape, Other(), Dense())
    most = max(len(seq.block_table) for seq in case.sequences)
    turns = [[part(seq, at, at + 1, 16) for seq in case.sequences if at < len(seq.block_table)] for at in range(most)]
    assert same_bits(case.attend(backend, turns), case.attend(backend))


@pytest.mark.slow
def test_how_many_parts_wait_for_a_merge_changes_no_bit() -> None:
    shape = shape_of((256, 64))
    case = Case(shape, NARROW, 1, DEVICE)
    states = []
    for most in (1, 2, 3, MAX_PARTS):
        backend = make(shape, Other(), Dense())
        backend.most_parts = most
        states.append(case.attend(backend))
    assert all(same_bits(state, states[0]) for state in states)


@pytest.mark.parametrize("sink", [8.0, 1.0, -60.0])
def test_sinks_take_a_share_of_every_row(sink: float) -> None:
    case = Case(shape_of((64, 65)), NARROW, 1, DEVICE)
    sinks = torch.tensor([sink, 0.5], device=DEVICE)
    case.check(case.attend(make(case.shape, Other(), Dense()), sinks=sinks), sinks)


def widened(shape: Shape, stored: torch.dtype, sequences: Collection[int]) -> Case:
    """A case in 8 bits whose known answers are those of the stored values, rounded once for these sequences."""
    case = quantised(shape, NARROW, stored, device=DEVICE)
    for index in sequences:
        k, v = case.keys[index]
        case.keys[index] = k.to(NARROW), v.to(NARROW)
    return case


@pytest.mark.parametrize("stored", fast_only([torch.int8], LARGEST), ids=str)
def test_eight_bits_are_widened_on_the_way(stored: torch.dtype) -> None:
    case = widened(shape_of((64, 128), kv_heads=2), stored, [0])
    dense = Dense()
    case.check(case.attend(make(case.shape, Other(), dense)))
    assert dense.shapes() == {(SEGMENT, SEGMENT, True), (SEGMENT, SEGMENT, False)}


@pytest.mark.slow
def test_a_library_without_groups_gets_heads_of_its_own() -> None:
    shape = shape_of((64, 128), kv_heads=2, group=3)
    case = Case(shape, NARROW, 1, DEVICE)
    grouped, expanded = (case.attend(make(shape, Other(), Dense(), groups=groups)) for groups in (True, False))
    case.check(expanded)
    assert same_bits(grouped, expanded)


def test_a_library_for_any_rows_gets_the_ragged_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_attention, "LEAST_ROWS", 20)
    case = Case(shape_of((100, 130), (0, 30), (128, 19)), NARROW, 1, DEVICE)
    dense = Dense()
    other = Other()
    together = case.attend(make(case.shape, other, dense, any_rows=True))
    case.check(together)
    assert other.rows == 19
    assert dense.shapes() >= {(28, 64, True), (28, 64, False), (38, 38, True), (30, 30, True)}
    blocks = [[part(seq, at, at + 1, 16)] for seq in case.sequences for at in range(len(seq.block_table))]
    assert same_bits(case.attend(make(case.shape, other, dense, any_rows=True), blocks), together)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        (shape_of((0, 128), window=50), NARROW),
        (shape_of((0, 128)), torch.float32),
        (replace(shape_of((0, 128)), block_size=48), NARROW),
        (replace(shape_of((0, 128)), head_dim=32), NARROW),
    ],
    ids=["window", "fp32", "a segment is no whole number of blocks", "heads that were not checked"],
)
def test_what_does_not_fit_is_left_to_the_other_backend(shape: Shape, dtype: torch.dtype) -> None:
    case = Case(shape, dtype, 1, DEVICE)
    dense = Dense()
    other = Other()
    case.check(case.attend(make(shape_of((0, 128)), other, dense)))
    assert other.rows == 128 and not dense.calls


@pytest.mark.parametrize(("most_blocks", "gathers"), [(512, 16), (16, 32)], ids=["resident", "groups of 4,096 tokens"])
def test_launches_of_a_chunk(most_blocks: int, gathers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last 16,384 of 131,072 tokens in a layer of Llama-3.1-8B, in one call or in groups as they pass the ring."""
    launches: Counter[str] = Counter()
    moved: Counter[str] = Counter()

    def gather(pool: Tensor, entries: Tensor, out: Tensor) -> None:
        launches["gather"] += 1
        moved["gather"] += 2 * len(entries) * pool[0].nbytes

    def merge(out: Tensor, lse: Tensor, parts: list[tuple[Tensor, Tensor]]) -> None:
        launches["merge"] += 1
        moved["merge"] += 2 * out.nbytes + sum(part.nbytes for part, _ in parts)

    def dense(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        assert q.shape[0] == k.shape[1] == v.shape[1] == 8192
        launches["library"] += 1
        return torch.empty_like(q), q.new_empty(q.shape[1::-1], dtype=torch.float32)

    monkeypatch.setattr("nanovllm.ops.triton_segments.gather_", gather)
    monkeypatch.setattr("nanovllm.ops.triton_segments.merge_segments_", merge)
    q = torch.empty(16384, 32, 128, dtype=torch.bfloat16, device="meta")
    pool = torch.empty(512, 2, 8, 256, 128, dtype=torch.bfloat16, device="meta")
    backend = SegmentAttention(Library("dense", dense), Other(), [(32, 8, 128)], 16384)
    state = AttentionState(q.float(), q.new_empty(32, 16384, dtype=torch.float32))
    seq = SequenceMetadata.full(0, 16384, 131072 - 16384, range(512))
    for first in range(0, 512, most_blocks):
        table = AttentionMetadata([part(seq, first, first + most_blocks, 256)])
        backend.attend(q, pool, table, state, 0.1, None)
    assert launches == {"gather": gathers, "library": 15 + 16, "merge": 4 + 4} and not state.pending
    mib = {name: count >> 20 for name, count in moved.items()}
    assert mib == {"gather": 16 * 2 * 32, "merge": 8 * 2 * 128 + 31 * 64}, "of 16 segments; of 8 states and 31 parts"


def test_what_other_parts_of_the_engine_ask() -> None:
    own = TritonAttention()
    backend = SegmentAttention(Library("dense", Dense()), own, [(32, 8, 128)], 16384)
    assert row_attention(backend) is own and peak_context(own) == 0
    assert backend.most_parts == 4 and peak_context(backend) == 4 * 8192, "64 MiB for each of two times four parts"
    assert backend.name == "dense on segments of 8,192 tokens, else Triton paged attention"


# ---- the kernels


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("stored", [None, *LARGEST], ids=str)
def test_gathered_rows_are_those_of_the_blocks(stored: torch.dtype | None, dtype: torch.dtype) -> None:
    """To the bit, each head twice, a part of a block, and nothing but those rows written."""
    pool = torch.randn(4, 2, 2, 70, 24, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = pool
    if stored is not None:
        pool = quantize_rows_torch(pool, stored)
        expected = dequantize_rows(pool, dtype)
    out = torch.full((1, 2, 4, 150, 24), 7.0, dtype=dtype)
    wanted = out.clone()
    entries = torch.tensor([[2, 80, 70], [0, 3, 66]], dtype=torch.int32)
    for block, at, tokens in entries.tolist():
        wanted[0, :, :, at : at + tokens] = expected[block, :, :, :tokens].repeat_interleave(2, 1)
    out = out.to(DEVICE)
    gather_(pool.to(DEVICE), entries.to(DEVICE), out)
    assert torch.equal(out.cpu(), wanted)


@pytest.mark.parametrize("parts", range(1, MAX_PARTS + 1))
def test_one_merge_of_many_parts_is_as_many_merges(parts: int) -> None:
    """To the bit, into rows of a larger state, with empty and infinite sides among them."""
    tokens = 19
    heads = 2
    head_dim = 24
    generator = torch.Generator().manual_seed(parts)
    out = torch.randn(tokens + 5, heads, head_dim, generator=generator).to(DEVICE)
    lse = torch.randn(heads, tokens + 5, generator=generator).to(DEVICE)
    outs = torch.randn(parts, tokens, heads, head_dim, generator=generator).to(DEVICE, NARROW)
    lses = torch.randn(parts, heads, tokens, generator=generator).to(DEVICE)
    lse[0, 4], lses[0, 0, 1], lses[-1, 1, 3], lses[0, 1, 5] = -math.inf, -math.inf, math.inf, 0.0
    one = out.clone()
    one_lse = lse.clone()
    for each in range(parts):
        rows = slice(3, 3 + tokens)
        merge_parts_triton(
            one[rows], one_lse[:, rows], one[rows], one_lse[:, rows], outs[each : each + 1], lses[each : each + 1]
        )
    merge_segments_(out[3 : 3 + tokens], lse[:, 3 : 3 + tokens], list(zip(outs, lses, strict=True)))
    assert torch.equal(out, one) and torch.equal(lse, one_lse)


# ---- 8-bit blocks through the Triton kernel


@pytest.mark.parametrize("stored", fast_only([torch.int8], LARGEST), ids=str)
def test_many_rows_attend_to_widened_copies(stored: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exactly, in parts of three blocks that two sequences share; and the same bits block by block."""
    module = "nanovllm.ops.triton_attention"
    monkeypatch.setattr(f"{module}.WIDENED_ROWS", 70)
    monkeypatch.setattr(f"{module}.WIDENED_TOKENS", 3 * 32)
    case = widened(Shape(24, 1, 2, 32, None, ((40, 71), (3, 66), (0, 72))), stored, [0, 2])
    gathered: list[int] = []

    def watched(pool: Tensor, entries: Tensor, out: Tensor) -> None:
        gathered.append(len(entries))
        gather_(pool, entries, out)

    monkeypatch.setattr(f"{module}.gather_", watched)
    together = case.attend(TritonAttention())
    case.check(together)
    assert gathered == [3, 3, 1], "four blocks of the first sequence, three of the last"
    pieces = [[piece] for seq in case.sequences for piece in split(seq, [1, 3], 32)]
    assert same_bits(case.attend(TritonAttention(), pieces), together)


# ---- engines


@pytest.fixture
def segments_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Dense]:
    """Engines made from now on attend whole segments of two blocks through a stand-in for the library."""
    dense = Dense()

    def faster(backend: AttentionBackend, _: Any, shapes: Any, dtype: torch.dtype, rows: int) -> AttentionBackend:
        return SegmentAttention(Library("dense", dense), backend, sorted(shapes), rows, 2 * BLOCK)

    monkeypatch.setattr(build, "faster_prefill", faster)
    yield dense


def logits_of(model_dir: Path, way: str = "layer-major", **arguments: Any) -> tuple[Tensor, bool]:
    """Logits of one prompt, since the chunks of several depend on the budget; and whether it ran layer by layer."""
    with LLM(model_dir, max_num_batched_tokens=72, **{"kvcache_block_size": BLOCK} | arguments) as llm:
        layerwise: list[Any] = []
        if arguments.get("enable_cpu_offload"):
            set_prefill(llm, way)
            layerwise = watch_layerwise(llm)
        return sorted_logits(llm, 1), bool(layerwise)


@pytest.mark.skipif(DEVICE == "cuda", reason="the stand-in takes the place of a library on the CPU")
@pytest.mark.slow
@pytest.mark.parametrize("stored", ["auto", "int8"])
def test_logits_are_bit_identical_for_every_device_budget(tmp_path: Path, segments_on_cpu: Dense, stored: str) -> None:
    """Resident, through the ring and from the layer buffer; chunks of 72 tokens begin and end within segments."""
    make_checkpoint(tmp_path, vocab=VOCAB, dtype="float16", head_dim=16, layers=2)
    resident, _ = logits_of(tmp_path, num_gpu_blocks=40, kv_cache_dtype=stored)
    counted = Counter(call[:3] for call in segments_on_cpu.calls)
    assert set(counted) == {(2 * BLOCK, 2 * BLOCK, False), (2 * BLOCK, 2 * BLOCK, True)}
    for num_gpu_blocks in (4, ALL_RESIDENT):
        for way in PREFILL_WAYS if num_gpu_blocks == 4 else ("layer-major",):
            segments_on_cpu.calls.clear()
            arguments = offloaded(BLOCK, num_gpu_blocks, 40, cpu_attention=False, kv_cache_dtype=stored)
            logits, is_layerwise = logits_of(tmp_path, way, **arguments)
            assert torch.equal(logits, resident), f"num_gpu_blocks={num_gpu_blocks}, {way}"
            assert Counter(call[:3] for call in segments_on_cpu.calls) == counted
            assert is_layerwise == (way == "layer-major" and num_gpu_blocks < ALL_RESIDENT)


# ---- the choice


def test_the_variable_names_a_library_and_a_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    for capability, names in {(9, 0): prefill_libraries.PREFERRED[9], (8, 0): (), (12, 0): ()}.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, is_=capability: is_)
        assert chosen_library("", gpu) == chosen_library("auto", gpu) == (names, 8192)
        assert chosen_library("cudnn", gpu) == (("cudnn",), 8192)
        assert chosen_library("flash-attn-3:64", gpu) == (("flash-attn-3",), 64)
    assert chosen_library("triton", gpu) == ((), 8192)
    assert chosen_library("cudnn", torch.device("cpu"))[0] == ()
    for wrong in ("cuda", "cudnn:0", "cudnn:x", "triton:-1"):
        with pytest.raises(ConfigError, match=f"NANOVLLM_PREFILL_LIBRARY='{wrong}': must be flash-attn-3"):
            chosen_library(wrong, gpu)


def test_a_library_is_used_where_it_is_right(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """One that fails, one with another base of logarithms, and one that is wrong for few KV heads unless expanded."""

    def fails(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        raise RuntimeError("no plan")

    few = Dense(least_kv_heads=4)
    libraries = {
        "failing": (Library("failing", fails),),
        "base 2": (Library("base 2", Dense(2.0)),),
        "few": (Library("few", few), Library("few, expanded", few, groups=False)),
    }
    cpu = torch.device("cpu")
    monkeypatch.setattr(prefill_libraries, "LIBRARIES", libraries)
    monkeypatch.setattr(prefill_libraries, "installed", lambda name: True)
    monkeypatch.setattr(prefill_libraries, "chosen_library", lambda *_: (list(libraries), 32))
    own = TritonAttention()
    found = {
        heads: faster_prefill(own, cpu, [(8, heads, 16)], torch.float16, 64).name.partition(" on ")[0]
        for heads in (2, 4)
    }
    assert found == {2: "few, expanded", 4: "few"}
    assert "failing does not attend 8 heads of 16 with 2 KV heads because it fails: no plan" in caplog.text
    assert "base 2 does not attend 8 heads of 16 with 4 KV heads because its error is" in caplog.text
    # A step without a whole segment, fp32, and backends that attend no single rows.
    assert faster_prefill(own, cpu, [(8, 4, 16)], torch.float16, 31) is own
    assert faster_prefill(own, cpu, [(8, 4, 16)], torch.float32, 64) is own
    assert faster_prefill(own, cpu, [], torch.float16, 64) is own
    plain = select_backend(cpu, 16)
    assert faster_prefill(plain, cpu, [(8, 4, 16)], torch.float16, 64) is plain


def test_the_check_sees_every_call_that_prefill_makes() -> None:
    square = Dense()
    ragged = Dense()
    cpu = torch.device("cpu")
    shape = (4, 2, 16)
    assert difference_from_fp64(Library("square", square), cpu, shape, torch.float16, 64) < 1e-2
    assert square.shapes() == {(64, 64, True), (64, 64, False)}
    assert difference_from_fp64(Library("ragged", ragged, any_rows=True), cpu, shape, torch.float16, 2048) < 1e-2
    assert ragged.shapes() > {(1024, 1792, True), (1024, 2048, False), (1024, 1024, True)}


def test_a_wrong_row_anywhere_is_infinitely_wrong() -> None:
    def one_nan(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        out, lse = Dense()(q, k, v, scale, causal)
        out[3, 1, 2] = math.nan
        return out, lse

    library = Library("one NaN", one_nan)
    assert difference_from_fp64(library, torch.device("cpu"), (2, 1, 16), torch.float16, 256) == math.inf


def test_torch_still_has_the_operator_as_it_is_called() -> None:
    arguments = torch.ops.aten._scaled_dot_product_cudnn_attention.default._schema.arguments
    names = "query key value attn_bias compute_log_sumexp dropout_p is_causal return_debug_mask scale"
    assert [argument.name for argument in arguments] == names.split()


@pytest.mark.cuda
@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
@pytest.mark.parametrize("shape", [(32, 8, 128), (14, 2, 64), (8, 4, 256)], ids=str)
def test_libraries_on_a_gpu(shape: tuple[int, int, int]) -> None:
    """Those that are installed and do not fail are right, at the length of a segment."""
    device = torch.device("cuda", torch.cuda.current_device())
    for name in filter(prefill_libraries.installed, LIBRARIES):
        for library in LIBRARIES[name]:
            try:
                difference = difference_from_fp64(library, device, shape, torch.bfloat16, 2048)
            except Exception as error:  # of a library that is built for other GPUs or heads
                print(f"{library.name}, {shape}: {type(error).__name__}: {error}")
            else:
                print(f"{library.name}, {shape}: off by {difference:.1e}")
                assert difference <= prefill_libraries.CHECK_BOUND


def test_cudnn_on_fake_tensors_returns_what_the_seam_says() -> None:
    """torch's own statement of shapes and strides, from FakeTensorMode."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q = torch.empty(64, 8, 32, device="cuda", dtype=torch.bfloat16)
        k, v = torch.empty(2, 2, 64, 32, device="cuda", dtype=torch.bfloat16)
        out, lse = cudnn(q, k, v, 0.1, True)
    assert out.shape == q.shape and out.stride() == q.stride() and out.dtype == q.dtype
    assert lse.shape == (8, 64) and lse.dtype == torch.float32 and lse.stride(1) == 1
