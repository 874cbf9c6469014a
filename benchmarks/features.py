"""Quantized checkpoints, GGUF files, experts, an 8-bit KV cache and adapters in small engines.

    python -m benchmarks.features [--device cuda] [--output-json FILE]

Each check writes a random checkpoint of a few layers and compares the log-probabilities of a prompt, in bf16 on the
device, with those of the same files on the CPU in float32. The KV cache is also compared with itself under offload:
equal tokens, and exactly the bytes over the link that its rows take. Each check prints its result before the next one
begins. Exit status 1 if one failed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.checks import Check, run_checks
from benchmarks.engine import device_name, generate
from benchmarks.gguf_types import quantize
from benchmarks.options import Parser, add_device_option, add_json_option
from benchmarks.peers.gguf_writer import add_config, finish, gguf_name
from benchmarks.quantize_checkpoint import quantize_checkpoint
from benchmarks.tiny import random_tensor, write_adapter
from nanovllm import LLM, SamplingParams
from nanovllm.kvcache.base import KVStats
from nanovllm.layers.linear_method import CheckpointTensor
from nanovllm.lora_request import LoRARequest
from nanovllm.models.hf_config import load_network_config
from nanovllm.models.mtp import MTPHead
from nanovllm.ops.triton_support import multiplies_fp8

HIDDEN = 256
INTERMEDIATE = 512
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 64
LAYERS = 2
VOCAB = 512
PROMPT_LEN = 300
OUTPUT_LEN = 6
BLOCK = 64
DRAFTED_LEN = 24
NGRAM = {"method": "ngram", "num_speculative_tokens": 4}
MTP_HEAD = {"method": "mtp", "num_speculative_tokens": 3}
# Of the mean difference of a log-probability: arithmetic in bf16, inputs in fp8, K and V in 8 bits, and rows for which
# bf16 chooses other experts. Those of other weights differ by about 1.
BOUND = 0.05
FP8_BOUND = 0.2
KV_BOUND = 0.1
EXPERTS_BOUND = 0.2
FORMATS = {
    "gptq": {},
    "awq": {},
    "pack-quantized": {"group_size": 32, "symmetric": False},
    "pack-quantized, 8 bits": {"bits": 8},
    "fp8": {},
    "fp8-channel": {},
    "float-quantized": {},
}
GGUF_TYPES = ("Q8_0", "Q4_0", "Q4_K")


class Features:
    """The checks on one device, "cuda" or "cpu", with files in a directory."""

    def __init__(self, device: str, directory: Path) -> None:
        self.device = device
        self.directory = directory
        self.plain = write_checkpoint(directory / "plain", "qwen3")
        self.prompt = torch.randint(0, VOCAB, (PROMPT_LEN,), generator=torch.Generator().manual_seed(1)).tolist()

    def checks(self) -> dict[str, Check]:
        named: dict[str, Check] = {"plain weights": partial(self.near_the_cpu, self.plain, BOUND)}
        for name, options in FORMATS.items():
            rounds = self.device == "cuda" and name.startswith("f") and multiplies_fp8(torch.device("cuda", 0))
            bound = FP8_BOUND if rounds else BOUND
            named[f"checkpoint, {name}"] = partial(self.quantized, self.plain, name, options, bound)
        for kind in GGUF_TYPES:
            named[f"GGUF, {kind}"] = partial(self.gguf, kind)
        named["experts"] = self.experts
        named["experts, gptq"] = self.quantized_experts
        for family in ("gpt_oss", "qwen3_5_text", "gemma4_text"):
            named[f"family {family}"] = partial(self.family, family)
        named["drafts, n-grams"] = partial(self.drafts, NGRAM)
        named["drafts, MTP"] = partial(self.drafts, MTP_HEAD)
        named["KV from disk"] = self.kv_from_disk
        for kv_cache_dtype in ("int8", "fp8_e4m3"):
            named[f"KV cache, {kv_cache_dtype}"] = partial(self.kv_cache, kv_cache_dtype)
        return named | {"adapters": self.adapters}

    # ---- weights

    def near_the_cpu(self, path: Path, bound: float, **arguments: Any) -> str:
        with self.open(path, **arguments) as llm:
            actual = self.logprobs(llm)
        return f"{path.name}: {difference(actual, self.of_cpu(path), bound)}"

    def quantized(self, plain: Path, name: str, options: dict[str, Any], bound: float) -> str:
        path = self.directory / f"{plain.name}-{name.replace(', ', '-').replace(' ', '-')}"
        quantize_checkpoint(plain, path, name.partition(",")[0], **options)
        return self.near_the_cpu(path, bound)

    def gguf(self, kind: str) -> str:
        if find_spec("gguf") is None:
            return "skipped: the package gguf is not installed"
        return self.near_the_cpu(write_gguf(self.plain, self.directory / f"{kind}.gguf", kind), BOUND)

    def experts(self) -> str:
        return self.near_the_cpu(write_checkpoint(self.directory / "experts", "qwen3_moe"), EXPERTS_BOUND)

    def quantized_experts(self) -> str:
        return self.quantized(write_checkpoint(self.directory / "more-experts", "qwen3_moe"), "gptq", {}, EXPERTS_BOUND)

    def family(self, model_type: str) -> str:
        path = self._checkpoint(model_type)
        bound = EXPERTS_BOUND if model_type == "gpt_oss" else BOUND
        return self.near_the_cpu(path, bound)

    def drafts(self, speculative_config: dict[str, Any]) -> str:
        """Tokens with drafts beside those without; on the CPU they are equal, on a GPU products of one and of several
        rows round otherwise."""
        path = self.plain if speculative_config is NGRAM else self._checkpoint("qwen3_5_text")
        prompt = self.prompt[:20] * 8
        answers: list[list[int]] = []
        drafted = 0
        for arguments in ({}, {"speculative_config": speculative_config, "max_num_seqs": 2}):
            with self.open(path, **arguments) as llm:
                (output,) = generate(llm, [prompt], DRAFTED_LEN)
                answers.append(list(output.outputs[0].token_ids))
                drafted = output.metrics.drafted_tokens
        plain, with_drafts = answers
        assert drafted > 0, "nothing was drafted"
        same = next((i for i, pair in enumerate(zip(*answers, strict=True)) if pair[0] != pair[1]), len(plain))
        least = len(plain) if self.device == "cpu" else 1
        assert same >= least, f"with drafts {with_drafts}, without {plain}"
        return f"{drafted} tokens drafted, the first {same} of {len(plain)} equal"

    def kv_from_disk(self) -> str:
        """An engine finds the KV that one before it wrote, and has its tokens."""
        answers: list[list[int]] = []
        cached = 0
        for _ in range(2):
            stored = {"kv_cache_dir": str(self.directory / "kv"), "enable_prefix_caching": True}
            with self.open(self.plain, **stored) as llm:
                (output,) = generate(llm, [self.prompt], OUTPUT_LEN)
                answers.append(list(output.outputs[0].token_ids))
                cached = output.num_cached_tokens
        least = OUTPUT_LEN if self.device == "cpu" else 1  # on a GPU products of other row counts round otherwise
        assert answers[0][:least] == answers[1][:least], f"computed {answers[0]}, read {answers[1]}"
        assert cached, "nothing was answers on disk"
        return f"{cached} of {PROMPT_LEN} tokens read, tokens {answers[0]} and {answers[1]}"

    def _checkpoint(self, model_type: str) -> Path:
        path = self.directory / model_type
        return path if path.is_dir() else write_checkpoint(path, model_type)

    # ---- KV cache and adapters

    def kv_cache(self, kv_cache_dtype: str) -> str:
        """Near K and V in 16 bits, and the same tokens under offload, with a scale in four bytes for each row."""
        with self.open(self.plain, kv_cache_dtype=kv_cache_dtype) as llm:
            near = difference(self.logprobs(llm), self.of_cpu(self.plain), KV_BOUND)
            resident = generate(llm, [self.prompt], OUTPUT_LEN)[0].outputs[0].token_ids
        few = {"enable_cpu_offload": True, "num_gpu_blocks": 4, "num_cpu_blocks": 12, "cpu_attention": False}
        moved: dict[str, KVStats] = {}
        for stored in ("auto", kv_cache_dtype):
            with self.open(self.plain, kv_cache_dtype=stored, **few) as llm:
                tokens = generate(llm, [self.prompt], OUTPUT_LEN)[0].outputs[0].token_ids
                moved[stored] = llm.kv_stats()
        assert tokens == resident, f"offloaded {tokens}, resident {resident}"
        wide, narrow = (moved[stored].transfers for stored in ("auto", kv_cache_dtype))
        for ours, theirs in ((narrow.h2d_bytes, wide.h2d_bytes), (narrow.d2h_bytes, wide.d2h_bytes)):
            assert ours * 2 * HEAD_DIM == theirs * (HEAD_DIM + 4) > 0, f"{ours:,} bytes, {theirs:,} in 16 bits"
        return f"{near}, equal tokens offloaded, {narrow.h2d_bytes / wide.h2d_bytes:.3f} of the loaded bytes"

    def adapters(self) -> str:
        """Three adapters of different modules and ranks and the model alone, in one batch."""
        modules = [("q_proj", "v_proj", "down_proj"), ("o_proj", "gate_proj"), ("k_proj",)]
        network = load_network_config(self.plain).network
        requests = [
            write_adapter(self.directory / f"adapter-{rank}", network, names, rank, number)
            for number, (names, rank) in enumerate(zip(modules, (8, 16, 3), strict=True), start=1)
        ]
        by_engine: list[list[Tensor]] = []
        for arguments in ({"device": "cpu", "dtype": "float32"}, {}):
            with self.open(self.plain, enable_lora=True, max_loras=3, **arguments) as llm:
                by_engine.append([self.logprobs(llm, request) for request in (None, *requests)])
                together = self.together(llm, requests)
            for one, other in zip(together, by_engine[-1], strict=True):
                difference(one, other, BOUND)
        told = [difference(ours, theirs, BOUND) for theirs, ours in zip(*by_engine, strict=True)]
        alone, *changed = by_engine[1]
        assert all(float((logprobs - alone).abs().mean()) > BOUND for logprobs in changed), "an adapter changes nothing"
        return "; ".join(told)

    def together(self, llm: LLM, requests: Sequence[LoRARequest]) -> list[Tensor]:
        outputs = llm.generate([self.prompt] * 4, SCORED, use_tqdm=False, lora_request=[None, *requests])
        return [scores_of(output) for output in outputs]

    # ---- engines

    def open(self, path: Path, **arguments: Any) -> LLM:
        options = {"device": self.device, "dtype": "bfloat16", "num_gpu_blocks": 24, "max_model_len": 512}
        sizes = {"kvcache_block_size": BLOCK, "max_num_batched_tokens": 128, "enable_prefix_caching": False}
        return LLM(path, **{**options, **sizes, **arguments})

    def of_cpu(self, path: Path) -> Tensor:
        with self.open(path, device="cpu", dtype="float32") as llm:
            return self.logprobs(llm)

    def logprobs(self, llm: LLM, lora_request: LoRARequest | None = None) -> Tensor:
        """Of the prompt's tokens, from the second one on."""
        (output,) = llm.generate([self.prompt], SCORED, use_tqdm=False, lora_request=lora_request)
        return scores_of(output)


SCORED = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)


def scores_of(output: Any) -> Tensor:
    rows = zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True)
    return torch.tensor([row[token].logprob for row, token in rows])


def difference(actual: Tensor, expected: Tensor, bound: float) -> str:
    """The mean difference, in words. Raises AssertionError if it is above the bound or NaN."""
    mean = float((actual - expected).abs().mean())
    assert mean <= bound, f"log-probabilities differ by {mean:.4f} on average, {bound} is allowed"
    return f"log-probabilities differ by {mean:.4f}"


# ---- files


ARCHITECTURES = {
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
}
WINDOWS = ["sliding_attention", "full_attention"]
OF_FAMILY: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True},
    "gpt_oss": {
        "num_local_experts": 8, "num_experts_per_tok": 2, "experts_per_token": 2, "intermediate_size": 128,
        "layer_types": WINDOWS, "sliding_window": 128, "swiglu_limit": 7.0, "attention_bias": True,
        "tie_word_embeddings": False, "quantization_config": {
            "quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router",
                                                                 "model.embed_tokens", "lm_head"],
        },
    },
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "full_attention"], "linear_conv_kernel_dim": 4, "linear_key_head_dim": 64,
        "linear_value_head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "attn_output_gate": True,
        "partial_rotary_factor": 0.25, "mtp_num_hidden_layers": 1,
    },
    "gemma4_text": {
        "layer_types": WINDOWS, "sliding_window": 128, "global_head_dim": 128, "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "final_logit_softcapping": 30.0,
    },
}  # fmt: skip


def write_checkpoint(directory: Path, model_type: str) -> Path:
    """A random checkpoint in float32, but for what is stored in fewer bits."""
    config = {
        "architectures": [ARCHITECTURES[model_type]],
        "model_type": model_type, "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "vocab_size": VOCAB,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": True,
        "torch_dtype": "float32", **OF_FAMILY.get(model_type, {}),
    }  # fmt: skip
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    model = load_network_config(directory).on_meta()
    tensors = dict(model.tensors())
    if config.get("mtp_num_hidden_layers"):
        tensors |= dict(MTPHead(model).tensors())
    drawn = {name: _drawn(name, tensor, generator) for name, tensor in tensors.items()}
    save_file(drawn, directory / "model.safetensors")
    return directory


def _drawn(name: str, tensor: CheckpointTensor, generator: torch.Generator) -> Tensor:
    """A tensor of a random checkpoint. Bytes are those of mxfp4: any values, and scales of about their size."""
    if name.endswith(".blocks"):
        return torch.randint(0, 256, tensor.shape, dtype=torch.uint8, generator=generator)
    if name.endswith(".scales"):
        return torch.randint(121, 124, tensor.shape, dtype=torch.uint8, generator=generator)
    return random_tensor(tensor.shape, generator)


def write_gguf(checkpoint: Path, path: Path, kind: str) -> Path:
    """The checkpoint as a GGUF file without a tokenizer, all matrices in one type."""
    import gguf

    writer = gguf.GGUFWriter(path, "qwen3")
    add_config(writer, json.loads((checkpoint / "config.json").read_text()))
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        if tensor.dim() == 1:
            writer.add_tensor(gguf_name(name, "qwen3"), tensor.numpy())
        else:
            packed = quantize(tensor.numpy(), kind)
            type_ = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(gguf_name(name, "qwen3"), packed, raw_dtype=type_)
    finish(writer)
    return path


def run(args: argparse.Namespace) -> int:
    device = device_name(args.device)
    with tempfile.TemporaryDirectory(prefix="nanovllm-features-") as directory:
        return run_checks(Features(device, Path(directory)).checks(), args, device)


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="features", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_device_option(parser)
    add_json_option(parser)
    return parser.run(argv, run)


if __name__ == "__main__":
    sys.exit(main())
