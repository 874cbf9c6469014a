"""Quantized weights, GGUF files, experts, merged projections and adapters over several ranks: each holds its part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import checkpoint_fixture, make_checkpoint, refusal
from engines import greedy, greedy_reference, offloaded, random_prompt, token_ids
from fast import fast_only, fast_pairs
from lora_helpers import make_adapter
from plans import parameter_bytes
from quantized_checkpoints import VARIANTS, dequantized, quantize, write_dequantized
from rank_processes import kept_rank_processes
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from nanovllm import LLM
from nanovllm.config import EngineConfig
from nanovllm.errors import ConfigError
from nanovllm.features.lora.adapter_files import AdapterRegistry
from nanovllm.features.lora.manager import LoRAManager
from nanovllm.formats.quantization import read_quantization
from nanovllm.layers.attention import Attention
from nanovllm.layers.build_context import BuildContext
from nanovllm.layers.causal_lm import META, CausalLM
from nanovllm.layers.linear_method import StoredWeight
from nanovllm.layers.mlp import GatedMLP
from nanovllm.layers.parallel import MetaRanks
from nanovllm.models.hf_config import load_network_config
from nanovllm.models.loader import load_model

CPU = torch.device("cpu")
VOCAB = 199
# k and v of 128 rows, of which two ranks have half a block of FP8; everything else can be divided at multiples of 128.
SIZES: dict[str, Any] = {"hidden": 128, "intermediate": 256, "heads": 8, "kv_heads": 4, "head_dim": 32, "vocab": VOCAB}
RESIDENT: dict[str, Any] = {"kvcache_block_size": 16, "num_gpu_blocks": 40, "dtype": "float32", "device": "cpu"}
THREE_HEADS: dict[str, Any] = {"heads": 3, "kv_heads": 3, "head_dim": 128}
PROMPTS = [random_prompt(length, VOCAB, seed=6) for length in (40, 7)]


@pytest.fixture(scope="module", autouse=True)
def rank_processes() -> Iterator[None]:
    with kept_rank_processes():
        yield


plain = checkpoint_fixture(**SIZES)


def load_parts(path: Path, num_ranks: int, load_format: str = "auto") -> list[CausalLM]:
    """The model of each rank."""
    config = load_network_config(path)
    ranks = [MetaRanks(rank, num_ranks) for rank in range(num_ranks)]
    return [load_model(path, config, torch.float32, CPU, load_format, group=rank) for rank in ranks]


def matrices(model: CausalLM) -> dict[str, Tensor]:
    """The values of each linear layer's and each expert's modules, in fp32."""
    found: dict[str, Tensor] = {}
    sizes = {module: rows for module, rows, _ in model.matrices()}
    weights: list[tuple[Sequence[str], StoredWeight]] = []
    for layer in model.layers:
        weights += [(list(linear.parts), linear.weight) for linear in layer.linears]
    for experts in model.experts:
        for index, names in enumerate(experts.names):
            weights += [(names[:2], experts.gate_up[index]), (names[2:], experts.down[index])]
    for modules, weight in weights:
        parts = [sizes[module] for module in modules]
        found |= dict(zip(modules, weight.rows(torch.arange(sum(parts))).split(parts), strict=True))
    return found


def attention_of(model: CausalLM) -> Attention:
    return model.attending[0]


def inner_size(model: CausalLM) -> int:
    """Inner features of the first layer's MLP on this rank."""
    mlp = model.layers[0].mlp
    assert isinstance(mlp, GatedMLP)
    return mlp.down.in_features


def joined(parts: list[CausalLM]) -> dict[str, Tensor]:
    """The matrices that ranks without shared KV heads hold together."""
    found = [matrices(part) for part in parts]
    whole: dict[str, Tensor] = {}
    for module in found[0]:
        held = [each[module] for each in found]
        kind = module.rpartition(".")[2]
        if kind in ("o_proj", "down_proj", "w2"):
            whole[module] = torch.cat(held, dim=1)
        elif kind == "qkv_proj":
            heads = map(attention_of, parts)
            whole[module] = merged(held, [[each.q_size, each.kv_size, each.kv_size] for each in heads])
        elif kind == "gate_up_proj":
            whole[module] = merged(held, [[inner_size(each)] * 2 for each in parts])
        else:
            whole[module] = torch.cat(held)
    return whole


def merged(held: list[Tensor], sizes: list[list[int]]) -> Tensor:
    """Merged projections, of which each rank holds a part of everything that is merged."""
    split = [tensor.split(of_rank) for tensor, of_rank in zip(held, sizes, strict=True)]
    return torch.cat([torch.cat(same) for same in zip(*split, strict=True)])


def check_parts(parts: list[CausalLM], expected: dict[str, Tensor]) -> None:
    """Together the ranks hold exactly the expected matrices, and each as many bytes as are planned for it."""
    found = joined(parts)
    assert found.keys() and all(torch.equal(found[module], expected[f"{module}.weight"]) for module in found)
    for part in parts:
        assert parameter_bytes(part) == part.network.weight_bytes == part.on_meta().network.weight_bytes


# ---- what a rank reads


@pytest.mark.parametrize("variant", fast_only(["gptq-32-asymmetric", "fp8"], VARIANTS))
def test_ranks_hold_the_parts_of_quantized_matrices(variant: str, plain: Path, tmp_path: Path) -> None:
    path = quantize(plain, tmp_path / variant, variant)
    check_parts(load_parts(path, 2), dequantized(path))


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["awq-32", "pack-quantized-32"])
def test_unequal_ranks_hold_whole_groups(variant: str, plain: Path, tmp_path: Path) -> None:
    """Three ranks have 1, 1 and 2 KV heads, and 64, 96 and 96 of 256 inner features."""
    path = quantize(plain, tmp_path / variant, variant)
    parts = load_parts(path, 3)
    assert [inner_size(part) for part in parts] == [64, 96, 96]
    check_parts(parts, dequantized(path))


@pytest.mark.parametrize(
    ("family", "fused"),
    fast_pairs([("glm4_moe", True)], ["qwen3_moe", "mixtral", "glm4_moe", "minimax_m2"], [False, True]),
)
def test_ranks_hold_the_parts_of_experts(family: str, fused: bool, tmp_path: Path) -> None:
    options = {"mlp_only_layers": [1]} if family == "qwen3_moe" else {}
    make_checkpoint(tmp_path, family, kv_heads=4, fused_experts=fused, **options)
    whole = matrices(load_model(tmp_path, load_network_config(tmp_path), torch.float32, CPU))
    check_parts(load_parts(tmp_path, 2), {f"{module}.weight": tensor for module, tensor in whole.items()})


@pytest.mark.parametrize("num_ranks", fast_only([2], [2, 3]))
def test_ranks_hold_the_parts_of_merged_projections(num_ranks: int, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "phi3", kv_heads=4)
    check_parts(load_parts(tmp_path, num_ranks), load_file(tmp_path / "model.safetensors"))


@pytest.mark.parametrize("kind", fast_only(["Q8_0"], ["F16", "Q8_0", "Q4_0", "Q5_0", "Q5_1", "Q6_K", "Q4_K"]))
def test_ranks_hold_the_parts_of_a_gguf_file(kind: str, tmp_path: Path) -> None:
    """With the rows of q and k in llama.cpp's order, biases, and columns divided between blocks."""
    gguf_files = pytest.importorskip("gguf_files", reason="the package gguf is not installed")
    block = 256 if kind.endswith("_K") else 32  # columns of two and four blocks
    sizes = {"hidden": 2 * block, "intermediate": 4 * block, "heads": 8, "kv_heads": 4, "head_dim": block // 2}
    biases = {"attention_bias": True, "mlp_bias": True, "vocab": gguf_files.VOCAB}
    model = make_checkpoint(tmp_path / "model", "llama", layers=1, **biases, **sizes)
    path = gguf_files.write_gguf(tmp_path / "model.gguf", model, kind)
    parts = load_parts(path, 2)
    check_parts(parts, model.state_dict())
    whole = load_model(path, load_network_config(path), torch.float32, CPU)
    assert torch.equal(torch.cat([embedding_of(part) for part in parts]), embedding_of(whole))
    assert len(embedding_of(whole)) == gguf_files.VOCAB
    assert torch.equal(torch.cat([q_bias(part) for part in parts]), q_bias(whole))


def embedding_of(model: CausalLM) -> Tensor:
    return model.embedding.weight.rows(torch.arange(sum(model.embedding.parts.values())))


def q_bias(model: CausalLM) -> Tensor:
    attention = attention_of(model)
    assert attention.input.bias is not None
    return attention.input.bias[: attention.q_size]


def test_ranks_with_placeholder_weights_agree_on_what_each_holds_whole(plain: Path, tmp_path: Path) -> None:
    path = quantize(plain, tmp_path / "gptq", "gptq-32-asymmetric")
    one, other = load_parts(path, 2, "dummy")
    norms = [part.layers[0].before_mlp for part in (one, other)]
    assert norms[0] is not None and norms[1] is not None
    assert torch.equal(norms[0].data, norms[1].data)
    assert not torch.equal(one.norm.data, norms[0].data)
    assert all(bool(matrix.any()) for matrix in matrices(other).values())


# ---- what is refused


def test_matrices_that_cannot_be_divided_are_refused(tmp_path: Path) -> None:
    for variant, sizes, num_ranks, expected in (
        (
            "gptq-128",
            THREE_HEADS,
            3,
            "the model's intermediate size is 256 in groups of 128, too little for every rank",
        ),
        ("gptq-128", {"head_dim": 48}, 2, "rank 0 would hold columns 0 to 191 of model.layers.0.self_attn.o_proj"),
        ("fp8", {"heads": 12, "kv_heads": 6}, 2, "rank 0 would hold rows 0 to 191 of model.layers.0.self_attn.q_proj"),
    ):
        path = tmp_path / f"{variant} {sizes}"
        make_checkpoint(path / "plain", **{**SIZES, **sizes})
        quantize(path / "plain", path / variant, variant)
        message = refusal(
            lambda path=path / variant, ranks=num_ranks: load_network_config(path).of_ranks(ranks), ConfigError
        )
        assert f"tensor_parallel_size={num_ranks}: " in message and expected in message
    assert message == refusal(lambda: LLM(path / variant, tensor_parallel_size=2, **RESIDENT), ConfigError)


def test_merged_projections_that_begin_within_a_block_are_refused(tmp_path: Path) -> None:
    """Each part could be divided in blocks of 128 rows, but up begins after 192 rows of gate."""
    method = read_quantization({"quant_method": "fp8", "weight_block_size": [128, 128]}, "float32", ())
    build = BuildContext(torch.float32, META, method, MetaRanks(0, 2)).at("model.layers.0.mlp")
    message = refusal(lambda: GatedMLP(128, 192, "silu", build, merged=True), ConfigError)
    assert "rank 0 would hold rows 0 to 127 and 192 to 319 of model.layers.0.mlp.gate_up_proj" in message


# ---- whole engines; `test_tensor_parallel.py` has two of them among the fast tests


def tokens(path: Path, num_ranks: int, **arguments: Any) -> list[list[int]]:
    with LLM(path, tensor_parallel_size=num_ranks, **{**RESIDENT, **arguments}) as llm:
        found = token_ids(llm, PROMPTS, greedy(10))
        assert token_ids(llm, PROMPTS, greedy(10)) == found  # from the prefix cache
        return found


FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"layers": 3, "mlp_only_layers": [1]},
    "mixtral": {"kv_heads": 1, "sliding_window": 24},
    "phi3": {"kv_heads": 1, "intermediate": 97},
    "gpt_oss": {"kv_heads": 4, "heads": 8, "intermediate": 100},
    "glm4_moe": {"kv_heads": 1, "layers": 3, "use_qk_norm": True},
    "minimax_m2": {"kv_heads": 1},
    "olmo3": {"sliding_window": 24, "layers": 4},
    "qwen3_5": {"layers": 4, "kv_heads": 1, "linear_num_value_heads": 6},
    "qwen3_5_moe": {},
    "qwen3_next": {"linear_num_key_heads": 4},
}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_families_give_the_tokens_of_transformers(family: str, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, family, **FAMILIES[family])
    expected = [greedy_reference(model, prompt, 10) for prompt in PROMPTS]
    assert tokens(tmp_path, 2, **offloaded(16, 4, 40, max_num_batched_tokens=23)) == expected


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["gptq-32-asymmetric", "awq-32", "pack-quantized-32", "fp8-channel"])
def test_quantized_experts_give_the_tokens_of_transformers(variant: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "plain", "qwen3_moe", hidden=128, intermediate=256, kv_heads=4, head_dim=32)
    path = quantize(tmp_path / "plain", tmp_path / "quantized", variant)
    check_parts(load_parts(path, 2), dequantized(path))
    model = AutoModelForCausalLM.from_pretrained(write_dequantized(path, tmp_path / "dequantized"))
    assert tokens(path, 2) == [greedy_reference(model.eval(), prompt, 10) for prompt in PROMPTS]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "variant"), [("qwen3_5", "awq-32"), ("qwen3_5_moe", "float-quantized"), ("qwen3_next", "gptq-64")]
)
def test_quantized_recurrent_layers_give_the_tokens_of_one_rank(family: str, variant: str, tmp_path: Path) -> None:
    sizes = {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "layers": 4, "hidden": 128, "intermediate": 384}
    make_checkpoint(tmp_path / "plain", family, **sizes)
    path = quantize(tmp_path / "plain", tmp_path / "quantized", variant)
    for part in load_parts(path, 2):
        assert part.network.weight_bytes == parameter_bytes(part) and part.layers[0].mixer.input.weight.dense is None
    assert tokens(path, 2, **offloaded(16, 4, 40, max_num_batched_tokens=23)) == tokens(path, 1)


# ---- adapters


class OtherRankFails(MetaRanks):
    """A rank beside one that has failed."""

    def all_reduce(self, x: Tensor) -> Tensor:
        x[:, 1] = 1.0
        return x


def test_an_adapter_that_one_rank_cannot_read_is_used_by_none(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model")
    request = make_adapter(tmp_path / "adapter", model)
    network = load_network_config(tmp_path / "model")
    config = EngineConfig(model=str(tmp_path / "model"), enable_lora=True, tensor_parallel_size=2)
    part = load_model(tmp_path / "model", network, torch.float32, CPU, group=OtherRankFails(0, 2))
    manager = LoRAManager(part, config)
    adapter = AdapterRegistry(part.network, 16).find(request)
    expected = "the adapter 'adapter' cannot be loaded: rank 1 cannot read it, and has logged why"
    assert manager.begin_step([adapter]) == {adapter.number: expected}
    assert not manager.on_device and manager.of_rows([(adapter.number, 3)]) == []
