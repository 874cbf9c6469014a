"""The Triton kernels with small sizes against the plain versions, which run on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks import interpreted_ptx
from benchmarks.checks import Check, expect_close
from benchmarks.kernel_variants import few_rows_variants
from nanovllm.data.network import RopeSpec
from nanovllm.formats.gguf.header import TENSOR_TYPES
from nanovllm.formats.gguf.model import GgufWeight
from nanovllm.layers.rotary import RotaryEmbedding
from nanovllm.ops import row_kernels, triton_gguf, triton_packed, triton_rows
from nanovllm.ops.backends import CHECK_BOUND, difference_from_reference
from nanovllm.ops.cpu_kernels import add_rms_norm_, place_heads, rms_norm
from nanovllm.ops.gguf_planes import PLANES
from nanovllm.ops.kv_quantization import LARGEST, quantize_rows_torch
from nanovllm.ops.merge import merge_attention_outputs_torch
from nanovllm.ops.packed_weights import PackedWeight, dequantize
from nanovllm.ops.triton_attention import TritonAttention
from nanovllm.ops.triton_experts import grouped_linear, weighted_sum
from nanovllm.ops.triton_few_rows import few_rows_linear
from nanovllm.ops.triton_kv import quantize_rows_triton
from nanovllm.ops.triton_merge import merge_parts_triton

ROWS = 5
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 64


def random_gguf(scheme: str, out_features: int, in_features: int, device: str | torch.device = "cpu") -> PackedWeight:
    """A weight of a GGUF type with random values, as a file has it."""
    kind = TENSOR_TYPES[scheme.upper()]
    of_device = torch.device(device)
    weight = GgufWeight(kind, {"matrix": out_features}, in_features, torch.float32, of_device)
    for _, slot in weight.slots():
        assert slot.randomize is not None
        slot.randomize(torch.Generator(device=of_device).manual_seed(0))
    return weight.packed


class KernelChecks:
    """One check for each kernel, on "cuda" or in Triton's interpreter on "cpu"."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype
        if device == "cpu":
            interpreted_ptx.install()

    def checks(self) -> dict[str, Check]:
        return {
            "packed_linear": self.packed,
            "gguf_linear": self.gguf,
            "kv_in_8_bits": self.kv_in_8_bits,
            "store_kv": self.store,
            "merge": self.merge,
            "norms": self.norms,
            "heads": self.heads,
            "silu_and_mul": self.activation,
            "draw": self.draw,
            "experts": self.experts,
            "few_rows_linear": self.few_rows,
        }

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape).to(self.device, self.dtype)

    def store(self) -> None:
        pool, k, v = self.random(3, 2, KV_HEADS, 16, HEAD_DIM), *self.random(2, ROWS, KV_HEADS, HEAD_DIM)
        slots = torch.tensor([40, -1, 3, 16, 15])
        plain = pool.cpu().clone()
        row_kernels.store_kv(plain, k.cpu(), v.cpu(), slots)
        triton_rows.store_kv(pool, k, v, slots.to(self.device))
        expect_close(pool.cpu(), plain, 0.0)

    def merge(self) -> None:
        out, part = self.random(2, ROWS, HEADS, HEAD_DIM).float()
        lse, part_lse = self.random(2, HEADS, ROWS).float()
        plain = out.cpu().clone(), lse.cpu().clone()
        merge_attention_outputs_torch(*plain, part.cpu(), part_lse.cpu())
        merge_parts_triton(out, lse, out, lse, part[None], part_lse[None])
        expect_close(out.cpu(), plain[0], 1e-5)
        expect_close(lse.cpu(), plain[1], 1e-5)

    def norms(self) -> None:
        x = self.random(ROWS, 96)
        residual = self.random(ROWS, 96)
        weight = self.random(96)
        plain = residual.cpu().clone()
        for kind in (weight, weight.float()):
            expected = rms_norm(x.cpu(), kind.cpu(), 1e-6)
            expect_close(triton_rows.rms_norm(x, kind, 1e-6).cpu(), expected, 4e-2)
        expected = add_rms_norm_(plain, x.cpu(), weight.cpu(), 1e-6)
        expect_close(triton_rows.add_rms_norm_(residual, x, weight, 1e-6).cpu(), expected, 4e-2)
        expect_close(residual.cpu(), plain, 0.0)

    def heads(self) -> None:
        positions = torch.arange(ROWS) * 999
        cos, sin = RotaryEmbedding(RopeSpec(), HEAD_DIM, torch.device("cpu")).cos_sin(positions)
        x = self.random(ROWS, HEADS + 2 * KV_HEADS, HEAD_DIM)
        weight = self.random(HEADS + KV_HEADS, HEAD_DIM)
        for kind in (weight, weight.float()):
            placed, plain = ([x.new_empty(ROWS, n, HEAD_DIM, device=where) for n in (HEADS, KV_HEADS, KV_HEADS)]
                             for where in (self.device, "cpu"))  # fmt: skip
            triton_rows.place_heads(x, kind, 1e-6, cos.to(self.device), sin.to(self.device), *placed)
            place_heads(x.cpu(), kind.cpu(), 1e-6, cos, sin, *plain)
            for ours, theirs in zip(placed, plain, strict=True):
                expect_close(ours.cpu(), theirs, 5e-2)

    def activation(self) -> None:
        x = self.random(ROWS, 192)
        expect_close(triton_rows.silu_and_mul(x).cpu(), row_kernels.silu_and_mul(x.cpu()), 4e-2)
        expect_close(triton_rows.gelu_tanh_and_mul(x).cpu(), row_kernels.gelu_tanh_and_mul(x.cpu()), 4e-2)

    def draw(self) -> None:
        scores = torch.zeros(ROWS, 3000)
        scores[torch.arange(ROWS), torch.arange(ROWS) * 500] = 1e4
        starts = torch.arange(ROWS)
        tokens = torch.arange(3000)
        drawn = triton_rows.draw(*(x.to(self.device) for x in (scores, tokens, starts)))
        assert drawn.tolist() == [500 * row for row in range(ROWS)], drawn

    def experts(self) -> None:
        x = self.random(ROWS, 96)
        weights = self.random(3, 80, 96)
        rows = torch.tensor([0, 2, 4, 1, 4])
        ends = torch.tensor([1, 1, 5])
        y = grouped_linear(x, weights, ends.to(self.device), rows.to(self.device))
        expected = torch.cat([x[:1].cpu().float() @ weights[0].cpu().float().T,
                              x[rows[1:]].cpu().float() @ weights[2].cpu().float().T])  # fmt: skip
        expect_close(y.cpu().float(), expected, 0.3)
        entries = torch.tensor([[0, 4], [3, 1]])
        shares = torch.tensor([[0.25, 0.75], [0.5, 0.5]])
        summed = weighted_sum(y, entries.to(self.device), shares.to(self.device))
        expect_close(summed.cpu().float(), (y.cpu().float()[entries] * shares[..., None]).sum(1), 0.2)

    def few_rows(self) -> None:
        x = self.random(ROWS, 96)
        weight = self.random(80, 96)
        expected = x.cpu().float() @ weight.cpu().float().T
        for config in few_rows_variants()[::3]:
            expect_close(few_rows_linear(x, weight, None, config).cpu().float(), expected, 0.3)

    def packed(self) -> None:
        codes = torch.randint(0, 256, (96, 64), dtype=torch.uint8)
        scales = torch.rand(96, 4).half() / 16
        zeros = torch.randint(0, 16, (96, 4), dtype=torch.uint8)
        fp8 = (torch.rand(96, 128) - 0.5).to(torch.float8_e4m3fn)
        for weight in (
            PackedWeight("int4", codes, scales, zeros, 32, 128),
            PackedWeight("fp8", fp8, torch.rand(96, 1), None, 128, 128),
        ):
            assert weight.scales is not None
            points = None if weight.zeros is None else weight.zeros.to(self.device)
            for rows in (1, 40):
                x = self.random(rows, 128) / 16
                data = weight.data.to(self.device)
                scales = weight.scales.to(self.device)
                y = triton_packed.packed_linear(x, weight.scheme, data, scales, points, weight.group_size)
                expect_close(y.cpu(), x.cpu().double() @ dequantize(weight).double().T, 4e-2)

    def gguf(self) -> None:
        for scheme in PLANES:
            stored = random_gguf(scheme, 96, 512)
            dense = dequantize(stored)
            weight = stored.to(self.device).in_planes()
            values = triton_gguf.gguf_dequantize_(weight, torch.empty(96, 512, device=self.device))
            assert torch.equal(values.cpu(), dense), scheme
            for rows in (1, 20):
                x = self.random(rows, 512) / 16
                y = triton_gguf.gguf_linear(x, weight)
                expect_close(y.cpu(), x.cpu().double() @ dense.double().T, 4e-2)

    def kv_in_8_bits(self) -> None:
        x = self.random(ROWS, KV_HEADS, HEAD_DIM)
        for dtype in LARGEST:
            rows = quantize_rows_triton(x, dtype).cpu().view(torch.uint8)
            assert torch.equal(rows, quantize_rows_torch(x.cpu(), dtype).view(torch.uint8)), dtype
            if self.device == "cuda":  # the interpreter's products of bf16 are wrong
                backend = TritonAttention()
                device = torch.device(self.device)
                difference = difference_from_reference(backend, device, HEAD_DIM, dtype)
                assert difference <= CHECK_BOUND, (dtype, difference)
