"""Features together: stored weights, adapters, KV in 8 bits, experts, windows, offload, swap, groups, grammars.

Each case runs in several ways, which give the same bits, and has the tokens of the same engine over plain weights in
float32 into which the adapters were merged.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from engines import for_groups, offloaded, random_prompt
from lora_helpers import ALL, make_adapter, merge_adapter
from quantized_checkpoints import VARIANTS, quantize, write_dequantized
from safetensors.torch import load_file, save_file
from test_longrope import longrope
from tokenizer_files import write_byte_level
from transformers import PreTrainedModel

from nanovllm import LLM, RequestOutput, SamplingParams
from nanovllm.layers.linear import Linear
from nanovllm.lora_request import LoRARequest

pytest.importorskip("gguf", reason="the package gguf is not installed")

from gguf_files import WIDE, write_gguf

# the end of `write_byte_level`
BLOCK = 16
EOS = 277
LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 4}
FEW_STEPS = {"kvcache_block_size": BLOCK, "max_num_batched_tokens": 40}
FEW_BLOCKS = 12  # so that requests are preempted
WAYS: dict[str, dict[str, Any]] = {
    "resident": {"kvcache_block_size": BLOCK, "num_gpu_blocks": 90},
    "chunks": {**FEW_STEPS, "num_gpu_blocks": 90, "max_num_batched_tokens": 23, "enable_prefix_caching": False},
    "offloaded": offloaded(BLOCK, 4, 90, max_num_batched_tokens=40),
    "offloaded, copies alone": offloaded(BLOCK, 6, 90, max_num_batched_tokens=29, cpu_attention=False),
    "recomputed": {**FEW_STEPS, "num_gpu_blocks": FEW_BLOCKS, "preemption_mode": "recompute"},
    "swapped": {**FEW_STEPS, "num_gpu_blocks": FEW_BLOCKS, "preemption_mode": "swap", "swap_space": 0.01},
}
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8, "n": 3, "seed": 5, "top_p": 0.95},
    "beams": {"temperature": 0.0, "use_beam_search": True, "best_of": 3, "n": 3},
    "structured": {"temperature": 0.0, "structured_outputs": {"regex": "[a-f]{2,9}( [0-9]{3}){1,4}"}},
}
SHARED = random_prompt(2 * BLOCK + 3, 256, seed=1)
PROMPTS = [SHARED[:BLOCK] + random_prompt(length, 256, seed=2) for length in (3, 30, 17)] + [SHARED, [*SHARED, 7, 8]]
USERS = (0, 1, 2, 1, 1)  # the adapter of each prompt, 0: none


def mixed(name: str) -> str:
    """Types of a GGUF file as llama.cpp mixes them."""
    return "Q6_K" if "attn_v" in name or "token_embd" in name else "Q4_K"


@dataclass(frozen=True)
class Case:
    """stored: "plain", a variant of `quantized_checkpoints`, or the type of a GGUF file's matrices."""

    stored: str | Callable[[str], str]
    kv_cache_dtype: str
    params: str
    model: dict[str, Any] = field(default_factory=dict)
    targets: tuple[str, ...] = ()  # of two adapters


CHECKPOINT = {"hidden": 128, "intermediate": 256, "head_dim": 32, "vocab": 300, "eos_token_id": EOS}
MOE = {**CHECKPOINT, "family": "qwen3_moe", "experts": 4}
GEMMA = {**CHECKPOINT, "family": "gemma3", "sliding_window": 20}
TRAINED = {"original_max_position_embeddings": 48, "max_positions": 160}
PHI = {**CHECKPOINT, **TRAINED, "family": "phi3", "rope": longrope(16)}
PHI_PROJECTIONS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
CASES: dict[str, Case] = {
    "GGUF, LoRA, int8": Case("Q8_0", "int8", "greedy", {**WIDE, "family": "llama"}, ALL),
    "GGUF of K types, LoRA, fp8, beams": Case(mixed, "fp8", "beams", {**WIDE, "family": "qwen3"}, ALL),
    "GGUF, LoRA, int8, grammar": Case("Q4_0", "int8", "structured", {**WIDE, "family": "llama", "tie": True}, ALL),
    "GGUF, window, int8, samples": Case("Q4_1", "int8", "sampled", {**WIDE, "family": "mistral", "sliding_window": 21}),
    "GPTQ, LoRA, int8, beams": Case("gptq-128", "int8", "beams", {**CHECKPOINT, "family": "qwen2"}, ALL),
    "AWQ, LoRA, fp8, grammar": Case("awq-32", "fp8", "structured", {**CHECKPOINT, "family": "llama"}, ALL),
    "FP8, window, int8, samples": Case("fp8", "int8", "sampled", {**CHECKPOINT, "sliding_window": 20}),
    "experts, int8, samples": Case("plain", "int8", "sampled", MOE),
    "experts in GPTQ, LoRA, int8, samples": Case("gptq-64", "int8", "sampled", MOE, ALL[:4]),
    "experts in FP8, fp8, beams": Case("fp8-channel", "fp8", "beams", {**MOE, "family": "mixtral"}),
    "Gemma 3 in GPTQ, LoRA, int8": Case("gptq-128", "int8", "greedy", GEMMA, ALL),
    "Gemma 3, LoRA, fp8, samples": Case("plain", "fp8", "sampled", GEMMA, ALL),
    "Gemma 3 in AWQ, beams": Case("awq-32", "auto", "beams", {**GEMMA, "tie": True}),
    "longrope, LoRA, int8, samples": Case("plain", "int8", "sampled", PHI, PHI_PROJECTIONS),
    "longrope in packed int4, grammar": Case("pack-quantized-32", "auto", "structured", PHI, PHI_PROJECTIONS),
}
FAST = ("GGUF, LoRA, int8", "experts, int8, samples", "Gemma 3 in GPTQ, LoRA, int8")


@pytest.mark.parametrize(
    ("name", "ways"),
    [
        *(pytest.param(name, ("offloaded",), id=f"{name}, offloaded") for name in FAST),
        *(pytest.param(name, tuple(WAYS), marks=pytest.mark.slow, id=name) for name in CASES),
    ],
)
def test_tokens_are_those_of_plain_weights_and_bits_those_of_any_memory(
    name: str, ways: tuple[str, ...], tmp_path: Path
) -> None:
    case = CASES[name]
    files = Files(case, tmp_path)
    tokens = 6 if len(ways) == 1 else 14
    params = SamplingParams(**{"max_tokens": tokens, "ignore_eos": case.params != "structured", **PARAMS[case.params]})
    if case.params != "structured":
        params.logprobs = 2
    expected = expected_tokens(files, params)
    assert len(set(map(str, expected))) == len(PROMPTS)
    bits = None
    for way in ways:
        with files.engine(files.stored, **WAYS[way], **(LORA if files.adapters else {})) as llm:
            first, second = (generate(llm, files, params) for _ in range(2))
            metrics = llm.metrics()
            transfers = llm.kv_stats().transfers
        assert [[each.token_ids for each in output.outputs] for output in first] == expected, way
        bits = bits or [numbers(output) for output in first]
        assert [numbers(output) for output in first] == bits and [numbers(output) for output in second] == bits, way
        assert metrics.blocks.used == 0
        assert metrics.prefix_cache.hit_tokens > 0 or way == "chunks"
        assert (transfers.h2d_bytes + transfers.d2h_bytes > 0) == way.startswith("offloaded") or way == "swapped"
        # A structured output may end before memory does, and a beam's request ends with its first token.
        if case.params not in ("structured", "beams"):
            assert metrics.preemptions.recomputed > 0 or way != "recomputed"
            assert metrics.preemptions.swapped > 0 or way != "swapped"


class Files:
    """A model as it is stored, its adapters, and plain models: the model's, and with each of the adapters merged."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case = case
        is_gguf = callable(case.stored) or case.stored not in (*VARIANTS, "plain")
        self.stored = folder / "model"
        model = make_checkpoint(self.stored, seed=3, **case.model)
        write_byte_level(self.stored)
        self.adapters = [
            make_adapter(folder / f"a{number}", model, number, case.targets, 4) for number in (1, 2) if case.targets
        ]
        if is_gguf:
            self.plain = self._gguf(folder, model)
        else:
            self.plain = self._safetensors(folder)

    def _gguf(self, folder: Path, model: PreTrainedModel) -> list[Path]:
        self.stored = write_gguf(folder / "stored.gguf", model, self.case.stored)
        weights = {name: weight.clone() for name, weight in model.state_dict().items()}
        plain = []
        for number, adapter in enumerate((None, *self.adapters)):
            model.load_state_dict(weights)
            if adapter is not None:
                merge_adapter(model, Path(adapter.lora_path))
            plain.append(write_gguf(folder / f"plain{number}.gguf", model, "F32"))
        return plain

    def _safetensors(self, folder: Path) -> list[Path]:
        plain = [self.stored]
        if self.case.stored != "plain":
            self.stored = quantize(self.stored, folder / "stored", str(self.case.stored))
            plain = [write_dequantized(self.stored, folder / "plain0")]
        tensors = load_file(plain[0] / "model.safetensors")
        for adapter in self.adapters:
            target = folder / f"merged{adapter.lora_int_id}"
            target.mkdir()
            for path in plain[0].iterdir():
                (target / path.name).write_bytes(path.read_bytes())
            save_file(merged(tensors, Path(adapter.lora_path)), target / "model.safetensors", {"format": "pt"})
            plain.append(target)
        return plain

    def engine(self, model: Path, **arguments: Any) -> LLM:
        kv_cache_dtype = self.case.kv_cache_dtype
        for_each_group = for_groups(model, arguments)
        if arguments["num_gpu_blocks"] != FEW_BLOCKS:
            arguments = for_each_group
        elif for_each_group != arguments:  # windows: their blocks are released, and too many would preempt nothing
            arguments |= {"num_gpu_blocks": FEW_BLOCKS + 4}
        return LLM(model, dtype="float32", device="cpu", kv_cache_dtype=kv_cache_dtype, max_num_seqs=24, **arguments)

    def adapter(self, number: int) -> LoRARequest | None:
        return self.adapters[number - 1] if number and self.adapters else None


def merged(tensors: dict[str, Any], adapter: Path) -> dict[str, Any]:
    """The tensors of a checkpoint with scale * B A added."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    factors = load_file(adapter / "adapter_model.safetensors")
    tensors = dict(tensors)
    for name, a in factors.items():
        if ".lora_A." in name:
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            product = factors[name.replace("lora_A", "lora_B")] @ a
            tensors[f"{module}.weight"] = tensors[f"{module}.weight"] + config["lora_alpha"] / config["r"] * product
    return tensors


def expected_tokens(files: Files, params: SamplingParams) -> list[list[list[int]]]:
    """Of each prompt, from the plain model with its adapter."""
    found: dict[int, list[list[int]]] = {}
    for user, model in enumerate(files.plain):
        with files.engine(model, **WAYS["resident"]) as llm:
            assert all(weight.weight.dense is not None for weight in linears(llm))
            mine = [index for index, other in enumerate(USERS) if user == (other if files.adapters else 0)]
            outputs = llm.generate([PROMPTS[index] for index in mine], params, use_tqdm=False)
            assert all(output.error is None for output in outputs)
            found |= {i: [each.token_ids for each in o.outputs] for i, o in zip(mine, outputs, strict=True)}
    return [found[index] for index in range(len(PROMPTS))]


def linears(llm: LLM) -> list[Linear]:
    return [linear for layer in llm._runner.model.layers for linear in layer.linears]  # type: ignore[union-attr]


def generate(llm: LLM, files: Files, params: SamplingParams) -> list[RequestOutput]:
    if files.case.stored != "plain":
        assert any(weight.weight.dense is None for weight in linears(llm))
    lora = {"lora_request": [files.adapter(user) for user in USERS]} if files.adapters else {}
    outputs = llm.generate(PROMPTS, params, use_tqdm=False, **lora)
    assert all(output.error is None for output in outputs)
    return outputs


def numbers(output: RequestOutput) -> list[Any]:
    """Tokens and log-probabilities of every sequence, to the bit."""
    return [
        [each.token_ids, each.cumulative_logprob, [{t: p.logprob for t, p in at.items()} for at in each.logprobs or ()]]
        for each in output.outputs
    ]
