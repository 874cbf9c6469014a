"""Each kernel, copy and execution path of the engine once, with small sizes that take seconds.

    python -m benchmarks.smoke [--device cuda] [--output-json FILE]

Each check prints its result before the next one begins, and the file is written after each, so that a check that hangs
or kills the process loses only those after it. The checks most likely to do so come last. Without a GPU, the Triton
kernels run in the interpreter if TRITON_INTERPRET=1 is set. Exit status 1 if a check failed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.engine import device_name, generate
from benchmarks.options import Parser, add_device_option, add_json_option, exit_status
from benchmarks.report import machine_facts, write_json
from benchmarks.tiny import write_tiny_config
from nanovllm import LLM, SamplingParams
from nanovllm.comm import memcpy_2d_async, memcpy_batch_async
from nanovllm.device import create_device
from nanovllm.layers.rope_spec import RopeSpec
from nanovllm.layers.rotary import RotaryEmbedding
from nanovllm.lora.request import LoRARequest
from nanovllm.ops.attention import AttentionBackend
from nanovllm.ops.backends import CHECK_BOUND, cuda_backends, difference_from_reference
from nanovllm.ops.cpu_kernels import add_rms_norm_, place_heads, rms_norm
from nanovllm.ops.kv_quantization import LARGEST, quantize_rows_torch
from nanovllm.ops.merge import merge_states_torch_
from nanovllm.ops.packed_weights import PackedWeight, dequantize
from nanovllm.ops.row_kernels import gelu_tanh_and_mul, silu_and_mul, store_kv

ROWS, HEADS, KV_HEADS, HEAD_DIM = 5, 4, 2, 64
PROMPT_LEN, OUTPUT_LEN, BLOCK = 300, 6, 64


@dataclass(frozen=True, slots=True)
class Outcome:
    check: str
    good: bool
    seconds: float
    note: str


Check = Callable[[], str | None]  # returns a note; raises on an error


class Smoke:
    """The checks on one device, "cuda" or "cpu"."""

    def __init__(self, device: str, directory: Path) -> None:
        self.device = device
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float16  # the interpreter's bf16 is wrong
        self.model = write_tiny_config(directory)
        self.tokens: list[int] | None = None  # of the engine with everything on the device

    def checks(self) -> dict[str, Check]:
        """By name, those most likely to hang last."""
        found: dict[str, Check] = {"matrix product": self.matrix_product, "pinned memory": self.pinned_memory}
        ways = ("h2d", "d2h", "d2d") if self.device == "cuda" else ("h2h",)
        for way in ways:
            found[f"strided copy, {way}"] = lambda way=way: self.strided_copy(way)
            found[f"batch of copies, {way}"] = lambda way=way: self.batch_copy(way)
        for name, kernel in self.kernels().items():
            found[name] = kernel
        for backend in self.backends():
            found[f"attention: {backend.name}"] = lambda backend=backend: self.attention(backend)
        resident = {"num_gpu_blocks": 16}
        few = {"enable_cpu_offload": True, "num_gpu_blocks": 4, "num_cpu_blocks": 12}
        found |= {
            "engine, eager": lambda: self.engine(resident | {"enforce_eager": True}),
            "engine, decode graphs": lambda: self.engine(resident),
            "engine, LoRA adapters": lambda: self.adapters(resident),
            "engine, offloaded": lambda: self.engine(few | {"cpu_attention": False}),
            "engine, CPU attention": lambda: self.engine(few | {"cpu_attention": True}, merged_last=True),
        }
        return found

    # ---- memory and copies

    def matrix_product(self) -> None:
        x = torch.eye(256, device=self.device, dtype=torch.float32)
        expect_close(x @ x, x, 0.0)

    def pinned_memory(self) -> str:
        with closing(create_device(self.device)) as device:
            size = 64 << 20 if self.device == "cuda" else 1 << 20
            memory = device.empty_host("smoke", (size,), torch.uint8)
            memory[-1] = 7
            on_device = memory.to(device.torch_device, non_blocking=True)
            assert int(on_device[-1]) == 7
            return f"{size >> 20} MiB, {device.free_host_memory() >> 20} MiB of host memory free"

    def strided_copy(self, way: str) -> None:
        far, near = self.sides(way)
        self.copy(lambda stream: memcpy_2d_async(near, far, 4096, 8192, 4096, 16, way, stream))
        expect_close(near.cpu(), far.view(16, 2, 4096)[:, 0].cpu(), 0.0)

    def batch_copy(self, way: str) -> None:
        far, near = self.sides(way)
        pieces = list(far.view(16, 2, 4096)[:, 0])
        self.copy(lambda stream: memcpy_batch_async(list(near), pieces, [4096] * 16, way, stream))
        expect_close(near.cpu(), far.view(16, 2, 4096)[:, 0].cpu(), 0.0)

    def sides(self, way: str) -> tuple[Tensor, Tensor]:
        """A strided source of random bytes, and an empty destination."""
        where = {"h": "cpu", "d": self.device}
        far = torch.randint(0, 256, (16 * 8192,), dtype=torch.uint8)
        near = torch.zeros(16, 4096, dtype=torch.uint8)
        found = [x.to(where[side]) for x, side in ((far, way[0]), (near, way[-1]))]
        if self.device == "cuda":
            found = [x.pin_memory() if x.device.type == "cpu" else x for x in found]
        return found[0], found[1]

    def copy(self, call: Callable[[Any], object]) -> None:
        if self.device == "cuda":
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            call(stream)
            torch.cuda.synchronize()
        else:
            call(0)

    # ---- kernels

    def kernels(self) -> dict[str, Check]:
        """The Triton kernels against the plain versions, which run on the CPU."""
        from nanovllm.ops import triton_packed, triton_rows
        from nanovllm.ops.triton_attention import TritonAttention
        from nanovllm.ops.triton_experts import grouped_linear, weighted_sum
        from nanovllm.ops.triton_kv import quantize_rows_triton
        from nanovllm.ops.triton_merge import merge_parts_triton

        def store() -> None:
            pool, k, v = self.random(3, 2, KV_HEADS, 16, HEAD_DIM), *self.random(2, ROWS, KV_HEADS, HEAD_DIM)
            slots, plain = torch.tensor([40, -1, 3, 16, 15]), pool.cpu().clone().clone()
            store_kv(plain, k.cpu(), v.cpu(), slots)
            triton_rows.store_kv(pool, k, v, slots.to(self.device))
            expect_close(pool.cpu(), plain, 0.0)

        def merge() -> None:
            out, part = self.random(2, ROWS, HEADS, HEAD_DIM).float()
            lse, part_lse = self.random(2, HEADS, ROWS).float()
            plain = out.cpu().clone(), lse.cpu().clone()
            merge_states_torch_(*plain, part.cpu(), part_lse.cpu())
            merge_parts_triton(out, lse, out, lse, part[None], part_lse[None])
            expect_close(out.cpu(), plain[0], 1e-5)
            expect_close(lse.cpu(), plain[1], 1e-5)

        def norms() -> None:
            x, residual, weight = self.random(ROWS, 96), self.random(ROWS, 96), self.random(96)
            plain = residual.cpu().clone()
            for kind in (weight, weight.float()):
                expected = rms_norm(x.cpu(), kind.cpu(), 1e-6)
                expect_close(triton_rows.rms_norm(x, kind, 1e-6).cpu(), expected, 4e-2)
            expected = add_rms_norm_(plain, x.cpu(), weight.cpu(), 1e-6)
            expect_close(triton_rows.add_rms_norm_(residual, x, weight, 1e-6).cpu(), expected, 4e-2)
            expect_close(residual.cpu(), plain, 0.0)

        def heads() -> None:
            positions = torch.arange(ROWS) * 999
            cos, sin = RotaryEmbedding(RopeSpec(), HEAD_DIM, torch.device("cpu")).cos_sin(positions, positions + 1)
            x = self.random(ROWS, HEADS + 2 * KV_HEADS, HEAD_DIM)
            weight = self.random(HEADS + KV_HEADS, HEAD_DIM)
            for kind in (weight, weight.float()):
                placed, plain = ([x.new_empty(ROWS, n, HEAD_DIM, device=where) for n in (HEADS, KV_HEADS, KV_HEADS)]
                                 for where in (self.device, "cpu"))  # fmt: skip
                triton_rows.place_heads(x, kind, 1e-6, cos.to(self.device), sin.to(self.device), *placed)
                place_heads(x.cpu(), kind.cpu(), 1e-6, cos, sin, *plain)
                for ours, theirs in zip(placed, plain, strict=True):
                    expect_close(ours.cpu(), theirs, 5e-2)

        def activation() -> None:
            x = self.random(ROWS, 192)
            expect_close(triton_rows.silu_and_mul(x).cpu(), silu_and_mul(x.cpu()), 4e-2)
            expect_close(triton_rows.gelu_tanh_and_mul(x).cpu(), gelu_tanh_and_mul(x.cpu()), 4e-2)

        def draw() -> None:
            scores = torch.zeros(ROWS, 3000)
            scores[torch.arange(ROWS), torch.arange(ROWS) * 500] = 1e4
            starts, tokens = torch.arange(ROWS), torch.arange(3000)
            drawn = triton_rows.draw(*(x.to(self.device) for x in (scores, tokens, starts)))
            assert drawn.tolist() == [500 * row for row in range(ROWS)], drawn

        def experts() -> None:
            x, weights = self.random(ROWS, 96), self.random(3, 80, 96)
            rows, ends = torch.tensor([0, 2, 4, 1, 4]), torch.tensor([1, 1, 5])
            y = grouped_linear(x, weights, ends.to(self.device), rows.to(self.device))
            expected = torch.cat([x[:1].cpu().float() @ weights[0].cpu().float().T,
                                  x[rows[1:]].cpu().float() @ weights[2].cpu().float().T])  # fmt: skip
            expect_close(y.cpu().float(), expected, 0.3)
            entries, shares = torch.tensor([[0, 4], [3, 1]]), torch.tensor([[0.25, 0.75], [0.5, 0.5]])
            summed = weighted_sum(y, entries.to(self.device), shares.to(self.device))
            expect_close(summed.cpu().float(), (y.cpu().float()[entries] * shares[..., None]).sum(1), 0.2)

        def packed() -> None:
            codes = torch.randint(0, 256, (96, 64), dtype=torch.uint8)
            scales, zeros = torch.rand(96, 4).half() / 16, torch.randint(0, 16, (96, 4), dtype=torch.uint8)
            fp8 = (torch.rand(96, 128) - 0.5).to(torch.float8_e4m3fn)
            for weight in (
                PackedWeight("int4", codes, scales, zeros, 32, 128),
                PackedWeight("fp8", fp8, torch.rand(1, 1), None, 128, 128),
            ):
                for rows in (1, 40):
                    x = self.random(rows, 128) / 16
                    parts = [weight.data, weight.scales, weight.zeros]
                    on_device = [None if part is None else part.to(self.device) for part in parts]
                    y = triton_packed.packed_linear(x, weight.scheme, *on_device, weight.group_size)
                    expect_close(y.cpu(), x.cpu().double() @ dequantize(weight).double().T, 4e-2)

        def kv_in_8_bits() -> None:
            x = self.random(ROWS, KV_HEADS, HEAD_DIM)
            for dtype in LARGEST:
                rows = quantize_rows_triton(x, dtype).cpu().view(torch.uint8)
                assert torch.equal(rows, quantize_rows_torch(x.cpu(), dtype).view(torch.uint8)), dtype
                if self.device == "cuda":  # the interpreter's products of bf16 are wrong
                    backend, device = TritonAttention(), torch.device(self.device)
                    difference = difference_from_reference(backend, device, HEAD_DIM, dtype)
                    assert difference <= CHECK_BOUND, (dtype, difference)

        return {
            "packed_linear": packed,
            "kv_in_8_bits": kv_in_8_bits,
            "store_kv": store,
            "merge": merge,
            "norms": norms,
            "heads": heads,
            "silu_and_mul": activation,
            "draw": draw,
            "experts": experts,
        }

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape).to(self.device, self.dtype)

    # ---- attention and engines

    def backends(self) -> list[AttentionBackend]:
        if self.device == "cuda":
            return cuda_backends(torch.device("cuda", torch.cuda.current_device()), HEAD_DIM)
        from nanovllm.ops.cpu_attention import NativeAttention

        return [NativeAttention()]

    def attention(self, backend: AttentionBackend) -> str:
        difference = difference_from_reference(backend, torch.device(self.device), HEAD_DIM)
        assert difference <= CHECK_BOUND, f"wrong by {difference:g}"
        return f"off by {difference:.1e} at most"

    def engine(self, placement: dict[str, Any], merged_last: bool = False) -> str:
        """The same greedy tokens as the first engine. With a GPU, the CPU's partial state is merged last."""
        prompt = torch.randint(0, 512, (PROMPT_LEN,), generator=torch.Generator().manual_seed(1)).tolist()
        sizes = {"max_model_len": PROMPT_LEN + OUTPUT_LEN, "max_num_seqs": 2, "max_num_batched_tokens": 128}
        sizes |= {"kvcache_block_size": BLOCK, "swap_space": 0}
        options = sizes | placement | {"enable_prefix_caching": False}
        with LLM(self.model, load_format="dummy", device=self.device, **options) as llm:
            tokens = generate(llm, [prompt], OUTPUT_LEN)[0].outputs[0].token_ids
            moved = llm.kv_stats().transfers
        self.tokens = self.tokens or tokens
        same = sum(ours == first for ours, first in zip(tokens, self.tokens, strict=True))
        assert same == OUTPUT_LEN or (merged_last and self.device == "cuda"), f"{tokens}, expected {self.tokens}"
        return f"{same} of {OUTPUT_LEN} tokens equal, {moved.h2d_copies} loads, {moved.d2h_copies} stores"

    def adapters(self, placement: dict[str, Any]) -> str:
        """Beside a request with an adapter, one with an adapter of zeros has the tokens of the model alone."""
        requests = [
            write_adapter(self.model.parent / name, size, i) for i, (name, size) in enumerate(ADAPTERS, start=1)
        ]
        prompt = torch.randint(0, 512, (PROMPT_LEN,), generator=torch.Generator().manual_seed(1)).tolist()
        params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_LEN, ignore_eos=True)
        options = {
            "max_model_len": PROMPT_LEN + OUTPUT_LEN,
            "max_num_seqs": 3,
            "kvcache_block_size": BLOCK,
            **placement,
        }
        with LLM(self.model, load_format="dummy", device=self.device, enable_lora=True, max_loras=2, **options) as llm:
            lora_requests = [None, *requests]
            outputs = llm.generate([prompt] * 3, params, use_tqdm=False, lora_request=lora_requests)
        alone, zeros, changed = (output.outputs[0].token_ids for output in outputs)
        assert alone == zeros != changed, f"{zeros}, expected {alone}; with an adapter {changed}"
        return "an adapter changes its own rows"


ADAPTERS = (("zeros", 0.0), ("random", 0.5))  # size of the numbers of B


def write_adapter(directory: Path, size: float, number: int) -> LoRARequest:
    """An adapter of the tiny network's q projections."""
    directory.mkdir()
    tensors: dict[str, Tensor] = {}
    for layer in range(2):
        prefix = f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_"
        tensors |= {f"{prefix}A.weight": torch.randn(8, 128), f"{prefix}B.weight": torch.randn(256, 8) * size}
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return LoRARequest(directory.name, number, str(directory))


def expect_close(found: Tensor, expected: Tensor, bound: float) -> None:
    """Raise AssertionError if any element differs by more than `bound` or is NaN."""
    difference = (found.double() - expected.double()).abs().nan_to_num(torch.inf).max().item()
    assert difference <= bound, f"off by {difference:g}, {bound:g} is allowed"


def run(args: argparse.Namespace) -> int:
    device = device_name(args.device)
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="nanovllm-smoke-") as directory:
        for name, check in Smoke(device, Path(directory) / "model").checks().items():
            print(f"{name:<60}", end="", flush=True)
            outcomes.append(outcome_of(name, check))
            print(f"{'good' if outcomes[-1].good else 'FAILED':<8}{outcomes[-1].note}", flush=True)
            write_json(args.output_json, args, machine_facts(device), checks=outcomes)
    return 0 if all(outcome.good for outcome in outcomes) else 1


def outcome_of(name: str, check: Check) -> Outcome:
    start = time.perf_counter()
    try:
        good, note = True, check() or ""
    except Exception as error:  # a failure of any type does not stop the other checks
        traceback.print_exc()
        good, note = False, f"{type(error).__name__}: {error}".partition("\n")[0]
    return Outcome(name, good, time.perf_counter() - start, note)


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="smoke", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_device_option(parser)
    add_json_option(parser)
    args = parser.parse_args(argv)
    return exit_status("smoke", lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
