"""nanovllm with random weights and a KV cache of exactly the size that the work needs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch

from benchmarks.report import machine_facts
from benchmarks.shapes import Shape
from benchmarks.timing import RequestTiming, RunTiming
from nanovllm import LLM, RequestOutput, SamplingParams
from nanovllm.config import MIN_GPU_BLOCKS
from nanovllm.device import create_device
from nanovllm.engine.block_manager import WATERMARK
from nanovllm.errors import ConfigError
from nanovllm.memory.budget import split_device
from nanovllm.memory.layout import kv_layout
from nanovllm.ops import select_backend


@dataclass(frozen=True, slots=True)
class Work:
    """The work of an engine. Lengths in tokens. Prefix caching is off, so that every repeat computes everything."""

    shape: Shape
    prompt_len: int
    output_len: int
    num_prompts: int
    block_size: int
    max_num_batched_tokens: int
    device: str | None
    seed: int
    kv_cache_dtype: str = "auto"

    @classmethod
    def of(cls, shape: Shape, args: argparse.Namespace, prompt_len: int, output_len: int, num_prompts: int = 1) -> Work:
        """The other sizes from the options that all benchmarks share."""
        return cls(
            shape=shape,
            prompt_len=prompt_len,
            output_len=output_len,
            num_prompts=num_prompts,
            block_size=args.block_size,
            max_num_batched_tokens=args.max_num_batched_tokens,
            device=args.device,
            seed=args.seed,
            kv_cache_dtype=getattr(args, "kv_cache_dtype", "auto"),  # not every benchmark has the option
        )

    @property
    def num_blocks(self) -> int:
        """KV blocks for all sequences at the same time, including those that the block manager keeps free."""
        layout = kv_layout(self.shape.network, self.kv_cache_dtype).with_block_size(self.block_size)
        tokens = self.prompt_len + self.output_len
        total = self.num_prompts * layout.groups.most_blocks(tokens, self.max_num_batched_tokens)
        needed = total
        while total - int(WATERMARK * total) < needed:
            total += 1
        return max(total, MIN_GPU_BLOCKS)

    def open(self, **placement: Any) -> LLM:
        """An engine for the work. `placement`: engine arguments for the memory of its blocks, and their dtype."""
        return LLM(
            self.shape.path,
            load_format=self.shape.load_format,
            dtype=str(self.shape.dtype).removeprefix("torch."),
            device=self.device,
            max_model_len=self.prompt_len + self.output_len,
            max_num_seqs=self.num_prompts,
            max_num_batched_tokens=self.max_num_batched_tokens,
            kvcache_block_size=self.block_size,
            enable_prefix_caching=False,
            seed=self.seed,
            swap_space=0,  # nothing is swapped, and allocating pinned memory takes seconds
            **{"kv_cache_dtype": self.kv_cache_dtype, **placement},
        )

    def on_device(self) -> dict[str, Any]:
        """Everything resident, without offload."""
        return {"num_gpu_blocks": self.num_blocks}

    def resident(self) -> dict[str, Any]:
        """Everything resident, with offload: its code path with nothing to copy."""
        return {
            "enable_cpu_offload": True,
            "num_gpu_blocks": self.num_blocks + self._ring_blocks(),
            "num_cpu_blocks": 0,
        }

    def offloaded(self, share: Fraction) -> dict[str, Any]:
        """`share` of the blocks on the device, ring included, and the rest on the host. Raises ConfigError."""
        device_blocks = int(self.num_blocks * share)
        if device_blocks < self._ring_blocks():
            raise ConfigError(
                f"--device-share {share} of {self.num_blocks} blocks is {device_blocks} on the device, and the ring"
                f" takes {self._ring_blocks()}: name a longer prompt, smaller blocks or a larger share"
            )
        resident = device_blocks - self._ring_blocks()
        return {
            "enable_cpu_offload": True,
            "num_gpu_blocks": device_blocks,
            "num_cpu_blocks": max(0, self.num_blocks - resident),
        }

    def _ring_blocks(self) -> int:
        return -split_device(0, self.shape.network.num_layers).resident_blocks


def device_name(device: str | None) -> str:
    """The device that --device selects. Raises ConfigError if it is not available."""
    opened = create_device(device)
    opened.close()
    return opened.name


def attention_backend(shape: Shape, device: str) -> str:
    """The attention backend of a device, given by its name. Raises ConfigError if there is none."""
    return select_backend(torch.device(device), shape.network.kv_heads[0][1]).name


def engine_facts(shape: Shape, device: str | None) -> dict[str, Any]:
    """Facts of the machine with the device of --device and its attention backend. Raises ConfigError."""
    name = device_name(device)
    return machine_facts(name) | {"attention": attention_backend(shape, name)}


def generate(llm: LLM, prompts: list[list[int]], output_len: int) -> list[RequestOutput]:
    """Greedy, and always --output-len tokens long."""
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    return llm.generate(prompts, params, use_tqdm=False)


def timing_of(outputs: Sequence[RequestOutput]) -> RunTiming:
    return RunTiming(tuple(map(_request_timing, outputs)))


def _request_timing(output: RequestOutput) -> RequestTiming:
    metrics = output.metrics
    scheduled = metrics.first_scheduled_time
    first = metrics.first_token_time
    finished = metrics.finished_time
    assert scheduled is not None and first is not None and finished is not None, "the request has finished"
    return RequestTiming(
        prompt_tokens=len(output.prompt_token_ids),
        output_tokens=len(output.outputs[0].token_ids),
        arrival=metrics.arrival_time,
        scheduled=scheduled,
        first_token=first,
        finished=finished,
    )
