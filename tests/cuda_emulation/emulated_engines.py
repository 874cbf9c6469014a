"""Engines of every feature, and their tokens on the emulated GPU and on the CPU."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checkpoints import make_checkpoint
from engines import offloaded, random_prompt
from gguf_files import WIDE, write_gguf
from lora_helpers import make_adapter
from quantized_checkpoints import VARIANTS, quantize
from streamed_engines import stream_of
from tokenizer_files import write_byte_level

from nanovllm import LLM, SamplingParams
from nanovllm.lora_request import LoRARequest

BLOCK = 16
VOCAB = 300
CHECKPOINT: dict[str, Any] = {"hidden": 128, "intermediate": 256, "head_dim": 32, "vocab": VOCAB, "eos_token_id": 277}
LENGTHS = (70, 33, 9)  # of the prompts: more than a chunk, more than a block, less than one
LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 4}
RING: dict[str, Any] = offloaded(BLOCK, 4, 40, cpu_attention=False)
Tokens = list[list[list[int]]]


@dataclass(frozen=True)
class Case:
    """arguments: of both engines; stored: as `quantized_checkpoints.VARIANTS`, or for GGUF files the kind of all
    matrices, as "Q8_0", or of each; rounds: how often the same requests run; alone: whether each runs alone before."""

    arguments: dict[str, Any] = field(default_factory=dict)
    params: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    stored: str | Callable[[str], str] = "plain"
    adapters: bool = False
    rounds: int = 1
    alone: bool = False
    happened: Callable[[LLM], bool] = lambda llm: True  # whether the engine did what the case is about


def loaded(llm: LLM) -> bool:
    return llm.kv_stats().transfers.h2d_bytes > 0


def streamed(llm: LLM) -> bool:
    return stream_of(llm).loaded_bytes > 0


def chose(llm: LLM) -> bool:
    """Whether experts were copied alone, to where the kernels of a GPU read those of a layer."""
    assert all(experts.is_recordable for experts in llm._runner.model.experts)  # type: ignore[union-attr]
    return bool(stream_of(llm)._chosen._cached._places)


def streamed_between_graphs(llm: LLM) -> bool:
    """Whether decode steps are replayed, with all layers copied to where graphs read them."""
    return streamed(llm) and stream_of(llm).is_recorded(1)


def chose_between_graphs(llm: LLM) -> bool:
    return chose(llm) and stream_of(llm).is_recorded(1)


def hit(llm: LLM) -> bool:
    return llm.metrics().prefix_cache.hit_tokens > 0


def read(llm: LLM) -> bool:
    return llm.kv_stats().read_weight_bytes > 0


def multiplied(llm: LLM) -> bool:
    """Whether products ran on the host."""
    return stream_of(llm).host_bytes > 0


RESIDENT: dict[str, Any] = {"num_gpu_blocks": 60}
EAGER = {**RESIDENT, "enforce_eager": True}
SHORT = {"num_gpu_blocks": 10}
SAMPLES = {"temperature": 0.8, "n": 3, "seed": 5, "top_p": 0.95}
BEAMS = {"temperature": 0.0, "use_beam_search": True, "best_of": 3, "n": 3}
GRAMMAR = {"structured_outputs": {"regex": "[a-f]{2,5}( [0-9]{3}){1,4}"}}
MOE = {**CHECKPOINT, "family": "qwen3_moe", "experts": 4}
# Layers with windows and layers without: two KV groups. gpt-oss' attention begins from sinks as well.
KINDS = {"layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 21}
GEMMA = {**CHECKPOINT, **KINDS, "family": "gemma3"}
GPT_OSS = {**CHECKPOINT, **KINDS, "family": "gpt_oss", "experts": 4}
# Heads of two sizes, and layers that read the K and V of earlier ones.
GEMMA_4 = {
    **{**CHECKPOINT, "family": "gemma4", "layers": 6, "sliding_window": 21, "num_kv_shared_layers": 2, "kv_heads": 1},
    **{"layer_types": ["sliding_attention", "full_attention"] * 3, "global_head_dim": 64, "tie": True},
}
RECURRENT = {**CHECKPOINT, "layers": 4, "family": "qwen3_5"}
LEAST: dict[str, Any] = {"weights_memory_bytes": "1%"}
MUCH: dict[str, Any] = {"weights_memory_bytes": "90%"}
COPIED: dict[str, Any] = {**LEAST, "host_products": False}
HOST: dict[str, Any] = {**LEAST, "enforce_eager": True}
STREAMED: dict[str, Any] = {**HOST, "host_products": False}
DEEP = {**CHECKPOINT, "layers": 4}
# Few rows choose less than half of the experts. With most of the weights on the device their cache holds a quarter of
# them, and what three rows choose; with the least of them, what two do.
MANY = {**MOE, "layers": 4, "experts": 16}
MANY_WIDE = {**MANY, **WIDE, "intermediate": 512, "layers": 3, "experts": 8}
DISK: dict[str, Any] = {"host_weights_bytes": "1%", "weights_dir": tempfile.gettempdir()}
MOST: dict[str, Any] = {**STREAMED, "weights_memory_bytes": "90%"}
MOST_HOST: dict[str, Any] = {**HOST, "weights_memory_bytes": "90%"}


def mixed(name: str) -> str:
    """Kinds of a GGUF file in which an expert's matrices differ, and layers too."""
    others = {"ffn_down": "Q8_0", "blk.1.ffn_gate": "Q5_K"}
    return next((kind for part, kind in others.items() if part in name), "Q4_K")


CASES: dict[str, Case] = {
    "resident, eager": Case(EAGER),
    "resident, graphs": Case(RESIDENT),
    "offloaded": Case(RING, happened=loaded),
    "offloaded, eager": Case({**RING, "enforce_eager": True}, happened=loaded),
    "offloaded, larger ring": Case(offloaded(BLOCK, 7, 40, cpu_attention=False), happened=loaded),
    "offloaded, chunk by chunk": Case({**RING, "max_num_batched_tokens": 90}, happened=loaded),
    "CPU attention": Case(offloaded(BLOCK, 4, 40, cpu_attention=True)),
    "prefix hits on the device": Case(RESIDENT, rounds=2, happened=hit),
    "prefix hits on both tiers": Case(offloaded(BLOCK, 6, 60), rounds=2, happened=hit),
    "recomputed": Case(
        {**SHORT, "preemption_mode": "recompute"},
        {"max_tokens": 24},
        happened=lambda llm: llm.metrics().preemptions.recomputed > 0,
    ),
    "swapped": Case(
        {**SHORT, "preemption_mode": "swap", "swap_space": 0.01},
        {"max_tokens": 24},
        happened=lambda llm: llm.metrics().preemptions.swapped > 0,
    ),
    "samples": Case(RESIDENT, SAMPLES),
    "samples, offloaded": Case(RING, SAMPLES),
    "beams": Case(RESIDENT, BEAMS),
    "beams, offloaded": Case(RING, BEAMS),
    "grammar": Case(RESIDENT, GRAMMAR),
    "LoRA": Case(RESIDENT, adapters=True),
    "LoRA, offloaded": Case(RING, adapters=True),
    "GPTQ": Case(RESIDENT, stored="gptq-128"),
    "AWQ": Case(RESIDENT, stored="awq-32"),
    "FP8": Case(RESIDENT, stored="fp8"),
    "compressed tensors": Case(RESIDENT, stored="pack-quantized-32"),
    "GGUF": Case(RESIDENT, model={**WIDE, "family": "llama"}, stored="Q8_0"),
    "GGUF, offloaded": Case(RING, model={**WIDE, "family": "llama"}, stored="Q4_0"),
    "experts": Case(RESIDENT, model=MOE),
    "experts, offloaded": Case(RING, model=MOE),
    "int8 KV": Case({**RESIDENT, "kv_cache_dtype": "int8"}),
    "fp8 KV, offloaded": Case({**RING, "kv_cache_dtype": "fp8"}),
    "window": Case(RING, model={**CHECKPOINT, "family": "mistral", "sliding_window": 21}),
    "KV groups": Case(RESIDENT, model=GEMMA, rounds=2, happened=hit),
    "KV groups, offloaded": Case({**RING, "num_cpu_blocks": 60}, model=GEMMA, rounds=2, happened=loaded),
    "KV groups, CPU attention": Case(offloaded(BLOCK, 4, 60, cpu_attention=True), model=GEMMA),
    "sinks": Case(RESIDENT, model=GPT_OSS),
    "sinks, offloaded": Case({**RING, "num_cpu_blocks": 60}, model=GPT_OSS, happened=loaded),
    "sinks, CPU attention": Case(offloaded(BLOCK, 4, 60, cpu_attention=True), model=GPT_OSS),
    "heads of two sizes": Case(RESIDENT, model=GEMMA_4, rounds=2, happened=hit),
    "heads of two sizes, offloaded": Case({**RING, "num_cpu_blocks": 60}, model=GEMMA_4, happened=loaded),
    "recurrent states": Case(RESIDENT, model=RECURRENT, rounds=2, happened=hit),
    "recurrent states, offloaded": Case(RING, model=RECURRENT, happened=loaded),
    "recurrent states, swapped": Case(
        {**SHORT, "preemption_mode": "swap", "swap_space": 0.01},
        {"max_tokens": 24},
        model=RECURRENT,
        happened=lambda llm: llm.metrics().preemptions.swapped > 0,
    ),
    "weights stream": Case({**RESIDENT, **STREAMED}, model=DEEP, happened=streamed),
    "weights stream, offloaded": Case({**RING, **STREAMED}, model=DEEP, happened=streamed),
    "weights stream, CPU attention": Case({**offloaded(BLOCK, 4, 40), **STREAMED}, model=DEEP, happened=streamed),
    "weights stream, GPTQ": Case({**RING, **STREAMED}, model=DEEP, stored="gptq-128", happened=streamed),
    "weights stream, GGUF": Case(
        {**RESIDENT, **STREAMED}, model={**WIDE, "family": "llama", "layers": 4}, stored="Q8_0", happened=streamed
    ),
    "weights stream, experts": Case({**RING, **STREAMED}, model={**MOE, "layers": 3}, happened=streamed),
    "weights stream, recurrent states": Case({**RING, **STREAMED}, model=RECURRENT, happened=streamed),
    "chosen experts": Case({**RESIDENT, **STREAMED}, model=MANY, alone=True, happened=chose),
    "chosen experts of batches": Case({**RING, **MOST}, model={**MANY, "layers": 6}, happened=chose),
    "chosen experts, GPTQ": Case({**RING, **MOST}, model=MANY, stored="gptq-128", alone=True, happened=chose),
    "chosen experts, GGUF": Case({**RESIDENT, **MOST}, model=MANY_WIDE, stored=mixed, alone=True, happened=chose),
    "weights stream, graphs": Case({**RESIDENT, **COPIED}, model=DEEP, happened=streamed_between_graphs),
    "weights stream, offloaded, graphs": Case({**RING, **COPIED}, model=DEEP, happened=streamed_between_graphs),
    "weights stream, LoRA, graphs": Case(
        {**RESIDENT, **COPIED}, model=DEEP, adapters=True, happened=streamed_between_graphs
    ),
    "weights stream, recurrent states, graphs": Case(
        {**RING, **COPIED}, model=RECURRENT, happened=streamed_between_graphs
    ),
    "chosen experts, graphs": Case({**RESIDENT, **COPIED}, model=MANY, alone=True, happened=chose_between_graphs),
    "chosen experts, GPTQ, graphs": Case(
        {**RING, **COPIED, **MUCH}, model=MANY, stored="gptq-128", alone=True, happened=chose_between_graphs
    ),
    "experts on the host, graphs": Case({**RESIDENT, **LEAST}, model=MANY, alone=True, happened=multiplied),
    "experts on both, graphs": Case({**RING, **MUCH}, model={**MANY, "layers": 6}, happened=multiplied),
    "experts on both, GPTQ, graphs": Case(
        {**RESIDENT, **MUCH}, model=MANY, stored="gptq-128", alone=True, happened=multiplied
    ),
    "experts on both, sinks, graphs": Case(
        {**RING, "num_cpu_blocks": 60, **LEAST}, model={**GPT_OSS, "experts": 16}, alone=True, happened=multiplied
    ),
    "weights on disk": Case({**RESIDENT, **STREAMED, **DISK}, model=DEEP, happened=read),
    "weights on disk, offloaded, graphs": Case({**RING, **COPIED, **DISK}, model=DEEP, happened=read),
    "chosen experts, on disk": Case({**RESIDENT, **STREAMED, **DISK}, model=MANY, alone=True, happened=read),
    "experts on the host, on disk, GPTQ": Case(
        {**RESIDENT, **HOST, **DISK}, model=MANY, stored="gptq-128", alone=True, happened=read
    ),
    "products on the host, on disk": Case({**RING, **HOST, **DISK}, model=DEEP, happened=read),
    "products on the host": Case({**RESIDENT, **HOST}, model=DEEP, happened=multiplied),
    "products on the host, offloaded": Case({**RING, **HOST}, model=DEEP, happened=multiplied),
    "products on the host, CPU attention": Case({**offloaded(BLOCK, 4, 40), **HOST}, model=DEEP, happened=multiplied),
    "products on the host, GPTQ": Case({**RING, **HOST}, model=DEEP, stored="gptq-128", happened=multiplied),
    "products on the host, FP8": Case({**RESIDENT, **HOST}, model=DEEP, stored="fp8", happened=multiplied),
    "products on the host, GGUF": Case(
        {**RESIDENT, **HOST}, model={**WIDE, "family": "llama", "layers": 4}, stored="Q8_0", happened=multiplied
    ),
    "products on the host, recurrent states": Case({**RING, **HOST}, model=RECURRENT, happened=multiplied),
    "products on the host, LoRA": Case({**RESIDENT, **HOST}, model=DEEP, adapters=True, happened=multiplied),
    "experts on the host": Case({**RESIDENT, **HOST}, model=MANY, alone=True, happened=multiplied),
    "experts on both": Case({**RING, **MOST_HOST}, model={**MANY, "layers": 6}, happened=multiplied),
    "experts on both, GPTQ": Case(
        {**RING, **MOST_HOST}, model=MANY, stored="gptq-128", alone=True, happened=multiplied
    ),
    "experts on both, GGUF": Case(
        {**RESIDENT, **MOST_HOST}, model=MANY_WIDE, stored=mixed, alone=True, happened=multiplied
    ),
    "experts on both, sinks": Case(
        {**RING, "num_cpu_blocks": 60, **HOST}, model={**GPT_OSS, "experts": 16}, alone=True, happened=multiplied
    ),
    "chosen experts, sinks": Case(
        {**RING, "num_cpu_blocks": 60, **STREAMED}, model={**GPT_OSS, "experts": 16}, alone=True, happened=chose
    ),
}


class Model:
    """A case's model directory or file, and its adapters."""

    def __init__(self, case: Case, folder: Path) -> None:
        directory = folder / "model"
        model = make_checkpoint(directory, seed=3, **{**CHECKPOINT, **case.model})
        write_byte_level(directory)
        self.case = case
        self.path = directory
        self.adapters: list[LoRARequest | None] = [None] * len(LENGTHS)
        if case.adapters:
            self.adapters[1:] = [make_adapter(folder / f"a{number}", model, number) for number in (1, 2)]
        if case.stored in VARIANTS:
            self.path = quantize(directory, folder / "stored", case.stored)
        elif case.stored != "plain":
            self.path = write_gguf(folder / "stored.gguf", model, case.stored)

    def engine(self, device: str, **others: Any) -> LLM:
        sizes = {"max_model_len": 128, "max_num_batched_tokens": 45, "kvcache_block_size": BLOCK, "max_num_seqs": 12}
        arguments = {**sizes, **self.case.arguments, **(LORA if self.case.adapters else {}), **others}
        return LLM(self.path, dtype="float32", device=device, **arguments)

    def generate(self, llm: LLM) -> Tokens:
        """The tokens of each prompt's outputs: alone, if they run so, and in each round."""
        wanted = {"temperature": 0.0, "max_tokens": 5, "ignore_eos": True, **self.case.params}
        if "structured_outputs" in wanted:
            del wanted["ignore_eos"]
        prompts = [random_prompt(length, 256, 2) for length in LENGTHS]
        batches = [[prompt] for prompt in prompts if self.case.alone] + [prompts] * self.case.rounds
        found: Tokens = []
        for batch in batches:
            adapters = self.adapters if self.case.adapters else None
            outputs = llm.generate(batch, SamplingParams(**wanted), use_tqdm=False, lora_request=adapters)
            assert all(output.error is None for output in outputs), [output.error for output in outputs]
            found += [[each.token_ids for each in output.outputs] for output in outputs]
        return found
