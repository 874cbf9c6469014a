"""The cuDNN backend: what it takes and what it leaves, over a stand-in for torch's operator where there is no GPU."""

from __future__ import annotations

import math

import pytest
import torch
from attention_cases import Case, Shape, same_bits, split
from torch import Tensor

from nanovllm.ops import backends
from nanovllm.ops.attention import AttentionBackend, AttentionMetadata, AttentionState
from nanovllm.ops.backends import cuda_backends, first_right, row_attention, select_backend
from nanovllm.ops.cpu_attention import NativeAttention
from nanovllm.ops.cudnn_attention import CudnnAttention, cudnn_attention
from nanovllm.ops.kernel_config import DecodeConfig, PrefillConfig, TunedEntry
from nanovllm.ops.torch_attention import TorchAttention
from nanovllm.ops.triton_attention import TritonAttention

WHOLE = Shape(32, 2, 2, 64, None, ((128, 192), (0, 128)))  # both sequences begin and end with a block


class Operator:
    """What the operator promises, from the definition; counts its calls by their shapes."""

    def __init__(self, base: float = math.e) -> None:
        self.calls: list[tuple[int, int, bool]] = []
        self._base = base

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        queries, keys = q.shape[0], k.shape[1]
        assert not causal or queries == keys, "its causal mask is aligned top-left"
        self.calls.append((queries, keys, causal))
        group = q.shape[1] // k.shape[0]
        k, v = (x.double().repeat_interleave(group, 0) for x in (k, v))
        scores = torch.einsum("thd,hsd->hts", q.double(), k) * scale
        if causal:
            scores.masked_fill_(torch.ones(queries, keys, dtype=torch.bool).triu(1), -math.inf)
        lse = torch.logsumexp(scores, dim=-1)
        out = torch.einsum("hts,hsd->thd", scores.softmax(-1), v)
        return out.to(q.dtype), (lse / math.log(self._base)).float()


class Other(NativeAttention):
    """Remembers how many rows it was left."""

    rows = 0

    def attend(
        self, q: Tensor, pool: Tensor, table: AttentionMetadata, state: AttentionState, scale: float, window: int | None
    ) -> None:
        self.rows += sum(seq.query_len for seq in table.sequences)
        super().attend(q, pool, table, state, scale, window)


def test_whole_blocks_are_attended_exactly_in_few_shapes() -> None:
    case, operator, other = Case(WHOLE, torch.bfloat16, 1), Operator(), Other()
    together = case.attend(CudnnAttention(operator, other))
    case.check(together)
    assert other.rows == 0
    assert set(operator.calls) == {(192, 64, False), (64, 64, True), (128, 64, False), (64, 64, False)}
    alone = [[piece] for seq in case.sequences for piece in split(seq, [1, 2, 3], 64)]
    assert same_bits(case.attend(CudnnAttention(operator, other), alone), together)


@pytest.mark.parametrize(
    "shape, dtype, from_block, left",
    [
        (Shape(32, 1, 2, 64, None, ((128, 190), (5, 128), (0, 128))), torch.bfloat16, 1, 318),  # a ragged end, or begin
        (Shape(32, 1, 2, 16, None, ((128, 64), (100, 1), (0, 80))), torch.bfloat16, 1, 65),  # few rows
        (Shape(32, 1, 2, 64, 50, ((128, 192),)), torch.bfloat16, 1, 192),  # a window
        (WHOLE, torch.float32, 1, 320),
        (WHOLE, torch.bfloat16, 65, 320),  # small blocks
        (WHOLE, torch.bfloat16, 64, 0),
    ],
    ids=["ragged", "few rows", "window", "fp32", "small blocks", "large blocks"],
)
def test_what_does_not_fit_is_left_to_another_backend(
    shape: Shape, dtype: torch.dtype, from_block: int, left: int
) -> None:
    case, operator, other = Case(shape, dtype, 2), Operator(), Other()
    case.check(case.attend(CudnnAttention(operator, other, from_block)))
    total = sum(seq.query_len for seq in case.sequences)
    assert other.rows == left and bool(operator.calls) == (left < total)


def test_the_check_before_use_reaches_the_operator(caplog: pytest.LogCaptureFixture) -> None:
    """Also where it is to be used for large blocks only: one with another base of logarithms is passed over."""
    right, wrong = (CudnnAttention(Operator(base), NativeAttention(), 4096) for base in (math.e, 2.0))
    cpu, other = torch.device("cpu"), TorchAttention()
    assert first_right([right, other], cpu, 64) is right
    assert first_right([wrong, other], cpu, 64) is other
    assert "cuDNN attention on whole blocks, else native" in caplog.text
    assert "is not used because its error is" in caplog.text


def test_a_graph_records_what_attends_to_few_rows() -> None:
    own = TritonAttention()
    assert row_attention(CudnnAttention(Operator(), own)) is own


ENTRY = TunedEntry(128, "bfloat16", PrefillConfig(128, 64, 8, 3), DecodeConfig(64, 4, 3, 4, 4), 1024)


@pytest.mark.parametrize("entry, place", [(ENTRY, 0), (None, -1)], ids=["tuned", "no table"])
def test_it_comes_first_only_where_a_sweep_found_it_faster(
    entry: TunedEntry | None, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "triton_runs", lambda: True)
    monkeypatch.setattr(backends, "cudnn_takes", lambda *_: True)
    monkeypatch.setattr(backends, "tuned_entry", lambda *_: entry)
    found: list[AttentionBackend] = cuda_backends(torch.device("cuda"), 128)
    assert isinstance(found[place], CudnnAttention)
    assert [isinstance(backend, CudnnAttention) for backend in found].count(True) == 1
    assert any(isinstance(backend, TritonAttention) for backend in found)


def test_torch_still_has_the_operator_as_it_is_called() -> None:
    arguments = torch.ops.aten._scaled_dot_product_cudnn_attention.default._schema.arguments
    names = "query key value attn_bias compute_log_sumexp dropout_p is_causal return_debug_mask scale"
    assert [argument.name for argument in arguments] == names.split()


@pytest.mark.cuda
@pytest.mark.parametrize("head_dim", [64, 128])
def test_on_a_gpu(head_dim: int) -> None:
    case = Case(Shape(head_dim, 2, 4, 64, None, ((128, 192), (0, 128), (3, 70))), torch.bfloat16, 1, "cuda")
    case.check(case.attend(CudnnAttention(cudnn_attention, select_backend(torch.device("cuda"), head_dim))))
