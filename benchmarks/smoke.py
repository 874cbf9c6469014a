"""Each kernel, copy and execution path of the engine once, with small sizes that take seconds.

    python -m benchmarks.smoke [--device cuda] [--output-json FILE]

Each check prints its result before the next one begins, and the file is written after each, so that a check that hangs
or kills the process loses only those after it. The checks most likely to do so come last. Without a GPU, the Triton
kernels run in the interpreter if TRITON_INTERPRET=1 is set. Exit status 1 if a check failed.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.checks import Check, expect_close, run_checks
from benchmarks.engine import device_name, generate
from benchmarks.options import Parser, add_device_option, add_json_option
from benchmarks.tiny import write_adapter, write_tiny_config
from nanovllm import LLM, SamplingParams
from nanovllm.comm import memcpy_2d_async
from nanovllm.device import create_device
from nanovllm.models.hf_config import load_network_config
from nanovllm.ops.attention import AttentionBackend
from nanovllm.ops.backends import CHECK_BOUND, cuda_backends, difference_from_reference
from nanovllm.ops.prefill_libraries import LIBRARIES, VARIABLE, installed
from nanovllm.ops.segment_attention import SegmentAttention

HEAD_DIM = 64
PROMPT_LEN = 300
OUTPUT_LEN = 6
BLOCK = 64


class Smoke:
    """The checks on one device, "cuda" or "cpu"."""

    def __init__(self, device: str, directory: Path) -> None:
        self.device = device
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float16  # the interpreter's bf16 is wrong
        self.model = write_tiny_config(directory)
        self.tokens: list[int] | None = None  # of the engine with everything on the device

    def checks(self) -> dict[str, Check]:
        """By name, those most likely to hang last."""
        from benchmarks.kernel_checks import KernelChecks  # imports Triton

        named: dict[str, Check] = {"matrix product": self.matrix_product, "pinned memory": self.pinned_memory}
        ways = ("h2d", "d2h", "d2d") if self.device == "cuda" else ("h2h",)
        for way in ways:
            named[f"strided copy, {way}"] = partial(self.strided_copy, way)
        named |= KernelChecks(self.device, self.dtype).checks()
        for backend in self.backends():
            named[f"attention: {backend.name}"] = partial(self.attention, backend)
        resident = {"num_gpu_blocks": 16}
        few = {"enable_cpu_offload": True, "num_gpu_blocks": 4, "num_cpu_blocks": 12}
        named |= {
            "engine, eager": lambda: self.engine(resident | {"enforce_eager": True}),
            "engine, decode graphs": lambda: self.engine(resident),
            "engine, LoRA adapters": lambda: self.adapters(resident),
            "engine, offloaded": lambda: self.engine(few | {"cpu_attention": False}),
            "engine, CPU attention": lambda: self.engine(few | {"cpu_attention": True}, merged_last=True),
            "engine, segments": lambda: self.segments(resident, few | {"cpu_attention": False}),
        }
        return named

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

    def sides(self, way: str) -> tuple[Tensor, Tensor]:
        """A strided source of random bytes, and an empty destination."""
        where = {"h": "cpu", "d": self.device}
        far = torch.randint(0, 256, (16 * 8192,), dtype=torch.uint8)
        near = torch.zeros(16, 4096, dtype=torch.uint8)
        tensors = [x.to(where[side]) for x, side in ((far, way[0]), (near, way[-1]))]
        if self.device == "cuda":
            tensors = [x.pin_memory() if x.device.type == "cpu" else x for x in tensors]
        return tensors[0], tensors[1]

    def copy(self, call: Callable[[Any], object]) -> None:
        if self.device == "cuda":
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            call(stream)
            torch.cuda.synchronize()
        else:
            call(0)

    # ---- attention and engines

    def backends(self) -> list[AttentionBackend]:
        if self.device == "cuda":
            of_cuda = cuda_backends(torch.device("cuda", torch.cuda.current_device()), HEAD_DIM)
            libraries = [library for name in LIBRARIES if installed(name) for library in LIBRARIES[name]]
            return of_cuda + [
                SegmentAttention(library, of_cuda[0], [(4, 2, HEAD_DIM)], 2 * BLOCK, BLOCK) for library in libraries
            ]
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

    def segments(self, resident: dict[str, Any], offloaded: dict[str, Any]) -> str:
        """With segments of one block, where there is a library: the same tokens resident and offloaded."""
        without = self.tokens
        notes = []
        for name in filter(installed, LIBRARIES):
            self.tokens = None
            with patch.dict(os.environ, {VARIABLE: f"{name}:{BLOCK}"}):
                self.engine(resident)
                self.engine(offloaded)
            notes.append(f"{name}, {'the same tokens as' if self.tokens == without else 'other tokens than'} without")
        self.tokens = without
        return "; ".join(notes) or "no library is installed"

    def adapters(self, placement: dict[str, Any]) -> str:
        """Beside a request with an adapter, one with an adapter of zeros has the tokens of the model alone."""
        network = load_network_config(self.model).network
        sizes = (0.0, 50.0)
        requests = [
            write_adapter(self.model.parent / f"adapter-{i}", network, ["q_proj"], 8, i, size)
            for i, size in enumerate(sizes, start=1)
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


def run(args: argparse.Namespace) -> int:
    device = device_name(args.device)
    with tempfile.TemporaryDirectory(prefix="nanovllm-smoke-") as directory:
        return run_checks(Smoke(device, Path(directory) / "model").checks(), args, device)


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="smoke", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_device_option(parser)
    add_json_option(parser)
    return parser.run(argv, run)


if __name__ == "__main__":
    sys.exit(main())
