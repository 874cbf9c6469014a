"""Quantized checkpoints in safetensors: weights to the bit, logits, memory, and what is refused by name."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import edit_config, make_checkpoint, refusal
from engines import greedy, offloaded, random_prompt, token_ids
from plans import parameter_bytes
from quantized_checkpoints import VARIANTS, dequantized, quantize, write_dequantized
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.quantize_checkpoint import quantization_config
from nanovllm import LLM, SamplingParams
from nanovllm.errors import ConfigError
from nanovllm.layers.linear import Linear
from nanovllm.layers.packed_matrix import StackedWeights
from nanovllm.models import hf_config
from nanovllm.models.decoder import Decoder
from nanovllm.models.hf_config import load_decoder_spec
from nanovllm.models.loader import load_model
from nanovllm.ops.packed_weights import dequantize
from nanovllm.planner.network import Network
from nanovllm.quantization import read_quantization
from nanovllm.quantization.packed_method import QuantizedWeight
from nanovllm.recall import expected_answer, make_document, make_prompt, notable_positions, write_recall_checkpoint

CPU = torch.device("cpu")
VOCAB = 199
# Log-probabilities of a quantized model differ from those of the dequantized one in plain numbers by the order of sums.
LOGPROB_BOUND = 2e-4
SMALL = {"device": "cpu", "kvcache_block_size": 16, "num_gpu_blocks": 40}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sizes that are multiples of 128 for q, o, gate, up and down, and not for k and v."""
    path = tmp_path_factory.mktemp("plain")
    make_checkpoint(path, hidden=128, intermediate=256, heads=8, kv_heads=4, vocab=VOCAB)
    return path


@pytest.fixture(scope="module")
def quantized(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The checkpoint in the form of a variant; written once, not to be changed."""
    folder = tmp_path_factory.mktemp("quantized")

    def of(variant: str) -> Path:
        path = folder / variant
        return path if path.exists() else quantize(plain, path, variant)

    return of


@pytest.fixture
def copy(quantized: Callable[[str], Path], plain: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A variant of its own for a test to change."""
    return lambda variant: quantize(plain, tmp_path / variant, variant)


def load(path: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    return load_model(path, load_decoder_spec(path), dtype, CPU)


def edit_tensors(path: Path, **changes: Any) -> None:
    """Replace tensors of the first layer's q projection by what a function makes of them; None removes one."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    for suffix, change in changes.items():
        name = f"model.layers.0.self_attn.q_proj.{suffix}"
        if change is None:
            del tensors[name]
        else:
            tensors[name] = change(tensors[name]).contiguous()
    save_file(tensors, file)


def set_quantization(path: Path, **changes: Any) -> None:
    """Set fields of the `quantization_config`; a value of `...` removes one."""
    config = json.loads((path / "config.json").read_text())["quantization_config"] | changes
    edit_config(path, quantization_config={name: value for name, value in config.items() if value is not ...})


def weight_of(linear: Linear) -> Tensor:
    """The fp32 matrix of a linear layer, in whatever form it is stored."""

    def matrix(weight: Any) -> Tensor:
        if isinstance(weight, StackedWeights):
            return torch.cat([matrix(part) for part in weight._weights])
        return dequantize(weight.packed) if isinstance(weight, QuantizedWeight) else weight.dense.float()

    return matrix(linear.weight)


# ---- values


@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_equal_the_published_formula_to_the_bit(variant: str, quantized: Callable[[str], Path]) -> None:
    path = quantized(variant)
    expected, decoder = dequantized(path), load(path)
    for layer in decoder.layers:
        for linear in layer.linears:
            assert linear.weight.dense is None
            rows = torch.cat([expected[f"{module}.weight"] for module in linear.parts])
            assert torch.equal(weight_of(linear), rows), linear.parts


@pytest.mark.slow
@pytest.mark.parametrize("variant", [variant for variant in VARIANTS if "quantized" in variant])
def test_weights_equal_those_of_the_package_compressed_tensors(variant: str, quantized: Callable[[str], Path]) -> None:
    reason = "pip install compressed-tensors loguru"
    package = pytest.importorskip("compressed_tensors.compressors", reason=reason)
    from compressed_tensors.quantization import QuantizationScheme

    path = quantized(variant)
    config = json.loads((path / "config.json").read_text())["quantization_config"]
    scheme = QuantizationScheme(**config["config_groups"]["group_0"])
    compressor = package.BaseCompressor.get_value_from_registry(config["format"])
    decoder, tensors = load(path), load_file(path / "model.safetensors")
    for linear in (each for layer in decoder.layers for each in layer.linears):
        rows = []
        for module in linear.parts:
            own = {name.removeprefix(f"{module}."): t for name, t in tensors.items() if name.startswith(f"{module}.")}
            own["weight_scale"] = own["weight_scale"].float()  # the package computes in the dtype of the scales
            rows.append(compressor.decompress(own, scheme)["weight"])
        assert torch.equal(weight_of(linear), torch.cat(rows)), linear.parts


@pytest.mark.parametrize("variant", VARIANTS)
def test_memory_is_counted_as_stored(variant: str, quantized: Callable[[str], Path]) -> None:
    path = quantized(variant)
    spec, decoder = load_decoder_spec(path), load(path)
    assert decoder.weight_bytes == parameter_bytes(decoder) == Network.of(spec, "float32").weight_bytes
    assert spec.num_layers * decoder.layer_weight_bytes == sum(
        slot.view.nbytes for layer in decoder.layers for _, slot in layer.slots()
    )
    assert {name for name, tensor in spec.tensors() if tensor.check is None} == {name for name, _ in decoder.slots()}
    assert pickle.loads(pickle.dumps(spec)) == spec


@pytest.mark.parametrize(
    ("variant", "bits"),
    [
        ("gptq-128", 4 + 16 / 128),
        ("gptq-32-asymmetric", 4 + (16 + 8) / 32),
        ("gptq-8-bits", 8 + 16 / 128),
        ("awq-128", 4 + (16 + 8) / 128),
    ],
)
def test_bits_of_a_weight(variant: str, bits: float, quantized: Callable[[str], Path]) -> None:
    spec = load_decoder_spec(quantized(variant))
    assert spec.layer_matrix_bytes(4) * 8 * spec.num_layers == spec.num_layer_matrices * bits


def prompt_logprobs(llm: LLM, prompt: list[int]) -> list[float]:
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    return [row[token].logprob for row, token in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)]


FEW = ("gptq-32-asymmetric", "awq-128", "pack-quantized-8-bits", "fp8")


@pytest.mark.parametrize("variant", [v if v in FEW else pytest.param(v, marks=pytest.mark.slow) for v in VARIANTS])
def test_logits_are_those_of_transformers_on_the_dequantized_weights(
    variant: str, quantized: Callable[[str], Path], tmp_path: Path
) -> None:
    path, prompt = quantized(variant), random_prompt(50, VOCAB, 1)
    model = AutoModelForCausalLM.from_pretrained(write_dequantized(path, tmp_path / "plain"), dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([prompt])).logits[0].double().log_softmax(-1)
    expected = logits[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:])]
    with LLM(path, **SMALL) as llm:
        found = prompt_logprobs(llm, prompt)
    assert (torch.tensor(found).double() - expected).abs().max() < LOGPROB_BOUND


@pytest.mark.parametrize("variant", ["gptq-64", "awq-128", "pack-quantized-asymmetric", "fp8"])
def test_the_last_group_may_be_shorter(variant: str, tmp_path: Path) -> None:
    """Groups of 64 or 128 and blocks of 128 in 96 inputs; 160 in the MLP."""
    make_checkpoint(tmp_path / "plain", hidden=96, intermediate=160, heads=4, kv_heads=2, head_dim=24, vocab=VOCAB)
    path = quantize(tmp_path / "plain", tmp_path / variant, variant)
    expected, decoder = dequantized(path), load(path)
    for linear in (each for layer in decoder.layers for each in layer.linears):
        rows = torch.cat([expected[f"{module}.weight"] for module in linear.parts])
        assert torch.equal(weight_of(linear), rows), linear.parts
        x = torch.randn(30, linear.in_features, generator=torch.Generator().manual_seed(1))
        torch.testing.assert_close(linear(x), x @ rows.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_dtypes_of_the_network(dtype: str, quantized: Callable[[str], Path]) -> None:
    prompt = random_prompt(40, VOCAB, 2)
    with LLM(quantized("gptq-128"), **SMALL) as llm:
        expected = prompt_logprobs(llm, prompt)
    with LLM(quantized("gptq-128"), dtype=dtype, **SMALL) as llm:
        found = prompt_logprobs(llm, prompt)
    assert torch.tensor(found).sub(torch.tensor(expected)).abs().mean() < 0.2


# ---- bits: batch, budget, chunk, prefix cache

ENGINES: dict[str, dict[str, Any]] = {
    "resident": {"num_gpu_blocks": 60},
    "chunks": {"num_gpu_blocks": 60, "max_num_batched_tokens": 48},
    "offloaded": offloaded(16, 6, 80),
    "offloaded, chunks": offloaded(16, 4, 80, max_num_batched_tokens=32),
}


@pytest.mark.parametrize("variant", ["gptq-32-asymmetric", "fp8"])
def test_bits_do_not_depend_on_batch_budget_or_chunk(variant: str, quantized: Callable[[str], Path]) -> None:
    prompts = [random_prompt(length, VOCAB, 3) for length in (150, 7, 40)]
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=3)

    def answers(llm: LLM, prompts: list[list[int]]) -> list[Any]:
        return [output.outputs[0].logprobs for output in llm.generate(prompts, params, use_tqdm=False)]

    found = []
    for arguments in ENGINES.values():
        with LLM(quantized(variant), device="cpu", **{"kvcache_block_size": 16, **arguments}) as llm:
            found.append(answers(llm, prompts))
            found.append([answer for prompt in prompts for answer in answers(llm, [prompt])])  # alone, and cached
    assert all(other == found[0] for other in found[1:])


# ---- the recall network


@pytest.mark.parametrize("variant", ["gptq-32-asymmetric", "fp8"])
def test_recall_with_an_eighth_of_the_kv_cache_on_the_device(variant: str, tmp_path: Path) -> None:
    """The network's numbers survive rounding, so that one wrong or stale row of KV gives a wrong word."""
    length, block, chunk, answer_len = 600, 16, 64, 3
    write_recall_checkpoint(tmp_path / "plain", length + 2, length + 4, seed=1, dtype="float32")
    path = quantize(tmp_path / "plain", tmp_path / variant, variant)
    document = make_document(length + 2, length, seed=2)
    positions = sorted({1, *notable_positions(length, answer_len, {"block": block, "chunk": chunk})})
    sizes = offloaded(block, 4, 100, max_model_len=length + 4, max_num_batched_tokens=chunk)
    with LLM(path, device="cpu", **sizes) as llm:
        answers = token_ids(llm, [make_prompt(document, position) for position in positions], greedy(answer_len))
        assert llm.kv_stats().transfers.h2d_copies > 0
    assert len(positions) > 50
    assert answers == [expected_answer(document, position, answer_len) for position in positions]


def test_a_mixture_of_experts(tmp_path: Path) -> None:
    """Every expert's matrices are quantized; the router is plain."""
    make_checkpoint(tmp_path / "plain", "qwen3_moe", vocab=VOCAB)
    path = quantize(tmp_path / "plain", tmp_path / "quantized", "gptq-32-asymmetric")
    decoder, prompts = load(path), [random_prompt(length, VOCAB, 5) for length in (30, 3)]
    assert all(weight.dense is None for weight in decoder.layers[0].mlp.weights())
    assert decoder.weight_bytes == parameter_bytes(decoder)
    with LLM(path, **SMALL) as llm, LLM(write_dequantized(path, tmp_path / "dequantized"), **SMALL) as reference:
        assert token_ids(llm, prompts, greedy(6)) == token_ids(reference, prompts, greedy(6))


# ---- modules that stay plain


def test_ignored_modules_stay_plain(plain: Path, copy: Callable[[str], Path]) -> None:
    """k of layer 0 between quantized q and v, and all of layer 1's MLP."""
    path = copy("pack-quantized-32")
    names = [*(f"model.layers.1.mlp.{name}_proj" for name in ("gate", "up", "down")), "model.layers.0.self_attn.k_proj"]
    tensors, source = load_file(path / "model.safetensors"), load_file(plain / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if name.rpartition(".")[0] not in names}
    save_file(kept | {f"{name}.weight": source[f"{name}.weight"] for name in names}, path / "model.safetensors")
    set_quantization(path, ignore=["lm_head", r"re:model\.layers\.1\.mlp\..*", names[-1]])
    decoder = load(path)
    assert isinstance(decoder.layers[0].qkv.weight, StackedWeights)
    assert decoder.layers[1].mlp.down.weight.dense is not None
    assert decoder.weight_bytes == parameter_bytes(decoder)
    expected = dequantized(path)
    for layer in decoder.layers:
        rows = torch.cat([expected[f"{module}.weight"] for module in layer.qkv.parts])
        x = torch.randn(5, 128)
        torch.testing.assert_close(layer.qkv(x), x @ rows.T, rtol=1e-5, atol=1e-5)
        indices = torch.tensor([0, 130, 200, 255, 3])
        assert torch.equal(layer.qkv.weight.rows(indices), rows[indices])


@pytest.mark.parametrize(
    ("variant", "field"),
    [("awq-32", "modules_to_not_convert"), ("fp8", "modules_to_not_convert"), ("fp8-channel", "ignored_layers")],
)
def test_lists_of_modules_that_were_not_converted(
    variant: str, field: str, plain: Path, copy: Callable[[str], Path]
) -> None:
    path = copy(variant)
    tensors, source = load_file(path / "model.safetensors"), load_file(plain / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if "layers.0.mlp" not in name and "o_proj" not in name}
    kept |= {name: source[name] for name in source if "layers.0.mlp" in name or "o_proj" in name}
    save_file(kept, path / "model.safetensors")
    set_quantization(path, **{field: ["lm_head", "model.layers.0.mlp", "o_proj"]})
    decoder = load(path)
    assert decoder.layers[0].mlp.gate_up.weight.dense is not None and decoder.layers[1].o.weight.dense is not None
    assert decoder.layers[1].mlp.gate_up.weight.dense is None


def test_a_quantized_output_projection(copy: Callable[[str], Path], tmp_path: Path) -> None:
    from benchmarks.quantize_checkpoint import quantized as parts_of

    path = copy("pack-quantized-32")
    tensors = load_file(path / "model.safetensors")
    head = tensors.pop("lm_head.weight").float()
    parts = dict(parts_of(head, "pack-quantized", 4, 32, True))
    save_file(
        tensors | {f"lm_head.{name}": part.contiguous() for name, part in parts.items()}, path / "model.safetensors"
    )
    set_quantization(path, ignore=[])
    decoder = load(path)
    assert isinstance(decoder.lm_head, QuantizedWeight) and decoder.weight_bytes == parameter_bytes(decoder)
    assert decoder.spec.head_bytes(4) == decoder.lm_head.packed.rows(slice(None)).nbytes
    with LLM(path, **SMALL) as llm, LLM(write_dequantized(path, tmp_path / "plain"), **SMALL) as reference:
        prompt = [random_prompt(20, VOCAB, 4)]
        assert token_ids(llm, prompt, greedy(4)) == token_ids(reference, prompt, greedy(4))


# ---- what is refused

REFUSED: list[tuple[str, dict[str, Any], list[str]]] = [
    ("gptq-128", {"quant_method": "bitsandbytes"}, ["'bitsandbytes'", "gptq, awq, compressed-tensors, fp8"]),
    ("gptq-128", {"quant_method": ...}, ["no quant_method"]),
    ("gptq-128", {"bits": 3}, ["bits=3", "4 or 8"]),
    ("gptq-128", {"bits": "4"}, ["bits='4'", "whole number"]),
    ("gptq-128", {"bits": ...}, ["bits"]),
    ("gptq-128", {"group_size": 20}, ["group_size=20", "32, 64 and 128"]),
    ("gptq-128", {"group_size": 0}, ["group_size=0"]),
    ("gptq-128", {"desc_act": True}, ["desc_act=True"]),
    ("gptq-128", {"dynamic": {"-:.*down.*": {}}}, ["dynamic"]),
    ("gptq-128", {"checkpoint_format": "marlin"}, ["checkpoint_format='marlin'", "'gptq_v2'"]),
    ("gptq-128", {"a_new_field": 1}, ["'a_new_field'"]),
    ("awq-128", {"version": "gemv"}, ["version='gemv'", "'gemm'"]),
    ("awq-128", {"zero_point": False}, ["zero_point=False"]),
    ("awq-128", {"modules_to_not_convert": [5]}, ["modules_to_not_convert"]),
    ("fp8", {"activation_scheme": "static"}, ["activation_scheme='static'", "'dynamic'"]),
    ("fp8", {"weight_block_size": [64, 128]}, ["weight_block_size=[64, 128]"]),
    ("fp8", {"fmt": "e5m2"}, ["fmt='e5m2'"]),
    ("float-quantized", {"format": "nvfp4-pack-quantized"}, ["nvfp4-pack-quantized", "pack-quantized"]),
    ("float-quantized", {"kv_cache_scheme": {"num_bits": 8}}, ["kv_cache_scheme"]),
    ("float-quantized", {"config_groups": {}}, ["0 groups"]),
    ("float-quantized", {"config_groups": {"a": 5}}, ["config_groups['a']=5"]),
    ("float-quantized", {"sparsity_config": {"format": "2:4"}}, ["sparsity_config"]),
    ("float-quantized", {"ignore": ["re:(a+)+$"]}, ["'re:(a+)+$'", "list the names"]),
    ("float-quantized", {"ignore": ["re:["]}, ["'re:['", "no regular expression"]),
]


@pytest.mark.parametrize(("variant", "changes", "says"), REFUSED, ids=str)
def test_other_configs_are_refused_by_name(
    variant: str, changes: dict[str, Any], says: list[str], copy: Callable[[str], Path]
) -> None:
    path = copy(variant)
    set_quantization(path, **changes)
    message = refusal(lambda: LLM(path, **SMALL))
    assert all(text in message for text in ["quantization_config", str(path), *says]), message
    assert message.count("\n") == 0


def group_128(**changes: Any) -> dict[str, Any]:
    return {"weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, **changes}}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (group_128(actorder="group"), "actorder='group'"),
        (group_128(num_bits=2), "num_bits=2"),
        (group_128(type="float"), "type='float'"),
        (group_128(strategy="tensor_group"), "'tensor_group'"),
        (group_128(strategy="channel"), "contradicts group_size=128"),
        ({"input_activations": {"num_bits": 8, "type": "int", "dynamic": True}}, "input_activations"),
        ({"output_activations": {"num_bits": 8}}, "output_activations"),
        ({"format": "int-quantized"}, "'int-quantized'"),
    ],
    ids=str,
)
def test_other_schemes_of_compressed_tensors_are_refused(
    changes: dict[str, Any], says: str, copy: Callable[[str], Path]
) -> None:
    path = copy("pack-quantized-32")
    config = json.loads((path / "config.json").read_text())["quantization_config"]
    set_quantization(path, config_groups={"group_0": config["config_groups"]["group_0"] | changes})
    assert says in refusal(lambda: load_decoder_spec(path))


def test_which_checkpoints_ask_for_inputs_in_fp8() -> None:
    """Those whose config says that activations are scaled as they come; their weights carry it to the products."""

    def ask(config: dict[str, Any], **changes: Any) -> bool:
        fields = {name: value for name, value in (config | changes).items() if value != ...}
        weight = read_quantization(fields, "bfloat16").create({"a": 128}, 128, torch.bfloat16, torch.device("meta"))
        assert isinstance(weight, QuantizedWeight)
        return weight.packed.fp8_inputs

    for variant in ("fp8", "fp8-tensor"):
        config = quantization_config(variant, 8, 128, True)
        assert ask(config) and not ask(config, activation_scheme=...)
    config = quantization_config("float-quantized", 8, 128, True)
    group = config["config_groups"]["group_0"]
    assert ask(config) and not ask(config, config_groups={"a": group | {"input_activations": None}})
    assert not ask(quantization_config("gptq", 4, 128, True))
    inputs = group["input_activations"] | {"num_bits": 4}
    message = refusal(lambda: ask(config, config_groups={"a": group | {"input_activations": inputs}}))
    assert "'num_bits': 4" in message and "float with 8 bits" in message


def test_without_the_side_a_quantized_checkpoint_is_refused(
    quantized: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf_config, "find_side", lambda module: None)
    message = refusal(lambda: load_decoder_spec(quantized("awq-32")))
    assert "quantization_config={" in message and "needs nanovllm.quantization" in message


Q_PROJ = "model.layers.0.self_attn.q_proj"
DAMAGED: list[tuple[str, dict[str, Any], list[str]]] = [
    ("gptq-128", {"qweight": None}, [f"{Q_PROJ}.qweight", "lacks tensors"]),
    ("gptq-128", {"scales": lambda t: t[:, :-1]}, [f"{Q_PROJ}.scales", "expected [1, 128]"]),
    ("gptq-128", {"qweight": lambda t: t.long()}, [f"{Q_PROJ}.qweight I64", "I32"]),
    ("gptq-128", {"g_idx": lambda t: t.flip(0) + 1}, [f"{Q_PROJ}.g_idx", "act-order"]),
    ("gptq-128", {"qzeros": lambda t: t + 1}, [f"{Q_PROJ}.qzeros", "sym=true"]),
    ("gptq-128", {"scales": lambda t: t.float() * 1.0001}, [f"{Q_PROJ}.scales", "does not fit into float16"]),
    ("fp8", {"weight": lambda t: torch.full_like(t, float("nan"))}, [f"{Q_PROJ}.weight", "NaN"]),
    ("fp8", {"weight_scale_inv": None}, [f"{Q_PROJ}.weight_scale_inv"]),
    ("pack-quantized-32", {"weight_shape": lambda t: t + 1}, [f"{Q_PROJ}.weight_shape", "[129, 129]"]),
]


@pytest.mark.parametrize(
    ("variant", "changes", "says"), DAMAGED, ids=[f"{variant}-{says[-1]}" for variant, _, says in DAMAGED]
)
def test_tensors_that_do_not_fit_are_named(
    variant: str, changes: dict[str, Any], says: list[str], copy: Callable[[str], Path]
) -> None:
    path = copy(variant)
    edit_tensors(path, **changes)
    message = refusal(lambda: load(path))
    assert all(text in message for text in [str(path), *says]), message


def test_sizes_that_the_format_cannot_have_are_refused_before_the_weights_are_read(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, intermediate=100)
    edit_config(tmp_path, quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 32})
    message = refusal(lambda: load_decoder_spec(tmp_path))
    assert "model.layers.0.mlp.gate_proj cannot be stored as gptq: out_features=100 must be a multiple of 8" in message


def test_scales_in_bfloat16_that_fit_are_read(copy: Callable[[str], Path]) -> None:
    path = copy("gptq-128")
    edit_tensors(path, scales=lambda t: t.bfloat16())
    tensors = load_file(path / "model.safetensors")
    assert tensors[f"{Q_PROJ}.scales"].dtype is torch.bfloat16
    assert torch.equal(weight_of(load(path).layers[0].qkv)[:128], dequantized(path)[f"{Q_PROJ}.weight"])


def test_group_order_may_be_left_out(copy: Callable[[str], Path]) -> None:
    path = copy("gptq-128")
    edit_tensors(path, g_idx=None)
    load(path)


def test_biases_of_zeros_that_the_network_does_not_have(copy: Callable[[str], Path]) -> None:
    """AutoGPTQ writes them for every matrix."""
    path = copy("gptq-128")
    tensors = load_file(path / "model.safetensors")
    zeros = {
        name.replace("qweight", "bias"): torch.zeros(t.shape[1]) for name, t in tensors.items() if "qweight" in name
    }
    save_file(tensors | zeros, path / "model.safetensors")
    load(path)
    name = next(iter(zeros))
    save_file(tensors | zeros | {name: torch.ones(128)}, path / "model.safetensors")
    assert f"{name} is not zero" in refusal(lambda: load(path))
    save_file(tensors | {"model.layers.0.other.bias": torch.zeros(3)}, path / "model.safetensors")
    assert "model.layers.0.other.bias" in refusal(lambda: load(path))


# What tools write, as far as it is not in `quantize_checkpoint`.
REAL = {
    "gptq-128": {
        "batch_size": 1, "block_name_to_quantize": None, "cache_block_outputs": True, "dataset": None,
        "exllama_config": {"version": 1}, "max_input_length": None, "model_seqlen": None,
        "module_name_preceding_first_block": None, "modules_in_block_to_quantize": None, "pad_token_id": None,
        "tokenizer": None, "use_cuda_fp16": False, "use_exllama": True, "static_groups": False, "pack_dtype": "int32",
        "meta": {"quantizer": ["gptqmodel:2.0.0"]}, "dynamic": None,
    },
    "awq-128": {"backend": "autoawq", "do_fuse": False, "exllama_config": None, "modules_to_fuse": None},
    "fp8": {"modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate", "model.layers.0.input_layernorm"]},
    "float-quantized": {
        "version": "0.9.1", "transform_config": {}, "sparsity_config": {
            "format": "dense", "global_sparsity": 0.1, "ignore": [], "registry_requires_subclass": False,
            "sparsity_structure": "unstructured", "targets": [],
        },
    },
}  # fmt: skip


@pytest.mark.parametrize("variant", REAL)
def test_fields_that_tools_write_are_known(variant: str, copy: Callable[[str], Path]) -> None:
    path = copy(variant)
    before = load_decoder_spec(path)
    set_quantization(path, **REAL[variant])
    forms = [
        [(name, tensor._replace(check=None)) for name, tensor in spec.tensors()]
        for spec in (before, load_decoder_spec(path))
    ]
    assert forms[0] == forms[1]


# ---- dummy weights, and the argument `quantization`


@pytest.mark.parametrize("variant", ["gptq-32-asymmetric", "gptq-8-bits", "fp8", "fp8-tensor"])
def test_dummy_weights_keep_sizes_near_one(variant: str, quantized: Callable[[str], Path]) -> None:
    spec = load_decoder_spec(quantized(variant))
    one, other = (load_model("", spec, torch.float32, CPU, "dummy", seed) for seed in (1, 2))
    for linear in (one.layers[0].mlp.gate_up, one.layers[1].mlp.down):
        assert weight_of(linear).std() * linear.in_features**0.5 == pytest.approx(1, rel=0.05)
    assert not torch.equal(weight_of(one.layers[0].qkv), weight_of(other.layers[0].qkv))
    assert torch.isfinite(weight_of(one.layers[0].qkv)).all()


def test_the_argument_quantization_must_name_the_checkpoints_method(
    quantized: Callable[[str], Path], plain: Path
) -> None:
    for name in ("gptq", "gptq_marlin", None):
        LLM(quantized("gptq-128"), quantization=name, **SMALL).close()
    message = refusal(lambda: LLM(quantized("gptq-128"), quantization="awq", **SMALL), ConfigError)
    assert "quantization='awq'" in message and "gptq" in message
    message = refusal(lambda: LLM(plain, quantization="fp8", **SMALL), ConfigError)
    assert "quantization='fp8'" in message and "not quantized" in message
